"""The model's lock against the real scripts: random operations on a random clock, every answer compared.

`BOUNDS=deep` runs ten times as many, `BOUNDS=small` a tenth (tests/bounds.py);
`DIFFERENTIAL_SEED=...` runs the one case that a failure named.
"""

import io
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import lru_cache
from hashlib import sha1
from typing import Any, NamedTuple

import pytest

from tests.bounds import SMALL, bound
from tests.model.injected import texts
from tests.protocol.client import Server, ServerError, packed, reply_in
from tests.twin.cases import KEYS, OPERATIONS, SEES, Case, Step
from tests.twin.directed import DIRECTED

LOCK_DB = 1
CASES = bound(3_200, small=150, deep=15_000)
PARTS = 3
MUTANTS_CASES = bound(7_500, deep=75_000)  # more than for the right ones: some flaws show at one moment only
RIGHT = texts()
SHAS = {verb: sha1(text.encode()).hexdigest() for verb, text in RIGHT.items()}

EVERY_ANSWER = {
    f"{verb}: {word}"
    for verb, answers in {
        "acquire": "acquired again resumed taken_over held paced stale line more FOREIGNRECORD",
        "renew": "renewed repaired gone lost",
        "release": "released resting repaired held_for_retry gone lost",
        "hold": "held_for_retry released resting handed failed gone lost",
        "park": "new parked handed stale taken more",
        "leave": "left handed stale more",
        "serve": "handed taken_over held empty more FOREIGNRECORD",
        "due": "noted",
        "sweep": "claimed nothing",
        "settle": "settled changed",
        "free": "released repaired gone lost more",
        "look": "found nothing waiters",
        "mark": "marked queued stalled running done WRONGTYPE",
        "extend": "extended lost WRONGTYPE",
        "unmark": "freed lost WRONGTYPE",
        "forget": "freed lost WRONGTYPE",
    }.items()
    for word in answers.split()
}
# A script, what it says once, and what it might say instead.
MISTAKES = [
    ("acquire", "later == 0 and t_copy == '' and copy == '-' and remember == '0'", "false",
        "t_copy == '' and copy == '-' and remember == '0'", "later == 0 and copy == '-' and remember == '0'",
        "later == 0 and t_copy == '' and remember == '0'", "later == 0 and t_copy == '' and copy == '-'"),
    ("acquire", "  if now < h_deadline then\n    --", "  if now <= h_deadline then\n    --"),
    ("acquire", "if now < till then", "if now <= till then"),
    ("acquire", "tonumber(old), 1e11) + 1", "tonumber(old), 1e11)"),
    ("acquire", "h_token == token and h_state == 'running'", "h_token == token"),
    ("acquire", "not task or task ~= h_task", "not task"),
    ("acquire", "h_token == dead and h_state == 'running'", "dead ~= '' and h_state == 'running'",
        "h_token == dead"),
    ("acquire", "tonumber(retries) > tonumber(h_retries)", "tonumber(retries) >= tonumber(h_retries)"),
    ("acquire", "if word == 'resumed' then fence = h_fence end", ""),
    ("acquire", "value = math.ceil(deadline / 1000000)", "value = math.floor(deadline / 1000000)"),
    ("acquire", "math.max(h_fence + 1, now)", "h_fence + 1"),
    ("acquire", "math.ceil(deadline / 1000) + retention", "math.floor(deadline / 1000) + retention"),
    ("renew", "h_token ~= token or state ~= 'running'", "state ~= 'running'"),
    ("renew", "if now >= tonumber(h_deadline)", "if now > tonumber(h_deadline)"),
    ("renew", "if not string.match(value", "if value == 'free' and string.match(value"),
    ("renew", "/ 1000000)), 'PXAT', expiry)", "/ 1000000)))"),
    ("release", "if h_token ~= token then", "if not h_token then"),
    ("release", "string.match(rest or '', '^%d+') or false}", "false}"),
    ("release", "if state ~= 'running' and state ~= 'failed' then return {state, now, value} end", ""),
    ("release", "return answer('released', string", "return answer(state, string"),
    ("release", "not ours and clock() < tonumber(h_deadline)", "not ours"),
    ("release", "and clock() < rest_until then", "and clock() then"),
    ("release", "redis.call('DEL', KEYS[1])", ""),
    ("release", "record, 'PX', remember)", "record)"),
    ("hold", "if h_token ~= token then", "if not h_token then"),
    ("hold", "string.match(rest or '', '^%d+') or false}", "false}"),
    ("hold", "if state ~= 'running' then return answer(state) end", ""),
    ("hold", "'held_for_retry', rest}", "'running', rest}"),
    ("free", "state ~= 'held_for_retry' or", ""),
    ("free", "~= task_id then", "== '' then"),
    ("acquire", "and waiters == '0' and not mark", "and not mark", "and waiters == '0'"),
    ("acquire", "KEYS[3], KEYS[5], KEYS[6], KEYS[7]) > 0", "KEYS[3], KEYS[5], KEYS[6]) > 0",
        "KEYS[3], KEYS[5], KEYS[7]) > 0", "KEYS[3], KEYS[6], KEYS[7]) > 0", "KEYS[5], KEYS[6], KEYS[7]) > 0"),
    ("acquire", "fence == now and since or int(fence)", "since"),
    ("acquire", "'00000' .. time[2]", "time[2]"),
    ("acquire", "if mark and mark == task and", "if mark and task and"),
    ("acquire", "then redis.call('DEL', KEYS[5]) end", "then redis.call('GET', KEYS[5]) end"),
    ("acquire", "if linger > 0 and", "redis.call('DEL', KEYS[#KEYS]) if linger > 0 and"),
    ("acquire", "if linger > 0 and not string.match(redis.call('HGET', KEYS[4], task) or '', '^%d') then",
        "if linger > 0 then"),
    ("acquire", "now, old, record, mark, waiters}", "now, old, record, false, waiters}"),
    ("release", "if again ~= '0' then", "if KEYS[5] then", "if false then", "if value and again ~= '0' then"),
    ("release", "task_id, 'NX', 'PX', again)", "task_id, 'PX', again)", "task_id, 'NX')",
        "token, 'NX', 'PX', again)"),
    ("mark", "queued = mark and mark ~= task_id", "queued = mark", "queued = false"),
    ("mark", "if queued or dedupe ~= 'until_started' then", "if true then",
        "if queued or dedupe == 'until_started' then", "if queued or dedupe == 'until_done' then",
        "if queued or dedupe == 'dedupe_for' then"),
    ("mark", "local done = dedupe == 'dedupe_for' and", "local done = dedupe ~= 'until_started' and",
        "local done = false and", "local done ="),
    ("mark", "done and done ~= task_id then", "done then", "false then"),
    ("release", "was_alone = word ~= 'gone'", "was_alone = true", "was_alone = word == 'released'"),
    ("release", "if KEYS[7] and ARGV[6] ~= '0' and state == 'running' and",
        "if KEYS[7] and state == 'running' and", "if KEYS[7] and ARGV[6] ~= '0' and", "if false and"),
    ("release", "was_alone and task_id then", "was_alone then"),
    ("release", "redis.call('SET', KEYS[7], token, 'PX', ARGV[6])", "redis.call('SET', KEYS[7], token)",
        "redis.call('SET', KEYS[7], token, 'NX', 'PX', ARGV[6])",
        "redis.call('SET', KEYS[7], task_id, 'PX', ARGV[6])",
        "redis.call('SET', KEYS[7], token, 'PX', remember)"),
    ("release", "state ~= 'running' and state ~= 'failed' then", "state ~= 'running' then"),
    ("mark", "done = done and (string.match(done, '^(.*)|%d+|%x+$') or done)", ""),
    ("mark", "if holder and value and", "if holder and"),
    ("mark", "now < tonumber(deadline)", "now <= tonumber(deadline)"),
    ("mark", "now < tonumber(deadline) and ", ""),
    ("mark", "state == 'running' or state == 'held_for_retry'", "state == 'running'", "state ~= ''"),
    ("mark", "local holder = string.match(token or '', '^(.*)|%d+|%x+$')", "local holder = token"),
    ("mark", "task_id, 'PX', int(lease))", "task_id)"),
    ("mark", "redis.call('PTTL', KEYS[3]) < lease", "true"),
    ("extend", "redis.call('GET', KEYS[1]) ~= task_id", "not redis.call('GET', KEYS[1])"),
    ("extend", "'PEXPIRE'", "'PERSIST'"),
    ("extend", "redis.call('PTTL', KEYS[1]) < lease", "true"),
    ("unmark", "redis.call('GET', KEYS[1]) ~= task_id", "not redis.call('GET', KEYS[1])"),
    ("unmark", "redis.call('DEL', KEYS[1])", ""),
    ("acquire", "later > 0 or later == 0 and t_copy", "later == 0 and t_copy", "later > 0 and t_copy"),
    ("acquire", "t_copy ~= '' and t_copy ~= copy", "t_copy ~= copy", "t_copy ~= ''"),
    ("acquire", "if heir and (in_line == heir or woken) then return 'acquired' end", ""),
    ("acquire", "if heir and (in_line == heir or woken) then", "if heir then",
        "if heir and in_line == heir then", "if heir and woken then",
        "if heir and (task == heir or woken) then"),
    ("acquire", "ARGV[13] == '1' and KEYS[4] and task and not waits and",
        "KEYS[4] and task and not waits and", "ARGV[13] == '1' and KEYS[4] and task and", "false and"),
    ("acquire", "string.match(kept or '', '^%d') and task", "kept and task"),
    ("acquire", "t_copy == '' and copy ~= '-', later", "t_copy == '', later", "copy ~= '-', later"),
    ("acquire", "later == 0 and t_vain or '0'", "'0'"),  # of a later attempt: test_line.py
    ("acquire", "'-inf', '(4000000000000000')", "'-inf', '+inf')"),
    ("acquire", "local first = waiters ~= '0' and", "local first ="),
    ("acquire", "redis.call('ZRANGE', KEYS[3], 0, 0)[1]", "redis.call('ZRANGE', KEYS[3], -1, -1)[1]"),
    ("acquire", "(in_line == heir or woken or in_line == first)", "(woken or in_line == first)",
        "(in_line == heir or in_line == first)", "(in_line == heir or woken)"),
    ("acquire", "first and not (in_line and", "first and not (task and"),
    ("acquire", "if KEYS[3] and in_line and (ticket or",
        "in_line = task if KEYS[3] and in_line and (ticket or"),
    ("acquire", "not barred and (not permit", "(not permit"),
    ("acquire", "if not old then return line() end", ""),
    ("acquire", "if word == 'taken_over' and barred then return line() end", ""),
    ("acquire", "then\n    if barred then return line() end", "then"),
    ("acquire", "return held(till) end\n    if barred then return line() end", "return held(till) end"),
    ("acquire", "if heir and KEYS[4] and in_line ~= heir", "if false and in_line ~= heir",
        "if heir and KEYS[4] and task ~= heir"),
    ("acquire", "redis.call('HDEL', KEYS[4], heir) --", "--"),
    ("acquire", "elseif now < h_deadline then --", "elseif true then --", "elseif false then --"),
    ("acquire", "h_vain .. '+|'", "h_vain .. '|'"),
    ("acquire", "redis.call('ZADD', KEYS[3], h_since, heir)", "redis.call('ZADD', KEYS[3], now, heir)"),
    ("acquire", "math.min(lease * 2 ^ tonumber(h_vain), 3600000000)", "lease * 2 ^ tonumber(h_vain)",
        "math.min(lease, 3600000000)"),
    ("acquire", "int(h_vain + 1)", "h_vain"),
    ("acquire", "int(4000000000000000 + now + away)", "int(4000000000000000 + now)", "int(now + away)"),
    ("acquire", "if redis.call('PTTL', KEYS[3]) < left then", "if false then"),
    ("acquire", "vain = string.match(redis.call('HGET', KEYS[4], in_line) or '', '^%d+') or vain", ""),
    ("acquire", "not heir and h_token ~= token", "h_token ~= token"),
    ("acquire", "ticket or in_line == heir or waiters ~= '0'", "ticket or waiters ~= '0'",
        "ticket or in_line == heir"),
    ("acquire", "  redis.call('ZREM', KEYS[3], in_line)\n", ""),
    ("acquire", "  redis.call('HDEL', KEYS[4], in_line)\n", ""),
    ("acquire", "remember == '0' and {'KEEPTTL'}", "remember == '0' and {'PX', 1000}",
        "ticket and {'KEEPTTL'}"),
    ("acquire", "'|' .. copy .. '|' .. vain", "'||' .. vain", "'|' .. copy .. '|0'"),
    ("acquire", "if ticket or KEYS[6] and remember ~= '0' then", "if ticket then"),
    ("acquire", "'@' .. int(now + linger)", "'@' .. int(now)"),
    ("acquire", "ARGV[9] == '0' and int(now) or ARGV[9]", "int(now)", "ARGV[9]"),
    ("acquire", "if redis.call('PTTL', key) < 60000 then", "if true then"),
    ("release", "elseif heir then", "elseif false then"),
    ("release", "redis.call('ZREM', KEYS[3], heir)", ""),
    ("release", "clock() + hand_over, 'handed'", "clock(), 'handed'"),
    ("release", "int(now) .. '\\n' .. heir", "rest"),
    ("release", "if state == 'handed' then return", "if state == 'gone' then return"),
    ("release", "if not lingers or clock() < tonumber(lingers) then", "if true then", "if not lingers then"),
    ("release", "clock() < tonumber(lingers) then", "clock() <= tonumber(lingers) then"),
    ("release", "lingers and tonumber(lingers) - now + 50000 or hand_over", "hand_over"),
    ("release", " or kept and not call then", " then"),
    ("release", "'^%d+|%d+|(.*)$'", "'^%d+%+?|%d+|(.*)$'"),
    ("release", "  redis.call('ZREM', KEYS[3], unpack(gone))\n", ""),
    ("release", "  redis.call('HDEL', KEYS[4], unpack(gone))\n", ""),
    ("release", "'(4000000000000000', 'LIMIT', 0, 10}", "'+inf', 'LIMIT', 0, 10}",
        "'(4000000000000000', 'LIMIT', 0, 1}", "'(4000000000000000', 'LIMIT', 0, 11}"),
    ("mark", "redis.call('EXISTS', KEYS[4]) == 0 then", "true then", "false then"),
    ("mark", "local stalled = not value or now >= tonumber(deadline or 0)",
        "local stalled = now >= tonumber(deadline or 0)", "local stalled = not value",
        "local stalled = not value or now > tonumber(deadline or 0)"),
    ("due", "if known then due = math.min(due, tonumber(known) - 1) end", "",
        "if known then due = math.min(due, tonumber(known)) end",
        "if known then due = tonumber(known) - 1 end"),
    ("due", "redis.call('PEXPIRE', KEYS[1], remember)", ""),
    ("due", "redis.call('PEXPIRE', KEYS[2], remember) == 0", "true",
        "redis.call('EXISTS', KEYS[2]) == 0"),
    ("due", "int(now - remember * 1000)", "int(now - remember * 1000 - 1)",
        "'(' .. int(now - remember * 1000)"),
    ("sweep", "redis.call('PEXPIRE', KEYS[1], remember) == 0", "true",
        "redis.call('EXISTS', KEYS[1]) == 0"),
    ("sweep", "if due[1] then redis.call('PEXPIRE', KEYS[place], remember) end", ""),
    ("sweep", "'0', int(now), 'LIMIT'", "'0', int(now - 1), 'LIMIT'"),
    ("sweep", "redis.call('ZADD', KEYS[place], claimed, entry)", ""),
    ("sweep", "for place = first, are_any and last or 0 do", "for place = first, 0 do",
        "for place = first, are_any and last - 1 or 0 do"),
    ("sweep", "int(place - 1), entry", "int(place), entry"),
    ("settle", "if not known then return {'changed', ''} end", "known = known or '0'"),
    ("settle", "int(tonumber(known)) ~= claimed", "false", "true"),
    ("settle", "if within == '' and not is_changed then", "if false then", "if within == '' then",
        "if not is_changed then"),
    ("settle", "redis.call('ZREM', KEYS[1], entry)", ""),
    ("settle", "now + tonumber(within)", "now"),
    ("settle", "if is_changed then due = math.min(due, tonumber(known)) end", "",
        "if is_changed then due = tonumber(known) end"),
    ("settle", "int(math.max(0, due - now))", "int(due - now)"),
    # Several permits: the scripts that are told of them, with the choice of one in front.
    ("acquire#", "if highest <= 1 and terms == '1' then", "if false then", "if highest <= 1 then",
        "if terms == '1' then"),
    ("acquire#", "elseif new ~= text or ms > 0 then", "elseif new ~= text then", "elseif ms > 0 then"),
    ("acquire#", "if new ~= text or left < ms then", "if left < ms then"),
    ("acquire#", "int(math.max(left, ms, 60000))", "int(math.max(ms, 60000))", "int(math.max(left, ms, 1))"),
    ("acquire#", "elseif now < deadline or deadline > 0 and value == int(math.ceil(deadline / 1000000)) then",
        "elseif now < deadline then"),
    ("acquire#", "fits(state, token, record, now < deadline)", "fits(state, token, record, true)"),
    ("acquire#", "        till = (math.min(tonumber(value), 1e11) + 1)",
        "        till = math.min(tonumber(value), 1e11)"),
    ("acquire#", "number < limit, now >= till", "true, now >= till", "number < limit, now > till"),
    ("acquire#", "free, till = false, 1e17 --", "--"),
    ("acquire#", "      top = number + 1\n", ""),
    ("acquire#", "if within then best.spare", "if true then best.spare"),
    ("acquire#", "best.spare = best.spare - 1 end", "end"),
    ("acquire#", "if since < oldest then", "if true then"),
    ("acquire#", "{value, record, number} end", "{value, record, 0} end"),
    ("acquire#", "(within or rank < 4) and", "within and", "true and"),
    ("acquire#", "or rank == best_rank and till < best_till)", ")", "or rank == best_rank)"),
    ("acquire#", "if highest > 1 + math.max(0, #KEYS - 8) / 2 then", "if false then"),
    ("acquire", "if highest > 1 + math.max(0, #KEYS - 8) / 2 then", "if false then"),
    ("acquire#", "in_line and heir_in(of) == in_line and 2 or live and woken and 6 or nil",
        "live and woken and 6 or nil", "in_line and heir_in(of) == in_line and 2 or nil",
        "in_line and heir_in(of) == in_line and 2 or live and 6 or nil",
        "task and heir_in(of) == task and 2 or live and woken and 6 or nil"),
    ("acquire#", "if is_own or h_token == token then", "if false then", "if is_own then",
        "if h_token == token then"),
    ("acquire#", "return live and state ~= 'resting' and 1 or passes and 3 or nil end",
        "return passes and 3 or nil end", "return 1 end",
        "return live and (state == 'resting' and 3 or 1) or nil end",
        "return live and state ~= 'resting' and 1 or 3 end"),
    ("acquire#", "live or not first or woken or in_line == first", "live or not first or woken",
        "live or not first or woken or task == first"),
    ("acquire#", "return live and dead ~= '' and", "return false and", "return dead ~= '' and"),
    ("acquire#", "permit.rank < 9 and math", "false and math", "true and math"),
    ("acquire#", "math.max(limit, permit.top, permit.number + 1), terms, ms", "limit, terms, ms",
        "math.max(limit, permit.top, permit.number + 1), int(limit), ms"),
    ("renew", "if KEYS[3] and redis", "if false and redis"),
    ("hold", "if KEYS[3] and redis", "if false and redis"),
    ("release", "if KEYS[6] and redis", "if false and redis"),
    ("release", "< ms then redis.call('PEXPIRE', KEYS[6], int(ms)) end",
        "> 0 then redis.call('PEXPIRE', KEYS[6], int(ms)) end"),
    ("release", "KEYS[3] and hand_over and redis", "KEYS[3] and redis"),
    ("mark", "for place = 6, #KEYS do", "for place = 6, 5 do"),
    ("mark", "stalled or not other or now >=", "stalled or now >="),
    ("free#", "return state == 'held_for_retry' and", "return"),
    # A pace: when a call may start, and what is noted of it.
    ("acquire#", "  redis.call('ZREMRANGEBYSCORE', key, '(' .. int(now), '+inf')\n", "",
        "  redis.call('ZREMRANGEBYSCORE', key, int(now), '+inf')\n"),
    ("acquire#", "key, int(now), '-inf', 'WITHSCORES'", "key, '+inf', '-inf', 'WITHSCORES'",
        "key, '(' .. int(now), '-inf', 'WITHSCORES'"),
    ("acquire#", "tonumber(count) - handed", "tonumber(count)", "tonumber(count) - 1"),
    ("acquire#", "math.max(left, 1) - 1", "math.max(left, 1)", "left - 1", "math.max(left, 2) - 1"),
    ("acquire#", "at and tonumber(at) + tonumber(period) - ahead or 0", "at and tonumber(at) or 0",
        "at and now + tonumber(period) or 0"),
    ("acquire#", "if left < 1 then till", "if left < 0 then till", "if left <= 1 then till",
        "if false then till"),
    ("acquire#", "math.max(till, now + math.min(tonumber(period), 1000000))",
        "now + math.min(tonumber(period), 1000000)", "math.max(till, now + tonumber(period))",
        "math.max(till, now + 1000000)"),
    ("acquire#", "if till <= now then return 0 end", "if till < now then return 0 end", ""),
    ("acquire#", "if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, int(2 * ms)) end", "",
        "redis.call('PEXPIRE', key, int(2 * ms))",
        "if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, int(ms)) end",
        "if redis.call('PTTL', key) < 2 * ms then redis.call('PEXPIRE', key, int(2 * ms)) end"),
    ("acquire#", "math.ceil(tonumber(period) / 1000)", "math.floor(tonumber(period) / 1000)"),
    ("acquire#", "  if period == 0 then return end\n", ""),
    ("acquire#", "math.max(period, redis.call('PTTL', key) * 1000)", "period",
        "redis.call('PTTL', key) * 1000"),
    ("acquire#", "{int(now), int(number), int(fence)}", "{int(now), 0, int(fence)}",
        "{int(now), int(number), int(now)}", "{int(now), int(number)}"),
    ("acquire#", "'-inf', '(' .. int(math.max(now - keep, tonumber(last or 0))))",
        "'-inf', int(math.max(now - keep, tonumber(last or 0))))",
        "'-inf', '(' .. int(now - keep))",
        "'-inf', '(' .. int(tonumber(last or 0)))",
        "'-inf', '(' .. int(math.max(now - period, tonumber(last or 0))))"),
    ("acquire#", "key, 1099, 1099, 'WITHSCORES'", "key, 1098, 1098, 'WITHSCORES'",
        "key, 1100, 1100, 'WITHSCORES'"),
    ("acquire#", "  redis.call('PEXPIRE', key, ms)\n", ""),
    ("acquire#", "int(math.ceil(math.max(keep, 2 * period) / 1000))", "int(math.ceil(keep / 1000))",
        "int(math.ceil(2 * period / 1000))", "int(math.floor(math.max(keep, 2 * period) / 1000))"),
    # What is written before, as the rest may be forbidden, or memory full: test_permits.py, test_pace.py
    ("acquire#", "math.max(tonumber(till), math.min(tonumber(till) + start - now, start + 3600000000))",
        "tonumber(till)", "tonumber(till) + start - now",
        "math.min(tonumber(till) + start - now, start + 3600000000)",
        "math.max(tonumber(till), math.min(tonumber(till) + start - now, now + 3600000000))",
        "math.max(tonumber(till), start + 3600000000)"),
    ("acquire#", "if permit.rank > 3 or not task or", "if not task or", "if permit.rank > 3 or",
        "if permit.rank > 2 or not task or"),
    ("acquire#", "'^(.*)|%d+|%x+$') ~= task then return false, record end",
        "'^(.*)|%d+|%x+$') == task then return false, record end"),
    ("acquire#", "permit.rank == 1 and string.match(rest, '^\\n%d+\\nheld_for_retry\\n')",
        "string.match(rest, '^\\n%d+\\nheld_for_retry\\n')", "permit.rank == 1", "false"),
    ("acquire#", "if not is_held then return redis.call('GET', KEYS[1]), record end",
        "if not is_held then return false, record end"),
    ("acquire#", "int(math.ceil(deadline / 1000000)), int(math.ceil(deadline / 1000) + retention)",
        "int(math.floor(deadline / 1000000)), int(math.ceil(deadline / 1000) + retention)",
        "int(math.ceil(deadline / 1000000)), int(math.floor(deadline / 1000) + retention)",
        "int(math.ceil(deadline / 1000000)), int(math.ceil(deadline / 1000))"),
    ("acquire#", "  redis.call('SET', KEYS[1], value, 'PXAT', expiry)\n  record = token", "  record = token"),
    ("acquire#", "record = token .. '\\n' .. int(deadline) .. rest", "record = record",
        "record = token .. int(deadline) .. rest"),
    ("acquire#", "redis.call('SET', KEYS[2], record, 'PXAT', expiry)\n  return value, record",
        "return value, record",
        "redis.call('SET', KEYS[2], record, 'KEEPTTL')\n  return value, record",
        "redis.call('SET', KEYS[2], record, 'PXAT', expiry)\n  return false, record",
        "redis.call('SET', KEYS[2], record, 'PXAT', expiry)\n  return value, false"),
    # hand_back of a call whose wake-up is on its way all the same: test_permits.py
    ("acquire#", "  redis.call('DEL', KEYS[1])\n  redis.call('SET', KEYS[2], token .. '0'",
        "  redis.call('SET', KEYS[2], token .. '0'"),
    ("acquire#", "'0' .. fence .. 'released' .. rest", "'0\\n0\\n' .. 'released' .. rest",
        "'0' .. fence .. 'handed' .. rest"),
    ("acquire#", "'released' .. rest, 'PX', 60000)", "'released' .. rest)", "'released' .. rest, 'KEEPTTL')"),
    ("acquire#", "if since then redis.call('ZADD', KEYS[3], since, heir) end", "",
        "redis.call('ZADD', KEYS[3], since or 1, heir)"),
    ("acquire#",
        "if redis.call('PTTL', KEYS[3]) < left then redis.call('PEXPIRE', KEYS[3], int(left)) end\nend\n\n",
        "end\n\n"),
    ("acquire#", "state == 'held_for_retry' and string.match(token", "string.match(token"),
    ("acquire#", "before and retries and tonumber(retries) > tonumber(before)",
        "before and tonumber(retries) > tonumber(before)",
        "before and retries and tonumber(retries) >= tonumber(before)", "before"),
    ("acquire#", "permit.rank == 9 or permit.rank == 1 and not is_retry and not is_dead then",
        "permit.rank == 9 or permit.rank == 1 then",
        "permit.rank == 9 or permit.rank == 1 and not is_retry then",
        "permit.rank == 9 or permit.rank == 1 and not is_dead then",
        "permit.rank == 1 and not is_retry and not is_dead then", "permit.rank == 9 then"),
    ("acquire#", "local is_dead = state == 'running' and token == dead", "local is_dead = token == dead",
        "local is_dead = state == 'running'"),
    ("acquire#", "state == 'handed' and now < tonumber(deadline)\n", "state == 'handed'\n", "false\n",
        "state == 'handed' and now <= tonumber(deadline)\n"),
    ("acquire#", "is_handed and permit.handed - 1 or woken and", "woken and", "is_handed and",
        "is_handed and math.max(permit.handed - 1, 0) or woken and", "true and", "false and"),
    ("acquire#", "or woken and math.max(permit.handed - 1, 0) or permit.handed", "or permit.handed", "or 0",
        "or woken and permit.handed - 1 or permit.handed"),
    ("acquire#", "if permit.rank == 2 and paced_till", "if paced_till", "if false and paced_till"),
    ("acquire#", "paced_till(key, terms, others, now, AHEAD) > 0 then", "true then",
        "paced_till(key, terms, others, now, AHEAD + 1) > 0 then"),
    ("acquire#", "paced_till(key, terms, others, now, 0)", "paced_till(key, terms, others, now, AHEAD)"),
    ("acquire#", "if state == 'handed' and value and now < deadline then",
        "if state == 'handed' and value then",
        "if state == 'handed' and now < deadline then",
        "if state == 'handed' and value and now <= deadline then"),
    ("acquire#", "  old, record = its_own(record, permit, task, paced, now, retention)\n", "",
        "  old, record = its_own(record, permit, task, paced, now, 0)\n",
        "  old, record = its_own(record, permit, task, now, now, retention)\n"),
    ("acquire#", "return answer('paced', paced, h_fence)", "return answer('held', paced, h_fence)",
        "return answer('paced', h_deadline, h_fence)", "return answer('paced', paced, fence)"),
    ("acquire#", "permit and note_start(KEYS[8], terms, permit.number, fence, now)", "false",
        "set and note_start(KEYS[8], terms, permit.number, fence, now)",
        "word ~= 'resumed' and note_start(KEYS[8], terms, permit.number, fence, now)",
        "permit and note_start(KEYS[8], terms, permit.number, h_fence, now)"),
    ("sweep", "'(' .. int(now), claimed, 'WITHSCORES'", "int(now), claimed, 'WITHSCORES'",
        "'-inf', claimed, 'WITHSCORES'", "'(' .. int(now), '+inf', 'WITHSCORES'",
        "'(' .. int(now), '(' .. claimed, 'WITHSCORES'"),
    ("sweep", "is_paced[tonumber(ARGV[place]) + 1] = true", "is_paced[tonumber(ARGV[place])] = true"),
    ("sweep", "if is_paced[place] then", "if true then", "if false then"),
    ("sweep", "math.min(next_due, tonumber(soon[2]))", "tonumber(soon[2])", "math.max(0, tonumber(soon[2]))"),
    ("sweep", "int(next_due - now)", "int(next_due)"),
    ("release", "KEYS[3] and not hand_over and redis.call('EXISTS', KEYS[3]) == 1", "false",
        "KEYS[3] and not hand_over", "KEYS[3] and redis.call('EXISTS', KEYS[3]) == 1"),
    ("free", "then return {'more', int(highest)} end", "then highest = 1 end"),
    ("free#", "then return {'more', int(highest)} end", "then highest = 1 end"),
]  # fmt: skip
MUTANTS = [(verb, right, wrong) for verb, right, *wrongs in MISTAKES for wrong in wrongs]


