"""Base classes and apps that publish in their own time, and return what they like. No worker."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from celery import Celery, Task

from celery_setnx import SingletonTask, send_task
from celery_setnx.call import later as later_module
from celery_setnx.lock.look import look
from celery_setnx.lock.marks import GRACE_S
from celery_setnx.lock.names import mark_name
from tests.harness import raising, settle_marks

LEASE = 600


class Transaction(list[Callable[[], Any]]):
    """What is to be done on commit."""

    def commit(self) -> None:
        while self:
            self.pop(0)()


transaction = Transaction()


class OnCommit(Task):
    """As many projects have it: nothing is returned."""

    abstract = True

    def apply_async(self, *args: Any, **options: Any) -> Any:
        transaction.append(lambda: super(OnCommit, self).apply_async(*args, **options))


class OursFirst(SingletonTask, OnCommit):
    abstract = True


class TheirsFirst(OnCommit, SingletonTask):
    abstract = True


class AppOnCommit(Celery):
    """The same for all that an app sends."""

    def send_task(self, *args: Any, **options: Any) -> Any:
        transaction.append(lambda: super(AppOnCommit, self).send_task(*args, **options))


@pytest.fixture(autouse=True)
def begin() -> None:
    transaction.clear()
    later_module._unsent.clear()


Make = Callable[..., Any]


@pytest.fixture
def make(server, locks) -> Make:
    def make(base: type[Any] = SingletonTask, of: type[Celery] = Celery, **singleton: Any) -> Any:
        app = of("later", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.update(setnx_url=server.url(1), setnx_prefix="t", task_default_queue="later")
        singleton = {"key": "order", "dedupe": "until_started", "queue_lease": LEASE} | singleton

        @app.task(base=base, shared=False, name="notify", singleton=singleton)
        def notify(order: Any) -> None: ...

        app.finalize()
        with app.connection_for_write() as connection:
            app.amqp.queues["later"].bind(connection.default_channel).declare()
            app.amqp.queues["later"].bind(connection.default_channel).purge()
        return app.tasks["notify"]

    return make


def arguments(task: Any) -> list[Any]:
    """Of the messages in the queue."""
    with task.app.connection_for_read() as connection:
        queue = task.app.amqp.queues["later"].bind(connection.default_channel)
        found = []
        while (message := queue.get(no_ack=True)) is not None:
            found.append(message.payload[0])
    return found


def left_s(locks: Any, task: Any, order: Any) -> float:
    """Seconds for which the mark of a call lasts; less than 0 if there is none."""
    settle_marks(task.app)
    return float(locks.pttl(mark_name(task.lock_key(order)))) / 1000


class Slotted:
    __slots__ = ()


class Refusing:
    def __setattr__(self, name: str, value: Any) -> None:
        raise ValueError("no such field")


@pytest.mark.parametrize("dedupe", ["until_started", None])
@pytest.mark.parametrize(
    "returned", [None, 7, ("id", 7), Slotted(), Refusing(), Future(), {}], ids=lambda it: type(it).__name__
)
def test_what_another_class_returns_is_returned(make, returned, dedupe):
    """Be it nothing, or a thing that takes no attribute; the call is published all the same."""

    class Returning(Task):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            super().apply_async(*args, **options)
            return returned

    task = make(type("Both", (SingletonTask, Returning), {"abstract": True}), dedupe=dedupe)
    assert task.delay(7) is returned
    assert arguments(task) == [[7]]


class Wrapped:
    """A method in a tracer's wrapper, as wrapt makes it."""

    def __init__(self, function: Any) -> None:
        self.__wrapped__ = function

    def __get__(self, task: Any, owner: Any = None) -> Any:
        method = self.__wrapped__.__get__(task, owner)
        return Bound(method) if task is not None else self


class Bound:
    def __init__(self, method: Any) -> None:
        self.method, self.__func__ = method, method.__func__

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.method(*args, **options)


def test_tracers_of_celerys_own_methods_put_nothing_off(make, locks, monkeypatch):
    """Ones in their place, and ones around them."""
    plain = make()._guard.app
    assert later_module.is_published_at_once(super(SingletonTask, make()).apply_async, plain)
    for owner, name in ((Task, "apply_async"), (Celery, "send_task")):
        monkeypatch.setattr(owner, name, Wrapped(vars(owner)[name]))
    assert later_module.is_published_at_once(super(SingletonTask, make()).apply_async, plain)
    monkeypatch.setattr(Task, "apply_async", lambda *args, **options: None)
    assert later_module.is_published_at_once(super(SingletonTask, make()).apply_async, plain)
    assert not later_module.is_published_at_once(super(SingletonTask, make(OursFirst)).apply_async, plain)


@pytest.mark.parametrize(("base", "of"), [(OursFirst, Celery), (SingletonTask, AppOnCommit)])
def test_mark_lasts_for_the_grace_until_the_commit_and_for_the_lease_from_then_on(make, locks, base, of):
    """An equal call of the transaction is a duplicate, and so it is while the message is queued."""
    task = make(base, of)
    assert task.delay(7) is None
    assert task.delay(7).deduplicated
    assert 0 < left_s(locks, task, 7) <= GRACE_S
    assert arguments(task) == []
    transaction.commit()
    assert LEASE - 60 < left_s(locks, task, 7) <= LEASE
    assert arguments(task) == [[7]]
    assert not later_module._unsent


