"""Calls that wait, without a worker: their broker or lock server is gone, or their wake-up is late."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Reject

from celery_setnx import LockForbidden, LockRefused, LockUnavailable, SetnxLock, SingletonTask, log
from celery_setnx.call.back import ComesBack, Message, Waits
from celery_setnx.call.broker import broker_of
from celery_setnx.call.message import Call
from celery_setnx.call.wake import COURIER, give_turns, look_within, wake
from celery_setnx.lock.line import have_begun, park
from celery_setnx.lock.live import NewTerm, change_key_terms
from celery_setnx.lock.names import line_names, ticket_name
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import ORIGINAL, Heir, Holder, task_token
from celery_setnx.lock.verbs import Caller
from celery_setnx.options import Options
from celery_setnx.run import courier
from celery_setnx.run import park as parking
from celery_setnx.run.conflict import Conflict
from celery_setnx.run.courier import ParkedCall
from celery_setnx.run.join import holders_end
from celery_setnx.run.park import Parked
from tests.harness import age, due_set, raising, server_us

KEY = "setnx:{t}"
GONE = "redis://127.0.0.1:1/0"
JSON = "application/json"
HOLDER = Holder("a|0|1f", 20.0, 1, "running", 9.0)


@contextmanager
def running(locks: str, **header: Any) -> Iterator[Any]:
    """A running call whose broker is this process."""
    app = Celery("waiting alone", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=locks, task_publish_retry=False)

    @app.task(base=SingletonTask, shared=False, name="t", singleton={"key": (), "on_conflict": "wait"})
    def t() -> None: ...

    app.finalize()
    task = app.tasks["t"]
    info = {"exchange": "", "routing_key": "far"}
    headers = Call("t", "id-1", key=KEY, **header).as_headers()
    task.push_request(
        id="id-1", args=[], kwargs={}, retries=0, delivery_info=info, called_directly=False, **headers
    )
    yield task
    task.pop_request()


@pytest.fixture
def task() -> Iterator[Any]:
    """A running call whose lock server is gone."""
    with running(GONE, call_id="c") as task:
        yield task


def stand_in_line(*details: Any) -> None:
    """Park, and end as the attempt does if the call waits."""
    _place, parked = parking.park(Conflict(*details))
    if parked is not None:
        raise parked


def wait(task: Any, *, remaining_s: float = 10.0, waiting: int = 0) -> None:
    call = Call("t", "id-1", key=KEY, call_id="c", since=10.0)
    outcome = Outcome(False, holder=HOLDER, remaining_s=remaining_s, server_time=10.0, waiters=waiting)
    stand_in_line(task, call, Options(on_conflict="wait"), outcome)


def couriers(app: Celery, queue: str) -> list[Any]:
    """The couriers in a queue: what they were told."""
    with app.connection_for_read() as connection, connection.SimpleQueue(queue) as messages:
        found = []
        while messages.qsize():
            message = messages.get_nowait()
            assert message.headers["task"] == COURIER
            found.append(message.payload[1])
        return found


def test_call_whose_line_cannot_be_reached_waits_with_its_courier(task, caplog):
    """The courier is sent first, to the queue that the call came from: the call is not lost with the line."""
    with pytest.raises(Parked) as caught:
        wait(task)
    (told,) = couriers(task.app, "far")
    call = ParkedCall.of(told["parked"]).call
    assert (told["key"], call.key, call.task_id, call.since) == (KEY, KEY, "id-1", 10.0)
    assert "t[id-1] waits, and only its courier knows" in caplog.text
    assert 480 <= caught.value.when <= 600


def test_call_that_could_not_be_parked_has_a_courier_that_a_worker_heeds(server, locks, monkeypatch):
    """Redis was away for that one command: a sweep puts the call back, and nobody waits ten minutes."""

    def fail(*_: Any, **__: Any) -> None:
        raise LockUnavailable(KEY, "away for a moment")

    monkeypatch.setattr(parking.line, "park", fail)
    with running(server.url(1), call_id="c") as task:
        with pytest.raises(Parked):
            wait(task)
        epochs = [told["parked"]["epoch"] for told in couriers(task.app, "far")]
    assert [bool(epoch) for epoch in epochs] == [True, False]


def test_call_that_was_not_woken_for_want_of_a_broker_has_its_place_again(server, locks):
    """And the lock is free: an outage of the broker makes nobody wait for longer than it lasts."""
    lock = SetnxLock(locks, KEY, line=True)
    held = lock.acquire().lock
    call = Call("t", "id-1", key=KEY)
    message = Message({"task": "t", "id": "id-1"}, {}, "far", ((), {}, {}), JSON)
    packed = message.packed(Celery(broker="memory://", set_as_current=False), call)
    park(locks, call.place(600), copy=call.copy, since=10.0, call=packed)
    held.release()
    with running(server.url(1)) as task:
        task.app.conf.update(broker_url=GONE, broker_transport_options={"max_retries": 0})
        give_turns(task.app, "t", lock)
        ((_, due_us),) = locks.zrange(due_set(task.app, "t"), 0, -1, withscores=True)
    assert lock.holder() is None
    assert locks.zrange(line_names(KEY)[0], 0, -1, withscores=True) == [("id-1", 10_000_000)]
    assert locks.hget(line_names(KEY)[1], "id-1").startswith("0|")
    assert 0 < due_us / 1e6 - locks.time()[0] <= 6


def test_joiner_that_asks_again_keeps_its_place_and_its_courier(server, locks):
    """Its message may be lost with its worker: the line and its courier know it still, until it has ended."""
    lock = SetnxLock(locks, KEY, line=True)
    held = lock.acquire().lock
    call = Call("t", "id-1", key=KEY, call_id="c", copy="x1", since=10.0, join="dead", has_header=True)
    park(locks, call.place(600), copy="-", since=10.0, call="c")
    held.release()
    with running(server.url(1), call_id="c", copy="x1", since=10.0, join="dead") as task:
        task.app.conf.result_backend = "cache+memory://"
        with pytest.raises(Waits, match="is not stored"):
            holders_end(task, call, Options(on_conflict="join"), None, 10.0)
        with task.app.connection_for_read() as connection, connection.SimpleQueue("far") as messages:
            again = Call.of("t", messages.get_nowait().headers)
    assert (again.task_id, again.copy, again.asked) == ("id-1", "x1", 1)
    assert lock.holder() is None
    assert locks.hget(line_names(KEY)[1], "id-1") == "1|10000000|c"
    assert locks.get(ticket_name(KEY, "id-1", "c")).startswith("0||")


def test_joiner_that_the_broker_does_not_take_back_is_told_once(server, locks, monkeypatch):
    """No patience with Redis ends that, nor does on_redis_error apply."""
    tries: list[int] = []

    def send(*_: Any) -> None:
        tries.append(1)
        raise OSError("refused")

    monkeypatch.setattr(Message, "send", send)
    options = {"on_conflict": "join", "on_redis_error": "run"}
    header = {"call_id": "c", "copy": "x1", "since": 10.0, "join": "dead", "options": options}
    with running(server.url(1), **header) as task:
        task.app.conf.result_backend = "cache+memory://"
        with pytest.raises(
            LockUnavailable, match=r"t\[id-1\] of setnx:{t} could not be sent back to the broker: refused"
        ):
            task()
    assert tries == [1]


def test_woken_call_that_cannot_be_parked_has_a_courier_that_a_worker_heeds(task):
    """Its first courier does not know that it is not in its line."""
    call = Call("t", "id-1", key=KEY, copy="c0ffee", since=10.0, waits=4, join="id-0", asked=7)
    outcome = Outcome(False, holder=HOLDER, remaining_s=10.0, server_time=12.0)
    with pytest.raises(Parked):
        stand_in_line(task, call, Options(on_conflict="join"), outcome)
    (told,) = couriers(task.app, "far")
    assert (ParkedCall.of(told["parked"]).call.task_id, told["parked"]["epoch"]) == ("id-1", "")


@pytest.mark.parametrize("expires", ["9999-12-31T23:59:59+00:00", "0001-01-01T00:00:00+00:00", 1e300])
def test_courier_understands_its_order_whenever_its_call_expires(task, expires):
    """Else it would come no more, and send a call that is to wait."""
    task.request.expires = expires
    with pytest.raises(Parked):
        wait(task)
    (told,) = couriers(task.app, "far")
    until = ParkedCall.of(told["parked"]).until
    assert until == (0.0 if str(expires).startswith("0001") else None)


@pytest.mark.parametrize("had_its_lock", [False, True])
def test_woken_call_that_has_had_its_lock_is_parked_with_another_courier(server, locks, had_its_lock):
    """It came back from under its lock, unasked: its courier may have been told that it has begun."""
    lock = SetnxLock(locks, KEY, line=True)
    call = Call("t", "id-1", key=KEY, call_id="c", copy="a1", since=10.0, waits=1)
    if had_its_lock:
        park(locks, call.place(600), copy=ORIGINAL, since=10.0, call="c")
        lock.acquire(token="id-1|0|1f", caller=Caller(copy="a1", call_id="c")).lock.release()
    lock.acquire(token="id-2|0|2f")
    if not had_its_lock:
        park(locks, call.place(600), copy=ORIGINAL, since=10.0, call="c")
    holder = lock.holder()
    outcome = Outcome(False, holder=holder, ends_first=holder, remaining_s=10.0, server_time=12.0)
    with running(server.url(1), call_id="c") as task:
        with pytest.raises(Parked):
            stand_in_line(task, call, Options(on_conflict="wait"), outcome)
        assert len(couriers(task.app, "far")) == had_its_lock
    assert have_begun(locks, [call.place(600)]) == [None]


def test_line_of_a_lock_that_rests_since_the_conflict_is_due_when_the_rest_is_over(server, locks):
    """Its release has noted nothing, as nobody waited yet: a policy of one's own may take its time."""
    held = SetnxLock(locks, KEY, line=True, lease=30).acquire().lock
    outcome = SetnxLock(locks, KEY, line=True, lease=30).acquire()
    assert held.release(at_least_for=5) == "resting"
    call = Call("t", "id-1", key=KEY, since=outcome.server_time)
    with running(server.url(1)) as task:
        with pytest.raises(Parked):
            stand_in_line(task, call, Options(on_conflict="wait"), outcome)
        assert len(couriers(task.app, "far")) == 1
        due_s = (locks.zscore(due_set(task.app, "t"), KEY) - server_us(locks)) / 1e6
    assert due_s <= 5