class Packed(NamedTuple):
    """A case as it is sent: a transaction, in which the server's own clock stands still; and its steps."""

    steps: list[Step]
    sent: bytes
    mark: bytes
    """What the server answers in the end."""


_TTL = re.compile(rb" in (\d+)")
_PLAYED_MS = 200  # no case takes as long on a busy machine


@lru_cache(1_500)
def case(seed: int) -> Packed:
    """The case of a seed, below 0 one of DIRECTED; after each step SEES says what the keys are."""
    steps = list(DIRECTED[seed].steps(SHAS) if seed < 0 else Case(seed, SHAS).steps())
    sees = packed("EVALSHA", sha1(SEES.encode()).hexdigest(), len(KEYS), *KEYS)
    played = b"".join(b"".join(packed(*command) for command in step.commands) + sees for step in steps)
    mark = f"end of case {seed}"
    sent = packed("MULTI") + played + packed("EXEC") + packed("ECHO", mark)
    return Packed(steps, sent, b"$%d\r\n%b\r\n" % (len(mark), mark.encode()))


AGREED: set[bytes] = set()
"""Digests of replies to a case that agree with the twin: they need no second look."""


def differences(seed: int, replies: bytes, slack_ms: int) -> Iterator[str]:
    """What the server answered otherwise than the twin, and after which operations."""
    steps = case(seed).steps
    stream = io.BytesIO(replies[replies.index(b"\r\n*") + 2 :])  # behind what says that all is queued
    seen = iter(reply_in(stream))
    before = ""
    for number, step in enumerate(steps):
        reply = [next(seen) for _ in step.commands][-1]
        sight = next(seen)
        found = []
        if step.reply is not None and (answered := _in_full(step, reply)) != step.reply:
            found.append(f"the script answered {answered}, the twin {step.reply}")
        if not _agree(sight, step.sight.encode(), slack_ms):
            found.append(f"the keys are {sight!r}, in the twin {step.sight!r}")
        if found and slack_ms and _is_about_to_lapse(before + step.sight):
            return  # it has lapsed already by the server's clock, which goes on
        if found:
            history = "\n".join(f"{n:3} {s.what} -> {s.reply}" for n, s in enumerate(steps[: number + 1]))
            yield f"DIFFERENTIAL_SEED={seed}, step {number}: {'; '.join(found)}\n{history}"
        before = step.sight


