-- In front of the verbs that are about all permits of a lock. KEYS 1 and 2 are the first permit's; the others' stand
-- behind all other keys, a lock and a record each.

-- `<name>:permits` is '<in use> <terms>'. '5 3': five permits may have keys, and newcomers have a limit of 3.
-- '5 3:50/2000000': and 50 of them may start in any 2 s (us). Without that key there is one permit.
local function in_use(known) return math.min(tonumber(string.match(known or '', '^(%d+) %d+:?[%d/]*$') or 1), 100) end
local function terms_in(known)
  local limit, rate = string.match(known or '', '^%d+ ([1-9]%d*)(.*)$')
  local is_ours = limit and #known < 40 and (rate == '' or string.match(rate, '^:[1-9]%d*/[1-9]%d*$'))
  return is_ours and limit .. rate or '1'
end
local function limit_of(terms) return tonumber(string.match(terms, '^%d+')) end
local function is_within(p, limit) return p.number < limit end

-- That more permits are in use, or may be, than KEYS names from `first` on, or not the starts before: ask again.
local function more(known, first, terms)
  local count, has_starts = math.max(in_use(known), limit_of(terms)), #KEYS >= first - 1
  return (count > 1 + math.max(0, #KEYS - first + 1) / 2 or terms ~= '1' and not has_starts) and {'more', int(count)}
end

local function note_permits(key, known, highest, terms, ms)
  local new = int(highest) .. ' ' .. terms
  if highest <= 1 and terms == '1' then
    if known then redis.call('DEL', key) end
  elseif new ~= known or ms > 0 then
    local left = known and redis.call('PTTL', key) or 0
    if new ~= known or left < ms then redis.call('SET', key, new, 'PX', int(math.max(left, ms, 60000))) end
  end
end

-- All permits: the first, and those that KEYS names from `first` on.
local function permits(first)
  local found, all = redis.call('MGET', KEYS[1], KEYS[2], unpack(KEYS, first)), {}
  for number = 0, #found / 2 - 1 do
    local key, value, record = number == 0 and 1 or first + 2 * number - 2, found[2 * number + 1], found[2 * number + 2]
    all[number + 1] = permit(number, KEYS[key], KEYS[key + 1], value, record)
  end
  return all
end

-- Of each kind the permit that comes free first. `kind_of` names those that are the caller's, or were. Others within
-- the limit are 'free' or 'held'; one beyond a lowered limit drains. Beside them: how many are free (`spare`), or kept
-- for a woken call (`handed`); the limit, or the last permit with a value if that is more (`top`); when the first held
-- one comes free, and the second (`sooner`, `later`); and who has held one for longest.
local function by_kind(all, limit, kind_of)
  local seen, oldest = {spare = 0, handed = 0, top = limit, sooner = NEVER, later = NEVER}, NEVER
  for _, p in ipairs(all) do
    if not p.value and (p.heir or not seen.free) then see_other_type(p) end
    if p.till == 0 and is_within(p, limit) then seen.spare = seen.spare + 1 end
    if p.value or p.record or not seen.free then -- empty ones behind the first free one tell nothing
      if p.value then seen.top = math.max(seen.top, p.number + 1) end
      if p.heir and p.is_live then seen.handed = seen.handed + 1 end
      if p.till > 0 and tonumber(p.since or NEVER) < oldest then oldest, seen.longest = tonumber(p.since), p end
      if p.till > 0 and p.till < seen.later then
        seen.sooner, seen.later = math.min(seen.sooner, p.till), math.max(seen.sooner, p.till)
      end
      p.kind = (p.is_ours or p.heir and p.till == 0) and kind_of(p)
      if not p.kind and is_within(p, limit) then p.kind = p.till == 0 and 'free' or 'held' end
      if p.kind and (not seen[p.kind] or p.till < seen[p.kind].till) then seen[p.kind] = p end
    end
  end
  return seen
end
