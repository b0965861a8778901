"""Who sends a call from a line: a worker of its broker that knows its task, if it belongs there."""

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, uuid
from celery.exceptions import QueueNotFound, Reject

from celery_setnx import SetnxLock, SingletonTask, log
from celery_setnx.call.back import Message
from celery_setnx.call.broker import broker_of
from celery_setnx.call.message import Call
from celery_setnx.call.wake import COURIER, let_the_line_go_on, lines_of, wake_all
from celery_setnx.connection import client_for
from celery_setnx.lock.line import PASSED_OVER, note_due, park
from celery_setnx.lock.names import line_names
from celery_setnx.lock.record import task_token
from celery_setnx.run import unswept as unswept_module
from celery_setnx.run.courier import Order, put_back
from celery_setnx.run.sweep import CourierRequest, Sweep, _couriers_here
from celery_setnx.run.unswept import Unswept
from tests.harness import due_set, raising

JSON = "application/json"


class Shop:
    """An app of the tests, with a broker, a queue, and a worker that sweeps when it is told."""

    def __init__(self, server: Any, broker: str, **tasks: dict[str, Any]) -> None:
        self.app = app = Celery(broker, broker="memory://", set_as_current=False)
        app.conf.update(
            setnx_url=server.url(1),
            setnx_prefix="t",
            setnx_broker=broker,
            task_default_queue=f"wake-{broker}",
        )
        for name, options in (tasks or {"bill": {"lease": 60}}).items():
            self.guard(name, options)

        @app.task(shared=False, name="plain")
        def plain(account: int) -> None: ...

        app.finalize()
        self.step = Sweep(SimpleNamespace(app=app))
        self.step._client = client_for(app)

    def guard(self, name: str, options: dict[str, Any]) -> None:
        def body(account: int, note: str = "") -> None: ...

        self.app.task(base=SingletonTask, shared=False, name=name, singleton={"key": "account", **options})(
            body
        )

    def key(self, task: str = "bill", account: int = 7) -> str:
        return str(self.app.tasks[task].lock_key(account))

    def packed(self, call: Call, args: Any = (7,), **changed: Any) -> str:
        """What the call is woken with, changed by whoever can write to the line."""
        headers = {"task": call.task, "id": call.task_id}
        queue = self.app.conf.task_default_queue
        message = Message(headers, {}, queue, (args, {}, {}), JSON, broker=broker_of(self.app))
        told = json.loads(message.packed(self.app, call))
        return json.dumps({**told, **changed})

    def waits(self, task_id: str, since: float, *, task: str = "bill", text: str = "", key: str = "") -> Call:
        """A call of the app is in the line of its lock, which is noted as due."""
        call = Call(task, task_id, key=key or self.key(task), since=since)
        note_due(client_for(self.app), lines_of(self.app), task, call.key, within=30)
        packed = text or self.packed(call)
        park(client_for(self.app), call.place(600), copy=call.copy, since=since, call=packed)
        return call

    def serve(self, task: str = "bill") -> Any:
        """The lock came free, and this app's worker lets the line go on."""
        return let_the_line_go_on(self.app, task, self.key(task))

    def sent(self) -> list[str]:
        """The calls, by id, that have been sent to the app's queue since it was asked last."""
        queue, found = self.app.conf.task_default_queue, []
        with self.app.connection_for_read() as connection, connection.SimpleQueue(queue) as messages:
            while messages.qsize():
                message = messages.get_nowait()
                message.ack()
                found.append(message.headers["id"])
        return found

    def hold(self, locks: Any) -> Any:
        """Somebody has the lock."""
        return SetnxLock(locks, self.key(), line=True, lease=60).acquire().lock

    def begins(self, locks: Any, task_id: str) -> Any:
        """A call has come, and has the lock."""
        lock = SetnxLock(locks, self.key(), line=True, lease=60)
        outcome = lock.acquire(token=f"{task_id}|0|{os.urandom(4).hex()}", copy=f"copy of {task_id}")
        assert outcome.acquired
        return outcome.lock

    def ends(self, held: Any, **options: Any) -> None:
        """A lock is given back by this app's worker, which wakes the next."""
        held.release(**options)
        wake_all(self.app, held._lock)

    def overdue(self, locks: Any, task: str = "bill", by_s: float = 60) -> None:
        """The app's workers have not looked at the line when it was due."""
        locks.zincrby(due_set(self.app, task), -(30 + by_s) * 1e6, self.key(task))


