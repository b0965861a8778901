"""Delivered twice while alive: never side by side. Delivered again after a crash: not locked out by it."""

import os
import signal

import pytest

from celery_setnx.lock.process import has_ended
from tests.exits import in_pools
from tests.exits.conftest import LONG, Held


# A solo worker does not fetch a second delivery while a body runs.
def again_in(*pools: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("delivered_twice", pools, indirect=True)


@pytest.fixture
def delivered_twice(request, scene, worker_of, impatient_broker):
    """Sends a call that runs, and comes back when a second delivery of it waits in the same worker."""
    queue = f"again-{request.param}"
    worker_of(queue)
    if request.param in ("gevent", "eventlet"):
        worker_of("again-other")  # kombu's green loop does not look for such messages: another worker does

    def hold(task, *args, **singleton) -> Held:
        held = scene.hold(task, queue, *args, connection=impatient_broker, singleton=singleton)
        conflict = scene.journal.wait_for("conflict", task_id=held.result.id)[0]
        assert conflict["policy"] == "wait"
        assert conflict["holder"]["task_id"] == held.result.id
        return held

    return hold


@again_in("prefork", "threads", "gevent", "eventlet")
def test_delivered_twice_waits_and_is_dropped_after_success(scene, delivered_twice):
    """The second delivery waits while the first runs; its result is SUCCESS, so it does not run again.

    A waiting delivery stores no state: it could overwrite the SUCCESS that the first is about to store.
    """
    options = {"on_conflict": "raise", "max_wait": 0, "retry_delay": 1, "retry_delay_max": 1}
    held = delivered_twice(scene.tasks.late, **options)
    scene.journal.wait_for("postrun", task_id=held.result.id)
    assert held.result.state != "RETRY"
    scene.open()
    assert held.result.get(timeout=60) == "return"
    assert scene.outcomes(held.result, 2)
    assert len(scene.fences(held.result)) >= 2  # it may be delivered more often
    assert [scene.journal.words(held.result.id).count(word) for word in ("start", "end")] == [1, 1]
    assert held.result.state == "SUCCESS"
    assert not scene.locks.exists(held.key)


@again_in("prefork")
def test_delivered_twice_runs_again_after_a_failure(scene, delivered_twice):
    """When the first has ended, with a larger fence."""
    held = delivered_twice(scene.tasks.late, "raise")
    scene.open(times=2)
    ends = scene.journal.wait_for("end", count=2, task_id=held.result.id)
    starts = scene.journal.entries(what="start", task_id=held.result.id)
    assert ends[0]["at"] <= starts[1]["at"]
    assert starts[0]["fence"] < starts[1]["fence"]
    scene.outcomes(held.result, 2)


@again_in("prefork", "gevent")
def test_delivered_twice_runs_once_though_nobody_stores_its_result(scene, delivered_twice):
    """A receipt tells the second delivery that the first has ended."""
    held = delivered_twice(scene.tasks.resultless)
    scene.open()
    scene.outcomes(held.result, 2)  # the second delivery has had the lock, too
    scene.wait_until_free(held.key)
    assert [scene.journal.words(held.result.id).count(word) for word in ("start", "end")] == [1, 1]


@in_pools("prefork")
@pytest.mark.parametrize("kind", ["requeued_if_lost", "retried_if_lost"])
def test_redelivered_after_a_killed_child_runs_at_once(scene, pool, kind):
    """reject_on_worker_lost and retry_on_worker_lost: not locked out by its own dead run."""
    held = scene.hold(getattr(scene.tasks, kind), pool, singleton=LONG)
    os.kill(held.pid, signal.SIGKILL)
    assert scene.started(held.result, 2).fence > held.fence
    assert has_ended(held.pid)
    scene.open()
    assert held.result.get(timeout=60) == (scene.gate if kind == "requeued_if_lost" else 1)
    assert scene.journal.entries(what="lost") == []
    assert scene.journal.entries(what="conflict") == []


@pytest.mark.parametrize(("same_host", "lease"), [(True, 600), (False, 1)], ids=["proved", "expired"])
def test_redelivered_after_a_killed_worker_takes_over(
    scene, start, impatient, impatient_broker, same_host, lease
):
    """acks_late, the whole worker killed: the call is delivered again, and not locked out by its dead run."""
    doomed = start("crashed", conf=impatient)
    held = scene.hold(scene.tasks.late, "crashed", connection=impatient_broker, singleton={"lease": lease})
    doomed.kill()
    start("crashed", conf={**impatient, "setnx_same_host": same_host})
    assert scene.started(held.result, 2).fence > held.fence
    (taken,) = scene.journal.entries(what="taken_over", task_id=held.result.id)
    assert taken["holder"]["pid"] == held.pid
    scene.open()
    assert held.result.get(timeout=60) == "return"
