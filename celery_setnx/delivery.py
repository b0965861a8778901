"""A call's message: what it carries besides the call, and how a running call goes back to its broker."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Mapping
from typing import Any, NoReturn

from celery import Celery, Signature
from celery.app.task import Context, Task
from celery.exceptions import Ignore, Reject, Retry
from kombu.serialization import registry

from celery_setnx.exceptions import LockUnavailable
from celery_setnx.lock import ORIGINAL
from celery_setnx.options import Options

logger = logging.getLogger("celery_setnx")

HEADER = "singleton"
"""The message header in which a call's key, options and waiting time travel."""

NONCE = "setnx_nonce"
"""The message property that makes the token of every delivery its own."""

CONTENT_TYPE = "setnx_content_type"
"""The message property that tells the task how its message was serialized."""

EVENTS = "setnx_events"
"""The message property that tells the task whether its worker sends task events; True or False."""

# What a broker that delays by dead letters writes into headers. Sent along with the next wait, it makes
# RabbitMQ before 4.0.1 believe that the letter goes in circles, and drop it.
_DEATHS = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")
_DELAY_PREFIX = re.compile(r"^(?:[01]\.){28}")

_DEFAULT_VISIBILITY_S = 3600.0
_REQUEUE_S = 1.0


class Waits(Ignore):  # type: ignore[misc]
    """A delivery has ended and its call comes back, while another message of it may be on its way.

    Celery stores no state for it: that could overwrite the result which the other message is about to store.

    Attributes:
        when: Seconds until it comes back.
    """

    def __init__(self, message: str, when: float) -> None:
        super().__init__(message, when)  # both: it is pickled on its way to the worker's parent
        self.when = when


def waited(request: Context, server_time: float) -> tuple[int, float]:
    """How often, and for how many seconds, this attempt of a call has waited so far."""
    wait = wait_of(request)
    if wait.get("retries") != request.retries:
        return 0, 0.0
    return wait["count"], max(0.0, server_time - wait["since"])


def has_met_itself(request: Context) -> bool:
    """True if this attempt has waited for another delivery of the same call."""
    return bool(wait_of(request).get("own"))


def copy_of(request: Context) -> str:
    """Which of the messages of this attempt a delivery is."""
    wait = wait_of(request)
    return str(wait.get("copy", ORIGINAL)) if wait.get("retries") == request.retries else ORIGINAL


def attempt_of(retries: int | None, replaced: int | None) -> int:
    """Number of a task's attempt: it grows with every retry, and with every `replace()` by one of its id."""
    return (replaced or 0) * 1_000_000 + (retries or 0)


def is_redelivered(request: Context) -> bool:
    """True if this may be the second delivery of a message."""
    return bool((request.delivery_info or {}).get("redelivered")) or has_met_itself(request)


def wait_of(request: Context) -> Mapping[str, Any]:
    """What a call's message says of its waiting; of an earlier attempt's too, see `retries`."""
    return ((request.headers or {}).get(HEADER) or {}).get("wait") or {}


def backoff(options: Options, waits: int) -> float:
    """Seconds until a call comes back: `retry_delay` doubled with each wait, with jitter."""
    delay = options.retry_delay * 2.0 ** min(waits, 30)
    return min(delay, options.retry_delay_max) * random.uniform(0.5, 1.0)


