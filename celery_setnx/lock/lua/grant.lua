-- In front of the verbs that let another have a permit.

-- Whether nobody has died under a permit that has come free.
local function was_left(p) return not p.value or p.is_ours and (p.state == 'resting' or p.heir ~= nil) end

local function is_running(p, token) return p.is_live and p.state == 'running' and token ~= '' and p.token == token end

-- An error, if a record is no text of ours.
local function foreign_record(p)
  local is_foreign = not p.token and redis.call('EXISTS', p.beside) == 1
  return is_foreign and redis.error_reply('FOREIGNRECORD ' .. p.beside .. ' is no record of celery_setnx')
end

-- Make a permit a new holder's: by SETNX, with the key's expiry in one step; or by GETSET, if its value has ended.
-- Returns its fence as text; or nothing, and an error.
local function grant(p, token, lease, retention, info, keeps_fence)
  local deadline = now + lease
  local value, expiry = math.ceil(deadline / 1000000), math.ceil(deadline / 1000) + retention
  if not p.value then
    redis.call('SET', p.lock, value, 'NX', 'PXAT', expiry)
  else
    redis.call('GETSET', p.lock, value)
    local expires = redis.pcall('PEXPIREAT', p.lock, expiry)
    if type(expires) == 'table' then -- forbidden: the lock is free, and not there for ever
      redis.call('DEL', p.lock)
      return nil, expires
    end
  end
  local since, before = now_text(), tonumber(p.fence or 0)
  local fence = keeps_fence and p.fence or before < now and since or int(before + 1)
  local record = table.concat({token, int(deadline), fence, 'running', since, info}, '\n')
  redis.call('SET', p.beside, record, 'PXAT', expiry)
  return fence
end
