"""What happens to an attempt's lock, mark and place in line when its delivery ends."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import Any, NamedTuple

from celery.exceptions import Reject, Retry

from celery_setnx.arguments import Arguments
from celery_setnx.call.back import ComesBack, Dropped, Waits, remember_s, seconds_until
from celery_setnx.call.message import Call
from celery_setnx.call.wake import leave_line
from celery_setnx.exceptions import SetnxError
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.line import BEGUN_S
from celery_setnx.lock.marks import extend_all, free_all
from celery_setnx.lock.record import ENDED
from celery_setnx.lock.verbs import Released
from celery_setnx.log import Log, fields
from celery_setnx.options import LONGEST_S
from celery_setnx.run.attempt import Attempt
from celery_setnx.run.linger import LINGER_S
from celery_setnx.run.park import Parked
from celery_setnx.signals import lock_released

logger = Log("celery_setnx")


class _Fate(NamedTuple):
    """What happens to a call when a delivery of it ends."""

    back_in: float | None = None  # seconds until it comes back; None: it does not
    hold: bool = False  # the lock is held for its retry
    parked: bool = False
    dropped: bool = False  # another message has started it: the mark may belong to that one, or to the retry


def give_back(attempt: Attempt, error: BaseException | None) -> None:
    """Give back the lock, the mark and the place of a delivery that ends, perhaps with this error."""
    fate = _Fate()
    try:
        if error is not None:
            fate = _fate_of(attempt, error)
    finally:
        if attempt.held is not None:
            _end(attempt, attempt.held, fate)
        elif attempt.facts.answer != "stale":
            _end_wait(attempt, fate)
        is_superseded = attempt.facts.answer == "superseded"  # then the mark is a newer call's
        if not (fate.dropped or is_superseded) and (attempt.held is None or attempt.keeps_mark):
            _end_mark(attempt, fate.back_in)


def end_attempt(attempt: Attempt) -> None:
    """Keep every message of this attempt from starting it: it has failed before its body.

    A message that it has sent of itself has the same copy, so the ticket notes that the next attempt has
    begun. That attempt exists only if a twin of this delivery has sent its retry.
    """
    number = attempt.call.attempt + (not attempt.facts.again)
    _leave(attempt, attempt.call._replace(attempt=number, copy=ENDED), BEGUN_S)


def _fate_of(attempt: Attempt, error: BaseException) -> _Fate:
    back_in = _comes_back_in(attempt, error)
    is_retry = isinstance(error, Retry) and not isinstance(error, ComesBack)
    hold = back_in is not None and attempt.options.hold_on_retry and is_retry
    return _Fate(back_in, hold, isinstance(error, Parked), isinstance(error, Dropped))


def _comes_back_in(attempt: Attempt, error: BaseException) -> float | None:
    """Seconds until the call that ends with this error is delivered again; None if it is not.

    A retry with another key needs neither this lock nor this mark. Nor does the retry of an eager call: it
    follows at once, or never.
    """
    task = attempt.task
    if attempt.request.is_eager:
        return None
    if isinstance(error, Retry) and not _keeps_key(attempt, error.sig):
        return None
    if isinstance(error, (Retry, Waits)):
        with suppress(ValueError, TypeError, OverflowError):  # it is no time
            return min(max(0.0, seconds_until(task.app, error.when)), LONGEST_S)
        return 0.0
    if isinstance(error, Reject) and error.requeue and task.acks_late:
        return 0.0
    return None


def _keeps_key(attempt: Attempt, retry: Any) -> bool:
    """True if the retry has the key that this call's message names."""
    task, name = attempt.task, attempt.lock.name
    if attempt.running.retry is not None:
        return attempt.running.retry.key == name
    if retry is None:
        return True
    if retry.task != task.name or retry.options.get("task_id") != attempt.request.id:
        return False  # it has become another call
    # A base class that waits for a commit publishes it later.
    options = {**attempt.call.options, **(retry.options.get("singleton") or {})}
    try:
        given = Arguments.given_to(task, retry.args, retry.kwargs, retry.options.get("serializer"))
        return attempt.guard.key(given, options) == name
    except SetnxError:
        return True  # as its message will say


