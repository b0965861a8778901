-- Note that an entry of the schedule runs now, before it is published: for the leader alone, once per due time.
-- An entry is due because of its last run, so a due time is known by the last run before it.
--
-- KEYS  1 record     of the leader's lock (see acquire.lua)
--       2 entries    hash: for each entry its last run (us), runs and missed ticks, between spaces
-- ARGV  1 token      of the leader
--       2 entry
--       3 before     us: the last run because of which the entry is due
--       4 run        us: the last run from now on
--       5 missed     due times that had passed before this one was met
--       6 remember   milliseconds for which the entries are remembered
-- Returns {word, last run us, runs}
--       ticked (also if this very run is noted already: the script was sent again)
--       done (the entry has run since) | lost (the token is not the leader's)

local token, name, before, run = ARGV[1], ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4])
local missed, remember = tonumber(ARGV[5]), ARGV[6]
local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record = redis.call('GET', KEYS[1])
local entry = redis.call('HGET', KEYS[2], name)
local leader, deadline, state = string.match(record or '', '^([^\n]*)\n(%d+)\n%d+\n([%l_]+)\n')
local last, runs, skipped = string.match(entry or '', '^(%d+) (%d+) (%d+)$')
last, runs, skipped = tonumber(last or 0), tonumber(runs or 0), tonumber(skipped or 0)
local function answer(word) return {word, int(last), int(runs)} end

if leader ~= token or state ~= 'running' or now >= tonumber(deadline) then return answer('lost') end
if last == run then return answer('ticked') end
if last > before then return answer('done') end
last, runs = run, runs + 1
redis.call('PEXPIRE', KEYS[2], remember) -- first, too: see recall.lua
redis.call('HSET', KEYS[2], name, table.concat({int(last), int(runs), int(skipped + missed)}, ' '))
redis.call('PEXPIRE', KEYS[2], remember)
return answer('ticked')
