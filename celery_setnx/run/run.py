"""One guarded run of a task's body: acquire, run, release."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Task
from celery._state import _task_stack
from celery.app.task import Context
from celery.exceptions import Reject, Retry
from celery.result import result_from_tuple
from celery.states import SUCCESS
from celery.utils.dispatch import Signal

from celery_setnx.arguments import Arguments
from celery_setnx.call.arrived import let_go
from celery_setnx.call.back import (
    EVENTS,
    ComesBack,
    Dropped,
    Waits,
    come_back,
    counts_once,
    seconds_until,
    tells_redelivery,
)
from celery_setnx.call.ended import stored_end
from celery_setnx.call.guard import Guard
from celery_setnx.call.message import Call, RunningCall, has_random_id
from celery_setnx.call.wake import report_take_over
from celery_setnx.connection import new_client
from celery_setnx.exceptions import LockTimeout, LockUnavailable, SetnxError
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.keeper import keeper_for_process
from celery_setnx.lock.line import BEGUN_S, leave
from celery_setnx.lock.marks import Mark, extend_all, free_all
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.receipt import has_receipt
from celery_setnx.lock.record import ORIGINAL
from celery_setnx.lock.verbs import Released
from celery_setnx.log import Log, fields
from celery_setnx.options import LONGEST_S, UNSET
from celery_setnx.run.acquire import Asking
from celery_setnx.run.conflict import resolve, resolve_done
from celery_setnx.run.events import follow
from celery_setnx.run.join import result_of
from celery_setnx.run.park import ItsTurn, Parked
from celery_setnx.run.receipt import receipt_of
from celery_setnx.run.started import store_started
from celery_setnx.signals import (
    lock_acquired,
    lock_lost,
    lock_released,
    lock_taken_over,
    lock_woken,
    uniqueness_lapsed,
)

logger = Log("celery_setnx")

_LOOK_AGAIN_S = 1.0
_LATE_S = 1.0  # by which the last look of a call that retries may come after its max_wait


_runs: dict[int, Run] = {}
"""The runs of this process that go on, by their own ids."""


def lock_of(task: Task) -> HeldLock | None:
    """The lock that the task's running call holds, or None where it is not guarded."""
    request = task.request_stack.top
    if request is None:
        warn_of_thread(task)
    held = getattr(request, "setnx_lock", None)
    return held if isinstance(held, HeldLock) else None


def warn_of_thread(task: Task | None) -> None:
    """Say, once a call of the task, or of any, that a thread which has none has asked for its lock.

    Mostly the body has started that thread, and what it does is not fenced. It is no error: another thread of
    the process may call the body directly.
    """
    if _task_stack.top is not None:  # it has a call, if of another task
        return
    untold = [run for run in list(_runs.values()) if not run.is_told and (task is None or run.task is task)]
    for run in untold:
        run.is_told = True
    if untold:
        text = "%s runs, and thread %s beside it asked for its lock. That is None there, and what the thread "
        text += "does is not fenced: hand it the lock that the body has, lock = self.lock."
        logger.warning(text, untold[0], threading.current_thread().name)


def is_running(request: Context) -> bool:
    """Whether a guarded run of this request goes on: what it calls of the task's runs under its lock."""
    return isinstance(vars(request).get("_setnx_run"), Run)


class _Fate(NamedTuple):
    """What becomes of a call when a delivery of it ends."""

    back_in: float | None = None  # seconds until it comes back, if it does
    hold: bool = False  # whether its lock is held for its retry
    parked: bool = False
    dropped: bool = False  # the delivery: the mark may be that of another, or of the retry


