-- Let a task wait in line for a lock, or see that it still does. What its ticket says, `attempt|copy|vain`, is
-- which attempt of it waits; once that has begun, by which of its messages; and how often it was woken in vain.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 ticket, 6 permits, 7... the others (see acquire.lua)
-- ARGV  1 task id
--       2 attempt    number of the attempt that waits: retries, and a million for each replace() before it
--       3 copy       the message of the call that came too early; '' = its courier asks
--       4 since      microseconds: its place in the line
--       5 call       what it is woken with
--       6 remember   milliseconds for which all this is remembered
--       7 terms      as acquire.lua; '0' if they are not known
--       8 shared     '1' = other calls may have this task id (optional)
-- Returns {word, now us, lock value, record, place}; with several permits, of one of them: a free one if there is any
--       parked (it waited already) | new (it did not, or this message had started it) | handed (the lock is kept for it, or was and is nobody's)
--       stale (another message has started this attempt: its place is not changed) | more (as acquire.lua)
--       taken (another call with this task id waits: nothing is changed)

local task, attempt, copy, since, call = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local remember = tonumber(ARGV[6])
local function int(number) return string.format('%.0f', number) end
local function outlive(key)
  if redis.call('PTTL', key) < remember then redis.call('PEXPIRE', key, int(remember)) end
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local found = redis.call('MGET', KEYS[1], KEYS[2], unpack(KEYS, 6))
local highest = math.min(tonumber(string.match(found[3] or '', '^(%d+) %d+:?[%d/]*$') or 1), 100)
if highest > 1 + math.max(0, #KEYS - 6) / 2 then return {'more', int(highest)} end
redis.call('ZREM', KEYS[3], '') -- nothing: allowed when memory is full, and after a write SET and HSET are too
if KEYS[7] then
  local terms = ARGV[7] ~= '0' and ARGV[7] or terms_in(found[3])
  local limit = limit_of(terms)
  local permit = permit_for(found, 7, limit, now, function(_, _, of) return heir_in(of) == task and 1 end)
  outlive(KEYS[6])
  note_permits(KEYS[6], found[3], math.max(limit, permit.top), terms, remember)
end
local record = redis.call('GET', KEYS[2])
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local ticket = redis.call('GET', KEYS[5])
local function answer(word)
  local rank = redis.call('ZRANK', KEYS[3], task)
  return {word, int(now), value, record, int(rank and rank + 1 or 0)}
end

local vain, begun, waits, is_later = '0', false, false, false
if ticket then
  local t_attempt, t_copy, t_vain = string.match(ticket, '^(%d+)|(.*)|(%d+)$')
  local later = tonumber(t_attempt) - attempt
  begun, waits = later == 0 and t_copy ~= '', t_copy == '' -- or stale
  if later > 0 or later == 0 and t_copy ~= '' and t_copy ~= copy then
    -- Woken once, and never in vain, it has no message left that comes later than its broker delivers again.
    if later == 0 and copy == '' and t_vain == '0' and redis.call('PTTL', KEYS[5]) > remember then
      redis.call('PEXPIRE', KEYS[5], int(remember))
    end
    return answer('stale')
  end
  if later == 0 then vain = t_vain end
  is_later = later < 0 -- than the attempt that has stood in line, of which no message may start it any more
end
local kept = redis.call('HGET', KEYS[4], task) or ''
if ARGV[8] == '1' and not waits and string.match(kept, '^%d') then return answer('taken') end
local function keep()
  redis.call('HSET', KEYS[4], task, vain .. '|' .. since .. '|' .. call)
  outlive(KEYS[4])
end
vain = string.match(kept, '^%d+') or vain
outlive(KEYS[3]) -- before they are written too: a server that forbids this leaves nothing behind for ever
outlive(KEYS[4])
redis.call('SET', KEYS[5], int(attempt) .. '||' .. vain, 'PX', int(remember))
local deadline, heir = string.match(record or '', '^[^\n]*\n(%d+)\n%d+\nhanded\n%d+\n(.*)$')
-- An attempt before it may have left with its place: it has its turn all the same. But its courier puts it back then.
local is_heir = value and heir == task and (kept ~= '' or copy ~= '')
-- Past that, too, while nobody else has it: one that was not woken would be passed over as if it had been.
if is_heir and (copy == '' or now < tonumber(deadline) or value == int(math.ceil(tonumber(deadline) / 1000000))) then
  if is_later or not string.match(kept, '^%d') then keep() end -- it was to ask again, and may die before it does
  return answer('handed')
end
if copy ~= '' or not string.match(kept, '^%d') or is_later or not redis.call('ZSCORE', KEYS[3], task) then
  keep()
  redis.call('ZADD', KEYS[3], since, task)
  outlive(KEYS[3])
end
return answer(ticket and not begun and 'parked' or 'new')
