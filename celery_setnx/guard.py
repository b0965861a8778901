"""How a call is guarded: what binding settles of a task, and one guarded run of its body."""

from __future__ import annotations

import functools
import inspect
import logging
import os
import random
import time
import uuid
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, cast

from celery import Celery, Task
from celery.exceptions import Ignore, Reject, Retry
from celery.states import SUCCESS
from celery.utils.dispatch import Signal
from celery.utils.time import maybe_make_aware

from celery_setnx.conflict import (
    HEADER,
    NONCE,
    Conflict,
    WaitsForItself,
    backoff,
    come_back,
    has_met_itself,
    resolve,
    waited,
)
from celery_setnx.connection import check_at_worker_start, client_for
from celery_setnx.exceptions import LockUnavailable, SetnxError
from celery_setnx.keeper import keeper_for_process
from celery_setnx.keys import KeyFunction, key_name, mark_name
from celery_setnx.lock import HeldLock, Holder, Outcome, SetnxLock, task_token
from celery_setnx.marks import Mark, Marked, extend_all, free_all, mark_all
from celery_setnx.options import Options, check_name, merged, plain, settings
from celery_setnx.process import identity, is_surely_dead
from celery_setnx.signals import (
    lock_acquired,
    lock_lost,
    lock_released,
    lock_taken_over,
    uniqueness_lapsed,
)

logger = logging.getLogger("celery_setnx")

# What a message has of a call that another call, or what follows, waits for.
_AWAITED = ("parent_id", "group", "chord", "chain", "callbacks", "errbacks")


def lock_of(task: Task) -> HeldLock | None:
    """The lock that the task's running call holds, or None where it is not guarded."""
    return getattr(task.request, "setnx_lock", None)


class Guard:
    """What binding settles of a task: its options, its key function, where its locks live."""

    def __init__(
        self, app: Celery, task: str, signature: inspect.Signature, layers: list[Mapping[str, Any]]
    ) -> None:
        self.app = app
        self.task = task
        self.signature = signature
        self.settings = settings(app.conf)
        self.layers = [self.settings.defaults, *layers]
        self.options = merged(task, *self.layers)
        self.key_function = self._key_function(self.options)
        check_name(f"scope of {task}", self.options.scope or task)
        check_at_worker_start(app)

    def under(self, call: Mapping[str, Any]) -> Guard:
        """The guard of many calls that have the same options of their own.

        Raises:
            OptionError: An option is unknown, malformed, or cannot be combined with the task's.
        """
        return Guard(self.app, self.task, self.signature, [*self.layers[1:], call])

    def _key_function(self, options: Options) -> KeyFunction:
        return KeyFunction(options.key, self.signature, self.task, self.settings.key_version)

    def header(
        self,
        args: Any,
        kwargs: Any,
        call: Mapping[str, Any] | None,
        inherited: Mapping[str, Any] | None = None,
        retries: int = 0,
    ) -> dict[str, Any]:
        """The header of a call: its finished key, its own options, and what a retry brings along.

        Args:
            args: The call's positional arguments.
            kwargs: The call's keyword arguments.
            call: Options of this call alone.
            inherited: The header of the attempt before, if this call is a retry. Defaults to none.
            retries: How often the task has retried itself. Defaults to 0.
        """
        inherited = inherited or {}
        travelling = dict(inherited.get("options") or {})
        if call:
            travelling.update(plain(f"a call of {self.task}", call))
        header: dict[str, Any] = {"key": self.key(args or (), kwargs or {}, travelling)}
        if travelling:
            header["options"] = travelling
        if "wait" in inherited:
            header["wait"] = inherited["wait"]
        if inherited.get("key", header["key"]) == header["key"]:
            marked = self._marked_again(travelling, inherited, retries)
            if marked:
                header["marked"] = marked
        return header

    def _marked_again(self, call: Mapping[str, Any], before: Mapping[str, Any], retries: int) -> Any:
        """Whether the key of a call that comes back is marked for it when it starts.

        True if it was the only one queued when it was published; `"again"` if it was not marked then, and the
        mark that its release has set may be another call's.
        """
        if (before.get("wait") or {}).get("retries") == retries:
            return before.get("marked")  # it has not started since
        options = self.options_of(call)
        if not retries or options.dedupe != "until_done" or options.hold_on_retry:
            return None
        return before.get("marked") or "again"

    def key(self, args: Any, kwargs: Mapping[str, Any], call: Mapping[str, Any]) -> str:
        """The Redis key of a call's lock."""
        options, function = self.options, self.key_function
        if call:
            options = self.options_of(call)
            if "key" in call:
                function = self._key_function(options)
        scope = options.scope or self.task
        return key_name(self.settings.prefix, scope, function.digest(args, kwargs))

    def options_of(self, call: Mapping[str, Any]) -> Options:
        """The options of one call."""
        return merged(f"a call of {self.task}", *self.layers, call) if call else self.options

    def options_for(self, header: Mapping[str, Any], call: Mapping[str, Any] | None) -> Options:
        """The options with which a call is published: those that travel, and those that stay at home."""
        layer = {**(header.get("options") or {}), **(call or {})}
        return self.options_of(layer)

    def lock(
        self,
        header: Mapping[str, Any],
        args: Any,
        kwargs: Mapping[str, Any],
        info: Mapping[str, Any] | None = None,
    ) -> SetnxLock:
        """The lock of a call: named by its header, or computed where a message has none."""
        call = header.get("options") or {}
        options = self.options_of(call)
        key = header.get("key") or self.key(args, kwargs, call)
        return SetnxLock(
            client_for(self.app),
            key,
            lease=options.lease,
            retention=self.settings.retention,
            info=info,
            mark=mark_name(key) if options.dedupe or header.get("marked") else None,
        )


