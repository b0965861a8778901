"""The worker parent's side of a delivery: its nonce, and the locks that its end leaves behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime, timezone
from functools import cached_property, partial, wraps
from typing import Any

from billiard.einfo import ExceptionInfo, ExceptionWithTraceback
from billiard.exceptions import WorkerLostError
from celery import Celery, bootsteps
from celery.exceptions import Ignore, Reject, Retry
from celery.signals import task_received, task_rejected, task_unknown
from celery.states import SUCCESS
from celery.worker.request import Request
from celery.worker.state import revoked as revoked_tasks

from celery_setnx.arguments import Arguments
from celery_setnx.call.back import ComesBack, Dropped, Waits, remember_s
from celery_setnx.call.delivery import Delivery
from celery_setnx.call.ended import DEATHS, stored_end
from celery_setnx.call.guard import decorated
from celery_setnx.call.message import HEADER, Call, id_of, retries_of
from celery_setnx.call.queues import noting_queues
from celery_setnx.call.switches import DISABLED, runs_plainly
from celery_setnx.call.wake import give_turns, look_within
from celery_setnx.connection import quick_client_for
from celery_setnx.exceptions import SetnxError
from celery_setnx.forks import between_forks
from celery_setnx.lock.keeper import keeper_for_process
from celery_setnx.lock.line import BEGUN_S, goes_on, leave
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.marks import Failure
from celery_setnx.lock.record import ENDED, task_token
from celery_setnx.log import Log, fields
from celery_setnx.options import Options
from celery_setnx.run.cleanup import cleanup_of_process
from celery_setnx.run.events import follow
from celery_setnx.run.park import Parked
from celery_setnx.run.receipt import needs_receipt, receipt_of, receipts_of
from celery_setnx.run.sweep import look_again_in, look_soon, see_to_sweeps
from celery_setnx.signals import lock_released
from celery_setnx.wording import shortened, unstopped

logger = Log("celery_setnx")
_PID_MAX = 2**22
# What ends a delivery of ours, and not its call.
_GOES_ON = (Waits, Dropped, ComesBack)


def _noting(on_success: Callable[..., Any]) -> Callable[..., Any]:
    """What Celery calls when a child has returned; a success is noted, as `on_failure` does the other.

    An end is noted before Celery acknowledges the message.
    """

    @wraps(on_success)
    def note(self: SingletonRequest, failed__retval__runtime: Any, **kwargs: Any) -> Any:
        failed, retval, _runtime = failed__retval__runtime
        if not failed:
            self._has_returned = True
        error = _error_of(retval) if failed else None
        self._write_receipt(error)
        look_again_in(self.app, error.look_in_s if isinstance(error, Parked) else None)
        look_soon(self.app, self.call)
        return on_success(self, failed__retval__runtime, **kwargs)

    return note


class SingletonRequest(Request):  # type: ignore[misc]
    """A delivery of a `SingletonTask` in the worker's parent process.

    A nonce makes the token of every delivery its own, because a broker may deliver one message, and so one
    task id, twice. It travels to the child in a copy of the message's properties, which no retry inherits,
    and with it whether this worker sends events.
    """

    _timed_out = False
    _is_terminated = _is_cancelled = False  # by Celery, which says so only after it has killed the child
    _has_returned = False  # from a child that lived on: what the call has since is none of this run's

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Celery makes a class for each task; in 5.4 that notes nowhere which calls have succeeded."""
        super().__init_subclass__(**kwargs)
        cls.on_success = _noting(cls.on_success)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        see_to_sweeps()
        self.call = self._call_of_message()
        self._delivery = Delivery.receive(self, self.call)
        self._received_at = self._accepted_at = time.monotonic()
        follow(self.app, self.hostname, wanted=self._delivery.has_events)

    def _call_of_message(self) -> Call:
        """What is ignored of its header is taken out of it: no retry brings it along."""
        said = Call.of(self._request_dict["task"], self._request_dict)
        call = said if self._guard is None else self._guard.fitting(said)
        if not call.has_header:
            self._request_dict.pop(HEADER, None)
        elif call is not said:
            self._request_dict.update(call.as_headers())
        return call

    def on_accepted(self, pid: int, time_accepted: float) -> Any:
        """A child runs the task: from now on its death is noticed."""
        self._accepted_at = time.monotonic()
        if self._guard is not None and pid != os.getpid() and pid <= _PID_MAX:  # no greenlet's id
            cleanup_of_process().watch(self)
        return super().on_accepted(pid, time_accepted)

    def on_failure(self, exc_info: Any, send_failed_event: bool = True, return_ok: bool = False) -> Any:
        """A call that ends with an error may do so before its run could begin, and see to what it has.

        Without `return_ok` the child has died, or is about to, or could not begin.
        """
        error = _error_of(exc_info)
        self._has_returned = return_ok and not isinstance(error, DEATHS)
        if not return_ok:
            cleanup_of_process().keep(self)
        if isinstance(error, WorkerLostError) and not self._comes_back and self._goes_on():
            logger.warning(
                "%s still waits in line: the process that parked it has died (%s).",
                self.call,
                unstopped(error),
                extra=fields(of=self.call),
            )
            error = Waits("it waits on", 0.0)
            exc_info = _info_of(error)  # for which Celery acknowledges the message, and stores nothing
        if self._ends_with(error):
            self._forget(is_sent_again=isinstance(error, Retry))
            if not isinstance(error, Retry):
                self._forget_success()
        return super().on_failure(exc_info, send_failed_event, return_ok)

    def _ends_with(self, error: BaseException) -> bool:
        """True if this attempt has ended with an error, in a child that lives."""
        if isinstance(error, Reject):
            return not (error.requeue and self.task.acks_late)
        return not isinstance(error, DEATHS + _GOES_ON)

    def _write_receipt(self, error: BaseException | None) -> None:
        """Note that this attempt has ended, if its message may be delivered again and nothing else tells.

        An attempt that was retried or replaced has ended, too. One that failed has not: delivered again, it
        runs again.
        """
        guard = self._guard
        if guard is None or runs_plainly(self.app) or not _is_end(error):
            return
        acknowledged_at = time.monotonic() if self.task.acks_late else self._accepted_at
        if not needs_receipt(
            self.task,
            ignores_result=bool(
                self.ignore_result or self.task.ignore_result
            ),  # before Celery 5.7 both decide
            has_succeeded=error is None,
            held_s=acknowledged_at - self._received_at,
        ):
            return
        if (name := receipt_of(guard, self.call)) is not None:
            keep_s = remember_s(self.app, self._options)
            receipts_of(self.app).write(self.call, name, keep_s)

    def on_timeout(self, soft: bool, timeout: float) -> Any:
        """After a hard time limit the child is about to die."""
        if not soft:
            self._timed_out = True
            cleanup_of_process().keep(self)
        return super().on_timeout(soft, timeout)

    def terminate(self, pool: Any, signal: Any = None) -> None:
        """What the death of the child means is known before it is seen: the call is revoked."""
        self._is_terminated = bool(self.time_start)  # else Celery does it as soon as a child runs it
        super().terminate(pool, signal)

    def cancel(self, *args: Any, **kwargs: Any) -> None:
        """As it is shut down, or its connection is lost: what was not acknowledged is delivered again."""
        self._is_cancelled = True
        super().cancel(*args, **kwargs)

    def revoked(self) -> bool:
        """A call that was revoked or has expired uses neither its mark, nor its place, nor its held lock."""
        known = bool(self._already_revoked)  # type: ignore[has-type]
        if not known and self._leaves_late():
            self.acknowledge()  # nothing is said of a call that another message has started
            self._already_revoked = True
            return True
        revoked = bool(super().revoked())
        if revoked and not known and self._guard is not None:
            if self._request_dict.get("retries"):
                cleanup_of_process().free_retry(self)
            else:
                self._forget()
        return revoked

    def free_dead(self) -> None:
        """Free the lock of the child, which is dead, if it holds it still."""
        has_failed = not self._has_returned and not self._comes_back

        def free(lock: SetnxLock) -> bool:
            word = lock.free_dead(self._token)
            look_again_in(self.app, give_turns(self.app, self.task.name, lock))
            look_soon(self.app, self.call)  # it may have parked, and not told when to look
            if has_failed and word == "lost" and not self._goes_on():  # it died before it had the lock
                self._forget(has_died=True)
            return word == "freed"

        self._free(free, f"died with its process {self.worker_pid}")
        # It may have given the lock back as one that has succeeded; and so it has, if that is stored.
        if has_failed and self._guard.options.dedupe_for and not self._has_stored_success():
            self._forget_success()

    def _has_stored_success(self) -> bool:
        return bool(stored_end(self.app, self.task.name, self.id).get("status") == SUCCESS)

    def _goes_on(self) -> bool:
        """Whether the call of a child that has died waits in line, or another message has started it."""
        call = self._keyed
        if call is None or not self._options.may_wait:
            return False
        try:
            with between_forks:
                return goes_on(quick_client_for(self.app), call.place(BEGUN_S), copy=call.copy)
        except Exception as error:  # noqa: BLE001 - of Redis, or of what a message says
            logger.warning(
                "%s has died; whether it still waits in line is not known: %s",
                call,
                error,
                extra=fields(of=call),
            )
            return False

    def free_held(self, *, at_last: bool = False) -> bool:
        """Free what a retry has that will not run: the lock that is held for it, its mark and its place.

        False while the attempt that has sent it has not ended: only its end holds or marks.
        """
        call = self._keyed
        holders = self._guard.lock(call, self._arguments).holders() if call and not at_last else ()
        if any(holder.task_id == self.call.task_id and holder.state == "running" for holder in holders):
            return False

        def free(lock: SetnxLock) -> bool:
            self._forget()
            freed = lock.free_held(self.call.task_id)
            if freed:
                look_again_in(self.app, look_within(self.app, self.task.name, lock.name, 0.0).look_in_s)
            return freed

        self._free(free, "was revoked or has expired before its retry")
        return True

    def _leaves_late(self) -> bool:
        """Whether this message is to be discarded, as revoked or expired, after another has started its call.

        If it is the first, the call leaves the line: before Celery says that it is revoked, because that
        would also be said of a call which has run long ago.
        """
        if self._guard is None or not self.call.is_woken:
            return False
        if self.id not in revoked_tasks and not self._is_expired():
            return False
        return _leave_late(self.app, self.call)

    def _is_expired(self) -> bool:
        return (
            bool(self.expires) and datetime.now(timezone.utc if self.expires.tzinfo else None) > self.expires
        )

    def _forget(self, *, is_sent_again: bool = False, has_died: bool = False) -> None:
        if self._guard is None:
            return
        call, may_wait = self.call, self._options.may_wait
        if has_died and not call.may_have_twin:
            call = call._replace(copy=ENDED)
        cleanup_of_process().forget(self.app, call, may_wait=may_wait, is_sent_again=is_sent_again)

    def _forget_success(self) -> None:
        """Take back what this run has noted, or may note still: it has failed all the same."""
        call = self._keyed
        if call is not None and self._options.dedupe_for:
            failure = Failure(call.key, self._token, self._options.limit)
            cleanup_of_process().take_back(self.app, call, failure)

    @property
    def _token(self) -> str:
        """The token with which this delivery acquires its lock."""
        retries = retries_of(self._request_dict.get("retries"))
        return task_token(self.call.task_id, retries, self._delivery.nonce)

    @property
    def _comes_back(self) -> bool:
        """True if Celery delivers the message again when its child has died."""
        task = self.task
        if self._already_revoked or self._is_terminated:
            return False
        if self._is_cancelled:
            return bool(task.acks_late and not self.acknowledged)
        if self._timed_out:  # Celery before 5.7 has one setting for both
            acknowledges = getattr(task, "acks_on_timeout", task.acks_on_failure_or_timeout)
            return bool(task.acks_late and not acknowledges)
        if getattr(task, "retry_on_worker_lost", False):
            most = task.max_retries
            return most is None or retries_of(self._request_dict.get("retries")) < most
        return bool(task.acks_late and task.reject_on_worker_lost)

    def _free(self, free: Callable[[SetnxLock], bool], why: str) -> None:
        """Free the lock; if Redis does not answer, again until its lease has ended."""
        try:
            self._free_now(free, why)
        except SetnxError as error:
            lease_s = self._options.lease
            logger.warning(
                "%s %s, and its lock was not freed: %s It is tried again until its lease of %g s ends it.",
                self.call,
                why,
                error,
                lease_s,
                extra=fields(of=self.call),
            )
            again = partial(self._free_now, free, why)
            keeper_for_process(time.monotonic).try_again(again, time.monotonic() + lease_s)

    def _free_now(self, free: Callable[[SetnxLock], bool], why: str) -> None:
        with between_forks:
            if (call := self._keyed) is None:
                return
            lock = self._guard.lock(call, self._arguments)
            freed = free(lock)
        if freed:
            logger.warning(
                "%s %s; its lock %s is freed.", self.call, why, lock.name, extra=fields("freed", self.call)
            )
            lock_released.send(
                sender=self.task,
                task_id=self.id,
                key=lock.name,
                about=self.call.about,
                fence=None,
                outcome="freed",
                held_s=None,
            )

    @cached_property
    def _keyed(self) -> Call | None:
        """The call with the key of its lock; None if it has none: it is plain, or has never run."""
        guard, call = self._guard, self.call
        if guard is not None:
            with suppress(Exception):  # a callable key's, or of arguments that fit nothing
                return call._replace(key=call.key or guard.key(self._arguments, call.options))
        return None

    @property
    def _options(self) -> Options:
        """Its task's, with those of the call."""
        return self._guard.options_of(self.call.options)  # type: ignore[no-any-return]

    @property
    def _arguments(self) -> Arguments:
        return Arguments(self.args, self.kwargs)

    @property
    def _guard(self) -> Any:
        return getattr(self.task, "_guard", None)


