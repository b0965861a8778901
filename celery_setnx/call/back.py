"""The way back to the broker: a call that is here, or waits in a line, is sent again as it was."""

from __future__ import annotations

import base64
import contextvars
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime, timedelta, timezone
from typing import Any, NoReturn

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.task import Task
from celery.backends.base import DisabledBackend
from celery.backends.redis import RedisBackend
from celery.exceptions import Ignore, Reject, Retry
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.exceptions import ContentDisallowed
from kombu.serialization import dumps, loads, prepare_accept_content, registry
from kombu.utils import json

from celery_setnx.address import SCHEMES
from celery_setnx.arguments import pass_on_time_limit
from celery_setnx.call.arrived import arrived
from celery_setnx.call.broker import broker_of, broker_scheme
from celery_setnx.call.delay import declared, hop_s, waits_in_broker
from celery_setnx.call.delivery import Delivery
from celery_setnx.call.message import HEADER, Call
from celery_setnx.call.queues import (
    bound,
    delayed_way_to,
    driver_of,
    is_fanout,
    is_known,
    is_reached,
    own_queue,
    queue_of,
    voucher,
    way_to,
)
from celery_setnx.configured import until_changed
from celery_setnx.connection import transport_options
from celery_setnx.exceptions import LockUnavailable
from celery_setnx.log import Log, fields
from celery_setnx.options import Options
from celery_setnx.wording import unstopped

logger = Log("celery_setnx")

PICKLE = "application/x-python-serialize"

