-- In front of a script that is told of several permits. Permit 0 is the lock itself, and the others are locks like it,
-- with a record each. From `permit_for` on KEYS[1] and KEYS[2] are those of the one that was chosen, so the rest of the
-- script is what it is for a lock that has no other.

local function int(number) return string.format('%.0f', number) end

-- `<name>:permits` says how many permits are in use, and the terms for newcomers: '5', how many there are; or
-- '5:50/2000000', that 50 may start in any 2 s (us).
local function terms_in(text) return string.match(text or '', '^%d+ ([1-9]%d*:?[%d/]*)$') or '1' end
local function limit_of(terms) return tonumber(string.match(terms, '^%d+')) end

local function note_permits(key, text, highest, terms, ms)
  local new = int(highest) .. ' ' .. terms
  if highest <= 1 and terms == '1' then
    if text then redis.call('DEL', key) end
  elseif new ~= text or ms > 0 then
    local left = text and redis.call('PTTL', key) or 0
    if new ~= text or left < ms then redis.call('SET', key, new, 'PX', int(math.max(left, ms, 60000))) end
  end
end

-- Whom a lock is kept for, if its record says that it is handed to anybody.
local function heir_in(record) return string.match(record, '^[^\n]*\n%d+\n%d+\nhanded\n%d+\n(.*)$') end

-- How long (us) before its start a call may be handed a permit: it is on its way meanwhile, and waits for the rest.
local AHEAD = 20000

-- When one more may start under these terms, at the earliest, or so much `ahead` of that: 0 if it may now. Who is handed
-- a permit is about to.
-- `<name>:starts` is a sorted set of `us#permit#fence`, by the time (us) at which each start was. Later ones than now are
-- none: the clock was set back. Nothing is written for who may start: else a server whose memory is full gave a permit.
local function paced_till(key, terms, handed, now, ahead)
  local count, period = string.match(terms, ':(%d+)/(%d+)$')
  if not count then return 0 end
  local left = tonumber(count) - handed
  local place = int(math.max(left, 1) - 1)
  local _, at = unpack(redis.call('ZREVRANGEBYSCORE', key, int(now), '-inf', 'WITHSCORES', 'LIMIT', place, 1))
  local till = at and tonumber(at) + tonumber(period) - ahead or 0
  if left < 1 then till = math.max(till, now + math.min(tonumber(period), 1000000)) end -- or later, if they come
  if till <= now then return 0 end
  local ms = math.ceil(tonumber(period) / 1000) -- they are kept for as long as who asks needs them
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, int(2 * ms)) end
  return till
end

-- When to look again, ahead of when the first of the starts that count now will count no more: 0 if there is none.
local function next_room(key, terms, now)
  local period = tonumber(string.match(terms, '/(%d+)$') or 0)
  if period == 0 then return 0 end
  local within = {'(' .. int(now - period + AHEAD), int(now), 'WITHSCORES', 'LIMIT', 0, 1}
  local _, at = unpack(redis.call('ZRANGEBYSCORE', key, unpack(within)))
  return at and tonumber(at) + period - AHEAD or 0
end

-- Those are kept that the longest of several periods may ask for, if it has asked within itself; but no more than any
-- rate asks for (1,000), and permits may take back. An error, if there is one.
local function note_start(key, terms, number, fence, now)
  local period = tonumber(string.match(terms, '/(%d+)$') or 0)
  if period == 0 then return end
  local keep = math.max(period, redis.call('PTTL', key) * 1000)
  local ms = int(math.ceil(math.max(keep, 2 * period) / 1000))
  local expires = redis.pcall('PEXPIRE', key, ms) -- before it is written, too
  if type(expires) == 'table' then -- forbidden: nothing is left behind for ever
    redis.call('DEL', KEYS[1])
    return expires
  end
  redis.call('ZREMRANGEBYSCORE', key, '(' .. int(now), '+inf')
  redis.call('ZADD', key, int(now), table.concat({int(now), int(number), int(fence)}, '#'))
  local _, last = unpack(redis.call('ZREVRANGE', key, 1099, 1099, 'WITHSCORES'))
  redis.call('ZREMRANGEBYSCORE', key, '-inf', '(' .. int(math.max(now - keep, tonumber(last or 0))))
  redis.call('PEXPIRE', key, ms)
