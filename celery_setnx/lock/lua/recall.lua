-- Read when the entries of a schedule ran last. A new one is remembered as it is first seen; one that the schedule has
-- no more is forgotten.
--
-- KEYS  1 entries (see tick.lua)
-- ARGV  1 remember (ms), 2... entry, and the last run (us) of one that is new; 0 = from now
-- Returns {entry's value...}, in this order

-- use: lock
local found, wanted = {}, {}
-- First, too: where it is forbidden nothing stays for ever; and it is allowed when memory is full, and HSETNX after it.
redis.call('PEXPIRE', KEYS[1], ARGV[1])
for place = 2, #ARGV, 2 do
  local entry, seen = ARGV[place], tonumber(ARGV[place + 1])
  wanted[entry] = true
  redis.call('HSETNX', KEYS[1], entry, int(seen > 0 and seen or now) .. ' 0 0')
  found[#found + 1] = redis.call('HGET', KEYS[1], entry)
end
for _, entry in ipairs(redis.call('HKEYS', KEYS[1])) do
  if not wanted[entry] then redis.call('HDEL', KEYS[1], entry) end
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return found