def _agree(sight: bytes, model: bytes, slack_ms: int) -> bool:
    """Whether the keys are the twin's, with TTLs that are shorter by the slack at most."""
    if sight == model or not slack_ms:
        return sight == model
    ttls = zip(_TTL.findall(sight), _TTL.findall(model))
    same = _TTL.sub(b"", sight) == _TTL.sub(b"", model)
    return same and all(0 <= int(expected) - int(found) <= slack_ms for found, expected in ttls)


def _is_about_to_lapse(model: str) -> bool:
    """Whether one of the twin's keys lapses sooner than a busy machine plays a case."""
    return any(int(ttl) <= _PLAYED_MS for ttl in _TTL.findall(model.encode()))


def _slack_ms(server: Server) -> int:
    """How far TTLs may be off: from Redis 7.2 on the server's own clock stands still in a transaction."""
    (version,) = re.findall(rb"redis_version:(\d+)\.(\d+)", server.ask("INFO", "server"))
    return 0 if tuple(map(int, version)) >= (7, 2) else 1000


def _in_full(step: Step, reply: Any) -> tuple[Any, ...]:
    """A reply as the twin gives it: scripts leave out what they did not find, or have not asked for."""
    if isinstance(reply, ServerError):
        return (str(reply).split()[0],)
    verb, model = step.what.split()[0], step.reply or ()
    words = reply.split(b" ") if isinstance(reply, bytes) else reply
    found = [item.decode() if isinstance(item, bytes) else item for item in words]
    full = tuple(str(item) if isinstance(item, int) else item for item in found)
    if verb == "acquire" and len(full) < 5 and full[0] == "acquired" and len(model) > 7:
        word, now, fence, *permit = full  # the records are compared by themselves
        rest = (*permit, *model[9:]) if permit else ()
        return (word, model[1], fence, now, None, model[5], None, "0", *rest)
    if verb == "release":
        word, now, value, *heir = full if len(full) > 1 else (*full, None, model[2])
        return (word, now or model[1], value, *(heir or (None, None)), len(full) == 1)
    return full


