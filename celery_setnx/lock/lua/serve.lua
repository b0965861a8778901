-- Let a line go on: hand the lock to the first who waits, if it is free, or its holder is proved dead. A call to which
-- it was handed, and which did not come, is passed over (see line.lua).
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 permits, 6 starts, 7 terms, 8... the other permits' locks and records
-- ARGV  1 token (new for every service: the lock's while it is kept), 2 hand over (us for which it is kept),
--       3 remember (ms that both keys outlive that), 4 lease (us), 5 dead token (as acquire.lua)
--       6 away: '' or the id of a task for which the lock is kept, and which cannot come
--       7 unsent: not '' = that one was not woken. It has its place again, and nobody the lock
--       8 terms (see terms.lua)
-- Returns {word, now us, lock value, record, heir, call, next us}: who is to be woken, and with what; no call if it
--       asks again by itself, or its wake-up is on its way. When to look again; 0 = not known
--       handed (also by this token before) | taken_over (handed, as its holder has died) | held | empty (nobody) | more

-- use: lock store grant permits terms line pace hand
local token, hand_over, remember, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local dead, absent, unsent = ARGV[5], ARGV[6], (ARGV[7] or '') ~= ''
local LINE, CALLS, PERMITS, STARTS, TERMS = unpack(KEYS, 3, 7)
local known, of_key = unpack(redis.call('MGET', PERMITS, TERMS))
local own, terms, paused = terms_of(ARGV[8] or '0', known, of_key)
if more(known, 8, terms) then return more(known, 8, terms) end
local limit, lapsed, line, pace = limit_of(terms), 0, line_of(LINE, CALLS), pace_of(STARTS, terms)
local seen = by_kind(permits(8), limit, function(p)
  if p.heir and p.is_live then return (p.token == token or p.heir == absent) and 'asked' end
  if p.heir then lapsed = lapsed + 1 end -- missed: the heir is to have its place again, whatever else is free
  return p.heir and 'lapsed' or is_within(p, limit) and is_running(p, dead) and 'dead'
end)
local p = seen.asked or seen.lapsed or seen.free or seen.dead or seen.held
if foreign_record(p) then return foreign_record(p) end
local value, record, died = p.value or false, record_of(p), not was_left(p)
local spare = seen.spare - (p.till == 0 and is_within(p, limit) and 1 or 0)
local start = math.max(paused, pace and pace.till(seen.handed - (p.kind == 'asked' and 1 or 0), AHEAD) or 0)
if pace and start > 0 then pace.keep() end

-- Those whose time away is over have their places again.
local back = {LINE, int(AWAY), int(AWAY + now), 'LIMIT', 0, 100}
for _, task in ipairs(redis.call('ZRANGEBYSCORE', unpack(back))) do
  redis.call('ZREM', LINE, task)
  line.put_back(task, 'unsent')
end

-- When to look again: at a time, or when another permit comes free, one more may start, or somebody is back.
local function answer(word, heir, till)
  local function or_at(time)
    if time > 0 and time < NEVER and (till == 0 or time < till) then till = time end
  end
  or_at(p.till == seen.sooner and seen.later or seen.sooner)
  if count_waiting(LINE) > 0 then
    or_at(start > 0 and look_for(start, paused) or pace and pace.next_room() or 0)
    if spare > 0 and start == 0 then till = now end
  end
  if lapsed > (p.kind == 'lapsed' and 1 or 0) then till = now end
  local _, score = unpack(redis.call('ZRANGEBYSCORE', LINE, int(AWAY), '+inf', 'WITHSCORES', 'LIMIT', 0, 1))
  or_at(score and tonumber(score) - AWAY or 0)
  return {word, now_text(), value, record, heir, heir and line.call_of(heir), int(till)}
end

if p.kind == 'held' then return answer('held', false, p.till < NEVER and p.till or 0) end
if p.kind == 'asked' and p.token == token then return answer('handed', p.heir, p.deadline) end
if p.heir then line.put_back(p.heir, unsent and 'unsent' or 'missed', lease) end
local heir, deadline, are_more
if not unsent and is_within(p, limit) and start == 0 then
  heir, deadline, are_more = hand_on(p, line, token, hand_over, remember)
end
if heir then
  if own ~= terms_in(known) or p.number >= in_use(known) then -- no call has come since these count
    note_permits(PERMITS, known, seen.top, own, math.ceil((deadline - now) / 1000) + remember)
  end
  return answer(died and 'taken_over' or 'handed', heir, deadline)
end
if p.heir then store(p, 'released', 0, remember) end
return answer('empty', false, are_more and now or 0)