class Run:
    """One guarded run of a task's body: acquire, run, release."""

    def __init__(
        self, task: Task, guard: Guard, request: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.task, self.guard, self.request = task, guard, request
        self.acquired_at = 0.0
        self.has_begun = self.has_succeeded = False  # its body
        self.keeps_mark = False  # its own, under its lock: it may be that of the attempt's retry
        self.is_told = False  # that another thread has asked for its lock
        properties = request.properties or {}
        if EVENTS in properties:
            follow(task.app, request.hostname, wanted=properties[EVENTS])
        self.pid = os.getpid()
        self.asking = Asking(task, guard, request, args, kwargs)
        self.options, self.lock = self.asking.options, self.asking.lock
        self.keeper = keeper_for_process(self.lock.clock)
        self.running = RunningCall(self.call)
        self.running.stand_on(request)

    @property
    def call(self) -> Call:
        """What its message says of the call, and what has come of asking."""
        return self.asking.call

    def __str__(self) -> str:
        return str(self.call)

    def execute(self, body: Callable[[], Any]) -> Any:
        """The body's result, or what becomes of the conflict."""
        self.request._setnx_run = _runs[id(self)] = self
        try:
            return self._execute(body)
        except (SoftTimeLimitExceeded, LockUnavailable) as error:
            if not self.has_begun and getattr(error, "unsent", True):
                self.asking.end()  # it may have parked, or been sent again, and is told as failed
            raise
        finally:  # a body that the same request runs next has a lock of its own
            del self.request._setnx_run
            _runs.pop(id(self), None)

    def _execute(self, body: Callable[[], Any]) -> Any:
        held, stale, fate, asking = None, False, _Fate(), self.asking
        try:
            if self._joins and (end := asking.patiently(asking.joined_end, UNSET)) is not UNSET:
                return result_of(end)
            while held is None:
                outcome = asking.ask()
                if outcome is None:
                    store_started(self.task, self.request)
                    self.has_begun = True
                    return body()
                held, stale = outcome.lock, outcome.stale
                if stale:
                    raise self._dropped("another message has started this call, or has failed")
                if held is None and asking.frees_held(outcome):
                    continue
                if held is None:
                    if self._may_have_ended(outcome) and (result := self._result_before()) is not UNSET:
                        return result
                    try:
                        return resolve(asking.conflict(outcome))
                    except ItsTurn:
                        asking.has_parked = True
            self.acquired_at = self.lock.clock()
            self.keeps_mark = asking.may_be_second and cast("Outcome", outcome).mark == self.call.task_id
            if (result := self._result_without_body(held)) is not UNSET:
                return result
            return self._in_lock(held, cast("Outcome", outcome), body)
        except BaseException as error:
            fate = self._fate_of(error)
            raise
        finally:
            if held is not None:
                self._end(held, fate.back_in, hold=fate.hold)
            elif not stale:
                self._end_wait(parked=fate.parked, goes_on=fate.back_in is not None)
            if not fate.dropped and (held is None or self.keeps_mark):
                self._end_mark(fate.back_in)

    def _fate_of(self, error: BaseException) -> _Fate:
        back_in = self._comes_back_in(error)
        is_retry = isinstance(error, Retry) and not isinstance(error, ComesBack)
        hold = back_in is not None and self.options.hold_on_retry and is_retry
        return _Fate(back_in, hold, isinstance(error, Parked), isinstance(error, Dropped))

    @property
    def _joins(self) -> bool:
        """Whether it has met a call with whose result it is to end."""
        return self.options.on_conflict == "join" and self.call.join is not None

    def _result_without_body(self, held: HeldLock) -> Any:
        """What a call ends with whose like has succeeded; `UNSET` if it is to run."""
        done = self.asking.done_by(held)
        if done is not None:
            return resolve_done(self.task, self.call, self.options, done)
        if self._joins:  # the other may have had the lock when that was asked, and have given it back since
            end = self.asking.joined_end(held)
            return end if end is UNSET else result_of(end)
        return UNSET

    def _comes_back_in(self, error: BaseException) -> float | None:
        """Seconds until the call that ends with this error is delivered again; None if it is not.

        A retry with another key does not affect this lock and this mark: they are given back. The retry of an
        eager call follows at once, or never.
        """
        if self.request.is_eager:
            return None
        if isinstance(error, Retry) and not self._keeps_key(error.sig):
            return None
        if isinstance(error, (Retry, Waits)):
            with suppress(ValueError, TypeError, OverflowError):  # it is no time
                return min(max(0.0, seconds_until(self.task.app, error.when)), LONGEST_S)
            return 0.0
        if isinstance(error, Reject) and error.requeue and self.task.acks_late:
            return 0.0
        return None

    def _keeps_key(self, retry: Any) -> bool:
        """True if the retry's key is this call's: the one that its message names."""
        if self.running.retry is not None:
            return self.running.retry.key == self.lock.name
        if retry is None:
            return True
        if retry.task != self.task.name or retry.options.get("task_id") != self.request.id:
            return False  # it has become another call
        # Not published yet: by a base class that waits for a commit.
        options = {**self.call.options, **(retry.options.get("singleton") or {})}
        try:
            given = Arguments.given_to(self.task, retry.args, retry.kwargs, retry.options.get("serializer"))
            return self.guard.key(given, options) == self.lock.name
        except SetnxError:
            return True  # as its message will say

    def _check_max_wait(self, outcome: Outcome) -> None:
        """A call whose turn comes later than it would wait ends, though it has the lock.

        Not one that has waited for another delivery of itself, which may have begun.
        """
        max_wait, waited_s = self.options.max_wait, self.asking.waited_s(outcome)
        if max_wait is None or waited_s <= max_wait + _LATE_S or self.call.redelivered:
            return
        if self.task.acks_late and not tells_redelivery(self.task.app):
            return
        raise LockTimeout(self.task.name, self.lock.name, {}, None, waited_s)

    def _in_lock(self, held: HeldLock, outcome: Outcome, body: Callable[[], Any]) -> Any:
        """The body's result; what the call has ended with before, if it has."""
        self._begin(held, outcome)
        if (ended := self._result_before()) is not UNSET:
            return ended
        self._look_once_more(outcome)
        self._check_max_wait(outcome)
        # The first start of what is delivered again has ended the mark; but another's was set since.
        has_begun = self.call.redelivered and outcome.mark is None
        if self.call.marked is True and outcome.mark != self.call.task_id and not has_begun:
            self._report_lapse(outcome.mark)
        store_started(self.task, self.request)
        if self.keeps_mark:
            self.asking.patiently(self._free_mark, None)
            self.keeps_mark = False
        self.has_begun = True
        let_go(self.request)
        result = body()
        self.has_succeeded = not self.request.is_eager  # whose result is stored nowhere
        return result

    def _begin(self, held: HeldLock, outcome: Outcome) -> None:
        self.request.setnx_lock = held
        waited_s = self.asking.waited_s(outcome)
        self.keeper.watch(held, self._lost, self.options.at_most_for)
        if outcome.taken_over_from is not None:
            told = fields("taken_over", self.call)
            report_take_over(
                self.task.app, self, held.key, outcome.taken_over_from, outcome.server_time, told
            )
            self._send(lock_taken_over, fence=held.fence, holder=outcome.taken_over_from)
        if self.call.copy != ORIGINAL:
            logger.info(
                "%s has its turn: it waited %.1f s for %s.",
                self,
                waited_s,
                held.key,
                extra=fields("woken", self.call),
            )
            self._send(lock_woken, waited_s=waited_s)
        self._send(lock_acquired, fence=held.fence, waited_s=waited_s)

    def _report_lapse(self, marked_by: str | None) -> None:
        logger.warning(
            "%s was the only one queued when it was published, but its mark %s when it started: another call "
            "of %s may have been published meanwhile. It runs under its lock.",
            self,
            f"was that of {marked_by}" if marked_by else "was gone",
            self.lock.name,
            extra=fields("lapsed", self.call),
        )
        self._send(uniqueness_lapsed, marked_by=marked_by)

    def _may_have_ended(self, outcome: Outcome) -> bool:
        """Whether a call that meets a conflict is to ask whether its attempt has ended.

        What paces it may be its own first start. And by its policy it would end once more, or wait.
        """
        holder = outcome.holder
        own_runs = holder is not None and holder.task_id == self.call.task_id and holder.state == "running"
        return outcome.paced or (self.asking.may_be_second and not own_runs)

    def _result_before(self) -> Any:
        """What this delivery ends with if its attempt has ended before: release never means that it has.

        `UNSET` if it is not known to have ended.
        """
        stored = self._success_before()
        if stored is not None:
            return self._count_again(stored)
        receipt = receipt_of(self.guard, self.call) if self.asking.may_be_second else None
        if receipt and self.asking.patiently(partial(has_receipt, self.lock.client, receipt), False):
            # Before its end was reported, a chord has counted it.
            raise self._dropped("it has ended before")
        return UNSET

    def _dropped(self, reason: str) -> Dropped:
        """What ends a message that is not to run, once that is said."""
        logger.info("%s: this message is dropped: %s.", self, reason, extra=fields("dropped", self.call))
        return Dropped(reason)

    def _look_once_more(self, outcome: Outcome) -> None:
        """Have a delivery that has waited for another of its own come back once before it runs.

        That may have given the lock back a moment ago, and its end is told after its links are sent.
        """
        call = self.call
        has_waited = call.redelivered and call.waits and call.copy == ORIGINAL
        # Of a message that is acknowledged early there is no other: it has waited for the attempt before. And
        # a lock that was held for it is kept: given back here, it would be anybody's.
        if self.options.hold_on_retry or not self.task.acks_late:
            return
        if has_waited and not call.asked and outcome.taken_over_from is None:
            reason = "another delivery of it has had the lock, and may be about to end"
            come_back(self.task, call._replace(asked=1), _LOOK_AGAIN_S, reason, own=True)

    def _success_before(self) -> Mapping[str, Any] | None:
        """What is stored of this call, if it is another delivery of one that has succeeded."""
        # A message that has waited may have a twin that was delivered again, if it is acknowledged late: its
        # sender has died, or was not told that the broker has it. One that was woken has one if the lock
        # server came back with older data, in which it waits.
        is_woken = self.call.copy != ORIGINAL
        has_waited = is_woken or self.call.waits or self.asking.has_parked or self.asking.lingers_since
        has_twin = has_waited and (self.task.acks_late or (is_woken and has_random_id(self.call.task_id)))
        if not (self.call.redelivered or has_twin):
            return None
        stored = stored_end(self.task.app, self.task.name, self.request.id, its_own=True)
        return stored if stored.get("status") == SUCCESS else None

    def _count_again(self, stored: Mapping[str, Any]) -> Any:
        """The stored result of a chord's member: Celery may have died before it counted that.

        Callbacks, and what follows in a chain, were sent before it was stored. So nothing is left to be done
        for other calls, nor where a member that is counted twice would be two.
        """
        if not (self.request.chord and counts_once(self.task.backend)):
            raise self._dropped("it has succeeded before")
        logger.info(
            "%s has succeeded before, and is counted again for its chord.",
            self,
            extra=fields("dropped", self.call),
        )
        self.request.chain = self.request.callbacks = None
        children = stored.get("children") or ()
        self.request._children = [result_from_tuple(child, self.task.app) for child in children]
        return stored.get("result")

    def _end(self, held: HeldLock, back_in: float | None, *, hold: bool) -> None:
        """Forget, then release: a renewal that comes after the release could only do harm."""
        if os.getpid() != self.pid:
            return  # the body forked, and this is the child's way out: the lock is its parent's
        watched = self.keeper.forget(held)
        held_s = self.lock.clock() - self.acquired_at
        if watched and held.remaining_s() <= 0:
            # The keeper may be waiting for a late reply still; the body could no longer rely on the lock.
            self._lost(held, held.lost or f"its lease of {held.lease_s:g} s had ended when the task ended")
            watched = False
        try:
            word = self._release_or_hold(held, back_in, hold=hold)
        except Exception as error:  # noqa: BLE001 - whatever it is, the body's own result or exception stands
            text = "%s has ended, but its lock %s was not released: %s "
            text += "That is tried again until its lease of %g s ends it."
            logger.warning(text, self, held.key, error, held.lease_s, extra=fields(of=self.call))

            def again() -> None:  # of a loss it says nothing: a reply that was lost may have been a release's
                self._tell_end(held, self._release_or_hold(held, back_in, hold=hold), held_s)

            self.keeper.try_again(again, self.lock.clock() + held.lease_s)
            return
        if word in ("gone", "lost") and watched:
            self._lost(held, f"it was {word} when the task ended")
        self._tell_end(held, word, held_s)

    def _tell_end(self, held: HeldLock, word: Released, held_s: float) -> None:
        """Wake the heir of a lock that was given back, and say that it is released."""
        self.asking.wake_heirs()
        if word in ("gone", "lost"):
            return
        if word == "repaired":
            logger.warning(
                "%s: a classic client had overwritten %s while we held it.",
                self,
                held.key,
                extra=fields(of=self.call),
            )
        if getattr(self.request, "setnx_lock", None) is held:  # else no body has had it
            self._send(lock_released, fence=held.fence, outcome=word, held_s=held_s)

    def _release_or_hold(self, held: HeldLock, back_in: float | None, *, hold: bool) -> Released:
        """Release the lock, or hold it for the retry that was sent."""
        again_s = 0.0 if back_in is None else back_in + self.options.queue_lease
        mark_for = again_s if self.options.dedupe == "until_done" else 0.0
        done_for = self.options.dedupe_for or 0.0 if self.has_succeeded else 0.0

        def release_or_hold() -> Released:
            if hold:
                return held.hold(again_s)
            if not self.has_begun:
                held.take_start_back()
            rest = self.options.at_least_for if self.has_begun else 0.0
            return held.release(at_least_for=rest, mark_for=mark_for, done_for=done_for)

        try:
            return release_or_hold()
        except SetnxError:
            raise
        except Exception as error:  # noqa: BLE001 - see below
            # A greenlet that is killed while it reads may get an event meant for that read once more, here
            # (eventlet). What was given back may be given back again.
            logger.info(
                "%s gives its lock %s back once more, after %r",
                self,
                held.key,
                error,
                extra=fields(of=self.call),
            )
            return release_or_hold()

    def _end_wait(self, *, parked: bool, goes_on: bool) -> None:
        """A call that goes on waiting keeps its place; one that ended without the lock does not.

        The message with which it goes on may have parked by now: that place is not this delivery's to leave.
        One in which it has only lingered lapses by itself, in a moment.
        """
        self.asking.wake_heirs()  # acquired too late to rely on, and given back
        may_be_in_line = self.call.copy != ORIGINAL or self.asking.has_parked or self.asking.lingers_since
        if may_be_in_line and not goes_on and not parked:
            self.asking.leave()

    def _end_mark(self, back_in: float | None) -> None:
        """A call that goes on waiting keeps its mark, too; not one that ended without its body."""
        if self.lock.mark is None:
            return
        mark = Mark(self.lock.name, self.call.task_id)
        if back_in is None:
            error = free_all(self.lock.client, [mark])
        else:
            error = extend_all(self.lock.client, [mark], [back_in + self.options.queue_lease])
        if error is not None:
            logger.warning(
                "%s: its mark was left as it is, and lapses by itself. %s",
                self,
                error,
                extra=fields(of=self.call),
            )

    def _free_mark(self) -> None:
        """The body begins, as with the acquisition of any other delivery."""
        error = free_all(self.lock.client, [Mark(self.lock.name, self.call.task_id)])
        if error is not None:
            raise error

    def _lost(self, held: HeldLock, reason: str) -> None:
        logger.warning(
            "%s lost its lock %s: %s. Its body runs on, and another may run beside it; lock.ensure() tells "
            "the body.",
            self,
            held.key,
            reason,
            extra=fields("lost", self.call),
        )
        if self.call.copy != ORIGINAL:
            # Redis may have lost its data: without a ticket the courier would wake the call beside itself.
            with suppress(SetnxError):  # a client of its own, because this may be the keeper's thread
                leave(new_client(self.task.app), self.call.place(BEGUN_S), copy=self.call.copy)
        self._send(lock_lost, fence=held.fence, reason=reason)

    def _send(self, signal: Signal, **details: Any) -> None:
        if signal.receivers:
            details |= {"key": self.lock.name, "about": self.call.about}
            signal.send(sender=self.task, task_id=self.request.id, **details)
