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
from celery_setnx.call.wake import COURIER, give_turns, let_the_line_go_on, lines_of
from celery_setnx.connection import client_for
from celery_setnx.lock.line import PASSED_OVER, note_due, park
from celery_setnx.lock.names import line_names
from celery_setnx.lock.record import task_token
from celery_setnx.lock.verbs import Caller
from celery_setnx.run import unswept as unswept_module
from celery_setnx.run.courier import ParkedCall, put_back
from celery_setnx.run.sweep import CourierRequest, Sweep, _couriers_here
from celery_setnx.run.unswept import Unswept
from tests.harness import due_set, raising

JSON = "application/json"


class Shop:
    """An app of the tests, with a broker, a queue, and a worker that sweeps when it is told."""

    def __init__(self, server: Any, broker: str, **tasks: dict[str, Any]) -> None:
        self.app = app = Celery(broker, broker="memory://", set_as_current=False)
        app.conf.update(setnx_prefix="t", setnx_broker=broker, task_default_queue=f"wake-{broker}")
        for name, options in (tasks or {"bill": {"lease": 60}}).items():
            self.guard(name, options)

        @app.task(shared=False, name="plain")
        def plain(account: int) -> None: ...

        app.finalize()
        self.step = Sweep(SimpleNamespace(app=app))
        self.asks(server.url(1))

    def asks(self, url: str) -> None:
        """From now on this is its lock server."""
        self.app.conf.setnx_url = url
        self.app.__dict__.pop("_setnx_clients", None)
        self.step._client = client_for(self.app)

    def guard(self, name: str, options: dict[str, Any]) -> None:
        def body(account: int, note: str = "") -> None: ...

        guarded = {"base": SingletonTask, "singleton": {"key": "account", **options}}
        self.app.task(shared=False, name=name, **guarded)(body)

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

    def order(self, call: Call, text: str = "") -> ParkedCall:
        """What the courier of a call is told."""
        return ParkedCall(call, text or self.packed(call), None, 60.0, 60.0, 600.0, "1")

    def is_asked(self, locks: Any, task_id: str = "b1", task: str = "bill") -> bool:
        """Whether the app's workers are to send a call that another could not send."""
        return locks.zscore(due_set(self.app, task), f"{self.key(task)}\n{task_id}") is not None

    def runs_courier(self, order: Any, **info: Any) -> None:
        """A courier has come, and does what it is for."""
        courier = self.app.tasks[COURIER]
        courier.push_request(id="c", args=[], kwargs={}, delivery_info=info, called_directly=False)
        try:
            courier.run(key=self.key(), parked=order)
        finally:
            courier.pop_request()

    def serve(self, task: str = "bill") -> Any:
        """The lock came free, and this app's worker lets the line go on."""
        return let_the_line_go_on(self.app, task, self.key(task), client_for(self.app))

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
        outcome = lock.acquire(
            token=f"{task_id}|0|{os.urandom(4).hex()}", caller=Caller(copy=f"copy of {task_id}")
        )
        assert outcome.acquired
        return outcome.lock

    def ends(self, held: Any, **options: Any) -> None:
        """A lock is given back by this app's worker, which wakes the next."""
        held.release(**options)
        give_turns(self.app, "bill", held._lock)

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


@pytest.fixture
def a(shop) -> Shop:
    """The app with the broker a, and the one task."""
    return shop("a")


@pytest.fixture
def b(shop) -> Shop:
    """The same with the broker b."""
    return shop("b")


def test_call_is_sent_though_a_sweeper_died_before_it_sent_it(locks, a, b):
    """Its claim ends, and another comes. A call that is sent twice begins once."""
    b.waits("b1", 10.0)
    a.serve()
    b.step._serve = lambda *_: None  # it dies
    b.step.sweep(b.app)
    del b.step._serve
    locks.zincrby(due_set(b.app, "bill"), -3e6, f"{b.key()}\nb1")
    b.step.sweep(b.app)
    assert b.sent() == ["b1"]


def test_calls_of_two_brokers_alternate_in_one_line(locks, a, b):
    """First come first served, whichever broker a call is from.

    The lock is kept for it, and its line is due at once over there; nobody else sends it.
    """
    for place, (at, task_id) in enumerate([(a, "a1"), (b, "b1"), (a, "a2"), (b, "b2")]):
        at.waits(task_id, 10.0 + place)
    a.serve()
    assert a.sent() == ["a1"]
    a.ends(a.begins(locks, "a1"))
    for here, other, task_id in [(b, a, "b1"), (a, b, "a2"), (b, a, "b2")]:
        other.step.sweep(other.app)
        assert (here.sent(), other.sent()) == ([], [])
        assert SetnxLock(locks, a.key()).holder().task_id == task_id
        for _ in range(2):
            here.step.sweep(here.app)
        assert (here.sent(), other.sent()) == ([task_id], [])
        here.ends(here.begins(locks, task_id))