@pytest.fixture
def shop(server, locks) -> Iterator[Callable[..., Shop]]:
    """Makes apps with a broker each, which share the lock server."""
    made: list[Shop] = []

    def make(broker: str = "a", **tasks: dict[str, Any]) -> Shop:
        made.append(Shop(server, broker, **tasks))
        return made[-1]

    yield make
    for each in made:
        each.sent()


def test_call_of_another_broker_is_sent_by_its_own_worker(locks, shop):
    """The lock is kept for it, and its line is due at once over there; nobody else sends it."""
    a, b = shop("a"), shop("b")
    b.waits("b1", 10.0)
    served = a.serve()
    assert served.heir.task_id == "b1"
    assert (a.sent(), b.sent()) == ([], [])
    a.step.sweep(a.app)
    assert SetnxLock(locks, a.key()).holder().task_id == "b1"
    b.step.sweep(b.app)
    assert (a.sent(), b.sent()) == ([], ["b1"])
    b.step.sweep(b.app)
    assert b.sent() == []
    assert b.begins(locks, "b1")


def test_call_is_sent_though_a_sweeper_died_before_it_sent_it(locks, shop):
    """Its claim ends, and another comes. A call that is sent twice begins once."""
    a, b = shop("a"), shop("b")
    b.waits("b1", 10.0)
    a.serve()
    b.step._serve = lambda *_: None  # it dies
    b.step.sweep(b.app)
    del b.step._serve
    locks.zincrby(due_set(b.app, "bill"), -3e6, f"{b.key()}\nb1")
    b.step.sweep(b.app)
    assert b.sent() == ["b1"]


def test_calls_of_two_brokers_alternate_in_one_line(locks, shop):
    """First come first served, whichever broker a call is from."""
    a, b = shop("a"), shop("b")
    for place, (at, task_id) in enumerate([(a, "a1"), (b, "b1"), (a, "a2"), (b, "b2")]):
        at.waits(task_id, 10.0 + place)
    a.serve()
    for here, other, task_id in [(a, b, "a1"), (b, a, "b1"), (a, b, "a2"), (b, a, "b2")]:
        here.step.sweep(here.app)
        assert (here.sent(), other.sent()) == ([task_id], [])
        here.ends(here.begins(locks, task_id))


def test_line_goes_on_past_calls_whose_brokers_workers_are_away(locks, shop, caplog):
    """At once, if nobody has looked at their line when it was due; and it says so."""
    a, b = shop("a"), shop("b")
    b.waits("b1", 10.0)
    b.waits("b2", 11.0)
    a.waits("a1", 12.0)
    b.overdue(locks)
    a.serve()
    assert a.sent() == ["a1"]
    assert "no worker that has bill looks at its line, with the broker b" in caplog.text
    assert locks.zscore(line_names(a.key())[0], "b1") > PASSED_OVER


def test_call_that_was_passed_over_is_sent_when_its_workers_come(locks, shop):
    """It need not wait for the end of that, an hour maybe: it comes late, and stands where it stood."""
    a, b = shop("a"), shop("b")
    b.waits("b1", 10.0)
    b.overdue(locks)
    a.serve()
    assert locks.zscore(line_names(a.key())[0], "b1") > PASSED_OVER
    b.step.sweep(b.app)
    assert b.sent() == ["b1"]
    assert b.begins(locks, "b1")


def test_call_that_has_its_place_again_is_not_sent(locks, shop):
    """Somebody has given it back meanwhile: what is left is a note that concerns nobody."""
    a, b = shop("a"), shop("b")
    a.hold(locks)
    b.waits("b1", 10.0)
    note_due(locks, lines_of(b.app), "bill", f"{b.key()}\nb1", within=0)
    b.step.sweep(b.app)
    assert b.sent() == []
    assert locks.zscore(due_set(b.app, "bill"), f"{b.key()}\nb1") is None


