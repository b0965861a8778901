-- In front of the verbs that ask on which terms calls have a lock: its task's own, and live ones, which an operator has
-- set since.
--
-- Own terms are how many permits there are, and how many starts: '3', or '3:50/2000000' (50 in 2 s; us). Live terms
-- are text, a line each, `<name> <until us> <value> <json>`: 'pause 1796... - {}', 'limit 1796... 2 {}' or
-- 'rate 1796... 10/60000000 {}'. They end by themselves. A key's are `<name>:terms`. A task's come with the caller,
-- behind its own: '3\nlimit ...'.

local PAUSE_KEEPS = 600000000 -- us for which a lock is held from now on for a retry that asks in a pause

local function as_limit(value) return string.match(value, '^[1-9]%d?%d?$') and tonumber(value) <= 100 and value end
local function as_rate(value) return #value < 23 and string.match(value, '^[1-9]%d?%d?%d?/[1-9]%d*$') end

-- When to look at a line whose next call may start then: a pause may end earlier.
local function look_for(start, paused) return paused > 0 and math.min(start, now + 30000000) or start end

-- The own terms; those that count now; and until when no call may start (us; 0 = one may). A key's live terms count
-- above its task's, and a pause of either counts. `said` is the caller's; with '0' in place of its own, those of the
-- last caller count (see permits.lua).
local function terms_of(said, known, of_key)
  local own, of_task = string.match(said, '^([^\n]*)\n?(.*)$')
  if own == '0' then own = terms_in(known) end
  local limit, rate, paused = string.match(own, '^%d+'), string.match(own, ':.*$') or '', 0
  for _, text in ipairs({of_task, of_key or ''}) do
    for line in string.gmatch(text, '[^\n]+') do
      local field, till, value = string.match(line, '^(%l+) (%d+) (%S+)')
      if field and #till < 18 and now < tonumber(till) then
        if field == 'pause' then paused = math.max(paused, tonumber(till)) end
        if field == 'limit' then limit = as_limit(value) or limit end
        if field == 'rate' and as_rate(value) then rate = ':' .. value end
      end
    end
  end
  return own, limit .. rate, paused
end
