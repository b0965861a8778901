"""One guarded run of a task's body: acquire, run, release."""

from __future__ import annotations

import json
import logging
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, cast

from celery import Task
from celery.app.task import Context
from celery.exceptions import Ignore, Reject, Retry
from celery.states import SUCCESS
from celery.utils.dispatch import Signal

from celery_setnx.back import EVENTS, NONCE, Waits, come_back, seconds_until
from celery_setnx.conflict import Conflict, backoff, policy_of, resolve
from celery_setnx.connection import client_for, new_client
from celery_setnx.events import follow
from celery_setnx.exceptions import LockUnavailable, SetnxError
from celery_setnx.guard import Guard
from celery_setnx.keeper import keeper_for_process
from celery_setnx.line import BEGUN_S, Place, leave
from celery_setnx.lock import HAND_OVER_S, ORIGINAL, HeldLock, Holder, Outcome, Released, task_token
from celery_setnx.marks import Mark, Marked, extend_all, free_all, mark_all
from celery_setnx.message import Call
from celery_setnx.options import UNSET
from celery_setnx.process import identity
from celery_setnx.signals import (
    lock_acquired,
    lock_lost,
    lock_released,
    lock_taken_over,
    lock_woken,
    uniqueness_lapsed,
)
from celery_setnx.waiting import (
    ItsTurn,
    Parked,
    holders_result,
    leave_line,
    look_within,
    report_take_over,
    wake,
)

logger = logging.getLogger("celery_setnx")

# What a message has of a call that another call, or what follows, waits for.
_AWAITED = ("parent_id", "group", "chord", "chain", "callbacks", "errbacks")

# A call that meets a lock as young as this, behind as few others, stands in line in its pool slot before it
# is parked, as a mutex spins before it sleeps: between short bodies a message to and fro would take longer
# than they do.
_YOUNG_S = 0.02
_LINGER_BEHIND = 3
_LINGER_S = 0.1
_LINGER_POLL_S = 0.0005


_NOTHING: Mapping[str, Any] = {}


@lru_cache(maxsize=1000)
def info_of(pid: int, task: str, worker: str | None) -> str:
    """What the records of a task's locks say of this process; the task's id is in the token."""
    return json.dumps({**identity(), "task": task, "worker": worker}, separators=(",", ":"))


def lock_of(task: Task) -> HeldLock | None:
    """The lock that the task's running call holds, or None where it is not guarded."""
    return getattr(task.request, "setnx_lock", None)