def test_call_that_was_overtaken_before_it_was_sent_is_sent(locks, shop):
    """Whoever finds it at the head takes it for one that is on its way."""
    a, b = shop("a"), shop("b")
    call = b.waits("b1", 10.0)
    a.serve()
    place = Call("bill", "late", key=call.key).place(600)
    park(locks, place, copy="-", since=20.0, call="?")
    assert a.begins(locks, "late")
    assert locks.hget(line_names(call.key)[1], "b1").startswith("0+|")
    b.step.sweep(b.app)
    assert b.sent() == ["b1"]


def test_call_whose_body_cannot_be_read_here_is_left_to_its_broker(locks, shop):
    """The other app has other serializers."""
    a, b = shop("a"), shop("b")
    call = Call("bill", "b1", key=b.key())
    b.waits("b1", 10.0, text=b.packed(call, content_type="application/x-of-theirs"))
    a.serve()
    assert SetnxLock(locks, a.key()).holder().task_id == "b1"
    assert locks.zscore(due_set(b.app, "bill"), f"{b.key()}\nb1") is not None


def test_line_hears_of_a_raised_limit_when_a_worker_looks_at_it(locks, shop):
    """Nobody comes, and nobody ends: a worker that knows of two more permits hands them out."""
    before, after = shop("a"), shop("a", bill={"lease": 60, "limit": 3})
    before.hold(locks)
    for place, task_id in enumerate(("a1", "a2", "a3")):
        before.waits(task_id, 10.0 + place)
    before.serve()
    assert before.sent() == []
    after.serve()
    assert after.sent() == ["a1", "a2"]


def test_call_of_another_broker_is_not_sent_while_its_lock_rests(locks, shop):
    """Its own workers look at the line when the rest is over."""
    a, b = shop("a"), shop("b")
    held = a.hold(locks)
    b.waits("b1", 10.0)
    a.ends(held, at_least_for=20)
    assert (a.sent(), b.sent()) == ([], [])
    due_us = locks.zscore(due_set(b.app, "bill"), b.key())
    assert 0 < due_us / 1e6 - locks.time()[0] <= 21


@pytest.mark.parametrize("is_plain", [False, True], ids=["unknown", "plain"])
def test_call_of_a_task_that_is_not_guarded_here_is_sent_by_a_worker_where_it_is(locks, shop, is_plain):
    """Two tasks share a lock, and not all workers have both."""
    a = shop("a", bill={"scope": "accounts"})
    both = shop("a", bill={"scope": "accounts"}, report={"scope": "accounts"})
    if is_plain:

        @a.app.task(shared=False, name="report")
        def report(account: int) -> None: ...

    both.waits("r1", 10.0, task="report")
    a.serve()
    a.step.sweep(a.app)
    assert a.sent() == []
    entry = f"{both.key('report')}\nr1"
    assert locks.zscore(due_set(a.app, "report"), entry) is not None
    locks.zincrby(due_set(a.app, "report"), -5e6, entry)
    both.step.sweep(both.app)
    assert both.sent() == ["r1"]


def test_plain_task_is_never_run_from_a_line(locks, shop):
    """Who can write to the lock server alone would have any task run."""
    a = shop("a")
    key = "t:{plain:00112233445566778899aabbccddeeff}"
    a.waits("evil", 10.0, task="plain", key=key, text=a.packed(Call("plain", "evil", key=key)))
    for _ in range(2):
        let_the_line_go_on(a.app, "bill", key)
        let_the_line_go_on(a.app, "plain", key)
        a.step.sweep(a.app)
    assert a.sent() == []


@pytest.mark.parametrize(
    "forge",
    [
        lambda shop, call: shop.packed(call, args=(8,)),
        lambda shop, call: shop.packed(call, args=()),
        lambda shop, call: shop.packed(call, args=(8,), options={}),
        lambda shop, call: shop.packed(call._replace(options={"key": ()}), args=(8,)),
        lambda shop, call: shop.packed(
            call._replace(options={"key": "note", "scope": "bill"}), args=(8, "x")
        ),
        lambda shop, call: shop.packed(call._replace(options={"scope": "other"})),
        lambda shop, call: shop.packed(call._replace(task_id="another")),
        lambda shop, call: shop.packed(call, body="[[7], {}]"),
        lambda shop, call: shop.packed(call, body="[7, 7, 7]"),
        lambda shop, call: shop.packed(call, content_type=["x"]),
        lambda shop, call: shop.packed(call, headers=5),
        lambda shop, call: "{}",
        lambda shop, call: "",
    ],
)
def test_call_with_other_arguments_than_its_lines_is_not_sent(locks, shop, forge):
    """Nor what is no call at all; and the line goes on with the next."""
    a = shop("a")
    call = Call("bill", "evil", key=a.key())
    a.waits("evil", 10.0, text=forge(a, call) or "?")
    a.waits("good", 11.0)
    a.serve()
    assert a.sent() == ["good"]


