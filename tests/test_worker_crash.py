"""When things die: a worker in mid-task, the lock server before, during and after a body."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery.exceptions import WorkerLostError

from celery_setnx import LockLost, LockUnavailable, is_skipped
from celery_setnx.process import has_ended
from celery_setnx.survey import last_take_over
from examples.embedded import EmbeddedServer
from tests.harness import Worker, wait_until


@pytest.fixture
def doomed(server, logs) -> Iterator[Worker]:
    """A worker of its own, to be killed."""
    worker = Worker(logs, concurrency=1, queues="doomed")
    yield worker
    worker.stop()


@pytest.fixture
def elsewhere(server, logs) -> Iterator[Worker]:
    """A worker that proves nothing of other processes, as one on another host."""
    worker = Worker(logs, concurrency=1, queues="elsewhere", environment={"SETNX_TEST_SAME_HOST": "no"})
    yield worker
    worker.stop()


@pytest.fixture(scope="module")
def lock_server() -> Iterator[EmbeddedServer]:
    """A server for locks alone, so that it can fail while the broker lives."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture(scope="module")
def far_worker(server, lock_server, logs) -> Iterator[Worker]:
    """A worker whose locks are on the other server."""
    environment = {"SETNX_TEST_LOCK_URL": lock_server.url()}
    worker = Worker(logs, concurrency=2, queues="far", environment=environment)
    yield worker
    worker.stop()


@pytest.fixture
def far(far_worker, lock_server, journal) -> Any:
    """Tasks to be sent to the far worker's queue; its lock server is up and empty."""
    lock_server.restart()
    from tests import workerapp

    return workerapp


def test_lock_of_a_killed_worker_is_taken_over_at_its_deadline(
    tasks, journal, gates, locks, doomed, elsewhere
):
    """kill -9 in mid-task: held until the lease ends, then taken over, naming the dead holder."""
    first = tasks.work.apply_async(["gated"], queue="doomed", singleton={"lease": 8})
    (started,) = journal.wait_for("start", task_id=first.id)
    doomed.kill()
    second = tasks.work.apply_async(["gated"], queue="elsewhere", singleton={"on_conflict": "retry"})
    journal.wait_for("conflict", task_id=second.id)
    (taken_over,) = journal.wait_for("taken_over", task_id=second.id)
    assert taken_over["holder"]["task_id"] == first.id
    assert taken_over["holder"]["pid"] == started["pid"]
    assert taken_over["holder"]["worker"] == f"{doomed.name}@test"
    assert taken_over["fence"] > started["fence"]
    noted = last_take_over(locks, started["key"])
    assert noted is not None
    assert (noted.by, noted.holder["task_id"]) == (f"{tasks.work.name}[{second.id}]", first.id)
    gates("gated")
    assert second.get(timeout=10) == "gated"
    journal.wait_for("postrun", count=journal.words(second.id).count("retry") + 1, task_id=second.id)
    assert [word for word in journal.words(second.id) if word not in ("conflict", "retry", "postrun")] == [
        "taken_over",
        "acquired",
        "start",
        "end",
        "released",
    ]
    log = elsewhere.wait_for_log("took over t:{tests.workerapp.work:")
    assert f"tests.workerapp.work[{first.id}] on {doomed.name}@test (pid {started['pid']})" in log


def test_lock_of_a_dead_process_of_this_host_is_taken_over_at_once(tasks, journal, gates, doomed, worker):
    """A rival on the same host that proves the holder dead does not wait for the deadline."""
    first = tasks.work.apply_async(["gated-dead"], queue="doomed", singleton={"lease": 600})
    (started,) = journal.wait_for("start", task_id=first.id)
    assert is_skipped(tasks.work.delay("gated-dead").get(timeout=10))
    doomed.kill()
    wait_until(lambda: has_ended(started["pid"]), "the process has ended")
    gates("gated-dead")
    second = tasks.work.delay("gated-dead")
    (taken_over,) = journal.wait_for("taken_over", task_id=second.id)
    assert taken_over["holder"]["task_id"] == first.id
    worker.wait_for_log("its process on this host is dead")


def test_lock_of_a_killed_pool_process_is_freed_by_its_worker(tasks, journal, locks, doomed):
    """kill -9 of a pool process: its worker's parent gives the lock back long before the lease ends."""
    first = tasks.work.apply_async(["gated-child"], queue="doomed", singleton={"lease": 600})
    (started,) = journal.wait_for("start", task_id=first.id)
    os.kill(started["pid"], signal.SIGKILL)
    (freed,) = journal.wait_for("released", task_id=first.id)
    assert freed["outcome"] == "freed"
    assert freed["pid"] != started["pid"]
    assert not locks.exists(started["key"])
    with pytest.raises(WorkerLostError):
        first.get(timeout=20)
    doomed.wait_for_log(f"[{first.id}] died with its process {started['pid']}; its lock")


