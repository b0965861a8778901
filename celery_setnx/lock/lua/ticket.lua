-- In front of the verbs by which a call that waits may begin, stay or leave.
--
-- A ticket, `attempt|copy|misses`, says which attempt of a task waits; once that has begun, by which of its messages;
-- and how often it was woken and did not come.

-- What a ticket says to a message of an attempt. It is stale if another one has begun this attempt, or a later one; and
-- if it is the call's first command, and comes while the call waits: nobody hears the answer.
local function read_ticket(text, attempt, copy, is_first)
  local of, begun_by, misses = string.match(text or '', '^(%d+)|(.*)|(%d+)$')
  if not of then return {misses = '0'} end
  local is_this, later = tonumber(of) == attempt, tonumber(of) > attempt
  local is_begun = begun_by ~= '' and begun_by ~= copy
  return {
    is_there = true, is_this = is_this, is_earlier = not is_this and not later, misses = is_this and misses or '0',
    waits = begun_by == '', is_stale = later or is_this and (is_begun or begun_by == '' and is_first),
  }
end

local function write_ticket(key, attempt, copy, misses, ...)
  redis.call('SET', key, int(attempt) .. '|' .. copy .. '|' .. misses, ...)
end

-- Whether a task that is to be woken waits. If the caller has its task id, and does not wait itself, that is another
-- call, which was given the same id.
local function is_known(calls, task) return string.match(redis.call('HGET', calls, task) or '', '^%d') ~= nil end
