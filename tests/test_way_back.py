"""The way back: to the queue that a call came from, by whatever exchange, on whatever transport."""

import json
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context
from kombu import Exchange, Queue, binding
from kombu.common import Broadcast

from celery_setnx import LockUnavailable, SingletonTask
from celery_setnx.call.back import Dropped, Message, come_back
from celery_setnx.call.delivery import DELIVERY
from celery_setnx.call.message import Call
from celery_setnx.call.queues import NoWayBack, delayed_way_to, noting_queues
from celery_setnx.request import SingletonRequest
from tests.conftest import LOCK_DB
from tests.harness import properties_of, wait_until

TOPIC, DIRECT = Exchange("topics", type="topic"), Exchange("directs", type="direct")
QUEUES = {
    "topic": [Queue("one", TOPIC, routing_key="feed.*"), Queue("two", TOPIC, routing_key="feed.#")],
    "direct": [Queue("one", DIRECT, routing_key="both"), Queue("two", DIRECT, routing_key="both")],
    "bindings": [
        Queue("one", bindings=[binding(TOPIC, routing_key="feed.#"), binding(DIRECT, routing_key="x")]),
        Queue("two", TOPIC, routing_key="*.import"),
    ],
    "fanout": [
        Queue("one", Exchange("all", type="fanout")),
        Queue("two", Exchange("all", type="fanout")),
    ],
}
SENT = {
    "topic": ("topics", "feed.import"),
    "direct": ("directs", "both"),
    "bindings": ("topics", "feed.import"),
    "fanout": ("all", ""),
}
CALL = Call("t", "id-1", key="setnx:{t}", call_id="c0ffee", has_header=True)


@pytest.fixture
def url_of(server, tmp_path) -> Callable[[str], tuple[str, dict[str, Any]]]:
    """The URL and the options of a broker of a kind."""
    folder = tmp_path / "messages"
    folder.mkdir()
    prefix = uuid.uuid4().hex
    files = {name: str(folder) for name in ("data_folder_in", "data_folder_out", "control_folder")}

    def url_of(transport: str) -> tuple[str, dict[str, Any]]:
        if transport == "redis":
            return server.url(9), {"global_keyprefix": prefix}
        return f"{transport}://", files if transport == "filesystem" else {}

    return url_of


@pytest.fixture
def app_of(server, locks, url_of) -> Iterator[Callable[..., Celery]]:
    """Makes apps of one broker: each has a connection of its own, and has declared nothing."""
    made = []

    def app_of(transport: str, queues: list[Queue], **conf: Any) -> Celery:
        url, options = url_of(transport)
        app = Celery("way", broker=url, set_as_current=False)
        app.conf.update(setnx_url=server.url(LOCK_DB), broker_transport_options=options, **conf)
        app.conf.update(task_publish_retry=False, task_queues=queues, task_default_queue=queues[0].name)

        @app.task(base=SingletonTask, shared=False, name="t")
        def t(*args: Any, **kwargs: Any) -> None: ...

        app.finalize()
        made.append(app)
        return app

    yield app_of
    with made[0].connection_for_write() as connection:
        for queue in made[0].amqp.queues.values():
            queue(connection).delete()
    for app in made:
        app.close()


class Reader:
    """A worker's consumer: what it has received, with the queue that each is from."""

    def __init__(self, app: Celery) -> None:
        self.app, self.messages = app, []
        self.connection = app.connection_for_read()
        channel = self.connection.default_channel
        channel.basic_consume = noting_queues(app, channel.basic_consume)
        self.consumer = app.amqp.TaskConsumer(channel, on_message=self.take)
        self.consumer.consume()

    def take(self, message: Any) -> None:
        message.ack()
        request = SingletonRequest(message, app=self.app, task=self.app.tasks["t"], hostname="here")
        self.messages.append(request.request_dict)

    def read(self, count: int) -> list[dict[str, Any]]:
        """So many messages, and no more."""

        def are_there() -> bool:
            try:
                self.connection.drain_events(timeout=0.2)
            except TimeoutError:
                return len(self.messages) >= count
            return False

        wait_until(are_there, f"{count} messages")
        taken, self.messages = self.messages, []
        assert len(taken) == count
        return sorted(taken, key=queue_of)


