-- In front of the verb that answers a call.

-- A call by its token. `me`: as whom it stands in line, if that place is not another call's (see ticket.lua). Only who
-- is the first there, or was woken, though late, `may_pass`.
local function caller(token, woken, first, others)
  local task, retries = task_of(token)
  local me = task and not (others and is_known(others, task)) and task
  return {
    token = token, task = task, own = task and task .. '|', retries = tonumber(retries or nil), me = me, woken = woken,
    may_pass = not first or me and (woken or me == first),
  }
end

-- Which permits are the call's; and which it may have beside free ones, within the limit: that of a holder whose
-- process is proved `dead`, and one that is handed to another.
local function kind_for(call, limit, dead)
  return function(p)
    local is_open = is_within(p, limit)
    if p.heir then return p.heir == call.me and 'for me' or p.is_live and call.woken and is_open and 'for another' end
    local is_its = call.own and string.sub(p.token, 1, #call.own) == call.own and task_of(p.token) == call.task
    if p.token ~= call.token and not is_its then return is_open and is_running(p, dead) and 'dead' end
    -- One that has lapsed, too: its first delivery may be alive, and must find that it has lost it. But not past a
    -- line: who is told of it would ask for ever.
    return p.is_live and p.state ~= 'resting' and 'mine' or (p.is_live or call.may_pass) and 'was mine'
  end
end

-- What becomes of the call with this permit, as far as the permit goes.
local function word_for(call, p, dead, second)
  if p.kind == 'held' then return 'held' end
  if p.kind ~= 'mine' and not (p.kind == 'was mine' and p.is_live) then
    return (was_left(p) or p.is_ours and p.token == call.token) and 'acquired' or 'taken_over'
  end
  if is_running(p, call.token) then return 'again' end
  if is_running(p, dead) then return 'taken_over' end
  local _, before = task_of(p.token)
  local is_later = before and call.retries and call.retries > tonumber(before)
  if p.state == 'held_for_retry' then return is_later and 'resumed' or 'held' end
  return p.state == 'resting' and call.task and (is_later or not second) and 'acquired' or 'held'
end

-- The permit that the call gets, or else meets; the answer; when it may start, if its pace or a pause (until `paused`)
-- is in the way; and what by_kind has seen.
local function claim(call, all, limit, pace, paused, dead, second)
  local seen = by_kind(all, limit, kind_for(call, limit, dead))
  -- Its own, whatever the limit; then a free one, a dead holder's, another's: those are within it.
  local p = seen.mine or seen['for me'] or seen['was mine']
  p = p or seen.free or seen.dead or seen['for another'] or seen.held
  local word = word_for(call, p, dead, second)
  if word == 'held' or word == 'again' then return p, word, nil, seen end
  -- Who is handed a permit has its start. One that was woken late takes another's: else two would wait for each other.
  local others = seen.handed - ((p.heir and p.is_live or call.woken and seen.handed > 0) and 1 or 0)
  local start = pace and pace.till(others, 0) or 0
  if paused > 0 then return p, 'paused', math.max(start, paused), seen end
  if start > 0 then return p, 'paced', start, seen end
  local needs_turn = word == 'taken_over' or not p.is_live
  if needs_turn and not call.may_pass and p.kind ~= 'for me' then return p, 'line', nil, seen end
  return p, word, nil, seen
end
