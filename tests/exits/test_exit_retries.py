"""self.retry(), autoretry, replace(): released, or kept with hold_on_retry; the successor never skips."""

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from celery_setnx import is_skipped
from celery_setnx.process import has_ended
from tests.exits import every_pool, in_pools
from tests.harness import Journal, wait_until

WAIT_S = 0.8
HELD_BACK = {"hold_on_retry": True}


@pytest.fixture
def rival(tasks, observer) -> Callable[[str], Any]:
    """The result of a call of the same key in another worker."""
    return lambda name: tasks.work.apply_async([name], queue=observer).get(timeout=10)


def fences(journal: Journal, task_id: str) -> list[int]:
    return [entry["fence"] for entry in journal.entries(what="acquired", task_id=task_id)]


@every_pool
def test_retry_releases(tasks, pool, journal):
    """self.retry() at once: each attempt acquires anew, with a larger fence."""
    result = tasks.retrying.apply_async(["a", 3], queue=pool)
    assert result.get(timeout=10) == 2
    journal.wait_for("released", count=3, task_id=result.id)
    assert {e["outcome"] for e in journal.entries(what="released")} == {"released"}
    assert len(set(fences(journal, result.id))) == 3
    assert fences(journal, result.id) == sorted(fences(journal, result.id))


@every_pool
def test_retry_lets_others_in_while_it_waits(tasks, pool, journal, rival):
    """Without hold_on_retry the lock is free between two attempts."""
    result = tasks.retrying.apply_async(["a", 2, WAIT_S], queue=pool)
    journal.wait_for("retry", task_id=result.id)
    assert rival("a") == "return"
    assert result.get(timeout=10) == 1


@in_pools("prefork", "threads", "gevent", "eventlet")
@pytest.mark.parametrize("options", [{}, HELD_BACK], ids=["", "hold_on_retry"])
def test_retry_that_comes_early_waits_for_its_predecessor(tasks, pool, journal, gates, name, hold, options):
    """The body goes on after self.retry(): the next attempt waits, whatever on_conflict says."""
    held = hold(tasks.lingering, pool, name, singleton={"on_conflict": "raise", "max_wait": 0, **options})
    conflicts = journal.wait_for("conflict", count=2, task_id=held.result.id)
    assert {entry["policy"] for entry in conflicts} == {"wait"}
    gates(name)
    assert held.result.get(timeout=10) == 1
    assert fences(journal, held.result.id)[0] == held.fence
    assert len(fences(journal, held.result.id)) == 2


@every_pool
def test_autoretry_releases(tasks, pool, journal, rival):
    """autoretry_for: free while the retry waits, acquired anew by it."""
    result = tasks.autoretried.apply_async(["a"], queue=pool)
    journal.wait_for("retry", task_id=result.id)
    assert rival("a") == "return"
    assert result.get(timeout=10) == 1
    first, second = fences(journal, result.id)
    assert first < second


@every_pool
def test_replace_releases(tasks, pool, journal):
    """The replacement, with the same task id and key, runs under a lock of its own."""
    result = tasks.replaced.apply_async(["a", pool], queue=pool)
    assert result.get(timeout=10) == "return"
    journal.wait_for("released", count=2, task_id=result.id)
    first, second = fences(journal, result.id)
    assert first < second


@in_pools("prefork", "threads", "gevent", "eventlet")
def test_replacement_that_comes_early_waits_for_its_predecessor(tasks, pool, journal, gates, name, hold):
    """replace() publishes inside the body: its call waits, whatever on_conflict says."""
    held = hold(tasks.replaced_early, pool, name, pool)
    conflicts = journal.wait_for("conflict", count=2, task_id=held.result.id)
    assert {entry["policy"] for entry in conflicts} == {"wait"}
    gates(name)
    gates(name)
    assert held.result.get(timeout=10) == "return"
    first, second = fences(journal, held.result.id)
    assert first < second


