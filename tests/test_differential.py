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
from tests.model.cases import KEYS, OPERATIONS, SEES, Case, Step
from tests.model.injected import texts
from tests.protocol.client import Server, ServerError, packed, reply_in

LOCK_DB = 1
CASES = bound(1_500, small=150, deep=15_000)
PARTS = 3
MUTANTS_CASES = bound(7_500, deep=75_000)  # more than for the right ones: some flaws show at one moment only
RIGHT = texts()
SHAS = {verb: sha1(text.encode()).hexdigest() for verb, text in RIGHT.items()}

EVERY_ANSWER = {
    f"{verb}: {word}"
    for verb, answers in {
        "acquire": "acquired again resumed taken_over held stale FOREIGNRECORD",
        "renew": "renewed repaired gone lost",
        "release": "released resting repaired held_for_retry gone lost",
        "hold": "held_for_retry released resting handed gone lost",
        "park": "new parked handed stale",
        "leave": "left handed stale",
        "free": "released repaired gone lost",
        "look": "found nothing waiters",
        "mark": "marked queued running WRONGTYPE",
        "extend": "extended lost WRONGTYPE",
        "unmark": "freed lost WRONGTYPE",
    }.items()
    for word in answers.split()
}
# A script, what it says once, and what it might say instead.
MISTAKES = [
    ("acquire", "if now < h_deadline then", "if now <= h_deadline then"),
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
    ("release", "if state ~= 'running' then return {state, now, value} end", ""),
    ("release", "return answer('released', string", "return answer(state, string"),
    ("release", "not ours and clock() < tonumber(h_deadline)", "not ours"),
    ("release", "and clock() < rest_until then", "and clock() then"),
    ("release", "redis.call('DEL', KEYS[1])", ""),
    ("release", "record, 'PX', remember)", "record)"),
    ("hold", "if h_token ~= token then", "if not h_token then"),
    ("hold", "if state ~= 'running' then return answer(state) end", ""),
    ("hold", "'held_for_retry', rest}", "'running', rest}"),
    ("free", "state ~= 'held_for_retry' or", ""),
    ("free", "~= task_id then", "== '' then"),
    ("acquire", "and waiters == '0' and not (mark", "and not (mark"),
    ("acquire", "or ticket or heir) --", "or heir) --"),
    ("acquire", "not (mark or ticket", "not (ticket"),
    ("acquire", "unpack(KEYS, 5)) > 0", "KEYS[5]) > 0"),
    ("acquire", "fence == now and since or int(fence)", "since"),
    ("acquire", "'00000' .. time[2]", "time[2]"),
    ("acquire", "if mark and mark == task then", "if mark and task then"),
    ("acquire", "then redis.call('DEL', KEYS[5]) end", "then redis.call('GET', KEYS[5]) end"),
    ("acquire", "if type(mark) ~= 'string' then mark = false end", ""),
    ("acquire", "if linger > 0 then", "redis.call('DEL', KEYS[#KEYS]) if linger > 0 then"),
    ("acquire", "old, record, mark, waiters}\n  end", "old, record, false, waiters}\n  end"),
    ("release", "if again ~= '0' then", "if KEYS[5] then", "if false then", "if value and again ~= '0' then"),
    ("release", "task_id, 'NX', 'PX', again)", "task_id, 'PX', again)", "task_id, 'NX')",
        "token, 'NX', 'PX', again)"),
    ("mark", "if mark and mark ~= task_id then", "if mark then", "if false then"),
    ("mark", "if dedupe == 'until_done' then", "if true then", "if dedupe == 'until_started' then"),
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
    ("acquire", "if heir and (task == heir or woken) then return 'acquired' end", ""),
    ("acquire", "if heir and (task == heir or woken) then", "if heir then", "if heir and task == heir then",
        "if heir and woken then"),
    ("acquire", "woken = t_copy == '' and copy ~= '-'", "woken = t_copy == ''", "woken = copy ~= '-'"),
    ("acquire", "task ~= heir and now < h_deadline and", "task ~= heir and"),
    ("acquire", "if heir and KEYS[4] and task ~= heir", "if false and task ~= heir"),
    ("acquire", "ARGV[9] or '0', heir)", "now, heir)", "ARGV[9], heir)"),
    ("acquire", "not heir and h_token ~= token", "h_token ~= token"),
    ("acquire", "ticket or task == heir or waiters ~= '0'", "ticket or waiters ~= '0'",
        "ticket or task == heir"),
    ("acquire", "  redis.call('ZREM', KEYS[3], task)\n", ""),
    ("acquire", "  redis.call('HDEL', KEYS[4], task)\n", ""),
    ("acquire", "'KEEPTTL'", "'PX', 1000"),
    ("acquire", "'|' .. copy, unpack(", "'|', unpack("),
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
    ("release", " or call and string.match(call, '^@') then", " then"),
    ("release", "  redis.call('ZREM', KEYS[3], unpack(gone))\n", ""),
    ("release", "  redis.call('HDEL', KEYS[4], unpack(gone))\n", ""),
    ("release", "redis.pcall('ZRANGE', KEYS[3], 0, 9)", "redis.pcall('ZRANGE', KEYS[3], 0, 0)",
        "redis.pcall('ZREVRANGE', KEYS[3], 0, 9)"),
    ("park", "later > 0 or later == 0 and t_copy", "later == 0 and t_copy"),
    ("park", "t_copy ~= '' and t_copy ~= copy", "t_copy ~= copy", "t_copy ~= ''"),
    ("park", "if value and heir == task and", "if heir == task and", "if value and heir and"),
    ("park", "and now < tonumber(deadline) then", "then", "and now <= tonumber(deadline) then"),
    ("park", "redis.call('ZADD', KEYS[3], since, task)", "redis.call('ZADD', KEYS[3], now, task)"),
    ("park", "redis.call('HSET', KEYS[4], task, call)", "redis.call('HSETNX', KEYS[4], task, call)"),
    ("park", "'|', 'PX', int(remember))", "'|', 'KEEPTTL')"),
    ("park", "ticket and 'parked' or 'new'", "'parked'"),
    ("park", "rank and rank + 1 or 0", "rank or 0"),
    ("park", "not till or other == task or now", "not till or now"),
    ("park", "now >= tonumber(till)", "now > tonumber(till)"),
    ("park", "or now >= tonumber(till)", ""),
    ("park", "if watch > 0 and redis.call('ZCARD', KEYS[3]) > 0 then", "if watch > 0 then"),
    ("park", "if redis.call('PTTL', key) < remember then", "if true then"),
    ("park", "redis.call('ZADD', KEYS[3], since, task)\noutlive(KEYS[3])",
        "redis.call('ZADD', KEYS[3], since, task)"),
    ("leave", "later > 0 or later == 0 and t_copy", "later == 0 and t_copy"),
    ("leave", "t_copy ~= '' and t_copy ~= copy", "t_copy ~= ''"),
    ("leave", "'|' .. copy, 'PX', int(remember))", "'|', 'PX', int(remember))", "'|' .. copy)"),
    ("leave", "redis.call('ZREM', KEYS[3], task)", ""),
    ("leave", "redis.call('HDEL', KEYS[4], task)\n", ""),
    ("leave", "value and heir == task and now", "heir == task and now", "value and heir and now"),
    ("leave", "and now < tonumber(deadline)", ""),
    ("look", "redis.call('ZRANGE', KEYS[3], 0, 99, 'WITHSCORES')", "redis.call('ZRANGE', KEYS[3], 0, 99)",
        "redis.call('ZRANGE', KEYS[3], 0, 0, 'WITHSCORES')"),
]  # fmt: skip
MUTANTS = [(verb, right, wrong) for verb, right, *wrongs in MISTAKES for wrong in wrongs]


