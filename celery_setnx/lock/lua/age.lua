-- Let a lock grow older at once, with all that stands beside it: time passes for a test that does not wait.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 mark, 6 permits, 7 done, 8 starts, 9 newest, 10... the other permits
-- ARGV  1 by (us), 2 starts: '1' = the newest call starts when it is due, and does not starve (see supersede.lua)
--       3... tokens of holders that renew meanwhile, whose deadlines stay
-- Returns {word}
--       aged | nothing (none of the keys is there) | more

-- use: lock store permits newest
local by, living, renews = tonumber(ARGV[1]), {}, false
local LINE, CALLS, PERMITS, STARTS, NEWEST = KEYS[3], KEYS[4], KEYS[6], KEYS[8], KEYS[9]
local function before(time) return time > 0 and math.max(time - by, 1) or 0 end
local function expire_sooner(key)
  local left = redis.call('PTTL', key)
  if left <= 0 then return end
  left = left - math.floor(by / 1000)
  if left > 0 then redis.call('PEXPIRE', key, int(left)) else redis.call('DEL', key) end
end
local function age_scores(key)
  local found = redis.call('ZRANGE', key, 0, -1, 'WITHSCORES')
  for place = 1, #found, 2 do redis.call('ZADD', key, int(before(tonumber(found[place + 1]))), found[place]) end
end

local known = redis.call('GET', PERMITS)
if more(known, 10, '1') then return more(known, 10, '1') end
if redis.call('EXISTS', unpack(KEYS)) == 0 then return {'nothing'} end
for place = 3, #ARGV do living[ARGV[place]] = true end
for _, p in ipairs(permits(10)) do
  local lives = p.token and living[p.token] and p.state == 'running'
  local was_its = p.value == seconds(p.deadline)
  if p.token then
    if not lives then p.deadline = before(p.deadline) end
    p.since = int(before(tonumber(p.since)))
    redis.call('SET', p.beside, text_of(p, p.state, p.deadline), 'KEEPTTL')
  end
  if p.token and was_its then
    redis.call('SET', p.lock, seconds(p.deadline), 'KEEPTTL')
  elseif p.value and p.till ~= NEVER then
    redis.call('SET', p.lock, int(math.ceil(math.max(tonumber(p.value) - by / 1000000, 1))), 'KEEPTTL')
  end
  renews = renews or lives
  if not lives then
    expire_sooner(p.lock)
    expire_sooner(p.beside)
  end
end
age_scores(LINE)
age_scores(STARTS)
local calls = redis.call('HGETALL', CALLS)
for place = 1, #calls, 2 do
  -- Two kinds have a time: since when a call waits, and until when one asks again by itself.
  local head, moment, rest = string.match(calls[place + 1], '^(%d+%+?|)(%d+)(.*)$')
  if not head then head, moment, rest = string.match(calls[place + 1], '^(@)(%d+)(.*)$') end
  if head then redis.call('HSET', CALLS, calls[place], head .. int(before(tonumber(moment))) .. rest) end
end
local text = redis.call('GET', NEWEST)
if text then
  local newest = newest_of(text)
  local starts = ARGV[2] == '1' and newest.due > now and newest.first > 0
  local first = starts and math.max(newest.first - math.min(by, newest.due - now), 1)
  for _, name in ipairs({'first', 'last', 'due'}) do newest[name] = before(newest[name]) end
  newest.first = first or newest.first
  newest.store(NEWEST, 1)
end
for place = 3, 9 do -- what is known of the permits lasts as long as one that is renewed
  if place ~= 6 or not renews then expire_sooner(KEYS[place]) end
end
return {'aged'}