def test_line_of_a_call_that_was_paused_is_looked_at_soon(server, locks):
    """Whoever ended the pause has seen nobody there, and no worker will hear of it again."""
    change_key_terms(locks, KEY, NewTerm("pause", 600))
    outcome = SetnxLock(locks, KEY, line=True, lease=30).acquire(token=task_token("id-1", 0, "0a"))
    change_key_terms(locks, KEY, NewTerm("pause", 0))
    assert outcome.paused
    call = Call("t", "id-1", key=KEY, since=outcome.server_time)
    with running(server.url(1)) as task:
        with pytest.raises(Parked):
            stand_in_line(task, call, Options(on_conflict="wait"), outcome)
        assert len(couriers(task.app, "far")) == 1
        due_s = (locks.zscore(due_set(task.app, "t"), KEY) - server_us(locks)) / 1e6
    assert due_s <= 2


@pytest.mark.parametrize("is_free", [True, False], ids=["free for those who wait", "about to end"])
def test_call_that_has_noted_its_line_tells_its_worker_to_look_though_it_parks_later(server, locks, is_free):
    """Nobody else does: who notes it again has not brought the time forward."""
    if not is_free:
        assert SetnxLock(locks, KEY, line=True, lease=1.5).acquire().acquired
    park(locks, Call("t", "first", key=KEY).place(600), copy=ORIGINAL, since=10.0, call="c")
    outcome = SetnxLock(locks, KEY, line=True).acquire()
    assert outcome.is_due == is_free
    call = Call("t", "id-1", key=KEY, since=outcome.server_time)
    with running(server.url(1)) as task:
        if is_free:
            look_within(task.app, "t", KEY, 0.0)  # as its attempt has done
        else:
            outcome = outcome._replace(remaining_s=0.5)
        with pytest.raises(Parked) as caught:
            stand_in_line(task, call, Options(on_conflict="wait"), outcome)
        assert len(couriers(task.app, "far")) == 1
    assert caught.value.look_in_s <= (0.0 if is_free else 0.5)