# What a broker that delays by dead letters writes into headers. Sent along with the next wait, it makes
# RabbitMQ before 4.0.1 believe that the letter goes in circles, and drop it.
_DEATHS = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")
# What a running request has besides the headers of its message.
_NO_HEADERS = frozenset(
    "args kwargs callbacks errbacks chain chord called_directly is_eager hostname properties reply_to utc "
    "correlation_id delivery_info redelivered compression eta time_limit soft_time_limit logfile loglevel "
    "taskset setnx_lock _setnx_run _setnx_running _setnx_start _setnx_no_body _setnx_said _protected "
    f"_children {HEADER}".split()
)
_PACKED = ("headers", "properties", "queue", "content_type", "broker")
# What goes back of a message's properties as it is: AMQP's own, and the group of SQS.
_OURS = ("correlation_id", "reply_to", "compression", "priority")
_PROPERTIES = ("delivery_mode", "app_id", "message_id", "type", "user_id", "MessageGroupId")
_EMBEDDED = ("callbacks", "errbacks", "chain", "chord")
# What a message of Celery's first protocol says in its body: Celery makes headers of it, all of these.
_IN_FIRST_BODY = (
    *("lang", "task", "id", "root_id", "parent_id", "group", "meth", "shadow", "eta", "expires", "retries"),
    *("timelimit", "argsrepr", "kwargsrepr", "origin"),
)
_SILENT = ("sqs", "gcpubsub", "azureservicebus", "azurestoragequeues")
_VISIBILITY_S = {"sqs": 1800.0} | dict.fromkeys(SCHEMES, 3600.0)  # kombu's defaults
_NO_VISIBILITY_S = 3600.0  # in place of the timeout of a broker that has none
_REQUEUE_S = 1.0
_DROPPED_COPY = (
    "A copy of %s is dropped: %s. It came from a fanout exchange: route guarded tasks to a queue of another "
    "exchange."
)


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
    queue: str  # that it came from, and goes back to; empty if that is not known
    body: Any  # positional and keyword arguments, and what Celery has embedded
    content_type: str  # how the body is serialized
    is_fanout: bool = False  # whether its queue got a copy of what all others got too
    route: tuple[str, str] = ("", "")  # exchange and routing key by which it first came, as its body sees
    broker: str = ""  # the name of the one that it came from; empty: it is not known
    protocol: int = 2  # of the message (the setting `task_protocol`)

    @classmethod
    def of(cls, task: Task) -> Message:
        """The message that is running, as it arrived."""
        came = arrived(task.request)
        headers = {name: value for name, value in came.items() if name not in _NO_HEADERS}
        had, info = (_mapping(came.get(name)) for name in ("properties", "delivery_info"))
        delivery = Delivery.of(task.request)
        queue = (delivery and delivery.queue) or queue_of(task.app, info)
        properties = {
            **{name: had.get(name) for name in _PROPERTIES},
            **{name: came.get(name) for name in _OURS},
            "priority": info.get("priority"),
        }
        return cls(
            headers=without_deaths({"task": task.name, "id": task.request.id, **headers}),
            properties={name: value for name, value in properties.items() if value is not None},
            queue=queue,
            body=(came.get("args") or (), came.get("kwargs") or {}, {n: came.get(n) for n in _EMBEDDED}),
            content_type=_content_type_of(task, delivery),
            is_fanout=bool(delivery and delivery.is_fanout) or is_fanout(task.app, queue),
            route=(str(info.get("exchange") or ""), str(info.get("routing_key") or "")),
            broker=broker_of(task.app),
            protocol=1 if "meth" in came else 2,
        )

    def packed(self, app: Celery, call: Call) -> str:
        """The message as a text for the line, with what it is to say of the call."""
        serializer = _serializer_of(self.content_type)
        _, encoding, body = dumps(self.body, serializer)  # type: ignore[no-untyped-call]
        if isinstance(body, bytes):
            body = base64.b64encode(body).decode()
        headers = {**self.headers, **self._telling(call).as_headers()}
        told = {**{name: getattr(self, name) for name in _PACKED}, "headers": headers, "body": body}
        told |= {"encoding": encoding, "voucher": voucher(app, self.queue, call), "protocol": self.protocol}
        return str(json.dumps(told))  # type: ignore[no-untyped-call]

    @classmethod
    def unpacked(cls, app: Celery, text: str) -> tuple[Call, Message]:
        """The call and the message that were packed; else ValueError, or ContentDisallowed for a pickle.

        NoWayBack if the app's routes fail. Who can write to the lock server can have written anything:
        nothing else is raised of it. It names no queue: the call goes back to the one it came from if the
        broker's users vouch for that, or if it is the app's or this worker's; else where its task's calls go.
        """
        try:
            told = _parsed(text)
            headers, properties, queue, content_type, broker = (told[name] for name in _PACKED)
            properties = {name: properties[name] for name in (*_PROPERTIES, *_OURS) if name in properties}
            body = base64.b64decode(told["body"]) if told["encoding"] == "binary" else told["body"]
            call = Call.of(headers["task"], headers)
            loaded = _loaded(app, body, content_type, told["encoding"])
            _serializer_of(content_type), seconds_until(app, headers.get("expires"))
        except (SoftTimeLimitExceeded, ContentDisallowed):
            raise
        except Exception as error:  # noqa: BLE001 - no list of what such a text may raise is complete
            raise ValueError(f"this is no packed call ({error!r})") from None
        queue = queue if isinstance(queue, str) else ""
        if not is_known(app, queue) and told.get("voucher") != voucher(app, queue, call):
            queue = own_queue(app, call.task, *loaded[:2])
        exchange, routing_key = call.route or ("", "")
        if queue not in [each.name for each in bound(app.amqp.queues.values(), exchange, routing_key)]:
            exchange = routing_key = ""
        more: dict[str, Any] = {"route": (exchange, routing_key), "broker": str(broker)}
        more |= {"protocol": 1 if told.get("protocol") == 1 else 2}
        return call, cls(headers, properties, queue, loaded, content_type, **more)

    def send(self, app: Celery, call: Call, countdown: float = 0.0) -> None:
        """Send it again to its queue, with what it is to say of the call; else NoWayBack.

        By its name alone: whether the task is known and takes these arguments is its worker's business.
        """
        call = self._telling(call, is_delayed=countdown > 0)
        headers, body = {**self.headers, **call.as_headers(), **_eta(countdown)}, self.body
        if self.protocol == 1:
            headers, body = _as_first_protocol(headers, body)
        if isinstance(headers.get("headers"), dict):
            headers["headers"] = _AsTheyWere(headers["headers"])
        self._publish(app, call.task, _AsTheyWere(headers), body, countdown)

    def may_come_back(self, app: Celery) -> bool:
        """Whether its queue can be reached without others."""
        return is_reached(app, self.queue, fanout=self.is_fanout)

    def _telling(self, call: Call, *, is_delayed: bool = False) -> Call:
        """A call that tells its body by which route it came: it comes back by another."""
        is_other = any(self.route) and (is_delayed or self.route != ("", self.queue))
        return call._replace(route=list(self.route) if is_other else None)

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
        like._publish(app, task, new.headers, new.body, countdown, **new.properties)

    def _publish(
        self, app: Celery, task: str, headers: Any, body: Any, countdown: float, **properties: Any
    ) -> None:
        """Publish as `Celery.send_task` does, after it has settled what this message has settled already."""
        properties = {**properties, **self.properties}
        compression = properties.pop("compression", None)
        delivery_mode = properties.pop("delivery_mode", None)
        said = body if isinstance(body, dict) else headers
        left_s = seconds_until(app, said.get("expires"))
        if left_s > 0:
            properties["expiration"] = left_s
        way = way_to(app, self.queue, fanout=self.is_fanout)
        way = delayed_way_to(app, self.queue, countdown) or way
        with app.producer_or_acquire() as producer:
            if properties.get("user_id") != (producer.connection.userid or "guest"):
                properties.pop("user_id", None)  # RabbitMQ lets nobody send in another's name
            # In no context: to a tracer it is no part of what the process does, be it another call's body.
            contextvars.Context().run(
                app.amqp.send_task_message,
                producer,
                task,
                (headers, properties, body, None),
                serializer=_serializer_of(self.content_type),
                compression=compression,
                delivery_mode=delivery_mode,
                **way,
            )


