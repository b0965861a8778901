"""A soft time limit, which may strike anywhere in a task's process: it is the body's, and nobody keeps it."""

import pydoc
from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.task import Context

from celery_setnx import Conflict, SetnxLock, SingletonTask
from celery_setnx.address import _provider
from celery_setnx.call import arrived, delay
from celery_setnx.call.back import Dropped, Message, come_back, known_result
from celery_setnx.call.message import Call
from celery_setnx.call.queues import delayed_way_to
from celery_setnx.call.wake import give_turns
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockUnavailable
from celery_setnx.lock.line import park
from celery_setnx.lock.names import line_names, ticket_name
from celery_setnx.run import events
from celery_setnx.signals import lock_woken
from tests.conftest import LOCK_DB
from tests.harness import raising

STRUCK = raising(SoftTimeLimitExceeded())


class Slow:
    """A value that takes too long to serialize."""

    def __reduce__(self) -> Any:
        raise SoftTimeLimitExceeded

    __json__ = __reduce__


@pytest.fixture
def task(server, locks) -> Iterator[Any]:
    """A running call of a guarded task; its broker is this process."""
    app = Celery("limited", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(LOCK_DB), setnx_prefix="t", task_default_queue="limited")

    @app.task(base=SingletonTask, shared=False, name="limited", singleton={"on_conflict": "wait"})
    def limited(value: Any = None) -> None: ...

    app.finalize()
    info = {"exchange": "", "routing_key": "limited"}
    limited.push_request(id="id-1", args=[], kwargs={}, delivery_info=info, called_directly=False)
    yield app.tasks["limited"]
    limited.pop_request()
    client_for(app).close()


def _keeps_what_arrived(task: Any, _patch: Any) -> None:
    arrived._keep(Context(id="id-2", args=[Slow()], called_directly=False, is_eager=False))


def _asks_if_it_is_data(task: Any, _patch: Any) -> None:
    arrived._is_data(Slow())


def _asks_the_backend(task: Any, patch: Any) -> None:
    patch.setattr(task.backend, "get_task_meta", STRUCK)
    known_result(task.backend, "id-1", "a call")


def _declares_a_queue(task: Any, patch: Any) -> None:
    patch.setattr(delay, "declare", STRUCK)
    delay.declared(task.app, "limited", 60.0)


def _binds_a_queue(task: Any, patch: Any) -> None:
    patch.setattr("celery_setnx.call.queues.detect_quorum_queues", lambda *_: (True, "limited"))
    patch.setattr("kombu.transport.memory.Channel.queue_bind", STRUCK)
    delayed_way_to(task.app, "limited", 5.0)


def _comes_back(task: Any, patch: Any) -> None:
    patch.setattr(Message, "send", STRUCK)
    come_back(task, Call("limited", "id-1", key="t:{limited}"), 1.0, "it is held")


def _comes_back_late(task: Any, patch: Any) -> None:
    patch.setattr(task, "acks_late", True)
    _comes_back(task, patch)


def _serializes_what_comes_back(task: Any, _patch: Any) -> None:
    task.request.args = [Slow()]
    vars(task.request).pop(arrived._KEPT)
    come_back(task, Call("limited", "id-1", key="t:{limited}"), 1.0, "it is held")


def _sends_an_event(task: Any, patch: Any) -> None:
    patch.setattr(events, "_silent_until", 0.0)
    patch.setattr(events, "_publish", STRUCK)
    events._send(task.app, "here", "task-lock-woken", {"uuid": "id-1", "name": "limited", "key": "k"})


def _tells_a_receiver(task: Any, _patch: Any) -> None:
    lock_woken.connect(STRUCK, weak=False, dispatch_uid="struck")
    try:
        lock_woken.send(sender=task, task_id="id-1", key="k", about="", waited_s=0.0)
    finally:
        lock_woken.disconnect(dispatch_uid="struck")


def _draws_a_call(task: Any, _patch: Any) -> None:
    def calls() -> Iterator[Any]:
        yield ()
        raise SoftTimeLimitExceeded

    task.fan_out(calls())


def _makes_a_key(task: Any, patch: Any) -> None:
    patch.setattr(task._guard, "key_and_about", STRUCK)
    task.fan_out([()])


def _logs_in(_task: Any, _patch: Any) -> None:
    _provider(type("Provider", (), {"__init__": STRUCK}), "setnx_url")


def _loads_a_backend(task: Any, patch: Any) -> None:
    patch.setattr("celery_setnx.connection.by_url", STRUCK)
    patch.setitem(task.app.conf, "setnx_url", None)
    patch.setitem(task.app.conf, "result_backend", "theirs://")
    task.app.__dict__.pop("_setnx_clients", None)
    client_for(task.app)


STRIKES = [
    *(_keeps_what_arrived, _asks_if_it_is_data, _asks_the_backend, _declares_a_queue, _binds_a_queue),
    *(_comes_back, _comes_back_late, _serializes_what_comes_back, _sends_an_event, _tells_a_receiver),
    *(_draws_a_call, _makes_a_key, _logs_in, _loads_a_backend),
]


@pytest.mark.parametrize("strikes", STRIKES, ids=lambda strikes: strikes.__name__.strip("_"))
def test_time_limit_is_passed_on_wherever_it_strikes(task, monkeypatch, strikes):
    """Whatever else may fail there is survived; a time limit that is kept never ends the body."""
    with pytest.raises(SoftTimeLimitExceeded):
        strikes(task, monkeypatch)


FAILURES = {
    "in_line": ("celery_setnx.lock.line.park", SoftTimeLimitExceeded()),
    "with_courier": ("celery_setnx.run.courier.ParkedCall.send", SoftTimeLimitExceeded()),
    "reply_of_broker_lost": ("celery_setnx.run.courier.ParkedCall.send", OSError("no reply")),
}


