-- Note when somebody should look at a line, for the workers that sweep (see sweep.lua).
--
-- KEYS  1 lines     sorted set: tasks with a lock that their calls wait for, `task\nlock`, by the time (us) at which
--                   to look at its line; by '' what tells these data from those that were there before they were
--                   lost: the epoch, below 0
-- ARGV  1 entry     task and lock
--       2 within    microseconds from now at which to look at the latest
--       3 remember  milliseconds for which all this is remembered
--       4 epoch     of these data, if they have none
-- Returns {epoch}

local entry, within, remember, epoch = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local due = tonumber(time[1]) * 1000000 + tonumber(time[2]) + within
local known = redis.call('ZSCORE', KEYS[1], entry)
-- Never as it was: who has looked meanwhile sees that it is not to be forgotten.
if known then due = math.min(due, tonumber(known) - 1) end
redis.call('ZADD', KEYS[1], int(due), entry)
redis.call('ZADD', KEYS[1], 'NX', '-' .. epoch, '')
redis.call('PEXPIRE', KEYS[1], remember)
return {string.sub(redis.call('ZSCORE', KEYS[1], ''), 2)}
