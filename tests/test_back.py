"""The way back: a call that is sent again is as it was, whoever sends it, and whoever listens."""

import base64
import json
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from celery.signals import before_task_publish
from celery.worker.strategy import hybrid_to_proto2
from kombu import Exchange, Queue
from kombu.exceptions import ContentDisallowed
from kombu.serialization import prepare_accept_content

from celery_setnx import SingletonTask
from celery_setnx.call.back import PICKLE, Message, seconds_until
from celery_setnx.call.message import HEADER, Call
from celery_setnx.call.wake import COURIER
from tests.conftest import LOCK_DB
from tests.harness import delivered, properties_of

CONTEXT: ContextVar[str] = ContextVar("what this process does")
CALL = Call("t", "id-1", key="setnx:{t}", call_id="c0ffee", has_header=True)
LINK = {"task": "after", "args": [], "kwargs": {}, "options": {}, "subtask_type": None, "immutable": True}
SENT: dict[str, Any] = {
    "task_id": "id-1",
    "args": (1, {"password": "hunter2"}),
    "kwargs": {"since": datetime(2024, 5, 6, tzinfo=timezone.utc)},
    "headers": {
        "tenant": "acme",
        "_schema": "acme",
        "__context__": {"request": "7"},
        "traceparent": "00-1-2-01",
        "headers": {"traceparent": "00-1-3-01", HEADER: "a copy of ours"},
    },
    "argsrepr": "(1, <redacted>)",
    "kwargsrepr": "<redacted>",
    "shadow": "settling",
    "priority": 3,
    "root_id": "root",
    "parent_id": "parent",
    "group_id": "group",
    "group_index": 4,
    "reply_to": "reply",
    "ignore_result": True,
    "time_limit": 50,
    "soft_time_limit": 40,
    "stamped_headers": ["st"],
    "st": "v",
    "compression": "zlib",
    "link": [LINK],
    "chain": [LINK],
    "replaced_task_nesting": 0,
}
QUEUES = [
    Queue("own", Exchange("own", type="direct"), routing_key="own"),
    Queue("topical", Exchange("topics", type="topic"), routing_key="by.topic"),
    Queue("other", Exchange("topics", type="topic"), routing_key="by.other"),
    Queue("wild", Exchange("topics", type="topic"), routing_key="by.topic.#"),
]


@pytest.fixture
def app(locks, server) -> Iterator[Celery]:
    """An app whose broker is this process."""
    app = Celery("going back", broker="memory://", set_as_current=False)
    app.conf.update(
        setnx_url=server.url(LOCK_DB),
        task_queues=QUEUES,
        task_default_queue="own",
        task_publish_retry=False,
        accept_content=["json", "yaml", "pickle"],
    )

    @app.task(base=SingletonTask, shared=False, name="t")
    def t(*args: Any, **kwargs: Any) -> None: ...

    app.finalize()
    yield app
    with app.connection_for_write() as connection:
        for queue in QUEUES:
            queue(connection).delete()


def received(app: Celery, queue: str = "own") -> Any:
    """The next message in a queue."""
    with app.connection_for_read() as connection, connection.SimpleQueue(app.amqp.queues[queue]) as messages:
        message = messages.get_nowait()
        message.ack()
        message.accept = prepare_accept_content(app.conf.accept_content)
        return message


def run(app: Celery, message: Any) -> Message:
    """What goes back when this message runs."""
    task = app.tasks["t"]
    with delivered(task, message):
        task.request.update(_span=object(), _trace={"span": object()}, session=object())  # as tracers do
        return Message.of(task)


def seen(message: Any) -> dict[str, Any]:
    """All that a worker sees of a message, but for what tells one from the other."""
    # Kombu's own transports keep every option of apply_async here.
    names = ("correlation_id", "reply_to", "delivery_mode", "priority")
    properties = {name: message.properties[name] for name in names}
    way = {name: message.delivery_info[name] for name in ("exchange", "routing_key")}
    about = {"type": message.content_type, "encoding": message.content_encoding, **way}
    return {"headers": dict(message.headers), "properties": properties, "body": message.payload, **about}


@pytest.mark.parametrize("serializer", ["json", "yaml"])
@pytest.mark.parametrize("by", ["its worker", "the line"])
def test_call_comes_back_as_it_was(app, serializer, by):
    """Arguments, headers, representations, ancestry, stamps, priority, compression, limits, what follows."""
    app.tasks["t"].apply_async(**SENT, serializer=serializer)
    first = received(app)
    message, call = run(app, first), Call.of("t", first.headers)
    if by == "the line":
        text = message.packed(app, call)
        call, message = Message.unpacked(app, text)
        assert json.loads(text)["encoding"] == "utf-8"
    message.send(app, call)
    again = received(app)
    assert seen(again) == seen(first)
    assert again.headers["argsrepr"] == "(1, <redacted>)"
    assert again.headers["compression"] == "application/x-gzip"
    assert again.headers["headers"] == SENT["headers"]["headers"]


