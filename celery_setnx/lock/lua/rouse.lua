-- Have the lines of a scope be looked at now, as its live terms have changed.
--
-- KEYS  1... lines (see due.lua), each of a task
-- ARGV  1 what the names of the scope's locks begin with: `<prefix>:{<scope>`
-- Returns {how many}

-- use: lock
local head, count = ARGV[1], 0
for _, key in ipairs(KEYS) do
  for _, entry in ipairs(redis.call('ZRANGEBYSCORE', key, '(' .. now_text(), '+inf')) do
    local rest = string.sub(entry, 1, #head) == head and string.sub(entry, #head + 1) or ''
    if rest == '}' or string.match(rest, '^:%x+}$') then
      redis.call('ZADD', key, now_text(), entry)
      count = count + 1
    end
  end
end
return {int(count)}
