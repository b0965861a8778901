"""The way back to the broker: a call that is here, or waits in a line, is sent again as it was."""

from __future__ import annotations

import base64
import contextvars
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, NoReturn

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.task import Context, Task
from celery.backends.base import DisabledBackend
from celery.backends.redis import RedisBackend
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.entity import Exchange, Queue
from kombu.exceptions import ContentDisallowed
from kombu.serialization import dumps, loads, prepare_accept_content, registry
from kombu.utils import json

from celery_setnx.call.message import HEADER, Call
from celery_setnx.connection import SCHEMES
from celery_setnx.exceptions import LockUnavailable
from celery_setnx.log import Log
from celery_setnx.wording import unstopped

try:
    from celery.utils.quorum_queues import detect_quorum_queues
    from kombu.transport.native_delayed_delivery import calculate_routing_key
except ImportError:  # Celery before 5.5 delays every message in the worker

    def detect_quorum_queues(app: Celery, driver_type: str) -> tuple[bool, str]:
        """None is known."""
        return False, ""


logger = Log("celery_setnx")

NONCE = "setnx_nonce"
"""The message property that makes the token of every delivery its own."""

CONTENT_TYPE = "setnx_content_type"
"""The message property that tells the task how its message was serialized."""

EVENTS = "setnx_events"
"""The message property that tells the task whether its worker sends task events; True or False."""

PICKLE = "application/x-python-serialize"

# What a broker that delays by dead letters writes into headers. Sent along with the next wait, it makes
# RabbitMQ before 4.0.1 believe that the letter goes in circles, and drop it.
_DEATHS = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")
_DELAY_PREFIX = re.compile(r"^(?:[01]\.){28}")
_DELAYING = Exchange("celery_delayed_27", type="topic")  # type: ignore[no-untyped-call]
_DELAYED = "celery_delayed_delivery"  # the exchange that a natively delayed message comes from
# What a running request has besides the headers of its message.
_NO_HEADERS = frozenset(
    "args kwargs callbacks errbacks chain chord called_directly is_eager hostname properties reply_to utc "
    "correlation_id delivery_info redelivered compression eta time_limit soft_time_limit logfile loglevel "
    f"taskset headers setnx_lock _protected _children {HEADER}".split()
)
_PACKED = ("headers", "properties", "route", "content_type")
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")
_VISIBILITY_S = {"sqs": 1800.0} | dict.fromkeys(SCHEMES, 3600.0)  # kombu's defaults
_REQUEUE_S = 1.0


class Waits(Ignore):  # type: ignore[misc]
    """A delivery has ended and its call comes back, while another message of it may be on its way.

    Celery stores no state for it: that could overwrite the result which the other message is about to store.
    `when` is in seconds.
    """

    def __init__(self, message: str, when: float) -> None:
        super().__init__(message, when)  # both: it is pickled on its way to the worker's parent
        self.when = when


class Dropped(Ignore):  # type: ignore[misc]
    """A delivery has ended without its call: another message has started that, and has all that it has."""


class ComesBack(Retry):  # type: ignore[misc]
    """A delivery has ended, and its attempt comes back: no retry of the task's own."""


class _AsTheyWere(dict[str, Any]):
    """Headers that no receiver of `before_task_publish` overwrites; it may add some."""

    def __setitem__(self, name: str, value: Any) -> None:
        self.setdefault(name, value)

    def update(self, *others: Any, **more: Any) -> None:
        for name, value in dict(*others, **more).items():
            self.setdefault(name, value)


