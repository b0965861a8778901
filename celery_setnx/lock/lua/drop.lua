-- Note that a call ends without a start: it counts as started. Or have what is known of it last, as it waits still.
--
-- KEYS  1 newest (see newest.lua)
-- ARGV  1 generation, 2 task id, 3 last (ms from now, at least; '' = it ends)
-- Returns {word}
--       done | changed (it has started, or a newer one has; or nothing is known: nothing is touched)

-- use: lock newest
local generation, last = tonumber(ARGV[1]), tonumber(ARGV[3] or nil)
local text = redis.call('MGET', KEYS[1])[1]
local newest = newest_of(text)
if not text or not counts(generation) or generation <= newest.started then return {'changed'} end
if last then
  keep_for(KEYS[1], last)
  return {'done'}
end
newest.start(generation, ARGV[2])
redis.call('PEXPIRE', KEYS[1], math.max(1, redis.call('PTTL', KEYS[1]))) -- a full server allows this, and SET behind it
newest.store(KEYS[1], 1)
return {'done'}
