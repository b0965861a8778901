-- Claim the lines that it is time to look at: for a moment nobody else does.
--
-- KEYS  1 epoch, 2... lines of the sweeper's tasks (see due.lua)
-- ARGV  1 for (us), 2 remember (ms), 3 epoch (if these data have none)
--       4... numbers, from 1, of those lines that the sweeper comes for though somebody else comes, too (see due.lua)
-- Returns {epoch, claimed until us, us until the next line is due that the sweeper is to look at ('' if none is that
--       soon), number of the lines and entry...}: a hundred entries at most

-- use: lock
local interval, remember, epoch, comes = tonumber(ARGV[1]), ARGV[2], ARGV[3], {}
for place = 4, #ARGV do comes[tonumber(ARGV[place]) + 1] = true end
local till = now + interval
local claimed, room, next_due = int(till - till % 2 + 1), 100, math.huge
-- Allowed when memory is full, and after a write SET and ZADD are too.
if redis.call('PEXPIRE', KEYS[1], remember) == 0 then redis.call('SET', KEYS[1], epoch, 'PX', remember) end
local found = {redis.call('GET', KEYS[1]), claimed, ''}
for first = 2, #KEYS, 16 do -- most tasks have no lines: many are asked for at once
  local last = math.min(first + 15, #KEYS)
  local are_any = redis.call('EXISTS', unpack(KEYS, first, last)) > 0
  for place = first, are_any and last or 0 do
    local first_ones = {KEYS[place], '0', claimed, 'WITHSCORES', 'LIMIT', 0, room}
    local entries = room > 0 and redis.call('ZRANGEBYSCORE', unpack(first_ones)) or {}
    for item = 1, #entries, 2 do
      local entry, at = entries[item], tonumber(entries[item + 1])
      if at <= now then
        redis.call('ZADD', KEYS[place], claimed, entry)
        redis.call('PEXPIRE', KEYS[place], remember)
        found[#found + 1], found[#found + 2], room = int(place - 1), entry, room - 1
      elseif at % 2 == 0 or comes[place] then
        redis.call('ZADD', KEYS[place], int(at % 2 == 0 and at - 1 or at), entry)
        next_due = math.min(next_due, at)
      end
    end
  end
end
if next_due < math.huge then found[3] = int(next_due - now) end
return found
