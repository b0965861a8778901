-- Reserve the generation of a call that is about to be sent, unless it equals the newest one that was sent.
--
-- KEYS  1 newest (see newest.lua)
-- ARGV  1 digest of all the call's arguments ('' = not known), 2 remember (ms)
--       3 debounce (us; 0 = none), 4 debounce_max (us)
--       5 leading: '1' = the first call of a quiet key waits for nothing
--       6 lease (ms): for how long, since the newest was sent or parked, an equal call is a duplicate
-- Returns {word, generation, task id, wait us, due us}: of an equal call its generation and its id; for how long this
--       one is to wait before it may start
--       reserved | leading (it may start at once, and only a newer start supersedes it)
--       queued (an equal call is the newest, and has not started)

-- use: lock newest
local digest, remember, debounce = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local newest = newest_of(redis.call('MGET', KEYS[1])[1])
local is_pending, is_alone = newest.settled > newest.started, newest.reserved <= newest.settled
if debounce == 0 and is_pending and is_alone and digest ~= '' and newest.digest == digest then
  local is_known = redis.call('PTTL', KEYS[1]) > remember - tonumber(ARGV[6])
  if is_known then return {'queued', int(newest.settled), newest.task, '0', '0'} end
end
local due, leads = newest.due_for(debounce, tonumber(ARGV[4]), ARGV[5] == '1')
newest.reserved = math.max(newest.reserved, newest.settled, newest.started, now - 1) + 1
newest.last = now
newest.store(KEYS[1], remember)
return {leads and 'leading' or 'reserved', int(newest.reserved), '', int(due - now), int(due)}
