"""Where couriers wait, and when they need not any longer: without a worker, and without RabbitMQ."""

import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import pytest
from amqp.exceptions import AccessRefused
from celery import Celery
from celery.utils import timer2
from celery.worker import state
from kombu import Queue
from kombu.asynchronous.timer import Timer
from kombu.common import QoS
from kombu.exceptions import OperationalError

from celery_setnx import SetnxLock, SingletonTask
from celery_setnx.call import delay, ended
from celery_setnx.call.back import Message
from celery_setnx.call.delay import declared, delaying_queue
from celery_setnx.call.message import Call
from celery_setnx.call.wake import COURIER, lines_of, look_within
from celery_setnx.connection import client_for
from celery_setnx.lock import line
from celery_setnx.lock.line import BEGUN_S, LineEntry, TicketStart, have_begun, leave, park
from celery_setnx.lock.names import end_name, key_name, line_names, ticket_name
from celery_setnx.lock.record import ORIGINAL
from celery_setnx.run import courier, held, revoked
from celery_setnx.run.courier import ParkedCall, put_back
from celery_setnx.run.held import HeldCouriers, give_back
from celery_setnx.run.sweep import Sweep
from tests.harness import due_set, server_us

KEY = key_name("t", "t", "f8f76adeabacfc9bfe3d32e83b502a67")  # of a call without arguments
CALL = Call("t", "id-1", key=KEY, since=10.0, has_header=True)
MESSAGE = Message({"task": "t", "id": "id-1"}, {}, "far", ((), {}, {}), "application/json")
ORDER = ParkedCall(CALL, "c", None, lease=60.0, queue_lease=60.0, remember=600.0, epoch="")


