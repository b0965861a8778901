"""Which queue a message came from, and the way to that queue alone: never by an exchange, which may copy."""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from functools import wraps
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from kombu.entity import Exchange, Queue

from celery_setnx.call.message import Call

try:
    from celery.utils.quorum_queues import detect_quorum_queues
    from kombu.transport.native_delayed_delivery import calculate_routing_key
except ImportError:  # Celery before 5.5 delays every message in the worker

    def detect_quorum_queues(app: Celery, driver_type: str) -> tuple[bool, str]:
        """None is known."""
        return False, ""


from celery_setnx.log import Log

logger = Log("celery_setnx")

_delivering: ContextVar[tuple[str, bool]] = ContextVar("celery_setnx_queue", default=("", False))
# Transports where each queue of a fanout exchange has messages of its own, which its name reaches. On others
# (Redis, MongoDB, ...) it is a subscription to all that the exchange is sent.
_REACHED = frozenset(["amqp", "memory", "filesystem", "sqs"])
_DELAYING = Exchange("celery_delayed_27", type="topic")  # type: ignore[no-untyped-call]
_DELAYED = "celery_delayed_delivery"  # the exchange that a natively delayed message comes from
_ROUTE = ("queue", "exchange", "routing_key")
_DELAY_PREFIX = re.compile(r"^(?:[01]\.){28}")


class NoWayBack(Exception):
    """A message cannot be sent to a queue that is read, and only there."""


def noting_queues(app: Celery, consume: Callable[..., Any]) -> Callable[..., Any]:
    """A channel's `basic_consume`, which says from which queue a delivery is (see `origin_here`)."""

    @wraps(consume)
    def basic_consume(queue: str = "", *args: Any, callback: Any = None, **kwargs: Any) -> Any:
        origin = queue, is_fanout(app, queue)

        def on_message(message: Any) -> Any:
            token = _delivering.set(origin)
            try:
                return callback(message)
            finally:
                _delivering.reset(token)

        if callback is not None:
            kwargs["callback"] = on_message
        return consume(queue, *args, **kwargs)

    return basic_consume


def origin_here() -> tuple[str, bool]:
    """The queue of the message that arrives now, and whether it is the queue of a fanout; empty: unknown."""
    return _delivering.get()


def queue_of(app: Celery, delivery_info: Mapping[str, Any]) -> str:
    """The queue that a delivery came from, as its route tells: one that this worker reads; empty if none."""
    exchange, routing_key = delivery_info.get("exchange") or "", delivery_info.get("routing_key") or ""
    read = app.amqp.queues.consume_from.values()
    if not exchange and routing_key:
        return str(routing_key)
    found = bound(read, exchange, routing_key) or (list(read) if len(read) == 1 else [])
    return str(found[0].name) if found else ""


def own_queue(app: Celery, task: str, args: Any, kwargs: Any) -> str:
    """The queue to which a call of a task goes by the app's routes, and the task's own; empty if to none.

    NoWayBack if they fail, as a router of the app's may.
    """
    known = app.tasks.get(task)
    own = {name: getattr(known, name, None) for name in _ROUTE}
    own = {name: value for name, value in own.items() if value is not None}
    try:
        route = app.amqp.router.route(own, task, args, kwargs, known)
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:
        raise NoWayBack(
            f"the app's routes do not say where {task} goes ({error!r}); fix task_routes, or add the queue "
            "to task_queues"
        ) from error
    queue, exchange, routing_key = (route.get(name) for name in _ROUTE)
    if exchange and routing_key:  # then Celery only declares the queue
        found = bound(app.amqp.queues.values(), getattr(exchange, "name", exchange), routing_key)
        queue = queue if queue in found or not found else found[0]
    return str(getattr(queue, "name", queue) or "")


def bound(queues: Iterable[Queue], exchange: str, routing_key: str) -> list[Queue]:
    """Those queues that get a message from an exchange, as far as their own bindings say."""
    return [each for each in queues if any(_leads(*way, exchange, routing_key) for way in _bindings(each))]


def is_known(app: Celery, queue: str) -> bool:
    """Whether a queue is the app's, or one that this worker reads."""
    return bool(queue) and (queue in app.amqp.queues or queue in app.amqp.queues.consume_from)


