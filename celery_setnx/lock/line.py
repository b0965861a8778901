"""The line: tasks that wait for a lock, first come first served. Redis only; nothing here knows Celery.

A line is a sorted set of task ids beside the lock, with a hash of the calls that they are woken with. A
release hands the lock to the first (`lua/release.lua`), and so does whoever finds it free (`lua/serve.lua`).
As a call that waits may have several messages on their way, its ticket says which one of them may start it:
the first that acquires the lock, and no other.
"""

from __future__ import annotations

import random
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from hashlib import sha1
from typing import Any, NamedTuple

import redis

from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.lock.lock import DAY_S
from celery_setnx.lock.names import (
    KNOWN_LINES,
    due_names,
    line_names,
    lock_and_task_id,
    newest_name,
    permits_name,
    record_name,
    starts_name,
    successor_name,
    terms_name,
    ticket_name,
)
from celery_setnx.lock.record import ENDED, ORIGINAL, PLAIN, US, Holder, Terms, Turn, holder_of, turn_of
from celery_setnx.lock.scripts import (
    REDIS_ERRORS,
    PermitScript,
    Script,
    is_cluster,
    replies_to,
    reply_to,
    translated,
    value_of,
)
from celery_setnx.lock.verbs import HAND_OVER_S, HAND_OVER_US

PARK, LEAVE = PermitScript("park"), PermitScript("leave")
DUE, SWEEP, SETTLE, ROUSE = Script("due"), Script("sweep"), Script("settle"), Script("rouse")

_TICKET = re.compile(r"(\d+)\|(.*)\|(\d+)", re.DOTALL)
_WAITS = re.compile(r"\d+\|\d+\|(.*)", re.DOTALL)  # with a + behind the first number a wake-up is on its way
_LINES_MS = int(8 * DAY_S * 1000)
_ABSENT_S = 10.0  # a line that is due for longer has no workers
_PAGE = 1000  # of a line: the server does nothing else meanwhile
_AS_MANY = 25  # in a page cost the server what one task that is asked for by its id does

SOON_S = 2.0
"""Seconds: what is due sooner is not left to a sweep that sleeps. For as long a line is claimed."""

CLAIMED_AT_MOST = 100
"""Lines that one `claim` finds; in a cluster, in each slot."""

PASSED_OVER = 4_000_000_000_000_000
"""The least score of those in a line who are passed over."""

BEGUN_S = 7 * DAY_S
"""Seconds for which it is remembered that a call which has waited has begun."""


@dataclass(frozen=True)
class LineEntry:
    """A place in the line of one lock, of one attempt of a task.

    Attributes:
        key: The lock's Redis key.
        task_id: The task's id.
        attempt: Number of its attempt; a later one is larger.
        remember: Seconds for which Redis remembers it unless it is asked again.
        call_id: What tells the call from others that were given the same task id. Defaults to nothing.
        shared: Whether others may have that task id, and be told from it. Defaults to False.
        terms: On which terms calls have the lock. Defaults to None: they are not known here.
        lease: Seconds of a lease of the lock. Defaults to 10.
        alone: Whether it waits only where no other does. Defaults to False.
        generation: That of the call, if an older one is to make way for it. Defaults to 0: none is.
    """

    key: str
    task_id: str
    attempt: int
    remember: float
    call_id: str = ""
    shared: bool = False
    terms: Terms | None = None
    lease: float = HAND_OVER_S
    generation: int = 0
    alone: bool = False


@dataclass(frozen=True)
class ParkReply:
    """What a task that asks for its place finds.

    Attributes:
        state: `parked` (it waited already), `new` (it waits from now on, though this message may have started
            it), `handed` (the lock is kept for it, and it has been woken), `stale` (another message of it
            has started), `taken` (another call with its task id waits), `crowded` (another call waits) or
            `superseded` (a newer call runs instead).
        place: Its place in the line; the first is 1. 0 if it is not in the line.
        holder: Who has the lock; None if it is free, or its deadline has passed.
        server_time: The server's clock (Unix seconds).
        older: Id of an older call that is superseded, and waits behind it: wake it, and it ends. None if
            there is none.
    """

    state: str
    place: int
    holder: Holder | None
    server_time: float
    older: str | None = None


def park(client: redis.Redis, place: LineEntry, *, copy: str = "", since: float, call: str) -> ParkReply:
    """Let a task wait in line, or see that it still does.

    `copy` is the message that met the held lock; without one its courier asks. `since` (Unix seconds, the
    server's) is its place, and `call` what it is woken with.
    """
    waiter = (place.task_id, place.attempt, copy, round(since * 1e6), call)
    argv = (
        *waiter,
        _remember_ms(place),
        place.terms or 0,
        int(place.shared),
        place.generation,
        int(place.alone),
    )
    keys, limit = (*_keys(place), newest_name(place.key), terms_name(place.key)), (place.terms or PLAIN).limit
    word, now_us, value, record, rank, older = PARK.of(client, place.key, keys, limit, *argv)
    now, holder = int(now_us) / 1e6, holder_of(value, record)
    return ParkReply(word, int(rank), None if holder and holder.has_ended(now) else holder, now, older)


