"""Where debounced calls wait on an AMQP broker: without a worker, and without RabbitMQ."""

import math
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest
from amqp.exceptions import AccessRefused
from celery import Celery
from kombu import Exchange, Queue
from kombu.exceptions import OperationalError

from celery_setnx import LockUnavailable, SingletonTask
from celery_setnx.call import back, delay, marking
from celery_setnx.call.back import Waits, wait_in_broker
from celery_setnx.call.delay import declare, delaying_queue, hop_s
from celery_setnx.call.message import HEADER, Call
from celery_setnx.doctor import broker as doctor
from celery_setnx.doctor.app import guarded_tasks
from celery_setnx.doctor.broker import courier_findings
from tests.conftest import LOCK_DB
from tests.harness import delivered, raising

WAITS_S = (0.0, 0.001, 0.24, 0.26, 0.5, 1.0, 4.99, 5.0, 59.98, 60.0, 899.0, 86_400.0)


@pytest.fixture
def app(server, locks, monkeypatch) -> Iterator[Celery]:
    """An app with a debounced task; its broker is this process, and keeps messages as RabbitMQ does."""
    app = Celery("quiet", broker="memory://", set_as_current=False)
    queue = Queue("far", Exchange("topics", type="topic"), routing_key="by.topic")
    app.conf.update(setnx_url=server.url(LOCK_DB), task_queues=[queue], task_default_queue="far")

    @app.task(base=SingletonTask, shared=False, name="quiet", singleton={"key": "name", "debounce": 60})
    def quiet(name: str, version: str = "") -> None: ...

    app.finalize()
    for module in (back, marking, doctor):
        monkeypatch.setattr(module, "waits_in_broker", lambda _app: True)
    yield app
    with app.connection_for_write() as connection:
        for name in ("far", *(delaying_queue(queue, wait_s).name for wait_s in (32.0, 0.25))):
            Queue(name)(connection).delete()


@pytest.fixture
def asked(monkeypatch) -> list[str]:
    """The delaying queues that the broker was asked for; it has them all."""
    names: list[str] = []
    monkeypatch.setattr(delay, "declare", lambda _app, queue: names.append(queue.name))
    monkeypatch.setattr(doctor, "declare", lambda _app, queue: names.append(queue.name))
    return names


def messages(app: Celery, queue: str) -> list[Any]:
    """What is in a queue, which is empty then."""
    with app.connection_for_read() as connection, connection.SimpleQueue(Queue(queue)) as found:
        taken = [found.get_nowait() for _ in range(found.qsize())]
        for message in taken:
            message.ack()
        return taken


def waits(app: Celery, message: Any) -> Waits:
    """What a delivery of this message ends with, before the time of its call has come."""
    task = app.tasks["quiet"]
    with delivered(task, message) as told, pytest.raises(Waits) as ended:
        wait_in_broker(task, Call.of("quiet", told))
    return ended.value


@pytest.mark.parametrize("left_s", WAITS_S)
def test_hops_end_at_most_a_quarter_of_a_second_late(left_s):
    """And never before its time; there is about one hop for each binary digit of the seconds."""
    waited_s, hops = 0.0, 0
    while waited_s < left_s or not hops:
        waited_s, hops = waited_s + hop_s(left_s - waited_s), hops + 1
    assert left_s <= waited_s <= left_s + 0.25
    assert hops <= bin(math.ceil(left_s)).count("1") + 3


def test_queues_of_hops_are_few():
    """Powers of two, from a quarter of a second to nine hours: RabbitMQ knows no time to live of 50 days."""
    hops = {hop_s(10.0**exponent / 7) for exponent in range(-4, 10)} | {hop_s(wait_s) for wait_s in WAITS_S}
    assert hops <= {2.0**power for power in range(-2, 16)}
    assert (min(hops), max(hops)) == (0.25, 2.0**15)


def test_debounced_call_is_published_without_an_eta(app):
    """A worker would hold it, in its prefetch: its time stands in its header."""
    app.tasks["quiet"].delay("a")
    (message,) = messages(app, "far")
    assert message.headers["eta"] is None
    assert message.headers[HEADER]["due"] == pytest.approx(time.time() + 60, abs=30)