def voucher(app: Celery, queue: str, call: Call) -> str:
    """What only who may log in at the broker can say of a call's queue: that it came from there.

    A worker need not know the queues of others: any name may be given with `-Q`, and to `apply_async`.
    """
    broker = _broker_of(app)
    secret = "\0".join(map(str, (broker.userid, broker.password, broker.virtual_host)))
    said = "\0".join((queue, call.task, call.task_id, call.key))
    return hmac.new(secret.encode(), said.encode(), "sha256").hexdigest()[:32]


def is_fanout(app: Celery, queue: str) -> bool:
    """Whether a queue is known to get a copy of all that its exchange is sent."""
    return _is_fanout(app.amqp.queues.get(queue))


def is_reached(app: Celery, queue: str, *, fanout: bool = False) -> bool:
    """Whether a queue gets what is sent to its name, and nobody else does."""
    return driver_of(app) in _REACHED or not (fanout or is_fanout(app, queue))


def way_to(app: Celery, queue: str, *, fanout: bool = False) -> dict[str, Any]:
    """The way to one queue alone, in the words of `send_task_message`: by the default exchange."""
    if not queue:
        raise NoWayBack(
            "it is not known which queue it came from; list the queues that the worker reads in task_queues, "
            "with their exchanges and routing keys"
        )
    if not is_reached(app, queue, fanout=fanout):
        raise NoWayBack(
            f"it came from {queue!r}, the queue of a fanout exchange: on this broker a message to it goes to "
            "all workers; route guarded tasks to another queue, or use on_conflict='skip'"
        )
    known = app.amqp.queues.get(queue)
    # A queue that is not the app's, or is one worker's own, is there: a message of it is.
    is_there = known is None or fanout or _is_fanout(known)
    return {"queue": Queue(queue), "declare": [] if is_there else [known]}  # type: ignore[no-untyped-call]


def delayed_way_to(app: Celery, queue: str, countdown: float) -> dict[str, Any] | None:
    """The same, where the broker delays a message itself (quorum queues, Celery 5.5); None if it does not.

    The queue is bound by a word of its own to the exchange that delayed messages come from: by the words of
    its other bindings they would reach other queues too.
    """
    if countdown < 1 or not detect_quorum_queues(app, driver_of(app))[0]:
        return None
    word = f"celery_setnx_{hashlib.sha256(queue.encode()).hexdigest()[:16]}"
    others = [other for name, other in app.amqp.queues.items() if name != queue]
    if bound(others, _DELAYED, word):  # they would get copies
        return None
    try:
        with app.pool.acquire(block=True) as connection, connection.channel() as channel:
            channel.queue_bind(queue, exchange=_DELAYED, routing_key=f"#.{word}")
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        logger.info("Messages to %s are delayed by workers, as it could not be bound: %s", queue, error)
        return None
    return {"exchange": _DELAYING, "routing_key": calculate_routing_key(int(countdown), word)}


def driver_of(app: Celery) -> str:
    """The kind of the broker to which the app publishes: amqp, redis, sqs, memory, ..."""
    return str(_broker_of(app).transport.driver_type)


def _broker_of(app: Celery) -> Any:
    return app.producer_pool.connections.connection


def _is_fanout(queue: Queue | None) -> bool:
    return queue is not None and any(exchange.type == "fanout" for exchange, _ in _bindings(queue))


def _bindings(queue: Queue) -> Iterator[tuple[Exchange, str]]:
    if queue.exchange:
        yield queue.exchange, queue.routing_key or ""
    for each in queue.bindings or ():
        yield each.exchange, each.routing_key or ""


def _leads(bound_to: Exchange, key: str, exchange: str, routing_key: str) -> bool:
    """Whether a binding leads a message to its queue; of types that we do not know, nothing is known."""
    words = _DELAY_PREFIX.sub("", routing_key).split(".")
    if exchange == _DELAYED and bound_to.type != "direct":  # as Celery binds it
        return _match(["#", *key.split(".")], words)
    if bound_to.name != exchange:
        return False
    if bound_to.type == "topic":
        return _match(key.split("."), words)
    return bound_to.type == "fanout" or (bound_to.type == "direct" and key == routing_key)


def _match(pattern: list[str], words: list[str]) -> bool:
    """Whether a topic binding takes the words of a routing key: * is any word, # any number of them."""
    if not pattern:
        return not words
    if pattern[0] == "#":
        return any(_match(pattern[1:], words[skipped:]) for skipped in range(len(words) + 1))
    return bool(words) and pattern[0] in ("*", words[0]) and _match(pattern[1:], words[1:])