def test_call_whose_transaction_is_rolled_back_has_its_mark_for_the_grace_only(make, locks):
    """Nobody says that it will not be sent."""
    task = make(OursFirst)
    task.delay(7)
    transaction.clear()
    assert 0 < left_s(locks, task, 7) <= GRACE_S


def test_class_that_stands_in_front_of_ours_has_it_decided_at_the_commit(make, locks):
    """Nothing is marked before, and what is rolled back leaves nothing."""
    task = make(TheirsFirst)
    assert task.delay(7) is None
    assert left_s(locks, task, 7) < 0
    task.delay(7)
    transaction.commit()
    assert LEASE - 60 < left_s(locks, task, 7) <= LEASE
    assert arguments(task) == [[7]]


@pytest.mark.parametrize(("base", "of"), [(OursFirst, Celery), (SingletonTask, AppOnCommit)])
@pytest.mark.parametrize("dedupe", ["until_started", None])
def test_call_is_sent_as_it_was_when_it_was_published(make, locks, base, of, dedupe):
    """What changes before the commit would be sent under a key that is not its own."""
    task = make(base, of, dedupe=dedupe)
    order = {"id": 7, "lines": [1]}
    task.delay(order)
    order["lines"].append(2)  # type: ignore[attr-defined]
    transaction.commit()
    assert arguments(task) == [[{"id": 7, "lines": [1]}]]


def newest(locks: Any, task: Any, order: Any) -> Any:
    """The newest call of a key that was sent."""
    settle_marks(task.app)
    return look(locks, task.lock_key(order)).newest


@pytest.mark.parametrize(("base", "of"), [(OursFirst, Celery), (SingletonTask, AppOnCommit)])
def test_call_replaces_those_before_it_from_the_commit_on(make, locks, base, of):
    """Until then it is reserved, and no other call is a duplicate of it."""
    task = make(base, of, on_duplicate="replace")
    task.delay(7)
    task.delay(7)
    assert newest(locks, task, 7) is None
    transaction.commit()
    assert newest(locks, task, 7).superseded == 1
    assert arguments(task) == [[7], [7]]
    assert not later_module._unsent


def test_call_whose_transaction_is_rolled_back_replaces_nobody(make, locks):
    """The one before it is the newest still."""
    task = make(OursFirst, on_duplicate="replace")
    task.delay(7)
    transaction.commit()
    before = newest(locks, task, 7)
    task.delay(7)
    transaction.clear()
    assert newest(locks, task, 7).generation == before.generation


def test_debounced_call_waits_from_the_commit_on(make, locks):
    """Its countdown is that of its message; the quiet time has begun as it was published."""
    task = make(OursFirst, debounce=5, dedupe="until_started")
    task.delay(7)
    assert newest(locks, task, 7) is None
    transaction.commit()
    assert 0 < newest(locks, task, 7).due_in_s <= 5


def test_call_that_cannot_be_put_off_has_no_mark(make, locks):
    """And nobody waits for its message."""

    class Failing(Task):
        abstract = True
        apply_async = raising(OSError("no database"))

    task = make(type("Both", (SingletonTask, Failing), {"abstract": True}))
    with pytest.raises(OSError, match="no database"):
        task.delay(7)
    assert left_s(locks, task, 7) < 0
    assert not later_module._unsent


def test_send_task_by_an_app_that_sends_later(make, locks):
    """A task that is not known here: the same."""
    task = make(of=AppOnCommit)
    options = {"key": "order", "dedupe": "until_started", "queue_lease": LEASE, "scope": "notify"}
    assert send_task(task.app, "elsewhere", kwargs={"order": 7}, singleton=options) is None
    assert 0 < left_s(locks, task, 7) <= GRACE_S
    transaction.commit()
    assert LEASE - 60 < left_s(locks, task, 7) <= LEASE


@pytest.mark.parametrize(("base", "of"), [(OursFirst, Celery), (SingletonTask, AppOnCommit)])
def test_fan_out_may_be_sent_later(make, locks, base, of):
    """By no producer that was given back meanwhile; the marks as those of single calls."""
    task = make(base, of)
    assert task.fan_out([(1,), (2,), (1,)]).accepted == 2
    assert 0 < left_s(locks, task, 1) <= GRACE_S
    transaction.commit()
    assert all(LEASE - 60 < left_s(locks, task, order) <= LEASE for order in (1, 2))
    assert arguments(task) == [[1], [2]]


def test_calls_whose_message_never_comes_are_forgotten(make, locks, monkeypatch):
    """A process that rolls back all day does not grow."""
    monkeypatch.setattr(later_module, "AT_MOST", 3)
    task = make(OursFirst)
    for order in range(5):
        task.delay(order)
    assert len(later_module._unsent) == 3
    transaction.commit()
    assert [left_s(locks, task, order) > GRACE_S for order in range(5)] == [False, False, True, True, True]
