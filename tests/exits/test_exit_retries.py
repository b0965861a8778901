"""self.retry(), autoretry, replace(): released, or kept with hold_on_retry; the successor never skips."""

import os
import signal

import pytest

from celery_setnx.lock.process import has_ended
from tests.exits import every_pool, in_pools
from tests.harness import wait_until
from tests.stage import wait_for_ends

HELD_BACK = {"hold_on_retry": True}


@every_pool
@pytest.mark.parametrize(
    ("attempts", "options"), [(3, {}), (5, HELD_BACK)], ids=["released", "hold_on_retry"]
)
def test_retries_at_once_release_or_keep_one_fence(scene, pool, attempts, options):
    """Each attempt acquires anew, with a larger fence, or comes before or after the lock is held for it."""
    result = scene.send(scene.tasks.retrying, pool, None, attempts, singleton=options)
    assert result.get(timeout=60) == attempts - 1
    fences = scene.fences(result)
    assert len(fences) == attempts
    assert fences == [fences[0]] * attempts if options else fences == sorted(set(fences))
    assert options or scene.outcomes(result, attempts) == ["released"] * attempts


@every_pool
@pytest.mark.parametrize("options", [{}, HELD_BACK], ids=["released", "hold_on_retry"])
@pytest.mark.parametrize("task", ["retrying", "autoretried"])
def test_retry_that_waits_has_released_or_keeps_the_lock(scene, pool, worker_of, observer, task, options):
    """Free between two attempts; with hold_on_retry rivals are told so past a lease, and the fence stays."""
    result = scene.send(getattr(scene.tasks, task), pool, scene.later, singleton=options)
    scene.journal.wait_for("retry", task_id=result.id)
    for _ in range(2):
        told = scene.told(observer)
        if options:
            assert told["holder"]["state"] == "held_for_retry"
            assert told["holder"]["task_id"] == result.id
            scene.age(2 * scene.tasks.LEASE_S)
        else:
            assert told == "return"
    scene.serve_later(worker_of(pool))
    assert result.get(timeout=60) == 1
    assert scene.outcomes(result, 2) == ["held_for_retry" if options else "released", "released"]
    first, second = scene.fences(result)
    assert first == second if options else first < second
    assert scene.journal.entries(what="taken_over") == []


# A solo worker does not fetch the next attempt while a body runs.
@in_pools("prefork", "threads", "gevent", "eventlet")
@pytest.mark.parametrize(
    ("task", "options"),
    [("lingering", {}), ("lingering", HELD_BACK), ("replaced_early", {})],
    ids=["retry", "hold_on_retry", "replace"],
)
def test_successor_that_comes_early_waits_for_its_predecessor(scene, pool, task, options):
    """The body goes on after self.retry() or replace(): the next run waits, whatever on_conflict says."""
    options = {"on_conflict": "raise", "max_wait": 0, **options}
    held = scene.hold(getattr(scene.tasks, task), pool, pool, singleton=options)
    conflicts = scene.journal.wait_for("conflict", count=2, task_id=held.result.id)
    assert {entry["policy"] for entry in conflicts} == {"wait"}
    scene.open(times=2)
    assert held.result.get(timeout=60) == ("return" if task == "replaced_early" else 1)
    first, second = scene.fences(held.result)
    assert held.fence == first
    assert first == second if HELD_BACK.items() <= options.items() else first < second


@every_pool
def test_replace_releases(scene, pool):
    """The replacement, with the same task id and key, runs under a lock of its own."""
    result = scene.send(scene.tasks.replaced, pool, pool)
    assert result.get(timeout=60) == "return"
    scene.outcomes(result, 2)
    first, second = scene.fences(result)
    assert first < second


@every_pool
@pytest.mark.parametrize("end", ["revoked", pytest.param("expired", marks=pytest.mark.clock)])
def test_retry_that_is_dropped_frees_the_held_lock(scene, pool, worker_of, end):
    """As soon as Celery drops the waiting retry, not after the queue lease; Celery's expiry is real time."""
    queue, options = (scene.later, {}) if end == "revoked" else (None, {"expires": 3})
    waiting = {"countdown": 4 if end == "expired" else 0}
    held_back = {**HELD_BACK, "queue_lease": 600}
    result = scene.send(scene.tasks.retrying, pool, queue, kwargs=waiting, singleton=held_back, **options)
    assert scene.outcomes(result) == ["held_for_retry"]
    key = scene.journal.entries(what="released")[0]["key"]
    scene.journal.wait_for("retry", task_id=result.id)
    if end == "revoked":
        assert scene.locks.exists(key)
        result.revoke()
        scene.serve_later(worker_of(pool))
    wait_until(lambda: not scene.locks.exists(key), "the lock is free")
    wait_until(lambda: result.state == "REVOKED", "revoked")
    assert len(scene.journal.entries(what="start", task_id=result.id)) == 1


@every_pool
def test_giving_up_frees_the_held_lock(scene, pool):
    """max_retries exceeded: the last attempt fails, and releases."""
    result = scene.send(scene.tasks.retrying, pool, None, 9, kwargs={"max_retries": 1}, singleton=HELD_BACK)
    with pytest.raises(ZeroDivisionError):
        result.get(timeout=60)
    assert scene.outcomes(result, 2) == ["held_for_retry", "released"]
    assert not scene.locks.exists(scene.journal.entries(what="released")[0]["key"])


@in_pools("prefork")
def test_held_lock_outlives_the_process_that_held_it(scene, pool, start):
    """A dead process proves nothing of a lock that is held for a retry: the retry waits in the broker."""
    worker = start("doomed")
    result = scene.send(scene.tasks.retrying, "doomed", scene.later, singleton=HELD_BACK)
    scene.journal.wait_for("postrun", task_id=result.id)
    # Until the worker has heard of the attempt's end, the death of its process would fail the call.
    wait_for_ends(scene.tasks.app, worker)
    pid = scene.started(result).pid
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: has_ended(pid), "the process has ended")
    assert scene.told(pool)["holder"]["state"] == "held_for_retry"
    scene.serve_later(worker)
    assert result.get(timeout=60) == 1
    first, second = scene.fences(result)
    assert first == second