class Packed(NamedTuple):
    """A case as it is sent: a transaction, in which the server's own clock stands still; and its steps."""

    steps: list[Step]
    sent: bytes
    mark: bytes
    """What the server answers in the end."""


_TTL = re.compile(rb" in (\d+)")


@lru_cache(1_500)
def case(seed: int) -> Packed:
    """The case of a seed; after each step SEES says what the keys are."""
    steps = list(Case(seed, SHAS).steps())
    sees = packed("EVALSHA", sha1(SEES.encode()).hexdigest(), len(KEYS), *KEYS)
    played = b"".join(b"".join(packed(*command) for command in step.commands) + sees for step in steps)
    mark = f"end of case {seed}"
    sent = packed("MULTI") + played + packed("EXEC") + packed("ECHO", mark)
    return Packed(steps, sent, b"$%d\r\n%b\r\n" % (len(mark), mark.encode()))


AGREED: set[bytes] = set()
"""Digests of replies to a case that agree with the model: they need no second look."""


def differences(seed: int, replies: bytes, slack_ms: int) -> Iterator[str]:
    """What the server answered otherwise than the model, and after which operations."""
    steps = case(seed).steps
    stream = io.BytesIO(replies[replies.index(b"\r\n*") + 2 :])  # behind what says that all is queued
    seen = iter(reply_in(stream))
    for number, step in enumerate(steps):
        reply = [next(seen) for _ in step.commands][-1]
        sight = next(seen)
        found = []
        if step.reply is not None and (answered := _in_full(step, reply)) != step.reply:
            found.append(f"the script answered {answered}, the model {step.reply}")
        if not _agree(sight, step.sight.encode(), slack_ms):
            found.append(f"the keys are {sight!r}, in the model {step.sight!r}")
        if found:
            history = "\n".join(f"{n:3} {s.what} -> {s.reply}" for n, s in enumerate(steps[: number + 1]))
            yield f"DIFFERENTIAL_SEED={seed}, step {number}: {'; '.join(found)}\n{history}"


