-- Mark a key as queued, unless a call with this key is queued (or running, or has succeeded) already.
--
-- KEYS  1 lock, 2 record (see acquire.lua)
--       3 mark     id of the task that is queued with this key
--       4 line     (see acquire.lua)
--       5 done     token of the task that has succeeded with this key, while that counts (see release.lua)
--       6... the other permits' locks
-- ARGV  1 task id
--       2 lease    milliseconds
--       3 dedupe   until_started | until_done: a task that runs, or whose lock is held for its retry, counts too |
--                  dedupe_for: as until_done, and so does one that has succeeded
-- Returns {word, task id, now us, lock value, record}
--       marked (also if this task's own mark is there: the call was sent again)
--       queued (the mark is another task's) | running (the record is) | done (that is another task's)
--       stalled (queued, but calls wait in line for a lock that nobody living has: serve.lua lets them go on)

local task_id, lease, dedupe = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local mark = redis.call('GET', KEYS[3])
local queued = mark and mark ~= task_id
if queued and redis.call('EXISTS', KEYS[4]) == 0 then return {'queued', mark, int(now), false, false} end
if queued or dedupe ~= 'until_started' then
  local record = redis.call('GET', KEYS[2])
  local value = redis.pcall('GET', KEYS[1])
  local token, deadline, state = string.match(record or '', '^([^\n]*)\n(%d+)\n%d+\n([%l_]+)\n%d+\n')
  if queued then
    local stalled = not value or now >= tonumber(deadline or 0)
    for place = 6, #KEYS do
      local other = redis.pcall('GET', KEYS[place])
      stalled = stalled or not other or now >= (tonumber(other) or 1e17) * 1000000
    end
    return {stalled and 'stalled' or 'queued', mark, int(now), false, false}
  end
  local holder = string.match(token or '', '^(.*)|%d+|%x+$')
  if holder and value and now < tonumber(deadline) and (state == 'running' or state == 'held_for_retry') then
    return {'running', holder, int(now), type(value) == 'string' and value or '(not a string)', record}
  end
end
local done = dedupe == 'dedupe_for' and redis.call('GET', KEYS[5])
done = done and (string.match(done, '^(.*)|%d+|%x+$') or done)
if done and done ~= task_id then return {'done', done, int(now), false, false} end
-- Our own mark is there if this was sent twice; it may last for longer by now.
if redis.call('PTTL', KEYS[3]) < lease then redis.call('SET', KEYS[3], task_id, 'PX', int(lease)) end
return {'marked', task_id, int(now), false, false}
