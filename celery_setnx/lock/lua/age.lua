-- Let a lock grow older at once, with all that stands beside it: time passes for a test that does not wait.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 mark, 6 permits (see acquire.lua), 7 done (see release.lua)
--       8 starts, 9... the other permits
-- ARGV  1 by          microseconds
--       2... living   tokens of holders that renew meanwhile, whose deadlines stay
-- Returns {word}
--       aged | nothing (none of the keys is there) | more (as acquire.lua)

local by = tonumber(ARGV[1])
local function int(number) return string.format('%.0f', number) end
local function before(time) return int(time > 0 and math.max(time - by, 1) or 0) end
local function expire_sooner(key)
  local left = redis.call('PTTL', key)
  if left <= 0 then return end
  left = left - math.floor(by / 1000)
  if left > 0 then redis.call('PEXPIRE', key, int(left)) else redis.call('DEL', key) end
end

local permits = redis.call('GET', KEYS[6])
local highest = math.min(tonumber(string.match(permits or '', '^(%d+) %d+:?[%d/]*$') or 1), 100)
if highest > 1 + math.max(0, #KEYS - 8) / 2 then return {'more', int(highest)} end
if redis.call('EXISTS', unpack(KEYS)) == 0 then return {'nothing'} end
local living, renews = {}, false
for place = 2, #ARGV do living[ARGV[place]] = true end

local locks = {KEYS[1], KEYS[2], unpack(KEYS, 9)}
for place = 1, #locks, 2 do
  local name, beside = locks[place], locks[place + 1]
  local value = redis.pcall('GET', name)
  local token, deadline, fence, state, since, info =
    string.match(redis.call('GET', beside) or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(%d+)\n(.*)$')
  local lives = token and living[token] and state == 'running'
  local ours = token and value == int(math.ceil(tonumber(deadline) / 1000000))
  if token then
    if not lives then deadline = before(tonumber(deadline)) end
    local fields = {token, deadline, fence, state, before(tonumber(since)), info}
    redis.call('SET', beside, table.concat(fields, '\n'), 'KEEPTTL')
  end
  if ours then
    redis.call('SET', name, int(math.ceil(tonumber(deadline) / 1000000)), 'KEEPTTL')
  elseif type(value) == 'string' and string.match(value, '^%d+%.?%d*$') then
    redis.call('SET', name, int(math.ceil(math.max(tonumber(value) - by / 1000000, 1))), 'KEEPTTL')
  end
  if lives then
    renews = true
  else
    expire_sooner(name)
    expire_sooner(beside)
  end
end
local line = redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
for place = 1, #line, 2 do redis.call('ZADD', KEYS[3], before(tonumber(line[place + 1])), line[place]) end
local calls = redis.call('HGETALL', KEYS[4])
for place = 1, #calls, 2 do
  -- Two kinds have a time: since when a call waits, and until when one asks again by itself.
  local head, moment, rest = string.match(calls[place + 1], '^(%d+%+?|)(%d+)(.*)$')
  if not head then head, moment, rest = string.match(calls[place + 1], '^(@)(%d+)(.*)$') end
  if head then redis.call('HSET', KEYS[4], calls[place], head .. before(tonumber(moment)) .. rest) end
end
local starts = redis.call('ZRANGE', KEYS[8], 0, -1, 'WITHSCORES')
for place = 1, #starts, 2 do redis.call('ZADD', KEYS[8], before(tonumber(starts[place + 1])), starts[place]) end
for place = 3, 8 do -- what is known of the permits lasts as long as one that is renewed
  if place ~= 6 or not renews then expire_sooner(KEYS[place]) end
end
return {'aged'}
