-- Acquire a lock, or take it over once its deadline has passed or its holder is proved dead.
--
-- KEYS  1 lock, 2 record; of a task 3 line, 4 calls, 5 mark, or newest (see newest.lua) of a call that has a
--       generation, 6 ticket, 7 permits, 8 terms; of terms other than '1' 9 starts,
--       10... the other permits' locks and records, up to the limit, or to the last in use if that is more
-- ARGV  1 token (new for every attempt), 2 lease (us), 3 retention (ms that both keys outlive the deadline), 4 info,
--       5 dead token ('' or that of a running holder whose process is proved dead)
--       6 copy: which of the call's messages this is; only one of them may start it
--       7 remember (ms): for how long that is known; '0' = as long as the ticket. A call's first command says '0'
--       8 linger (us): if the lock is held, the task stands in line and asks again; '0' = not
--       9 since (us): since when the task waits; '0' = now
--       10 attempt: number of the task's attempt, as tickets have it
--       11 terms (see terms.lua)
--       12 second: '1' = another delivery of this attempt may have begun, and ended: the mark may be its retry's, and
--          the lock may rest after it, so both stay as they are
--       13 shared: '1' = other calls may have this task id, and have its place if this one does not wait
--       14 generation ('0' = none), 15 bound (us, see newest.lua), 16 leads: '1' = only a newer start supersedes it
--       17 last (ms): for how long its start is known
-- Returns {word, deadline us, fence, now us, lock value, record, mark, waiters}: what was found. With several permits
--       also {number of the permit, how many others may be had now, lock value, record, number, limit that counts}: the
--       lock to the number are of who has held one for longest. Of held permits the reply tells of the one that ends
--       first.
--       The text 'acquired <now us> <fence>[ <number>]' if nothing was found: a table costs as much as two commands.
--       acquired | again (this token holds it) | resumed (held for this task's retry) | taken_over | held
--       stale (another message has started this call, or is to)
--       paced (no call may start before the deadline: the mark is the terms that count)
--       paused (neither, because of live terms: those of the key are the mark, '' = it has none)
--       superseded (a newer call runs instead: the mark is its id)
--       line (it is free for those who wait: the record says that it is handed to the first, and serve.lua does
--       that) | more (see permits.lua)

-- use: lock store grant
local token, lease, retention, info, dead = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local copy, remember, linger, since = ARGV[6] or '-', ARGV[7] or '0', tonumber(ARGV[8] or 0), ARGV[9]
local attempt, terms, second, shared = tonumber(ARGV[10] or 0), ARGV[11] or '1', ARGV[12] == '1', ARGV[13] == '1'
local LINE, CALLS, MARK, TICKET, PERMITS, TERMS, STARTS = unpack(KEYS, 3, 9)
local generation, paused, only, own, of_key = tonumber(ARGV[14] or 0), 0, nil, nil, nil
if generation == 0 and not STARTS and not (LINE and redis.call('EXISTS', LINE, MARK, TICKET, PERMITS, TERMS) > 0) then
  only = read()
  if not only.value and not only.heir and remember == '0' and not foreign_record(only) then -- as a rule
    return 'acquired ' .. now_text() .. ' ' .. grant(only, token, lease, retention, info)
  end
end
-- use: permits terms line ticket pace start claim newest supersede
local mark, known, waiters, ticket, line = false, false, 0, {misses = '0'}, LINE and line_of(LINE, CALLS)
if not only then
  mark, ticket, known, of_key = unpack(redis.call('MGET', MARK, TICKET, PERMITS, TERMS))
  ticket, waiters = read_ticket(ticket, attempt, copy, copy == '-' and remember == '0'), count_waiting(LINE)
  own, terms, paused = terms_of(terms, known, of_key)
  if more(known, 10, terms) then return more(known, 10, terms) end
end
if ticket.is_stale then return {'stale', 0, 0, now, false, false, mark, int(waiters)} end
local first, others = waiters > 0 and line.next(true), shared and not ticket.waits and CALLS
local call = caller(token, ticket.waits and copy ~= '-', first, others)
local all, limit, pace = only and {only} or permits(10), limit_of(terms), STARTS and pace_of(STARTS, terms)
local p, word, start, seen = claim(call, all, limit, pace, paused, dead, second)
if foreign_record(p) then return foreign_record(p) end
local newest = counts(generation) and newest_of(mark)
mark = word == 'paused' and (of_key or '') or word == 'paced' and terms or generation == 0 and mark
if newest then
  local by, is_new = receive(newest, generation, call, p, word, ARGV[16] == '1', tonumber(ARGV[15]))
  if by then return {'superseded', 0, 0, now, false, false, by, int(waiters)} end
  if is_new then
    redis.call('ZREM', LINE, '') -- nothing: a full server allows this, and SET behind it
    newest.store(MARK, tonumber(ARGV[17]))
  end
end
if start and pace then pace.keep() end -- a full server allows this, and SET behind it
local ms = p.kind == 'held' and 0 or math.ceil(lease / 1000) + retention -- that of a held one lasts
if STARTS then note_permits(PERMITS, known, math.max(seen.top, p.number + 1), own, ms) end
local value, record = p.value or false, record_of(p)
local function answer(till, fence)
  local reply = {word, till, tonumber(fence or p.fence or 0), now, value, record, mark, int(waiters)}
  if #all == 1 then return reply end
  local longest, spare = seen.longest or {number = 0}, seen.spare - (p.till == 0 and is_within(p, limit) and 1 or 0)
  if pace and spare > 0 and pace.till(seen.handed - (p.heir and p.is_live and 1 or 0), AHEAD) > 0 then spare = 0 end
  reply[9], reply[10] = p.number, spare
  reply[11], reply[12], reply[13], reply[14] = longest.value or false, record_of(longest), longest.number, limit
  return reply
end
if word == 'held' then
  if linger > 0 then line.ask_again(call.task, since == '0' and now_text() or since, now + linger) end
  return answer(p.till < NEVER and p.till or 0)
elseif word == 'paced' or word == 'paused' then
  value, record = put_off(p, word, start, line, retention)
  return answer(start)
end
if word == 'line' then value, record = false, '\n0\n0\nhanded\n' .. now_text() .. '\n' .. first end
if word == 'again' or word == 'line' then return answer(p.deadline) end
local fence, failed = grant(p, token, lease, retention, info, word == 'resumed')
failed = failed or pace and note_start(pace, p, fence)
if failed then return failed end
if newest then
  newest.start(generation, call.task, true)
  newest.store(MARK, tonumber(ARGV[17]))
end
if mark == call.task and not second then redis.call('DEL', MARK) end
if line and p.heir and p.kind ~= 'for me' then
  line.put_back(p.heir, now < p.deadline and 'overtaken' or 'missed', lease)
end
local waited = line and call.me and (ticket.is_there or p.kind == 'for me' or waiters > 0)
local misses = waited and line.leave(call.me) or ticket.misses
local ttl = remember ~= '0' and {'PX', remember} or ticket.is_there and {'KEEPTTL'}
if TICKET and ttl then write_ticket(TICKET, attempt, copy, misses, unpack(ttl)) end
if value or waiters > 0 or mark then return answer(now + lease, fence) end
return 'acquired ' .. now_text() .. ' ' .. fence .. (p.number > 0 and ' ' .. p.number or '')
