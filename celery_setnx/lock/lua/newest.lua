-- In front of the verbs that know which call of a key is the newest.
--
-- `<name>:newest` has the mark's place where the newest call replaces those before it. Each call has a generation, a
-- number that grows. One a line: the last generation that was reserved; the newest that was sent (`settled`); the
-- newest that has started, or ended without a start; since when one is sent and none has started (`first`, us; 0 = none
-- is); when one was reserved last (us); when the newest is due (us); how many were superseded since the last start; the
-- generation that stands in line, its task id, and that of the older one which it has changed places with; the newest
-- one's digest, and its task id.

local NUMBERS = {'reserved', 'settled', 'started', 'first', 'last', 'due', 'superseded', 'parked'}
local TEXTS = {'parked_as', 'replaced', 'digest', 'task'}
local OURS = '^' .. string.rep('(%d+)\n', #NUMBERS) .. '([^\n]*)\n([^\n]*)\n([^\n]*)\n([^\n]*)$'
local MOST = 4e15 -- as newest.py has it

-- Whether a generation counts: one from far ahead of the clock would be the newest for as long. Its call is as one
-- without a generation.
local function counts(generation) return generation > 0 and generation < now + HOUR end

local function newest_of(text)
  local found, newest = {string.match(text or '', OURS)}, {}
  for place in ipairs(NUMBERS) do
    if tonumber(found[place] or 0) > MOST then found = {} end -- another program's
  end
  for place, name in ipairs(NUMBERS) do newest[name] = tonumber(found[place] or 0) end
  for place, name in ipairs(TEXTS) do newest[name] = found[#NUMBERS + place] or '' end

  -- A call was sent: it replaces those before it that have not started. What has started is not touched.
  function newest.settle(generation, task, digest, due)
    if generation <= newest.started then return end
    if newest.first == 0 then newest.first = now end
    if generation < newest.settled then return end
    if generation > newest.settled then
      if newest.settled > newest.started then newest.superseded = newest.superseded + 1 end
      newest.settled, newest.digest, newest.due = generation, '', 0
    end
    newest.task = task
    if digest then newest.digest, newest.due = digest, due end
  end

  -- A call `begins`, or ends without a start: it counts as started.
  function newest.start(generation, task, begins)
    if generation >= newest.settled then newest.settled, newest.task = generation, task end
    newest.started = math.max(newest.started, generation)
    local is_pending = newest.settled > newest.started
    if begins or not is_pending then newest.first, newest.superseded = is_pending and now or 0, 0 end
  end

  -- When a call that is published now is due, and whether it leads: the first of a quiet key may start at once.
  function newest.due_for(quiet, most, may_lead)
    local is_pending = newest.settled > newest.started or newest.reserved > newest.settled
    if may_lead and not is_pending and now - newest.last >= quiet then return now, true end
    local due = now + quiet
    if newest.first > 0 then due = math.min(due, newest.first + most) end
    return math.max(due, now), false
  end

  function newest.store(key, ms)
    local lines = {}
    for place, name in ipairs(NUMBERS) do lines[place] = int(newest[name]) end
    for place, name in ipairs(TEXTS) do lines[#NUMBERS + place] = newest[name] end
    redis.call('SET', key, table.concat(lines, '\n'), 'PX', int(math.max(ms, redis.call('PTTL', key))))
  end

  return newest
end
