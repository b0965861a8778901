-- In front of a script that is told of several permits. Permit 0 is the lock itself, and the others are locks like it,
-- with a record each. From `permit_for` on KEYS[1] and KEYS[2] are those of the one that was chosen, so the rest of the
-- script is what it is for a lock that has no other.

local function int(number) return string.format('%.0f', number) end

-- `<name>:permits` says how many permits are in use, and how many there are for newcomers.
local function limit_in(text) return tonumber(string.match(text or '', '^%d+ ([1-9]%d*)$') or 1) end

local function note_permits(key, text, highest, limit, ms)
  local new = int(highest) .. ' ' .. int(limit)
  if highest <= 1 then
    if text then redis.call('DEL', key) end
  elseif new ~= text or ms > 0 then
    local left = text and redis.call('PTTL', key) or 0
    if new ~= text or left < ms then redis.call('SET', key, new, 'PX', int(math.max(left, ms, 60000))) end
  end
end

-- Whom a lock is kept for, if its record says that it is handed to anybody.
local function heir_in(record) return string.match(record, '^[^\n]*\n%d+\n%d+\nhanded\n%d+\n(.*)$') end

-- Choose a permit. KEYS has those of number 1 and up from `first` on: lock, record, lock, record...; `found` is what
-- MGET says of KEYS[1], KEYS[2], other keys, and those.
-- `fits(state, token, record, live)` ranks one that the record speaks of: 1 is the best, 4 a free one, nil none.
local function permit_for(found, first, limit, now, fits)
  local best, best_rank, best_till = {spare = 0}, 10, 0
  local sooner, later, oldest, top = 1e17, 1e17, 1e17, 0 -- when the first two that are held end
  local others = #KEYS - first + 1
  local place = 1 -- in `found`, which has other keys behind the first two
  for number = 0, others / 2 do
    local value, record = found[place], found[place + 1]
    local token, deadline, state, since = string.match(record or '', '^([^\n]*)\n(%d+)\n%d+\n([%l_]+)\n(%d+)\n')
    local till, rank = 0, nil
    deadline = tonumber(deadline or 0)
    if value then
      top = number + 1
      if not string.match(value, '^%d+%.?%d*$') then
        till = 1e17
      elseif now < deadline or deadline > 0 and value == int(math.ceil(deadline / 1000000)) then
        till, rank = deadline, fits(state, token, record, now < deadline)
      else
        till = (math.min(tonumber(value), 1e11) + 1) * 1000000 -- the recipe takes over after its second
      end
    end
    local within, free = number < limit, now >= till
    if free and not value and (state == 'handed' or best_rank > 4) then
      if redis.call('EXISTS', number == 0 and KEYS[1] or KEYS[first + 2 * number - 2]) == 1 then
        free, till = false, 1e17 -- another program's list, hash, or the like
      end
    end
    if free and not rank and state == 'handed' then rank = fits(state, token, record, false) end
    if free then
      rank, till = rank or 4, 0
      if within then best.spare = best.spare + 1 end
    else
      rank, since = rank or 9, tonumber(since or 1e17)
      if since < oldest then oldest, best.longest = since, {value, record, number} end
      if till < later then
        sooner, later = math.min(sooner, till), math.max(sooner, till)
      end
    end
    if (within or rank < 4) and (rank < best_rank or rank == best_rank and till < best_till) then
      best_rank, best_till, best.number, best.free, best.record = rank, till, number, free, record
    end
    place = number == 0 and #found - others + 1 or place + 2
  end
  if best.free and best.number < limit then best.spare = best.spare - 1 end
  local is_first = not best.free and best_till == sooner
  best.rank, best.top, best.next = best_rank, top, is_first and later or sooner
  if best.next == 1e17 then best.next = 0 end -- when the first of the others ends, if one is held, and does
  if best.number > 0 then KEYS[1], KEYS[2] = KEYS[first + 2 * best.number - 2], KEYS[first + 2 * best.number - 1] end
  return best
end
