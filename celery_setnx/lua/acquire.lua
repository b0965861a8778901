-- Acquire a lock, or take it over once its deadline has passed or its holder is proved dead.
--
-- KEYS  1 lock     Unix second at which it stops being valid, as in the SETNX recipe
--       2 record   token, deadline, fence, state, since (us), info: one per line
--       3 mark     optional: id of the task that is queued with this key; its own ends here
-- ARGV  1 token       proof of being the holder, new for every attempt; a task's is id|retries|nonce
--       2 lease       microseconds
--       3 retention   milliseconds that both keys outlive the deadline
--       4 info        opaque text that names the holder
--       5 dead token  '' or the token of a running holder whose process is proved dead
-- Returns {word, deadline us, fence, now us, lock value, record, mark}: what was found, if anything
--       acquired | again (this token holds it already) | resumed (held for this task's retry)
--       taken_over | held

local token, lease, retention, info, dead = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[2])
local mark = KEYS[3] and redis.pcall('GET', KEYS[3])
if type(mark) ~= 'string' then mark = false end
local h_token, h_deadline, h_fence, h_state = '', 0, 0, ''
if record then
  local t, d, f, s = string.match(record, '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n%d+\n')
  if not t or #d > 17 or #f > 17 then
    return redis.error_reply('FOREIGNRECORD ' .. KEYS[2] .. ' is no record of celery_setnx')
  end
  h_token, h_deadline, h_fence, h_state = t, tonumber(d), tonumber(f), s
end

-- What an unexpired record lets this token do.
local function claim()
  if h_token == token and h_state == 'running' then return 'again' end
  if dead ~= '' and h_token == dead and h_state == 'running' then return 'taken_over' end
  local task, retries = string.match(token, '^(.*)|(%d+)|%x+$')
  local h_task, h_retries = string.match(h_token, '^(.*)|(%d+)|%x+$')
  if not task or task ~= h_task then return 'held' end
  if h_state == 'resting' then return 'acquired' end
  if h_state == 'held_for_retry' and tonumber(retries) > tonumber(h_retries) then return 'resumed' end
  return 'held'
end

local deadline = now + lease
local value = int(math.ceil(deadline / 1000000))
local word, old, fence = 'acquired', false, math.max(h_fence + 1, now)
if redis.call('SETNX', KEYS[1], value) == 0 then
  local reply = redis.pcall('GET', KEYS[1])
  old = type(reply) == 'string' and reply or '(not a string)'
  local function held(till) return {'held', int(till), int(h_fence), int(now), old, record, mark} end

  if not string.match(old, '^%d+%.?%d*$') then return held(0) end
  if now < h_deadline then
    -- Unexpired, the record decides: a classic loser may have overwritten the value.
    word = claim()
    if word == 'held' then return held(h_deadline) end
    if word == 'again' then return {word, int(h_deadline), int(h_fence), int(now), old, record, mark} end
    if word == 'resumed' then fence = h_fence end
  elseif h_deadline > 0 and old == int(math.ceil(h_deadline / 1000000)) then
    if h_state ~= 'resting' and h_token ~= token then word = 'taken_over' end
  else
    local till = (math.min(tonumber(old), 1e11) + 1) * 1000000 -- the recipe takes over after its second
    if now < till then return held(till) end
    word = 'taken_over'
  end
  old = redis.call('GETSET', KEYS[1], value)
end

local expiry = int(math.ceil(deadline / 1000) + retention)
local expires = redis.pcall('PEXPIREAT', KEYS[1], expiry)
if type(expires) == 'table' then -- forbidden: what was free or expired is free again, not there for ever
  redis.call('DEL', KEYS[1])
  return expires
end
local fields = {token, int(deadline), int(fence), 'running', int(now), info}
redis.call('SET', KEYS[2], table.concat(fields, '\n'), 'PXAT', expiry)
if mark and mark == string.match(token, '^(.*)|%d+|%x+$') then redis.call('DEL', KEYS[3]) end
return {word, int(deadline), int(fence), int(now), old, record, mark}