@dataclass(frozen=True)
class Message:
    """All that a call's message has, but for what it says of the call (see `Call`)."""

    headers: Mapping[str, Any]  # without those that a broker or a delay has written
    properties: Mapping[str, Any]  # and compression, by their names in `kombu.Producer.publish`
    route: Mapping[str, str]  # exchange and routing_key
    body: Any  # positional and keyword arguments, and what Celery has embedded
    content_type: str  # how the body is serialized

    @classmethod
    def of(cls, task: Task) -> Message:
        """The message that is running."""
        request = task.request
        own = vars(request).items()
        headers = {name: value for name, value in own if _is_header(name, value)}
        if _has_headers_of_its_own(request):
            headers["headers"] = request.headers
        had, info = request.properties or {}, request.delivery_info or {}
        properties = {
            "correlation_id": request.correlation_id,
            "reply_to": request.reply_to,
            "priority": info.get("priority"),
            "delivery_mode": had.get("delivery_mode"),
            "compression": getattr(request, "compression", None),
        }
        return cls(
            headers=without_deaths({"task": task.name, "id": request.id, **headers}),
            properties={name: value for name, value in properties.items() if value is not None},
            route={
                "exchange": info.get("exchange") or "",
                "routing_key": _DELAY_PREFIX.sub("", str(info.get("routing_key") or "")),
            },
            body=(request.args or (), request.kwargs or {}, {n: getattr(request, n) for n in _EMBEDDED}),
            content_type=_content_type_of(task),
        )

    def packed(self, call: Call) -> str:
        """The message as a text for the line, with what it is to say of the call."""
        serializer = _serializer_of(self.content_type)
        _, encoding, body = dumps(self.body, serializer)  # type: ignore[no-untyped-call]
        if isinstance(body, bytes):
            body = base64.b64encode(body).decode()
        told = {**vars(self), "headers": {**self.headers, **call.as_headers()}, "body": body}
        return str(json.dumps({**told, "encoding": encoding}))  # type: ignore[no-untyped-call]

    @classmethod
    def unpacked(cls, app: Celery, text: str) -> tuple[Call, Message]:
        """The call and the message that were packed; else ValueError, or ContentDisallowed for a pickle.

        Who can write to the lock server can have written anything: whatever it is, nothing else is raised.
        """
        try:
            told = json.loads(text)  # type: ignore[no-untyped-call]
            headers, properties, route, content_type = (told[name] for name in _PACKED)
            body = base64.b64decode(told["body"]) if told["encoding"] == "binary" else told["body"]
            call = Call.of(headers["task"], headers)
            route = {name: str(route[name]) for name in ("exchange", "routing_key")}
            accepted = prepare_accept_content(app.conf.accept_content)  # type: ignore[no-untyped-call]
            accept = set(registry.type_to_name if accepted is None else accepted) - {PICKLE}
            loaded = loads(body, content_type, told["encoding"], accept=accept)  # type: ignore[no-untyped-call]
            args, kwargs, embedded = loaded
            of_a_call = isinstance(args, (list, tuple)) and isinstance(kwargs, dict)
            if not (of_a_call and isinstance(embedded, dict) and isinstance(properties, dict)):
                raise ValueError("its body is of no call")
            _serializer_of(content_type), seconds_until(app, headers.get("expires"))
        except (SoftTimeLimitExceeded, ContentDisallowed):
            raise
        except Exception as error:  # noqa: BLE001 - no list of what such a text may raise is complete
            raise ValueError(f"this is no packed call ({error!r})") from None
        return call, cls(headers, properties, route, (args, kwargs, embedded), content_type)

    def send(self, app: Celery, call: Call, countdown: float = 0.0) -> None:
        """Send it again, with what it is to say of the call.

        By its name alone: whether the task is known and takes these arguments is its worker's business.
        """
        headers = _AsTheyWere(self.headers) | call.as_headers() | _eta(countdown)
        if isinstance(headers.get("headers"), dict):
            headers |= {"headers": _AsTheyWere(headers["headers"])}
        self._publish(app, _AsTheyWere(headers), self.body, countdown)

    def send_new(self, app: Celery, task: str, kwargs: Mapping[str, Any], countdown: float) -> None:
        """Send a task of ours the way of this message: as no task's child, and without a result."""
        new = app.amqp.as_task_v2(
            str(uuid.uuid4()),
            task,
            kwargs=dict(kwargs),
            countdown=countdown,
            ignore_result=True,
            kwargsrepr=repr({"key": kwargs["key"]}),  # not the arguments of a call that it may hold
        )
        like = replace(self, properties={n: v for n, v in self.properties.items() if n == "priority"})
        like._publish(app, new.headers, new.body, countdown, **new.properties)

    def _publish(self, app: Celery, headers: Any, body: Any, countdown: float, **properties: Any) -> None:
        """Publish as `Celery.send_task` does, after it has settled what this message has settled already."""
        properties = {**properties, **self.properties}
        compression = properties.pop("compression", None)
        delivery_mode = properties.pop("delivery_mode", None)
        left_s = seconds_until(app, headers.get("expires"))
        if left_s > 0:
            properties["expiration"] = left_s
        with app.producer_or_acquire() as producer:
            # In no context: to a tracer it is no part of what the process does, be it another call's body.
            contextvars.Context().run(
                app.amqp.send_task_message,
                producer,
                headers["task"],
                (headers, properties, body, None),
                serializer=_serializer_of(self.content_type),
                compression=compression,
                delivery_mode=delivery_mode,
                **self._way(app, countdown),
            )

    def _way(self, app: Celery, countdown: float) -> dict[str, Any]:
        """The way back, in the words of `send_task_message`."""
        exchange, routing_key = self.route["exchange"], self.route["routing_key"]
        queue, kind = _queue_and_kind(app, exchange, routing_key)
        if countdown > 0 and kind != "direct" and _delays_natively(app):
            return {"exchange": _DELAYING, "routing_key": calculate_routing_key(int(countdown), routing_key)}
        if queue is None:
            return {"exchange": exchange, "routing_key": routing_key}
        if queue.name not in app.amqp.queues:
            return {"queue": queue, "declare": []}  # the call came from it, so it is there
        return {"queue": queue}


