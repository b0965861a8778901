-- Give a lock back, or let it rest until a given time. If tasks wait in line, it is handed to the first of them:
-- kept for that one until it comes, so that nobody overtakes. Only the holder's own token does anything.
--
-- KEYS  1 lock, 2 record (see acquire.lua); and for a task's lock 3 line, 4 calls, 5 mark (optional); and of a permit
--       beside the first 6 permits, which is to last as long; and where the task's success counts 7 done
-- ARGV  1 token
--       2 rest until  server time in microseconds; '0' = free at once
--       3 remember    milliseconds for which the release is remembered (and a locked key outlives its deadline)
--       4 mark again  milliseconds: the task has sent its retry, and is queued again; '0' = it has not
--       5 hand over   microseconds for which the lock is kept for the first in line; '' = it is not handed over
--       6 done for    milliseconds for which it is remembered that the task has succeeded; '0' = it has not. Nothing
--                     is if the run has failed meanwhile (see forget.lua)
-- Returns {word, now us (false where no time matters), lock value} and, if the lock has an heir, {..., heir, call};
--       or if another has it {..., false, since when (us)}; the text 'released' if it has just been, and nobody waits
--       released | resting | repaired (released, though a classic loser had overwritten the value) | gone | lost
--       heir: the task that is first in line, to be woken with its call: now, or when the rest is over; none if
--       nobody waits, or the first asks again by itself, or its wake-up is on its way

local token, rest_until, remember, again, hand_over = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local function int(number) return string.format('%.0f', number) end
local now = false
local function clock() -- asked only where the time matters
  local time = not now and redis.call('TIME')
  now = now or tonumber(time[1]) * 1000000 + tonumber(time[2])
  return now
end

local record = redis.call('GET', KEYS[2])
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local h_token, h_deadline, fence, state, rest = string.match(record or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(.*)$')
local function answer(word, heir)
  local kept = heir and KEYS[4] and redis.call('HGET', KEYS[4], heir)
  local call = kept and string.match(kept, '^%d+|%d+|(.*)$')
  if not KEYS[4] or kept and not call then heir = false end
  return {word, now, value, heir, call or false}
end

local function lost() return {'lost', clock(), value, false, string.match(rest or '', '^%d+') or false} end
if h_token ~= token then return lost() end
if state == 'handed' then return answer('released', string.match(rest, '^%d+\n(.*)$')) end
if state ~= 'running' and state ~= 'failed' then return {state, now, value} end -- resent: as the first time
local heir = false
local gone = {} -- those who have not asked again in time
local line = {KEYS[3], '-inf', '(4000000000000000', 'LIMIT', 0, 10}
for _, task in ipairs(KEYS[3] and hand_over and redis.pcall('ZRANGEBYSCORE', unpack(line)) or {}) do
  local lingers = string.match(redis.call('HGET', KEYS[4], task) or '', '^@(%d+)$')
  if not lingers or clock() < tonumber(lingers) then
    heir, hand_over = task, lingers and tonumber(lingers) - now + 50000 or hand_over
    break
  end
  gone[#gone + 1] = task
end

local word = 'gone'
if value then
  local ours = value == int(math.ceil(tonumber(h_deadline) / 1000000))
  local repaired = not ours and clock() < tonumber(h_deadline) and string.match(value, '^%d+%.?%d*$')
  if not ours and not repaired then return {'lost', now, value} end
  word = repaired and 'repaired' or 'released'
end
local deadline, as = false, word -- free, unless it rests or is handed over
if value and rest_until > 0 and clock() < rest_until then
  deadline, as, word = rest_until, 'resting', 'resting'
elseif heir then
  deadline, as, rest = clock() + hand_over, 'handed', int(now) .. '\n' .. heir
end
record = token .. '\n' .. (deadline and int(deadline) or '0') .. '\n' .. fence .. '\n' .. as .. '\n' .. rest
-- What a full memory allows comes first, DEL or PEXPIRE(AT): after one write SET is allowed too.
if deadline then
  local expiry, ms = int(math.ceil(deadline / 1000) + remember), math.ceil((deadline - now) / 1000) + remember
  redis.call('PEXPIREAT', KEYS[2], expiry)
  if KEYS[6] and redis.call('PTTL', KEYS[6]) < ms then redis.call('PEXPIRE', KEYS[6], int(ms)) end
  redis.call('SET', KEYS[1], int(math.ceil(deadline / 1000000)), 'PXAT', expiry)
  redis.call('SET', KEYS[2], record, 'PXAT', expiry)
else
  if value then redis.call('DEL', KEYS[1]) else redis.call('PEXPIRE', KEYS[2], remember) end
  redis.call('SET', KEYS[2], record, 'PX', remember)
end
if as == 'handed' then redis.call('ZREM', KEYS[3], heir) end
if gone[1] then
  redis.call('ZREM', KEYS[3], unpack(gone))
  redis.call('HDEL', KEYS[4], unpack(gone))
end
local task_id = string.match(token, '^(.*)|%d+|%x+$')
if again ~= '0' then -- unless another call has been marked meanwhile
  if task_id then redis.call('SET', KEYS[5], task_id, 'NX', 'PX', again) end
end
local was_alone = word ~= 'gone' -- as far as that is known
if KEYS[7] and ARGV[6] ~= '0' and state == 'running' and was_alone and task_id then
  redis.call('SET', KEYS[7], token, 'PX', ARGV[6])
end
if heir then return answer(word, heir) end
local leaves_line = KEYS[3] and not hand_over and redis.call('EXISTS', KEYS[3]) == 1
return word == 'released' and not leaves_line and word or {word, now, value}
