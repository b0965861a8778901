"""Hard time limit, revoke with terminate, kill -9: freed on proof of death, else by the lease."""

import os
import signal
import statistics
import time

import pytest
import redis
from celery.exceptions import TaskRevokedError, TimeLimitExceeded

from celery_setnx import SetnxLock, is_skipped
from celery_setnx.process import has_ended
from tests.exits import in_pools
from tests.harness import wait_until

LONG = {"lease": 30}
KILLS = 15


def seconds_until_free(locks: redis.Redis, key: str, deadline_s: float = 20) -> float:
    """For how long the lock shuts out a rival who proves nothing of other processes."""
    since = time.monotonic()
    rival = SetnxLock(locks, key)
    wait_until(lambda: rival.acquire().acquired, f"{key} is free", deadline_s)
    took_s = time.monotonic() - since
    rival.release()
    return took_s


@in_pools("prefork", "gevent")
def test_hard_time_limit_frees(tasks, pool, journal, locks, name, hold):
    """Long before the lease would end it."""
    held = hold(tasks.work, pool, name, time_limit=3, singleton=LONG)
    with pytest.raises(TimeLimitExceeded):
        held.result.get(timeout=10)
    assert seconds_until_free(locks, held.key) < 5
    assert journal.entries(what="end") == []


@in_pools("prefork")
def test_hard_time_limit_frees_the_lock_of_a_body_that_does_not_go(tasks, pool, locks, worker_of, name, hold):
    """A process that ignores SIGTERM is killed, and the worker frees what it held."""
    held = hold(tasks.stubborn, pool, name, time_limit=3, singleton=LONG)
    with pytest.raises(TimeLimitExceeded):
        held.result.get(timeout=10)
    assert seconds_until_free(locks, held.key) < 5
    assert has_ended(held.pid)
    log = worker_of(pool).wait_for_log(f"[{held.result.id}] died with its process {held.pid}; its lock")
    assert f"{held.key} is freed" in log


@in_pools("prefork")
@pytest.mark.parametrize("name_of_signal", ["SIGTERM", "SIGKILL"])
def test_terminate_frees(tasks, pool, locks, name, hold, name_of_signal):
    """revoke(terminate=True): the process dies, and the lock is free long before its lease ends."""
    held = hold(tasks.work, pool, name, singleton=LONG)
    held.result.revoke(terminate=True, signal=name_of_signal)
    assert seconds_until_free(locks, held.key) < 5
    with pytest.raises(TaskRevokedError):
        held.result.get(timeout=10)


@in_pools("prefork")
def test_terminate_keeps_the_lock_of_a_process_that_lives_on(tasks, pool, journal, locks, gates, name, hold):
    """A body that ignores SIGTERM is still running, so nobody else gets its lock."""
    held = hold(tasks.stubborn, pool, name)
    held.result.revoke(terminate=True, signal="SIGTERM")
    give_up = time.monotonic() + 1.5 * tasks.LEASE_S
    while time.monotonic() < give_up:
        assert not SetnxLock(locks, held.key).acquire().acquired
    os.kill(held.pid, signal.SIGKILL)
    assert seconds_until_free(locks, held.key) < 5


@in_pools("gevent", "eventlet")
def test_terminate_releases(tasks, pool, journal, locks, name, hold):
    """The greenlet is ended in mid-body, and gives its lock back."""
    held = hold(tasks.work, pool, name, singleton=LONG)
    held.result.revoke(terminate=True)
    assert seconds_until_free(locks, held.key) < 5
    journal.wait_for("released", task_id=held.result.id)
    assert journal.words(held.result.id)[:3] == ["acquired", "start", "released"]


@in_pools("gevent", "eventlet")
def test_terminate_of_a_greenlet_is_no_error(tasks, pool, journal, worker_of, name, hold):
    """The worker does not take Celery's number of a greenlet for the pid of a process."""
    held = hold(tasks.work, pool, name)
    held.result.revoke(terminate=True)
    journal.wait_for("released", task_id=held.result.id)
    assert tasks.work.apply_async(["a"], queue=pool).get(timeout=10) == "return"
    assert "has_ended" not in worker_of(pool).log_text()


@in_pools("solo", "threads")
def test_terminate_changes_nothing(tasks, pool, journal, locks, gates, name, hold):
    """Celery cannot end these bodies: they run on, under their lock."""
    held = hold(tasks.work, pool, name)
    held.result.revoke(terminate=True)
    give_up = time.monotonic() + 1.5 * tasks.LEASE_S
    while time.monotonic() < give_up:
        assert not SetnxLock(locks, held.key).acquire().acquired
    gates(name)
    journal.wait_for("released", task_id=held.result.id)
    assert journal.words(held.result.id)[:4] == ["acquired", "start", "end", "released"]


