-- Have a body say "not now": no call of its key starts for a while. It ends no pause sooner that stands.
--
-- KEYS  1 lock, 2 record, 3 terms
-- ARGV  1 token, 2 for (us), 3 what is told of it (JSON)
-- Returns {word, now us, until us}
--       paused | stands (there is a pause that ends later) | lost (the caller holds the lock no more)

-- use: lock store change
local token, till, told, TERMS = ARGV[1], now + tonumber(ARGV[2]), ARGV[3], KEYS[3]
local p = read()
if p.token ~= token or p.state ~= 'running' or not p.is_live then return {'lost', now_text(), '0'} end
local before = redis.call('GET', TERMS)
local stands = paused_till(before)
if stands >= till then return {'stands', now_text(), int(stands)} end
local text, last = changed(before, 'pause', till, '- ' .. told)
local ms = int(math.ceil((last - now) / 1000) + 1)
redis.call('PEXPIRE', TERMS, ms) -- a full server allows this, and SET behind it
redis.call('SET', TERMS, text, 'PX', ms)
return {'paused', now_text(), int(till)}
