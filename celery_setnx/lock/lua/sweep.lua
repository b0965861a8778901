-- Claim the lines that it is time to look at: for a moment nobody else does.
--
-- KEYS  1 epoch, 2... lines of the sweeper's tasks (see due.lua)
-- ARGV  1 for (us), 2 remember (ms), 3 epoch (if these data have none)
--       4... numbers, from 1, of those lines of which the sweeper wants to know when the next is due
-- Returns {epoch, claimed until us, us until the next of these is due ('' if that is not soon), number of
--       the lines and entry...}: a hundred entries at most

-- use: lock
local interval, remember, epoch, is_asked = tonumber(ARGV[1]), ARGV[2], ARGV[3], {}
for place = 4, #ARGV do is_asked[tonumber(ARGV[place]) + 1] = true end
local claimed, room, next_due = int(now + interval), 100, math.huge
-- Allowed when memory is full, and after a write SET and ZADD are too.
if redis.call('PEXPIRE', KEYS[1], remember) == 0 then redis.call('SET', KEYS[1], epoch, 'PX', remember) end
local found = {redis.call('GET', KEYS[1]), claimed, ''}
for first = 2, #KEYS, 16 do -- most tasks have no lines: many are asked for at once
  local last = math.min(first + 15, #KEYS)
  local are_any = redis.call('EXISTS', unpack(KEYS, first, last)) > 0
  for place = first, are_any and last or 0 do
    if is_asked[place] then
      local soon =
        redis.call('ZRANGEBYSCORE', KEYS[place], '(' .. now_text(), claimed, 'WITHSCORES', 'LIMIT', 0, 1)
      if soon[2] then next_due = math.min(next_due, tonumber(soon[2])) end
    end
    local due = room > 0 and redis.call('ZRANGEBYSCORE', KEYS[place], '0', now_text(), 'LIMIT', 0, room) or {}
    for _, entry in ipairs(due) do
      redis.call('ZADD', KEYS[place], claimed, entry)
      found[#found + 1], found[#found + 2] = int(place - 1), entry
    end
    if due[1] then redis.call('PEXPIRE', KEYS[place], remember) end
    room = room - #due
  end
end
if next_due < math.huge then found[3] = int(next_due - now) end
return found
