"""locked() and lock_key(): a glance at the lock of a call, without publishing it."""

import time
from typing import Any

import pytest
from celery import Celery
from pydantic import BaseModel

from celery_setnx import LockUnavailable, OptionError, SetnxLock, SingletonTask, UnkeyableCall
from celery_setnx.call.message import Call
from celery_setnx.testing import pass_time
from tests.harness import lock_keys
from tests.versions.conditions import needs_dumped_models

NOWHERE = "parked"  # nobody consumes it


class User(BaseModel):
    id: int
    name: str = "x"


@pytest.fixture
def app(server, locks, parked) -> Celery:
    """An app of its own, whose messages go where nobody consumes them."""
    app = Celery("glances", set_as_current=False, broker=server.url(0), backend=server.url(0))
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t", task_default_queue=NOWHERE)
    return app


@pytest.fixture
def declare(app) -> Any:
    """Declares a SingletonTask of that app named `t.t`."""

    def declare(function: Any, **options: Any) -> Any:
        app.task(shared=False, base=SingletonTask, name="t.t", **options)(function)
        return app.tasks["t.t"]

    return declare


@pytest.fixture
def guarded(declare) -> Any:
    """A task whose key is its argument."""

    def t(a: int) -> None: ...

    return declare(t, singleton={"key": "a"})


def test_locked_names_the_task_and_worker_that_run(tasks, worker, locks, journal, gates, parked):
    """While a real worker runs the call its record is the answer, however the arguments are given.

    A free lock has no holder, and the glance leaves nothing behind.
    """
    before = lock_keys(locks)
    assert tasks.work.locked("gated-a") is None
    assert (lock_keys(locks), parked._client.llen("celery")) == (before, 0)
    result = tasks.work.delay("gated-a", "anything")
    (start,) = journal.wait_for("start", task_id=result.id)
    holder = tasks.work.locked(name="gated-a")
    assert holder is not None
    assert (holder.task_id, holder.state, holder.fence) == (result.id, "running", start["fence"])
    assert (holder.info["task"], holder.info["worker"]) == ("tests.workerapp.work", f"{worker.name}@test")
    assert holder.info["pid"] == start["pid"]
    assert tasks.work.locked("another") is None
    gates("gated-a")
    result.get(timeout=60)
    assert tasks.work.locked("gated-a") is None


@pytest.mark.parametrize("state", ["resting", "held_for_retry"])
def test_locked_tells_a_lock_that_is_kept_without_a_run(guarded, locks, state):
    """It rests until at_least_for is over, or waits for the task's own retry; then it is free."""
    held = SetnxLock(locks, guarded.lock_key(1), info={"task_id": "id-1"}).acquire().lock
    held.release(at_least_for=600) if state == "resting" else held.hold(600)
    holder = guarded.locked(1)
    assert (holder.state, holder.task_id) == (state, "id-1")
    pass_time(601, guarded, 1)
    assert guarded.locked(1) is None


def test_locked_sees_a_foreign_lock(guarded, locks, foreign_keys):
    """A lock that another program has set is held, by no task of ours; past its second it is free."""
    key = guarded.lock_key(1)
    foreign_keys.add(key)
    locks.setnx(key, int(time.time()) + 600)
    holder = guarded.locked(1)
    assert (holder.state, holder.task_id, holder.token, holder.since) == ("foreign", None, "", None)
    assert "a foreign client" in str(holder)
    locks.set(key, int(time.time()) - 10)
    assert guarded.locked(1) is None
    assert SetnxLock(locks, key).acquire().acquired


def test_locked_is_none_after_an_expired_lease(guarded, locks):
    """A dead holder's record is there still, but it holds the lock no longer; a glance changes nothing."""
    lock = SetnxLock(locks, guarded.lock_key(1))
    assert lock.acquire().acquired

    def seen() -> list[Any]:
        return [locks.get(lock.name), locks.get(lock.record), locks.pexpiretime(lock.name)]

    before = seen()
    assert guarded.locked(1).state == "running"
    assert seen() == before
    pass_time(30, guarded, 1)
    assert guarded.locked(1) is None
    assert locks.exists(lock.name, lock.record) == 2


def test_locked_is_none_while_a_permit_is_free(declare, locks):
    """holders() tells all of them, by number; locked() who has held for longest, once nobody else fits in."""

    def t(a: int) -> None: ...

    task = declare(t, singleton={"key": "a", "limit": 3})
    assert (task.locked(1), task.holders(1)) == (None, [])
    held = []
    for number in range(3):
        assert task.locked(1) is None
        lock = SetnxLock(locks, task.lock_key(1), info={"task_id": f"id-{number}"}, limit=3)
        held.append(lock.acquire().lock)
    assert [(one.permit, one.task_id) for one in task.holders(1)] == [(0, "id-0"), (1, "id-1"), (2, "id-2")]
    assert (task.locked(1).task_id, task.locked(2), task.holders(a=2)) == ("id-0", None, [])
    held[0].release()
    SetnxLock(locks, task.lock_key(1), info={"task_id": "id-3"}, limit=3).acquire()
    assert (task.locked(1).task_id, task.locked(1).permit) == ("id-1", 1)
    held[1].release()
    assert task.locked(1) is None
    assert [(one.permit, one.task_id) for one in task.holders(1)] == [(0, "id-3"), (2, "id-2")]
    pass_time(31, task, 1)
    assert (task.locked(1), task.holders(1)) == (None, [])


