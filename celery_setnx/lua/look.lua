-- Look at a lock without touching it.
--
-- KEYS  1 lock, 2 record (see acquire.lua)
-- ARGV  none
-- Returns {now us, lock value, record}

local time = redis.call('TIME')
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
return {string.format('%.0f', tonumber(time[1]) * 1000000 + tonumber(time[2])), value, redis.call('GET', KEYS[2])}
