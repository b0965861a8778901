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

-- use: lock store permits duplicate
local task_id, lease, dedupe = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local MARK, LINE, DONE = unpack(KEYS, 3, 5)
local mark = redis.call('GET', MARK)
local p = dedupe ~= 'until_started' and read()
local word, id = duplicate_of(task_id, dedupe, mark, p, dedupe == 'dedupe_for' and redis.call('GET', DONE))
if word == 'queued' then
  for _, each in ipairs(redis.call('EXISTS', LINE) == 1 and permits(6) or {}) do
    see_other_type(each)
    if each.till == 0 then word = 'stalled' end
  end
elseif not word then
  word, id = 'marked', task_id
  -- Our own mark is there if this was sent twice; it may last for longer by now.
  if redis.call('PTTL', MARK) < lease then redis.call('SET', MARK, task_id, 'PX', int(lease)) end
end
local is_run = word == 'running'
return {word, id, now_text(), is_run and p.value, is_run and record_of(p)}
