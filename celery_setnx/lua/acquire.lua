-- Acquire a lock, or take it over once its deadline has passed.
--
-- KEYS  1 lock     Unix second at which it stops being valid, as in the SETNX recipe
--       2 record   token, deadline, fence, state, since (us), info: one per line
-- ARGV  1 token       proof of being the holder, new for every attempt
--       2 lease       microseconds
--       3 retention   milliseconds that both keys outlive the deadline
--       4 info        opaque text that names the holder
--       5 task id     '' or the id whose own resting lock lets this call pass
-- Returns {word, deadline us, fence, now us, lock value, record}: the record found, if any
--       acquired | again (this token holds it already) | taken_over | held

local token, lease, retention, info, task_id = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[2])
local h_token, h_deadline, h_fence, h_state = '', 0, 0, ''
if record then
  local t, d, f, s = string.match(record, '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n%d+\n')
  if not t then return redis.error_reply('FOREIGNRECORD ' .. KEYS[2] .. ' is no record of celery_setnx') end
  h_token, h_deadline, h_fence, h_state = t, tonumber(d), tonumber(f), s
end

local deadline = now + lease
local value = int(math.ceil(deadline / 1000000))
local word, old, own_rest = 'acquired', false, false
if redis.call('SETNX', KEYS[1], value) == 0 then
  local reply = redis.pcall('GET', KEYS[1])
  old = type(reply) == 'string' and reply or '(not a string)'
  local function held(till) return {'held', int(till), int(h_fence), int(now), old, record} end

  if not string.match(old, '^%d+%.?%d*$') then return held(0) end
  local recorded = h_deadline > 0 and old == int(math.ceil(h_deadline / 1000000))
  if now < h_deadline then
    -- Unexpired, the record decides: a classic loser may have overwritten the value.
    if h_token == token and h_state == 'running' then
      return {'again', int(h_deadline), int(h_fence), int(now), old, record}
    end
    own_rest = h_state == 'resting' and task_id ~= '' and string.match(h_token, '^(.*)|%d+|%x+$') == task_id
    if not own_rest then return held(h_deadline) end
  elseif not recorded then
    local till = (math.min(tonumber(old), 1e11) + 1) * 1000000 -- the recipe takes over strictly after its second
    if now < till then return held(till) end
  end
  local died = not recorded or (h_state ~= 'resting' and h_token ~= token)
  if died and not own_rest then word = 'taken_over' end
  old = redis.call('GETSET', KEYS[1], value)
end

local fence = int(math.max(h_fence + 1, now))
local expiry = int(math.ceil(deadline / 1000) + retention)
local expires = redis.pcall('PEXPIREAT', KEYS[1], expiry)
if type(expires) == 'table' then -- forbidden: what was free or expired is free again, not there for ever
  redis.call('DEL', KEYS[1])
  return expires
end
redis.call('SET', KEYS[2], table.concat({token, int(deadline), fence, 'running', int(now), info}, '\n'), 'PXAT', expiry)
return {word, int(deadline), fence, int(now), old, record}
