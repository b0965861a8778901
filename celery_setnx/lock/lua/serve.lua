-- Let a line go on: hand the lock to the first who waits for it, if it is free, if its deadline has passed, or
-- if its holder is proved dead. A call to which it was handed in vain is passed over: it is out of the line for
-- a lease, twice that the next time, and an hour at most; then it stands where it stood.
--
-- KEYS  1 lock, 2 record, 3 line, 4 calls, 5 permits, 6 starts, 7... the others (see acquire.lua)
-- ARGV  1 token       new for every service: the lock's while it is kept for the first in line
--       2 hand over   microseconds for which the lock is kept for that one
--       3 remember    milliseconds that both keys outlive that
--       4 lease       microseconds
--       5 dead token  '' or the token of a running holder whose process is proved dead
--       6 away        '' or the id of a task for which the lock is kept, and which cannot come
--       7 unsent      not '': that one was not woken. It has its place again, and nobody the lock
--       8 terms       as acquire.lua; '0' if they are not known
-- Returns {word, now us, lock value, record, heir, call, next us}; with several permits, of one of them
--       handed (also as this token did it before) | taken_over (handed, as its holder has died)
--       held | empty (nobody waits) | more (as acquire.lua)
--       heir, call: who is to be woken, and with what; no call if it asks again by itself, or its wake-up is on
--       its way. next: when it is time to look again; 0 if that is not known, or nobody is there to be served

local token, hand_over, remember, lease = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), tonumber(ARGV[4])
local dead, absent, unsent = ARGV[5], ARGV[6], (ARGV[7] or '') ~= ''

