-- In front of the verbs: the server's clock (us), numbers as text, and a permit as a value.
--
-- A lock has one permit or several, and each permit has two keys. Its value is the Unix second at which it stops being
-- valid, as in the SETNX recipe. Its record is token, deadline (us), fence, state, since (us) and info, one per line.

local NEVER, HOUR, NOT_TEXT = 1e18, 3600000000, '(not a string)' -- us

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])

local function now_text() return time[1] .. string.sub('00000' .. time[2], -6) end
local function int(number) return string.format('%.0f', number) end

local function seconds(deadline) return int(math.ceil(deadline / 1000000)) end

local function keep_for(key, ms)
  if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, ms) end
end

-- A task's token is id|retries|nonce: the id, and the retries as text.
local function task_of(token) return string.match(token or '', '^(.*)|(%d+)|%x+$') end

-- A permit, by what its two keys hold. `ends` is when it ends or has ended (us); `till` is the same, and 0 once it is
-- past. A value that is no number is another program's, and never ends. A number is ours while the record's deadline is
-- ahead, or rounds up to it. Any other number ends one second later, as the recipe takes over after its second.
local function permit(number, lock, beside, value, record)
  if not value and not record then
    return {number = number, lock = lock, beside = beside, deadline = 0, ends = 0, till = 0}
  end
  local token, deadline, fence, state, since, info =
    string.match(record or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(%d+)\n()')
  if token and (#deadline > 17 or #fence > 17) then token, deadline, fence, state, since = nil end
  deadline = tonumber(deadline or 0)
  local is_time = value and string.match(value, '^%d+%.?%d*$')
  local is_live = is_time and now < deadline
  local is_ours = is_live or is_time and deadline > 0 and value == seconds(deadline)
  local ends = not value and 0 or not is_time and NEVER
  ends = ends or is_ours and deadline or (math.min(tonumber(value), 1e11) + 1) * 1000000
  return {
    number = number, lock = lock, beside = beside, value = value, record = record, token = token, fence = fence,
    deadline = deadline, state = state, since = since, is_live = is_live, is_ours = is_ours, ends = ends,
    till = now < ends and ends or 0, info = info, heir = state == 'handed' and string.sub(record, info) or nil,
  }
end

-- MGET shows nothing of a list, a hash or the like: another program's, and without an end.
local function see_other_type(p)
  if not p.value and redis.call('EXISTS', p.lock) == 1 then p.value, p.ends, p.till = NOT_TEXT, NEVER, NEVER end
end

-- A permit as replies tell of it: by its record; or by one of the state `foreign`, if the value is another program's.
local function record_of(p)
  if not p.value then return false end
  return p.is_ours and p.record or '\n' .. int(p.ends < NEVER and p.ends or 0) .. '\n0\nforeign\n0\n'
end
