-- Set, or end, one live term of a key or of a task.
--
-- KEYS  1 terms: of a key a text (see terms.lua), of tasks a hash of such texts by their scopes
-- ARGV  1 scope ('' = KEYS 1 is a key's), 2 name (pause | limit | rate), 3 for (us from now; 0 = it ends)
--       4 value ('-' of a pause), and behind a blank what is told of it (JSON)
-- Returns {now us, the text before, the text from now on}; '' = there is none

-- use: lock change
local TERMS, scope, name, lasts = KEYS[1], ARGV[1], ARGV[2], tonumber(ARGV[3])
local is_keys = scope == ''
local before = is_keys and redis.call('GET', TERMS) or not is_keys and redis.call('HGET', TERMS, scope) or ''
local text, last = changed(before, name, lasts > 0 and now + lasts, ARGV[4])
local ms = math.ceil((last - now) / 1000) + 1
if is_keys and text ~= '' then
  redis.call('PEXPIRE', TERMS, int(ms)) -- a full server allows this, and SET behind it
  redis.call('SET', TERMS, text, 'PX', int(ms))
elseif is_keys then
  redis.call('DEL', TERMS)
elseif text ~= '' then
  redis.call('HDEL', TERMS, '') -- nothing: a full server allows this, and HSET behind it
  keep_for(TERMS, ms) -- before it is written, too: where it is forbidden nothing stays for ever
  redis.call('HSET', TERMS, scope, text)
  keep_for(TERMS, ms)
else
  redis.call('HDEL', TERMS, scope)
end
return {now_text(), before, text}
