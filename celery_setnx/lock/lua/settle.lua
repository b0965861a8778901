-- Say when it is time to look at a line again, or that nobody waits there any more.
--
-- KEYS  1 lines    (see due.lua)
-- ARGV  1 entry    task and lock
--       2 claimed  until when it was (us; see sweep.lua)
--       3 within   microseconds from now at which to look again; '' = nobody waits
-- Returns {word}
--       settled | changed (somebody has noted another time meanwhile: nothing is changed)

local entry, claimed, within = ARGV[1], ARGV[2], ARGV[3]
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local known = redis.call('ZSCORE', KEYS[1], entry)
if not known or int(tonumber(known)) ~= claimed then return {'changed'} end
if within == '' then
  redis.call('ZREM', KEYS[1], entry)
else
  local due = tonumber(time[1]) * 1000000 + tonumber(time[2]) + tonumber(within)
  redis.call('ZADD', KEYS[1], int(due), entry)
end
return {'settled'}
