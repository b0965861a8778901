-- Look at a lock, and at all that stands beside it, without touching it; and say what a call would be told.
--
-- KEYS  1 lock, 2 record, 3 line, 4 permits, 5 mark, 6 done, 7 starts, 8 newest, 9 terms, 10... the other permits'
--       locks and records
-- ARGV  1 terms of the call (see terms.lua)
--       2 dedupe (as mark.lua; '' = it is not asked for), 3 dead token (as acquire.lua)
--       4 most: about how many of those who wait the reply tells
--       5 debounce, 6 debounce_max, 7 leading (as reserve.lua)
-- Returns {now us, word, number of a permit, next us, duplicate, task id, terms, starts, last us, waiting, mark, ms,
--       done, ms, newest, ms, live, terms, wait us, how many permits, of how many it tells, these, and who waits}
--       word: what acquire.lua would say, and of which permit: acquired | taken_over | held | paced | paused | line
--       | more | refused (FOREIGNRECORD)
--       next: when the next call may start; 0 = its pace allows it now
--       duplicate: what mark.lua would say, and of which call: queued | running | done; false = marked
--       terms: those of who has asked last. starts: how many count; without a rate, are noted; and the last one
--       mark, done, and newest: what they hold, and for how long
--       live: the live terms of the key; and the terms that count
--       wait: for how long reserve.lua would have it wait for newer ones
--       of permits number, lock value, record, and the record beside another program's value: of each that is held, and
--       of each record that no value belongs to
--       of who waits task id and since us, the first ones

-- use: lock grant permits terms line pace claim duplicate newest
local LINE, PERMITS, MARK, DONE, STARTS, NEWEST, TERMS = unpack(KEYS, 3, 9)
local dedupe, dead, most = ARGV[2], ARGV[3], tonumber(ARGV[4])
local mark, done, known, newest, of_key = unpack(redis.call('MGET', MARK, DONE, PERMITS, NEWEST, TERMS))
local _, terms, paused = terms_of(ARGV[1], known, of_key)
local ask_again = more(known, 10, limit_of(terms))
if ask_again then return ask_again end
local all, waiting = permits(10), count_waiting(LINE)
for _, p in ipairs(all) do see_other_type(p) end
local call, last = caller(false, false, waiting > 0), redis.pcall('ZREVRANGE', STARTS, 0, 0, 'WITHSCORES')
if last.err and not string.match(last.err, '^WRONGTYPE') then return last end -- forbidden
local pace = not last.err and pace_of(STARTS, terms)
local p, word, _, seen = claim(call, all, limit_of(terms), pace, paused, dead)
if foreign_record(p) then word = 'refused' end
local starts = pace and pace.count() + seen.handed or last[2] and redis.call('ZCOUNT', STARTS, '-inf', '+inf') or 0
local due = newest_of(newest).due_for(tonumber(ARGV[5] or 0), tonumber(ARGV[6] or 0), ARGV[7] == '1')
local duplicate, of
if dedupe ~= '' then duplicate, of = duplicate_of(false, dedupe, mark, all[1], done) end
local next_us = math.max(pace and pace.till(seen.handed, 0) or 0, paused)
local found = {
  now, word, p.number, next_us, duplicate or false, of or false, terms_in(known),
  starts, tonumber(last[2] or 0), waiting, mark, mark and redis.call('PTTL', MARK) or 0, done,
  done and redis.call('PTTL', DONE) or 0, newest, newest and redis.call('PTTL', NEWEST) or 0, of_key, terms, due - now,
  #all, 0,
}
local function tell(p, value, record)
  local size, beside = #found, value and not p.is_ours and p.record
  found[21], found[size + 1], found[size + 2], found[size + 3] = found[21] + 1, p.number, value, record
  found[size + 4] = beside or false
end
for _, each in ipairs(all) do
  if each.value then tell(each, each.value, record_of(each)) end
  if each.token and not each.is_ours then tell(each, false, each.record) end
end
local waiters = waiting > 0 and redis.call('ZRANGEBYSCORE', LINE, '-inf', WAITING, 'WITHSCORES', 'LIMIT', 0, most)
for _, item in ipairs(waiters or {}) do found[#found + 1] = item end
return found
