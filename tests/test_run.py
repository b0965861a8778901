"""One guarded run in this process: what no worker is needed to see."""

import os
import time
import uuid
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from celery import Celery
from celery.exceptions import Ignore, Retry

from celery_setnx import LockLost, SetnxError, SetnxLock, SingletonTask
from celery_setnx.run import Run

KEY = "setnx:{guarded}"


@pytest.fixture
def task(server, locks) -> Iterator[Any]:
    """A task with a call on its request stack, as a worker has it."""
    app = Celery("guarding", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.setnx_url = server.url(1)

    @app.task(base=SingletonTask, shared=False, name="guarded", singleton={"key": (), "hold_on_retry": True})
    def guarded() -> None: ...

    task = app.tasks["guarded"]
    task.push_request(
        id=uuid.uuid4().hex, args=[], kwargs={}, retries=0, called_directly=False, delivery_info={}
    )
    yield task
    task.pop_request()


def guard(task: Any, body: Any) -> Any:
    return Run(task, task._guard, task.request, (), {}).guard(body)


def test_forked_child_leaves_its_parents_lock_alone(task, locks):
    """A body that forks: the child's way out through the guard releases nothing."""

    def body() -> str:
        child = os.fork()
        if child == 0:
            return "child"
        os.waitpid(child, 0)
        assert not SetnxLock(locks, KEY).acquire().acquired
        return "parent"

    if guard(task, body) == "child":
        os._exit(0)
    assert SetnxLock(locks, KEY).acquire().acquired


@pytest.mark.parametrize(
    ("when", "seconds"),
    [
        (lambda now: None, 0),
        (lambda now: 5, 5),
        (lambda now: 0, 0),
        (lambda now: now + timedelta(seconds=50), 50),
        (lambda now: now.replace(tzinfo=None) + timedelta(seconds=50), 50),
        (lambda now: now - timedelta(seconds=50), 0),
    ],
)
def test_lock_is_held_until_the_retry_and_its_queue_lease(task, locks, when, seconds):
    """hold_on_retry: from now to the retry's time, however it is given, plus queue_lease."""

    def body() -> None:
        raise Retry(when=when(datetime.now(timezone.utc)))

    with pytest.raises(Retry):
        guard(task, body)
    outcome = SetnxLock(locks, KEY).acquire()
    assert outcome.holder is not None
    assert outcome.holder.state == "held_for_retry"
    assert outcome.remaining_s == pytest.approx(3600 + seconds, abs=20)


def test_retry_resumes_the_held_lock_with_its_fence(task, locks):
    """The next attempt of the same call gets the lock that was held for it."""
    fences = []

    def first() -> None:
        fences.append(task.lock.fence)
        raise Retry(when=1)

    with pytest.raises(Retry):
        guard(task, first)
    task.request.retries = 1
    guard(task, lambda: fences.append(task.lock.fence))
    assert fences[0] == fences[1]
    assert SetnxLock(locks, KEY).acquire().acquired


def test_repeated_delivery_of_a_finished_call_is_dropped(task, locks):
    """A redelivered message whose result says SUCCESS does not run again, and disturbs nothing."""
    task.request.delivery_info = {"redelivered": True}
    task.backend.persistent = True
    task.backend.mark_as_done(task.request.id, "result")
    with pytest.raises(Ignore):
        guard(task, lambda: pytest.fail("the body ran"))
    assert SetnxLock(locks, KEY).acquire().acquired


@pytest.mark.parametrize("persistent", [True, False])
def test_repeated_delivery_of_an_unknown_call_runs(task, persistent):
    """Without a result that says SUCCESS it runs again, after the first."""
    task.request.delivery_info = {"redelivered": True}
    task.backend.persistent = persistent
    assert guard(task, lambda: "ran") == "ran"


def test_repeated_delivery_runs_when_the_backend_fails(task, monkeypatch, caplog):
    """A backend that cannot say is no SUCCESS."""
    task.request.delivery_info = {"redelivered": True}
    task.backend.persistent = True
    monkeypatch.setattr(task.backend, "get_task_meta", lambda _id: (_ for _ in ()).throw(OSError("gone")))
    assert guard(task, lambda: "ran") == "ran"
    assert "its result is not known (gone)" in caplog.text


def test_lost_lock_is_told_at_the_end_at_the_latest(task, locks, caplog):
    """A lock that vanished during a short body is reported, and the result stands."""

    def body() -> str:
        locks.delete(KEY)
        return "done"

    assert guard(task, body) == "done"
    assert "] lost its lock setnx:{guarded}: it was gone when the task ended" in caplog.text


def test_lock_that_ran_out_unseen_is_told_at_the_end(task, caplog):
    """While the keeper waits for a late reply the lease may end: ensure() says so, and so does the signal."""
    run = Run(task, task._guard, task.request, (), {})
    late = time.monotonic() + 31

    def body() -> str:
        run.lock.clock = lambda: late
        with pytest.raises(LockLost):
            task.lock.ensure()
        return "done"

    assert run.guard(body) == "done"
    assert caplog.text.count("lost its lock setnx:{guarded}: its lease of 30 s ended") == 1


def test_overwritten_lock_is_released_and_reported(task, locks, caplog):
    """A classic loser's value does not keep the lock from being given back."""

    def body() -> None:
        locks.getset(KEY, int(time.time()) - 100)

    guard(task, body)
    assert "a classic client had overwritten setnx:{guarded}" in caplog.text
    assert not locks.exists(KEY)


@pytest.mark.parametrize("times", [1, 2])
def test_disturbed_release_is_repeated_once(task, monkeypatch, caplog, times):
    """An error that is none of ours and none of Redis's: the lock is given back, or its lease ends it."""
    run = Run(task, task._guard, task.request, (), {})
    release, disturbed = run.lock._release, iter(range(times))

    def disturbing(*details: Any) -> Any:
        if next(disturbed, None) is not None:
            raise TypeError("an event that another has waited for")
        return release(*details)

    monkeypatch.setattr(run.lock, "_release", disturbing)
    assert run.guard(lambda: "done") == "done"
    assert caplog.text.count("gives its lock setnx:{guarded} back once more") == 1
    assert ("was not released: an event" in caplog.text) == (times == 2)
    assert (run.lock.holder() is None) == (times == 1)
    run.lock.release()


def test_failing_release_keeps_the_bodys_own_error(task, monkeypatch, caplog):
    """What the task raised is what the caller sees."""
    run = Run(task, task._guard, task.request, (), {})
    monkeypatch.setattr(run.lock, "_release", lambda *_: (_ for _ in ()).throw(SetnxError("no")))

    def body() -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.guard(body)
    assert "] has ended, but its lock setnx:{guarded} was not released: no" in caplog.text
    monkeypatch.undo()
    run.lock.release()
