-- Let a mark last: its call is on its way, or goes on waiting. Never shorter than it lasts already: the call may have
-- run meanwhile, and have marked its key again for its retry.
--
-- KEYS  1 mark
-- ARGV  1 task id, 2 lease (ms from now)
-- Returns {word}
--       extended | lost (it has lapsed, its call has started, or it is another's)

local task_id, lease = ARGV[1], tonumber(ARGV[2])

if redis.call('GET', KEYS[1]) ~= task_id then return {'lost'} end
if redis.call('PTTL', KEYS[1]) < lease then redis.call('PEXPIRE', KEYS[1], lease) end
return {'extended'}