def test_line_names_no_queue_that_nobody_reads(locks, shop):
    """A call goes to one of the app's queues, whatever the line says."""
    a = shop("a")
    call = Call("bill", "b1", key=a.key())
    a.waits(
        "b1", 10.0, text=a.packed(call, queue="of somebody else", route={"exchange": "x", "routing_key": "y"})
    )
    a.serve()
    assert a.sent() == ["b1"]


def test_callable_key_is_not_asked_from_a_line(locks, shop):
    """It is the user's code, which may answer otherwise in a worker's parent, or open what a fork shares."""
    asked = []

    def key(account: int, note: str = "") -> int:
        asked.append(account)
        return account

    a = shop("a", bill={"key": key})
    call = a.waits("b1", 10.0)
    del asked[:]
    let_the_line_go_on(a.app, "bill", call.key)
    assert (a.sent(), asked) == (["b1"], [])


def test_call_whose_key_a_deploy_has_changed_is_sent_by_its_courier(locks, shop):
    """Not from the line, which cannot say that it belongs there."""
    before, after = shop("a"), shop("a", bill={"key": ["account", "note"]})
    call = before.waits("b1", 10.0)
    order = Order(call, before.packed(call), None, 60.0, 60.0, 600.0, "")
    let_the_line_go_on(after.app, "bill", call.key)
    assert after.sent() == []
    assert put_back(after.app, order, wait_s=0.0) is None
    assert after.sent() == ["b1"]


@pytest.mark.parametrize("is_handed", [False, True])
def test_courier_stamps_its_call_with_the_broker_that_has_delivered_it(locks, shop, is_handed):
    """New workers have another name for the broker, and the line goes on."""
    before, after = shop("before"), shop("after")
    held = None if is_handed else before.hold(locks)
    call = Call("bill", "b1", key=before.key(), since=10.0)
    text = before.packed(call, voucher="")  # it goes by its route, so that it is seen who sends it
    before.waits("b1", 10.0, text=text)
    order = Order(call, text, None, 60.0, 60.0, 600.0, "")
    if is_handed:
        after.serve()  # left to workers that come no more
    assert put_back(after.app, order, wait_s=0.0)
    if held is not None:
        after.ends(held)
    assert (before.sent(), after.sent()) == ([], ["b1"])


def test_call_that_was_passed_over_has_its_place_again_when_its_courier_comes(locks, shop):
    """It can be sent now."""
    before, after = shop("before"), shop("after")
    call = before.waits("b1", 10.0)
    before.overdue(locks)
    after.serve()
    assert locks.zscore(line_names(call.key)[0], "b1") > PASSED_OVER
    SetnxLock(locks, call.key, line=True, lease=60).acquire(token="x" * 8)
    put_back(after.app, Order(call, before.packed(call), None, 60.0, 60.0, 600.0, ""), wait_s=0.0)
    assert locks.zscore(line_names(call.key)[0], "b1") == 10e6


def held_courier(at: Shop, order: Order) -> CourierRequest:
    """A courier that a worker of the app holds."""
    task = at.app.tasks[COURIER]
    message = SimpleNamespace(
        headers={"task": COURIER, "id": "c", "lang": "py"},
        properties={},
        payload=((), order.as_kwargs(), {}),
        body=b"",
        content_type=JSON,
        content_encoding="utf-8",
        delivery_info={},
        delivery_tag="1",
        _raw=b"",
    )
    return CourierRequest(
        message, app=at.app, task=task, hostname="here", body=message.payload, headers=message.headers,
        decoded=True, utc=True,
    )  # fmt: skip


