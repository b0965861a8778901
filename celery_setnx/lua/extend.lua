-- Let a mark last: its call is on its way, or goes on waiting.
--
-- KEYS  1 mark (see mark.lua)
-- ARGV  1 task id
--       2 lease    milliseconds from now
-- Returns {word}
--       extended
--       lost (it has lapsed, its call has started, or it is another's: nothing is changed)

local task_id, lease = ARGV[1], tonumber(ARGV[2])

if redis.call('GET', KEYS[1]) ~= task_id then return {'lost'} end
redis.call('PEXPIRE', KEYS[1], string.format('%.0f', lease))
return {'extended'}
