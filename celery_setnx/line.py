"""The line: tasks that wait for a lock, first come first served. Redis only; nothing here knows Celery.

A line is a sorted set of task ids beside the lock, with a hash of the calls that they are woken with. A
release hands the lock to the first (`lua/release.lua`). As a call that waits may have several messages on
their way, its ticket says which one of them may start it: the first that acquires the lock, and no other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import redis

from celery_setnx.keys import line_names, record_name, ticket_name
from celery_setnx.lock import Holder, current_holder
from celery_setnx.scripts import Script

_PARK, _LEAVE = Script("park"), Script("leave")


@dataclass(frozen=True)
class Place:
    """A place in the line of one lock, of one attempt of a task.

    Args:
        key: The lock's Redis key.
        task_id: The task's id.
        attempt: Number of its attempt; a later one is larger.
        remember: Seconds for which Redis remembers it unless it is asked again.
        call_id: What tells the call from others that were given the same task id. Defaults to nothing.
    """

    key: str
    task_id: str
    attempt: int
    remember: float
    call_id: str = ""


@dataclass(frozen=True)
class Found:
    """What a task that asks for its place finds.

    Attributes:
        state: `parked` (it waited already), `new` (it waits from now on), `handed` (the lock is kept for it,
            and it has been woken) or `stale` (a message of it has started).
        place: Its place in the line; the first is 1. 0 if it is not in the line.
        holder: Who has the lock; None if it is free, or its deadline has passed.
        server_time: The server's clock (Unix seconds).
        watches: Whether its courier is the one that watches the lock for the whole line.
    """

    state: str
    place: int
    holder: Holder | None
    server_time: float
    watches: bool


def park(
    client: redis.Redis, place: Place, *, copy: str = "", since: float, call: str, watch: float = 0.0
) -> Found:
    """Let a task wait in line, or see that it still does.

    `copy` is the message that met the held lock; without one its courier asks. `since` (Unix seconds, the
    server's) is its place, and `call` what it is woken with. For `watch` seconds its courier may be the one
    that watches the lock for the line.
    """
    word, now_us, value, record, rank, watcher = _park(
        client, place=place, copy=copy, since_s=since, call=call, watch_s=watch
    )
    holder = current_holder(now_us, value, record)
    return Found(word, int(rank), holder, int(now_us) / 1e6, watcher == "1")


def leave(client: redis.Redis, place: Place, *, copy: str) -> str:
    """Leave the line, so that no message of this attempt starts it: `left`.

    `handed` if the lock is kept for it, and is to be passed on; `stale` if another message of it has started,
    in which case nothing was changed.
    """
    return str(_leave(client, place=place, copy=copy)[0])


def _park(
    client: redis.Redis, *, place: Place, copy: str, since_s: float, call: str, watch_s: float
) -> list[Any]:
    """Run lua/park.lua: [word, now us, lock value, record, place, watcher]."""
    waiter = (place.task_id, place.attempt, copy, round(since_s * 1e6), call)
    return _PARK(client, _keys(place), *waiter, _remember_ms(place), round(watch_s * 1e6))


def _leave(client: redis.Redis, *, place: Place, copy: str) -> list[Any]:
    """Run lua/leave.lua: [word]."""
    return _LEAVE(client, _keys(place), place.task_id, place.attempt, copy, _remember_ms(place))


def _keys(place: Place) -> tuple[str, ...]:
    ticket = ticket_name(place.key, place.task_id, place.call_id)
    return (place.key, record_name(place.key), *line_names(place.key), ticket)


def _remember_ms(place: Place) -> int:
    return max(1, int(place.remember * 1000))
