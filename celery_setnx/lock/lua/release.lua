-- Give a lock back, or let it rest. If tasks wait, it is handed to the first: kept for that one until it comes.
--
-- KEYS  1 lock, 2 record; of a task 3 line, 4 calls, 5 terms, 6 mark; of a permit beside the first 7 permits; 8 done;
--       with a rate 9 starts, 10... the other permits' locks and records
-- ARGV  1 token, 2 rest until (us; '0' = free at once), 3 remember (ms for which the release is known)
--       4 mark again (ms; '0' = not): the task has sent its retry, and is queued again
--       5 hand over (us for which it is kept for the first in line; '' = for nobody)
--       6 done for (ms; '0' = not): for how long it counts that the task has succeeded, unless the run has failed
--       7 terms (see terms.lua), 8 number of the permit: one beyond the limit is handed to nobody
-- Returns {word, now us, lock value}; if anybody waits {..., heir, call, look}: who is to be woken and with what; or
--       when to look at the line (us): the rest or a pause is over, or one more may start; if another holds it
--       {..., false, since us}; the text 'released' if nothing else is to be told
--       released | resting | repaired (another program had overwritten the value) | gone | lost

-- use: lock store permits terms line pace hand
local token, rest_until, remember, again = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4]
local hand_over, done_for, own, number = tonumber(ARGV[5]), ARGV[6] or '0', ARGV[7] or '1', tonumber(ARGV[8] or 0)
local LINE, CALLS, TERMS, MARK, PERMITS, DONE, STARTS = unpack(KEYS, 3, 9)
local p = read()
local value = p.value or false
local function answer(word, heir, look)
  return {word, now, value, heir or false, heir and line_of(LINE, CALLS).call_of(heir) or false, look or ''}
end

if p.token ~= token then return {'lost', now, value, false, p.since or false} end
if p.state == 'handed' then return answer('released', LINE and p.heir) end -- resent: as the first time
local waits = LINE and hand_over and redis.call('EXISTS', LINE) == 1
if p.state ~= 'running' and p.state ~= 'failed' then
  local look = p.state == 'resting' and p.deadline or p.state ~= 'held_for_retry' and STARTS and now
  return answer(p.state, nil, waits and look)
end
local word, was_running = end_of(p), p.state == 'running'
if not word then return {'lost', now, value} end
local heir, deadline, look, are_more, terms, paused, pace
if waits then
  local _
  _, terms, paused = terms_of(own, false, redis.call('MGET', TERMS)[1])
  waits, pace = number < limit_of(terms), STARTS and pace_of(STARTS, terms)
end
local start = math.max(pace and pace.till(count_handed(permits(10)), AHEAD) or 0, paused or 0)
if value and now < rest_until then
  deadline, word, look = rest_until, 'resting', waits and rest_until
  store(p, word, deadline, remember)
elseif start > 0 then
  if pace then pace.keep() end
  look = waits and look_for(start, paused)
elseif waits and string.find(terms, ':') and not pace then
  look = now -- whoever serves the line knows how many have started
elseif waits then
  heir, deadline, are_more = hand_on(p, line_of(LINE, CALLS), token, hand_over, remember)
  look = are_more and now
end
if deadline then
  if PERMITS then keep_for(PERMITS, math.ceil((deadline - now) / 1000) + remember) end
else
  store(p, word, 0, remember)
end
-- Unless another call has been marked meanwhile.
local task = (again ~= '0' or done_for ~= '0') and task_of(token)
if again ~= '0' and task then redis.call('SET', MARK, task, 'NX', 'PX', again) end
local was_alone = word ~= 'gone' -- as far as that is known
if DONE and done_for ~= '0' and was_running and was_alone and task then
  redis.call('SET', DONE, token, 'PX', done_for)
end
return (heir or look or word ~= 'released') and answer(word, heir, look) or word
