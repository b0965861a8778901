-- Give a lock back, or let it rest until a given time. Only the holder's own token does anything.
--
-- KEYS  1 lock, 2 record, 3 mark, optional (see acquire.lua)
-- ARGV  1 token
--       2 rest until  server time in microseconds; '0' = free at once
--       3 remember    milliseconds for which the release is remembered (and a resting lock outlives its rest)
--       4 mark again  milliseconds: the task has sent its retry, and is queued again; '0' = it has not
-- Returns {word, now us, lock value}
--       released | resting | repaired (released, though a classic loser had overwritten the value) | gone | lost

local token, rest_until, remember, again = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[2])
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local h_token, h_deadline, fence, state, rest = string.match(record or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(.*)$')
local function answer(word) return {word, int(now), value} end

if h_token ~= token then return answer('lost') end
if state ~= 'running' then return answer(state) end -- a resent release is answered as the first was

local function mark_again() -- unless another call has been marked meanwhile
  local task_id = string.match(token, '^(.*)|%d+|%x+$')
  if again > 0 and task_id then redis.call('SET', KEYS[3], task_id, 'NX', 'PX', int(again)) end
end
local function remembered(deadline, as)
  return table.concat({token, deadline, fence, as, rest}, '\n')
end
local word = 'gone'
if value then
  local ours = value == int(math.ceil(tonumber(h_deadline) / 1000000))
  local repaired = not ours and now < tonumber(h_deadline) and string.match(value, '^%d+%.?%d*$')
  if not ours and not repaired then return answer('lost') end
  if rest_until > now then
    local expiry = int(math.ceil(rest_until / 1000) + remember)
    redis.call('PEXPIREAT', KEYS[1], expiry)
    redis.call('SET', KEYS[1], int(math.ceil(rest_until / 1000000)), 'PXAT', expiry)
    redis.call('SET', KEYS[2], remembered(int(rest_until), 'resting'), 'PXAT', expiry)
    mark_again()
    return answer('resting')
  end
  redis.call('DEL', KEYS[1])
  word = repaired and 'repaired' or 'released'
end
-- PEXPIRE first: it is allowed when memory is full, and after one write SET is too.
redis.call('PEXPIRE', KEYS[2], int(remember))
redis.call('SET', KEYS[2], remembered('0', word), 'PX', int(remember))
mark_again()
return answer(word)