class Run:
    """One guarded run of a task's body: acquire, run, release."""

    def __init__(
        self, task: Task, guard: Guard, request: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.task = task
        self.of = guard
        self.request = request
        self.call = guard.fitting(Call.of(task.name, vars(request)))
        self.lingers_since = 0.0
        self.has_parked = False
        self.acquired_at = 0.0
        properties = request.properties or _NOTHING
        if EVENTS in properties:
            follow(task.app, request.hostname, wanted=properties[EVENTS])
        self.pid = os.getpid()
        try:
            self.options = guard.options_of(self.call.options)
            if self.options.on_conflict == "join" and not request.is_eager:  # whose result is stored nowhere
                guard.check_backend(self.options)
            info = info_of(self.pid, task.name, request.hostname)
            self.lock = guard.lock(self.call, args, kwargs, info)
        except SetnxError:
            if self.call.marked:  # refused here, whatever its producer could know
                free_all(client_for(guard.app), [Mark(self.call.key, self.call.task_id)])
            raise
        if not self.call.key:
            self.call = self.call._replace(key=self.lock.name)
        nonce = properties.get(NONCE) or os.urandom(6).hex()
        self.token = task_token(request.id, request.retries, nonce)
        self.keeper = keeper_for_process(self.lock.clock)

    def __str__(self) -> str:
        return str(self.call)

    def guard(self, body: Callable[[], Any]) -> Any:
        """The body's result, or what becomes of the conflict."""
        held = None
        back_in = None  # seconds until this call comes back, if it does
        hold = stale = parked = False
        try:
            joins = self.options.on_conflict == "join" and self.call.copy != ORIGINAL
            if joins and (result := self._patiently(self._holders_result, UNSET)) is not UNSET:
                return result
            while held is None:
                outcome = self._linger()
                if outcome is None:
                    return body()
                if outcome.stale and self.call.bare and not self.call.redelivered:
                    # The call that had this task id has begun long ago: this is another, which has no ticket.
                    self.call = self.call._replace(call_id=os.urandom(6).hex(), bare=False)
                    continue
                held, stale = outcome.lock, outcome.stale
                if stale:
                    logger.info("%s has been started by another message; this one is dropped.", self)
                    raise Ignore("another message has started this call")
                if held is None:
                    with suppress(ItsTurn):
                        return resolve(self._conflict(outcome))
                    self.has_parked = True
            if joins:  # the other may have had the lock when that was asked, and have given it back since
                result = holders_result(self.task, self.call, self.options, None, held.server_time())
                if result is not UNSET:
                    return result
            self._begin(held, cast("Outcome", outcome))
            return body()
        except BaseException as error:
            back_in = self._comes_back_in(error)
            parked = isinstance(error, Parked)
            hold = back_in is not None and self.options.hold_on_retry and isinstance(error, Retry)
            raise
        finally:
            if held is not None:
                self._end(held, back_in, hold=hold)
            elif not stale:
                self._end_wait(back_in, parked=parked)

    def _comes_back_in(self, error: BaseException) -> float | None:
        """Seconds until the call that ends with this error is delivered again; None if it is not.

        A retry with other arguments, and so another key, is none of this lock's and this mark's business.
        That of an eager call follows at once, or never.
        """
        if self.request.is_eager:
            return None
        if isinstance(error, Retry) and not self._keeps_key(error.sig):
            return None
        if isinstance(error, (Retry, Waits)):
            return max(0.0, seconds_until(self.task.app, error.when))
        if isinstance(error, Reject) and error.requeue and self.task.acks_late:
            return 0.0
        return None

    def _keeps_key(self, retry: Any) -> bool:
        """True if the retry's key is this call's: its arguments are, or the key comes to the same."""
        if retry is None:
            return True
        args, kwargs = tuple(retry.args), dict(retry.kwargs)
        if args == tuple(self.request.args or ()) and kwargs == dict(self.request.kwargs or {}):
            return True
        try:
            return self.of.key(args, kwargs, self.call.options) == self.lock.name
        except SetnxError:
            return False

    def _acquire(self, linger: float = 0.0, since: float | None = None) -> Outcome | None:
        """The outcome, or None if Redis is unreachable and the body is to run all the same."""
        call = self.call
        details: dict[str, Any] = {"token": self.token, "call_id": call.call_id}
        if linger or call.attempt or call.redelivered or call.copy != ORIGINAL or self.has_parked:
            details |= {"copy": call.copy, "attempt": call.attempt, "remember": self._remember_s()}
            details |= {"linger": linger, "since": self._since_s() if since is None else since}
        ask = partial(self.lock.acquire_at_death, same_host=self.of.settings.same_host, **details)
        outcome: Outcome | None = self._patiently(ask, None)
        if self.lock.heir is not None:  # it has served the line
            look_within(self.task.app, self.task.name, self.lock.name, HAND_OVER_S)
            self._wake_heir()
        if outcome is not None and outcome.holder is not None and self.request.is_eager:
            # An eager replace() runs within the body, and under the lock, that it replaces.
            return None if outcome.holder.task_id == self.request.id else outcome
        return outcome

    def _patiently(self, ask: Callable[[], Any], unguarded: Any) -> Any:
        """What Redis says, asked again for up to a lease; `unguarded` if the body is to run all the same."""
        give_up = None
        pause = 0.05
        while True:
            try:
                return ask()
            except LockUnavailable as error:
                if self.options.on_redis_error == "run":
                    logger.warning("%s runs unguarded (on_redis_error='run'). %s", self, error)
                    return unguarded
                if self.options.on_redis_error == "raise":
                    raise
                give_up = give_up or self.lock.clock() + self.lock.lease_s
                if self.lock.clock() >= give_up:
                    come_back(self.task, self.call, backoff(self.options, self.call.waits), str(error))
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 1.0, self.lock.lease_s / 4)

    def _holders_result(self) -> Any:
        return holders_result(self.task, self.call, self.options, *self.lock.holder_and_time())

    def _queued_as(self, holder: Holder | None) -> str | None:
        """Id of the queued task of which this call is a duplicate; None if this one is queued from now on.

        For a call that nobody has asked when it was published, as beat publishes a task that it has not
        imported: without this every tick would wait in line, and run.
        """
        request = self.request
        awaited = any(getattr(request, name, None) for name in _AWAITED)
        # Another delivery of the call that runs is not queued: what is published now must run after it.
        is_own = holder is not None and holder.task_id == request.id
        is_eager = request.is_eager
        if self.options.dedupe != "until_started" or awaited or not self.call.bare or is_own or is_eager:
            return None
        mark = Mark(self.lock.name, request.id)
        lease = self.options.queue_lease
        (found,) = mark_all(self.lock.client, [mark], dedupe=self.options.dedupe, lease=lease)
        if not isinstance(found, Marked):
            return None  # it waits all the same
        if not found.is_duplicate:
            self.call = self.call._replace(marked=True)
            return None
        return found.task_id

    def _linger(self) -> Outcome | None:
        """The outcome. A call that is going to wait asks again for a few milliseconds, if that may do."""
        if not self.options.may_wait or policy_of(self.options, self.request) != "wait":
            return self._acquire()
        outcome = self._acquire(linger=_YOUNG_S)
        if outcome is None or outcome.holder is None:
            return outcome
        self.lingers_since = since = self.call.since or outcome.server_time
        give_up = self.lock.clock() + _LINGER_S
        if outcome.waiters >= _LINGER_BEHIND or self.options.max_wait == 0:
            return outcome
        while outcome is not None and self._is_young(outcome.holder, outcome.server_time):
            if self.lock.clock() > give_up:
                break
            time.sleep(_LINGER_POLL_S * max(1, outcome.waiters))
            outcome = self._acquire(linger=_YOUNG_S, since=since)
        return outcome

    def _is_young(self, holder: Holder | None, server_time: float) -> bool:
        """True if another call has had the lock, or was woken for it, since a moment ago."""
        if holder is None or holder.since is None or holder.task_id == self.request.id:
            return False
        return holder.state in ("running", "handed") and server_time - holder.since < _YOUNG_S

    @property
    def _place(self) -> Place:
        return self.call.place(BEGUN_S)

    def _since_s(self) -> float:
        """Server time since which this attempt waits; 0 if it does not."""
        return self.call.since if self.call.copy != ORIGINAL else 0.0

    def _remember_s(self) -> float:
        """Seconds for which it is remembered that this message starts the call; 0 if there is no other."""
        is_woken = self.call.copy != ORIGINAL or self.has_parked
        return BEGUN_S if is_woken or (self.call.redelivered and self.options.may_wait) else 0.0

    def _begin(self, held: HeldLock, outcome: Outcome) -> None:
        self.request.setnx_lock = held
        self.acquired_at = self.lock.clock()
        waited_s = self._waited_s(outcome)
        self.keeper.watch(held, self._lost, self.options.at_most_for)
        if outcome.taken_over_from is not None:
            report_take_over(self.task.app, self, held.key, outcome.taken_over_from, outcome.server_time)
            self._send(lock_taken_over, held, holder=outcome.taken_over_from)
        if self.call.copy != ORIGINAL:
            logger.info("%s has its turn: it waited %.1f s for %s.", self, waited_s, held.key)
            lock_woken.send(sender=self.task, task_id=self.request.id, key=held.key, waited_s=waited_s)
        self._send(lock_acquired, held, waited_s=waited_s)
        if self._has_succeeded_before():
            logger.info("%s has succeeded before, and was delivered again; this delivery is dropped.", self)
            raise Ignore("it has succeeded before")
        if outcome.mark != self.request.id and self.call.marked is True:
            self._report_lapse(outcome.mark)

    def _report_lapse(self, marked_by: str | None) -> None:
        logger.warning(
            "%s was the only one queued when it was published, but its mark %s when it started: another call "
            "of %s may have been published meanwhile. It runs under its lock.",
            self,
            f"was that of {marked_by}" if marked_by else "was gone",
            self.lock.name,
        )
        uniqueness_lapsed.send(
            sender=self.task, task_id=self.request.id, key=self.lock.name, marked_by=marked_by
        )

    def _has_succeeded_before(self) -> bool:
        """True if this is another delivery of a call whose result is known. Release never means done."""
        # A message that has waited may have a twin that was delivered again, if it is acknowledged late.
        has_waited = self.call.copy != ORIGINAL or self.has_parked or self.lingers_since
        has_twin = has_waited and self.task.acks_late
        if not (self.call.redelivered or has_twin) or not self.task.backend.persistent:
            return False
        try:
            return bool(self.task.backend.get_task_meta(self.request.id)["status"] == SUCCESS)
        except Exception as error:  # noqa: BLE001 - whatever a backend raises, it does not know
            logger.warning("%s was delivered again, and runs: its result is not known (%s).", self, error)
            return False

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
            word = self._give_back(held, back_in, hold=hold)
        except Exception as error:  # noqa: BLE001 - whatever it is, the body's own result or exception stands
            logger.warning(
                "%s has ended, but its lock %s was not released: %s That is tried again until its lease "
                "of %g s ends it.",
                self,
                held.key,
                error,
                held.lease_s,
            )

            def again() -> None:  # of a loss it says nothing: a reply that was lost may have been a release's
                self._tell_end(held, self._give_back(held, back_in, hold=hold), held_s)

            self.keeper.try_again(again, self.lock.clock() + held.lease_s)
            return
        if word in ("gone", "lost") and watched:
            self._lost(held, f"it was {word} when the task ended")
        self._tell_end(held, word, held_s)

    def _tell_end(self, held: HeldLock, word: Released, held_s: float) -> None:
        """Wake the heir of a lock that was given back, and say that it is released."""
        self._wake_heir()
        if word in ("gone", "lost"):
            return
        if word == "repaired":
            logger.warning("%s: a classic client had overwritten %s while we held it.", self, held.key)
        self._send(lock_released, held, outcome=word, held_s=held_s)

    def _give_back(self, held: HeldLock, back_in: float | None, *, hold: bool) -> Released:
        """Release the lock, or hold it for the retry that was sent."""
        again_s = 0.0 if back_in is None else back_in + self.options.queue_lease
        mark_for = again_s if self.options.dedupe == "until_done" else 0.0

        def give_back() -> Released:
            if hold:
                return held.hold(again_s)
            return held.release(at_least_for=self.options.at_least_for, mark_for=mark_for)

        try:
            return give_back()
        except SetnxError:
            raise
        except Exception as error:  # noqa: BLE001 - see below
            # A greenlet that is killed while it reads may get an event meant for that read once more, here
            # (eventlet). What was given back may be given back again.
            logger.info("%s gives its lock %s back once more, after %r", self, held.key, error)
            return give_back()

    def _end_wait(self, back_in: float | None, *, parked: bool) -> None:
        """A call that goes on waiting keeps its mark and place; one that ended without the lock does not."""
        self._wake_heir()  # acquired too late to rely on, and given back
        is_in_line = self.lingers_since or (back_in is None and self.call.copy != ORIGINAL)
        if is_in_line and not parked:
            try:
                is_one_of_many = self.call.copy != ORIGINAL or self.has_parked
                leave_line(self.task.app, self.call, BEGUN_S if is_one_of_many else _LINGER_S)
            except SetnxError as unheard:
                logger.warning("%s has ended, and has not left the line: %s", self, unheard)
        if self.lock.mark is None:
            return
        mark = Mark(self.lock.name, self.request.id)
        if back_in is None:
            error = free_all(self.lock.client, [mark])
        else:
            error = extend_all(self.lock.client, [mark], [back_in + self.options.queue_lease])
        if error is not None:
            logger.warning("%s: its mark was left as it is, and lapses by itself. %s", self, error)

    def _wake_heir(self) -> None:
        """Wake the one to whom the lock was handed: by a release, or because nobody living had it."""
        heir, self.lock.heir = self.lock.heir, None
        if heir is not None:
            wake(self.task.app, heir, self.lock.name)

    def _lost(self, held: HeldLock, reason: str) -> None:
        logger.warning(
            "%s lost its lock %s: %s. Its body runs on, and another may run beside it; lock.ensure() tells "
            "the body.",
            self,
            held.key,
            reason,
        )
        if self.call.copy != ORIGINAL:
            # Redis may have lost its data: without a ticket the courier would wake the call beside itself.
            with suppress(SetnxError):  # a client of its own, because this may be the keeper's thread
                leave(new_client(self.task.app), self._place, copy=self.call.copy)
        self._send(lock_lost, held, reason=reason)

    def _conflict(self, outcome: Outcome) -> Conflict:
        queued_as = self._queued_as(outcome.holder)  # which may mark the call
        since = self.lingers_since or self.call.since or outcome.server_time
        return Conflict(self.task, self.call._replace(since=since), self.options, outcome, queued_as)

    def _waited_s(self, outcome: Outcome) -> float:
        """Seconds since this attempt met its lock held, whether it has come back since or lingers."""
        since = self.lingers_since or self.call.since
        return max(0.0, outcome.server_time - since) if since else 0.0

    def _send(self, signal: Signal, held: HeldLock, **details: Any) -> None:
        if signal.receivers:
            signal.send(sender=self.task, task_id=self.request.id, key=held.key, fence=held.fence, **details)
