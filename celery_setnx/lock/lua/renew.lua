-- Move the deadline of a held lock forward. An expired lease is never brought back to life.
--
-- KEYS  1 lock, 2 record; of a permit beside the first 3 permits
-- ARGV  1 token, 2 lease (us from now), 3 retention (ms that both keys outlive the deadline)
-- Returns {word, deadline us, now us, lock value}
--       renewed | repaired (another program had overwritten the value) | gone | lost

-- use: lock store
local token, lease, retention = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local p = read()
local function answer(word, deadline) return {word, deadline, now, p.value or false} end

if p.token ~= token or p.state ~= 'running' then return answer('lost', 0) end
if not p.value then return answer('gone', 0) end
if not p.is_live then return answer('lost', p.deadline) end -- past, or overwritten by who is not in the recipe
local deadline, word = now + lease, end_of(p) == 'repaired' and 'repaired' or 'renewed'
if KEYS[3] then keep_for(KEYS[3], math.ceil(lease / 1000) + retention) end
store(p, 'running', deadline, retention)
return answer(word, deadline)