def without_deaths(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """A message's headers but for those that tell of its time in a broker's delay queues."""
    return {name: value for name, value in (headers or {}).items() if not name.startswith(_DEATHS)}


def come_back(
    task: Task,
    countdown: float,
    waits: int,
    since: float,
    reason: str,
    *,
    own: bool = False,
    **details: Any,
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
        details: What else its message says of its waiting.

    Raises:
        celery.exceptions.Retry: The call is on its way.
        Waits: It is on its way, and waits for another delivery of itself.
        celery.exceptions.Reject: The broker does not take it, and has the message still (acks_late).
        LockUnavailable: The broker does not take it.
    """
    if task.request.is_eager:  # it has no message
        raise Retry(f"{reason}; an eager call does not come back", when=countdown, is_eager=True)
    countdown = deliverable(task, countdown)
    wait = {"count": waits + 1, "since": since, **details}
    if own:
        wait["own"] = True
    signature = same_call(task, wait, countdown=countdown)
    try:
        if is_singleton(task):
            signature.apply_async()
        else:  # past its base class: it was published before, and one that refuses duplicates would drop it
            Task.apply_async(task, signature.args, signature.kwargs, **signature.options)
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        not_taken_back(task, error, reason, countdown)
    message = f"{reason}; comes back in {countdown:.1f} s (wait {waits + 1})"
    if own:
        logger.info("%s waits for another delivery of itself: %s.", call_of(task), message)
        raise Waits(message, countdown)
    # Celery logs this text, in its own line about the retry.
    raise Retry(message, when=countdown, sig=signature)


def same_call(task: Task, wait: Mapping[str, Any], **options: Any) -> Signature:
    """The running call again, unchanged but for how it has waited.

    Args:
        task: The task; its request is the call.
        wait: What its message says of its waiting, beside the attempt and the copy that waits.
        options: Further options of `celery.Task.apply_async`.
    """
    request = task.request
    headers = without_deaths(request.headers)
    before = wait_of(request) if wait_of(request).get("retries") == request.retries else {}
    kept = {name: before[name] for name in ("copy", "join", "asked") if name in before}
    if is_redelivered(request):
        kept["own"] = True
    wait = {"retries": request.retries, **kept, **wait}
    headers[HEADER] = {**(headers.get(HEADER) or {}), "wait": wait}
    return task.signature_from_request(
        request,
        queue=topic_queue(task),
        retries=request.retries,
        headers=headers,
        serializer=serializer_of(task),
        **options,
    )


def is_singleton(task: Task) -> bool:
    """True for a `SingletonTask`; False where only the function is guarded, under another base class."""
    return getattr(task, "_guard", None) is not None


def serializer_of(task: Task) -> str:
    """What the running call's message was serialized with; the task's serializer if that is not known."""
    content_type = (task.request.properties or {}).get(CONTENT_TYPE)
    return str(registry.type_to_name.get(content_type, task.serializer))


def not_taken_back(task: Task, error: Exception, reason: str, countdown: float) -> NoReturn:
    """End an attempt whose call the broker did not take back.

    Raises:
        celery.exceptions.Reject: The broker has the message still (acks_late).
        LockUnavailable: It has not.
    """
    logger.error("%s could not be sent back to the broker (%s) while %s.", call_of(task), error, reason)
    if task.acks_late:
        time.sleep(min(countdown, _REQUEUE_S))  # it is delivered again at once
        raise Reject(reason, requeue=True) from error
    header = (task.request.headers or {}).get(HEADER) or {}
    raise LockUnavailable(
        header.get("key") or task.name, f"{reason}; and the broker did not take the call back: {error}"
    ) from error


def deliverable(task: Task, countdown: float) -> float:
    """A countdown that the broker keeps: far below its visibility timeout, a second at least on AMQP."""
    app = task.app
    if app.producer_pool.connections.connection.transport.driver_type == "amqp":
        return countdown if countdown >= 1 else 1 + countdown / 2  # the jitter stays
    return min(countdown, visibility_s(app) / 4)


def visibility_s(app: Celery) -> float:
    """Seconds after which a broker without acknowledgements of its own delivers a message again."""
    options = app.conf.broker_transport_options or {}
    return float(options.get("visibility_timeout") or _DEFAULT_VISIBILITY_S)


def topic_queue(task: Task) -> str | None:
    """The queue that the call came from, if it has a topic exchange: Celery delays such a call natively, and
    would deliver it to the default queue. None elsewhere: Celery knows the way back.
    """
    info = task.request.delivery_info or {}
    key = _DELAY_PREFIX.sub("", info.get("routing_key") or "")
    queues = task.app.amqp.queues.values()
    found = [q.name for q in queues if q.routing_key == key and q.exchange and q.exchange.type == "topic"]
    return found[0] if len(found) == 1 else None


def call_of(task: Task) -> str:
    """The running call, in words."""
    return f"{task.name}[{task.request.id}]"
