-- In front of the scripts that may be about any of a lock's permits. Permit 0 is the lock itself, and the others are
-- locks like it, with a record each. From `permit_for` on KEYS[1] and KEYS[2] are those of the one that was chosen, so
-- the rest of a script is what it is for a lock that has no other.

local function int(number) return string.format('%.0f', number) end

-- How many permits are in use, and how many there are for newcomers: what `<name>:permits` says.
local function permits_in(text)
  local highest, limit = string.match(text or '', '^(%d+) (%d+)$')
  return tonumber(highest or 1), tonumber(limit or 1)
end

local function note_permits(key, text, highest, limit, ms)
  local new, left = int(highest) .. ' ' .. int(limit), redis.call('PTTL', key)
  if highest <= 1 then
    if text then redis.call('DEL', key) end
  elseif new ~= text or left < ms then
    redis.call('SET', key, new, 'PX', int(math.max(left, ms)))
  end
end

-- Choose a permit. Those of number 1 and up are in KEYS from `first` on: lock, record, lock, record...
-- `fits(state, token, text, live)` ranks one that the record speaks of: 1 is the best, 4 a free one, nil none.
local function permit_for(first, limit, now, fits)
  local keys = {KEYS[1], KEYS[2], unpack(KEYS, first)}
  local found = redis.call('MGET', unpack(keys))
  local best, held, oldest = {rank = 10, till = 0, spare = 0, top = 0, next = 0}, {}, 1e17
  for place = 1, #keys, 2 do
    local number, value, record = (place - 1) / 2, found[place], found[place + 1]
    local token, deadline, state, since, text =
      string.match(record or '', '^([^\n]*)\n(%d+)\n%d+\n([%l_]+)\n(%d+)\n(.*)$')
    local till, rank = 0, nil
    deadline = tonumber(deadline or 0)
    if value and not string.match(value, '^%d+%.?%d*$') then
      till = 1e17
    elseif value and (now < deadline or deadline > 0 and value == int(math.ceil(deadline / 1000000))) then
      till, rank = deadline, fits(state, token, text, now < deadline)
    elseif value then
      till = (math.min(tonumber(value), 1e11) + 1) * 1000000 -- the recipe takes over after its second
    end
    local within, free = number < limit, now >= till
    if free and not rank and state == 'handed' then rank = fits(state, token, text, false) end
    if free and not value and (within or rank) and best.rank > (rank or 4) and redis.call('EXISTS', keys[place]) == 1 then
      free, till, rank = false, 1e17, nil -- another program's list, hash, or the like
    end
    rank = rank or free and 4 or 9
    if free then till = 0 end
    if value then best.top = number + 1 end
    if within and free then best.spare = best.spare + 1 end
    if not free then held[number] = till end
    if not free and tonumber(since or 1e17) < oldest then
      oldest, best.longest = tonumber(since), {value, record}
    end
    if (within or rank < 4) and (rank < best.rank or rank == best.rank and till < best.till) then
      best.rank, best.till, best.number, best.free = rank, till, number, free
    end
  end
  if best.free and best.number < limit then best.spare = best.spare - 1 end
  for number, till in pairs(held) do -- when the first of the others ends
    if number ~= best.number and (best.next == 0 or till < best.next) then best.next = till end
  end
  KEYS[1], KEYS[2] = keys[2 * best.number + 1], keys[2 * best.number + 2]
  return best
end

