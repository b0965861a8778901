"""Calls amid all that may stand beside a lock at once: a line, tickets, marks, starts, other permits."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import TypeVar

from tests.model.layout import CALLS, DONE, LINE, MARK, PERMITS, others
from tests.model.line import AWAY
from tests.model.lock import Call
from tests.model.permits import at
from tests.model.store import (
    MS,
    SECOND,
    Calls,
    Known,
    Line,
    Mark,
    Record,
    Starts,
    Store,
    Ticket,
    purge,
    seconds,
    task_of,
)

VERBS = ("acquire", "release", "free", "mark")
"""The verbs that find all this."""

T = TypeVar("T")
TASKS = ("a", "b", "c", "b|b")
TOKENS = ("a|0|0", "a|1|1", "b|0|1", "b|b|0|4", "|0|5", "one")
STATES = ("running", "resting", "held_for_retry", "handed", "handed", "failed", "released")
LEASES = (500, 60_000, 1_000_000)  # ms
PERIODS = (1, 1_500, 1_500_001, 100_000_000, 7_200_000_001)
LONG = (3_000_000_000, 8_000_000_000)  # us: less than an hour, and more
BESIDE = (-5_000_000, -1, 0, 0, 1, 400, 3_000_000)  # us from now


def beside_much(call: Call, seed: int) -> Call:
    """The call, with a few things changed in what it finds and is told."""
    draw = random.Random(seed)
    for change in draw.sample(CHANGES, draw.choice((1, 2, 4, len(CHANGES)))):
        call = change(call, draw)
    call = _with_one_of_its_own(call)
    return call._replace(store=purge(call.store, call.now))


def _with_one_of_its_own(call: Call) -> Call:
    """A task has one permit at most: of several the first."""
    store, tasks = call.store, _tasks_of(call)
    own = [n for n in range(1 + len(store.others)) if task_of(at(store, n).holder.token)[0] in tasks]
    for number in own[1:]:
        permit = at(store, number)
        store = at(permit._replace(value=None, expiry=None, record=None, record_expiry=None), number)
    return call._replace(store=store)


def _of_another_token(call: Call, draw: random.Random) -> Call:
    """A later attempt, or a token that is no task's."""
    task, retries = task_of(call.told[0])
    if call.name not in ("acquire", "release") or task is None or draw.random() < 0.5:
        return call
    token = draw.choice(("one", f"{task}|{retries + 1}|7"))
    store = call.store
    for number in range(1 + len(store.others)):
        permit = at(store, number)
        if isinstance(permit.record, Record) and permit.record.token == call.told[0]:
            store = at(permit._replace(record=permit.record._replace(token=token)), number)
    if call.name == "release":
        return _with(call, {0: token})._replace(store=store)
    # Who has no task does not wait: it has no ticket, and no place to ask again.
    store = store._replace(tickets=()) if token == "one" else store
    return _with(call, {0: token, 7: 0})._replace(store=store)


def _of_its_retry(call: Call, draw: random.Random) -> Call:
    """A permit is held for this retry, or for the next."""
    if call.name != "acquire" or not _tasks_of(call):
        return call
    task, retries = task_of(call.told[0])
    deadline = max(call.now + draw.choice((*BESIDE, *LONG, *LONG)), 1)
    record = Record(f"{task}|{retries}|5", deadline, 7, "held_for_retry", call.now - SECOND)
    token = f"{task}|{retries + draw.choice((0, 1, 1))}|7"
    told = {0: token, 4: draw.choice((call.told[4], record.token)), 7: 0}
    return _with(call, told)._replace(store=_one_of(call, record, draw))


def _of_its_like(call: Call, draw: random.Random) -> Call:
    """Another call with this task id waits; a permit may be handed to it, or still be this one's."""
    if call.name != "acquire" or not _tasks_of(call):
        return call
    task, deadline = _tasks_of(call)[0], max(call.now + draw.choice(BESIDE), 1)
    handed = Record("h", deadline, 7, "handed", call.now - SECOND, draw.choice((task, task, "c")))
    record = draw.choice((handed, handed, Record(f"{task}|0|5", deadline, 7, "running", call.now - SECOND)))
    calls = Calls(((task, f"{draw.choice((0, 2))}|{call.now - 5}|call"),), draw.choice(LEASES))
    line = draw.choice((call.store.line, Line(((call.now - 5, task),), draw.choice(LEASES))))
    store = _one_of(call, record, draw)._replace(tickets=(), calls=calls, line=line)
    return _with(call, {7: 0, 12: 1})._replace(store=store)


