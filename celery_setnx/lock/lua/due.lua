-- Note when somebody should look at a line, for the workers that sweep.
--
-- KEYS  1 lines: sorted set, of one task, of the locks that its calls wait for, by the time (us) to look at their lines
--       2 epoch: what tells these data from those before they were lost; left out if nobody asks
-- ARGV  1 entry (the lock), 2 within (us from now), 3 remember (ms), 4 epoch (if these data have none)
-- Returns {epoch, us until somebody should look; '' if that was noted before: only who brings it forward has to come}

-- use: lock
local entry, within, remember, epoch = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
-- Nobody has the task, for longer than its calls are remembered. (Allowed when memory is full, and after a write
-- ZADD is too.)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '0', int(now - remember * 1000))
local due, known = now + within, tonumber(redis.call('ZSCORE', KEYS[1], entry) or nil)
local look = (not known or due < known) and int(within) or ''
-- Never as it was: who has looked meanwhile sees that it is not to be forgotten.
if known then due = math.min(due, known - 1) end
redis.call('PEXPIRE', KEYS[1], ARGV[3]) -- before it is written, too: where it is forbidden nothing stays for ever
redis.call('ZADD', KEYS[1], int(due), entry)
redis.call('PEXPIRE', KEYS[1], remember)
if not KEYS[2] then return {'', look} end
if redis.call('PEXPIRE', KEYS[2], remember) == 0 then redis.call('SET', KEYS[2], epoch, 'PX', remember) end
return {redis.call('GET', KEYS[2]), look}