class LeaveReply(NamedTuple):
    """What came of leaving the line.

    Attributes:
        word: `left`, or `stale` if another message of the call has started: then nothing was changed.
        turn: What is left to be done for the line, if the lock was handed to the call; None if nothing is.
    """

    word: str
    turn: Turn | None


def leave(client: redis.Redis, place: LineEntry, *, copy: str, stays: int = 0) -> LeaveReply:
    """Leave the line, so that no message of this attempt starts it. Whoever is next has its turn.

    One that stays only gives back what was handed to it, and is passed over for a while; `stays` counts how
    often it has done so, this time included.
    """
    told = f"{place.task_id}|{place.attempt}|{copy}|{stays}"
    token = sha1(told.encode("utf-8", "replace")).hexdigest()
    lease_us = round(place.lease * US)
    argv: tuple[Any, ...] = (place.task_id, place.attempt, copy, _remember_ms(place), int(place.shared))
    argv += (token, min(HAND_OVER_US, lease_us), place.terms or 0, lease_us if stays else "")
    keys = (*_keys(place), starts_name(place.key), terms_name(place.key))
    word, *rest = LEAVE.of(client, place.key, keys, (place.terms or PLAIN).limit, *argv)
    if word == "stale":
        return LeaveReply(word, None)
    now, heir, call, look_us = rest
    return LeaveReply(word, turn_of(heir, call, look_us, int(now)))


def goes_on(client: redis.Redis, place: LineEntry, *, copy: str) -> bool:
    """Whether an attempt of which a message has died waits on, or was started by another message."""
    ticket = value_of(client, ticket_name(place.key, place.task_id, place.call_id))
    attempt, _, rest = (ticket or "").partition("|")
    if not attempt.isdecimal() or int(attempt) < place.attempt:
        return False
    begun_by = rest.rpartition("|")[0]
    if begun_by == ENDED:
        return False
    if int(attempt) == place.attempt and not begun_by and copy != ORIGINAL:  # it may have died with its turn
        return reply_to(client, "ZSCORE", line_names(place.key)[0], place.task_id) is not None
    return int(attempt) > place.attempt or begun_by != copy


def successor_of(client: redis.Redis, place: LineEntry, *, of: str) -> str:
    """Which task runs in the stead of one that has died, for all who wait for it: the first who asks."""
    name = successor_name(place.key, of)
    note = ("SET", name, place.task_id, "NX", "PX", str(_remember_ms(place)))
    replies = replies_to(client, [note, ("GET", name)])
    for reply in replies:
        if isinstance(reply, REDIS_ERRORS):
            raise translated(name, reply)
    return place.task_id if replies[1] is None else _text(replies[1])  # it is forgotten by now


def has_begun_s(client: redis.Redis, place: LineEntry) -> float:
    """Seconds since a call that has waited has begun, or was taken out of its line, by its ticket."""
    left_ms = reply_to(client, "PTTL", ticket_name(place.key, place.task_id, place.call_id))
    return BEGUN_S - max(0, int(left_ms)) / 1000


class TicketStart(Enum):
    """That a call which has waited has begun."""

    ONCE = "once"  # of the messages that it was woken with there is no other
    ANY = "any"


def have_begun(client: redis.Redis, places: Sequence[LineEntry]) -> list[TicketStart | None]:
    """For each whether its attempt, or a later one, has begun; None if not, or if that is not known."""
    names = [ticket_name(place.key, place.task_id, place.call_id) for place in places]
    tickets = replies_to(client, [("GET", name) for name in names])
    return [_begun(place, ticket) for place, ticket in zip(places, tickets)]


def _begun(place: LineEntry, ticket: Any) -> TicketStart | None:
    found = ticket if not isinstance(ticket, bytes) else ticket.decode("utf-8", "replace")
    told = _TICKET.fullmatch(found) if isinstance(found, str) else None
    if told is None or int(told[1]) < place.attempt:
        return None
    if int(told[1]) > place.attempt:
        return TicketStart.ANY
    return (TicketStart.ONCE if told[3] == "0" else TicketStart.ANY) if told[2] else None


def shorten_tickets(client: redis.Redis, places: Sequence[LineEntry]) -> None:
    """Have it be remembered that calls have begun for no longer than that they wait."""
    names = [ticket_name(place.key, place.task_id, place.call_id) for place in places]
    times = [str(_remember_ms(place)) for place in places]
    replies_to(client, [("PEXPIRE", name, ms) for name, ms in zip(names, times)])


