-- In front of the verbs that change who holds a permit. A full server allows PEXPIREAT, DEL and ZREM, and SET behind
-- them: so it lets a holder renew and give back, and grants nothing.

-- The permit of KEYS 1 and 2.
local function read()
  local found = redis.call('MGET', KEYS[1], KEYS[2])
  local p = permit(0, KEYS[1], KEYS[2], found[1], found[2])
  see_other_type(p)
  return p
end

local function text_of(p, state, deadline)
  local info = type(p.info) == 'number' and string.sub(p.record, p.info) or p.info
  return table.concat({p.token, deadline == 0 and '0' or int(deadline), p.fence or '0', state, p.since, info}, '\n')
end

-- Have a permit be in a state until a deadline (us), and remembered for some ms beyond it; with a deadline of 0 it is
-- free. Returns its value and its record.
local function store(p, state, deadline, remember)
  local text = text_of(p, state, deadline)
  if deadline == 0 then
    redis.call('DEL', p.lock)
    redis.call('SET', p.beside, text, 'PX', remember)
    return false, text
  end
  local value, expiry = seconds(deadline), int(math.ceil(deadline / 1000) + remember)
  redis.call('PEXPIREAT', p.lock, expiry)
  redis.call('SET', p.lock, value, 'PXAT', expiry)
  redis.call('SET', p.beside, text, 'PXAT', expiry)
  return value, text
end

-- What the end of a permit is called; nothing if the value is another's, and nobody may end it.
local function end_of(p)
  if not p.value then return 'gone' end
  return p.is_ours and (p.value == seconds(p.deadline) and 'released' or 'repaired')
end