def test_binary_body_comes_back_as_it_was(app):
    """A line is text."""
    app.tasks["t"].apply_async(task_id="id-1", args=(b"\x00\xff",), serializer="pickle")
    message = run(app, received(app))
    packed = message.packed(app, CALL)
    assert base64.b64decode(json.loads(packed)["body"])
    message.send(app, CALL)
    assert received(app).payload[0] == (b"\x00\xff",)


def test_pickle_is_never_unpacked(app):
    """Who can write to a line could have any code run, even where the app accepts pickles."""
    app.tasks["t"].apply_async(task_id="id-1", serializer="pickle")
    message = run(app, received(app))
    with pytest.raises(ContentDisallowed, match="pickle"):
        Message.unpacked(app, message.packed(app, CALL))


@pytest.mark.parametrize(
    "text",
    ["", "nothing", "[]", "5", "{}", '{"headers": {}, "properties": {}, "route": {}, "content_type": 5}'],
)
def test_text_that_is_no_packed_call_is_a_value_error(app, text):
    """Whatever stands in the line."""
    with pytest.raises(ValueError, match=r"."):
        Message.unpacked(app, text)


def test_receivers_add_headers_and_change_none(app):
    """A tracer that is asked when a call is sent again would make it a child of whoever sends it."""

    asked = False

    def trace(headers: Any, **_details: Any) -> None:
        if not asked:
            return
        headers["traceparent"] = "theirs"
        headers.update({"tenant": "theirs", HEADER: {}, "more": 1})
        headers["headers"]["traceparent"] = "theirs"
        headers.setdefault("tracestate", "new")

    before_task_publish.connect(trace)  # before the first call: older Celery may never see a later receiver
    try:
        app.tasks["t"].apply_async(**SENT)
        first = received(app)
        asked = True
        run(app, first).send(app, CALL)
    finally:
        before_task_publish.disconnect(trace)
    headers = received(app).headers
    assert headers == {**first.headers, **CALL.as_headers(), "more": 1, "tracestate": "new"}


@pytest.mark.parametrize("what", ["call", "courier"])
def test_what_is_sent_again_is_sent_in_no_context(app, what):
    """A tracer knows what a process does by its context: a call that is woken is no part of that."""
    seen = []

    def trace(**_details: Any) -> None:
        seen.append(CONTEXT.get(None))

    before_task_publish.connect(trace)
    token = CONTEXT.set("the holder's")
    try:
        app.tasks["t"].apply_async(**SENT)
        message = run(app, received(app))
        message.send(app, CALL) if what == "call" else message.send_new(app, COURIER, {"key": "k"}, 0.0)
    finally:
        CONTEXT.reset(token)
        before_task_publish.disconnect(trace)
    assert seen == ["the holder's", None]


def test_what_a_broker_or_a_delay_has_written_does_not_come_back(app):
    """x-death ends messages on RabbitMQ; a sticky flag would make a call one that was delivered before."""
    app.tasks["t"].apply_async(task_id="id-1")
    first = received(app)
    brokers = {"x-death": [{}], "x-first-death-queue": "q", "redelivered": True, "eta": "2024-05-06T00:00:00"}
    first.headers.update(brokers)
    message = run(app, first)
    message.send(app, CALL)
    headers = received(app).headers
    assert headers["eta"] is None
    assert not headers.keys() & (brokers.keys() - {"eta"})


def test_call_that_comes_back_later_has_an_eta(app):
    """By this clock, as Celery's own."""
    app.tasks["t"].apply_async(task_id="id-1")
    run(app, received(app)).send(app, CALL, 60)
    eta = datetime.fromisoformat(received(app).headers["eta"])
    assert timedelta(seconds=50) < eta - datetime.now(timezone.utc) <= timedelta(seconds=60)


@pytest.mark.parametrize(("expires", "lasts"), [(60, True), (-60, False), (None, False)])
def test_message_expires_when_its_call_does(app, expires, lasts):
    """One that is too late is sent all the same: its worker says that it is revoked; RabbitMQ would not."""
    app.tasks["t"].apply_async(task_id="id-1", expires=expires)
    first = received(app)
    run(app, first).send(app, CALL)
    again = received(app)
    assert again.headers["expires"] == first.headers["expires"]
    assert (0 < float(again.properties.get("expiration", 0)) / 1000 <= 60) == lasts