def call_in_line(client: redis.Redis, key: str, task_id: str) -> str | None:
    """What a task that waits in line is woken with; None if it does not wait, or is on its way."""
    line, calls = line_names(key)
    if reply_to(client, "ZSCORE", line, task_id) is None:
        return None
    found = reply_to(client, "HGET", calls, task_id)
    text = found.decode("utf-8", "replace") if isinstance(found, bytes) else found
    waits = _WAITS.fullmatch(text or "")
    return waits[1] if waits else None


def who_waits(client: redis.Redis, key: str, task_ids: Collection[str]) -> list[str]:
    """Those of some tasks that wait in line: the shorter of the two is gone through."""
    if not task_ids:
        return []
    line, calls = line_names(key)
    waiting = int(reply_to(client, "ZCOUNT", line, "-inf", "+inf"))
    if waiting > _AS_MANY * len(task_ids):
        found = replies_to(client, [("HGET", calls, task_id) for task_id in task_ids])
        return [task_id for task_id, call in zip(task_ids, found) if isinstance(call, (bytes, str))]
    pages = range(0, waiting, _PAGE)
    members = replies_to(client, [("ZRANGE", line, str(at), str(at + _PAGE - 1)) for at in pages])
    return [
        found for page in members if isinstance(page, list) for found in map(_text, page) if found in task_ids
    ]


class Slot(NamedTuple):
    """What a sweep was told of the lines in one slot; without a cluster, of all.

    Attributes:
        epoch: What tells these data from those before Redis lost them.
        until_us: Until when the lines are claimed; to be given back to `settle`.
    """

    epoch: str
    until_us: str


class DueLines(NamedTuple):
    """The lines that a worker is to look at.

    Attributes:
        slots: The slot of each of its tasks; without those of a node of a cluster that did not answer.
        next_s: Seconds until another of a timed task is due; None if none is that soon.
        lines: Names of a task whose calls wait, and of their lock, or a name of one call beside it.
        are_more: True if there may be more.
        error: Why some slots are missing; None if none is.
    """

    slots: Mapping[str, Slot]
    next_s: float | None
    lines: list[tuple[str, str]]
    are_more: bool
    error: LockUnavailable | LockRefused | None


class DueReply(NamedTuple):
    """That somebody is to look at a line.

    Attributes:
        epoch: What tells Redis' data from those before it lost them.
        look_in_s: Seconds after which the caller's worker should look; None if that was noted before.
    """

    epoch: str
    look_in_s: float | None = None


def note_due(client: redis.Redis, lines: str, task: str, key: str, *, within: float) -> DueReply:
    """Have a worker that has the task look at a line within so many seconds.

    Only who brings the time forward has to see to it that somebody comes: a sweep may come too late.
    """
    names = due_names(lines, task, in_cluster=is_cluster(client))
    epoch, look_us = DUE(client, names, key, round(within * 1e6), _LINES_MS, _new_epoch())
    return DueReply(epoch, int(look_us) / 1e6 if look_us else None)


def claim(client: redis.Redis, lines: str, tasks: Iterable[str], timed: Collection[str] = ()) -> DueLines:
    """Claim the lines of some tasks that it is time to look at: nobody else does for a moment.

    Of the tasks that are `timed` it is also told when the next line is due.
    """
    names = list(tasks)
    random.shuffle(names)  # else of many lines those of the first tasks would always be found first
    in_slots = _in_slots(client, lines, names)
    argv = (round(SOON_S * 1e6), _LINES_MS, _new_epoch())
    asked = [
        ((epoch, *named), (*argv, *(place for place, task in enumerate(of, 1) if task in timed)))
        for epoch, (named, of) in in_slots.items()
    ]
    slots: dict[str, Slot] = {}
    found: list[tuple[str, str]] = []
    due_s: list[float] = []
    are_more, error = False, None
    for (_named, of), reply in zip(in_slots.values(), SWEEP.many(client, asked)):
        if not isinstance(reply, list):
            error = reply
            continue
        epoch, until_us, next_us, *entries = reply
        slots.update(dict.fromkeys(of, Slot(epoch, until_us)))
        due_s += [int(next_us) / 1e6] if next_us else []
        found += [(of[int(place) - 1], entry) for place, entry in zip(entries[::2], entries[1::2])]
        are_more |= len(entries) >= 2 * CLAIMED_AT_MOST
    if error is not None and not slots:
        raise error
    return DueLines(slots, min(due_s, default=None), found, are_more, error)


