-- Leave the line: the task was revoked, has expired, or need not run. No other message of it starts it any more.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 ticket, 6 permits, 7... the others (see acquire.lua and park.lua)
-- ARGV  1 task id
--       2 attempt    number of the attempt that leaves (see park.lua)
--       3 copy       the message that leaves
--       4 remember   milliseconds for which it is remembered
--       5 shared     '1' = other calls may have this task id, and have its place if this one does not wait (optional)
-- Returns {word}
--       left | handed (the lock is kept for it: serve.lua passes it on)
--       stale (another message has started this attempt: nothing is changed) | more (as acquire.lua)

local task, attempt, copy, remember = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

local function int(number) return string.format('%.0f', number) end

local found = redis.call('MGET', KEYS[1], KEYS[2], unpack(KEYS, 6))
local highest = math.min(tonumber(string.match(found[3] or '', '^(%d+) %d+:?[%d/]*$') or 1), 100)
if highest > 1 + math.max(0, #KEYS - 6) / 2 then return {'more', int(highest)} end
if KEYS[7] then permit_for(found, 7, 1, 0, function(_, _, of) return heir_in(of) == task and 1 end) end
local ticket = redis.call('GET', KEYS[5])
local vain, waits = '0', false
if ticket then
  local t_attempt, t_copy, t_vain = string.match(ticket, '^(%d+)|(.*)|(%d+)$')
  local later = tonumber(t_attempt) - attempt
  if later > 0 or later == 0 and t_copy ~= '' and t_copy ~= copy then return {'stale'} end
  if later == 0 then vain = t_vain end
  waits = t_copy == ''
end
local kept = redis.call('HGET', KEYS[4], task) or ''
local is_anothers = ARGV[5] == '1' and not waits and string.match(kept, '^%d')
if not is_anothers then vain = string.match(kept, '^%d+') or vain end
redis.call('ZREM', KEYS[3], is_anothers and '' or task) -- allowed when memory is full, and after a write SET is too
redis.call('HDEL', KEYS[4], is_anothers and '' or task)
redis.call('SET', KEYS[5], int(attempt) .. '|' .. copy .. '|' .. vain, 'PX', int(remember))
local heir = string.match(redis.call('GET', KEYS[2]) or '', '^[^\n]*\n%d+\n%d+\nhanded\n%d+\n(.*)$')
return {redis.call('EXISTS', KEYS[1]) > 0 and heir == task and not is_anothers and 'handed' or 'left'}
