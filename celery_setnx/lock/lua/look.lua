-- Look at a lock, and at the first of those who wait for it, without touching it.
--
-- KEYS  1 lock, 2 record; of a task 3 line, 4 permits, 5... the other permits' locks and records
-- ARGV  none
-- Returns {now us, waiters, permits, lock value and record of each permit..., task id and since us of the first hundred
--       waiters...}
--       more

-- use: lock permits line
local LINE, PERMITS = KEYS[3], KEYS[4]
local known = PERMITS and redis.call('GET', PERMITS)
if more(known, 5) then return more(known, 5) end
local all = permits(5)
local found = {now_text(), int(LINE and count_waiting(LINE) or 0), int(#all)}
for _, p in ipairs(all) do
  see_other_type(p)
  found[#found + 1] = p.value or false
  found[#found + 1] = p.record
end
local first = LINE and redis.call('ZRANGEBYSCORE', LINE, '-inf', WAITING, 'WITHSCORES', 'LIMIT', 0, 100) or {}
for _, item in ipairs(first) do found[#found + 1] = item end
return found
