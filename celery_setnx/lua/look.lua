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
  found[4] = string.format('%.0f', redis.call('ZCARD', KEYS[3]))
  for _, item in ipairs(redis.call('ZRANGE', KEYS[3], 0, 99, 'WITHSCORES')) do found[#found + 1] = item end
end
return found
