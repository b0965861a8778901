-- Drop a lock by hand, whoever holds it, if it is still what was shown.
--
-- KEYS  1 lock, 2 record
-- ARGV  1 value, 2 record, both as shown; '' = there was no record
-- Returns {word}
--       dropped | changed (it is another by now, or gone: nothing is touched)

local value, record = ARGV[1], ARGV[2]

if redis.pcall('GET', KEYS[1]) ~= value then return {'changed'} end
if (redis.call('GET', KEYS[2]) or '') ~= record then return {'changed'} end
redis.call('DEL', KEYS[1], KEYS[2])
return {'dropped'}
