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
    ("forget", "counts = done == token or is_earlier", "counts = done or is_earlier", "counts = is_earlier",
        "counts = done == token"),
    ("forget", "if h_token == token then", "if h_token then", "if false then"),
    ("forget", "and task_of(done) == task_of(token)", ""),
    ("forget", "is_earlier = began > succeeded and", "is_earlier = "),  # of a later one: test_marks.py
    ("forget", "if state == 'running' then", "if true then", "if false then"),
    ("forget", ", 'KEEPTTL')", ")"),
    ("forget", "redis.call('DEL', KEYS[1])", ""),
    ("park", "ARGV[8] == '1' and not waits and", "not waits and", "ARGV[8] == '1' and", "false and"),
    ("park", "not waits and string.match(kept, '^%d') then", "not waits and kept ~= '' then"),
    ("leave", "ARGV[5] == '1' and not waits and", "not waits and", "ARGV[5] == '1' and", "false and"),
    ("leave", "not waits and string.match(kept, '^%d')\n", "not waits and kept ~= ''\n"),
    ("leave", "redis.call('ZREM', KEYS[3], is_anothers and '' or task)", "redis.call('ZREM', KEYS[3], task)"),
    ("leave", "redis.call('HDEL', KEYS[4], is_anothers and '' or task)", "redis.call('HDEL', KEYS[4], task)"),
    ("leave", "if not is_anothers then vain = string.match(kept, '^%d+') or vain end",
        "vain = string.match(kept, '^%d+') or vain"),
    ("leave", "heir == task and not is_anothers and 'handed'", "heir == task and 'handed'"),
    ("park", "later > 0 or later == 0 and t_copy", "later == 0 and t_copy"),
    ("park", "t_copy ~= '' and t_copy ~= copy", "t_copy ~= copy", "t_copy ~= ''"),
    ("park", "later == 0 and copy == '' and t_vain", "copy == '' and t_vain", "later == 0 and t_vain"),
    ("park", "and t_vain == '0' and", "and"),
    ("park", "redis.call('PTTL', KEYS[5]) > remember then", "true then"),
    ("park", "if later == 0 then vain = t_vain end", "vain = t_vain", ""),
    ("park", "vain = string.match(kept, '^%d+') or vain", ""),
    ("park", "outlive(KEYS[3]) --", "--"),
    ("park", "outlive(KEYS[4])\nredis", "redis"),
    ("park", "'||' .. vain, 'PX', int(remember))", "'||0', 'PX', int(remember))", "'||' .. vain, 'KEEPTTL')"),
    ("park", "value and heir == task and (", "heir == task and (", "value and heir and ("),
    ("park", " .. call)\n  outlive(KEYS[4])\n", " .. call)\n"),
    ("park", "(kept ~= '' or copy ~= '')", "kept ~= ''", "copy ~= ''", "true"),
    ("park", "(copy == '' or now < tonumber(deadline) or", "(now < tonumber(deadline) or", "(copy == '' or",
        "(copy == '' or now <= tonumber(deadline) or"),
    ("park", " or value == int(math.ceil(tonumber(deadline) / 1000000))) then", ") then", " or true) then"),
    ("park", "copy ~= '' or not string.match(kept, '^%d') or is_later or not",
        "not string.match(kept, '^%d') or is_later or not",
        "copy ~= '' or is_later or not", "copy ~= '' or kept == '' or is_later or not",
        "copy ~= '' or not string.match(kept, '^%d') or not"),
    ("park", "or is_later or not redis.call('ZSCORE', KEYS[3], task) then", "then"),
    ("park", "redis.call('ZADD', KEYS[3], since, task)", "redis.call('ZADD', KEYS[3], now, task)"),
    ("park", "vain .. '|' .. since", "'0|' .. since", "vain .. '|' .. int(now)"),
    ("park", "redis.call('HSET', KEYS[4]", "redis.call('HSETNX', KEYS[4]"),
    ("park", "ticket and not begun and 'parked' or 'new'", "'parked'"),
    ("park", "ticket and not begun and", "ticket and"),
    ("park", "rank and rank + 1 or 0", "rank or 0"),
    ("park", "if redis.call('PTTL', key) < remember then", "if true then"),
    ("park", "redis.call('ZADD', KEYS[3], since, task)\n  outlive(KEYS[3])",
        "redis.call('ZADD', KEYS[3], since, task)"),
    ("leave", "later > 0 or later == 0 and t_copy", "later == 0 and t_copy"),
    ("leave", "t_copy ~= '' and t_copy ~= copy", "t_copy ~= ''"),
    ("leave", "string.match(kept, '^%d+') or vain", "vain", "'0'"),
    ("leave", "if later == 0 then vain = t_vain end", "", "vain = t_vain"),
    ("park", "if is_later or not string.match(kept, '^%d') then", "if true then", "if false then"),
    ("serve", "  last_as_calls()\nend\n", "end\n"),
    ("leave", "'|' .. copy .. '|' .. vain, 'PX', int(remember))", "'||' .. vain, 'PX', int(remember))",
        "'|' .. copy .. '|' .. vain)"),
    ("leave", "redis.call('ZREM', KEYS[3], is_anothers and '' or task)", ""),
    ("leave", "redis.call('HDEL', KEYS[4], is_anothers and '' or task)\n", ""),
    ("leave", "redis.call('EXISTS', KEYS[1]) > 0 and heir == task", "heir == task",
        "redis.call('EXISTS', KEYS[1]) > 0 and heir"),
    ("look", "local last = '(4000000000000000'", "local last = '+inf'"),
    ("look", "'WITHSCORES', 'LIMIT', 0, 100)", "'LIMIT', 0, 100)", "'WITHSCORES', 'LIMIT', 0, 1)"),
    ("serve", "if record and not h_token then", "if false then"),
    ("serve", "int(4000000000000000 + now), 'LIMIT'", "int(4000000000000000 + now - 1), 'LIMIT'",
        "'+inf', 'LIMIT'"),
    ("serve", "if since then redis.call('ZADD', KEYS[3], since, task) end", "",
        "if since then redis.call('ZADD', KEYS[3], int(now), task) end"),
    ("serve", "'', '^%d+|%d+|(.*)$')", "'', '^%d+%+?|%d+|(.*)$')"),
    ("serve", "if back and (till == 0 or back < till) then till = back end", "",
        "if back then till = back end", "if back and till == 0 then till = back end",
        "if back and back < till then till = back end"),
    ("serve", "if not string.match(value", "if value == 'free' and string.match(value"),
    ("serve", "if now < h_deadline then", "if now <= h_deadline then"),
    ("serve", "if state == 'handed' and h_token == token then", "if h_token == token then", "if false then"),
    ("serve", "died = dead ~= '' and h_token == dead and state == 'running'", "died = false",
        "died = h_token == dead", "died = dead ~= '' and state == 'running'"),
    ("serve", "not (h_heir and h_heir == absent)", "true", "not h_heir"),
    ("serve", "if not died and not", "if not"),
    ("serve", "elseif recorded then", "elseif true then", "elseif false then"),
    ("serve", "died = state ~= 'resting' and not h_heir", "died = true", "died = not h_heir",
        "died = state ~= 'resting'"),
    ("serve", "local till = (math.min(tonumber(value), 1e11) + 1)",
        "local till = math.min(tonumber(value), 1e11)",
        "local till = (tonumber(value) + 1)"),
    ("serve", "if now < till then", "if now <= till then"),
    ("serve", "    died = true\n", ""),
    ("serve", "redis.call('HDEL', KEYS[4], h_heir) --", "--"),
    ("serve", "math.min(lease * 2 ^ tonumber(h_vain), 3600000000)", "lease * 2 ^ tonumber(h_vain)",
        "math.min(lease, 3600000000)"),
    ("serve", "int(h_vain + 1)", "h_vain", "int(h_vain + 1) .. '+'"),
    ("serve", "h_since = int(4000000000000000 + now + math", "h_since = int(now + math"),
    ("serve", "if not unsent then", "if true then", "if false then"),
    ("serve", "(unsent or stays) and {} or redis", "redis", "stays and {} or redis"),
    ("serve#", "(unsent or stays) and {} or redis", "unsent and {} or redis"),
    ("serve", "    last_as_calls() --", "--"),
    ("serve", "'-inf', '(4000000000000000', 'LIMIT', 0, 10}", "'-inf', '+inf', 'LIMIT', 0, 10}",
        "'-inf', '(4000000000000000', 'LIMIT', 0, 1}", "'-inf', '(4000000000000000', 'LIMIT', 0, 11}"),
    ("serve", "if not lingers or clock() < tonumber(lingers) then", "if true then", "if not lingers then"),
    ("serve", "clock() < tonumber(lingers) then", "clock() <= tonumber(lingers) then"),
    ("serve", "lingers and tonumber(lingers) - now + 50000 or hand_over", "hand_over"),
    ("serve", "  redis.call('ZREM', KEYS[3], unpack(gone))\n", ""),
    ("serve", "  redis.call('HDEL', KEYS[4], unpack(gone))\n", ""),
    ("serve", "  redis.call('ZREM', KEYS[3], heir)\n", ""),
    ("serve", "{token, int(deadline), fence or '0'", "{h_token or '', int(deadline), fence or '0'",
        "{token, int(deadline), '0'"),
    ("serve", "died and 'taken_over' or 'handed'", "'handed'"),
    ("serve", "if h_heir then -- it is nobody's", "if false then --"),
    ("serve", "  redis.call('DEL', KEYS[1])\n", ""),
    ("serve", "rest}, '\\n'), 'PX', int(remember))", "rest}, '\\n'))"),
    ("serve", "gone[10] and now or 0", "0", "gone[1] and now or 0"),
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
    ("serve#", "if free and not rank and state == 'handed' then", "if false then",
        "if free and not rank and value and state == 'handed' then"),
    ("serve#", "ARGV[8] ~= '0' and ARGV[8] or terms_in(found[3])", "terms_in(found[3])", "ARGV[8]"),
    ("serve#", "if permit and terms ~= terms_in(found[3]) then", "if false then", "if permit then"),
    ("serve#", "      return 3\n", "      return nil\n", "      return 5\n"),
    ("serve#", "if permit and lapsed > (permit.rank == 3 and 1 or 0) then till = now end",
        "if permit and lapsed > 0 then till = now end"),  # of two that have lapsed: test_permits.py
    ("serve#", "(state == 'handed' or best_rank > 4) then", "best_rank > 4 then", "state == 'handed' then"),
    ("serve#", "if best.free and best.number < limit then", "if best.free then"),
    ("serve#", "      if till < later then\n", "      if within and till < later then\n"),
    ("serve#", "math.min(sooner, till), math.max(sooner, till)", "math.min(sooner, till), till"),
    ("serve#", "is_first and later or sooner", "sooner", "later"),
    ("serve#", "if best.next == 1e17 then best.next = 0 end", ""),
    ("serve#", "(h_token == token or heir_in(of) == absent)", "h_token == token", "heir_in(of) == absent"),
    ("serve#", "permit.number >= limit or paced > 0", "paced > 0", "permit.number >= limit"),
    ("serve#", "if permit and permit.next > 0 then", "if false then",
        "if permit and permit.next > 0 and word ~= 'empty' then"),
    ("serve#", "permit.spare > 0 and paced == 0 then", "false then", "paced == 0 then",
        "permit.spare > 0 and paced == 0 and heir then", "permit.spare > 0 then"),
    ("serve#", "if permit and redis.call('ZCOUNT', KEYS[3], '-inf', '(4000000000000000') > 0 then",
        "if permit then",
        "if permit and redis.call('ZCOUNT', KEYS[3], '-inf', '+inf') > 0 then"),
    ("park#", "ARGV[7] ~= '0' and ARGV[7] or terms_in(found[3])", "terms_in(found[3])", "ARGV[7]"),
    ("park#", "return heir_in(of) == task and 1 end", "return heir_in(of) and 1 end", "return nil end"),
    ("park#", "  note_permits(KEYS[6], found[3], math.max(limit, permit.top), terms, remember)\n", ""),
    ("leave#", "return heir_in(of) == task and 1 end", "return nil end"),
    # A pace: when a call may start, and what is noted of it.
    ("serve#", "if redis.call('PTTL', key) < ms then redis.call('PEXPIRE', key, int(2 * ms)) end", ""),
    ("serve#", "'(' .. int(now - period + AHEAD), int(now), 'WITH",
        "int(now - period + AHEAD), int(now), 'WITH",
        "'-inf', int(now), 'WITH", "'(' .. int(now - period + AHEAD), '(' .. int(now), 'WITH",
        "'(' .. int(now - period), int(now), 'WITH"),
    ("serve#", "return at and tonumber(at) + period - AHEAD or 0", "return at and tonumber(at) - AHEAD or 0",
        "return at and tonumber(at) + period or 0", "return 0"),
    ("serve#", "tonumber(period) - ahead or 0", "tonumber(period) or 0"),
    ("serve#", "now + math.min(tonumber(period), 1000000)",
        "now - ahead + math.min(tonumber(period), 1000000)"),
    ("serve#", "permit.handed - (permit.rank == 1 and 1 or 0), now, AHEAD)", "permit.handed, now, AHEAD)",
        "permit.handed - 1, now, AHEAD)",
        "0, now, AHEAD)", "permit.handed - (permit.rank == 1 and 1 or 0), now, 0)"),
    ("serve#", "paced > 0 and paced or next_room(KEYS[6], terms, now)", "paced",
        "next_room(KEYS[6], terms, now)"),
    ("serve#", "if room > 0 then till = till == 0 and room or math.min(till, room) end", "",
        "if room > 0 then till = room end", "if room > 0 then till = math.min(till, room) end",
        "till = till == 0 and room or math.min(till, room)"),
    ("sweep", "'(' .. int(now), claimed, 'WITHSCORES'", "int(now), claimed, 'WITHSCORES'",
        "'-inf', claimed, 'WITHSCORES'", "'(' .. int(now), '+inf', 'WITHSCORES'",
        "'(' .. int(now), '(' .. claimed, 'WITHSCORES'"),
    ("sweep", "is_paced[tonumber(ARGV[place]) + 1] = true", "is_paced[tonumber(ARGV[place])] = true"),
    ("sweep", "if is_paced[place] then", "if true then", "if false then"),
    ("sweep", "math.min(next_due, tonumber(soon[2]))", "tonumber(soon[2])", "math.max(0, tonumber(soon[2]))"),
    ("sweep", "int(next_due - now)", "int(next_due)"),
    *[(verb, "then return {'more', int(highest)} end", "then highest = 1 end")
        for verb in ("park", "leave", "serve", "look")],
    *[(verb, "then return {'more', int(highest)} end", "then highest = 1 end")
        for verb in ("park#", "leave#", "serve#", "look#")],
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
