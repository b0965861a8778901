-- Have a call that was sent replace those before it. Asked again, or late, it changes nothing.
--
-- KEYS  1 newest (see newest.lua)
-- ARGV  1 generation, 2 task id, 3 digest (as reserve.lua), 4 due (us), 5 remember (ms)
-- Returns {word}
--       settled | started (this call has started, or a newer one has, as far as that is known)

-- use: lock newest
local generation = tonumber(ARGV[1])
local text = redis.call('MGET', KEYS[1])[1]
local newest = newest_of(text)
-- Without what it has reserved, data were lost: it may have started. If not, its delivery settles it.
if not text or not counts(generation) or generation <= newest.started then return {'started'} end
newest.settle(generation, ARGV[2], ARGV[3], tonumber(ARGV[4]))
newest.store(KEYS[1], tonumber(ARGV[5]))
return {'settled'}
