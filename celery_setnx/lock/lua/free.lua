-- Free a lock that is held for a retry which will not come: the task was revoked or has expired.
--
-- KEYS  1 lock, 2 record, 3 permits, 4... the other permits' locks and records
-- ARGV  1 task id, 2 remember (ms for which the release is known)
-- Returns {word, now us, lock value}
--       released | repaired | gone, as release.lua | lost (it is held for no retry of this task) | more

-- use: lock store permits
local task_id, remember = ARGV[1], tonumber(ARGV[2])
local known = redis.call('GET', KEYS[3])
if more(known, 4, 1) then return more(known, 4, 1) end
local its
for _, p in ipairs(permits(4)) do
  if p.state == 'held_for_retry' and task_of(p.token) == task_id then its = its or p end
end
if not its then return {'lost', now_text(), false} end
see_other_type(its)
local word = end_of(its)
if word then store(its, word, 0, remember) end
return {word or 'lost', now_text(), its.value or false}
