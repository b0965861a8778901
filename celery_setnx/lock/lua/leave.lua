-- Leave the line: the task was revoked, has expired, or need not run. No other message of it starts it any more. A
-- permit that is kept for it goes to the first in line, as with a release.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 ticket, 6 permits, 7 starts, 8 terms, 9... the other permits' locks and
--       records
-- ARGV  1 task id, 2 attempt, 3 copy (the message that leaves), 4 remember (ms), 5 shared (as acquire.lua)
--       6 token (of this task, attempt and copy, and how often it has stayed: the lock's until somebody has it)
--       7 hand over (as release.lua), 8 terms (see terms.lua)
--       9 lease (us): it stays, and is passed over for that (see line.lua); '' = it leaves
-- Returns {word, now us, heir, call, look}: the last three as release.lua
--       left (also before) | more
--       stale (another message has started this attempt: nothing is changed)

-- use: lock store permits terms ticket line pace hand
local task, attempt, copy, remember = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local token, hand_over, lease = ARGV[6], tonumber(ARGV[7]), tonumber(ARGV[9] or nil)
local LINE, CALLS, TICKET, PERMITS, STARTS, TERMS = unpack(KEYS, 3, 8)
local known, of_key = unpack(redis.call('MGET', PERMITS, TERMS))
local _, terms, paused = terms_of(ARGV[8] or '0', known, of_key)
if more(known, 9, terms) then return more(known, 9, terms) end
local ticket, line = read_ticket(redis.call('GET', TICKET), attempt, copy), line_of(LINE, CALLS)
if ticket.is_stale then return {'stale', now_text()} end
local is_its, all, its = ARGV[5] ~= '1' or ticket.waits or not is_known(CALLS, task), permits(9), nil
for _, p in ipairs(all) do
  local is_kept = p.heir == task and p.value and (p.is_ours or p.till == 0)
  local was_its = p.token == token and (p.state == 'released' or p.heir and p.is_live) -- resent
  if is_its and is_kept or was_its then its = its or p end
end
if not lease then
  local misses = line.leave(is_its and task or '') or ticket.misses -- a full server allows this, and SET behind it
  write_ticket(TICKET, attempt, copy, misses, 'PX', remember)
end
local heir, look = nil, ''
if its and its.token == token then
  heir, look = its.heir, its.heir and '' or now_text() -- somebody may wait
elseif its then
  its.token = token
  line.put_back(task, 'missed', lease) -- one that stays
  local pace, start = pace_of(STARTS, terms), paused
  if pace then start = math.max(start, pace.till(count_handed(all) - (its.is_live and 1 or 0), AHEAD)) end
  if start > 0 then
    if pace then pace.keep() end
    look = int(look_for(start, paused))
  elseif is_within(its, limit_of(terms)) then
    local deadline, are_more
    heir, deadline, are_more = hand_on(its, line, token, hand_over, 60000)
    if heir then keep_for(PERMITS, math.ceil((deadline - now) / 1000) + 60000) end
    look = are_more and now_text() or ''
  end
  if not heir then store(its, 'released', 0, 60000) end
end
return {'left', now_text(), heir or false, heir and line.call_of(heir) or false, look}