def exchanges_of(queue: Queue) -> list[Exchange]:
    return [queue.exchange, *(each.exchange for each in queue.bindings)]


def queue_of(told: dict[str, Any]) -> str:
    return str(told["properties"][DELIVERY].queue)


@pytest.fixture
def reading() -> Iterator[Callable[[Celery], Reader]]:
    """Reads an app's queues until the test ends."""
    readers = []

    def reading(app: Celery) -> Reader:
        readers.append(Reader(app))
        return readers[-1]

    yield reading
    for reader in readers:
        reader.connection.close()


def running(app: Celery, told: dict[str, Any]) -> Message:
    """The message of a call that runs."""
    task = app.tasks["t"]
    task.request_stack.push(Context(told, called_directly=False))
    try:
        return Message.of(task)
    finally:
        task.request_stack.pop()


KINDS = [
    (transport, kind)
    for transport in ("memory", "filesystem", "redis")
    for kind in QUEUES
    if (transport, kind) != ("redis", "fanout")
]


@pytest.mark.parametrize(("transport", "kind"), KINDS)
def test_each_copy_of_a_call_goes_back_to_its_own_queue(app_of, reading, transport, kind):
    """Two queues get the call. Each sends its copy on, by a process that has declared nothing: no third."""
    app, sender = app_of(transport, QUEUES[kind]), app_of(transport, QUEUES[kind])
    reader = reading(app)
    exchange, routing_key = SENT[kind]
    by = next(each for queue in QUEUES[kind] for each in exchanges_of(queue) if each.name == exchange)
    app.send_task("t", task_id="id-1", exchange=by, routing_key=routing_key, declare=QUEUES[kind])
    copies = reader.read(2)
    for _ in range(3):
        assert [queue_of(copy) for copy in copies] == ["one", "two"]
        assert [copy["delivery_info"]["exchange"] for copy in copies] == [exchange] * 2
        assert [copy["delivery_info"]["routing_key"] for copy in copies] == [routing_key] * 2
        for copy in copies:
            running(app, copy).send(sender, CALL)
        copies = reader.read(2)


@pytest.mark.parametrize("transport", ["memory", "redis"])
def test_task_of_ours_goes_to_the_queue_of_the_call(app_of, reading, transport):
    """A courier that is sent by an exchange which nobody has declared would be dropped."""
    app, sender = app_of(transport, QUEUES["topic"]), app_of(transport, QUEUES["topic"])
    reader = reading(app)
    app.send_task("t", task_id="id-1", routing_key="feed.import", queue="one")
    first, _second = reader.read(2)
    running(app, first).send_new(sender, "t", {"key": "k"}, 0.0)
    (courier,) = reader.read(1)
    assert queue_of(courier) == "one"


def test_queue_that_nobody_knows_gets_its_call_back(app_of, reading):
    """A worker reads one that its app creates for it (`-Q`), or is told to read later."""
    app, sender = app_of("redis", QUEUES["topic"]), app_of("redis", QUEUES["topic"])
    app.amqp.queues.select(["made"])
    reader = reading(app)
    app.send_task("t", task_id="id-1", queue="made")
    for _ in range(2):
        (told,) = reader.read(1)
        assert queue_of(told) == "made"
        running(app, told).send(sender, CALL)
    reader.read(1)


def from_line(app: Celery, **changed: Any) -> tuple[Call, Message]:
    """What is sent of a call from a line in which somebody has changed its message."""
    told = {
        "headers": {"task": "t", "id": "id-1", **CALL.as_headers()},
        "properties": {},
        "queue": "one",
        "content_type": "application/json",
        "encoding": "utf-8",
        "broker": "",
        "body": '[[], {"tenant": "two"}, {}]',
    }
    return Message.unpacked(app, json.dumps({**told, **changed}))


