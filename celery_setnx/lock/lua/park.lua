-- Let a task wait in line for a lock, or see that it still does.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 ticket, 6 permits, 7 newest, 8 terms, 9... the other permits' locks and
--       records
-- ARGV  1 task id, 2 attempt (retries, and a million for each replace() before it)
--       3 copy: the message of the call that came too early; '' = its courier asks
--       4 since (us: its place in the line), 5 call (what it is woken with), 6 remember (ms)
--       7 terms (see terms.lua), 8 shared (as acquire.lua)
--       9 generation ('0' = none): if an older call waits, they change places, and that one is to be woken: it ends
--       10 alone: '1' = it waits only where no other does
-- Returns {word, now us, lock value, record, place, older}: of the permit that is kept for it, or of a free one, or of
--       the one that ends first; and the older call's task id
--       parked (it waited already) | new (it did not, or this message had started it) | more
--       handed (the lock is kept for it, or was and is nobody's) | stale (another message has started this attempt)
--       taken (another call with this task id waits) | crowded (another call waits, and its courier need not come)
--       superseded (a newer call runs instead)

-- use: lock permits terms ticket line newest supersede
local task, attempt, copy, since, call = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], ARGV[5]
local remember, shared, generation, older = tonumber(ARGV[6]), ARGV[8] == '1', tonumber(ARGV[9] or 0), false
local LINE, CALLS, TICKET, PERMITS, NEWEST, TERMS = unpack(KEYS, 3, 8)
local known, of_key = unpack(redis.call('MGET', PERMITS, TERMS))
local own, terms = terms_of(ARGV[7] or '0', known, of_key)
if more(known, 9, terms) then return more(known, 9, terms) end
redis.call('ZREM', LINE, '') -- nothing: a full server allows this, and SET and HSET behind it
local seen = by_kind(permits(9), limit_of(terms), function(p) return p.heir == task and 'for it' end)
local p = seen['for it'] or seen.free or seen.held
note_permits(PERMITS, known, seen.top, own, remember)
local function answer(word)
  local rank = redis.call('ZRANK', LINE, task)
  return {word, now_text(), p.value or false, record_of(p), int(rank and rank + 1 or 0), older}
end

local ticket = read_ticket(redis.call('GET', TICKET), attempt, copy)
if ticket.is_stale then
  -- Woken once, and never missed its turn, it has no message left that comes later than its broker delivers again.
  local is_last = ticket.is_this and copy == '' and ticket.misses == '0'
  if is_last and redis.call('PTTL', TICKET) > remember then redis.call('PEXPIRE', TICKET, int(remember)) end
  return answer('stale')
end
if shared and not ticket.waits and is_known(CALLS, task) then return answer('taken') end
if ARGV[10] == '1' and not redis.call('ZSCORE', LINE, task) and count_waiting(LINE) > 0 then
  write_ticket(TICKET, attempt, copy, '0', 'PX', remember)
  return answer('crowded')
end
local newest = counts(generation) and newest_of(redis.call('MGET', NEWEST)[1])
if newest and math.max(newest.settled, newest.started) > generation then return answer('superseded') end
local kept = redis.call('HGET', CALLS, task) or ''
local misses = string.match(kept, '^%d+') or ticket.misses
-- Of an earlier attempt no message may start this one; and who was to ask again by itself may die before it does.
local is_new = ticket.is_earlier or not string.match(kept, '^%d')
local function keep()
  redis.call('HSET', CALLS, task, misses .. '|' .. since .. '|' .. call)
  keep_for(CALLS, remember)
end
keep_for(LINE, remember) -- before they are written, too: a server that forbids this leaves nothing behind for ever
keep_for(CALLS, remember)
write_ticket(TICKET, attempt, '', misses, 'PX', remember)
-- An attempt before it may have left with its place: it has its turn all the same. But its courier puts it back then.
-- Past the deadline, too, while nobody else has it: one that was not woken would be passed over as if it had been.
if p.value and p.heir == task and (copy == '' and kept ~= '' or copy ~= '' and p.is_ours) then
  if is_new then keep() end
  return answer('handed')
end
if newest then
  newest.settle(generation, task) -- what acquire has noted of it may be lost since
  older, since = change_places(newest, generation, task, since, LINE, CALLS)
  newest.store(NEWEST, remember)
end
if copy ~= '' or is_new or not redis.call('ZSCORE', LINE, task) then
  keep()
  redis.call('ZADD', LINE, since, task)
  keep_for(LINE, remember)
end
return answer(ticket.is_there and (ticket.waits or not ticket.is_this) and 'parked' or 'new')