def _end(attempt: Attempt, held: HeldLock, fate: _Fate) -> None:
    """Stop renewing the lease, then release the lock: a renewal after the release could only do harm."""
    if os.getpid() != attempt.pid:
        return  # the body forked, and this is the child: the lock belongs to its parent
    keeper, clock = attempt.keeper, attempt.lock.clock
    watched = keeper.forget(held)
    held_s = clock() - attempt.acquired_at
    if watched and held.remaining_s() <= 0:
        # The keeper may still wait for a late reply, but the lock was no longer safe.
        attempt.lost(held, held.lost or f"its lease of {held.lease_s:g} s had ended when the task ended")
        watched = False
    try:
        word = _release_or_hold(attempt, held, fate)
    except Exception as error:  # noqa: BLE001 - the body's own result or exception stands
        text = "%s has ended, but its lock %s was not released: %s "
        text += "The release is tried again until its lease of %g s ends it."
        logger.warning(text, attempt, held.key, error, held.lease_s, extra=fields(of=attempt.call))

        def again() -> None:  # "lost" tells nothing here: an earlier release may have worked unseen
            _tell_end(attempt, held, _release_or_hold(attempt, held, fate), held_s)

        keeper.try_again(again, clock() + held.lease_s)
        return
    if word in ("gone", "lost") and watched:
        attempt.lost(held, f"it was {word} when the task ended")
    _tell_end(attempt, held, word, held_s)


def _tell_end(attempt: Attempt, held: HeldLock, word: Released, held_s: float) -> None:
    """Wake the first in line, and send `lock_released`."""
    attempt.give_turns()
    if word in ("gone", "lost"):
        return
    if word == "repaired":
        text = "%s: a classic client had overwritten %s while we held it."
        logger.warning(text, attempt, held.key, extra=fields(of=attempt.call))
    if getattr(attempt.request, "setnx_lock", None) is held:  # else no receiver knows of it
        attempt.send(lock_released, fence=held.fence, outcome=word, held_s=held_s)


def _release_or_hold(attempt: Attempt, held: HeldLock, fate: _Fate) -> Released:
    """Release the lock, or hold it for the retry that was sent."""
    options = attempt.options
    again_s = 0.0 if fate.back_in is None else fate.back_in + options.queue_lease
    mark_for = again_s if options.dedupe == "until_done" else 0.0
    done_for = options.dedupe_for or 0.0 if attempt.has_succeeded else 0.0

    def release_or_hold() -> Released:
        if fate.hold:
            return held.hold(again_s)
        attempt.heed_terms()
        if not attempt.has_begun:
            held.take_start_back()
        rest = options.at_least_for if attempt.has_begun else 0.0
        return held.release(at_least_for=rest, mark_for=mark_for, done_for=done_for)

    try:
        return release_or_hold()
    except SetnxError:
        raise
    except Exception as error:  # noqa: BLE001 - see below
        # Under eventlet a greenlet that is killed while it reads may get the event of that read here, once
        # more. A second release does no harm.
        text = "%s gives its lock %s back once more, after %s"
        logger.info(text, attempt, held.key, repr(error), extra=fields(of=attempt.call))
        return release_or_hold()


def _end_wait(attempt: Attempt, fate: _Fate) -> None:
    """Leave the line, unless the call goes on waiting.

    The message with which it goes on may have parked already: that place stays. A place in which the call has
    only lingered lapses by itself in a moment.
    """
    attempt.give_turns()  # a lock that was acquired too late has been released
    may_be_in_line = attempt.is_woken or attempt.lingers_since
    if attempt.facts.answer == "superseded" and attempt.call.again:
        may_be_in_line = True  # an earlier delivery may have parked
    if may_be_in_line and fate.back_in is None and not fate.parked:
        _leave(attempt, attempt.call, BEGUN_S if attempt.is_woken else LINGER_S)


def _end_mark(attempt: Attempt, back_in: float | None) -> None:
    """Free the mark, or extend it if the call goes on waiting."""
    lock = attempt.lock
    if lock.mark is None:
        return
    mark, options = attempt.mark, attempt.options
    lasts_s = remember_s(attempt.task.app, options) if mark.generation else options.queue_lease
    if back_in is None:
        error = free_all(lock.client, [mark])
    else:
        error = extend_all(lock.client, [mark], [back_in + lasts_s])
    if error is not None:
        text = "%s: its mark was left as it is, and lapses by itself. %s"
        logger.warning(text, attempt, error, extra=fields(of=attempt.call))


def _leave(attempt: Attempt, call: Call, keep_s: float) -> None:
    try:
        leave_line(attempt.task.app, call, keep_s)
    except SetnxError as unheard:
        text = "%s has ended, and has not left the line: %s"
        logger.warning(text, attempt, unheard, extra=fields(of=attempt.call))
