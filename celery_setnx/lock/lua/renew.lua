-- Move the deadline of a held lock forward. An expired lease is never brought back to life.
--
-- KEYS  1 lock, 2 record (see acquire.lua); and of a permit beside the first 3 permits, which is to last as long
-- ARGV  1 token
--       2 lease       microseconds from now
--       3 retention   milliseconds that both keys outlive the deadline
-- Returns {word, deadline us, now us, lock value}
--       renewed | repaired (a classic loser had overwritten the value) | gone | lost

local token, lease, retention = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[2])
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local h_token, h_deadline, fence, state, rest = string.match(record or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(.*)$')
local function answer(word, deadline) return {word, deadline, int(now), value} end

if h_token ~= token or state ~= 'running' then return answer('lost', '0') end
if not value then return answer('gone', '0') end
if now >= tonumber(h_deadline) then return answer('lost', h_deadline) end
-- Text that is no number was put there on purpose, by somebody who is not in the recipe.
if not string.match(value, '^%d+%.?%d*$') then return answer('lost', h_deadline) end

local recorded = value == int(math.ceil(tonumber(h_deadline) / 1000000))
local deadline = now + lease
local expiry = int(math.ceil(deadline / 1000) + retention)
-- PEXPIREAT first: it is allowed when memory is full, and after one write the others are too.
redis.call('PEXPIREAT', KEYS[1], expiry)
if KEYS[3] and redis.call('PTTL', KEYS[3]) < lease / 1000 + retention then
  redis.call('PEXPIRE', KEYS[3], int(math.ceil(lease / 1000) + retention))
end
redis.call('SET', KEYS[1], int(math.ceil(deadline / 1000000)), 'PXAT', expiry)
redis.call('SET', KEYS[2], table.concat({token, int(deadline), fence, state, rest}, '\n'), 'PXAT', expiry)
return answer(recorded and 'renewed' or 'repaired', int(deadline))