def settle(
    client: redis.Redis, lines: str, task: str, key: str, claimed: DueLines, *, within: float | None
) -> float | None:
    """Say in how many seconds somebody is to look at a line again; None if nobody waits there.

    In how many seconds it is due: somebody else may have said something, too.
    """
    within_us = "" if within is None else round(within * 1e6)
    name, _epoch = due_names(lines, task, in_cluster=is_cluster(client))
    _word, due_us = SETTLE(client, (name,), key, claimed.slots[task].until_us, within_us)
    return int(due_us) / 1e6 if due_us else None


def ask_others(client: redis.Redis, lines: str, task: str, key: str, task_id: str) -> bool:
    """Have another worker send a call, to which the lock is handed; False if none has looked at its line."""
    name, _epoch = due_names(lines, task, in_cluster=is_cluster(client))
    call = f"{key}\n{task_id}"
    line_us, call_us = score_of(client, name, key), score_of(client, name, call)
    note_due(client, lines, task, call, within=0.0)
    now_us = score_of(client, name, call)
    if call_us is not None:
        return False  # it was asked before, and nobody has come
    return now_us is None or line_us is None or not _is_overdue(line_us, now_us)


def score_of(client: redis.Redis, name: str, member: str) -> float | None:
    """The score of a member of a sorted set; None if it is none."""
    found = reply_to(client, "ZSCORE", name, member)
    return None if found is None else float(found)


def note_lines(client: redis.Redis, prefix: str, broker: str) -> None:
    """Note that workers of a broker sweep lines under a prefix."""
    DUE(client, (KNOWN_LINES,), f"{prefix}\n{broker}", 0, _LINES_MS, "")


def known_lines(client: redis.Redis) -> list[tuple[str, str]]:
    """The prefixes and brokers that have been noted in the last eight days."""
    entries = [_text(entry).partition("\n") for entry in reply_to(client, "ZRANGE", KNOWN_LINES, "0", "-1")]
    return [(prefix, broker) for prefix, _, broker in entries]


def unswept(client: redis.Redis, lines: str, claimed: DueLines) -> list[str]:
    """Locks that calls of these tasks wait for, in lines that nobody has looked at when they were due."""
    keys: set[str] = set()
    for named, of in _in_slots(client, lines, claimed.slots).values():
        if not reply_to(client, "EXISTS", *named):
            continue
        for name, task in zip(named, of):
            until_us = int(claimed.slots[task].until_us) - round((SOON_S + _ABSENT_S) * 1e6)
            entries = reply_to(client, "ZREVRANGEBYSCORE", name, str(until_us), "0", "LIMIT", "0", "10")
            keys.update(lock_and_task_id(_text(entry))[0] for entry in entries)
    return [key for key in sorted(keys) if reply_to(client, "ZCOUNT", line_names(key)[0], "-inf", "+inf")]


def rouse(client: redis.Redis, lines: str, tasks: Iterable[str], prefix: str, scope: str) -> None:
    """lua/rouse.lua: have all lines of a scope be looked at now, where calls of these tasks wait.

    Nothing is raised: each is looked at soon in any case.
    """
    in_slots = _in_slots(client, lines, tasks).values()
    skips = {name: 0 for named, _of in in_slots for name in named}
    while skips:
        calls = [((name,), (f"{prefix}:{{{scope}", skip)) for name, skip in skips.items()]
        replies = zip(skips, ROUSE.many(client, calls))
        skips = {name: int(reply[0]) for name, reply in replies if isinstance(reply, list)}
        skips = {name: skip for name, skip in skips.items() if skip >= 0}


def _in_slots(client: Any, lines: str, tasks: Iterable[str]) -> dict[str, tuple[list[str], list[str]]]:
    """By the name of a slot's epoch the names of the sets of some tasks' lines there, and those tasks."""
    in_cluster = is_cluster(client)
    found: dict[str, tuple[list[str], list[str]]] = {}
    for task in tasks:
        name, epoch = due_names(lines, task, in_cluster=in_cluster)
        named, of = found.setdefault(epoch, ([], []))
        named.append(name)
        of.append(task)
    return found


def _is_overdue(due_us: float, now_us: float) -> bool:
    return now_us - due_us > _ABSENT_S * 1e6


def _text(reply: Any) -> str:
    return reply.decode("utf-8", "replace") if isinstance(reply, bytes) else str(reply)


def _new_epoch() -> int:
    return random.randrange(1, 2**48)


def _keys(place: LineEntry) -> tuple[str, ...]:
    """The keys that a verb of the line is about, but for those of other permits."""
    ticket = ticket_name(place.key, place.task_id, place.call_id)
    return (place.key, record_name(place.key), *line_names(place.key), ticket, permits_name(place.key))


def _remember_ms(place: LineEntry) -> int:
    return max(1, int(place.remember * 1000))
