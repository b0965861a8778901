-- Free a lock that is held for a retry which will not come: the task was revoked or has expired.
--
-- KEYS  1 lock, 2 record, 3 permits, 4... the others (see acquire.lua)
-- ARGV  1 task id
--       2 remember    milliseconds for which the release is remembered
-- Returns {word, now us, lock value}
--       released | repaired | gone: as release.lua
--       lost (it is not held for a retry of this task: nothing is changed) | more (as acquire.lua)

local task_id, remember = ARGV[1], tonumber(ARGV[2])

local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local found = redis.call('MGET', KEYS[1], KEYS[2], unpack(KEYS, 3))
local highest = math.min(tonumber(string.match(found[3] or '', '^(%d+) %d+:?[%d/]*$') or 1), 100)
if highest > 1 + math.max(0, #KEYS - 3) / 2 then return {'more', int(highest)} end
if KEYS[4] then
  permit_for(found, 4, 1, now, function(state, token)
    return state == 'held_for_retry' and string.match(token, '^(.*)|%d+|%x+$') == task_id and 1
  end)
end
local record = redis.call('GET', KEYS[2])
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local h_token, h_deadline, fence, state, rest = string.match(record or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(.*)$')
local function answer(word) return {word, int(now), value} end

if state ~= 'held_for_retry' or string.match(h_token, '^(.*)|%d+|%x+$') ~= task_id then return answer('lost') end
local word = 'gone'
if value then
  local ours = value == int(math.ceil(tonumber(h_deadline) / 1000000))
  local repaired = not ours and now < tonumber(h_deadline) and string.match(value, '^%d+%.?%d*$')
  if not ours and not repaired then return answer('lost') end
  redis.call('DEL', KEYS[1])
  word = repaired and 'repaired' or 'released'
end
redis.call('PEXPIRE', KEYS[2], int(remember))
redis.call('SET', KEYS[2], table.concat({h_token, '0', fence, word, rest}, '\n'), 'PX', int(remember))
return answer(word)
