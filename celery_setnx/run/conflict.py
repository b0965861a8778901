"""A call whose lock another holds, as an `on_conflict` callable sees it: it may skip, retry, wait or fail."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, cast

from celery.app.task import Context, Task

from celery_setnx.call.back import come_back
from celery_setnx.call.guard import is_singleton
from celery_setnx.call.message import Call
from celery_setnx.exceptions import AlreadyRunning, LockTimeout, OptionError
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import Holder
from celery_setnx.log import Log, fields, say_alone
from celery_setnx.options import UNSET, Options, duration_s
from celery_setnx.signals import call_deduplicated, call_superseded, lock_conflict
from celery_setnx.wording import HELD_BACK, held

logger = Log("celery_setnx")

_SKIPPED = "skipped"
_PAUSE_S = 30.0  # after which a retry whose lock is held for it asks again in a pause

_OF_HOLDER = ("task", "task_id", "worker", "state", "fence", "since", "deadline")
"""Fields of the holder that the result of a skipped call has."""


def is_skipped(result: Any) -> bool:
    """True if a task's result is the default `skip_result`: the call was skipped, and did not run."""
    return isinstance(result, Mapping) and result.get("celery_setnx") == _SKIPPED


def superseded_by(result: Any) -> str | None:
    """Id of the newer call that ran in place of a skipped one (`on_duplicate="replace"`), by the default
    `skip_result`; None of any other result.
    """
    by = result.get("superseded_by") if is_skipped(result) else None
    return by if isinstance(by, str) else None


class WaitInLine(Exception):
    """A callable has chosen to wait: its attempt goes on as with `on_conflict="wait"`."""


@dataclass(frozen=True)
class Conflict:
    """A call that found its lock held, as an `on_conflict` callable sees it.

    The callable's return value is the task's result. It may call `skip()`, `retry()` or `fail()`, or raise.

    Attributes:
        task: The task; `task.request` is the call.
        call: The call, as its message describes it.
        options: The options of this call.
        outcome: What the attempt to acquire the lock found.
        queued_as: Id of the queued call that this one duplicates, if its publisher did not check. Such a call
            is skipped, whatever the policy. Defaults to None.
    """

    task: Task
    call: Call
    options: Options
    outcome: Outcome
    queued_as: str | None = None

    @property
    def key(self) -> str:
        """The lock's Redis key."""
        return self.call.key

    @property
    def holder(self) -> Holder:
        """The holder of the lock; of several, the one that has held it longest."""
        return cast("Holder", self.outcome.holder)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the holder's deadline, of several the first deadline; None if there is none."""
        return self.outcome.remaining_s

    @property
    def has_begun(self) -> bool:
        """Whether a body of the call may have begun already: in a retry, or a second delivery."""
        return bool(self.call.again or self.task.request.retries)

    @property
    def waits(self) -> int:
        """How often this attempt has come back already."""
        return self.call.waits

    @property
    def waited_s(self) -> float:
        """Seconds since its first conflict."""
        return self.call.waited_s(self.outcome.server_time)

    @property
    def server_time(self) -> float:
        """The lock server's clock (Unix seconds) at the conflict."""
        return self.outcome.server_time

    @property
    def waiting(self) -> int:
        """How many calls wait in line for the lock."""
        return self.outcome.waiters

    @property
    def reason(self) -> str:
        """Who holds the lock, in one clause."""
        is_own, is_nobody = self.holder.task_id == self.call.task_id, self.holder.state in HELD_BACK
        return held(self.key, self.holder, 1 if is_own else self.outcome.limit, back=is_nobody)

    def skip(self) -> Any:
        """The `skip_result`; return it as the task's result."""
        because = self.reason
        if self.queued_as:
            because += f", and the same call is queued already, as {self.queued_as}"
        logger.info("Skipped %s: %s.", self.call, because, extra=fields("skipped", self.call))
        return _skip_result(self.task, self.call, self.options, holder=_briefly(self.holder))

    def retry(self, countdown: float | None = None) -> NoReturn:
        """Send the call back to the broker. This uses up none of the task's own retries.

        Args:
            countdown: Seconds until it comes back. Defaults to `retry_delay`, doubled with each wait up to
                `retry_delay_max`, with jitter.

        Raises:
            celery.exceptions.Retry: Always, once the call is sent.
            LockTimeout: It has waited for `max_wait`.
            OptionError: The countdown is no duration.
        """
        self._check_max_wait()
        max_wait = self.options.max_wait
        if countdown is None:
            countdown = self._backoff()
        else:
            where = f"conflict.retry() of {self.task.name}"
            countdown = duration_s(where, "countdown", countdown, "not negative")
        if max_wait is not None:
            countdown = min(countdown, max_wait - self.waited_s)
        self._come_back(countdown)

    def wait(self) -> NoReturn:
        """Let the call wait in line; it is woken when it is next, first come first served per key.

        Raises:
            celery_setnx.run.conflict.WaitInLine: Always; the call then waits as with `on_conflict="wait"`.
            OptionError: The task has another base class: no worker would serve its line in time.
        """
        self.check_base()
        raise WaitInLine

    def fail(self) -> NoReturn:
        """Fail the task.

        Raises:
            AlreadyRunning: Always.
        """
        raise AlreadyRunning(self.task.name, self.key, self._holder(), self.remaining_s, self.outcome.limit)

    def check_base(self) -> None:
        """Refuse a task whose lines no worker serves, with OptionError."""
        if not is_singleton(self.task):
            where = f"conflict.wait() of {self.task.name}"
            raise OptionError(f"{where} needs the base class: add base=SingletonTask")

    def come_back_as_copy(self) -> NoReturn:
        """Come back while another call with its task id stands in line."""
        reason = f"another call with its task id waits already, and {self.reason}"
        call = self.call if self.call.is_woken else self.call.as_copy()  # it has a courier
        come_back(self.task, call, self._backoff(), reason)

    def wait_for_own(self) -> NoReturn:
        """Come back until another attempt or delivery of this very call has ended, without a limit.

        Or until the lock that is held for it may be resumed: a pause may end at any time.
        """
        most_s = _PAUSE_S if self.outcome.paused else math.inf
        self._come_back(min(self._backoff(), most_s), own=not self.outcome.paced)

    def _holder(self) -> dict[str, Any]:
        """The holder, as plain values. Its `about` is the call's, if its record has none."""
        found = self.holder.as_dict()
        return {**found, "about": found["about"] or self.call.about}

    def _backoff(self) -> float:
        delay = backoff(self.options, self.waits)
        if not self.outcome.paced or self.outcome.paused:  # a pause may end at any time
            return delay
        return max(delay, (self.remaining_s or 0.0) + random.uniform(0.0, self.options.retry_delay))

    def _check_max_wait(self) -> None:
        max_wait = self.options.max_wait
        if max_wait is not None and self.waited_s >= max_wait:
            self.time_out()

    def time_out(self) -> NoReturn:
        """Fail the task, which has waited for `max_wait`: LockTimeout."""
        found = self.task.name, self.key, self._holder(), self.remaining_s
        raise LockTimeout(*found, self.waited_s, self.outcome.limit)

    def tell(self, policy: str) -> None:
        """Send `lock_conflict`; log a foreign lock that never ends."""
        lock_conflict.send(
            sender=self.task,
            task_id=self.task.request.id,
            key=self.key,
            about=self.call.about,
            holder=self.holder,
            remaining_s=self.remaining_s,
            policy=policy,
        )
        if self.holder.state == "foreign" and self.remaining_s is None:
            text = (
                "%s is locked by %r, which is not a time, so it never expires. Another program has set it: "
                "delete the key if nobody needs it."
            )
            logger.error(text, self.key, self.holder.value, extra=fields(of=self.call))

    def _come_back(self, countdown: float, *, own: bool = False) -> NoReturn:
        come_back(self.task, self.call, countdown, self.reason, own=own)