end

-- What a task is told that may not start yet: value and record of a lock of its own, for which it waits whatever its
-- policy; that is held for so much longer, if it is held for its retry, but no more than an hour past the start: a
-- broker may bring it often before. No value if there is none.
local function its_own(record, permit, task, start, now, retention)
  local token, till, rest = string.match(record or '', '^([^\n]*)\n(%d+)(\n.*)$')
  if permit.rank > 3 or not task or string.match(token, '^(.*)|%d+|%x+$') ~= task then return false, record end
  local is_held = permit.rank == 1 and string.match(rest, '^\n%d+\nheld_for_retry\n')
  if not is_held then return redis.call('GET', KEYS[1]), record end
  local deadline = math.max(tonumber(till), math.min(tonumber(till) + start - now, start + 3600000000))
  local value, expiry = int(math.ceil(deadline / 1000000)), int(math.ceil(deadline / 1000) + retention)
  redis.call('PEXPIREAT', KEYS[1], expiry) -- first: see renew.lua
  redis.call('SET', KEYS[1], value, 'PXAT', expiry)
  record = token .. '\n' .. int(deadline) .. rest
  redis.call('SET', KEYS[2], record, 'PXAT', expiry)
  return value, record
end

-- A permit that was handed to a call which may not start yet: it is nobody's, and the call stands where it stood.
local function hand_back(record, heir)
  local token, fence, rest = string.match(record, '^([^\n]*\n)%d+(\n%d+\n)handed(\n.*)$')
  local since = string.match(redis.call('HGET', KEYS[4], heir) or '', '^%d+%+?|(%d+)|')
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[2], token .. '0' .. fence .. 'released' .. rest, 'PX', 60000)
  if since then redis.call('ZADD', KEYS[3], since, heir) end
  local left = redis.call('PTTL', KEYS[4])
  if redis.call('PTTL', KEYS[3]) < left then redis.call('PEXPIRE', KEYS[3], int(left)) end
end

-- When a call may start under the permit that was chosen for it, at the earliest; 0 if it may now, or may not have it.
-- Refused, it gives back what it was handed, unless it has come ahead of its start. Woken late, it takes the start of
-- another that is handed a permit: else two would wait for each other for ever.
local function paced_for(key, terms, permit, record, call, now)
  local task, retries, dead, woken = unpack(call, 1, 4)
  local token, deadline, state = string.match(record or '', '^([^\n]*)\n(%d+)\n%d+\n([%l_]+)\n')
  local before = state == 'held_for_retry' and string.match(token, '|(%d+)|%x+$')
  local is_retry = before and retries and tonumber(retries) > tonumber(before)
  local is_dead = state == 'running' and token == dead
  if permit.rank == 9 or permit.rank == 1 and not is_retry and not is_dead then return 0 end
  local is_handed = state == 'handed' and now < tonumber(deadline)
  local others = is_handed and permit.handed - 1 or woken and math.max(permit.handed - 1, 0) or permit.handed
  local till = paced_till(key, terms, others, now, 0)
  if permit.rank == 2 and paced_till(key, terms, others, now, AHEAD) > 0 then hand_back(record, task) end
  return till
end

-- Choose a permit. KEYS has those of number 1 and up from `first` on: lock, record, lock, record...; `found` is what
-- MGET says of KEYS[1], KEYS[2], other keys, and those.
-- `fits(state, token, record, live)` ranks one that the record speaks of: 1 is the best, 4 a free one, nil none.
local function permit_for(found, first, limit, now, fits)
  local best, best_rank, best_till = {spare = 0, handed = 0}, 10, 0
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
    if state == 'handed' and value and now < deadline then best.handed = best.handed + 1 end
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