def _agree(sight: bytes, model: bytes, slack_ms: int) -> bool:
    """Whether the keys are the model's, with TTLs that are shorter by the slack at most."""
    if sight == model or not slack_ms:
        return sight == model
    ttls = zip(_TTL.findall(sight), _TTL.findall(model))
    same = _TTL.sub(b"", sight) == _TTL.sub(b"", model)
    return same and all(0 <= int(expected) - int(found) <= slack_ms for found, expected in ttls)


def _slack_ms(server: Server) -> int:
    """How far TTLs may be off: from Redis 7.2 on the server's own clock stands still in a transaction."""
    (version,) = re.findall(rb"redis_version:(\d+)\.(\d+)", server.ask("INFO", "server"))
    return 0 if tuple(map(int, version)) >= (7, 2) else 1000


def _in_full(step: Step, reply: Any) -> tuple[Any, ...]:
    """A reply as the model gives it: scripts leave out what they did not find, or have not asked for."""
    if isinstance(reply, ServerError):
        return (str(reply).split()[0],)
    verb, model = step.what.split()[0], step.reply or ()
    words = reply.split(b" ") if isinstance(reply, bytes) else reply
    found = [item.decode() if isinstance(item, bytes) else item for item in words]
    full = tuple(str(item) if isinstance(item, int) else item for item in found)
    if verb == "acquire" and len(full) == 3:
        word, now, fence = full
        return (word, model[1], fence, now, None, model[5], None, "0")  # the record is compared by itself
    if verb == "release":
        word, now, value, *heir = full if len(full) > 1 else (*full, None, model[2])
        return (word, now or model[1], value, *(heir or (None, None)))
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
    """Over tens of thousands of random operations the scripts and the model never differ."""
    only = os.environ.get("DIFFERENTIAL_SEED")
    _, difference = first_difference(wire, [int(only)] if only else range(part, CASES, PARTS))
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
    played, difference = first_difference(wire, range(MUTANTS_CASES), verb, RIGHT[verb].replace(right, wrong))
    print(f"{verb}: {right!r} -> {wrong!r}: case {played:,}")
    assert difference
