-- Mark a key as queued, unless a call with this key is queued (or running, or has succeeded) already.
--
-- KEYS  1 lock, 2 record, 3 mark (id of the queued task), 4 done (token of the run that has succeeded)
-- ARGV  1 task id, 2 lease (ms)
--       3 dedupe: until_started | until_done: who runs, or is held for its retry, counts too | dedupe_for: and who has
--         succeeded
-- Returns {word, task id, now us, lock value, record}
--       marked (also if this call was sent before) | queued | running | done

-- use: lock store duplicate
local task_id, lease, dedupe = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local MARK, DONE = unpack(KEYS, 3, 4)
local mark = redis.call('GET', MARK)
local p = dedupe ~= 'until_started' and read()
local word, id = duplicate_of(task_id, dedupe, mark, p, dedupe == 'dedupe_for' and redis.call('GET', DONE))
if not word then
  word, id = 'marked', task_id
  -- Our own mark is there if this was sent twice; it may last for longer by now.
  if redis.call('PTTL', MARK) < lease then redis.call('SET', MARK, task_id, 'PX', int(lease)) end
end
local is_run = word == 'running'
return {word, id, now_text(), is_run and p.value, is_run and record_of(p)}