class Run:
    """One guarded run of a task's body: acquire, run, release."""

    def __init__(self, task: Task, guard: Guard, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        request = task.request
        header = (request.headers or {}).get(HEADER) or {}
        self.task = task
        self.request = request
        self.is_marked = header.get("marked") is True
        self.same_host = guard.settings.same_host
        info = {**identity(), "task": task.name, "task_id": request.id, "worker": request.hostname}
        call = header.get("options") or {}
        self.key_of = functools.partial(guard.key, call=call)
        try:
            self.options = guard.options_of(call)
            self.lock = guard.lock(header, args, kwargs, info)
        except SetnxError:
            if header.get("marked"):  # refused here, whatever its producer could know
                free_all(client_for(guard.app), [Mark(header["key"], request.id)])
            raise
        self.keeper = keeper_for_process(self.lock.clock)
        self.pid = os.getpid()

    def __str__(self) -> str:
        return f"{self.task.name}[{self.request.id}]"

    def guard(self, body: Callable[[], Any]) -> Any:
        """The body's result, or what becomes of the conflict."""
        held = None
        back_in = None  # seconds until this call comes back, if it does
        hold = False
        try:
            outcome = self._acquire()
            if outcome is None:
                return body()
            held = outcome.lock
            if held is None:
                return resolve(self._conflict(outcome))
            self._begin(held, outcome)
            return body()
        except BaseException as error:
            back_in = self._comes_back_in(error)
            hold = back_in is not None and self.options.hold_on_retry and isinstance(error, Retry)
            raise
        finally:
            if held is not None:
                self._end(held, back_in, hold=hold)
            elif self.lock.mark is not None:
                self._end_mark(back_in)

    def _comes_back_in(self, error: BaseException) -> float | None:
        """Seconds until the call that ends with this error is delivered again; None if it is not.

        A retry with other arguments, and so another key, is none of this lock's and this mark's business.
        """
        if isinstance(error, Retry) and not self._keeps_key(error.sig):
            return None
        if isinstance(error, (Retry, WaitsForItself)):
            return self._seconds_until(error.when)
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
            return self.key_of(args, kwargs) == self.lock.name
        except SetnxError:
            return False

    def _acquire(self) -> Outcome | None:
        """The outcome, or None if Redis is unreachable and the body is to run all the same."""
        nonce = (self.request.properties or {}).get(NONCE) or uuid.uuid4().hex
        token = task_token(self.request.id, self.request.retries, nonce)
        give_up = self.lock.clock() + self.lock.lease_s
        pause = 0.05
        while True:
            try:
                outcome = self.lock.acquire(token=token)
                dead = self._proved_dead(outcome.holder)
                # The script compares the dead token, so that nobody else's lock is meant.
                return self.lock.acquire(token=token, dead=dead) if dead else outcome
            except LockUnavailable as error:
                if self.options.on_redis_error == "run":
                    logger.warning("%s runs unguarded (on_redis_error='run'). %s", self, error)
                    return None
                if self.options.on_redis_error == "raise":
                    raise
                if self.lock.clock() >= give_up:
                    now = time.time()  # the server's clock cannot be asked, and this only paces
                    waits, waited_s = waited(self.request, now)
                    come_back(self.task, backoff(self.options, waits), waits, now - waited_s, str(error))
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 1.0, self.lock.lease_s / 4)

    def _queued_as(self, holder: Holder | None) -> str | None:
        """Id of the queued task of which this call is a duplicate; None if this one is queued from now on.

        For a call that nobody has asked when it was published, as beat publishes a task that it has not
        imported: without this every tick would wait in line, and run.
        """
        request = self.request
        awaited = any(getattr(request, name, None) for name in _AWAITED)
        was_asked = (request.headers or {}).get(HEADER)
        # Another delivery of the call that runs is not queued: what is published now must run after it.
        is_own = holder is not None and holder.task_id == request.id
        if self.options.dedupe != "until_started" or awaited or was_asked or is_own:
            return None
        mark = Mark(self.lock.name, request.id)
        lease = self.options.queue_lease
        (found,) = mark_all(self.lock.client, [mark], dedupe=self.options.dedupe, lease=lease)
        if not isinstance(found, Marked):
            return None  # it waits all the same
        if not found.is_duplicate:
            request.headers = {**(request.headers or {}), HEADER: {"key": mark.key, "marked": True}}
            return None
        return found.task_id

    def _proved_dead(self, holder: Holder | None) -> str:
        """The holder's token if its process is surely dead, else nothing."""
        if holder is None or holder.state != "running" or not self.same_host:
            return ""
        return holder.token if is_surely_dead(holder.info) else ""

    def _begin(self, held: HeldLock, outcome: Outcome) -> None:
        self.request.setnx_lock = held
        self.keeper.watch(held, self._lost, self.options.at_most_for)
        if outcome.taken_over_from is not None:
            self._report_take_over(held, outcome.taken_over_from, outcome.server_time)
        self._send(lock_acquired, held)
        if self._has_succeeded_before():
            logger.info("%s has succeeded before, and was delivered again; this delivery is dropped.", self)
            raise Ignore("it has succeeded before")
        if self.is_marked and outcome.mark != self.request.id:
            self._report_lapse(outcome.mark)

    def _report_take_over(self, held: HeldLock, dead: Holder, server_time: float) -> None:
        ended_s = server_time - (dead.deadline or server_time)
        if ended_s >= 0:
            why = (
                f"its lease ended {ended_s:.1f} s ago and was not renewed. "
                "That process died, or stood still for longer than its lease."
            )
        else:
            why = "its process on this host is dead."
        logger.warning("%s took over %s from %s: %s", self, held.key, dead, why)
        self._send(lock_taken_over, held, holder=dead)

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
        redelivered = (self.request.delivery_info or {}).get("redelivered") or has_met_itself(self.request)
        if not redelivered or not self.task.backend.persistent:
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
        if watched and held.remaining_s() <= 0:
            # The keeper may be waiting for a late reply still; the body could no longer rely on the lock.
            self._lost(held, held.lost or f"its lease of {held.lease_s:g} s had ended when the task ended")
            watched = False
        try:
            again_s = 0.0 if back_in is None else back_in + self.options.queue_lease
            if hold:
                word = held.hold(again_s)
            else:
                word = held.release(
                    at_least_for=self.options.at_least_for,
                    mark_for=again_s if self.options.dedupe == "until_done" else 0.0,
                )
        except SetnxError as error:
            # The body's own result or exception stands.
            logger.warning(
                "%s has ended, but its lock was not released: %s The lease of %g s ends it.",
                self,
                error,
                held.lease_s,
            )
            return
        if word in ("gone", "lost"):
            if watched:
                self._lost(held, f"it was {word} when the task ended")
            return
        if word == "repaired":
            logger.warning("%s: a classic client had overwritten %s while we held it.", self, held.key)
        self._send(lock_released, held, outcome=word)

    def _end_mark(self, back_in: float | None) -> None:
        """A call that goes on waiting keeps its mark; one that ended without the lock gives it back."""
        mark = Mark(self.lock.name, self.request.id)
        if back_in is None:
            error = free_all(self.lock.client, [mark])
        else:
            error = extend_all(self.lock.client, [mark], [back_in + self.options.queue_lease])
        if error is not None:
            logger.warning("%s: its mark was left as it is, and lapses by itself. %s", self, error)

    def _seconds_until(self, when: Any) -> float:
        """Of a Retry: seconds, or the time itself."""
        if isinstance(when, datetime):
            when = (maybe_make_aware(when, self.task.app.timezone) - self.task.app.now()).total_seconds()
        return max(0.0, float(when or 0.0))

    def _lost(self, held: HeldLock, reason: str) -> None:
        logger.warning(
            "%s lost its lock %s: %s. Its body runs on, and another may run beside it.",
            self,
            held.key,
            reason,
        )
        self._send(lock_lost, held, reason=reason)

    def _conflict(self, outcome: Outcome) -> Conflict:
        waits, waited_s = waited(self.request, outcome.server_time)
        return Conflict(
            task=self.task,
            key=self.lock.name,
            holder=cast("Holder", outcome.holder),
            remaining_s=outcome.remaining_s,
            options=self.options,
            waits=waits,
            waited_s=waited_s,
            server_time=outcome.server_time,
            queued_as=self._queued_as(outcome.holder),
        )

    def _send(self, signal: Signal, held: HeldLock, **details: Any) -> None:
        signal.send(sender=self.task, task_id=self.request.id, key=held.key, fence=held.fence, **details)
