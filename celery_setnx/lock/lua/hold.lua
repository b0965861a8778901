-- Keep a running lock for the holder's own retry. Nobody renews it meanwhile; acquire resumes it.
--
-- KEYS  1 lock, 2 record (see acquire.lua); and of a permit beside the first 3 permits, which is to last as long
-- ARGV  1 token
--       2 lease       microseconds from now until the lock may be taken over
--       3 retention   milliseconds that both keys outlive the deadline
-- Returns {word, now us, lock value}, or as release.lua if another has it
--       held_for_retry | gone | lost: as release.lua, and nothing is changed

local token, lease, retention = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[2])
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local h_token, h_deadline, fence, state, rest = string.match(record or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(.*)$')
local function answer(word) return {word, int(now), value} end

local function lost() return {'lost', int(now), value, false, string.match(rest or '', '^%d+') or false} end
if h_token ~= token then return lost() end
if state ~= 'running' then return answer(state) end
if not value then return answer('gone') end
local ours = value == int(math.ceil(tonumber(h_deadline) / 1000000))
local repaired = now < tonumber(h_deadline) and string.match(value, '^%d+%.?%d*$')
if not ours and not repaired then return answer('lost') end

local deadline = now + lease
local expiry = int(math.ceil(deadline / 1000) + retention)
redis.call('PEXPIREAT', KEYS[1], expiry)
if KEYS[3] and redis.call('PTTL', KEYS[3]) < lease / 1000 + retention then
  redis.call('PEXPIRE', KEYS[3], int(math.ceil(lease / 1000) + retention))
end
redis.call('SET', KEYS[1], int(math.ceil(deadline / 1000000)), 'PXAT', expiry)
local held = {token, int(deadline), fence, 'held_for_retry', rest}
redis.call('SET', KEYS[2], table.concat(held, '\n'), 'PXAT', expiry)
return answer('held_for_retry')