@pytest.mark.parametrize(
    ("named", "routes", "goes"),
    [
        ("two", None, "two"),
        ("made", None, "made"),
        ("theirs", None, "one"),
        ("", None, "one"),
        (["one"], None, "one"),
        ("theirs", {"t": {"queue": "two"}}, "two"),
        ("theirs", {"t": {"exchange": "topics", "routing_key": "feed.a.b"}}, "two"),
        ("theirs", [lambda name, args, kwargs, *_, **__: {"queue": kwargs["tenant"]}], "two"),
    ],
)
def test_call_from_a_line_goes_to_a_queue_of_the_app_else_by_its_route(app_of, named, routes, goes):
    """Who can write to the lock server names no queue of others."""
    app = app_of("memory", QUEUES["topic"], task_routes=routes)
    app.amqp.queues.select_add("made")
    _call, message = from_line(app, queue=named)
    assert message.queue == goes


def test_call_from_a_line_goes_to_a_queue_for_which_the_broker_vouches(app_of):
    """A worker need not know the queues of others; who cannot log in at the broker can change none."""
    app = app_of("memory", QUEUES["topic"])
    _call, message = from_line(app, queue="theirs")
    theirs = replace(message, queue="theirs").packed(app, CALL)
    assert Message.unpacked(app, theirs)[1].queue == "theirs"
    for what, changed in (("theirs", "thine"), ("id-1", "id-2"), ("setnx:{t}", "setnx:{t:x}")):
        assert Message.unpacked(app, theirs.replace(what, changed))[1].queue == "one"


@pytest.mark.parametrize(
    ("told", "seen"),
    [(["topics", "feed.import"], ("topics", "feed.import")), (["theirs", "feed.import"], ("", ""))],
)
def test_call_from_a_line_shows_its_body_only_a_route_that_leads_to_its_queue(app_of, told, seen):
    """A body's own retry goes by the route that it sees."""
    headers = {"task": "t", "id": "id-1", **CALL._replace(route=told).as_headers()}
    _call, message = from_line(app_of("memory", QUEUES["topic"]), headers=headers)
    assert message.route == seen


def test_call_from_a_line_has_no_properties_but_those_that_go_back(app_of):
    """They are given to the broker by their names."""
    properties = {"app_id": "a", "priority": 3, "exchange": "theirs", "declare": [], "content_type": "x"}
    _call, message = from_line(app_of("memory", QUEUES["topic"]), properties=properties)
    assert message.properties == {"app_id": "a", "priority": 3}


@pytest.fixture
def broadcast(app_of) -> Any:
    """A guarded task on a Redis broker whose message is of a queue that is one subscription of many."""
    app = app_of("redis", [Broadcast("all"), Queue("one")])
    (name,) = (queue.name for queue in app.amqp.queues.values() if queue.exchange.type == "fanout")
    task = app.tasks["t"]
    properties = properties_of(queue=name, is_fanout=True)
    info = {"exchange": "all", "routing_key": ""}
    task.request_stack.push(Context(id="id-1", delivery_info=info, properties=properties, retries=0))
    yield task
    task.request_stack.pop()


def test_copy_of_a_broadcast_that_meets_its_own_call_ends(broadcast, caplog):
    """On Redis it cannot come back alone, and the call runs already."""
    with pytest.raises(Dropped):
        come_back(broadcast, CALL, 1.0, "it is held", own=True)
    assert "A copy of t[id-1] is dropped: it is held." in caplog.text
    assert "route guarded tasks to a queue of another exchange" in caplog.text


@pytest.mark.parametrize("late", [False, True], ids=["early", "late"])
def test_copy_of_a_broadcast_that_meets_another_call_fails(broadcast, late):
    """A requeued message would go into lists that nobody reads, one for each worker."""
    broadcast.acks_late = late
    with pytest.raises(LockUnavailable, match=r"fanout exchange.*route guarded tasks to another queue"):
        come_back(broadcast, CALL, 1.0, "it is held")


def test_call_of_an_unknown_queue_does_not_leave(app_of):
    """Published by its exchange, it might be dropped in silence, or copied."""
    app = app_of("redis", QUEUES["topic"])
    task = app.tasks["t"]
    task.request_stack.push(Context(id="id-1", delivery_info={"exchange": "theirs", "routing_key": "x"}))
    try:
        with pytest.raises(NoWayBack, match="task_queues"):
            Message.of(task).send(app, CALL)
        with pytest.raises(LockUnavailable, match="not known which queue"):
            come_back(task, CALL, 1.0, "it is held")
    finally:
        task.request_stack.pop()


