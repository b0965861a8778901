-- Give a lock back, or let it rest. If tasks wait, it is handed to the first: kept for that one until it comes.
--
-- KEYS  1 lock, 2 record; of a task 3 line, 4 calls, 5 mark; of a permit beside the first 6 permits; 7 done
-- ARGV  1 token, 2 rest until (us; '0' = free at once), 3 remember (ms for which the release is known),
--       4 mark again (ms; '0' = not): the task has sent its retry, and is queued again
--       5 hand over (us for which it is kept for the first in line; '' = for nobody, as the caller says of one that is
--         beyond the limit)
--       6 done for (ms; '0' = not): for how long it counts that the task has succeeded, unless the run has failed
-- Returns {word, now us, lock value}; with an heir {..., heir, call}: who is to be woken and with what, now or when
--       the rest is over; if another holds it {..., false, since us}; the text 'released' if nothing else is to be told
--       released | resting | repaired (another program had overwritten the value) | gone | lost

-- use: lock store line
local token, rest_until, remember, again = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local hand_over, done_for = tonumber(ARGV[5]), ARGV[6] or '0'
local LINE, CALLS, MARK, PERMITS, DONE = unpack(KEYS, 3, 7)
local p = read()
local value = p.value or false
local function answer(word, heir)
  local kept = heir and CALLS and redis.call('HGET', CALLS, heir)
  local call = kept and line_of(LINE, CALLS).call_of(heir)
  if not CALLS or kept and not call then heir = false end -- it asks again by itself, or is on its way
  return {word, now, value, heir or false, call or false}
end

if p.token ~= token then return {'lost', now, value, false, p.since or false} end
if p.state == 'handed' then return answer('released', p.heir) end -- resent: as the first time
if p.state ~= 'running' and p.state ~= 'failed' then return {p.state, now, value} end
local word, was_running = end_of(p), p.state == 'running'
if not word then return {'lost', now, value} end
local heir, asks_for
if LINE and hand_over and redis.call('EXISTS', LINE) == 1 then heir, asks_for = line_of(LINE, CALLS).next() end
local state, deadline = word, 0 -- free, unless it rests or is handed over
if value and now < rest_until then
  state, deadline, word = 'resting', rest_until, 'resting'
elseif heir then
  state, deadline, p.since, p.info = 'handed', now + (asks_for or hand_over), now_text(), heir
end
if PERMITS and deadline > 0 then keep_for(PERMITS, math.ceil((deadline - now) / 1000) + remember) end
store(p, state, deadline, remember)
if state == 'handed' then redis.call('ZREM', LINE, heir) end
-- Unless another call has been marked meanwhile.
local task = (again ~= '0' or done_for ~= '0') and task_of(token)
if again ~= '0' and task then redis.call('SET', MARK, task, 'NX', 'PX', again) end
local was_alone = word ~= 'gone' -- as far as that is known
if DONE and done_for ~= '0' and was_running and was_alone and task then
  redis.call('SET', DONE, token, 'PX', done_for)
end
if heir then return answer(word, heir) end
local leaves_line = LINE and not hand_over and redis.call('EXISTS', LINE) == 1
return word == 'released' and not leaves_line and word or {word, now, value}