local function int(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local function clock() return now end
local permit, found = false, redis.call('MGET', KEYS[1], KEYS[2], unpack(KEYS, 5))
local highest = math.min(tonumber(string.match(found[3] or '', '^(%d+) %d+:?[%d/]*$') or 1), 100)
if highest > 1 + math.max(0, #KEYS - 6) / 2 then return {'more', int(highest)} end
local limit, lapsed, terms, paced = 1, 0, '1', 0
if KEYS[6] then
  terms = ARGV[8] ~= '0' and ARGV[8] or terms_in(found[3])
  limit = limit_of(terms)
  permit = permit_for(found, 7, limit, now, function(state, h_token, of, live)
    if live and state == 'handed' and (h_token == token or heir_in(of) == absent) then return 1 end
    if not live and state == 'handed' then -- in vain: its heir is to have his place again, whatever else is free
      lapsed = lapsed + 1
      return 3
    end
    return live and dead ~= '' and h_token == dead and state == 'running' and 5 or nil
  end)
  paced = paced_till(KEYS[6], terms, permit.handed - (permit.rank == 1 and 1 or 0), now, AHEAD)
end
local record = redis.call('GET', KEYS[2])
local value = redis.pcall('GET', KEYS[1])
if type(value) == 'table' then value = '(not a string)' end
local h_token, deadline, fence, state, rest = string.match(record or '', '^([^\n]*)\n(%d+)\n(%d+)\n([%l_]+)\n(.*)$')
local before = record or false
if record and not h_token then
  return redis.error_reply('FOREIGNRECORD ' .. KEYS[2] .. ' is no record of celery_setnx')
end
local h_deadline, h_heir = tonumber(deadline or 0), state == 'handed' and string.match(rest, '^%d+\n(.*)$')

-- The line may have been empty, and is there anew: it lasts as long as the calls.
local function last_as_calls()
  local left = redis.call('PTTL', KEYS[4])
  if redis.call('PTTL', KEYS[3]) < left then redis.call('PEXPIRE', KEYS[3], int(left)) end
end
-- Those whose time away is over have their places again.
for _, task in ipairs(redis.call('ZRANGEBYSCORE', KEYS[3], '4000000000000000', int(4000000000000000 + now), 'LIMIT', 0, 100)) do
  local since = string.match(redis.call('HGET', KEYS[4], task) or '', '^%d+%+?|(%d+)|')
  redis.call('ZREM', KEYS[3], task) -- allowed when memory is full, and after one write the others are too
  if since then redis.call('ZADD', KEYS[3], since, task) end
  last_as_calls()
end
local function answer(word, heir, till)
  local call = heir and string.match(redis.call('HGET', KEYS[4], heir) or '', '^%d+|%d+|(.*)$')
  local next_away = {KEYS[3], '4000000000000000', '+inf', 'WITHSCORES', 'LIMIT', 0, 1}
  local _, score = unpack(redis.call('ZRANGEBYSCORE', unpack(next_away)))
  local back = score and tonumber(score) - 4000000000000000
  if permit and permit.next > 0 then till = till == 0 and permit.next or math.min(till, permit.next) end
  if permit and redis.call('ZCOUNT', KEYS[3], '-inf', '(4000000000000000') > 0 then
    local room = paced > 0 and paced or next_room(KEYS[6], terms, now)
    if room > 0 then till = till == 0 and room or math.min(till, room) end
    if permit.spare > 0 and paced == 0 then till = now end
  end
  if permit and lapsed > (permit.rank == 3 and 1 or 0) then till = now end
  if back and (till == 0 or back < till) then till = back end
  return {word, int(now), value, before, heir, call or false, int(till)}
end

local died = false
if value then
  local recorded = h_deadline > 0 and value == int(math.ceil(h_deadline / 1000000))
  if not string.match(value, '^%d+%.?%d*$') then return answer('held', false, 0) end
  if now < h_deadline then
    if state == 'handed' and h_token == token then return answer('handed', h_heir, h_deadline) end
    died = dead ~= '' and h_token == dead and state == 'running'
    if not died and not (h_heir and h_heir == absent) then return answer('held', false, h_deadline) end
  elseif recorded then
    died = state ~= 'resting' and not h_heir
  else
    local till = (math.min(tonumber(value), 1e11) + 1) * 1000000 -- the recipe takes over after its second
    if now < till then return answer('held', false, till) end
    died = true
  end
end

if h_heir then
  local h_call = redis.call('HGET', KEYS[4], h_heir) or ''
  local h_vain, h_since, call = string.match(h_call, '^(%d+)%+?|(%d+)|(.*)$')
  if not h_vain then
    redis.call('HDEL', KEYS[4], h_heir) -- it asked again by itself, or has left
  else
    redis.call('ZREM', KEYS[3], h_heir)
    if not unsent then
      redis.call('HSET', KEYS[4], h_heir, int(h_vain + 1) .. '|' .. h_since .. '|' .. call)
      h_since = int(4000000000000000 + now + math.min(lease * 2 ^ tonumber(h_vain), 3600000000))
    end
    redis.call('ZADD', KEYS[3], h_since, h_heir)
    last_as_calls() -- as a line that was empty
  end
end
local heir = false
local gone = {} -- those who have not asked again in time
local line = {KEYS[3], '-inf', '(4000000000000000', 'LIMIT', 0, 10}
local stays = permit and (permit.number >= limit or paced > 0) -- it drains, or may not be handed over yet
for _, task in ipairs((unsent or stays) and {} or redis.call('ZRANGEBYSCORE', unpack(line))) do
  local lingers = string.match(redis.call('HGET', KEYS[4], task) or '', '^@(%d+)$')
  if not lingers or clock() < tonumber(lingers) then
    heir, hand_over = task, lingers and tonumber(lingers) - now + 50000 or hand_over
    break
  end
  gone[#gone + 1] = task
end
if gone[1] then
  redis.call('ZREM', KEYS[3], unpack(gone))
  redis.call('HDEL', KEYS[4], unpack(gone))
end
if heir then
  redis.call('ZREM', KEYS[3], heir)
  if permit and terms ~= terms_in(found[3]) then -- it has changed, and no call has come since
    note_permits(KEYS[5], found[3], math.max(limit, permit.top), terms, math.ceil(hand_over / 1000) + remember)
  end
  deadline, state, rest = now + hand_over, 'handed', int(now) .. '\n' .. heir
  local expiry = int(math.ceil(deadline / 1000) + remember)
  redis.call('SET', KEYS[1], int(math.ceil(deadline / 1000000)), 'PXAT', expiry)
  record = table.concat({token, int(deadline), fence or '0', state, rest}, '\n')
  redis.call('SET', KEYS[2], record, 'PXAT', expiry)
  return answer(died and 'taken_over' or 'handed', heir, deadline)
end
if h_heir then -- it is nobody's any more
  redis.call('DEL', KEYS[1])
  redis.call('SET', KEYS[2], table.concat({h_token, '0', fence, 'released', rest}, '\n'), 'PX', int(remember))
end
return answer('empty', false, gone[10] and now or 0) -- behind ten who are gone more may wait