def test_call_that_no_courier_can_look_after_does_not_wait(task, monkeypatch):
    """Without a broker it fails, naming its key and the broker's error: never a silent drop.

    With acks_late the broker still has it: it is given back.
    """
    monkeypatch.setattr(time, "sleep", lambda _s: None)  # it is delivered again at once
    task.app.conf.update(broker_url="amqp://127.0.0.1:1//", broker_transport_options={"max_retries": 0})
    said = r"t\[id-1\] of setnx:{t} could not be sent back to the broker: .* setnx:{t} is held by token"
    with pytest.raises(LockUnavailable, match=said):
        wait(task)
    task.acks_late = True
    with pytest.raises(Reject) as caught:
        wait(task, remaining_s=0.05)
    assert caught.value.requeue


@pytest.mark.parametrize(
    ("call", "said"),
    [("no/type utf-8 nothing", "which cannot be sent"), ("", "which cannot be sent")],
)
def test_heir_that_cannot_be_sent_raises_nothing(task, caplog, call, said):
    """The body that has just ended has nothing to do with it; the lock goes on when its time is over."""
    caplog.set_level(logging.WARNING)
    wake(task.app, Heir("id-2", call), KEY)
    assert said in caplog.text
    assert "id-2" in caplog.text
    assert "is handed on when its time is over" in caplog.text