def _as_first_protocol(headers: dict[str, Any], body: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The headers and the body of the same message in Celery's first protocol."""
    args, kwargs, embedded = body
    told = {name: headers.pop(name, None) for name in _IN_FIRST_BODY}
    told |= {"args": args, "kwargs": kwargs, "taskset": told["group"], "utc": True}
    return headers, {**told, **{name: embedded.get(name) for name in _EMBEDDED if name != "chain"}}


def call_and_broker(text: str) -> tuple[Call, str]:
    """A packed call, and the name of the broker that it came from, whatever its body is; else ValueError."""
    told = _parsed(text)
    headers = told.get("headers")
    if not isinstance(headers, dict) or not isinstance(told.get("broker"), str):
        raise ValueError("this is no packed call")
    return Call.of(str(headers.get("task")), headers), told["broker"]


def stamps_in(text: str) -> Mapping[str, Any]:
    """The stamps of a packed call, by which it may be revoked; none if it has none, or is no packed call."""
    try:
        headers = _parsed(text)["headers"]
        return {name: headers["stamps"][name] for name in headers["stamped_headers"]}
    except (ValueError, TypeError, LookupError):
        return {}


def stamped(text: str, broker: str) -> str:
    """A packed message that is to go back to this broker; the same text if it is already."""
    told = _parsed(text)
    return text if told.get("broker") == broker else str(json.dumps({**told, "broker": broker}))  # type: ignore[no-untyped-call]


def _parsed(text: str) -> dict[str, Any]:
    """What a text for the line says; ValueError if that is no packed call, whatever it is."""
    try:
        told = json.loads(text)  # type: ignore[no-untyped-call]
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - no list of what such a text may raise is complete
        raise ValueError(f"this is no packed call ({error!r})") from None
    if not isinstance(told, dict):
        raise ValueError("this is no packed call")
    return told


def come_back(task: Task, call: Call, countdown: float, reason: str, *, own: bool = False) -> NoReturn:
    """Send the running call again, as it was but for its waiting time, and end this attempt.

    With `ComesBack`; with `Waits` if it waits for another delivery of its `own`, or was woken, for another of
    its messages may have ended it by now; or, if the broker does not take it, as `not_taken_back`.
    """
    reason = unstopped(reason)
    if task.request.is_eager:  # it has no message
        raise Retry(f"{reason}; an eager call does not come back", when=countdown, is_eager=True)
    countdown = deliverable(task.app, countdown)
    call = call._replace(waits=call.waits + 1, again=call.again or own)
    message = Message.of(task)
    if own and not message.may_come_back(task.app):
        logger.warning(_DROPPED_COPY, call, reason, extra=fields("dropped", call))
        raise Dropped(reason)
    try:
        message.send(task.app, call, countdown)
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        not_taken_back(task, call, error, reason)
    text = f"{reason}; tries again in {countdown:.1f} s (wait {call.waits})"
    if own or call.is_woken:
        waits = "waits for another delivery of the same call" if own else "still waits"
        logger.info("%s %s: %s.", call, waits, text, extra=fields("comes_back", call))
        raise Waits(text, countdown)
    raise ComesBack(text, when=countdown)  # Celery logs this text, in its own line about the retry


def wait_in_broker(task: Task, call: Call) -> NoReturn:
    """Have the running call wait for its time in the broker, in queues that keep it for 2, 4, 8 ... seconds.

    If the broker refuses those, by a countdown. It ends with `Waits`, or as `not_taken_back`. Its time is by
    its publisher's clock, and whether that has come by the worker's, as with Celery's eta.
    """
    left_s, message, through = max(0.0, call.due - time.time()), Message.of(task), None
    if message.queue and waits_in_broker(task.app):
        through = declared(task.app, message.queue, hop_s(left_s), what="Debounced calls")
    reason = f"it waits for newer calls, for {left_s:.1f} s more"
    try:
        if through is None:
            message.send(task.app, call, left_s)
        else:
            replace(message, queue=through, is_fanout=False).send(task.app, call)
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        not_taken_back(task, call, error, reason)
    raise Waits(reason, left_s)


def not_taken_back(task: Task, call: Call, error: Exception, reason: str) -> NoReturn:
    """End an attempt whose call the broker did not take back: with Reject if it has the message still.

    Not if that came from a fanout's queue that cannot be reached alone: rejected, it would go to all again.
    """
    pass_on_time_limit(error)
    is_delivered_again = task.acks_late and Message.of(task).may_come_back(task.app)
    text = "%s could not be sent back to the broker: %s. It was to wait or retry because %s. %s."
    logger.error(
        text,
        call,
        unstopped(error),
        reason,
        "The broker delivers it again" if is_delivered_again else "It fails",
        extra=fields(of=call),
    )
    if is_delivered_again:  # at once, and again and again if nobody mends that
        time.sleep(_REQUEUE_S)
        raise Reject(reason, requeue=True) from error
    reason = f"{unstopped(error)}; it was to wait or retry because {unstopped(reason)}"
    raise LockUnavailable(call.key or call.task, reason, str(call)) from error


def without_deaths(headers: Mapping[str, Any] | None) -> dict[str, Any]:
    """A message's headers but for those that tell of its time in a broker's delay queues."""
    return {name: value for name, value in (headers or {}).items() if not name.startswith(_DEATHS)}


def deliverable(app: Celery, countdown: float) -> float:
    """A countdown that the broker keeps: far below its visibility timeout, a second at least on AMQP."""
    if driver_of(app) == "amqp":
        return countdown if countdown >= 1 else 1 + countdown / 2  # the jitter stays
    limit_s = visibility_timeout_s(app)
    return countdown if limit_s is None else min(countdown, limit_s / 4)


def visibility_timeout_s(app: Celery) -> float | None:
    """Seconds after which the broker delivers again what was not acknowledged; None if it does not."""

    def read() -> float | None:
        scheme = broker_scheme(app)
        if scheme not in _VISIBILITY_S:
            return None
        return float(transport_options(app, "broker_url").get("visibility_timeout") or _VISIBILITY_S[scheme])

    return until_changed(app, "_setnx_visibility", read)


def remember_s(app: Celery, options: Options) -> float:
    """Seconds for which Redis remembers that a call waits, or that it is the newest of its key."""
    return options.queue_lease + (visibility_timeout_s(app) or _NO_VISIBILITY_S)


def tells_redelivery(app: Celery) -> bool:
    """Whether the broker flags what it delivers again; SQS does not, nor do those of other clouds."""
    return broker_scheme(app) not in _SILENT


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
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - whatever a backend raises, it does not know
        logger.warning(
            "%s runs, though it may have ended already: its stored result cannot be read (%s).",
            call,
            unstopped(error),
            extra=fields(of=call),
        )
        return {}


def result_tells(task: Task, *, ignores_result: bool) -> bool:
    """Whether a call's stored result tells a second delivery of it that it has succeeded."""
    backend = task.backend
    if ignores_result or isinstance(backend, DisabledBackend) or not backend.persistent:
        return False
    kept_s = results_kept_s(task.app)
    return not kept_s or kept_s >= (visibility_timeout_s(task.app) or 0.0)


def results_kept_s(app: Celery) -> float:
    """Seconds for which a result backend keeps a result; 0 for ever."""
    kept = app.conf.result_expires
    return kept.total_seconds() if isinstance(kept, timedelta) else float(kept or 0)


def seconds_until(app: Celery, when: Any) -> float:
    """Seconds until an eta or expiry, as Celery takes it: seconds, a time, or its text. Less than 0: past."""
    if isinstance(when, str):
        when = maybe_iso8601(when)
    if isinstance(when, datetime):
        return float((maybe_make_aware(when, app.timezone) - app.now()).total_seconds())
    return float(when or 0.0)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _loaded(app: Celery, body: Any, content_type: str, encoding: str) -> tuple[Any, Any, Any]:
    """The parts of a body, in a format that the app accepts; never a pickle."""
    accepted = prepare_accept_content(app.conf.accept_content)  # type: ignore[no-untyped-call]
    accept = set(registry.type_to_name if accepted is None else accepted) - {PICKLE}
    args, kwargs, embedded = loads(body, content_type, encoding, accept=accept)  # type: ignore[no-untyped-call]
    if not isinstance(args, (list, tuple)) or not isinstance(kwargs, dict) or not isinstance(embedded, dict):
        raise TypeError("its body has other parts")
    return args, kwargs, embedded


def _content_type_of(task: Task, delivery: Delivery | None) -> str:
    """What the running call's message was serialized as; as the task says if that is not known."""
    if delivery is not None and delivery.content_type in registry.type_to_name:
        return delivery.content_type
    return str(registry.name_to_type[task.serializer])


def _serializer_of(content_type: str) -> str:
    return str(registry.type_to_name[content_type])


def _eta(countdown: float) -> dict[str, str | None]:
    if countdown <= 0:
        return {"eta": None}
    return {"eta": (datetime.now(timezone.utc) + timedelta(seconds=countdown)).isoformat()}
