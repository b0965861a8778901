"""Warm, soft and cold shutdown, max_tasks_per_child: held while the body runs, free when it has ended."""

import signal

import pytest

from celery_setnx.lock.process import has_ended
from tests.exits import POOLS, in_pools
from tests.exits.conftest import ELSEWHERE, LONG
from tests.harness import Worker, wait_until

SOFT = {"worker_soft_shutdown_timeout": 30}
SHUTDOWNS = [("warm", pool) for pool in POOLS] + [("soft", pool) for pool in POOLS if pool != "solo"]


def wait_for_end(worker: Worker) -> None:
    wait_until(lambda: worker.process.poll() is not None, f"the worker has ended; its log: {worker.log}")


@pytest.mark.clock  # a lease is renewed while it really runs
@pytest.mark.parametrize(("how", "own_pool"), SHUTDOWNS)
def test_shutdown_keeps_the_lock_until_the_body_has_ended(scene, start, how, own_pool):
    """SIGTERM, or SIGQUIT with a soft shutdown: renewed while the worker waits for the body to release."""
    worker = start("leaving", pool=own_pool, conf=SOFT)
    held = scene.hold(scene.tasks.careful, "leaving")
    worker.process.send_signal(signal.SIGTERM if how == "warm" else signal.SIGQUIT)
    worker.wait_for_log("Warm shutdown" if how == "warm" else "Initiating Soft Shutdown")
    scene.assert_renewed(held.key)
    scene.open()
    assert held.result.get(timeout=60) == scene.gate
    assert not scene.locks.exists(held.key)
    assert scene.journal.words(held.result.id)[:4] == ["acquired", "start", "end", "released"]


@pytest.mark.parametrize("soft_s", [0, 1], ids=["cold", "soft"])
def test_cold_shutdown_lets_the_next_delivery_in(scene, start, soft_s):
    """acks_late, no proof of death: requeued, and not locked out by its own ended run."""
    worker = start("leaving", conf={"worker_soft_shutdown_timeout": soft_s})
    held = scene.hold(scene.tasks.late, "leaving", singleton=LONG)
    worker.process.send_signal(signal.SIGQUIT)
    wait_for_end(worker)
    wait_until(lambda: has_ended(held.pid), "the process has ended")
    start("leaving", conf=ELSEWHERE)
    again = scene.started(held.result, 2)
    scene.open()
    assert held.result.get(timeout=60) == "return"
    assert again.fence > held.fence
    assert scene.journal.entries(what="conflict") == []


@pytest.mark.parametrize("own_pool", ["solo", "threads", "gevent", "eventlet"])
@in_pools("prefork")
def test_cold_shutdown_shuts_nobody_out(scene, pool, start, own_pool):
    """SIGQUIT, pools whose bodies Celery ends, waits for or leaves: the next call is let in."""
    worker = start("leaving", pool=own_pool)
    held = scene.hold(scene.tasks.work, "leaving", singleton=LONG)
    worker.process.send_signal(signal.SIGQUIT)
    scene.open()
    wait_for_end(worker)
    scene.open()
    assert scene.told(pool, scene.gate) == "return"
    assert scene.journal.entries(what="start")[1]["fence"] > held.fence
    assert scene.journal.entries(what="lost") == []


def test_max_tasks_per_child_releases_before_the_process_ends(scene, start):
    """Every call has a process of its own, and never meets the lock of the one before."""
    start("leaving", arguments=("--max-tasks-per-child", "1"))
    for _ in range(2):
        call = scene.send(scene.tasks.work, "leaving", singleton={"on_conflict": "raise"})
        assert call.get(timeout=60) == "return"
    pids = [entry["pid"] for entry in scene.journal.entries(what="start")]
    assert len(set(pids)) == 2
    wait_until(lambda: all(has_ended(pid) for pid in pids), "the processes have ended")
    assert [e["outcome"] for e in scene.journal.entries(what="released")] == ["released"] * 2