def test_lock_held_for_a_retry_is_freed_when_the_retry_expires(tasks, journal, locks):
    """A retry that will not come does not keep the lock until queue_lease is over."""
    result = tasks.patient.apply_async(["a"], expires=3)
    (held,) = journal.wait_for("released", task_id=result.id, outcome="held_for_retry")
    assert locks.exists(held["key"])
    journal.wait_for("released", task_id=result.id, outcome="freed")
    assert not locks.exists(held["key"])


def test_task_waits_in_place_for_an_unreachable_server(far, journal, lock_server):
    """Redis unreachable at acquire: the task waits for a lease, goes back to the broker, and runs at last."""
    lock_server.stop()
    result = far.work.apply_async(["a"], queue="far")
    (retry,) = journal.wait_for("retry", task_id=result.id)
    assert retry["retries"] == 0
    lock_server.start(lock_server.port)
    assert result.get(timeout=20) == "a"
    assert journal.entries(what="conflict") == []


def test_unreachable_server_fails_the_task_if_asked(far, lock_server):
    """on_redis_error="raise": LockUnavailable, and the body does not run."""
    lock_server.stop()
    result = far.work.apply_async(["a"], queue="far", singleton={"on_redis_error": "raise"})
    with pytest.raises(LockUnavailable, match="does not serve the lock"):
        result.get(timeout=20)
    lock_server.start(lock_server.port)


def test_unreachable_server_lets_the_body_run_if_asked(far, journal, far_worker, lock_server):
    """on_redis_error="run": the body runs without a lock, and the log says so."""
    lock_server.stop()
    result = far.work.apply_async(["a"], queue="far", singleton={"on_redis_error": "run"})
    assert result.get(timeout=20) == "a"
    assert journal.entries(what="start")[0]["key"] is None
    far_worker.wait_for_log(f"[{result.id}] runs unguarded")
    lock_server.start(lock_server.port)


def test_result_stands_when_the_release_fails(far, journal, gates, far_worker, lock_server):
    """Redis dies during the body: the task still succeeds, and the log says that the lease ends the lock."""
    result = far.work.apply_async(["gated"], queue="far")
    journal.wait_for("start", task_id=result.id)
    lock_server.stop()
    gates("gated")
    assert result.get(timeout=20) == "gated"
    key = far.work.lock_key("gated")
    far_worker.wait_for_log(f"[{result.id}] has ended, but its lock {key} was not released")
    lock_server.start(lock_server.port)


def test_body_learns_that_redis_has_died(far, journal, gates, lock_server):
    """Without an answer for a whole lease the lock counts as lost: a signal, and ensure() raises."""
    result = far.careful.apply_async(["gated"], queue="far")
    journal.wait_for("start", task_id=result.id)
    lock_server.stop()
    (lost,) = journal.wait_for("lost", task_id=result.id)
    assert "could not be reached" in lost["reason"]
    gates("gated")
    with pytest.raises(LockLost):
        result.get(timeout=20)
    lock_server.start(lock_server.port)
    assert len(journal.entries(what="lost")) == 1


def test_body_learns_that_redis_has_lost_its_data(far, journal, gates, lock_server):
    """The next renewal finds the lock gone: a signal, and ensure() raises."""
    result = far.careful.apply_async(["gated"], queue="far")
    journal.wait_for("start", task_id=result.id)
    lock_server.restart()
    journal.wait_for("lost", task_id=result.id)
    gates("gated")
    with pytest.raises(LockLost):
        result.get(timeout=20)


def test_stopped_holder_never_touches_the_next_holders_lock(far, journal, gates, lock_server):
    """A holder that slept past its lease: its release is refused, and the next one's lock stays."""
    result = far.overlong.apply_async(["gated"], queue="far")
    (start,) = journal.wait_for("start", task_id=result.id)
    journal.wait_for("lost", task_id=result.id)
    # The holder gives its lock up a little before the server does: until then the second one comes back.
    options = {"on_conflict": "retry", "lease": 30, "at_most_for": 30}
    second = far.overlong.apply_async(["gated"], queue="far", singleton=options)
    (taken,) = journal.wait_for("taken_over", task_id=second.id)
    assert taken["fence"] > start["fence"]
    with redis.Redis.from_url(lock_server.url(), decode_responses=True) as client:
        before = client.get(start["key"])
        gates("gated")
        with pytest.raises(LockLost):
            result.get(timeout=20)
        assert client.get(start["key"]) == before
    gates("gated")
    assert second.get(timeout=20) is None
    words = journal.words(second.id)
    assert words[words.index("taken_over") :][:4] == ["taken_over", "acquired", "start", "end"]