@every_pool
def test_retry_with_hold_on_retry_keeps_the_lock(tasks, pool, journal, gates, name, rival):
    """A rival is told held_for_retry for longer than a lease; the retry resumes with the same fence."""
    options = {**HELD_BACK, "lease": 1}
    gates(name)
    result = tasks.retrying.apply_async([name, 2, 2], queue=pool, singleton=options)
    journal.wait_for("retry", task_id=result.id)
    told = []
    while not journal.entries(what="start", task_id=result.id)[1:]:
        told.append(rival(name))
        assert is_skipped(told[-1])
    gates(name)
    assert len(told) > 1
    assert told[0]["holder"]["state"] == "held_for_retry"
    assert told[0]["holder"]["task_id"] == result.id
    assert result.get(timeout=10) == 1
    first, second = fences(journal, result.id)
    assert first == second
    outcomes = [e["outcome"] for e in journal.wait_for("released", count=2, task_id=result.id)]
    assert outcomes == ["held_for_retry", "released"]
    assert journal.entries(what="taken_over") == []


@every_pool
def test_autoretry_with_hold_on_retry_keeps_the_lock(tasks, pool, journal, rival):
    """A rival is told held_for_retry; the retry resumes with the same fence."""
    result = tasks.autoretried.apply_async(["a"], queue=pool, singleton=HELD_BACK)
    journal.wait_for("retry", task_id=result.id)
    assert rival("a")["holder"]["state"] == "held_for_retry"
    assert result.get(timeout=10) == 1
    first, second = fences(journal, result.id)
    assert first == second


@every_pool
def test_several_retries_with_hold_on_retry_keep_one_fence(tasks, pool, journal):
    """Retries that come at once, before or after the lock is held for them."""
    result = tasks.retrying.apply_async(["a", 5], queue=pool, singleton=HELD_BACK)
    assert result.get(timeout=10) == 4
    assert len(fences(journal, result.id)) == 5
    assert len(set(fences(journal, result.id))) == 1


@every_pool
def test_revoked_retry_frees_the_held_lock(tasks, pool, journal, locks):
    """The waiting retry is revoked: free as soon as Celery drops it, not after the queue lease."""
    result = tasks.retrying.apply_async(["a", 2, 4], queue=pool, singleton=HELD_BACK)
    held = journal.wait_for("released", task_id=result.id)[0]
    journal.wait_for("retry", task_id=result.id)
    assert locks.exists(held["key"])
    result.revoke()
    wait_until(lambda: not locks.exists(held["key"]), "the lock is free", 15)
    wait_until(lambda: result.state == "REVOKED", "revoked")
    assert len(journal.entries(what="start")) == 1


@every_pool
def test_expired_retry_frees_the_held_lock(tasks, pool, journal, locks):
    """The waiting retry expires: free as soon as Celery drops it, not after the queue lease."""
    result = tasks.retrying.apply_async(["a", 2, 4], queue=pool, singleton=HELD_BACK, expires=3)
    held = journal.wait_for("released", task_id=result.id)[0]
    assert held["outcome"] == "held_for_retry"
    wait_until(lambda: not locks.exists(held["key"]), "the lock is free", 15)
    assert len(journal.entries(what="start")) == 1


@every_pool
def test_giving_up_frees_the_held_lock(tasks, pool, journal, locks):
    """max_retries exceeded: the last attempt fails, and releases."""
    result = tasks.retrying.apply_async(["a", 9, 1, 1], queue=pool, singleton=HELD_BACK)
    with pytest.raises(ZeroDivisionError):
        result.get(timeout=10)
    outcomes = [e["outcome"] for e in journal.wait_for("released", count=2, task_id=result.id)]
    assert outcomes == ["held_for_retry", "released"]
    assert not locks.exists(journal.entries(what="released")[0]["key"])


@in_pools("prefork")
def test_held_lock_outlives_the_process_that_held_it(tasks, pool, journal, start_worker):
    """A dead process proves nothing of a lock that is held for a retry: the retry waits in the broker."""
    node = f"{start_worker(queues='doomed').name}@test"
    result = tasks.retrying.apply_async(["a", 2, 5], queue="doomed", singleton=HELD_BACK)
    journal.wait_for("postrun", task_id=result.id)
    # Until the worker has heard of the attempt's end, the death of its process would fail the call.
    inspect = tasks.app.control.inspect([node])
    wait_until(lambda: inspect.active() == {node: []}, "the worker knows that the first attempt has ended")
    pid = journal.entries(what="start", task_id=result.id)[0]["pid"]
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid), "the process has ended")
    told = tasks.work.apply_async(["a"], queue=pool).get(timeout=10)
    assert told["holder"]["state"] == "held_for_retry"
    assert result.get(timeout=15) == 1
    first, second = fences(journal, result.id)
    assert first == second
