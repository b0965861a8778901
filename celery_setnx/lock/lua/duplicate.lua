-- In front of the verbs that know of duplicates at publish time.

-- By which call one with this key is a duplicate: a word, and that call's task id; nothing if it is none. `dedupe` is
-- `until_started`; `until_done`: a call that runs, or is held for its retry, counts too; or `dedupe_for`: and one that
-- has succeeded, whose token is `done`. `p` is the lock's first permit.
local function duplicate_of(task, dedupe, mark, p, done)
  if mark and mark ~= task then return 'queued', mark end
  local has_begun = p and p.value and now < p.deadline and (p.state == 'running' or p.state == 'held_for_retry')
  local holder = has_begun and dedupe ~= 'until_started' and task_of(p.token)
  if holder then return 'running', holder end
  local before = dedupe == 'dedupe_for' and (task_of(done) or done)
  if before and before ~= task then return 'done', before end
end