PROPERTIES = {"app_id": "shop", "message_id": "m-1", "type": "order", "MessageGroupId": "tenant-7"}


def test_properties_of_a_message_come_back(app_of, reading):
    """AMQP's own, and the group of SQS; no deduplication id, by which SQS would drop the call."""
    app = app_of("memory", [Queue("one")])
    reader = reading(app)
    app.send_task("t", task_id="id-1", queue="one", MessageDeduplicationId="d-1", **PROPERTIES)
    (told,) = reader.read(1)
    message = running(app, told)
    for _ in range(2):
        message.send(app, CALL)
        (told,) = reader.read(1)
        assert {name: told["properties"].get(name) for name in PROPERTIES} == PROPERTIES
        assert "MessageDeduplicationId" not in told["properties"]
        _call, message = Message.unpacked(app, message.packed(app, CALL))


def test_user_id_comes_back_if_the_worker_is_that_user(app_of, reading):
    """RabbitMQ closes the channel of whoever names another."""
    app = app_of("memory", [Queue("one")])
    reader = reading(app)
    for user, again in (("guest", "guest"), ("shop", None)):
        app.send_task("t", task_id="id-1", queue="one", user_id=user)
        running(app, reader.read(1)[0]).send(app, CALL)
        (told,) = reader.read(1)
        assert told["properties"].get("user_id") == again


@pytest.mark.parametrize(
    ("others", "is_delayed"), [([], True), ([Queue("all", TOPIC, routing_key="#")], False)]
)
def test_native_delay_leads_to_one_queue_or_is_not_used(app_of, monkeypatch, others, is_delayed):
    """A queue that is bound to all words of the exchange would get a copy of what comes out of the delay."""
    app, bound = app_of("memory", [*QUEUES["topic"], *others]), []
    monkeypatch.setattr("celery_setnx.call.queues.detect_quorum_queues", lambda *_: (True, "one"))
    monkeypatch.setattr("celery_setnx.call.queues.calculate_routing_key", "{}.{}".format, raising=False)
    monkeypatch.setattr(
        "kombu.transport.memory.Channel.queue_bind",
        lambda _self, queue, exchange, routing_key: bound.append((queue, exchange, routing_key)),
    )
    way = delayed_way_to(app, "one", 5.5)
    assert (way is not None) == is_delayed
    assert delayed_way_to(app, "one", 0.5) is None
    if way is not None:
        word = way["routing_key"].removeprefix("5.")
        assert bound == [("one", "celery_delayed_delivery", f"#.{word}")]


@pytest.fixture(scope="module")
def route_worker(module_worker) -> Any:
    """One that reads two queues of a topic exchange, on Redis."""
    return module_worker("tests.routeapp", concurrency=2, queues="routes.feeds,routes.rest")


@pytest.mark.parametrize("name", ["wait", "retry", "join", "plain_base"])
def test_call_by_a_topic_exchange_comes_back_untouched(route_worker, locks, journal, gates, request, name):
    """Whatever hooks put on the request and change: body, headers, route are as they were sent."""
    from tests.routeapp import FEED, app

    task, key = app.tasks[f"routes.{name}"], f"gated-{uuid.uuid4().hex}"
    options = {**FEED, "headers": {"tenant": "acme"}, "declare": list(app.amqp.queues.values())}
    sent = {"name": key, "nested": {"seen": 0}, "user": 7}
    first = journal.reached("start", task.apply_async(kwargs=sent, **options))
    second = task.apply_async(kwargs=sent, **options)
    if name == "plain_base":
        journal.wait_for("retry", 2, task_id=second.id)
    else:
        journal.wait_for("waiting" if name in ("wait", "join") else "conflict", task_id=second.id)
    gates(key, 2)
    told, again = first.get(timeout=60), second.get(timeout=60)
    assert {word: told[word] for word in FEED} == FEED
    assert (told["seen"], told["tenant"]) == (1, "acme")
    assert {**again, "headers": None} == {**told, "headers": None}
    assert set(again["headers"]) - {"singleton"} == set(told["headers"]) - {"singleton"}
