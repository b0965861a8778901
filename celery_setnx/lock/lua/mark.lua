-- Mark a key as queued, unless a call with this key is queued (or running, or has succeeded) already.
--
-- KEYS  1 lock, 2 record, 3 mark (id of the queued task), 4 line, 5 done (token of the run that has succeeded),
--       6... the other permits' locks and records
-- ARGV  1 task id, 2 lease (ms)
--       3 dedupe: until_started | until_done: who runs, or is held for its retry, counts too | dedupe_for: and who has
--         succeeded
-- Returns {word, task id, now us, lock value, record}
--       marked (also if this call was sent before) | queued | running | done
--       stalled (queued, but calls wait in line for a permit that nobody living has)

-- use: lock store permits
local task_id, lease, dedupe = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local MARK, LINE, DONE = unpack(KEYS, 3, 5)
local mark = redis.call('GET', MARK)
local function answer(word, id) return {word, id, now_text(), false, false} end

if mark and mark ~= task_id then
  local is_stalled = false
  for _, p in ipairs(redis.call('EXISTS', LINE) == 1 and permits(6) or {}) do
    see_other_type(p)
    is_stalled = is_stalled or p.till == 0
  end
  return answer(is_stalled and 'stalled' or 'queued', mark)
end
if dedupe ~= 'until_started' then
  local p = read()
  local is_ahead, state = p.value and now < p.deadline, p.state
  local is_run = is_ahead and (state == 'running' or state == 'held_for_retry') and task_of(p.token)
  if is_run then return {'running', task_of(p.token), now_text(), p.value, p.record} end
end
local done = dedupe == 'dedupe_for' and redis.call('GET', DONE)
done = task_of(done) or done
if done and done ~= task_id then return answer('done', done) end
-- Our own mark is there if this was sent twice; it may last for longer by now.
if redis.call('PTTL', MARK) < lease then redis.call('SET', MARK, task_id, 'PX', int(lease)) end
return answer('marked', task_id)
