"""Hard time limit, revoke with terminate, kill -9: freed on proof of death, else by the lease."""

import os
import signal
import statistics
import time

import pytest
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from celery_setnx import is_skipped
from celery_setnx.lock.process import has_ended
from tests.exits import POOLS, in_pools
from tests.exits.conftest import ELSEWHERE, LONG, RETRY
from tests.harness import wait_until

KILLS = 15
LIMIT_S = 5


@pytest.mark.clock  # Celery's limits are real time, and the body has to begin before
@pytest.mark.parametrize(
    ("pool", "task"), [("prefork", "work"), ("gevent", "work"), ("prefork", "stubborn")], indirect=["pool"]
)
def test_hard_time_limit_frees(scene, pool, worker_of, task):
    """Long before the lease would end it; who ignores SIGTERM is killed, and the worker frees its lock."""
    held = scene.hold(getattr(scene.tasks, task), pool, time_limit=LIMIT_S, singleton=LONG)
    with pytest.raises(TimeLimitExceeded):
        held.result.get(timeout=60)
    scene.wait_until_free(held.key)
    assert scene.journal.entries(what="end") == []
    if task == "stubborn":
        assert has_ended(held.pid)
        log = worker_of(pool).wait_for_log(f"[{held.result.id}] died with its process {held.pid}; its lock")
        assert f"{held.key} is freed" in log


@in_pools("prefork")
@pytest.mark.parametrize("name_of_signal", ["SIGTERM", "SIGKILL"])
def test_terminate_frees(scene, pool, name_of_signal):
    """revoke(terminate=True): the process dies, and the lock is free long before its lease ends."""
    held = scene.hold(scene.tasks.work, pool, singleton=LONG)
    held.result.revoke(terminate=True, signal=name_of_signal)
    scene.wait_until_free(held.key)
    with pytest.raises(TaskRevokedError):
        held.result.get(timeout=60)


@pytest.mark.clock  # a lease is renewed while it really runs
@in_pools("prefork")
def test_terminate_keeps_the_lock_of_a_process_that_lives_on(scene, pool):
    """A body that ignores SIGTERM is still running, so nobody else gets its lock."""
    held = scene.hold(scene.tasks.stubborn, pool)
    held.result.revoke(terminate=True, signal="SIGTERM")
    scene.assert_renewed(held.key)
    os.kill(held.pid, signal.SIGKILL)
    scene.wait_until_free(held.key)


@in_pools("gevent", "eventlet")
def test_terminate_of_a_greenlet_releases(scene, pool, worker_of):
    """In mid-body; the worker does not take Celery's number of a greenlet for the pid of a process."""
    held = scene.hold(scene.tasks.work, pool, singleton=LONG)
    held.result.revoke(terminate=True)
    scene.wait_until_free(held.key)
    scene.journal.wait_for("released", task_id=held.result.id)
    assert scene.lock_words(held.result)[:3] == ["acquired", "start", "released"]
    assert scene.told(pool) == "return"
    assert "has_ended" not in worker_of(pool).log_text()


@pytest.mark.clock  # a lease is renewed while it really runs
@in_pools("solo", "threads")
def test_terminate_changes_nothing(scene, pool):
    """Celery cannot end these bodies: they run on, under their lock."""
    held = scene.hold(scene.tasks.work, pool)
    held.result.revoke(terminate=True)
    scene.assert_renewed(held.key)
    scene.open()
    scene.journal.wait_for("released", task_id=held.result.id)
    assert scene.lock_words(held.result)[:4] == ["acquired", "start", "end", "released"]