@pytest.fixture
def app(server, locks) -> Celery:
    """An app with one guarded task; its broker is this process."""
    app = Celery("courier", broker=f"memory://{id(locks)}", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t", task_queues=[Queue("far")])

    @app.task(base=SingletonTask, shared=False, name="t", singleton={"on_conflict": "wait", "lease": 60})
    def t() -> None: ...

    app.finalize()
    return app


@pytest.fixture
def broker(monkeypatch) -> list[str]:
    """A broker that keeps messages: the delaying queues that it was asked for."""
    asked: list[str] = []
    monkeypatch.setattr(courier, "waits_in_broker", lambda _app: True)
    monkeypatch.setattr(delay, "declare", lambda _app, queue: asked.append(queue.name))
    return asked


def messages(app: Celery, queue: str) -> list[Any]:
    """What is in a queue."""
    with app.connection_for_read() as connection, connection.SimpleQueue(queue) as found:
        return [found.get_nowait() for _ in range(found.qsize())]


def waits(app: Celery, locks: Any, order: ParkedCall = ORDER) -> ParkedCall:
    """A call that is in line behind a holder, with all that it is woken with."""
    SetnxLock(locks, KEY, line=True, lease=600).acquire()
    order = replace(order, message=MESSAGE.packed(app, order.call))
    park(locks, order.place(app), copy=ORIGINAL, since=order.call.since, call=order.message)
    return order


# In the broker


@pytest.mark.parametrize("kind", ["quorum", "classic"])
def test_delaying_queue_is_of_the_kind_of_its_calls_queue(kind):
    """It is as durable, lasts longer than its messages, and hands them to the queue by its name."""
    arguments = {"x-queue-type": kind, "x-max-priority": 9}
    waits = delaying_queue(Queue("far", durable=kind == "quorum", queue_arguments=arguments), 60.0)
    told = dict(waits.queue_arguments)
    assert told.pop("x-expires") >= 2 * told["x-message-ttl"]
    strategy = {"x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    kind_too = {"x-queue-type": "quorum", **strategy} if kind == "quorum" else {}
    ways = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "far"}
    assert told == {"x-message-ttl": 60_000, **ways, **kind_too}
    assert waits.durable is (kind == "quorum")


def test_delaying_queue_has_another_name_for_other_arguments():
    """So a release with other ones never finds a queue that refuses it; no name is too long for AMQP."""
    quorum = Queue("far", queue_arguments={"x-queue-type": "quorum"})
    queues = [Queue("far"), quorum, Queue("far", durable=False), *(Queue("é" * 120 + end) for end in "ab")]
    names = [delaying_queue(queue, wait_s).name for queue in queues for wait_s in (60.0, 600.0)]
    assert len(set(names)) == 10
    assert max(len(name.encode()) for name in names) <= 255


@pytest.mark.parametrize(
    ("error", "asked"),
    [(AccessRefused("no"), 1), (OperationalError("away"), 2)],
    ids=["refused", "away"],
)
def test_refusal_of_a_broker_is_remembered(app, monkeypatch, error, asked):
    """For a while, and not that it was away: then it is asked again."""
    times = []

    def fail(_app: Celery, queue: Queue) -> None:
        times.append(queue.name)
        raise error

    monkeypatch.setattr(delay, "declare", fail)
    assert [declared(app, "far", 60.0) for _ in range(2)] == [None, None]
    assert len(times) == asked


def test_courier_waits_in_the_broker_undelayed(app, locks, broker):
    """A minute the first time, ten minutes later: with no eta, for a worker would hold it until then."""
    ORDER.send(MESSAGE, app, 500.0, 10.0, first=True)
    ORDER.send(MESSAGE, app, 500.0, 10.0, first=False)
    ORDER.send(MESSAGE, app, 20.0, 10.0, first=False)
    assert [name.partition(".setnx-")[2].partition("-")[0] for name in broker] == ["60s", "600s", "60s"]
    found = [message for name in dict.fromkeys(broker) for message in messages(app, name)]
    assert [message.headers["task"] for message in found] == [COURIER] * 3
    assert [message.headers["eta"] for message in found] == [None] * 3
    assert messages(app, "far") == []


def test_courier_that_the_broker_refuses_is_delayed_as_elsewhere(app, broker, monkeypatch):
    """In its call's queue, with an eta."""
    monkeypatch.setattr(courier, "declared", lambda *_: None)
    ORDER.send(MESSAGE, app, 500.0, 10.0, first=True)
    (message,) = messages(app, "far")
    assert message.headers["eta"]


def test_call_is_sent_when_its_waiting_ends(app, locks, broker):
    """Not by its courier, which comes later: by whoever sweeps. It keeps its place until it has failed."""
    now = server_us(locks) / 1e6
    order = waits(app, locks, replace(ORDER, until=now + 30))
    order.send(MESSAGE, app, 500.0, now, first=True)
    (end,) = locks.zrange(due_set(app, "t"), 0, -1)
    assert locks.zscore(due_set(app, "t"), end) == pytest.approx((now + 30) * 1e6, abs=1e6)
    step = Sweep(SimpleNamespace(app=app))
    step._client = client_for(app)
    step.sweep(app)
    assert messages(app, "far") == []
    locks.zincrby(due_set(app, "t"), -31e6, end)
    step.sweep(app)
    (message,) = messages(app, "far")
    assert (message.headers["id"], message.headers["task"]) == ("id-1", "t")
    assert message.headers["singleton"]["copy"] != ORIGINAL
    assert locks.zrange(line_names(KEY)[0], 0, -1) == ["id-1"]
    assert locks.zrange(due_set(app, "t"), 0, -1) == []


@pytest.mark.parametrize("how", ["begun", "handed", "gone", "lingering"])
def test_call_that_does_not_wait_is_not_sent_at_its_end(app, locks, broker, how):
    """It has begun, has its turn, is lost with Redis' data, or asks by itself."""
    order = waits(app, locks, replace(ORDER, until=1.0))
    if how == "begun":
        leave(locks, order.place(app), copy="other")
    elif how == "handed":
        locks.zrem(line_names(KEY)[0], "id-1")
    elif how == "lingering":
        locks.hset(line_names(KEY)[1], "id-1", "@9")
    else:
        locks.flushdb()
    line.note_due(locks, lines_of(app), "t", end_name(KEY, "id-1"), within=0.0)
    step = Sweep(SimpleNamespace(app=app))
    step._client = client_for(app)
    assert step.sweep(app).lines == 1
    assert messages(app, "far") == []
    assert locks.zrange(due_set(app, "t"), 0, -1) == []


@pytest.mark.parametrize(
    ("done_at", "is_put_back"),
    [
        ("1970-01-01T00:00:09+00:00", True),
        ("1970-01-01T00:00:11+00:00", False),
        (datetime(1970, 1, 1, 0, 0, 11), False),  # as a database has it
        (None, True),
    ],
    ids=["before it waited", "since", "since, naive", "not known"],
)
def test_lost_call_is_put_back_unless_it_has_ended_as_it_waited(
    app, locks, monkeypatch, done_at, is_put_back
):
    """Its publisher has made its id up: what is stored may be the result of an earlier call."""
    monkeypatch.setattr(ended, "known_result", lambda *_: {"status": "SUCCESS", "date_done": done_at})
    order = waits(app, locks)
    locks.flushdb()
    SetnxLock(locks, KEY, line=True, lease=600).acquire()
    assert (put_back(app, order, wait_s=0.0) is not None) == is_put_back


def test_call_is_put_back_though_another_with_its_id_has_ended_as_it_waited(app, locks, monkeypatch):
    """It asks again by itself meanwhile, so nothing is known of it in Redis, which has lost nothing."""
    done = {"status": "SUCCESS", "date_done": "2100-01-01T00:00:00+00:00"}
    monkeypatch.setattr(ended, "known_result", lambda *_: done)
    order = waits(app, locks)
    order = replace(order, epoch=look_within(app, "t", KEY, 1.0).epoch)
    locks.delete(*locks.keys("*:ticket:*"), *line_names(KEY))
    SetnxLock(locks, KEY, line=True, lease=600).acquire()
    assert put_back(app, order, wait_s=0.0) is not None


def test_lost_call_that_has_ended_hands_on_what_it_is_handed_meanwhile(app, locks, monkeypatch):
    """As it was put back into its line before it was asked how it has ended."""
    order = waits(app, locks)
    locks.flushdb()
    outcome = SetnxLock(locks, KEY, line=True, lease=600).acquire()
    following = CALL._replace(task_id="id-2", since=11.0)
    told = replace(MESSAGE, headers={"task": "t", "id": "id-2"}).packed(app, following)
    park(locks, replace(order, call=following).place(app), copy=ORIGINAL, since=11.0, call=told)

    def end(*_args: Any, **_details: Any) -> dict[str, str]:
        outcome.lock.release()
        return {"status": "SUCCESS"}

    monkeypatch.setattr(courier, "stored_end", end)
    assert put_back(app, order, wait_s=0.0) is None
    (message,) = messages(app, "far")
    assert message.headers["id"] == "id-2"


def test_revoked_call_that_waits_is_sent_when_its_line_is_looked_at(app, locks, monkeypatch):
    """Also where no worker holds its courier; its worker throws it away, and it leaves the line by that."""
    order = waits(app, locks)
    monkeypatch.setattr(revoked, "revoked_tasks", {"id-1", "another"})
    line.note_due(locks, lines_of(app), "t", KEY, within=0.0)
    step = Sweep(SimpleNamespace(app=app))
    step._client = client_for(app)
    step.sweep(app)
    (message,) = messages(app, "far")
    assert message.headers["id"] == order.call.task_id


@pytest.mark.parametrize(("until_in_s", "ttl_s"), [(60.0, 600.0), (-60.0, BEGUN_S)])
def test_ticket_of_a_call_that_was_sent_at_its_end_lasts_a_week(app, locks, until_in_s, ttl_s):
    """Another message of it may come late; not of one that had begun before that."""
    order = waits(app, locks, replace(ORDER, until=server_us(locks) / 1e6 + until_in_s))
    leave(locks, replace(order.place(app), remember=BEGUN_S), copy="other")
    assert put_back(app, order, wait_s=0.0) is None
    assert locks.ttl(ticket_name(KEY, "id-1")) == pytest.approx(ttl_s, abs=5)


# In a worker


@pytest.mark.parametrize(
    ("ticket", "found"),
    [
        ("1||0", None),
        ("1|ab|0", TicketStart.ONCE),
        ("1|ab|2", TicketStart.ANY),
        ("2||0", TicketStart.ANY),
        ("0|ab|0", None),
        ("nonsense", None),
        (None, None),
    ],
)
def test_ticket_tells_whether_its_call_has_begun(locks, foreign_keys, ticket, found):
    """This attempt, or a later one; what is unreadable tells nothing, and fails nobody else."""
    name = ticket_name(KEY, "id-1")
    foreign_keys.add(name)
    if ticket:
        locks.set(name, ticket)
    locks.lpush(ticket_name(KEY, "id-2"), "no text")
    foreign_keys.add(ticket_name(KEY, "id-2"))
    places = [LineEntry(KEY, task_id, 1, 600.0) for task_id in ("id-1", "id-2")]
    assert have_begun(locks, places) == [found, None]
    assert have_begun(locks, []) == []


class Request:
    """A courier in a worker's parent."""

    def __init__(self, task_id: str, held_since: float = 0.0, **order: Any) -> None:
        self.id = self.name = task_id
        self.parked = replace(ORDER, call=CALL._replace(task_id=task_id), **order)
        self.held_since, self.acknowledged = held_since, False

    def acknowledge(self) -> None:
        self.acknowledged = True


def gevent_timer() -> Any:
    pytest.importorskip("gevent")
    from celery.concurrency.gevent import Timer

    return Timer()


class Consumer:
    """A worker's consumer that holds couriers, as Celery's strategy has it."""

    def __init__(self, timer: Any, requests: list[Request]) -> None:
        self.timer, self.qos, self.soon = timer, QoS(lambda **_: None, 8), []
        for request in requests:
            self.qos.increment_eventually()
            self.timer.call_at(time.monotonic() + 600, self.apply_eta_task, (request,), priority=6)
            state.requests[request.id] = request

    def apply_eta_task(self, request: Request) -> None: ...

    def call_soon(self, callback: Any) -> None:
        self.soon.append(callback)


@pytest.fixture(params=[Timer, timer2.Timer, gevent_timer], ids=["hub", "thread", "gevent"])
def timer(request) -> Iterator[Any]:
    """Of each kind that workers have."""
    timer = request.param()
    yield timer
    timer.clear()
    timer.stop()


def waiting(timer: Any) -> list[Any]:
    """What a timer has yet to do."""
    return [each.entry.args[0] for each in timer.queue if each.entry.args and not each.entry.canceled]


def test_courier_that_is_let_go_is_out_of_timer_reservation_and_prefetch(timer):
    """And acknowledged; the others are as they were."""
    gone, stays = requests = [Request("gone"), Request("stays")]
    consumer = Consumer(timer, requests)
    give_back(consumer, [gone])
    assert waiting(timer) == [stays]
    assert (gone.acknowledged, stays.acknowledged) == (True, False)
    assert consumer.qos.value == 9
    assert "gone" not in state.requests
    give_back(consumer, [gone])
    assert consumer.qos.value == 9
    assert state.requests.pop("stays") is stays


def test_courier_of_a_lost_connection_is_not_acknowledged(timer):
    """Celery has emptied the timer; the broker delivers the message anew. Nor one that has just begun."""
    lost, begun = requests = [Request("lost"), Request("begun")]
    consumer = Consumer(timer, [lost])
    timer.clear()
    consumer.qos = QoS(lambda **_: None, 8)
    consumer.timer.call_at(time.monotonic() + 600, consumer.apply_eta_task, (begun,), priority=6)
    state.reserved_requests.add(begun)
    give_back(consumer, requests)
    assert [request.acknowledged for request in requests] == [False, False]
    assert consumer.qos.value == 8
    state.reserved_requests.discard(begun)
    state.requests.pop("lost")


def test_what_goes_wrong_is_not_raised_into_the_workers_loop(caplog):
    """It ends the worker."""
    give_back(SimpleNamespace(timer=None), [Request("a")])
    assert "are held until their time has come" in caplog.text


def test_couriers_are_asked_about_every_half_minute_but_for_the_first(app, locks, monkeypatch):
    """In one go; those whose calls have begun go, and their tickets last for no longer than needed."""
    now, asked = [0.0], []
    monkeypatch.setattr(held, "time", SimpleNamespace(monotonic=lambda: now[0]))
    ask = held.have_begun
    monkeypatch.setattr(held, "have_begun", lambda c, places: asked.append(len(places)) or ask(c, places))
    names = ["begun", "waits", "sent", "unreadable"]
    requests = [Request(name, resent=name == "sent") for name in names]
    requests[3].parked = None  # type: ignore[assignment]
    for request in requests[:3]:
        place = replace(request.parked.place(app), remember=BEGUN_S)
        park(locks, place, copy=ORIGINAL, since=10.0, call="c")
        if request.id != "waits":
            leave(locks, place, copy="other")
    consumer = Consumer(Timer(), requests)
    worker, couriers = SimpleNamespace(app=app, consumer=consumer), HeldCouriers()
    for now[0] in (29.0, 31.0, 59.0, 62.0, 80.0, 93.0):
        couriers.let_go(worker, client_for(app), requests)
    assert asked == [3, 3]
    consumer.soon[0]()
    assert [request.acknowledged for request in requests] == [True, False, True, False]
    lasts = [locks.ttl(ticket_name(KEY, name)) for name in names[:3]]
    assert lasts == [pytest.approx(seconds, abs=5) for seconds in (600.0, BEGUN_S, BEGUN_S)]


def test_lock_server_that_is_away_lets_nobody_go(app, monkeypatch, caplog):
    """And nothing is raised: they have a time of their own."""
    monkeypatch.setattr(held, "_ASKS_S", 0.0)
    app.conf.setnx_url = "redis://127.0.0.1:1/0"
    request = Request("a", held_since=-1000.0)
    worker = SimpleNamespace(app=app, consumer=Consumer(Timer(), [request]))
    with caplog.at_level("INFO"):
        HeldCouriers().let_go(worker, client_for(app), [request])
    assert worker.consumer.soon == []
    assert "It is not known which couriers" in caplog.text