def _amid_promises(call: Call, draw: random.Random) -> Call:
    """All the starts of a long period are promised, or have been: a permit is free, another is handed."""
    permits = 1 + sum(key.startswith(b"lock#") for key in call.keys)
    if call.verb != "acquire#" or permits < 2:
        return call
    deadline = call.now + draw.choice((1, 3_000_000))
    heir = draw.choice(("c", *_tasks_of(call)))
    handed = _until(at(call.store, 1), Record("h", deadline, 7, "handed", call.now - SECOND, heir))
    store = at(handed, 1)._replace(value=None, expiry=None)
    began = call.now - draw.choice((2, 1_000_000, 90_000_000, 99_980_000, 99_979_999))
    store = store._replace(starts=Starts(((began, 0, 5),), call.now // MS + 200_000))
    return _with(call, {10: f"{permits}:{draw.choice((1, 1, 2))}/100000000"})._replace(store=store)


def _one_of(call: Call, record: Record, draw: random.Random) -> Store:
    """The keys with this record of a permit."""
    number = draw.randrange(1 + len(call.store.others))
    return at(_until(at(call.store, number), record), number)


def _until(permit: Store, record: Record) -> Store:
    """A permit that is held until its record's deadline."""
    expiry = record.deadline // MS + 1_000
    value = seconds(record.deadline)
    return permit._replace(value=value, expiry=expiry, record=record, record_expiry=expiry)


def _amid_permits(call: Call, draw: random.Random) -> Call:
    """Other holders, and others that are told how many permits there are."""
    store = call.store
    for number in range(1 + len(store.others)):
        if draw.random() < 0.7:
            store = at(_held(at(store, number), call, draw), number)
    if draw.random() < 0.2:
        text = draw.choice(("1 1", "2 1", "3 2", "2 2", "3 2:2/1500", "5 3"))
        store = store._replace(known=Known(text, draw.choice(LEASES)))
    return call._replace(store=store)


def _held(permit: Store, call: Call, draw: random.Random) -> Store:
    """A permit of any holder, which ends about now, or has no value any more."""
    deadline = max(call.now + draw.choice((*BESIDE, *LONG)), 1)
    tasks, own = _tasks_of(call), _tokens_of(call)
    if own and draw.random() < 0.3:
        token, state = (
            draw.choice(own),
            draw.choice(("running", "held_for_retry", "held_for_retry", "resting")),
        )
    else:
        token, state = draw.choice((*TOKENS, *own)), draw.choice(STATES)
    info = draw.choice((*TASKS, *tasks * 3)) if state == "handed" else draw.choice(("", "worker"))
    fence = draw.choice((1, 7, call.now, call.now + 5))
    record = Record(token, deadline, fence, state, call.now - draw.randrange(9 * SECOND), info)
    held = _until(permit, record)
    return held._replace(value=None, expiry=None) if draw.random() < 0.2 else held


def _amid_a_line(call: Call, draw: random.Random) -> Call:
    """A line of any tasks; sometimes with many in front that have not asked again."""
    places, fields = [], {}
    for task in dict.fromkeys((*TASKS, *_tasks_of(call))):
        since = call.now - draw.randrange(1, 9 * SECOND)
        place = draw.choice((since, since, AWAY + call.now + draw.choice(BESIDE), None, None))
        if place is not None:
            places.append((place, task))
        known = _known_of(call, since, draw)
        if known is not None:
            fields[task] = known
    for number in range(draw.choice((1, 9, 10, 11)) if draw.random() < 0.2 else 0):
        places.append((call.now - 10 * SECOND + number, f"gone{number:02}"))
        fields[f"gone{number:02}"] = f"@{call.now - number}"
    line = Line(tuple(_in_order(places)), draw.choice(LEASES)) if places else Line()
    calls = Calls(tuple(_by_name(fields)), draw.choice(LEASES)) if fields else Calls()
    return call._replace(store=call.store._replace(line=line, calls=calls))


def _in_order(places: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return sorted(places, key=lambda each: (each[0], each[1].encode()))


def _by_name(fields: dict[str, T]) -> list[tuple[str, T]]:
    return sorted(fields.items(), key=lambda each: each[0].encode())


def _known_of(call: Call, since: int, draw: random.Random) -> str | None:
    """What is known of one that waits: its call, until when it asks by itself, or nothing."""
    vain = draw.choice((0, 1, 13))
    texts = f"{vain}|{since}|call", f"{vain}|{since}|", f"{vain}+|{since}|call", None
    return draw.choice((*texts, f"@{call.now + draw.choice(BESIDE)}"))


def _tokens_of(call: Call) -> list[str]:
    """The caller's token, and that of the attempt before."""
    if call.name not in ("acquire", "release"):
        return []
    task, retries = task_of(call.told[0])
    return [call.told[0]] if task is None else [call.told[0], f"{task}|{max(retries - 1, 0)}|9"]


def _tasks_of(call: Call) -> list[str]:
    return [task for token in _tokens_of(call)[:1] if (task := task_of(token)[0])]


def _amid_marks(call: Call, draw: random.Random) -> Call:
    """A mark, and a success that counts."""
    expiry = call.now // MS + draw.choice(LEASES)
    tasks = (*TASKS, *_tasks_of(call), *_tasks_of(call))
    mark = draw.choice((None, Mark(draw.choice(tasks), expiry)))
    done = draw.choice((None, Mark(draw.choice((*TOKENS, *TASKS)), expiry)))
    return call._replace(store=call.store._replace(mark=mark, done=done))


def _amid_tickets(call: Call, draw: random.Random) -> Call:
    """An attempt of its task that waits, or has begun."""
    if call.name != "acquire" or len(call.keys) < 6 or task_of(call.told[0])[0] is None:
        return call
    attempt = max(int(call.told[9]) + draw.choice((-1, 0, 0, 0, 1)), 0)
    copy = draw.choice(("", "", "-", call.told[5], call.told[5], call.told[5], "y"))
    ticket = Ticket(f"{attempt}|{copy}|{draw.choice((0, 2))}", draw.choice(LEASES))
    tickets = {**dict(call.store.tickets), call.keys[5][7:].decode(): ticket}
    return call._replace(store=call.store._replace(tickets=tuple(_by_name(tickets))))


def _amid_starts(call: Call, draw: random.Random) -> Call:
    """Terms with a rate, and starts about a period ago, now, or later as the clock was set back."""
    if call.verb != "acquire#":
        return call
    limit = draw.randrange(1, 2 + sum(key.startswith(b"lock#") for key in call.keys))
    count, period = draw.choice((1, 1, 1, 2, 3)), draw.choice(PERIODS)
    many = draw.choice((1_098, 1_099, 1_100, 1_101)) if draw.random() < 0.05 else 0
    if many:
        count, period = 2_000, PERIODS[-1]
    beside = (-1, 0, 1, 19_999, 20_000, 20_001, period, period // 2, period // 2, 0 - period)
    times = {
        (call.now - period + draw.choice(beside), draw.randrange(3), 5) for _ in range(draw.randrange(5))
    }
    times |= {(call.now - 9 - number, 0, 5) for number in range(many)}
    ordered = tuple(sorted(times, key=lambda each: (each[0], b"%d#%d#%d" % each)))
    lasts = draw.choice((period // MS, period // MS + 1, 2 * period // MS, 2 * period // MS + 2, 9_000_000))
    starts = Starts(ordered, call.now // MS + lasts) if times else Starts()
    told = _with(call, {10: draw.choice((f"{limit}", *[f"{limit}:{count}/{period}"] * 5))})
    return told._replace(store=call.store._replace(starts=starts))


def _told(call: Call, draw: random.Random) -> Call:
    """Whatever else the verb may be told."""
    if call.name == "acquire" and len(call.keys) > 5:
        return _told_of_acquire(call, draw)
    if call.name == "release":
        return _told_of_release(call, draw)
    if call.name == "mark":
        dedupe = draw.choice(("until_started", "until_done", "dedupe_for"))
        keys = (*call.keys[:5], *others(draw.choice((1, 2, 3)))[::2])
        return _with(call, {1: draw.choice(("1", "90000")), 2: dedupe})._replace(keys=keys)
    return call


def _told_of_acquire(call: Call, draw: random.Random) -> Call:
    lease, retention = draw.choice((1, 1_500, 2_000_001, 4_000_000_000)), draw.choice((0, 30_000))
    copy, remember = draw.choice(("-", "x0", "y")), draw.choice((0, 60_001))
    tokens = [at(call.store, number).holder.token for number in range(1 + len(call.store.others))]
    told = {1: lease, 2: retention, 4: draw.choice(("", *tokens)), 5: copy, 6: remember}
    told |= {11: draw.choice((0, 0, 1)), 12: draw.choice((0, 1, 1))}
    if _tasks_of(call):
        told |= {7: draw.choice((0, 0, 1_000, 50_000_000)), 8: draw.choice((0, call.now - 5))}
    return _with(call, told)


def _told_of_release(call: Call, draw: random.Random) -> Call:
    again, done_for = draw.choice((0, 0, 7_000)), draw.choice((0, 5_000))
    rest_until = draw.choice((0, 0, max(call.now + draw.choice(BESIDE), 1)))
    hand_over = draw.choice(("", 0, 3_000_000))
    told = {1: rest_until, 2: draw.choice((1, 60_000)), 3: again, 4: hand_over, 5: done_for}
    return _with(call, told)._replace(keys=(*call.keys[:2], LINE, CALLS, MARK, PERMITS, DONE))


def _with(call: Call, changed: Mapping[int, object]) -> Call:
    told = list(call.told)
    for place, word in changed.items():
        told[place] = str(word)
    return call._replace(told=tuple(told))


CHANGES = (
    _of_another_token,
    _of_its_retry,
    _of_its_like,
    _amid_promises,
    _amid_permits,
    _amid_a_line,
    _amid_marks,
    _amid_tickets,
    _amid_starts,
    _told,
)
