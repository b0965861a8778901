-- Keep a running lock for the holder's own retry. Nobody renews it meanwhile; acquire resumes it.
--
-- KEYS  1 lock, 2 record; of a permit beside the first 3 permits
-- ARGV  1 token, 2 lease (us from now), 3 retention (ms that both keys outlive the deadline)
-- Returns {word, now us, lock value}, as release.lua
--       held_for_retry | gone | lost, and nothing is changed

-- use: lock store
local token, lease, retention = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local p = read()
local function answer(word) return {word, now_text(), p.value or false} end

if p.token ~= token then return {'lost', now_text(), p.value or false, false, p.since or false} end
if p.state ~= 'running' then return answer(p.state) end
local word = end_of(p)
if word == 'gone' or not word then return answer(word or 'lost') end
if KEYS[3] then keep_for(KEYS[3], math.ceil(lease / 1000) + retention) end
store(p, 'held_for_retry', now + lease, retention)
return answer('held_for_retry')
