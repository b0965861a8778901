-- Say when it is time to look at a line again, or that nobody waits there any more.
--
-- KEYS  1 lines (see due.lua)
-- ARGV  1 entry, 2 claimed until (us), 3 within (us from now; '' = nobody waits)
-- Returns {word, us until the line is due ('' if it is not there)}
--       settled | changed (somebody has noted another time meanwhile: the earlier one counts)

-- use: lock
local entry, claimed, within = ARGV[1], ARGV[2], ARGV[3]
local known = redis.call('ZSCORE', KEYS[1], entry)
if not known then return {'changed', ''} end
local is_changed = int(tonumber(known)) ~= claimed
if within == '' and not is_changed then
  redis.call('ZREM', KEYS[1], entry)
  return {'settled', ''}
end
-- Whoever has noted it knew only that it was claimed, and that by then it is due.
local due = within ~= '' and now + tonumber(within) or tonumber(known)
if is_changed then due = math.min(due, tonumber(known)) end
redis.call('ZREM', KEYS[1], '') -- nothing: allowed when memory is full, and after a write ZADD is too
redis.call('ZADD', KEYS[1], int(due), entry)
return {is_changed and 'changed' or 'settled', int(math.max(0, due - now))}
