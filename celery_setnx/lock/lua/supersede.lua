-- In front of the verbs that receive a call which has a generation (see newest.lua).

-- Which newer call runs instead, if any: one that has started; or one that is only sent, unless this call need not
-- wait, and none has started for so long (`bound`, us) that a key which is published all the time would starve. Only a
-- start supersedes one that `leads`. A call that is to wait is known as sent from now on: its publisher may not have
-- said it. Returns that call's id, and whether something has changed.
local function receive(newest, generation, call, p, word, leads, bound)
  if word == 'again' or word == 'held' and p.kind == 'mine' and p.state == 'running' then return end -- it has started
  local may_start = word ~= 'held' and word ~= 'paced' and word ~= 'paused' and word ~= 'line'
  local is_overdue = newest.first > 0 and now >= newest.first + bound
  local is_replaced = not leads and newest.settled > generation and not (may_start and is_overdue)
  if newest.started > generation or is_replaced then return newest.task end
  if may_start or generation <= newest.settled then return end
  newest.settle(generation, call.task)
  return nil, true
end

-- Have a call that parks change places with the older one that stands in line. Returns the older one's id, if there is
-- one, and where the call stands from now on (us). Asked again, it says the same.
local function change_places(newest, generation, task, since, places, calls)
  local its = newest.parked < generation and newest.parked_as or newest.replaced
  local stands = tonumber(redis.call('ZSCORE', places, task) or nil)
  if stands and stands < tonumber(since) then since = int(stands) end
  local place = its ~= task and is_known(calls, its) and tonumber(redis.call('ZSCORE', places, its) or nil)
  if place and place < tonumber(since) then
    redis.call('ZADD', places, since, its)
    since = int(place)
  end
  newest.parked, newest.parked_as, newest.replaced = generation, task, its
  return place and its or false, since -- a table ends at its first nil
end
