"""The mark: at publish time, "a call with this key is queued". Redis only; nothing here knows Celery.

A mark is the id of the queued task, beside the lock. It is taken in two phases, so that a publisher that dies
before its message is sent costs seconds and not hours: a short grace lease before the send, the queue lease
after it. It ends when its task acquires the lock (in the same script), is freed when the task will not come,
and lapses by itself. A mark only ever keeps a call from being published; it never keeps one from running.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import redis

from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.lock.names import done_name, mark_name, newest_name, other_permits, record_name
from celery_setnx.lock.newest import Ending, drop_all
from celery_setnx.lock.record import Holder, holder_of, task_of
from celery_setnx.lock.scripts import Script, value_of
from celery_setnx.lock.verbs import Error, IfSame, if_same, tell_if_same
from celery_setnx.lock.wire import Failed

GRACE_S = 10.0
"""Seconds for which a mark lasts until its message is known to be sent."""

MARK, FORGET = Script("mark"), Script("forget")


def grace_s(lease: float) -> float:
    """Seconds for which a mark lasts until its message is known to be sent: never longer than after it."""
    return min(GRACE_S, lease)


@dataclass(frozen=True)
class MarkReply:
    """What became of an attempt to mark a key.

    Attributes:
        task_id: The task that the key is marked for, or that runs or has succeeded: the caller's own if it
            was first.
        state: `marked` for the caller, or `queued`, `running` or `done`: by whom it is a duplicate.
        holder: The running task's record; None in the other states.
    """

    task_id: str
    state: str
    holder: Holder | None = None

    @property
    def is_duplicate(self) -> bool:
        """True if the key is another task's."""
        return self.state != "marked"


@dataclass(frozen=True)
class Mark:
    """The mark beside one lock, for one task that is to be queued; `key` is the lock's.

    Of a call with a `generation` it is what is known of the newest call (see `newest`): that lasts, and the
    call, if its mark is freed, counts as started.
    """

    key: str
    task_id: str
    generation: int = 0

    @property
    def name(self) -> str:
        """The mark's own Redis key."""
        return newest_name(self.key) if self.generation else mark_name(self.key)


def mark_all(
    client: redis.Redis, marks: Sequence[Mark], *, dedupe: str, lease: float
) -> list[MarkReply | LockUnavailable | LockRefused]:
    """Mark many keys for `lease` seconds, in one round trip; of two equal keys the second is a duplicate.

    For each what became of it, or why Redis did not say. With `until_done` a task that runs, or whose lock is
    held for its retry, makes duplicates too; with `dedupe_for` one that has succeeded, as well.
    """
    lease_ms = max(1, int(lease * 1000))
    calls = []
    for mark in marks:
        keys = (mark.key, record_name(mark.key), mark.name, done_name(mark.key))
        calls.append((keys, (mark.task_id, lease_ms, dedupe)))
    replies = MARK.many(client, calls)  # each [word, task id, now us, lock value, record]
    return [_marked(reply) if isinstance(reply, list) else reply for reply in replies]


def done_by(client: redis.Redis, key: str) -> str | None:
    """Id of the task that has succeeded with this key, while that counts; None if none has."""
    token = value_of(client, done_name(key))
    return token and (task_of(token) or token)


class Failure(NamedTuple):
    """A run that has failed after its body, though its release may have noted a success, or may do so still.

    Attributes:
        key: The lock's Redis key.
        token: The run's.
        limit: How many permits the lock has.
    """

    key: str
    token: str
    limit: int


def forget_done(client: redis.Redis, failures: Sequence[Failure]) -> LockUnavailable | LockRefused | None:
    """Let the successes of runs no longer count, whoever has their locks by now; the first error."""
    calls = []
    for key, token, limit in failures:
        records = other_permits(key, limit)[1::2]
        calls.append(((done_name(key), record_name(key), *records), (token,)))
    return _first_error(FORGET.many(client, calls))


def extend_all(
    client: redis.Redis, marks: Sequence[Mark], leases: Sequence[float]
) -> LockUnavailable | LockRefused | None:
    """Let many marks last for their leases in seconds, where they are their tasks' still; the first error."""
    return _first_error(_changed(client, marks, leases))


def extend(client: redis.Redis, mark: Mark, lease: float, *, failed: Failed) -> bool:
    """The same for one mark, without waiting for the reply; False if nothing is sent. See `wire.tell`."""
    return tell_if_same(client, IfSame((mark.name,), (mark.task_id,), lease), failed)


def free_all(client: redis.Redis, marks: Sequence[Mark]) -> LockUnavailable | LockRefused | None:
    """Free many marks, where they are their tasks' still; the first error: the others lapse by themselves."""
    return _first_error(free_each(client, marks))


def free_if_marked(client: redis.Redis, mark: Mark) -> bool:
    """Free a mark; False if it is not its task's any more."""
    (is_freed,) = free_each(client, [mark])
    if not isinstance(is_freed, bool):
        raise is_freed
    return is_freed


def free_each(client: redis.Redis, marks: Sequence[Mark]) -> list[bool | Error]:
    """Free many marks: for each, those without a generation first, whether it was its task's still."""
    return _changed(client, marks, [None] * len(marks))


def _changed(
    client: redis.Redis, marks: Sequence[Mark], leases: Sequence[float | None]
) -> list[bool | Error]:
    """Whether marks were their tasks' still: then they are freed, or last for their leases."""
    plain = [(mark, lease) for mark, lease in zip(marks, leases) if not mark.generation]
    newest = [(mark, lease) for mark, lease in zip(marks, leases) if mark.generation]
    cases = [IfSame((mark.name,), (mark.task_id,), lease) for mark, lease in plain]
    ends = [Ending(mark.key, mark.task_id, mark.generation, lease) for mark, lease in newest]
    return [*if_same(client, cases), *drop_all(client, ends)]


def _marked(reply: list[Any]) -> MarkReply:
    word, task_id, _, value, record = reply
    return MarkReply(task_id, word, holder_of(value, record))


def _first_error(replies: Sequence[Any]) -> LockUnavailable | LockRefused | None:
    return next((reply for reply in replies if isinstance(reply, (LockUnavailable, LockRefused))), None)
