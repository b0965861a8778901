"""Delaying queues: in them a message waits in an AMQP broker, and takes no worker's prefetch meanwhile.

Such a queue, beside a call's queue, has one time to live for all its messages, because RabbitMQ looks only at
the head of a queue: one with a longer time would hold up all behind it. A message that has lived for as long
goes to the call's queue, by its name.
"""

from __future__ import annotations

import math
import time
from hashlib import blake2b
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from kombu.entity import Queue
from kombu.utils import json

from celery_setnx.call.queues import driver_of
from celery_setnx.log import Log

logger = Log("celery_setnx")

_UNUSED_S = 3600.0  # beyond its time to live, after which the broker deletes one that nobody declares again
_REFUSED_S = 600.0  # for which a process does not ask again
_LEAST_HOP_S = 0.25  # and by how much the last hop may be too long
_LONGEST_HOP_S = 2.0**15  # so a queue has 18 delaying queues at most for them; about nine hours
_NAME_BYTES = 200  # of the call's queue; a name has 255 at most
# Else a message whose time is over before its other queue has a leader, as after a restart, is dropped.
_QUORUM = {
    "x-queue-type": "quorum",
    "x-dead-letter-strategy": "at-least-once",
    "x-overflow": "reject-publish",
}
_RETRY = {"max_retries": 1, "interval_start": 0}


def delaying_queue(queue: Queue, wait_s: float) -> Queue:
    """The queue in which messages for another queue wait for so many seconds.

    Its name carries its arguments: of a release with other arguments it is another queue. It is as durable as
    the other queue, and a quorum queue if that is one.
    """
    arguments: dict[str, Any] = {
        "x-message-ttl": round(wait_s * 1000),
        "x-expires": round((wait_s + _UNUSED_S) * 1000),
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": queue.name,
    }
    if (vars(queue).get("queue_arguments") or {}).get("x-queue-type") == "quorum":
        arguments |= _QUORUM
    told = json.dumps([arguments, queue.durable])  # type: ignore[no-untyped-call]
    digest = blake2b(told.encode(), digest_size=4).hexdigest()
    near = queue.name.encode()[:_NAME_BYTES].decode(errors="ignore")
    name = f"{near}.setnx-{wait_s:g}s-{digest}"
    return Queue(name, durable=queue.durable, queue_arguments=arguments)  # type: ignore[no-untyped-call]


def hop_s(left_s: float) -> float:
    """How long a message with so many seconds left waits in its next queue: a power of two.

    So the queues are few. Never too short: a message with time left waits once more. At the end it is up to
    0.25 s too long, which saves the many short hops.
    """
    near_s = min(max(left_s, 0.0) + _LEAST_HOP_S, _LONGEST_HOP_S)
    return 2.0 ** math.floor(math.log2(near_s))


def waits_in_broker(app: Celery) -> bool:
    """Whether the broker may keep a message until its time has come."""
    return driver_of(app) == "amqp"


def declared(app: Celery, queue: str, wait_s: float, *, what: str = "Couriers") -> str | None:
    """The name of that queue, declared; None if the broker does not have it, which is remembered for a while.

    The warning of a refusal says `what` waits elsewhere, then.

    It is declared before each message: what is there already lasts longer then, and one that was deleted is
    there again. A refusal closes the channel, so it has one of its own.
    """
    waits = delaying_queue(queue_named(app, queue), wait_s)
    refused: dict[str, float] = app.__dict__.setdefault("_setnx_refused_queues", {})
    if time.monotonic() < refused.get(waits.name, 0.0):
        return None
    try:
        declare(app, waits)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, there is another way
        if not is_refusal(error):  # the broker is away; whoever publishes next hears of it
            logger.info("The queue %s is not known to be there: %s", waits.name, error)
            return None
        refused[waits.name] = time.monotonic() + _REFUSED_S
        text = (
            "%s wait in workers instead of the broker, which refuses the queue %s: %s Run "
            "`celery setnx doctor`: it prints what to allow."
        )
        logger.warning(text, what, waits.name, error)
        return None
    return str(waits.name)


def queue_named(app: Celery, name: str) -> Queue:
    """The app's queue of a name; one that is not the app's is taken for a durable classic one."""
    return app.amqp.queues.get(name) or Queue(name)  # type: ignore[no-untyped-call]


def declare(app: Celery, queue: Queue) -> None:
    """Declare a queue on a channel of its own; whatever kombu raises.

    A refusal is raised outside of the pool: that would close the connection for it, and give it away closed.
    """
    with app.producer_or_acquire() as producer:
        connection = producer.connection

        def once() -> Exception | None:
            connection.ensure_connection(max_retries=1)
            with connection.channel() as channel:
                try:
                    queue.bind(channel).declare()  # type: ignore[no-untyped-call]
                except Exception as error:
                    if is_refusal(error):
                        return error
                    raise
            return None

        refusal = connection.ensure(producer, once, **_RETRY)()
    if refusal is not None:
        raise refusal


def is_refusal(error: Exception) -> bool:
    """True if a broker has heard what it was asked for, and does not do it."""
    return int(getattr(error, "reply_code", 0) or 0) >= 400