def _error_of(exc_info: Any) -> BaseException:
    error: BaseException = exc_info.exception
    return error.exc if isinstance(error, ExceptionWithTraceback) else error


def _info_of(error: BaseException) -> ExceptionInfo:
    try:
        raise error
    except type(error):
        return ExceptionInfo()


def _is_end(error: BaseException | None) -> bool:
    """Whether an attempt that has returned, or raised this, has ended, and its message is acknowledged."""
    return error is None or (isinstance(error, (Retry, Ignore)) and not isinstance(error, _GOES_ON))


def _leave_late(app: Celery, call: Call) -> bool:
    """Leave the line for a message that has been woken: True if another one has started its call.

    The worker's event loop is where this is asked.
    """
    try:
        return leave(quick_client_for(app), call.place(BEGUN_S), copy=call.copy).word == "stale"
    except Exception as error:  # noqa: BLE001 - nothing that a message says may end the worker
        logger.warning("%s has not left its line: %s", call, error, extra=fields(of=call))
        return False


@task_received.connect  # type: ignore[untyped-decorator]
def _receive_other(request: Any, **_details: Any) -> None:
    """Receive a message of a task with another base class, whose request is Celery's own.

    The delivery of a decorated function is noted. A call whose task is guarded no more, or which runs plainly
    as all do, waits for no lock: it leaves its line, and its mark is freed.
    """
    is_ours, is_decorated = isinstance(request, SingletonRequest), decorated(request.task.run) is not None
    is_guarded = (is_ours or is_decorated) and not runs_plainly(request.app)
    if (is_ours and is_guarded) or not (is_ours or is_decorated or HEADER in request.request_dict):
        return
    call = request.call if is_ours else Call.of(request.request_dict["task"], request.request_dict)
    if is_guarded:
        Delivery.receive(request, call)
        return
    if DISABLED.is_on(request.app):  # no server is asked
        return
    if call.key and call.may_have_twin:
        logger.warning(
            "%s leaves its line: its task is not guarded here. It runs without a lock.",
            call,
            extra=fields(of=call),
        )
        if _leave_late(request.app, call):
            request.acknowledge()
            request._already_revoked = True  # Celery drops it without a word
            return
    cleanup_of_process().forget(request.app, call, may_wait=True)