def test_line_goes_on_past_calls_whose_brokers_workers_are_away(locks, caplog, a, b):
    """At once, if nobody has looked at their line when it was due; and it says so."""
    b.waits("b1", 10.0)
    b.waits("b2", 11.0)
    a.waits("a1", 12.0)
    b.overdue(locks)
    a.serve()
    assert a.sent() == ["a1"]
    assert "no worker that has bill looks at its line, with the broker b" in caplog.text
    assert locks.zscore(line_names(a.key())[0], "b1") > PASSED_OVER


def test_call_that_was_passed_over_is_sent_when_its_workers_come(locks, a, b):
    """It need not wait for the end of that, an hour maybe: it comes late, and stands where it stood."""
    b.waits("b1", 10.0)
    b.overdue(locks)
    a.serve()
    assert locks.zscore(line_names(a.key())[0], "b1") > PASSED_OVER
    b.step.sweep(b.app)
    assert b.sent() == ["b1"]
    assert b.begins(locks, "b1")


def test_call_that_has_its_place_again_is_not_sent(locks, a, b):
    """Somebody has given it back meanwhile: what is left is a note that concerns nobody."""
    a.hold(locks)
    b.waits("b1", 10.0)
    note_due(locks, lines_of(b.app), "bill", f"{b.key()}\nb1", within=0)
    b.step.sweep(b.app)
    assert b.sent() == []
    assert not b.is_asked(locks)


def test_call_that_was_overtaken_before_it_was_sent_is_sent(locks, a, b):
    """Whoever finds it at the head takes it for one that is on its way."""
    call = b.waits("b1", 10.0)
    a.serve()
    place = Call("bill", "late", key=call.key).place(600)
    park(locks, place, copy="-", since=20.0, call="?")
    assert a.begins(locks, "late")
    assert locks.hget(line_names(call.key)[1], "b1").startswith("0+|")
    b.step.sweep(b.app)
    assert b.sent() == ["b1"]


def test_call_whose_body_cannot_be_read_here_is_left_to_its_broker(locks, a, b):
    """The other app has other serializers."""
    call = Call("bill", "b1", key=b.key())
    b.waits("b1", 10.0, text=b.packed(call, content_type="application/x-of-theirs"))
    a.serve()
    assert SetnxLock(locks, a.key()).holder().task_id == "b1"
    assert b.is_asked(locks)


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


def test_call_of_another_broker_is_not_sent_while_its_lock_rests(locks, a, b):
    """A worker looks at the line when the rest is over."""
    held = a.hold(locks)
    b.waits("b1", 10.0)
    a.ends(held, at_least_for=20)
    assert (a.sent(), b.sent()) == ([], [])
    due_us = locks.zscore(due_set(a.app, "bill"), a.key())
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
    assert both.is_asked(locks, "r1", "report")
    locks.zincrby(due_set(a.app, "report"), -5e6, f"{both.key('report')}\nr1")
    both.step.sweep(both.app)
    assert both.sent() == ["r1"]


def test_plain_task_is_never_run_from_a_line(locks, a):
    """Who can write to the lock server alone would have any task run."""
    key = "t:{plain:00112233445566778899aabbccddeeff}"
    a.waits("evil", 10.0, task="plain", key=key, text=a.packed(Call("plain", "evil", key=key)))
    for _ in range(2):
        let_the_line_go_on(a.app, "bill", key, client_for(a.app))
        let_the_line_go_on(a.app, "plain", key, client_for(a.app))
        a.step.sweep(a.app)
    assert a.sent() == []


@pytest.mark.parametrize(
    ("changed", "of_call"),
    [
        ({"args": (8,)}, {}),
        ({"args": ()}, {}),
        ({"args": (8,), "options": {}}, {}),
        ({"args": (8,)}, {"options": {"key": ()}}),
        ({"args": (8, "x")}, {"options": {"key": "note", "scope": "bill"}}),
        ({}, {"options": {"scope": "other"}}),
        ({}, {"task_id": "another"}),
        *(({"body": body}, {}) for body in ("[[7], {}]", "[7, 7, 7]")),
        ({"content_type": ["x"]}, {}),
        ({"headers": 5}, {}),
        *((text, {}) for text in ("{}", "?")),
    ],
    ids=str,
)
def test_call_with_other_arguments_than_its_lines_is_not_sent(a, changed, of_call):
    """Nor what is no call at all; and the line goes on with the next."""
    call = Call("bill", "evil", key=a.key())._replace(**of_call)
    a.waits("evil", 10.0, text=changed if isinstance(changed, str) else a.packed(call, **changed))
    a.waits("good", 11.0)
    a.serve()
    assert a.sent() == ["good"]


