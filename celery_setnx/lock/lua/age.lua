-- Let a lock grow older at once, with all that stands beside it: time passes for a test that does not wait.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 mark (see acquire.lua)
-- ARGV  1 by       microseconds
--       2 living   token of a holder that renews meanwhile, whose deadline stays; '' = nobody does
-- Returns {word}
--       aged | nothing (none of the keys is there)

local by, living = tonumber(ARGV[1]), ARGV[2]
local function int(number) return string.format('%.0f', number) end
local function before(time) return int(time > 0 and math.max(time - by, 1) or 0) end
local function expire_sooner(key)
  local left = redis.call('PTTL', key) - math.floor(by / 1000)
  if left > 0 then redis.call('PEXPIRE', key, int(left)) else redis.call('DEL', key) end
end

if redis.call('EXISTS', unpack(KEYS)) == 0 then return {'nothing'} end
local value = redis.pcall('GET', KEYS[1])
local record = redis.call('GET', KEYS[2])
local token, deadline, fence, state, since, info =
  string.match(record or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(%d+)\n(.*)$')
local renews = living ~= '' and token == living and state == 'running'
local ours = token and value == int(math.ceil(tonumber(deadline) / 1000000))

if token then
  if not renews then deadline = before(tonumber(deadline)) end
  local fields = {token, deadline, fence, state, before(tonumber(since)), info}
  redis.call('SET', KEYS[2], table.concat(fields, '\n'), 'KEEPTTL')
end
if ours then
  redis.call('SET', KEYS[1], int(math.ceil(tonumber(deadline) / 1000000)), 'KEEPTTL')
elseif type(value) == 'string' and string.match(value, '^%d+%.?%d*$') then
  redis.call('SET', KEYS[1], int(math.ceil(math.max(tonumber(value) - by / 1000000, 1))), 'KEEPTTL')
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
for place, key in ipairs(KEYS) do
  if not (renews and place <= 2) and redis.call('PTTL', key) > 0 then expire_sooner(key) end
end
return {'aged'}
