"""What a look tells of a lock: the clause of the contract of look.lua."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.model.edits import permits_in
from tests.model.grants import DEAD, HELD, caller_of, choice_of
from tests.model.layout import CALLS, DONE, LINE, LOCK, MARK, NEWEST, PERMITS, RECORD, STARTS, TERMS
from tests.model.line import AWAY, waiting
from tests.model.lock import Call
from tests.model.permits import (
    at,
    earliest_start,
    is_to_come,
    pace_of,
    said_of,
    speaks_of_its_value,
    terms_in,
)
from tests.model.rules import word_of
from tests.model.store import MS, NOT_A_STRING, Mark, Record, Store, seconds, task_of
from tests.model.terms import of_key, terms_of
from tests.simulation.scripts import Script

if TYPE_CHECKING:
    from tests.model.contract import Played

KEYS = (LOCK, RECORD, LINE, PERMITS, MARK, DONE, STARTS, NEWEST, TERMS)
"""The keys of a look, but for those of other permits."""

NOBODY = "\n"
"""A token, and a task's id, that no call has."""


def tells_all_there_is(script: Script, call: Call, found: Played) -> bool:
    """What is there, and what a call on these terms would be told, here and at publish time."""
    if call.name != "look" or found.error or found.word == "more":
        return True
    reply = [each.decode() if isinstance(each, bytes) else each for each in found.reply]
    return reply == _told_of(call)


def _told_of(call: Call) -> list[Any]:
    store, now, most = call.store, call.now, int(call.told[3])
    _, terms, paused = terms_of(call)
    permits = permits_in(call)
    promised, times = sum(is_to_come(permit, now) for permit in permits), store.starts.times
    (count, period), next_start = pace_of(terms), earliest_start(store.starts, terms, now, promised)
    starts = sum(now - period < began <= now for began, *_ in times) + promised if count else len(times)
    waits = [text for since, task in store.line.places if since < AWAY for text in (task, str(since))]
    told = [each for number, permit in enumerate(permits) for each in _permit(number, permit, now)]
    return [
        now,
        *_word_of(call, next_start, paused),
        max(next_start, paused),
        *_duplicate_of(call),
        terms_in(store),
        starts,
        max((began for began, *_ in times), default=0),
        len(waits) // 2,
        *_mark(store.mark, now),
        *_mark(store.done, now),
        *_mark(store.newest, now),
        of_key(store),
        terms,
        _wait_of(call),
        len(permits),
        len(told),
        *[each for of_one in told for each in of_one],
        *waits[: 2 * most],
    ]


def _wait_of(call: Call) -> int:
    """For how long a call that is published now waits for newer ones."""
    quiet, most, leads = map(int, call.told[4:] or "000")
    words = call.store.newest.task_id.split("\n") if call.store.newest else []
    reserved, settled, started, first, last = map(int, words[:5] if len(words) == 12 else "00000")
    if leads and max(reserved, settled) <= settled <= started and call.now - last >= quiet:
        return 0
    return max(0, min(quiet, first + most - call.now) if first else quiet)


def _word_of(call: Call, next_start: int, paused: int) -> tuple[str, int]:
    """What a call would be told that has no place in the line and no permit, and of which permit."""
    told = (NOBODY, "1", "1", "", call.told[2], "-", "0", "0", "0", "0", call.told[0], "0", "0")
    keys = LOCK, RECORD, LINE, CALLS, MARK, b"ticket:", PERMITS, TERMS, STARTS
    asks = call._replace(verb="acquire#", keys=(*keys, *call.keys[len(KEYS) :]), told=told)
    choice = choice_of(asks, caller_of(asks))
    if isinstance(at(call.store, choice.number).record, str):
        return "refused", choice.number
    if choice.rank == HELD:
        return "held", choice.number
    if paused or next_start:
        return "paused" if paused else "paced", choice.number
    return ("line" if waiting(call.store) else _how(call, choice.rank, choice.number)), choice.number


def _how(call: Call, rank: int, number: int) -> str:
    """Whether a permit is free, or is taken over from one that has died."""
    permit = at(call.store, number)
    is_left = permit.value == seconds(permit.holder.deadline) and permit.holder.state in ("resting", "handed")
    return "taken_over" if rank == DEAD or (permit.value is not None and not is_left) else "acquired"


def _duplicate_of(call: Call) -> tuple[str | None, str | None]:
    """What a publisher would be told, and of which call; nothing if that one is published."""
    store, dedupe = call.store, call.told[1]
    if dedupe == "":
        return None, None
    if store.mark is not None:
        return "queued", store.mark.task_id
    word = word_of(call._replace(verb="mark", keys=(), told=(NOBODY, "1", dedupe)), 0)
    if word == "running":
        return word, task_of(store.holder.token)[0]
    if word == "done" and store.done is not None:
        task = task_of(store.done.task_id)[0]
        return word, store.done.task_id if task is None else task
    return None, None


def _mark(mark: Mark | None, now: int) -> tuple[str | None, int]:
    if mark is None:
        return None, 0
    return mark.task_id, -1 if mark.expiry is None else mark.expiry - now // MS


def _permit(number: int, permit: Store, now: int) -> list[list[Any]]:
    """A permit that has a value; and a record, if no value belongs to it."""
    told: list[list[Any]] = []
    record = None if permit.record in (None, NOT_A_STRING) else str(permit.record)
    if permit.value is not None:
        beside = None if speaks_of_its_value(permit, now) else record
        told.append([number, permit.value, said_of(permit, now), beside])
    if isinstance(permit.record, Record) and not speaks_of_its_value(permit, now):
        told.append([number, None, record, None])
    return told


CLAUSES = (tells_all_there_is,)
