-- Leave the line: the task was revoked, has expired, or need not run. No other message of it starts it any more.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 ticket, 6 permits, 7... the other permits' locks and records
-- ARGV  1 task id, 2 attempt, 3 copy (the message that leaves), 4 remember (ms), 5 shared (as acquire.lua)
-- Returns {word}
--       left | handed (the lock is kept for it: serve.lua passes it on) | more
--       stale (another message has started this attempt: nothing is changed)

-- use: lock permits ticket
local task, attempt, copy, remember = ARGV[1], tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])
local LINE, CALLS, TICKET, PERMITS = unpack(KEYS, 3, 6)
local known = redis.call('GET', PERMITS)
if more(known, 7) then return more(known, 7) end
local ticket = read_ticket(redis.call('GET', TICKET), attempt, copy)
if ticket.is_stale then return {'stale'} end
local is_its = ARGV[5] ~= '1' or ticket.waits or not is_known(CALLS, task)
local vain = is_its and string.match(redis.call('HGET', CALLS, task) or '', '^%d+') or ticket.vain
redis.call('ZREM', LINE, is_its and task or '') -- a full server allows this, and SET behind it
redis.call('HDEL', CALLS, is_its and task or '')
write_ticket(TICKET, attempt, copy, vain, 'PX', remember)
for _, p in ipairs(permits(7)) do
  if is_its and p.heir == task and redis.call('EXISTS', p.lock) == 1 then return {'handed'} end
end
return {'left'}
