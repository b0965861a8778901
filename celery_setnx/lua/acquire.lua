-- Acquire a lock, or take it over once its deadline has passed or its holder is proved dead.
--
-- KEYS  1 lock     Unix second at which it stops being valid, as in the SETNX recipe
--       2 record   token, deadline, fence, state, since (us), info: one per line
--       and for a task's lock
--       3 line     sorted set: ids of the tasks that wait for it, by the time (us) since which they do
--       4 calls    hash: what each of them is woken with, by task id, or `@` and the time (us) until which it
--                  asks again by itself; by '' who watches the lock (see park.lua)
--       5 mark     id of the task that is queued with this key; its own ends here
--       6 ticket   of the caller's task (see park.lua); none for a caller that is no task
-- ARGV  1 token       proof of being the holder, new for every attempt; a task's is id|retries|nonce
--       2 lease       microseconds
--       3 retention   milliseconds that both keys outlive the deadline
--       4 info        opaque text that names the holder
--       5 dead token  '' or the token of a running holder whose process is proved dead
--       6 copy        which of a call's messages this is: only one of them may start it
--       7 remember    milliseconds for which that is remembered; '0' = as long as the ticket, if there is one
--       8 linger      microseconds for which, if the lock is held, the task stands in line to ask again; '0' = not
--       9 since       microseconds since which the task waits: its place in the line; '0' = since now
--      10 attempt     number of the task's attempt, as tickets have it
-- Returns {word, deadline us, fence, now us, lock value, record, mark, waiters}: what was found, if anything
--       acquired (also if it was handed to this task) | again (this token holds it already)
--       resumed (held for this task's retry) | taken_over
--       held | stale (another message has started this call: nothing is changed)

local token, lease, retention, info, dead = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local copy, remember, linger, attempt = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[10])
local task, retries = string.match(token, '^(.*)|(%d+)|%x+$')
local function int(number) return string.format('%.0f', number) end
local function outlive(key)
  if redis.call('PTTL', key) < 60000 then redis.call('PEXPIRE', key, 60000) end
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[2])
local mark = KEYS[5] and redis.pcall('GET', KEYS[5])
if type(mark) ~= 'string' then mark = false end
local ticket = KEYS[6] and redis.call('GET', KEYS[6])
local waiters = KEYS[3] and redis.pcall('ZCARD', KEYS[3])
waiters = int(type(waiters) == 'number' and waiters or 0)
local h_token, h_deadline, h_fence, h_state, h_info = '', 0, 0, '', ''
if record then
  local t, d, f, s, i = string.match(record, '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n%d+\n(.*)$')
  if not t or #d > 17 or #f > 17 then
    return redis.error_reply('FOREIGNRECORD ' .. KEYS[2] .. ' is no record of celery_setnx')
  end
  h_token, h_deadline, h_fence, h_state, h_info = t, tonumber(d), tonumber(f), s, i
end
local heir, woken = h_state == 'handed' and h_info, false
if ticket then
  local t_attempt, t_copy = string.match(ticket, '^(%d+)|(.*)$')
  local later = tonumber(t_attempt) - attempt
  if later > 0 or later == 0 and t_copy ~= '' and t_copy ~= copy then
    return {'stale', int(h_deadline), int(h_fence), int(now), false, record, mark, waiters}
  end
  woken = t_copy == '' and copy ~= '-'
end

-- What an unexpired record lets this token do.
local function allows()
  if h_token == token and h_state == 'running' then return 'again' end
  if dead ~= '' and h_token == dead and h_state == 'running' then return 'taken_over' end
  -- Nobody runs under a lock that is handed. Two that are woken late would wait for each other for ever.
  if heir and (task == heir or woken) then return 'acquired' end
  local h_task, h_retries = string.match(h_token, '^(.*)|(%d+)|%x+$')
  if not task or task ~= h_task then return 'held' end
  if h_state == 'resting' then return 'acquired' end
  if h_state == 'held_for_retry' and tonumber(retries) > tonumber(h_retries) then return 'resumed' end
  return 'held'
end

local deadline = now + lease
local value = int(math.ceil(deadline / 1000000))
local word, old, fence = 'acquired', false, math.max(h_fence + 1, now)
if redis.call('SETNX', KEYS[1], value) == 0 then
  old = redis.pcall('GET', KEYS[1])
  if type(old) ~= 'string' then old = '(not a string)' end
  local function held(till)
    if linger > 0 then
      redis.call('HSET', KEYS[4], task, '@' .. int(now + linger))
      outlive(KEYS[4])
      redis.call('ZADD', KEYS[3], ARGV[9] == '0' and int(now) or ARGV[9], task)
      outlive(KEYS[3])
    end
    return {'held', int(till), int(h_fence), int(now), old, record, mark, waiters}
  end
  if not string.match(old, '^%d+%.?%d*$') then return held(0) end
  if now < h_deadline then
    -- Unexpired, the record decides: a classic loser may have overwritten the value.
    word = allows()
    if word == 'held' then return held(h_deadline) end
    if word == 'again' then return {word, int(h_deadline), int(h_fence), int(now), old, record, mark, waiters} end
    if word == 'resumed' then fence = h_fence end
  elseif h_deadline > 0 and old == int(math.ceil(h_deadline / 1000000)) then
    if h_state ~= 'resting' and not heir and h_token ~= token then word = 'taken_over' end
  else
    local till = (math.min(tonumber(old), 1e11) + 1) * 1000000 -- the recipe takes over after its second
    if now < till then return held(till) end
    word = 'taken_over'
  end
  old = redis.call('GETSET', KEYS[1], value)
end

local expiry = int(math.ceil(deadline / 1000) + retention)
local expires = redis.pcall('PEXPIREAT', KEYS[1], expiry)
if type(expires) == 'table' then -- forbidden: what was free or expired is free again, not there for ever
  redis.call('DEL', KEYS[1])
  return expires
end
local fields = {token, int(deadline), int(fence), 'running', int(now), info}
redis.call('SET', KEYS[2], table.concat(fields, '\n'), 'PXAT', expiry)
if mark and mark == task then redis.call('DEL', KEYS[5]) end
if heir and task ~= heir and now < h_deadline and redis.call('HGET', KEYS[4], heir) then
  redis.call('ZADD', KEYS[3], ARGV[9], heir) -- overtaken, it is among the first in line again
  outlive(KEYS[3])
end
if task and (ticket or task == heir or waiters ~= '0') then -- it waits no more
  redis.call('ZREM', KEYS[3], task)
  redis.call('HDEL', KEYS[4], task)
end
if ticket or KEYS[6] and remember > 0 then
  redis.call('SET', KEYS[6], int(attempt) .. '|' .. copy, unpack(ticket and {'KEEPTTL'} or {'PX', int(remember)}))
end
return {word, int(deadline), int(fence), int(now), old, record, mark, waiters}