def first_difference(server: Server, seeds: Iterable[int], verb: str = "", text: str = "") -> tuple[int, str]:
    """Play the cases until one differs: how many it took, and how it differs or ''.

    With a verb its script is replaced by a text, and cases that do not run it are left out.
    """
    for script in (*RIGHT.values(), SEES, *[text] * bool(verb)):
        server.ask("SCRIPT", "LOAD", script)
    right, wrong = SHAS.get(verb, "").encode(), sha1(text.encode()).hexdigest().encode()
    slack_ms = _slack_ms(server)
    played = 0
    for seed in seeds:
        sent = case(seed).sent
        if right not in sent:
            continue
        played += 1
        replies = server.sent(sent.replace(right, wrong) if verb else sent, case(seed).mark)
        digest = sha1(replies).digest()
        if digest not in AGREED:
            for difference in differences(seed, replies, slack_ms):
                return played, difference
            AGREED.add(digest)
    return played, ""


@pytest.fixture
def wire(server, locks) -> Iterator[Server]:
    """A connection to the lock database, which is left empty."""
    with Server(server.port, LOCK_DB) as connection:
        yield connection
        connection.ask("FLUSHDB")


@pytest.mark.timeout(400)
@pytest.mark.parametrize("part", range(PARTS))
def test_scripts_answer_as_the_model_does(wire, part):
    """Over tens of thousands of random operations the scripts and the twin never differ."""
    only = os.environ.get("DIFFERENTIAL_SEED")
    _, difference = first_difference(wire, [int(only)] if only else range(part - len(DIRECTED), CASES, PARTS))
    assert not difference, difference


def test_operations_have_every_answer():
    """What is compared is all that the scripts can say."""
    words = Counter(step.label for seed in range(CASES) for step in case(seed).steps[1:])
    print(f"{sum(words.values()):,} operations: {dict(sorted(words.items()))}")
    assert sum(words.values()) == CASES * OPERATIONS
    assert SMALL or (CASES * OPERATIONS >= 20_000 and words.keys() >= EVERY_ANSWER)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("verb", "right", "wrong"), MUTANTS[:: bound(1, small=8)])
def test_changed_script_differs_from_the_model(wire, verb, right, wrong):
    """A script with one condition or expiry changed is found out."""
    assert RIGHT[verb].count(right) == 1
    seeds = range(-len(DIRECTED), MUTANTS_CASES)
    played, difference = first_difference(wire, seeds, verb, RIGHT[verb].replace(right, wrong))
    print(f"{verb}: {right!r} -> {wrong!r}: case {played:,}")
    assert difference
