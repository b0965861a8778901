"""Which call of a key is the newest: it runs, and older ones that have not begun do not. Redis only.

A publisher reserves a generation, which travels in the message; it sends; and it settles. Only then does the
call replace those before it: a publisher that dies in between replaces nobody. That a call starts is noted
where it acquires its lock (lua/acquire.lua). What is known lasts for `queue_lease` and the broker's
visibility timeout from the last of these steps, and all that is promised holds for as long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import redis

from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.lock.names import newest_name
from celery_setnx.lock.record import US
from celery_setnx.lock.scripts import Call, Script
from celery_setnx.lock.wire import Failed

RESERVE, REPLACE, DROP = Script("reserve"), Script("replace"), Script("drop")

MOST = 4 * 10**15
"""The largest generation that a message may have: microseconds until the year 2096, and exact in Lua."""


class Debounce(NamedTuple):
    """How long calls wait for newer ones, in seconds.

    Attributes:
        quiet_s: From the last call on. Defaults to 0: not at all.
        most_s: From the first one that waits.
        leads: Whether the first call of a quiet key does not wait. Defaults to False.
    """

    quiet_s: float = 0.0
    most_s: float = 0.0
    leads: bool = False

    def as_argv(self) -> tuple[int, int, int]:
        """As scripts take it, in microseconds."""
        return round(self.quiet_s * US), round(self.most_s * US), int(self.leads)


AT_ONCE = Debounce()


class Reservation(NamedTuple):
    """What became of an attempt to reserve a generation.

    Attributes:
        key: The lock's Redis key.
        task_id: The call's id; of an equal call that is queued that one's.
        state: `marked`, or `queued`: it is a duplicate.
        generation: Its number; of an equal call that one's.
        digest: Of all its arguments; empty if they have none.
        leads: Whether it starts at once, and only a newer start supersedes it.
        wait_s: Seconds for which it is to wait.
        due: Server time (Unix seconds) at which that is over; 0 if it is not known.
        holder: None; as a mark's reply has it.
    """

    key: str
    task_id: str
    state: str
    generation: int
    digest: str = ""
    leads: bool = False
    wait_s: float = 0.0
    due: float = 0.0
    holder: None = None

    @property
    def is_duplicate(self) -> bool:
        """True if an equal call is queued."""
        return self.state != "marked"


class Wanted(NamedTuple):
    """A call that is to have a generation: the lock's key, its id, and the digest of all its arguments."""

    key: str
    task_id: str
    digest: str


def reserve_all(
    client: redis.Redis, calls: Sequence[Wanted], *, debounce: Debounce, lease: float, remember: float
) -> list[Reservation | LockUnavailable | LockRefused]:
    """Reserve generations, in one round trip: for each what became of it, or why Redis did not say.

    An equal call is a duplicate for `lease` seconds since the newest was sent, or parked.
    """
    told = (int(remember * 1000), *debounce.as_argv(), int(lease * 1000))
    asked: list[Call] = [((newest_name(call.key),), (call.digest, *told)) for call in calls]
    replies = RESERVE.many(client, asked)
    return [
        _reserved(call, reply) if isinstance(reply, list) else reply for call, reply in zip(calls, replies)
    ]


def _reserved(call: Wanted, reply: list[Any]) -> Reservation:
    word, generation, task_id, wait_us, due_us = reply
    if word == "queued":
        return Reservation(call.key, task_id, word, int(generation))
    times = int(wait_us) / US, int(due_us) / US
    return Reservation(*call[:2], "marked", int(generation), call.digest, word == "leading", *times)


def replace_all(
    client: redis.Redis, sent: Sequence[Reservation], remember: float
) -> list[LockUnavailable | LockRefused | None]:
    """Have calls that were sent replace those before them; for each the error, if there is one."""
    replies = REPLACE.many(client, [_settling(one, remember) for one in sent])
    return [None if isinstance(reply, list) else reply for reply in replies]


def replace(client: redis.Redis, sent: Reservation, remember: float, *, failed: Failed) -> bool:
    """The same of one call, without waiting for the reply; False if nothing is sent. See `wire.tell`."""
    return REPLACE.tell(client, *_settling(sent, remember), failed)


def _settling(sent: Reservation, remember: float) -> Call:
    due_us = round(sent.due * US)
    argv = (sent.generation, sent.task_id, sent.digest, due_us, int(remember * 1000))
    return (newest_name(sent.key),), argv


class Newest(NamedTuple):
    """What is known of the newest call of a key, while it has not started.

    Attributes:
        task_id: Its id.
        generation: Its number.
        due_in_s: Seconds until it may start, negative once it may; None if that is not known.
        superseded: How many older calls it and those before it have replaced since the last start.
        lapses_in_s: Seconds for which this is known.
        pending_s: Seconds since a call was sent, and none has started; None if that is not known.
        parked_as: Id of the call of this key that stands in line, or stood there; empty if none did.
    """

    task_id: str
    generation: int
    due_in_s: float | None
    superseded: int
    lapses_in_s: float
    pending_s: float | None = None
    parked_as: str = ""


_NUMBERS = 8  # at the beginning of what is known (lua/newest.lua)


def newest_of(text: str | None, now: float, lapses_in_s: float) -> Newest | None:
    """The newest call, as lua/newest.lua has it; None if it has started, or none is known."""
    words = _words(text)
    _, settled, started, first_us, _, due_us, superseded, _ = map(int, words[:_NUMBERS] or "0" * _NUMBERS)
    if settled <= started:
        return None
    due_in_s = due_us / US - now if due_us else None
    pending_s = max(0.0, now - first_us / US) if first_us else None
    return Newest(words[-1], settled, due_in_s, superseded, lapses_in_s, pending_s, words[_NUMBERS])


def latest_of(text: str | None) -> int:
    """The generation that was reserved last; 0 if none is known."""
    words = _words(text)
    return int(words[0]) if words else 0


def _words(text: str | None) -> list[str]:
    """The lines of what is known; none if it is not ours."""
    words = (text or "").split("\n")
    is_ours = len(words) == _NUMBERS + 4 and all(map(_is_number, words[:_NUMBERS]))
    return words if is_ours else []


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) <= len(str(MOST)) and int(word) <= MOST


class Ending(NamedTuple):
    """A call with a generation that ends without a start; or, with `last_s`, waits for so long at least."""

    key: str
    task_id: str
    generation: int
    last_s: float | None = None

    def as_call(self) -> Call:
        """Keys and arguments, as the script takes them."""
        last = "" if self.last_s is None else int(self.last_s * 1000)
        return (newest_name(self.key),), (self.generation, self.task_id, last)


def drop_all(client: redis.Redis, calls: Sequence[Ending]) -> list[bool | LockUnavailable | LockRefused]:
    """Note what becomes of calls, in one round trip; for each whether it was there still."""
    replies = DROP.many(client, [call.as_call() for call in calls])
    return [reply[0] == "done" if isinstance(reply, list) else reply for reply in replies]
