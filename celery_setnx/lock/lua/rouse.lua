-- Have the lines of a scope be looked at now, as its live terms have changed. A thousand at a time: no other client of
-- the server waits for all of them.
--
-- KEYS  1 lines (see due.lua) of a task
-- ARGV  1 what the names of the scope's locks begin with: `<prefix>:{<scope>`
--       2 skip: how many lines, in their order, are known to be of another scope
-- Returns {skip}: ask again with that; -1 = all are due

-- use: lock
local LINES, head, skip, most = KEYS[1], ARGV[1], tonumber(ARGV[2]), 1000
local found = redis.call('ZRANGEBYSCORE', LINES, '(' .. now_text(), '+inf', 'LIMIT', skip, most)
for _, entry in ipairs(found) do
  local rest = string.sub(entry, 1, #head) == head and string.sub(entry, #head + 1) or ''
  if rest == '}' or string.match(rest, '^:%x+}$') then
    redis.call('ZADD', LINES, now_text(), entry)
  else
    skip = skip + 1
  end
end
return {int(#found < most and -1 or skip)}
