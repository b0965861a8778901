"""When things die: a worker in mid-task, the lock server before, during and after a body."""

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from celery.exceptions import WorkerLostError

from celery_setnx import LockLost, LockUnavailable
from celery_setnx.lock.process import has_ended
from celery_setnx.lock.takeover import last_take_over
from celery_setnx.testing import pass_time
from examples.embedded import EmbeddedServer
from tests.harness import wait_until
from tests.stage import SOON


@pytest.fixture(scope="module")
def far_away(module_worker) -> Iterator[Any]:
    """A worker whose locks are on a server of their own, which can fail while the broker lives; and that."""
    with EmbeddedServer() as server:
        conf = {"setnx_url": server.url(), "setnx_same_host": False}
        yield SimpleNamespace(server=server, worker=module_worker(queues="far", conf=conf))


@pytest.fixture
def far(far_away, journal) -> Any:
    """The far worker's tasks, how to send a call to it, and its lock server, which is up and empty."""
    from tests import workerapp

    def send(task: Any = workerapp.work, name: str = "gated", **options: Any) -> Any:
        result = task.apply_async([name], queue="far", singleton={"lease": 2, **options})
        if name == "gated":
            journal.wait_for("start", task_id=result.id)
        return result

    far_away.server.restart()
    return SimpleNamespace(tasks=workerapp, send=send, **vars(far_away))


def test_lock_of_a_killed_worker_is_taken_over_at_its_deadline(tasks, journal, gates, locks, start_worker):
    """kill -9 in mid-task: held until the lease ends, then taken over, naming the dead holder."""
    doomed = start_worker(concurrency=1, queues="doomed")
    elsewhere = start_worker(concurrency=1, queues="elsewhere", conf={"setnx_same_host": False})
    first = tasks.work.apply_async(["gated"], queue="doomed", singleton={"lease": 600})
    (started,) = journal.wait_for("start", task_id=first.id)
    doomed.kill()
    wait_until(lambda: has_ended(started["pid"]), "the process has ended")
    options = {"on_conflict": "retry", **SOON}
    second = tasks.work.apply_async(["gated"], queue="elsewhere", singleton=options)
    journal.wait_for("conflict", 2, task_id=second.id)
    pass_time(600, tasks.work, "gated")
    (taken_over,) = journal.wait_for("taken_over", task_id=second.id)
    assert taken_over["holder"]["task_id"] == first.id
    assert taken_over["holder"]["pid"] == started["pid"]
    assert taken_over["holder"]["worker"] == f"{doomed.name}@test"
    assert taken_over["fence"] > started["fence"]
    gates("gated", 2)  # the server may give one to the dead
    assert second.get(timeout=60) == "gated"
    noted = last_take_over(locks, started["key"])
    assert noted is not None
    assert (noted.by, noted.holder["task_id"]) == (f"{tasks.work.name}(name='gated')[{second.id}]", first.id)
    journal.wait_for("postrun", task_id=second.id, state="SUCCESS")
    words = [word for word in journal.words(second.id) if word not in ("conflict", "retry", "postrun")]
    assert words == ["taken_over", "acquired", "start", "end", "released"]
    log = elsewhere.wait_for_log("took over t:{tests.workerapp.work:")
    assert f"work(name='gated')[{first.id}] on {doomed.name}@test (pid {started['pid']})" in log


def test_lock_of_a_killed_pool_process_is_freed_by_its_worker(tasks, journal, locks, worker):
    """kill -9 of a pool process: its worker's parent gives the lock back long before the lease ends."""
    first = tasks.work.apply_async(["gated-child"], singleton={"lease": 600})
    (started,) = journal.wait_for("start", task_id=first.id)
    os.kill(started["pid"], signal.SIGKILL)
    (freed,) = journal.wait_for("released", task_id=first.id)
    assert freed["outcome"] == "freed"
    assert freed["pid"] == worker.process.pid
    assert not locks.exists(started["key"])
    with pytest.raises(WorkerLostError):
        first.get(timeout=60)
    worker.wait_for_log(f"[{first.id}] died with its process {started['pid']}; its lock")


def test_task_waits_in_place_for_an_unreachable_server(far, journal):
    """Redis unreachable at acquire: the task waits for a lease, goes back to the broker, and runs at last."""
    far.server.stop()
    result = far.send(name="a")
    (retry,) = journal.wait_for("retry", task_id=result.id)
    assert retry["retries"] == 0
    far.server.start(far.server.port)
    assert result.get(timeout=60) == "a"
    assert journal.entries(what="conflict") == []


def test_unreachable_server_fails_the_task_or_lets_it_run_if_asked(far, journal):
    """on_redis_error="raise": no body runs; "run": it runs without a lock, and the log says so."""
    far.server.stop()
    with pytest.raises(LockUnavailable, match="does not serve the lock"):
        far.send(name="a", on_redis_error="raise").get(timeout=60)
    result = far.send(name="a", on_redis_error="run")
    assert result.get(timeout=60) == "a"
    assert [(e["task_id"], e["key"]) for e in journal.entries(what="start")] == [(result.id, None)]
    far.worker.wait_for_log(f"[{result.id}] runs without its lock")


def test_result_stands_when_the_release_fails(far, gates):
    """Redis dies during the body: the task still succeeds, and the log says that the lease ends the lock."""
    result = far.send(lease=600)
    far.server.stop()
    gates("gated")
    assert result.get(timeout=60) == "gated"
    key = far.tasks.work.lock_key("gated")
    far.worker.wait_for_log(f"[{result.id}] has ended, but its lock {key} was not released")


@pytest.mark.parametrize("how", ["stop", "restart"])
def test_body_learns_that_its_lock_server_died_or_lost_its_data(far, journal, gates, how):
    """No answer for a lease, or a renewal that finds the lock gone: one signal, and ensure() raises."""
    result = far.send(far.tasks.careful)
    getattr(far.server, how)()
    (lost,) = journal.wait_for("lost", task_id=result.id)
    assert ("could not be reached" in lost["reason"]) == (how == "stop")
    gates("gated")
    with pytest.raises(LockLost):
        result.get(timeout=60)
    assert len(journal.entries(what="lost")) == 1
