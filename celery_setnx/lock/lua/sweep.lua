-- Claim the lines that it is time to look at: for a moment nobody else does.
--
-- KEYS  1 lines     (see due.lua)
-- ARGV  1 for       microseconds for which they are claimed
--       2 remember  milliseconds for which all this is remembered
--       3 epoch     of these data, if they have none
--       4 paced     how many of the tasks have a rate: those are the first
--       5... tasks whose calls the sweeper can send
-- Returns {epoch, claimed until us, microseconds until the next line of a paced task is due ('' if that is not soon),
--       entry...}: a hundred at most

local interval, remember, epoch = tonumber(ARGV[1]), ARGV[2], ARGV[3]
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local claimed, tasks, from = int(now + interval), {}, 0
local paced = 4 + tonumber(ARGV[4])
for place = 5, #ARGV do tasks[ARGV[place]] = place <= paced and 1 or 0 end
redis.call('ZADD', KEYS[1], 'NX', '-' .. epoch, '')
redis.call('PEXPIRE', KEYS[1], remember)
-- Nobody has a task of theirs, for longer than its calls are remembered.
local lost = redis.call('ZRANGEBYSCORE', KEYS[1], '0', int(now - remember * 1000), 'LIMIT', 0, 1000)
if lost[1] then redis.call('ZREM', KEYS[1], unpack(lost)) end
local found = {string.sub(redis.call('ZSCORE', KEYS[1], ''), 2), claimed, ''}
local soon = {KEYS[1], '(' .. int(now), claimed, 'WITHSCORES', 'LIMIT', 0, 200}
soon = paced > 4 and redis.call('ZRANGEBYSCORE', unpack(soon)) or {}
for place = #soon - 1, 1, -2 do -- the first of them at last
  if tasks[string.match(soon[place], '^[^\n]*')] == 1 then found[3] = int(tonumber(soon[place + 1]) - now) end
end
repeat
  local due = redis.call('ZRANGEBYSCORE', KEYS[1], '0', int(now), 'LIMIT', from, 1000)
  from = from + #due
  for _, entry in ipairs(due) do
    if tasks[string.match(entry, '^[^\n]*')] and #found < 103 then found[#found + 1] = entry end
  end
until #due < 1000 or #found >= 103
for place = 4, #found do redis.call('ZADD', KEYS[1], claimed, found[place]) end
return found