def test_worker_looks_after_couriers_of_its_own_app(locks, shop):
    """A process may have embedded workers of two apps: neither parks or sends the other's calls."""
    a, b = shop("a"), shop("b")
    call = b.waits("b1", 10.0)
    request = held_courier(b, Order(call, b.packed(call), None, 60.0, 60.0, 600.0, ""))
    assert _couriers_here(a.app) == []
    assert _couriers_here(b.app) == [request]


def test_worker_stamps_calls_of_couriers_that_it_holds(locks, shop):
    """At once, and not when they come in ten minutes."""
    before, after = shop("before"), shop("after")
    before.hold(locks)
    call = before.waits("b1", 10.0)
    request = held_courier(after, Order(call, before.packed(call), None, 60.0, 60.0, 600.0, ""))
    after.step.sweep(after.app)
    kept = locks.hget(line_names(call.key)[1], "b1").split("|", 2)[2]
    assert json.loads(kept)["broker"] == "after"
    assert request in after.step._stamped


ORDER: dict[str, Any] = {
    "until": None, "lease": 60.0, "queue_lease": 60.0, "remember": 600.0, "epoch": "1", "resent": False,
}  # fmt: skip


@pytest.mark.parametrize(
    "wrong",
    [
        {"lease": None},
        {"lease": 10**400},
        {"lease": float("inf")},
        {"queue_lease": "60"},
        {"remember": -1},
        {"until": []},
        {"epoch": 5},
        {"resent": "yes"},
        {"message": 5},
        {"message": "no message"},
        {"call": {}},
        {"call": {"singleton": {"task": "bill", "id": "b1", "attempt": 0}}},
        {"call": 5},
    ],
    ids=str,
)
def test_malformed_courier_comes_once(locks, shop, wrong, caplog):
    """It is said, and the call is sent if it can be read; nothing comes again for ever."""
    a = shop("a")
    call = Call("bill", "b1", key=a.key(), since=10.0)
    order = {**ORDER, "call": call.as_headers(), "message": a.packed(call), **wrong}
    courier = a.app.tasks[COURIER]
    courier.push_request(id="c", args=[], kwargs={}, delivery_info={}, called_directly=False)
    courier.run(key=a.key(), order=order)
    courier.pop_request()
    assert "comes no more" in caplog.text
    assert a.key() in caplog.text
    assert a.sent() == ([] if "message" in wrong else ["b1"])


@pytest.mark.parametrize("order", [5, "text", [], {}], ids=str)
def test_courier_without_an_order_comes_once(locks, shop, order, caplog):
    """Whatever is in its place."""
    a = shop("a")
    a.app.tasks[COURIER].run(key=a.key(), order=order)
    assert f"A courier of {a.key()} comes no more, and the call that it looks after is lost" in caplog.text


@pytest.mark.parametrize("error", [QueueNotFound("'far'"), KeyError("far"), ValueError("far")], ids=repr)
@pytest.mark.parametrize("wrong", [{}, {"lease": None}], ids=["order", "no order"])
def test_courier_comes_later_if_the_routes_of_its_app_fail(locks, shop, monkeypatch, caplog, error, wrong):
    """The call is not lost with a router that has met its own trouble; it says what to mend."""
    a = shop("a")
    monkeypatch.setattr(a.app.amqp.router, "route", raising(error))
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    call = Call("bill", "b1", key=a.key(), since=10.0)
    order = {**ORDER, "call": call.as_headers(), "message": a.packed(call, queue="elsewhere"), **wrong}
    courier = a.app.tasks[COURIER]
    info = {"exchange": "", "routing_key": "far"}
    courier.push_request(id="c", args=[], kwargs={}, delivery_info=info, called_directly=False)
    with pytest.raises(Reject, match="mend task_routes") if wrong else nullcontext():
        courier.run(key=a.key(), order=order)
    courier.pop_request()
    if not wrong:
        assert "The courier of bill[b1] comes back later: the app's routes do not say" in caplog.text
        with a.app.connection_for_read() as connection, connection.SimpleQueue("far") as messages:
            assert messages.get_nowait().payload[1]["order"]["message"] == order["message"]


