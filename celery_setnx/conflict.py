"""What becomes of a call whose lock another holds: skip, retry, raise, or what a callable decides."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from celery.app.task import Context, Task
from celery.exceptions import Ignore, Reject, Retry

from celery_setnx.exceptions import AlreadyRunning, LockTimeout, LockUnavailable
from celery_setnx.lock import Holder
from celery_setnx.options import UNSET, Options
from celery_setnx.signals import lock_conflict

logger = logging.getLogger("celery_setnx")

HEADER = "singleton"
"""The message header in which a call's key, options and waiting time travel."""

NONCE = "setnx_nonce"
"""The message property that makes the token of every delivery its own."""

# What a broker that delays by dead letters writes into headers. Sent along with the next wait, it makes
# RabbitMQ before 4.0.1 believe that the letter goes in circles, and drop it.
_DEATHS = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")
_DELAY_PREFIX = re.compile(r"^(?:[01]\.){28}")

_SKIPPED = "skipped"
_DEFAULT_VISIBILITY_S = 3600.0
_REQUEUE_S = 1.0


class WaitsForItself(Ignore):  # type: ignore[misc]
    """A delivery has gone back to the broker to wait for another delivery of the same call.

    Attributes:
        when: Seconds until it comes back.
    """

    def __init__(self, message: str, when: float) -> None:
        super().__init__(message, when)  # both: it is pickled on its way to the worker's parent
        self.when = when


def is_skipped(result: Any) -> bool:
    """True if a task's result is the default `skip_result`: the call was skipped, and did not run."""
    return isinstance(result, Mapping) and result.get("celery_setnx") == _SKIPPED


@dataclass(frozen=True)
class Conflict:
    """A call whose lock another holds, as an `on_conflict` callable sees it.

    The callable's return value is the task's result. It may call `skip()`, `retry()` or `fail()`, or raise.

    Attributes:
        task: The task; `task.request` is the call.
        key: The lock's Redis key.
        holder: Who holds the lock.
        remaining_s: Seconds until the holder's deadline; None if it has none.
        options: The options of this call.
        waits: How often this attempt has come back already.
        waited_s: Seconds since its first conflict.
        server_time: The lock server's clock (Unix seconds) at the conflict.
        queued_as: Id of the queued task of which this call turned out to be a duplicate, because nobody asked
            when it was published; it is skipped, whatever the policy. Defaults to None.
    """

    task: Task
    key: str
    holder: Holder
    remaining_s: float | None
    options: Options
    waits: int
    waited_s: float
    server_time: float
    queued_as: str | None = None

    def skip(self) -> Any:
        """The `skip_result`; to be returned as the task's result."""
        because = f"{self.key} is held by {self.holder}"
        if self.queued_as:
            because += f", and the same call is queued already, as {self.queued_as}"
        logger.info("Skipped %s: %s.", _call(self.task), because)
        if self.options.skip_result is not UNSET:
            return self.options.skip_result
        return {
            "celery_setnx": _SKIPPED,
            "task": self.task.name,
            "key": self.key,
            "holder": self.holder.as_dict(),
        }

    def retry(self, countdown: float | None = None) -> NoReturn:
        """Send the call back to the broker; its own retries are not used up.

        Args:
            countdown: Seconds until it comes back. Defaults to `retry_delay`, doubled with each wait up to
                `retry_delay_max`, with jitter.

        Raises:
            celery.exceptions.Retry: Always, when the call is on its way.
            LockTimeout: It has waited for `max_wait`.
        """
        max_wait = self.options.max_wait
        if max_wait is not None and self.waited_s >= max_wait:
            raise LockTimeout(
                self.task.name, self.key, self.holder.as_dict(), self.remaining_s, self.waited_s
            )
        if countdown is None:
            countdown = backoff(self.options, self.waits)
        if max_wait is not None:
            countdown = min(countdown, max_wait - self.waited_s)
        self._come_back(countdown)

    def fail(self) -> NoReturn:
        """Fail the task.

        Raises:
            AlreadyRunning: Always.
        """
        raise AlreadyRunning(self.task.name, self.key, self.holder.as_dict(), self.remaining_s)

    def wait_for_own(self) -> NoReturn:
        """Wait for another attempt or delivery of this very call, however long it takes."""
        self._come_back(backoff(self.options, self.waits), own=True)

    def _come_back(self, countdown: float, *, own: bool = False) -> NoReturn:
        reason = f"{self.key} is held by {self.holder}"
        come_back(self.task, countdown, self.waits, self.server_time - self.waited_s, reason, own=own)


def resolve(conflict: Conflict) -> Any:
    """Apply the policy to a conflict: the task's result, or the exception that ends this attempt."""
    request = conflict.task.request
    own = conflict.holder.task_id == request.id
    policy = conflict.options.on_conflict
    if own:
        policy = "wait"
    elif conflict.queued_as:
        policy = "skip"
    elif policy == "auto":
        published_for_a_change = conflict.options.dedupe == "until_started"
        policy = "retry" if published_for_a_change or in_workflow(request) else "skip"
    lock_conflict.send(
        sender=conflict.task,
        task_id=request.id,
        key=conflict.key,
        holder=conflict.holder,
        remaining_s=conflict.remaining_s,
        policy="callable" if callable(policy) else policy,
    )
    if conflict.holder.state == "foreign" and conflict.remaining_s is None:
        logger.error(
            "%s is locked by a value that is not a time: %r. It is not ours to overwrite, and will never "
            "expire; delete the key if nobody needs it.",
            conflict.key,
            conflict.holder.value,
        )
    if own:
        conflict.wait_for_own()
    if callable(policy):
        return policy(conflict)
    if policy == "skip":
        return conflict.skip()
    if policy == "retry":
        conflict.retry()
    return conflict.fail()