def test_woken_call_whose_place_is_refused_says_so(server, locks):
    """Its courier has sent it for that, and comes no more."""
    SetnxLock(locks, KEY, lease=600).acquire()
    age(locks, KEY, 1)  # it is not young
    locks.set(line_names(KEY)[0], "theirs", ex=60)
    waited = {"waits": 1, "since": time.time() - 1, "copy": "a1"}
    with running(server.url(1), **waited) as task, pytest.raises(LockRefused, match="WRONGTYPE"):
        task()


@pytest.mark.parametrize("reply", ["NOAUTH Authentication required.", "NOPERM no 'evalsha'", "READONLY no."])
def test_refusal_that_somebody_mends_is_waited_out(proxy, locks, reply, caplog, monkeypatch):
    """The call asks again, and runs; meanwhile an error in the log says what to do, once."""
    monkeypatch.setattr(log, "_say_again_at", {})
    refused = proxy.fault("answer", containing=b"EVALSHA", reply=f"-{reply}\r\n".encode(), times=3)
    with running(proxy.url(1)) as task, refused as fault:
        assert task() is None
    assert fault.struck == 3
    (error,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "Check the user" in error or "Grant" in error or "at the primary" in error


def test_refusal_that_lasts_for_a_lease_sends_the_call_back(proxy, locks):
    """As an outage does; it is no failure."""
    refused = proxy.fault("answer", containing=b"EVALSHA", reply=b"-NOPERM no 'evalsha'\r\n", times=10**6)
    with running(proxy.url(1), options={"lease": 0.3}) as task, refused:
        with pytest.raises(ComesBack, match="NoPermissionError"):
            task()
        with task.app.connection_for_read() as connection, connection.SimpleQueue("far") as messages:
            assert Call.of("t", messages.get_nowait().headers).waits == 1


def test_courier_that_is_forbidden_to_look_comes_later(task, monkeypatch, caplog):
    """Its call is not sent to fail: it waits until somebody mends that."""
    call = Call("t", "id-1", key=KEY)
    message = Message({"task": "t", "id": "id-1"}, {}, "far", ((), {}, {}), JSON, broker=broker_of(task.app))
    order = ParkedCall(call, message.packed(task.app, call), None, 30.0, 3600.0, 7200.0, "")
    monkeypatch.setattr(courier, "park", raising(LockForbidden(KEY, "NOPERM no 'evalsha'")))
    monkeypatch.setattr(courier, "send_again", raising(AssertionError("it was sent")))
    courier._visit(task, KEY, order.as_kwargs()["parked"])
    assert "The courier of t[id-1] comes back later" in caplog.text
    (told,) = couriers(task.app, "far")
    assert ParkedCall.of(told["parked"]) == replace(order, call=order.call._replace(has_header=True))


def test_courier_of_a_call_that_cannot_be_sent_comes_later(server, locks, caplog):
    """Whatever goes wrong with it. An order of a newer worker, which says more, is understood."""
    call = Call("t", "id-1", key=KEY, since=1.0)
    properties = {"compression": "no such"}
    with running(server.url(1)) as task:
        broker = broker_of(task.app)
        message = Message({"task": "t", "id": "id-1"}, properties, "far", ((), {}, {}), JSON, broker=broker)
        order = ParkedCall(call, message.packed(task.app, call), 2.0, 30.0, 3600.0, 7200.0, "")  # 2.0 is over
        courier._visit(task, KEY, {**order.as_kwargs()["parked"], "colour": "blue"})
        (told,) = couriers(task.app, "far")
    assert f"The courier of {order} comes back later" in caplog.text
    assert ParkedCall.of(told["parked"]).call.task_id == "id-1"


@pytest.mark.parametrize("info", [{"task": COURIER}, {"task": "a", "task_id": "b"}, {}])
def test_holder_says_who_it_is(info):
    """Whatever it knows of itself: a courier names its task, and has no id."""
    said = str(Holder("token", 1.0, 1, "running", 1.0, info))
    assert said.endswith("running since 1970-01-01 00:00:01 UTC")
