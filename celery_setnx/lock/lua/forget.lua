-- Take back that a task has succeeded: it has failed after that, or has died before its result was stored. A release of
-- this run that is still to come notes nothing.
--
-- KEYS  1 done, 2 record, 3... the other permits' records
-- ARGV  1 token of the run that has failed
-- Returns {word}
--       freed | lost (no success of this run counts)

-- use: lock store
local token, done = ARGV[1], redis.call('GET', KEYS[1])
local began, succeeded = 0, 0 -- when this run had the lock (us), and when the one that has succeeded
local running -- this run's permit, if it has not ended
for place = 2, #KEYS do
  local p = permit(0, nil, KEYS[place], false, redis.call('GET', KEYS[place]))
  if p.token == done then succeeded = tonumber(p.since) end
  if p.token == token then
    began = tonumber(p.since)
    running = p.state == 'running' and p or running
  end
end
-- An earlier delivery of the same task counts as this run: its call has failed after all. A later one does not.
local is_earlier = began > succeeded and done and task_of(done) == task_of(token)
local counts = done == token or is_earlier
-- A full server allows this, be it of nothing, and SET behind it.
if counts or not done then redis.call('DEL', KEYS[1]) end
if running then redis.call('SET', running.beside, text_of(running, 'failed', running.deadline), 'KEEPTTL') end
return {counts and 'freed' or 'lost'}