def come_back(task: Task, call: Call, countdown: float, reason: str, *, own: bool = False) -> NoReturn:
    """Send the running call again, as it was but for its waiting time, and end this attempt.

    With `ComesBack`; with `Waits` if it waits for another delivery of its `own`, whose state in the backend
    it must not touch; or, if the broker does not take it, as `not_taken_back`.
    """
    reason = unstopped(reason)
    if task.request.is_eager:  # it has no message
        raise Retry(f"{reason}; an eager call does not come back", when=countdown, is_eager=True)
    countdown = deliverable(task.app, countdown)
    call = call._replace(waits=call.waits + 1, redelivered=call.redelivered or own)
    try:
        Message.of(task).send(task.app, call, countdown)
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        not_taken_back(task, call, error, reason, countdown)
    message = f"{reason}; comes back in {countdown:.1f} s (wait {call.waits})"
    if own:
        logger.info("%s waits for another delivery of itself: %s.", call, message)
        raise Waits(message, countdown)
    raise ComesBack(message, when=countdown)  # Celery logs this text, in its own line about the retry


def not_taken_back(task: Task, call: Call, error: Exception, reason: str, countdown: float) -> NoReturn:
    """End an attempt whose call the broker did not take back: with Reject if it has the message still."""
    logger.error("%s could not be sent back to the broker (%s) while %s.", call, error, reason)
    if task.acks_late:
        time.sleep(min(countdown, _REQUEUE_S))  # it is delivered again at once
        raise Reject(reason, requeue=True) from error
    reason += f"; and the broker did not take the call back: {error}"
    raise LockUnavailable(call.key or call.task, reason) from error