def in_workflow(request: Context) -> bool:
    """True if what follows depends on this call's result: a chain, a chord, or a mutable link."""
    links = request.callbacks or ()
    return bool(request.chain or request.chord or any(not _immutable(link) for link in links))


def waited(request: Context, server_time: float) -> tuple[int, float]:
    """How often, and for how many seconds, this attempt of a call has waited so far."""
    wait = _wait_of(request)
    if wait.get("retries") != request.retries:
        return 0, 0.0
    return wait["count"], max(0.0, server_time - wait["since"])


def has_met_itself(request: Context) -> bool:
    """True if this attempt has waited for another delivery of the same call."""
    return bool(_wait_of(request).get("own"))


def _wait_of(request: Context) -> Mapping[str, Any]:
    return ((request.headers or {}).get(HEADER) or {}).get("wait") or {}


def backoff(options: Options, waits: int) -> float:
    """Seconds until a call comes back: `retry_delay` doubled with each wait, with jitter."""
    delay = options.retry_delay * 2.0 ** min(waits, 30)
    return min(delay, options.retry_delay_max) * random.uniform(0.5, 1.0)


def without_deaths(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """A message's headers but for those that tell of its time in a broker's delay queues."""
    return {name: value for name, value in (headers or {}).items() if not name.startswith(_DEATHS)}


def come_back(
    task: Task, countdown: float, waits: int, since: float, reason: str, *, own: bool = False
) -> NoReturn:
    """Publish the running call again, unchanged but for its waiting time, and end this attempt.

    Args:
        task: The task; its request is the call.
        countdown: Seconds until the call comes back, within what the broker can delay.
        waits: How often it has come back already.
        since: Server time (Unix seconds) of its first conflict.
        reason: Why, for the log and the state RETRY.
        own: Whether it waits for another delivery of itself, whose state in the backend it must not touch.
            Defaults to False.

    Raises:
        celery.exceptions.Retry: The call is on its way.
        WaitsForItself: It is on its way, and waits for another delivery of itself.
        celery.exceptions.Reject: The broker does not take it, and has the message still (acks_late).
        LockUnavailable: The broker does not take it.
    """
    request = task.request
    countdown = _deliverable(task, countdown)
    headers = without_deaths(request.headers)
    wait = {"count": waits + 1, "since": since, "retries": request.retries}
    if own or has_met_itself(request):
        wait["own"] = True
    headers[HEADER] = {**(headers.get(HEADER) or {}), "wait": wait}
    signature = task.signature_from_request(
        request, queue=_topic_queue(task), countdown=countdown, retries=request.retries, headers=headers
    )
    try:
        signature.apply_async()
    except Exception as error:
        logger.error("%s could not be sent back to the broker (%s) while %s.", _call(task), error, reason)
        if task.acks_late:
            time.sleep(min(countdown, _REQUEUE_S))  # it is delivered again at once
            raise Reject(reason, requeue=True) from error
        raise LockUnavailable(
            _key_of(headers, task), f"{reason}; and the broker did not take the call back: {error}"
        ) from error
    message = f"{reason}; comes back in {countdown:.1f} s (wait {waits + 1})"
    if own:
        # No state is stored: it could overwrite the result that the other delivery is about to store.
        logger.info("%s waits for another delivery of itself: %s.", _call(task), message)
        raise WaitsForItself(message, countdown)
    # Celery logs this text, in its own line about the retry.
    raise Retry(message, when=countdown, sig=signature)


def _deliverable(task: Task, countdown: float) -> float:
    """A countdown that the broker keeps: far below its visibility timeout, a second at least on AMQP."""
    app = task.app
    options = app.conf.broker_transport_options or {}
    visibility_s = float(options.get("visibility_timeout") or _DEFAULT_VISIBILITY_S)
    if app.producer_pool.connections.connection.transport.driver_type == "amqp":
        return countdown if countdown >= 1 else 1 + countdown / 2  # the jitter stays
    return min(countdown, visibility_s / 4)


def _topic_queue(task: Task) -> str | None:
    """The queue that the call came from, if it has a topic exchange: Celery delays such a call natively, and
    would deliver it to the default queue. None elsewhere: Celery knows the way back.
    """
    info = task.request.delivery_info or {}
    key = _DELAY_PREFIX.sub("", info.get("routing_key") or "")
    queues = task.app.amqp.queues.values()
    found = [q.name for q in queues if q.routing_key == key and q.exchange and q.exchange.type == "topic"]
    return found[0] if len(found) == 1 else None


def _immutable(link: Any) -> bool:
    return bool(link.get("immutable")) if isinstance(link, Mapping) else False


def _key_of(headers: Mapping[str, Any], task: Task) -> str:
    key: str | None = headers[HEADER].get("key")
    return key or task.name


def _call(task: Task) -> str:
    return f"{task.name}[{task.request.id}]"