def test_courier_that_meets_a_time_limit_is_delivered_again(locks, shop, monkeypatch):
    """That of the app's for all its tasks: acknowledged, nobody would look after its call."""
    a = shop("a")
    monkeypatch.setattr(Message, "unpacked", raising(SoftTimeLimitExceeded()))
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    call = Call("bill", "b1", key=a.key(), since=10.0)
    with pytest.raises(Reject) as caught:
        a.app.tasks[COURIER].run(
            key=a.key(), order={**ORDER, "call": call.as_headers(), "message": a.packed(call)}
        )
    assert caught.value.requeue


def warnings(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def look(at: Shop, times: int = 1) -> None:
    """A worker of the app looks for lines that nobody sweeps, with every sweep."""
    for _ in range(times):
        at.step._unswept._next = 0.0
        at.step.sweep(at.app)


def test_worker_warns_of_lines_that_name_its_broker_otherwise(locks, shop, caplog):
    """Once, and it says what to do."""
    before, after = shop("before"), shop("after")
    look(before)
    before.waits("b1", 10.0)
    look(after)
    assert warnings(caplog) == []
    before.overdue(locks)
    look(after, times=2)
    (said,) = warnings(caplog)
    assert before.key() in said
    assert "'before'" in said
    assert "set setnx_broker to the same text for all its workers" in said


def test_worker_warns_of_lines_under_another_prefix(locks, shop, caplog):
    """They are as good as lost until their couriers come."""
    before, after = shop("a"), shop("a")
    look(before)
    before.waits("b1", 10.0)
    before.overdue(locks)
    after.app.conf.setnx_prefix = "other"
    look(after, times=2)
    (said,) = warnings(caplog)
    assert "was noted with setnx_prefix 't', and this worker has 'other'" in said


def test_worker_does_not_warn_of_lines_in_which_nobody_waits(locks, shop, caplog):
    """Nor of another app's on the same server."""
    before, after = shop("before"), shop("after")
    look(before)
    note_due(locks, lines_of(before.app), "bill", before.key(), within=30)
    before.overdue(locks)
    look(after)
    after.app.conf.setnx_prefix = "other"
    before.waits("b1", 10.0)
    before.overdue(locks)
    look(after)
    assert warnings(caplog) == []


def test_sweep_goes_on_where_the_list_of_brokers_is_forbidden(
    server, limited, locks, shop, caplog, monkeypatch
):
    """An ACL may allow keys of the app's prefix alone: it says what to grant, and looks again in a minute."""
    monkeypatch.setattr(log, "_say_again_at", {})
    a = shop("a")
    a.app.conf.setnx_url = limited("~t:*", "+@all")
    a.app.__dict__.pop("_setnx_clients", None)
    a.step._client = client_for(a.app)
    a.waits("b1", 10.0)
    a.overdue(locks)
    look(a)
    assert a.sent() == ["b1"]
    assert 30 < a.step._unswept._next - time.monotonic() <= 60
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "setnx:brokers" in said
    assert "Grant its user what is missing" in said
    a.app.conf.setnx_url = server.url(1)
    a.app.__dict__.pop("_setnx_clients", None)
    a.step._client = client_for(a.app)
    look(a)
    assert locks.exists("setnx:brokers")


def test_outage_does_not_end_the_watch(monkeypatch, shop):
    """It looks again."""
    a, watch = shop("a"), Unswept()
    monkeypatch.setattr(unswept_module, "note_lines", lambda *_: (_ for _ in ()).throw(ConnectionError()))
    with pytest.raises(ConnectionError):
        watch.look(a.app, a.step._client, None)


def test_line_goes_on_past_a_lock_that_is_held_for_a_retry_which_has_run(server, locks):
    """The lock server came back with older data, and nobody asks for the lock anew."""
    shop, other = Shop(server, "older"), uuid()
    shop.app.conf.result_backend = "cache+memory://"
    backend = shop.app.tasks["bill"].backend
    backend.persistent = True
    SetnxLock(locks, shop.key(), line=True).acquire(token=task_token(other, 0, "ab")).lock.hold(3600)
    shop.waits("w1", 1.0)
    assert (shop.serve().heir, shop.sent()) == (None, [])
    backend.mark_as_done(other, "result")
    assert (shop.serve().heir.task_id, shop.sent()) == ("w1", ["w1"])
