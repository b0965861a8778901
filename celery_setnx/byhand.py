"""What an operator does with the locks of an app, from Python: list them, look at one, release it.

`locks` and `look` tell what `celery setnx list` and `show` tell of the locks of tasks. `release` neither asks
nor refuses: to ask is the page's business, or the program's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import redis
from celery import Celery

from celery_setnx.call.back import call_and_broker
from celery_setnx.call.wake import look_within
from celery_setnx.connection import client_for
from celery_setnx.exceptions import SetnxError
from celery_setnx.lock import survey
from celery_setnx.lock.line import call_in_line
from celery_setnx.lock.live import live_terms_of_tasks
from celery_setnx.lock.look import WAITERS, Sighting
from celery_setnx.lock.look import look as look_at
from celery_setnx.lock.names import scope_and_digest
from celery_setnx.lock.record import UNKNOWN, Waiter
from celery_setnx.lock.scripts import REDIS_ERRORS, translated
from celery_setnx.log import Log, fields
from celery_setnx.options import settings_of
from celery_setnx.signals import lock_released

__all__ = ["Sighting", "locks", "look", "release", "waiters"]

logger = Log("celery_setnx")

_RENEWALS = 5  # of a holder between the looks at its lock


def locks(app: Celery) -> Iterator[Sighting]:
    """Every lock of the app that somebody has or waits for, or whose pace or pause allows no start; by key.

    Reads all keys of the app's prefix by SCAN, many locks in a round trip.

    Raises:
        LockUnavailable: Redis did not answer.
        LockRefused: Redis refuses a command.
    """
    prefix = settings_of(app).prefix
    with told_as_ours(f"{prefix}:{{*}}"):
        yield from (seen for seen in survey.survey(client_for(app), prefix, marks=False) if seen.is_lock)


def look(app: Celery, key: str) -> Sighting:
    """What there is of one lock now; a free one has no holder.

    Args:
        app: The app whose task's lock it is.
        key: The lock's Redis key, as `task.lock_key()` and `Sighting.key` have it.

    Raises:
        ValueError: The key is not of the form `<prefix>:{...}`, as locks of tasks are. Nothing is read.
        LockUnavailable: Redis did not answer.
        LockRefused: Redis refuses a command.
    """
    prefix = settings_of(app).prefix
    if not (key.startswith(f"{prefix}:{{") and key.endswith("}")):
        raise ValueError(f"{key!r} is no name of a lock of this app's tasks")
    client, scope = client_for(app), scope_and_digest(key)[0]
    with told_as_ours(key):
        live = live_terms_of_tasks(client, prefix).get(scope, "")
        return look_at(client, key, terms=UNKNOWN._replace(live=live))


def waiters(app: Celery, seen: Sighting) -> list[Waiter]:
    """Who waits in line for a lock now, the first hundred.

    Raises:
        LockUnavailable: Redis did not answer.
        LockRefused: Redis refuses a command.
    """
    with told_as_ours(seen.key):
        return list(look_at(client_for(app), seen.key, waiters=WAITERS).waiters)


def release(app: Celery, seen: Sighting, *, by: str) -> bool:
    """Release a lock by hand, be its holder dead or alive, if it is still the one that was seen.

    The first in line has its turn. A body that runs under it runs on, and loses its lock (`lock_lost`):
    another may run beside it. Leaves a WARNING in the log, and sends `lock_released` with the outcome
    `by_hand`. `seen.is_abandoned` says whether the holder is known to come back no more.

    Args:
        app: The app whose task's lock it is.
        seen: What was seen of it. Of several permits, one of those of `seen.of_each()`.
        by: Who does it, for the log.

    Returns:
        True if it is released. False if by now it is free or another's, or if its value is no text. If the
        server's reply was lost, it may be free because of this.

    Raises:
        LockUnavailable: Redis did not answer; it may be released all the same.
        LockRefused: Redis refuses a command.
    """
    released, _ = release_each(app, [seen], by=by)
    return bool(released)


def release_each(
    app: Celery, chosen: Sequence[Sighting], *, by: str, renewed: bool = True
) -> tuple[list[Sighting], bool]:
    """Release permits of one lock, as `release` does: those that are released, and whether its line goes on.

    Unless `renewed` only those that nobody has renewed since.
    """
    released = []
    for seen in chosen:
        with told_as_ours(seen.key):
            dropped = _drop(client_for(app), seen, renewals=_RENEWALS if renewed else 0)
        if dropped is not None:
            _tell(app, dropped, by)
            released.append(dropped)
    return released, let_others_go_on(app, chosen[0])


def let_others_go_on(app: Celery, seen: Sighting) -> bool:
    """Have a worker look at the line of a lock: whether anybody waits, and one was told."""
    client = client_for(app)
    try:
        waiters = look_at(client, seen.key, waiters=1).waiters
        task = _task_in_line(client, seen.key, waiters[0].task_id) if waiters else None
    except (SetnxError, *REDIS_ERRORS) as error:
        text = "It is not known whether calls wait in line for %s: %s"
        logger.warning(text, seen.key, error, extra=fields(task=seen.task, key=seen.key, about=seen.about))
        return False
    return bool(waiters and look_within(app, task or seen.task, seen.key, 0.0).epoch)


def _task_in_line(client: redis.Redis, key: str, task_id: str) -> str | None:
    """The task of a call in line. A lock that tasks share, or that a foreign client has, does not name it."""
    try:
        text = call_in_line(client, key, task_id)
        return call_and_broker(text)[0].task if text else None
    except (SetnxError, ValueError):
        return None


def _drop(client: redis.Redis, seen: Sighting, *, renewals: int) -> Sighting | None:
    """Delete a lock, though its holder renews it: what was deleted; None if it is another's."""
    if survey.drop(client, seen):
        return seen
    if not renewals:
        return None
    each = look_at(client, seen.key).of_each()
    same = next((one for one in each if _is_same(one, seen)), None)
    return same and _drop(client, same, renewals=renewals - 1)


def _is_same(one: Sighting, seen: Sighting) -> bool:
    """Whether a permit has the holder that was seen. A foreign one is known by nothing but its value."""
    a, b = one.holder, seen.holder
    if a is None or b is None or not b.token:
        return False
    return (a.token, a.state, a.permit) == (b.token, b.state, b.permit)


def _tell(app: Celery, released: Sighting, by: str) -> None:
    """Leave a trace of what was released by hand: a log line, and the signal."""
    holder = released.holder
    logger.warning(
        "%s was released by hand, by %s. It was held by %s.",
        released.name,
        by,
        holder,
        extra=fields("by_hand", holder, task=released.task, key=released.key, about=released.about),
    )
    lock_released.send(
        sender=app.tasks.get(released.task) or app,
        task_id=holder and holder.task_id,
        key=released.key,
        about=released.about,
        fence=holder and holder.fence,
        outcome="by_hand",
        held_s=None,
    )


@contextmanager
def told_as_ours(key: str) -> Iterator[None]:
    """A server's errors as errors of ours."""
    try:
        yield
    except REDIS_ERRORS as error:
        raise translated(key, error) from error
