-- Give a lock back, or let it rest until a given time. If tasks wait in line, it is handed to the first of them:
-- kept for that one until it comes, so that nobody overtakes. Only the holder's own token does anything.
--
-- KEYS  1 lock, 2 record (see acquire.lua); and for a task's lock 3 line, 4 calls, 5 mark (optional)
-- ARGV  1 token
--       2 rest until  server time in microseconds; '0' = free at once
--       3 remember    milliseconds for which the release is remembered (and a locked key outlives its deadline)
--       4 mark again  milliseconds: the task has sent its retry, and is queued again; '0' = it has not
--       5 hand over   microseconds for which the lock is kept for the first in line
-- Returns {word, now us, lock value, heir, call}
--       released | resting | repaired (released, though a classic loser had overwritten the value) | gone | lost
--       heir: the task that is first in line, to be woken with its call: now, or when the rest is over; none if
--       nobody waits, or the first asks again by itself

local token, rest_until, remember, again = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local hand_over = tonumber(ARGV[5])
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[2])
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local h_token, h_deadline, fence, state, rest = string.match(record or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(.*)$')
local heir = false
local function answer(word)
  local call = heir and redis.call('HGET', KEYS[4], heir)
  if call and string.match(call, '^@') then heir, call = false, false end
  return {word, int(now), value, heir, call}
end

if h_token ~= token then return answer('lost') end
if state == 'handed' then heir = string.match(rest, '^%d+\n(.*)$') end
if state ~= 'running' then return answer(heir and 'released' or state) end -- resent: as the first time
local gone = {} -- those who have not asked again in time
for _, task in ipairs(KEYS[3] and redis.pcall('ZRANGE', KEYS[3], 0, 9) or {}) do
  local lingers = string.match(redis.call('HGET', KEYS[4], task) or '', '^@(%d+)$')
  if not lingers or now < tonumber(lingers) then
    heir, hand_over = task, lingers and tonumber(lingers) - now + 50000 or hand_over
    break
  end
  gone[#gone + 1] = task
end

local function mark_again() -- unless another call has been marked meanwhile
  local task_id = string.match(token, '^(.*)|%d+|%x+$')
  if again > 0 and task_id then redis.call('SET', KEYS[5], task_id, 'NX', 'PX', int(again)) end
end
local function remembered(deadline, as, since_and_info)
  return table.concat({token, deadline, fence, as, since_and_info}, '\n')
end
local function keep(deadline, as, since_and_info)
  local expiry = int(math.ceil(deadline / 1000) + remember)
  redis.call('PEXPIREAT', KEYS[2], expiry)
  redis.call('SET', KEYS[1], int(math.ceil(deadline / 1000000)), 'PXAT', expiry)
  redis.call('SET', KEYS[2], remembered(int(deadline), as, since_and_info), 'PXAT', expiry)
end
local word = 'gone'
if value then
  local ours = value == int(math.ceil(tonumber(h_deadline) / 1000000))
  local repaired = not ours and now < tonumber(h_deadline) and string.match(value, '^%d+%.?%d*$')
  if not ours and not repaired then heir = false; return answer('lost') end
  word = repaired and 'repaired' or 'released'
end
-- PEXPIRE(AT) first: it is allowed when memory is full, and after one write SET is too.
if value and rest_until > now then
  keep(rest_until, 'resting', rest)
  word = 'resting'
elseif heir then
  keep(now + hand_over, 'handed', int(now) .. '\n' .. heir)
  redis.call('ZREM', KEYS[3], heir)
else
  if value then redis.call('DEL', KEYS[1]) end
  redis.call('PEXPIRE', KEYS[2], int(remember))
  redis.call('SET', KEYS[2], remembered('0', word, rest), 'PX', int(remember))
end
if gone[1] then
  redis.call('ZREM', KEYS[3], unpack(gone))
  redis.call('HDEL', KEYS[4], unpack(gone))
end
mark_again()
return answer(word)