@pytest.mark.parametrize("policy", ["wait", "join", Conflict.wait])
@pytest.mark.parametrize(("step", "error"), FAILURES.values(), ids=FAILURES)
def test_call_that_fails_while_it_is_parked_waits_no_more(task, locks, monkeypatch, policy, step, error):
    """It is started neither from the line nor by its courier, also if no result is stored."""
    monkeypatch.setattr(type(task), "singleton", {"on_conflict": policy})
    key, done = task.lock_key(), pydoc.locate(step)

    def struck(*args: Any, **details: Any) -> NoReturn:
        done(*args, **details)
        raise error

    monkeypatch.setattr(step, struck)
    with SetnxLock(locks, key, line=True), pytest.raises((SoftTimeLimitExceeded, LockUnavailable)):
        task()
    assert locks.zcard(line_names(key)[0]) == 0
    place = Call("limited", "id-1", key=key).place(600)
    assert park(locks, place, since=10.0, call="its courier's").state == "stale"
    assert locks.ttl(ticket_name(key, "id-1", "")) >= 600  # as long as its courier may come


@pytest.fixture
def sent(task, monkeypatch) -> list[Call]:
    """The calls that are sent back."""
    sent: list[Call] = []
    monkeypatch.setattr(Message, "send", lambda _message, _app, call, _countdown=0.0: sent.append(call))
    return sent


def arrives(task: Any, call: Call) -> Any:
    """What becomes of a call when its message comes."""
    task.push_request(**{**vars(task.request), **call.as_headers()})
    try:
        return task()
    finally:
        task.pop_request()


SENDING = {
    "sending": ("celery_setnx.call.back.Message.send", SoftTimeLimitExceeded()),
    "reply_of_broker_lost": ("celery_setnx.call.back.Message.send", OSError("no reply")),
}
STRUCK_AT = {
    "what becomes of it": ("celery_setnx.run.give_back._fate_of", SoftTimeLimitExceeded()),
    "the end of its wait": ("celery_setnx.run.give_back._end_wait", SoftTimeLimitExceeded()),
    "the end of its mark": ("celery_setnx.run.give_back._end_mark", SoftTimeLimitExceeded()),
}


def fails(task: Any, locks: Any, patch: Any, step: str, error: Exception) -> None:
    """Have a call meet a held lock, and fail after some step of what it does then."""
    done = pydoc.locate(step)

    def struck(*args: Any, **details: Any) -> NoReturn:
        done(*args, **details)
        raise error

    with patch.context() as patched, SetnxLock(locks, task.lock_key(), line=True):
        patched.setattr(step, struck)
        with pytest.raises((SoftTimeLimitExceeded, LockUnavailable)):
            task()


@pytest.mark.parametrize("policy", ["retry", Conflict.retry])
@pytest.mark.parametrize(("step", "error"), {**SENDING, **STRUCK_AT}.values(), ids=[*SENDING, *STRUCK_AT])
def test_call_that_fails_while_it_comes_back_does_not_run_later(
    task, sent, locks, monkeypatch, policy, step, error
):
    """It is told as failed, so what it has sent of itself starts nothing."""
    monkeypatch.setattr(type(task), "singleton", {"on_conflict": policy})
    fails(task, locks, monkeypatch, step, error)
    (call,) = sent
    with pytest.raises(Dropped):
        arrives(task, call)


@pytest.mark.parametrize(("step", "error"), STRUCK_AT.values(), ids=STRUCK_AT)
def test_call_that_fails_just_after_it_was_parked_waits_no_more(task, locks, monkeypatch, step, error):
    """Told as failed, it is started neither from the line nor by its courier."""
    fails(task, locks, monkeypatch, step, error)
    place = Call("limited", "id-1", key=task.lock_key()).place(600)
    assert locks.zcard(line_names(place.key)[0]) == 0
    assert park(locks, place, since=10.0, call="its courier's").state == "stale"


def test_call_that_fails_as_it_comes_back_from_its_turn_does_not_run_later(task, sent, locks, monkeypatch):
    """It has had the lock, and its ticket names its message: the one that it has sent has the same name."""
    woken = Call("limited", "id-1", key=task.lock_key(), copy="c1", waits=1, since=1.0)
    park(locks, woken.place(600), copy=woken.copy, since=1.0, call="its call")

    def struck(*_details: Any) -> NoReturn:
        come_back(task, woken, 1.0, "the result is not there yet")

    with monkeypatch.context() as patched:
        patched.setattr("celery_setnx.run.attempt.Attempt._begin", struck)
        patched.setattr("celery_setnx.run.give_back._fate_of", STRUCK)
        with pytest.raises(SoftTimeLimitExceeded):
            arrives(task, woken)
    with pytest.raises(Dropped):
        arrives(task, sent[0])


def test_time_limit_that_strikes_while_the_next_is_woken_gives_back_what_was_handed_to_it(
    task, locks, monkeypatch
):
    """It has its place again, and the lock is free."""
    key = task.lock_key()
    lock = SetnxLock(locks, key, line=True)
    held = lock.acquire().lock
    call = Call("limited", "id-2", key=key)
    message = Message({"task": "limited", "id": "id-2"}, {}, "limited", ((), {}, {}), "application/json")
    packed = message.packed(task.app, call)
    park(locks, call.place(600), copy=call.copy, since=10.0, call=packed)
    held.release()
    monkeypatch.setattr(Message, "send", STRUCK)
    with pytest.raises(SoftTimeLimitExceeded):
        give_turns(task.app, "limited", lock)
    assert lock.holder() is None
    assert locks.zscore(line_names(key)[0], "id-2") == 10_000_000