def test_lock_key_is_the_key_that_the_worker_locks(tasks, journal):
    """Positional, keyword and default arguments alike; a class-based task is asked as it is called."""
    tasks.everything.delay(1, c={"x": (1, 2)}).get(timeout=60)
    (body,) = journal.entries(what="body")
    assert tasks.everything.lock_key(a=1, b=2, c={"x": [1, 2]}) == body["key"]
    tasks.classy.delay(name="a").get(timeout=60)
    (start,) = journal.entries(what="start")
    assert tasks.classy.lock_key("a") == start["key"]


@needs_dumped_models
@pytest.mark.parametrize(
    ("options", "users_share_it"),
    [({}, False), ({"key": lambda user, times: type(user).__name__}, True)],
    ids=["arguments", "key-function"],
)
def test_lock_key_of_a_pydantic_model_is_that_of_the_published_call(
    declare, app, locks, parked, options, users_share_it
):
    """A model is dumped as Celery dumps it, for a key function too: the key is that of the header."""

    def greet(user: User, times: int = 1) -> None: ...

    task = declare(greet, pydantic=True, singleton=options)
    task.delay(User(id=1))
    with app.connection() as connection:
        message = connection.SimpleQueue(NOWHERE).get(timeout=60)
    key = task.lock_key(User(id=1))
    assert Call.of(task.name, message.headers).key == key == task.lock_key({"id": 1, "name": "x"})
    assert (key == task.lock_key(User(id=2))) == users_share_it
    with SetnxLock(locks, key, info={"task_id": "id-1"}):
        assert task.locked(user=User(id=1)).task_id == "id-1"


def test_locked_without_a_server_is_lock_unavailable(app, guarded):
    """Not knowing is not None. The name of a lock is computed, not asked for."""
    app.conf.setnx_url = "redis://127.0.0.1:1/0"
    with pytest.raises(LockUnavailable) as caught:
        guarded.locked(1)
    assert caught.value.key == guarded.lock_key(1)


@pytest.mark.parametrize("glance", ["locked", "lock_key"])
def test_call_without_a_key_is_refused(tasks, glance):
    """Arguments that do not fit the signature, or have no canonical form, are named."""
    with pytest.raises(UnkeyableCall, match="the key needs argument 'name', which this call does not"):
        getattr(tasks.work, glance)()
    with pytest.raises(UnkeyableCall, match="argument 'c' of type object"):
        getattr(tasks.everything, glance)(1, c=object())


@pytest.mark.parametrize(("ask", "given"), [("locked", []), ("lock_key", []), ("fan_out", [[(1,)]])])
def test_celerys_own_tasks_have_no_lock(ask, given):
    """SingletonTask as the app's task class does not guard celery.*, and says so."""
    app = Celery("all", task_cls=SingletonTask, set_as_current=False, broker="redis://localhost:1/0")
    builtin = app.tasks["celery.chord_unlock"]
    with pytest.raises(OptionError, match=r"celery\.chord_unlock\b.* is Celery's own task, and "):
        getattr(builtin, ask)(*given)


def test_locked_works_inside_the_task_itself(declare, locks):
    """A direct call has no lock of its own, and sees who has it."""

    def t(self: Any, a: int) -> Any:
        holder = self.locked(a)
        return holder and holder.task_id

    task = declare(t, bind=True, singleton={"key": "a"})
    assert task(1) is None
    with SetnxLock(locks, task.lock_key(1), info={"task_id": "id-1"}):
        assert task(1) == "id-1"


def test_arguments_that_the_key_does_not_name_need_not_be_known(declare, locks):
    """To ask about a lock; to publish the call all are needed."""

    def t(account_id: int, reason: str) -> None: ...

    task = declare(t, singleton={"key": "account_id"})
    assert task.lock_key(7) == task.lock_key(account_id=7) == task.lock_key(7, "late")
    with SetnxLock(locks, task.lock_key(7)):
        assert task.locked(7) is not None
        assert len(task.holders(account_id=7)) == 1
    for call in ({"reason": "late"}, {"account_id": 7, "reson": "late"}):
        with pytest.raises(UnkeyableCall):
            task.lock_key(**call)
    with pytest.raises(UnkeyableCall, match="missing a required argument: 'reason'"):
        task.delay(7)
