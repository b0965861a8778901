-- Let a task wait in line for a lock, or see that it still does. What its ticket says, `attempt|copy`, is which
-- attempt of it waits, and, once that has begun, by which of its messages.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 ticket (see acquire.lua)
-- ARGV  1 task id
--       2 attempt    number of the attempt that waits: retries, and a million for each replace() before it
--       3 copy       the message of the call that came too early; '' = its courier asks
--       4 since      microseconds: its place in the line
--       5 call       what it is woken with
--       6 remember   milliseconds for which all this is remembered
--       7 watch      microseconds for which its courier may be the one that watches the lock for the whole line;
--                    '0' = it does not ask for that
-- Returns {word, now us, lock value, record, place, watcher}
--       parked (it waited already) | new (it did not) | handed (the lock is kept for it: it has been woken)
--       stale (another message has started this attempt: its place is not changed)
--       watcher: '1' = its courier watches, as no other does; also when it is stale and others wait; else '0'

local task, attempt, copy, since, call = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local remember, watch = tonumber(ARGV[6]), tonumber(ARGV[7])
local function int(number) return string.format('%.0f', number) end
local function outlive(key)
  if redis.call('PTTL', key) < remember then redis.call('PEXPIRE', key, int(remember)) end
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[2])
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local ticket = redis.call('GET', KEYS[5])
local function answer(word)
  local rank, watcher = redis.call('ZRANK', KEYS[3], task), false
  if watch > 0 and redis.call('ZCARD', KEYS[3]) > 0 then
    local till, other = string.match(redis.call('HGET', KEYS[4], '') or '', '^(%d+) (.*)$')
    watcher = not till or other == task or now >= tonumber(till)
    if watcher then
      redis.call('HSET', KEYS[4], '', int(now + watch) .. ' ' .. task)
      outlive(KEYS[4])
    end
  end
  return {word, int(now), value, record, int(rank and rank + 1 or 0), watcher and '1' or '0'}
end

if ticket then
  local t_attempt, t_copy = string.match(ticket, '^(%d+)|(.*)$')
  local later = tonumber(t_attempt) - attempt
  if later > 0 or later == 0 and t_copy ~= '' and t_copy ~= copy then return answer('stale') end
end
outlive(KEYS[3]) -- before they are written too: a server that forbids this leaves nothing behind for ever
outlive(KEYS[4])
redis.call('SET', KEYS[5], int(attempt) .. '|', 'PX', int(remember))
local deadline, heir = string.match(record or '', '^[^\n]*\n(%d+)\n%d+\nhanded\n%d+\n(.*)$')
if value and heir == task and now < tonumber(deadline) then return answer('handed') end
redis.call('HSET', KEYS[4], task, call)
outlive(KEYS[4])
redis.call('ZADD', KEYS[3], since, task)
outlive(KEYS[3])
return answer(ticket and 'parked' or 'new')