def test_killed_child_is_freed_by_its_parent(scene, start, capsys):
    """kill -9 of a pool child: free for a rival without proof, long before its lease ends."""
    worker = start("doomed", concurrency=KILLS)
    calls = [
        scene.hold(scene.tasks.work, "doomed", name=f"{scene.gate}-{number}", singleton=LONG)
        for number in range(KILLS)
    ]
    took_s: list[float] = []
    for call in calls:
        killed = time.monotonic()
        os.kill(call.pid, signal.SIGKILL)
        scene.wait_until_free(call.key)
        took_s.append(time.monotonic() - killed)
    median_s, longest_s = statistics.median(took_s), max(took_s)
    with capsys.disabled():
        print(
            f"\nkill -9 of a pool child, {KILLS} times: free after {median_s * 1000:.0f} ms in the median, "
            f"{longest_s * 1000:.0f} ms at most (lease {LONG['lease']} s)"
        )
    wait_until(lambda: worker.log_text().count("died with its process") == KILLS, f"{KILLS} lines in the log")


@in_pools("prefork")
def test_killed_child_never_costs_the_next_holder_its_lock(scene, pool, observer):
    """A same-host rival that was faster than the parent keeps the lock that it took over."""
    held = scene.hold(scene.tasks.work, pool, singleton=LONG)
    options = {"name": scene.gate, "singleton": {**RETRY, **LONG}}
    rivals = [scene.send(scene.tasks.work, queue, **options) for queue in (pool, observer)]
    os.kill(held.pid, signal.SIGKILL)
    for number in (2, 3):
        scene.journal.wait_for("start", number, name=scene.gate)
        assert len(scene.journal.entries(what="start", name=scene.gate)) == number
        scene.open()
    assert [rival.get(timeout=60) for rival in rivals] == ["return", "return"]
    assert scene.journal.entries(what="lost") == []
    starts = scene.journal.entries(what="start", name=scene.gate)
    ends = scene.journal.entries(what="end", name=scene.gate)
    assert ends[0]["at"] <= starts[2]["at"]
    assert starts[0]["fence"] < starts[1]["fence"] < starts[2]["fence"]


@pytest.mark.parametrize("pool_of_the_dead", POOLS)
@in_pools("prefork")
def test_killed_worker_is_taken_over_at_once_with_proof(scene, pool, observer, start, pool_of_the_dead):
    """kill -9 of a whole worker: a same-host rival does not wait for the lease; another one is told held."""
    doomed = start("doomed", pool=pool_of_the_dead)
    held = scene.hold(scene.tasks.work, "doomed", singleton=LONG)
    doomed.kill()
    wait_until(lambda: has_ended(held.pid), "the process has ended")
    assert is_skipped(scene.told(observer, scene.gate))
    scene.open()
    rival = scene.send(scene.tasks.work, pool, name=scene.gate)
    assert rival.get(timeout=60) == "return"
    (taken,) = scene.journal.entries(what="taken_over", task_id=rival.id)
    assert taken["holder"]["task_id"] == held.result.id
    assert taken["holder"]["pid"] == held.pid
    assert taken["fence"] > held.fence


def test_killed_worker_is_taken_over_only_at_the_deadline_without_proof(scene, observer, start):
    """setnx_same_host=False: told held until the dead holder's deadline, and then in at once."""
    doomed = start("doomed", conf=ELSEWHERE)
    held = scene.hold(scene.tasks.work, "doomed", singleton=LONG)
    doomed.kill()
    rival = scene.send(scene.tasks.work, observer, name=scene.gate, singleton=RETRY)
    scene.journal.wait_for("conflict", task_id=rival.id)
    scene.age(300, scene.gate)
    told = scene.told(observer, scene.gate)
    assert is_skipped(told)
    assert scene.journal.entries(what="taken_over") == []
    scene.age(told["holder"]["deadline"] - time.time() + 0.001, scene.gate)
    passed = time.time()
    (taken,) = scene.journal.wait_for("taken_over", task_id=rival.id)
    assert taken["holder"]["deadline"] <= passed <= taken["fence"] / 1e6
    scene.open()
    assert rival.get(timeout=60) == "return"
    conflicts = scene.journal.entries(what="conflict", task_id=rival.id)
    assert sum(entry["time"] > passed for entry in conflicts) <= 1  # one that was on its way to the journal
    assert taken["fence"] > held.fence