def test_line_names_no_queue_that_nobody_reads(locks, a):
    """A call goes to one of the app's queues, whatever the line says."""
    call = Call("bill", "b1", key=a.key())
    route = {"exchange": "x", "routing_key": "y"}
    a.waits("b1", 10.0, text=a.packed(call, queue="of somebody else", route=route))
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
    let_the_line_go_on(a.app, "bill", call.key, client_for(a.app))
    assert (a.sent(), asked) == (["b1"], [])


def test_call_whose_key_a_deploy_has_changed_is_sent_by_its_courier(locks, shop):
    """Not from the line, which cannot say that it belongs there."""
    before, after = shop("a"), shop("a", bill={"key": ["account", "note"]})
    call = before.waits("b1", 10.0)
    let_the_line_go_on(after.app, "bill", call.key, client_for(after.app))
    assert after.sent() == []
    assert put_back(after.app, before.order(call), wait_s=0.0) is None
    assert after.sent() == ["b1"]


@pytest.mark.parametrize("is_handed", [False, True])
def test_courier_stamps_its_call_with_the_broker_that_has_delivered_it(locks, is_handed, shop):
    """New workers have another name for the broker, and the line goes on."""
    before, after = shop("before"), shop("after")
    held = None if is_handed else before.hold(locks)
    call = Call("bill", "b1", key=before.key(), since=10.0)
    text = before.packed(call, voucher="")  # it goes by its route, so that it is seen who sends it
    before.waits("b1", 10.0, text=text)
    order = before.order(call, text)
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
    assert locks.zscore(line_names(after.key())[0], "b1") > PASSED_OVER
    SetnxLock(locks, call.key, line=True, lease=60).acquire(token="x" * 8)
    put_back(after.app, before.order(call), wait_s=0.0)
    assert locks.zscore(line_names(after.key())[0], "b1") == 10e6


def held_courier(at: Shop, order: ParkedCall) -> CourierRequest:
    """A courier that a worker of the app holds."""
    headers, body = {"task": COURIER, "id": "c", "lang": "py"}, ((), order.as_kwargs(), {})
    message = SimpleNamespace(
        headers=headers, payload=body, properties={}, delivery_info={}, delivery_tag="1", body=b"", _raw=b"",
        content_type=JSON, content_encoding="utf-8",
    )  # fmt: skip
    told = {"app": at.app, "task": at.app.tasks[COURIER], "body": body, "headers": headers}
    return CourierRequest(message, **told, hostname="here", decoded=True, utc=True)


def test_worker_looks_after_couriers_of_its_own_app(a, b):
    """A process may have embedded workers of two apps: neither parks or sends the other's calls."""
    request = held_courier(b, b.order(b.waits("b1", 10.0)))
    assert (_couriers_here(a.app), _couriers_here(b.app)) == ([], [request])


def test_worker_stamps_calls_of_couriers_that_it_holds(locks, shop):
    """At once, and not when they come in ten minutes."""
    before, after = shop("before"), shop("after")
    before.hold(locks)
    call = before.waits("b1", 10.0)
    request = held_courier(after, before.order(call))
    after.step.sweep(after.app)
    kept = locks.hget(line_names(call.key)[1], "b1").split("|", 2)[2]
    assert json.loads(kept)["broker"] == "after"
    assert request in after.step._stamped


def changed_order(at: Shop, changed: Any = (), queue: str = "") -> dict[str, Any]:
    """What a courier is told of the call b1, in plain values."""
    call = Call("bill", "b1", key=at.key(), since=10.0)
    text = at.packed(call, queue=queue) if queue else ""
    return {**at.order(call, text).as_kwargs()["parked"], **dict(changed)}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"lease": value} for value in (None, 10**400, float("inf"))),
        *({name: value} for name, value in (("queue_lease", "60"), ("remember", -1), ("until", []))),
        *({name: value} for name, value in (("epoch", 5), ("resent", "yes"))),
        *({"message": value} for value in (5, "no message")),
        *({"call": value} for value in ({}, {"singleton": {"task": "bill", "id": "b1", "attempt": 0}}, 5)),
    ],
    ids=str,
)
def test_malformed_courier_comes_once(a, caplog, wrong):
    """It is said, and the call is sent if it can be read; nothing comes again for ever."""
    a.runs_courier(changed_order(a, wrong))
    assert "is dropped as malformed" in caplog.text
    assert a.key() in caplog.text
    assert a.sent() == ([] if "message" in wrong else ["b1"])


