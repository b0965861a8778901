-- In front of the verbs that start calls, or let them start, where a rate allows so many in a period.
--
-- `<name>:starts` is a sorted set of `us#permit#fence`, by the time (us) at which each start was. Later ones than now
-- count for nothing: the clock was set back.

local AHEAD = 20000 -- us before its start at which a call may be handed a permit: it is on its way meanwhile

local function pace_of(starts, terms)
  local count, period = string.match(terms, ':(%d+)/(%d+)$')
  if not count then return nil end
  count, period = tonumber(count), tonumber(period)
  local pace, ms = {}, math.ceil(period / 1000)

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

  -- Have the starts last, as who is told to wait needs them.
  function pace.keep()
    if redis.call('PTTL', starts) < ms then redis.call('PEXPIRE', starts, 2 * ms) end
  end

  -- How many starts count now.
  function pace.count() return redis.call('ZCOUNT', starts, '(' .. int(now - period), now) end

  -- When to look again: ahead of when the first of the starts that count now counts no more. 0 if there is none.
  function pace.next_room()
    local from = '(' .. int(now - period + AHEAD)
    local _, at = unpack(redis.call('ZRANGEBYSCORE', starts, from, now, 'WITHSCORES', 'LIMIT', 0, 1))
    return at and tonumber(at) + period - AHEAD or 0
  end

  -- Starts are kept for the longest of several periods that has been asked for within itself; but no more than any rate
  -- asks for (1,000), and permits may take back. Returns an error, if there is one, and leaves nothing for ever.
  function pace.note(p, fence)
    local keep = math.max(period, redis.call('PTTL', starts) * 1000)
    local lasts = math.ceil(math.max(keep, 2 * period) / 1000)
    local expires = redis.pcall('PEXPIRE', starts, lasts) -- before it is written, too
    if type(expires) == 'table' then
      redis.call('DEL', p.lock)
      return expires
    end
    redis.call('ZREMRANGEBYSCORE', starts, '(' .. now_text(), '+inf')
    redis.call('ZADD', starts, now, now_text() .. '#' .. p.number .. '#' .. fence)
    local _, oldest = unpack(redis.call('ZREVRANGE', starts, 1099, 1099, 'WITHSCORES'))
    redis.call('ZREMRANGEBYSCORE', starts, '-inf', '(' .. int(math.max(now - keep, tonumber(oldest or 0))))
    redis.call('PEXPIRE', starts, lasts)
  end

  -- Put a call off until its start: who was handed the permit, and has not come just ahead, stands where it stood; what
  -- is held for its retry is held for longer, as a broker may bring it often before. Returns value and record.
  function pace.put_off(p, start, line, retention)
    pace.keep() -- nothing is written before, for who may start: else a full server would let calls start
    if p.kind == 'for me' and start - AHEAD > now then
      store(p, 'released', 0, 60000)
      line.put_back(p.heir, 'unsent')
    elseif p.kind == 'mine' and p.state == 'held_for_retry' then
      local till = math.min(p.deadline + start - now, start + HOUR)
      return store(p, p.state, math.max(p.deadline, till), retention)
    end
    local is_its = p.kind == 'mine' or p.kind == 'was mine'
    return is_its and p.value, is_its and record_of(p)
  end

  return pace
end
