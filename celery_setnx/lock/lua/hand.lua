-- In front of the verbs that hand a permit on.

-- Keep a permit for the first in line, under a token, for so long (us), or while that one asks by itself. Returns it
-- and until when; or nothing, if nobody waits, and whether to look again at once.
local function hand_on(p, line, token, keep, remember)
  local heir, asks_for = line.next()
  if not heir or heir == '' then return nil, nil, heir == '' end
  local deadline = now + (asks_for or keep)
  p.token, p.since, p.info = token, now_text(), heir
  store(p, 'handed', deadline, remember)
  redis.call('ZREM', line.places, heir)
  return heir, deadline
end

-- Of how many permits woken calls are about to come.
local function count_handed(all)
  local count = 0
  for _, p in ipairs(all) do
    if p.heir and p.is_live then count = count + 1 end
  end
  return count
end
