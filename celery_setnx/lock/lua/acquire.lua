-- Acquire a lock, or take it over once its deadline has passed or its holder is proved dead.
--
-- KEYS  1 lock     Unix second at which it stops being valid, as in the SETNX recipe
--       2 record   token, deadline, fence, state, since (us), info: one per line
--       and for a task's lock
--       3 line     sorted set: ids of the tasks that wait for it, by the time (us) since which they do; behind
--                  them, from 4e15 on, those that are passed over, by 4e15 and the time at which that ends
--       4 calls    hash: what each of them is woken with, by task id, as `vain|since|call`: how often the lock was
--                  handed to it in vain, a `+` if a wake-up is on its way all the same, and the time (us) since
--                  which it waits; or `@` and the time (us) until which it asks again by itself
--       5 mark     id of the task that is queued with this key; its own ends here
--       6 ticket   of the caller's task (see park.lua)
--       7 permits  how many permits are in use, and how many there are for newcomers; none if there is one only
--       8 starts   when calls have started, if that is paced (see permits.lua)
--       9... the other permits' locks and records, up to the limit
-- ARGV  1 token       proof of being the holder, new for every attempt; a task's is id|retries|nonce
--       2 lease       microseconds
--       3 retention   milliseconds that both keys outlive the deadline
--       4 info        opaque text that names the holder
--       5 dead token  '' or the token of a running holder whose process is proved dead
--       and for a call that has waited, or may
--       6 copy        which of its messages this is: only one of them may start it
--       7 remember    milliseconds for which that is remembered; '0' = as long as the ticket, if there is one. A call's
--                     first command says so: if its call waits by now, it comes late, and nobody hears the answer
--       8 linger      microseconds for which, if the lock is held, the task stands in line to ask again; '0' = not
--       9 since       microseconds since which the task waits: its place in the line; '0' = since now
--      10 attempt     number of the task's attempt, as tickets have it
--      11 terms       how many permits there are, and how many starts (see permits.lua); '1' if it is not said
--      12 second      '1' = another delivery of this attempt may have begun, and ended: the mark may be its retry's, and
--                     the lock may rest after it, so both stay as they are
--      13 shared      '1' = other calls may have this task id, and have its place if this one does not wait (optional)
-- Returns {word, deadline us, fence, now us, lock value, record, mark, waiters}: what was found, if anything;
--       the text 'acquired <now us> <fence>' if nothing was: a table costs as much as two commands.
--       With several permits {..., number of the permit, how many others are free, lock value, record, number} or
--       'acquired <now us> <fence> <number>': that of the one that is acquired; of held ones that which ends first,
--       and at the end the one that is held for longest
--       acquired (also if it was handed to this task) | again (this token holds it already)
--       resumed (held for this task's retry) | taken_over
--       held | stale (another message has started this call, or is to: nothing is changed)
--       paced (it is free, and the deadline is when a start may be; or the token's own, which is held for longer)
--       line (nobody living has it, but others wait: serve.lua hands it to the first; nothing is changed)
--       more (and how many permits are in use: not all of them are in KEYS; nothing is changed)

local token, lease, retention, info, dead = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), ARGV[4], ARGV[5]
local copy, remember, linger, attempt = ARGV[6] or '-', ARGV[7] or '0', tonumber(ARGV[8] or 0), tonumber(ARGV[10] or 0)
local function int(number) return string.format('%.0f', number) end
local function outlive(key)
  if redis.call('PTTL', key) < 60000 then redis.call('PEXPIRE', key, 60000) end
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local record, mark, ticket, permits, found, waiters = false, false, false, false, false, '0'
if KEYS[8] then
  found = redis.call('MGET', KEYS[1], KEYS[2], unpack(KEYS, 5))
  mark, ticket, permits = unpack(found, 3, 5)
else
  record = redis.call('GET', KEYS[2])
end
if found or KEYS[3] and redis.call('EXISTS', KEYS[3], KEYS[5], KEYS[6], KEYS[7]) > 0 then -- rarely: one question for all
  if not found then mark, ticket, permits = unpack(redis.call('MGET', KEYS[5], KEYS[6], KEYS[7])) end
  waiters = redis.pcall('ZCOUNT', KEYS[3], '-inf', '(4000000000000000')
  waiters = int(type(waiters) == 'number' and waiters or 0)
  local highest = math.min(tonumber(string.match(permits or '', '^(%d+) %d+:?[%d/]*$') or 1), 100)
  if highest > 1 + math.max(0, #KEYS - 8) / 2 then return {'more', int(highest)} end
end
local woken, vain, waits = false, '0', false
if ticket then
  local t_attempt, t_copy, t_vain = string.match(ticket, '^(%d+)|(.*)|(%d+)$')
  local later = tonumber(t_attempt) - attempt
  local is_late = later == 0 and t_copy == '' and copy == '-' and remember == '0'
  if is_late or later > 0 or later == 0 and t_copy ~= '' and t_copy ~= copy then
    return {'stale', 0, 0, now, false, false, mark, waiters}
  end
  woken, vain, waits = t_copy == '' and copy ~= '-', later == 0 and t_vain or '0', t_copy == ''
end
local task, retries = string.match(token, '^(.*)|(%d+)|%x+$')
-- As whom it stands in line: as nobody if that place is another call's (see park.lua).
local kept = ARGV[13] == '1' and KEYS[4] and task and not waits and redis.call('HGET', KEYS[4], task)
local in_line = not string.match(kept or '', '^%d') and task
local first = waiters ~= '0' and redis.call('ZRANGE', KEYS[3], 0, 0)[1]
local permit, terms, second = false, '1', ARGV[12] == '1'
if found then
  terms = ARGV[11] or '1'
  local limit = limit_of(terms)
  local own = task and task .. '|'
  permit = permit_for(found, 9, limit, now, function(state, h_token, of, live)
    if state == 'handed' then return in_line and heir_in(of) == in_line and 2 or live and woken and 6 or nil end
    local is_own = own and string.sub(h_token, 1, #own) == own and string.match(h_token, '^(.*)|%d+|%x+$') == task
    -- One that has lapsed, too: its first delivery may be alive, and must find that it has lost it. But not past a
    -- line: nobody serves that with a permit beyond the limit, and who is told of it would ask for ever.
    local passes = live or not first or woken or in_line == first
    if is_own or h_token == token then return live and state ~= 'resting' and 1 or passes and 3 or nil end
    return live and dead ~= '' and h_token == dead and state == 'running' and 5 or nil
  end)
  local ms = permit.rank < 9 and math.ceil(lease / 1000) + retention or 0 -- one that is held has seen to that
  note_permits(KEYS[7], permits, math.max(limit, permit.top, permit.number + 1), terms, ms)
  record = permit.record or redis.call('GET', KEYS[2]) -- of which MGET does not say that it is no text
end
local h_token, h_deadline, h_fence, h_state, h_info = '', 0, 0, '', 0
if record then
  local t, d, f, s, i = string.match(record, '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n%d+()\n')
  if not t or #d > 17 or #f > 17 then
    return redis.error_reply('FOREIGNRECORD ' .. KEYS[2] .. ' is no record of celery_setnx')
  end
  h_token, h_deadline, h_fence, h_state, h_info = t, tonumber(d), tonumber(f), s, i + 1
end
local heir = h_state == 'handed' and string.sub(record, h_info)
-- Nobody passes a line but who stands at its head, or was woken, though late.
local barred = first and not (in_line and (in_line == heir or woken or in_line == first))

local deadline = now + lease
local value = math.ceil(deadline / 1000000)
local word, old, fence = 'acquired', false, math.max(h_fence + 1, now)
local expiry = math.ceil(deadline / 1000) + retention
local function answer(said, till, of)
  local reply = {said, till, of, now, old, record, mark, waiters}
  if permit then
    local longest = permit.longest or {false, false, 0}
    reply[9], reply[10] = permit.number, permit.spare
    reply[11], reply[12], reply[13] = longest[1], longest[2] or false, longest[3]
  end
  return reply
end
local paced = permit and paced_for(KEYS[8], terms, permit, record, {task, retries, dead, woken}, now) or 0
if paced > 0 then
  old, record = its_own(record, permit, task, paced, now, retention)
  return answer('paced', paced, h_fence)
end
-- SETNX, with the key's expiry in one step
local set = not barred and (not permit or permit.free) and redis.call('SET', KEYS[1], value, 'NX', 'PXAT', expiry)
local alone = set and waiters == '0' and not mark -- nothing that the caller is to be told
if not set then
  old = redis.pcall('GET', KEYS[1])
  local function line() return answer('line', h_deadline, h_fence) end
  if not old then return line() end
  if type(old) ~= 'string' then old = '(not a string)' end
  local function held(till)
    -- One that has been woken has its place, and is known there, though it asks again.
    if linger > 0 and not string.match(redis.call('HGET', KEYS[4], task) or '', '^%d') then
      outlive(KEYS[4]) -- before it is written, too: where it is forbidden nothing stays for ever
      redis.call('HSET', KEYS[4], task, '@' .. int(now + linger))
      outlive(KEYS[4])
      redis.call('ZADD', KEYS[3], ARGV[9] == '0' and int(now) or ARGV[9], task)
      outlive(KEYS[3])
    end
    return answer('held', till, h_fence)
  end
  -- What an unexpired record lets this token do.
  local function allows()
    if h_token == token and h_state == 'running' then return 'again' end
    if dead ~= '' and h_token == dead and h_state == 'running' then return 'taken_over' end
    -- Nobody runs under a lock that is handed. Two that are woken late would wait for each other for ever.
    if heir and (in_line == heir or woken) then return 'acquired' end
    local h_task, h_retries = string.match(h_token, '^(.*)|(%d+)|%x+$')
    if not task or task ~= h_task then return 'held' end
    local is_later = tonumber(retries) > tonumber(h_retries)
    if h_state == 'resting' and (is_later or not second) then return 'acquired' end
    if h_state == 'held_for_retry' and is_later then return 'resumed' end
    return 'held'
  end
  if not string.match(old, '^%d+%.?%d*$') then return held(0) end
  if now < h_deadline then
    -- Unexpired, the record decides: a classic loser may have overwritten the value.
    word = allows()
    if word == 'held' then return held(h_deadline) end
    if word == 'again' then return answer(word, h_deadline, h_fence) end
    if word == 'taken_over' and barred then return line() end
    if word == 'resumed' then fence = h_fence end
  elseif h_deadline > 0 and old == int(math.ceil(h_deadline / 1000000)) then
    if barred then return line() end
    if h_state ~= 'resting' and not heir and h_token ~= token then word = 'taken_over' end
  else
    local till = (math.min(tonumber(old), 1e11) + 1) * 1000000 -- the recipe takes over after its second
    if now < till then return held(till) end
    if barred then return line() end
    word = 'taken_over'
  end
  old = redis.call('GETSET', KEYS[1], value)
  local expires = redis.pcall('PEXPIREAT', KEYS[1], expiry)
  if type(expires) == 'table' then -- forbidden: what was expired is free, not there for ever
    redis.call('DEL', KEYS[1])
    return expires
  end
end

local since = time[1] .. string.sub('00000' .. time[2], -6)
local fence_text = fence == now and since or int(fence)
local mine = token .. '\n' .. int(deadline) .. '\n' .. fence_text .. '\nrunning\n' .. since .. '\n' .. info
redis.call('SET', KEYS[2], mine, 'PXAT', expiry)
local forbidden = permit and note_start(KEYS[8], terms, permit.number, fence, now)
if forbidden then return forbidden end
if mark and mark == task and not second then redis.call('DEL', KEYS[5]) end
if heir and KEYS[4] and in_line ~= heir then
  local h_call = redis.call('HGET', KEYS[4], heir) or ''
  local h_vain, h_since, call = string.match(h_call, '^(%d+)%+?|(%d+)|(.*)$')
  if not h_vain then
    redis.call('HDEL', KEYS[4], heir) -- it asks again by itself, or does no more
  elseif now < h_deadline then -- overtaken, it stands in line where it stood
    redis.call('HSET', KEYS[4], heir, h_vain .. '+|' .. h_since .. '|' .. call)
    redis.call('ZADD', KEYS[3], h_since, heir)
  else
    local away = math.min(lease * 2 ^ tonumber(h_vain), 3600000000)
    redis.call('HSET', KEYS[4], heir, int(h_vain + 1) .. '|' .. h_since .. '|' .. call)
    redis.call('ZADD', KEYS[3], int(4000000000000000 + now + away), heir)
  end
  local left = redis.call('PTTL', KEYS[4]) -- the line may be there anew: it lasts as long as the calls
  if redis.call('PTTL', KEYS[3]) < left then redis.call('PEXPIRE', KEYS[3], int(left)) end
end
if KEYS[3] and in_line and (ticket or in_line == heir or waiters ~= '0') then -- it waits no more
  vain = string.match(redis.call('HGET', KEYS[4], in_line) or '', '^%d+') or vain
  redis.call('ZREM', KEYS[3], in_line)
  redis.call('HDEL', KEYS[4], in_line)
end
if ticket or KEYS[6] and remember ~= '0' then
  local ttl = remember == '0' and {'KEEPTTL'} or {'PX', remember}
  redis.call('SET', KEYS[6], int(attempt) .. '|' .. copy .. '|' .. vain, unpack(ttl))
end
if alone then return 'acquired ' .. since .. ' ' .. fence_text .. (permit and ' ' .. int(permit.number) or '') end
return answer(word, deadline, fence)