def _named(message: Any) -> str:
    """The task and the id that a message names, whatever it is."""
    with suppress(Exception):
        return f"{shortened(str(message.headers['task']), 80)}[{id_of(message.headers.get('id'))}]"
    return "no task that can be read"


@task_unknown.connect  # type: ignore[untyped-decorator]
@task_rejected.connect  # type: ignore[untyped-decorator]
def _free_rejected(sender: Any, message: Any, **_details: Any) -> None:
    """A worker that does not know the task, or cannot read its message, has thrown the message away."""
    try:
        headers = message.headers or {}
        cleanup_of_process().forget(sender.app, Call.of(str(headers.get("task")), headers))
    except Exception as error:  # noqa: BLE001 - nothing that a message says may end the worker
        text = "A message of %s was thrown away; its mark and its place lapse by themselves: %s"
        logger.warning(text, _named(message), repr(error))


class UnreadableMessages(bootsteps.Step):  # type: ignore[misc]
    """Celery acknowledges a message that it cannot decode, and tells nobody: its mark is freed here."""

    def __init__(self, consumer: Any, **_options: Any) -> None:
        super().__init__(consumer)
        acknowledge = consumer.on_decode_error

        def on_decode_error(message: Any, error: Exception) -> None:
            acknowledge(message, error)
            _free_rejected(consumer, message)

        consumer.on_decode_error = on_decode_error


class OriginOfMessages(bootsteps.StartStopStep):  # type: ignore[misc]
    """Has each delivery say which queue it is from: on most brokers its message does not tell."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, consumer: Any) -> None:
        """Before the worker reads a queue: its event loop is the last step."""
        channel = consumer.task_consumer.channel
        with suppress(AttributeError):  # a transport may fix what a channel has: then a call's route tells
            channel.basic_consume = noting_queues(consumer.app, channel.basic_consume)
