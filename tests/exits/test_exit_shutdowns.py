"""Warm, soft and cold shutdown, max_tasks_per_child: held while the body runs, free when it has ended."""

import signal
import time

import pytest
import redis

from celery_setnx import SetnxLock
from celery_setnx.process import has_ended
from tests.exits import POOLS, in_pools
from tests.harness import Worker, wait_until

LEASES = 1.5
LONG = {"lease": 30}


def assert_held_for(locks: redis.Redis, key: str, seconds: float) -> None:
    """A rival never gets the lock meanwhile."""
    give_up = time.monotonic() + seconds
    while time.monotonic() < give_up:
        assert not SetnxLock(locks, key).acquire().acquired


def wait_for_end(worker: Worker) -> None:
    wait_until(lambda: worker.process.poll() is not None, f"the worker has ended; its log: {worker.log}")


@pytest.mark.parametrize("own_pool", POOLS)
def test_warm_shutdown_keeps_the_lock_until_the_body_has_ended(
    tasks, journal, gates, locks, start_worker, name, hold, own_pool
):
    """SIGTERM: the lease is renewed while the worker waits for the body, which then releases."""
    worker = start_worker(pool=own_pool, queues="leaving")
    held = hold(tasks.careful, "leaving", name)
    worker.process.send_signal(signal.SIGTERM)
    worker.wait_for_log("Warm shutdown")
    assert_held_for(locks, held.key, LEASES * tasks.LEASE_S)
    gates(name)
    assert held.result.get(timeout=10) == name
    assert not locks.exists(held.key)
    assert journal.words(held.result.id)[:4] == ["acquired", "start", "end", "released"]


@pytest.mark.parametrize("own_pool", ["prefork", "threads", "gevent", "eventlet"])
def test_soft_shutdown_keeps_the_lock_until_the_body_has_ended(
    tasks, journal, gates, locks, start_worker, name, hold, own_pool
):
    """SIGQUIT with worker_soft_shutdown_timeout: renewed in that time; a body that ends in it releases."""
    worker = start_worker(pool=own_pool, queues="leaving", environment={"EXITS_SOFT_SHUTDOWN_S": "20"})
    held = hold(tasks.careful, "leaving", name)
    worker.process.send_signal(signal.SIGQUIT)
    worker.wait_for_log("Initiating Soft Shutdown")
    assert_held_for(locks, held.key, LEASES * tasks.LEASE_S)
    gates(name)
    assert held.result.get(timeout=10) == name
    assert not locks.exists(held.key)
    assert journal.words(held.result.id)[:4] == ["acquired", "start", "end", "released"]


@pytest.mark.parametrize("soft_s", ["0", "1"], ids=["cold", "soft"])
def test_cold_shutdown_lets_the_next_delivery_in(
    tasks, journal, gates, start_worker, locks, name, hold, soft_s
):
    """acks_late, lease 30 s, no proof of death: requeued, and not locked out by its own ended run."""
    worker = start_worker(queues="leaving", environment={"EXITS_SOFT_SHUTDOWN_S": soft_s})
    held = hold(tasks.late, "leaving", name, singleton=LONG)
    worker.process.send_signal(signal.SIGQUIT)
    wait_for_end(worker)
    wait_until(lambda: has_ended(held.pid), "the process has ended")
    start_worker(queues="leaving", environment={"SETNX_TEST_SAME_HOST": "no"})
    journal.wait_for("start", count=2, task_id=held.result.id)
    gates(name)
    assert held.result.get(timeout=10) == "return"
    first, second = journal.entries(what="start", task_id=held.result.id)
    assert second["fence"] > first["fence"]
    assert journal.entries(what="conflict") == []


@pytest.mark.parametrize("own_pool", ["solo", "threads", "gevent", "eventlet"])
@in_pools("prefork")
def test_cold_shutdown_shuts_nobody_out(tasks, pool, journal, gates, start_worker, name, hold, own_pool):
    """SIGQUIT, lease 30 s, pools whose bodies Celery ends, waits for or leaves: the next call is let in."""
    worker = start_worker(pool=own_pool, queues="leaving")
    held = hold(tasks.work, "leaving", name, singleton=LONG)
    worker.process.send_signal(signal.SIGQUIT)
    gates(name)
    wait_for_end(worker)
    gates(name)
    assert tasks.work.apply_async([name], queue=pool).get(timeout=10) == "return"
    assert journal.entries(what="start")[1]["fence"] > held.fence
    assert journal.entries(what="lost") == []


def test_max_tasks_per_child_releases_before_the_process_ends(tasks, journal, locks, start_worker):
    """Every call has a process of its own, and never meets the lock of the one before."""
    start_worker(queues="leaving", arguments=("--max-tasks-per-child", "1"))
    results = [
        tasks.work.apply_async(["a"], queue="leaving", singleton={"on_conflict": "raise"}).get(timeout=10)
        for _ in range(2)
    ]
    assert results == ["return"] * 2
    pids = [entry["pid"] for entry in journal.entries(what="start")]
    assert len(set(pids)) == 2
    wait_until(lambda: all(has_ended(pid) for pid in pids), "the processes have ended")
    assert [e["outcome"] for e in journal.entries(what="released")] == ["released"] * 2
