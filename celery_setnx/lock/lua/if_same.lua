-- If keys are still what was seen: delete them; or let them last, and never shorter than they last already, as somebody
-- may have written the same again meanwhile.
--
-- KEYS  1...
-- ARGV  1... value of each key; '' = it is not there
--       behind them: ms from now for which each is to last at least; '' = delete them
-- Returns {word}
--       done | changed (one of them is another by now, or gone: nothing is touched)

local ms = tonumber(ARGV[#KEYS + 1])

for place, key in ipairs(KEYS) do
  if (redis.pcall('GET', key) or '') ~= ARGV[place] then return {'changed'} end
end
for _, key in ipairs(KEYS) do
  if not ms then
    redis.call('DEL', key)
  elseif redis.call('PTTL', key) < ms then
    redis.call('PEXPIRE', key, ms)
  end
end
return {'done'}
