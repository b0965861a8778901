-- Look at a lock, and at the first of those who wait for it, without touching it.
--
-- KEYS  1 lock, 2 record (see acquire.lua); and for a task's lock 3 line, 4 permits, 5... the others
-- ARGV  none
-- Returns {now us, waiters, permits, lock value, record, lock value, record... of each permit, task id, since us,
--       task id, since us... of the first hundred waiters}
--       more (and how many permits are in use: not all of them are in KEYS)

local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local permits = KEYS[4] and redis.call('GET', KEYS[4])
local highest = math.min(tonumber(string.match(permits or '', '^(%d+) %d+:?[%d/]*$') or 1), 100)
local count = 1 + math.max(0, #KEYS - 4) / 2
if highest > count then return {'more', int(highest)} end
local found = {int(tonumber(time[1]) * 1000000 + tonumber(time[2])), '0', int(count)}
for permit = 0, count - 1 do
  local first = permit == 0 and 1 or 3 + 2 * permit
  local value = redis.pcall('GET', KEYS[first])
  found[#found + 1] = type(value) == 'table' and '(not a string)' or value
  found[#found + 1] = redis.call('GET', KEYS[first + 1])
end
if KEYS[3] then
  local last = '(4000000000000000' -- behind it are those that are passed over
  found[2] = int(redis.call('ZCOUNT', KEYS[3], '-inf', last))
  local first = redis.call('ZRANGEBYSCORE', KEYS[3], '-inf', last, 'WITHSCORES', 'LIMIT', 0, 100)
  for _, item in ipairs(first) do found[#found + 1] = item end
end
return found
