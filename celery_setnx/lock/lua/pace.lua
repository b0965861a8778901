-- In front of the verbs that know how many may start in a period, where a rate says so.
--
-- `<name>:starts` is a sorted set of `us#permit#fence`, by the time (us) at which each start was. Later ones than now
-- count for nothing: the clock was set back.

local AHEAD = 20000 -- us before its start at which a call may be handed a permit: it is on its way meanwhile

local function pace_of(starts, terms)
  local count, period = string.match(terms, ':(%d+)/(%d+)$')
  if not count then return nil end
  count, period = tonumber(count), tonumber(period)
  local pace = {starts = starts, period = period}

  -- When one more may start at the earliest, or so much `ahead` of that; 0 if it may now. Who is `handed` a permit is
  -- about to start.
  function pace.till(handed, ahead)
    local left = count - handed
    local newest = {now, '-inf', 'WITHSCORES', 'LIMIT', math.max(left, 1) - 1, 1}
    local _, at = unpack(redis.call('ZREVRANGEBYSCORE', starts, unpack(newest)))
    local till = at and tonumber(at) + period - ahead or 0
    if left < 1 then till = math.max(till, now + math.min(period, 1000000)) end -- or later, if they come
    return now < till and till or 0
  end

  -- How many starts count now.
  function pace.count() return redis.call('ZCOUNT', starts, '(' .. int(now - period), now) end

  -- When to look again: ahead of when the first of the starts that count now counts no more. 0 if there is none.
  function pace.next_room()
    local from = '(' .. int(now - period + AHEAD)
    local _, at = unpack(redis.call('ZRANGEBYSCORE', starts, from, now, 'WITHSCORES', 'LIMIT', 0, 1))
    return at and tonumber(at) + period - AHEAD or 0
  end

  -- Have the starts last, as who is told to wait needs them. Not for who may start: a full server would let it.
  function pace.keep()
    local ms = math.ceil(period / 1000)
    if redis.call('PTTL', starts) < ms then redis.call('PEXPIRE', starts, 2 * ms) end
  end

  return pace
end
