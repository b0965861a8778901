-- In front of the verbs that know of those who wait.
--
-- The line is a sorted set of task ids by the time (us) since which they wait. From AWAY on stand those that are passed
-- over, by AWAY and the time at which that ends. The calls are a hash by task id: `misses|since|call`, how often the
-- task was woken and did not come, since when it waits, and the message that wakes it; `misses+|since|call` if that is
-- on its way already; or `@us`, until when the task asks again by itself.

local AWAY, WAITING = 4000000000000000, '(4000000000000000'

local function count_waiting(places)
  local count = redis.pcall('ZCOUNT', places, '-inf', WAITING)
  return type(count) == 'number' and count or 0
end

local function line_of(places, calls)
  local line = {places = places}
  -- What wakes a task; false if it asks again by itself, or its wake-up is on its way.
  function line.call_of(task)
    return string.match(redis.call('HGET', calls, task) or '', '^%d+|%d+|(.*)$') or false
  end

  -- The first, and for how long (us) it still asks by itself. Those that ask no more leave, unless the caller `looks`.
  function line.next(looks)
    local tasks = redis.pcall('ZRANGEBYSCORE', places, '-inf', WAITING, 'LIMIT', 0, 10)
    for _, task in ipairs(tasks) do
      local till = tonumber(string.match(redis.call('HGET', calls, task) or '', '^@(%d+)$') or nil)
      if not till or now < till then return task, till and till - now + 50000 end
      if not looks then line.leave(task) end
    end
    return #tasks == 10 and '' -- there may be one behind them
  end

  -- Returns how often the task was woken and did not come, if that is known.
  function line.leave(task)
    local misses = string.match(redis.call('HGET', calls, task) or '', '^%d+')
    redis.call('ZREM', places, task)
    redis.call('HDEL', calls, task)
    return misses
  end

  -- Give a task its place again: `unsent`, as it was not woken; `overtaken`, with a wake-up on its way; or `missed`:
  -- then it is passed over for a lease, twice that the next time, and an hour at most.
  function line.put_back(task, how, lease)
    local misses, since, call = string.match(redis.call('HGET', calls, task) or '', '^(%d+)%+?|(%d+)|(.*)$')
    if not misses then return redis.call('HDEL', calls, task) end -- it asks again by itself, or has left
    redis.call('ZREM', places, task) -- a full server allows this, and the others behind it
    if how == 'overtaken' then redis.call('HSET', calls, task, misses .. '+|' .. since .. '|' .. call) end
    if how == 'missed' then
      redis.call('HSET', calls, task, int(misses + 1) .. '|' .. since .. '|' .. call)
      since = int(AWAY + now + math.min(lease * 2 ^ misses, HOUR))
    end
    redis.call('ZADD', places, since, task)
    keep_for(places, redis.call('PTTL', calls)) -- it may have been empty, and be there anew
  end

  -- Let a task stand in line because it asks again until then. One that is to be woken has its place.
  function line.ask_again(task, since, till)
    if string.match(redis.call('HGET', calls, task) or '', '^%d') then return end
    keep_for(calls, 60000) -- before it is written, too: where it is forbidden nothing stays for ever
    redis.call('HSET', calls, task, '@' .. int(till))
    keep_for(calls, 60000)
    redis.call('ZADD', places, since, task)
    keep_for(places, 60000)
  end

  return line
end
