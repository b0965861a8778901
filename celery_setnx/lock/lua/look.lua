-- Look at a lock, and at the first of those who wait for it, without touching it.
--
-- KEYS  1 lock, 2 record (see acquire.lua); and for a task's lock 3 line
-- ARGV  none
-- Returns {now us, lock value, record, waiters, task id, since us, task id, since us...}: the first hundred

local time = redis.call('TIME')
local now = string.format('%.0f', tonumber(time[1]) * 1000000 + tonumber(time[2]))
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local found = {now, value, redis.call('GET', KEYS[2]), '0'}
if KEYS[3] then
  local last = '(4000000000000000' -- behind it are those that are passed over
  found[4] = string.format('%.0f', redis.call('ZCOUNT', KEYS[3], '-inf', last))
  local first = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', last, 'WITHSCORES', 'LIMIT', 0, 100)
  for _, item in ipairs(first) do found[#found + 1] = item end
end
return found