@pytest.mark.parametrize("order", [5, "text", [], {}], ids=str)
def test_courier_without_an_order_comes_once(a, order, caplog):
    """Whatever is in its place."""
    a.runs_courier(order)
    assert (
        f"A courier of {a.key()} is dropped as malformed; if it carried a call, that call is lost"
        in caplog.text
    )


@pytest.mark.parametrize("error", [QueueNotFound("'far'"), KeyError("far"), ValueError("far")], ids=repr)
@pytest.mark.parametrize("wrong", [{}, {"lease": None}], ids=["order", "no order"])
def test_courier_comes_later_if_the_routes_of_its_app_fail(a, monkeypatch, caplog, error, wrong):
    """The call is not lost with a router that has met its own trouble; it says what to mend."""
    monkeypatch.setattr(a.app.amqp.router, "route", raising(error))
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    order = changed_order(a, wrong, queue="elsewhere")
    with pytest.raises(Reject, match="fix task_routes") if wrong else nullcontext():
        a.runs_courier(order, exchange="", routing_key="far")
    if not wrong:
        assert "The courier of bill[b1] comes back later: the app's routes do not say" in caplog.text
        with a.app.connection_for_read() as connection, connection.SimpleQueue("far") as messages:
            assert messages.get_nowait().payload[1]["parked"]["message"] == order["message"]


def test_courier_that_meets_a_time_limit_is_delivered_again(a, monkeypatch):
    """That of the app's for all its tasks: acknowledged, nobody would look after its call."""
    monkeypatch.setattr(Message, "unpacked", raising(SoftTimeLimitExceeded()))
    monkeypatch.setattr(time, "sleep", lambda _s: None)
    with pytest.raises(Reject) as caught:
        a.runs_courier(changed_order(a))
    assert caught.value.requeue


def warnings(caplog: Any) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def look(at: Shop, times: int = 1) -> None:
    """A worker of the app looks for lines that nobody sweeps, with every sweep."""
    for _ in range(times):
        at.step._unswept._next = 0.0
        at.step.sweep(at.app)


@pytest.mark.parametrize(
    ("broker", "prefix", "words"),
    [
        ("after", "t", ["'before'", "set setnx_broker to the same text for all its workers"]),
        ("before", "other", ["their setnx_prefix is 't', and this worker has 'other'"]),
    ],
    ids=["broker", "prefix"],
)
def test_worker_warns_of_lines_that_it_has_another_name_for(locks, shop, caplog, broker, prefix, words):
    """They are as good as lost until their couriers come; it says once what to do."""
    before, after = shop("before"), shop(broker)
    look(before)
    before.waits("b1", 10.0)
    if broker == "after":
        look(after)
        assert warnings(caplog) == []
    before.overdue(locks)
    after.app.conf.setnx_prefix = prefix
    look(after, times=2)
    (said,) = warnings(caplog)
    assert all(word in said for word in (before.key(), *words))


def test_worker_does_not_warn_of_lines_in_which_nobody_waits(locks, caplog, shop):
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


def test_sweep_goes_on_where_the_list_of_brokers_is_forbidden(server, limited, locks, caplog, monkeypatch, a):
    """An ACL may allow keys of the app's prefix alone: it says what to grant, and looks again in a minute."""
    monkeypatch.setattr(log, "_say_again_at", {})
    a.asks(limited("~t:*", "+@all"))
    a.waits("b1", 10.0)
    a.overdue(locks)
    look(a)
    assert a.sent() == ["b1"]
    assert 30 < a.step._unswept._next - time.monotonic() <= 60
    (said,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert "setnx:brokers" in said
    assert "Grant its user what is missing" in said
    a.asks(server.url(1))
    look(a)
    assert locks.exists("setnx:brokers")


def test_outage_does_not_end_the_watch(monkeypatch, shop):
    """It looks again."""
    a, watch = shop("a"), Unswept()
    monkeypatch.setattr(unswept_module, "note_lines", raising(ConnectionError))
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