def test_killed_child_is_freed_by_its_parent(tasks, locks, start_worker, hold, capsys):
    """kill -9 of a pool child, lease 30 s: free for a rival without proof, median under a second."""
    worker = start_worker(concurrency=KILLS, queues="doomed")
    calls = [hold(tasks.work, "doomed", f"gated-{number}", singleton=LONG) for number in range(KILLS)]
    took_s: list[float] = []
    for call in calls:
        os.kill(call.pid, signal.SIGKILL)
        took_s.append(seconds_until_free(locks, call.key))
    median_s, longest_s = statistics.median(took_s), max(took_s)
    with capsys.disabled():
        print(
            f"\nkill -9 of a pool child, {KILLS} times: free after {median_s * 1000:.0f} ms in the median, "
            f"{longest_s * 1000:.0f} ms at most (lease 30 s)"
        )
    assert median_s < 1
    assert longest_s < 10
    wait_until(lambda: worker.log_text().count("died with its process") == KILLS, f"{KILLS} lines in the log")


@in_pools("prefork")
def test_killed_child_never_costs_the_next_holder_its_lock(
    tasks, pool, observer, journal, gates, locks, name, hold
):
    """A same-host rival that was faster than the parent keeps the lock that it took over."""
    held = hold(tasks.work, pool, name, singleton=LONG)
    rivals = [
        tasks.work.apply_async([name], queue=queue, singleton={"on_conflict": "retry"})
        for queue in (pool, observer)
    ]
    os.kill(held.pid, signal.SIGKILL)
    for number in (2, 3):
        journal.wait_for("start", number, name=name)
        assert len(journal.entries(what="start", name=name)) == number
        gates(name)
    assert [rival.get(timeout=10) for rival in rivals] == ["return", "return"]
    assert journal.entries(what="lost") == []
    starts = journal.entries(what="start", name=name)
    ends = journal.entries(what="end", name=name)
    assert ends[0]["at"] <= starts[2]["at"]
    assert starts[0]["fence"] < starts[1]["fence"] < starts[2]["fence"]


@pytest.mark.parametrize("pool_of_the_dead", ["prefork", "solo", "threads", "gevent", "eventlet"])
@in_pools("prefork")
def test_killed_worker_is_taken_over_at_once_with_proof(
    tasks, pool, observer, journal, gates, start_worker, name, hold, pool_of_the_dead
):
    """kill -9 of a whole worker, lease 30 s: a same-host rival does not wait; another one is told held."""
    doomed = start_worker(pool=pool_of_the_dead, queues="doomed")
    held = hold(tasks.work, "doomed", name, singleton=LONG)
    doomed.kill()
    wait_until(lambda: has_ended(held.pid), "the process has ended")
    assert is_skipped(tasks.work.apply_async([name], queue=observer).get(timeout=10))
    gates(name)
    rival = tasks.work.apply_async([name], queue=pool)
    assert rival.get(timeout=10) == "return"
    (taken,) = journal.entries(what="taken_over", task_id=rival.id)
    assert taken["holder"]["task_id"] == held.result.id
    assert taken["holder"]["pid"] == held.pid
    assert taken["fence"] > held.fence


def test_killed_worker_is_taken_over_only_at_the_deadline_without_proof(
    tasks, observer, journal, gates, start_worker, name, hold
):
    """setnx_same_host=False: told held until the dead holder's deadline, and then in at once."""
    doomed = start_worker(queues="doomed")
    held = hold(tasks.work, "doomed", name, singleton={"lease": 8})
    doomed.kill()
    told = tasks.work.apply_async([name], queue=observer).get(timeout=10)
    assert is_skipped(told)
    rival = tasks.work.apply_async([name], queue=observer, singleton={"on_conflict": "retry"})
    journal.wait_for("conflict", task_id=rival.id)
    journal.wait_for("taken_over", task_id=rival.id)
    began = time.time()
    gates(name)
    assert rival.get(timeout=10) == "return"
    (taken,) = journal.entries(what="taken_over", task_id=rival.id)
    assert told["holder"]["deadline"] <= taken["holder"]["deadline"] <= began
    assert taken["fence"] / 1e6 - taken["holder"]["deadline"] < 1  # both by the server's clock
    assert taken["fence"] > held.fence