def test_debounced_call_waits_in_the_broker_as_it_was(app, asked):
    """In a queue that leads back to the one it came by; its body sees the route by which it came."""
    app.tasks["quiet"].apply_async(["a", "1"], headers={"tenant": "acme"}, priority=3)
    (came,) = messages(app, "far")
    came.headers |= {"x-death": [{"count": 1}], "x-first-death-queue": "far.setnx-32s"}
    ended = waits(app, came)
    assert 30 < ended.when <= 60
    (name,) = asked
    (sent,) = messages(app, name)
    assert sent.payload == came.payload
    assert sent.properties["priority"] == 3
    assert sent.headers.pop(HEADER) == {**came.headers.pop(HEADER), "route": ["topics", "by.topic"]}
    assert sent.headers == {name: value for name, value in came.headers.items() if not name.startswith("x-")}


def test_debounced_call_that_the_broker_refuses_to_keep_has_a_countdown(app, monkeypatch, caplog):
    """In its own queue; the warning says what waits in workers, once."""
    monkeypatch.setattr(delay, "declare", raising(AccessRefused("no")))
    for _ in range(2):
        app.tasks["quiet"].delay("a")
        waits(app, *messages(app, "far"))
        (sent,) = messages(app, "far")
        left_s = datetime.fromisoformat(sent.headers["eta"]).timestamp() - time.time()
        assert 30 < left_s <= 60
    (warning,) = [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]
    assert warning.startswith(
        "Debounced calls wait in workers instead of the broker, which refuses the queue far."
    )


def test_debounced_call_fails_if_its_broker_is_away_and_has_its_message_no_more(app, monkeypatch):
    """As any call that is to come back. With acks_late the broker would deliver it again."""
    app.tasks["quiet"].delay("a")
    (came,) = messages(app, "far")
    monkeypatch.setattr(delay, "declare", raising(OperationalError("away")))
    monkeypatch.setattr(back.Message, "send", raising(OperationalError("away")))
    with pytest.raises(LockUnavailable, match="it waits for newer calls"):
        waits(app, came)


@pytest.mark.parametrize(
    ("error", "level", "what"),
    [
        (AccessRefused("no"), "error", "The broker refuses the queue far.setnx-32s-"),
        (OperationalError("away"), "note", "The broker does not answer: OperationalError: away"),
        (None, "ok", "The broker keeps debounced calls, in queues next to far."),
    ],
    ids=["refused", "away", "has"],
)
def test_doctor_tells_whether_debounced_calls_wait_in_the_broker(app, monkeypatch, error, level, what):
    """Where they cannot it is an error, with what to allow; for couriers it is a warning."""
    monkeypatch.setattr(doctor, "declare", raising(error) if error else lambda *_: None)
    couriers, debounce = courier_findings(app)
    assert (couriers.subject, couriers.level) == ("couriers", "warning" if level == "error" else level)
    assert (debounce.subject, debounce.level) == ("debounce", level)
    assert debounce.what.startswith(what)
    if error and level == "error":
        assert "hold the debounced calls of quiet" in debounce.why
        assert debounce.do == couriers.do
        assert r"configure and read '^(far)\.setnx-', and write amq.default" in debounce.do


def test_queue_is_declared_after_another_was_refused(app, monkeypatch):
    """A refusal closes no connection, which the pool would give away closed."""
    with monkeypatch.context() as patch:
        patch.setattr(Queue, "declare", raising(AccessRefused("no")))
        with pytest.raises(AccessRefused):
            declare(app, Queue("refused"))
    declare(app, Queue("far"))
    assert messages(app, "far") == []


def test_doctor_asks_for_no_queues_of_hops_without_a_debounced_task(app, asked):
    """A user need not have rights that no task needs."""
    for task, guard in guarded_tasks(app):  # also what other modules have declared for all apps
        if guard.options.debounce is not None:
            app.tasks.pop(task.name)

    @app.task(base=SingletonTask, shared=False, name="plain", singleton={"on_conflict": "wait"})
    def plain() -> None: ...

    assert [found.subject for found in courier_findings(app)] == ["couriers"]
    assert [name.partition(".setnx-")[2].partition("-")[0] for name in asked] == ["60s", "600s"]
