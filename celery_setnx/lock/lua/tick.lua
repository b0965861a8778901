-- Note that an entry of the schedule runs now, before it is published: for the leader alone, once per due time. An
-- entry is due because of its last run, so a due time is known by the last run before it.
--
-- KEYS  1 record of the leader's lock, 2 entries (hash: last run us, runs and missed ticks, between spaces)
-- ARGV  1 token of the leader, 2 entry, 3 before (us: the last run because of which it is due), 4 run (us: the last run
--       from now on), 5 missed (due times that had passed before), 6 remember (ms)
-- Returns {word, last run us, runs}
--       ticked (also if this run is noted already) | done (the entry has run since) | lost (the leader is another)

-- use: lock
local token, name, before, run = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local missed, remember = tonumber(ARGV[5]), ARGV[6]
local p = permit(0, nil, KEYS[1], false, redis.call('GET', KEYS[1]))
local entry = redis.call('HGET', KEYS[2], name)
local last, runs, skipped = string.match(entry or '', '^(%d+) (%d+) (%d+)$')
last, runs, skipped = tonumber(last or 0), tonumber(runs or 0), tonumber(skipped or 0)
local function answer(word) return {word, int(last), int(runs)} end

if p.token ~= token or p.state ~= 'running' or now >= p.deadline then return answer('lost') end
if last == run then return answer('ticked') end
if last > before then return answer('done') end
last, runs = run, runs + 1
redis.call('PEXPIRE', KEYS[2], remember) -- first, too: see recall.lua
redis.call('HSET', KEYS[2], name, table.concat({int(last), int(runs), int(skipped + missed)}, ' '))
redis.call('PEXPIRE', KEYS[2], remember)
return answer('ticked')