@pytest.mark.parametrize(
    ("came", "noted", "goes"),
    [
        (("", "own"), None, "own"),
        (("own", "own"), None, "own"),
        (("", "far"), None, "far"),
        (("topics", "by.topic"), None, "topical"),
        (("topics", "by.topic.word"), None, "wild"),
        (("celery_delayed_delivery", "0." * 27 + "1.by.other"), None, "other"),
        (("elsewhere", "by.topic"), None, ""),
        (("own", "unbound"), None, ""),
        ((None, None), None, ""),
        (("topics", "by.topic"), "other", "other"),
        (("elsewhere", "by.topic"), "far", "far"),
        (("", "own"), "far", "far"),
    ],
)
def test_queue_of_a_call_is_told_by_the_worker_else_by_its_route(app, came, noted, goes):
    """A binding in the broker that the app does not know of may have led it there."""
    task = app.tasks["t"]
    properties = properties_of(queue=noted)
    info = dict(zip(("exchange", "routing_key"), came))
    task.request_stack.push(Context({"id": "id-1", "delivery_info": info, "properties": properties}))
    assert Message.of(task).queue == goes
    task.request_stack.pop()


def test_task_of_ours_goes_the_way_of_a_call_and_shows_none_of_it(app):
    """No child of the running task, no result, and what it holds of the call is not for Flower."""
    app.tasks["t"].apply_async(**SENT)
    message = run(app, received(app))
    message.send_new(app, COURIER, {"key": "setnx:{t}", "order": message.packed(app, CALL)}, 0.0)
    sent = received(app)
    assert (sent.headers["task"], sent.headers["parent_id"], sent.headers["ignore_result"]) == (
        COURIER,
        None,
        True,
    )
    assert sent.properties["priority"] == 3
    assert sent.headers["id"] != "id-1"
    assert sent.headers["kwargsrepr"] == "{'key': 'setnx:{t}'}"
    assert HEADER not in sent.headers
    assert "compression" not in sent.headers


@pytest.mark.parametrize(("serializer", "pickled"), [("json", False), ("pickle", True), ("yaml", False)])
def test_pickled_call_is_known(app, serializer, pickled):
    """By its message, whatever the task's own serializer is."""
    task = app.tasks["t"]
    task.apply_async(task_id="id-1", serializer=serializer)
    first = received(app)
    properties = properties_of(content_type=first.content_type)
    task.request_stack.push(Context({"id": "id-1", "properties": properties}))
    assert (Message.of(task).content_type == PICKLE) is pickled
    task.request_stack.pop()


@pytest.mark.parametrize("when", [10, "10 s", "text"])
def test_seconds_until_takes_what_celery_takes(app, when):
    """Seconds, a time, or its text."""
    moment = datetime.now(timezone.utc) + timedelta(seconds=10)
    given = {"10 s": moment, "text": moment.isoformat()}.get(when, when) if isinstance(when, str) else when
    assert 9 < seconds_until(app, given) <= 10
    assert seconds_until(app, None) == 0
    assert seconds_until(app, "2024-05-06T00:00:00+00:00") < 0


@pytest.mark.parametrize("by_line", [False, True])
def test_message_of_the_first_protocol_comes_back_in_it(app, by_line):
    """Its headers are the user's own: a Request may hand them to a retry, and receivers read its body."""
    app.conf.task_protocol = 1
    app.amqp.__dict__.pop("create_task_message", None)
    app.tasks["t"].apply_async((1,), {"since": 2}, task_id="id-1", headers={"tenant": "acme"}, link=[LINK])
    first = received(app)
    (args, kwargs, embedded), headers, _decoded, _utc = hybrid_to_proto2(first, first.payload)
    request = Context({**headers, **embedded, "args": args, "kwargs": kwargs, "called_directly": False})
    request.correlation_id = first.properties["correlation_id"]
    request.delivery_info, request.properties = first.delivery_info, properties_of(queue="own")
    app.tasks["t"].request_stack.push(request)
    try:
        message, call = Message.of(app.tasks["t"]), Call.of("t", headers)
    finally:
        app.tasks["t"].request_stack.pop()
    if by_line:
        call, message = Message.unpacked(app, message.packed(app, call))
    message.send(app, call._replace(waits=1))
    second = received(app)
    assert set(first.headers) == set(second.headers) == {"tenant", HEADER}
    assert second.headers[HEADER] == {**first.headers[HEADER], "waits": 1}
    assert {**second.payload, **first.payload} == {**second.payload, "group_index": None}  # Celery drops it
    assert second.properties["correlation_id"] == "id-1"
