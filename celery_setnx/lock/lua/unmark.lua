-- Free a mark whose call will not start; or forget by hand that a task has succeeded: then the run's token stands for
-- the task id.
--
-- KEYS  1 mark, or done
-- ARGV  1 task id
-- Returns {word}
--       freed | lost (it has lapsed, its call has started, or it is another's)

local task_id = ARGV[1]

if redis.call('GET', KEYS[1]) ~= task_id then return {'lost'} end
redis.call('DEL', KEYS[1])
return {'freed'}