def without_deaths(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """A message's headers but for those that tell of its time in a broker's delay queues."""
    return {name: value for name, value in (headers or {}).items() if not name.startswith(_DEATHS)}


def deliverable(app: Celery, countdown: float) -> float:
    """A countdown that the broker keeps: far below its visibility timeout, a second at least on AMQP."""
    if _driver_of(app) == "amqp":
        return countdown if countdown >= 1 else 1 + countdown / 2  # the jitter stays
    limit_s = visibility_timeout_s(app)
    return countdown if limit_s is None else min(countdown, limit_s / 4)


def broker_url(app: Celery) -> str:
    """The URL from which the app's workers read; the first, if there are several."""
    url = app.conf.broker_read_url or ""
    return str(url if isinstance(url, str) else url[0])


def visibility_timeout_s(app: Celery) -> float | None:
    """Seconds after which the broker delivers again what was not acknowledged; None if it does not."""
    scheme = broker_url(app).partition(":")[0]
    if scheme not in _VISIBILITY_S:
        return None
    options = app.conf.get("broker_transport_options") or {}
    return float(options.get("visibility_timeout") or _VISIBILITY_S[scheme])


def tells_redelivery(app: Celery) -> bool:
    """Whether the broker flags what it delivers again; SQS does not."""
    return broker_url(app).partition(":")[0] != "sqs"


def counts_once(backend: Any) -> bool:
    """Whether a chord's member that is counted twice counts as one: Redis keeps them in a set.

    Others have a counter, or ask for all results, and wait for no count.
    """
    return isinstance(backend, RedisBackend) and bool(backend._chord_zset)


def known_result(backend: Any, task_id: str, call: object) -> Mapping[str, Any]:
    """What a result backend has of a task; nothing if it cannot say, and the call goes on."""
    if isinstance(backend, DisabledBackend) or not backend.persistent:
        return {}
    try:
        return dict(backend.get_task_meta(task_id))
    except Exception as error:  # noqa: BLE001 - whatever a backend raises, it does not know
        logger.warning("%s goes on, though it may have ended: its result is not known (%s).", call, error)
        return {}


def seconds_until(app: Celery, when: Any) -> float:
    """Seconds until an eta or expiry, as Celery takes it: seconds, a time, or its text. Less than 0: past."""
    if isinstance(when, str):
        when = maybe_iso8601(when)
    if isinstance(when, datetime):
        return float((maybe_make_aware(when, app.timezone) - app.now()).total_seconds())
    return float(when or 0.0)


def is_pickled(task: Task) -> bool:
    """True if the running call's message was serialized with pickle."""
    return _content_type_of(task) == PICKLE


def _content_type_of(task: Task) -> str:
    """What the running call's message was serialized as; as the task says if that is not known."""
    known = (task.request.properties or {}).get(CONTENT_TYPE)
    is_known = isinstance(known, str) and known in registry.type_to_name
    return str(known if is_known else registry.name_to_type[task.serializer])


def _serializer_of(content_type: str) -> str:
    return str(registry.type_to_name[content_type])


def _is_header(name: str, value: Any) -> bool:
    """True if a running request has this of its message. What others keep there in private is no data."""
    return name not in _NO_HEADERS and (not name.startswith("_") or _is_data(value))


def _is_data(value: Any) -> bool:
    try:
        json.dumps(value)  # type: ignore[no-untyped-call]
    except Exception:  # noqa: BLE001 - whatever the thing raises, it came in no message
        return False
    return True


def _has_headers_of_its_own(request: Context) -> bool:
    """True if the message has a header `headers`, as tracers send one; else Celery collects others there."""
    own = vars(request)
    return any(own.get(name) is not value for name, value in (request.headers or {}).items())


def _eta(countdown: float) -> dict[str, str | None]:
    if countdown <= 0:
        return {"eta": None}
    return {"eta": (datetime.now(timezone.utc) + timedelta(seconds=countdown)).isoformat()}


def _queue_and_kind(app: Celery, exchange: str, routing_key: str) -> tuple[Queue | None, str]:
    """The queue that a message came from, if that is known, and the type of its exchange.

    Celery delays natively what goes to a topic exchange: such a message came by another exchange.
    """
    queues = [queue for queue in app.amqp.queues.values() if queue.exchange]
    topic = [q for q in queues if q.exchange.type == "topic" and q.routing_key == routing_key]
    topic = [q for q in topic if exchange in ("", _DELAYED, q.exchange.name)]
    if len(topic) == 1:
        return topic[0], "topic"
    if exchange:
        kinds = {q.exchange.type for q in queues if q.exchange.name == exchange}
        return None, kinds.pop() if kinds else "topic" if exchange == _DELAYED else "direct"
    if not routing_key:
        return app.amqp.default_queue, str(app.amqp.default_queue.exchange.type)
    return app.amqp.queues.get(routing_key) or Queue(routing_key), "direct"  # type: ignore[no-untyped-call]


def _delays_natively(app: Celery) -> bool:
    return bool(detect_quorum_queues(app, _driver_of(app))[0])


def _driver_of(app: Celery) -> str:
    return str(app.producer_pool.connections.connection.transport.driver_type)
