-- Take back that a task has succeeded: it has failed after that, or has died before its result was stored. A release of
-- this run that is still to come notes nothing.
--
-- KEYS  1 done (see release.lua), 2 record (see acquire.lua), 3... the other permits' records
-- ARGV  1 token    of the run that has failed
-- Returns {word}
--       freed
--       lost (no success of this run counts)

local token = ARGV[1]
local function task_of(text) return string.match(text or '', '^(.*)|%d+|%x+$') end

local done = redis.call('GET', KEYS[1])
local began, succeeded = 0, 0 -- when this run had the lock (us), and when the one that has succeeded
local running, failed -- this run's record, if it has not ended, and what that becomes
for place = 2, #KEYS do
  local record = redis.call('GET', KEYS[place])
  local h_token, numbers, state, rest, since =
    string.match(record or '', '^([^\n]*)(\n%d+\n%d+\n)([%l_]+)(\n(%d+)\n.*)$')
  if h_token == done then succeeded = tonumber(since) end
  if h_token == token then
    began = tonumber(since)
    if state == 'running' then running, failed = KEYS[place], token .. numbers .. 'failed' .. rest end
  end
end
-- An earlier delivery of the same task counts as this run: its call has failed after all. A later one does not.
local is_earlier = began > succeeded and done and task_of(done) == task_of(token)
local counts = done == token or is_earlier
-- Allowed when memory is full, be it of nothing, and after a write SET is too.
if counts or not done then redis.call('DEL', KEYS[1]) end
if running then redis.call('SET', running, failed, 'KEEPTTL') end
return {counts and 'freed' or 'lost'}