def is_own(call: Call, holder: Holder) -> bool:
    """Whether the holder is another delivery or attempt of this call, not just a call with its task id."""
    others = holder.info.get("call")
    # A lock that was handed to this call would be its own by now.
    is_anothers = others != call.call_id if others else holder.state == "handed"
    is_another = call.is_one_of_several and is_anothers
    is_first = not call.attempt and not call.again  # replace() begins an attempt of the same call
    return holder.task_id == call.task_id and not (is_another and is_first)


def skip_done(task: Task, call: Call, options: Options, done: str) -> Any:
    """Skip a call, because the same call has succeeded within `dedupe_for`."""
    text = "Skipped %s: the same call has succeeded already, as task %s (key %s)."
    logger.info(text, call, done, call.key, extra=fields("skipped", call))
    call_deduplicated.send(sender=task, task_id=done, key=call.key, about=call.about, state="done")
    return _skip_result(task, call, options, holder={"task_id": done, "state": "done"})


def skip_superseded(task: Task, call: Call, options: Options, by: str) -> Any:
    """Skip a call, because a newer one of its key runs instead."""
    text = "Skipped %s: a newer call has replaced it, task %s (key %s)."
    logger.info(text, call, by, call.key, extra=fields("superseded", call))
    call_superseded.send(
        sender=task, task_id=task.request.id, key=call.key, about=call.about, superseded_by=by
    )
    return _skip_result(task, call, options, superseded_by=by)


def _briefly(holder: Holder) -> dict[str, Any]:
    """The holder, short enough for monitors and Celery's log."""
    told = {name: getattr(holder, name) for name in _OF_HOLDER}
    if holder.state == "foreign":
        told["value"] = holder.value
    if holder.state == "paused":
        told |= holder.info
    return {name: value for name, value in told.items() if value}


def _skip_result(task: Task, call: Call, options: Options, **because: Any) -> Any:
    """The result of a skipped call: the task's own `skip_result`, or one that says because of whom."""
    say_alone(task.request)
    if options.skip_result is not UNSET:
        return options.skip_result
    told = {"task": call.task, "about": call.about, "key": call.key}
    return {"celery_setnx": _SKIPPED, **told, **because}


def backoff(options: Options, waits: int) -> float:
    """Seconds until a call comes back: `retry_delay` doubled with each wait, with jitter."""
    delay = options.retry_delay * 2.0 ** min(waits, 30)
    return min(delay, options.retry_delay_max) * random.uniform(0.5, 1.0)


def policy_of(options: Options, request: Context) -> Any:
    """`on_conflict`, with `auto` decided."""
    if options.on_conflict != "auto":
        return options.on_conflict
    if options.rate or options.dedupe == "until_started":  # it must run
        return "wait"
    return "retry" if in_workflow(request) else "skip"


def in_workflow(request: Context) -> bool:
    """True if something waits for this call's result: a chain, a chord, or a mutable link."""
    links = request.callbacks or ()
    return bool(request.chain or request.chord or any(not _immutable(link) for link in links))


def _immutable(link: Any) -> bool:
    return bool(link.get("immutable")) if isinstance(link, Mapping) else False
