-- In front of the verb that starts calls, where a rate allows so many in a period (see pace.lua).

-- Note that a call has started under a permit. Starts are kept for the longest of several periods that has been asked
-- for within itself; but no more than any rate asks for (1,000), and permits may take back. Returns an error, if there
-- is one, and leaves nothing for ever.
local function note_start(pace, p, fence)
  local starts, keep = pace.starts, math.max(pace.period, redis.call('PTTL', pace.starts) * 1000)
  local lasts = math.ceil(math.max(keep, 2 * pace.period) / 1000)
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
-- is held for its retry is held for longer, as a broker may bring it often before; in a pause it comes often by itself.
-- Returns value and record.
local function put_off(p, word, start, line, retention)
  if p.kind == 'for me' and start - AHEAD > now then
    store(p, 'released', 0, 60000)
    line.put_back(p.heir, 'unsent')
  elseif p.kind == 'mine' and p.state == 'held_for_retry' then
    local till = word == 'paused' and now + PAUSE_KEEPS or math.min(p.deadline + start - now, start + HOUR)
    return store(p, p.state, math.max(p.deadline, till), retention)
  end
  local is_its = p.kind == 'mine' or p.kind == 'was mine'
  return is_its and p.value, is_its and record_of(p)
end
