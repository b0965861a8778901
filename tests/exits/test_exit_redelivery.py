"""Delivered twice while alive: never side by side. Delivered again after a crash: not locked out by it."""

import os
import signal
from typing import Any

import pytest

from celery_setnx.process import has_ended
from tests.exits import in_pools
from tests.exits.conftest import Held, started
from tests.harness import Journal

LONG = {"lease": 30}


# A solo worker does not fetch a second delivery while a body runs.
@pytest.fixture(params=["prefork", "threads", "gevent", "eventlet"])
def impatient_pool(request, tasks, impatient) -> str:
    """A worker of this pool that gets what it has not acknowledged within 2 s again; its queue."""
    impatient(pool=request.param, concurrency=3, queues="again")
    if request.param in ("gevent", "eventlet"):
        impatient(queues="other")  # kombu's green loop does not look for such messages: another worker does
    return "again"


def delivered_twice(journal: Journal, hold: Any, task: Any, name: str, **options: Any) -> Held:
    """A call that runs, and of which a second delivery waits."""
    held: Held = hold(task, "again", name, **options)
    conflict = journal.wait_for("conflict", task_id=held.result.id)[0]
    assert conflict["policy"] == "wait"
    assert conflict["holder"]["task_id"] == held.result.id
    return held


def side_by_side(journal: Journal, task_id: str) -> bool:
    """True if a body began before the one before it had ended."""
    starts = journal.entries(what="start", task_id=task_id)
    ends = journal.entries(what="end", task_id=task_id)
    return any(end["at"] > start["at"] for start, end in zip(starts[1:], ends))


def test_delivered_twice_waits_and_is_dropped_after_success(
    tasks, impatient_pool, impatient_broker, journal, gates, locks, name, hold
):
    """The second delivery waits while the first runs; its result is SUCCESS, so it does not run again."""
    options = {"on_conflict": "raise", "max_wait": 0, "retry_delay": 1, "retry_delay_max": 1}
    held = delivered_twice(journal, hold, tasks.late, name, connection=impatient_broker, singleton=options)
    journal.wait_for("postrun", task_id=held.result.id)
    gates(name)
    assert held.result.get(timeout=10) == "return"
    journal.wait_for("acquired", count=2, task_id=held.result.id)
    journal.wait_for("released", count=2, task_id=held.result.id)
    assert len(journal.entries(what="start")) == len(journal.entries(what="end")) == 1
    assert held.result.state == "SUCCESS"
    assert not locks.exists(held.key)


@pytest.mark.parametrize("impatient_pool", ["prefork"], indirect=True)
def test_delivered_twice_leaves_the_result_to_the_first(
    tasks, impatient_pool, impatient_broker, journal, gates, name, hold
):
    """A waiting delivery stores no state: it could overwrite the SUCCESS that the first is about to store."""
    held = delivered_twice(journal, hold, tasks.late, name, connection=impatient_broker)
    journal.wait_for("postrun", task_id=held.result.id)
    state = held.result.state
    gates(name)
    assert held.result.get(timeout=10) == "return"
    assert state != "RETRY"


@pytest.mark.parametrize("impatient_pool", ["prefork"], indirect=True)
def test_delivered_twice_runs_again_after_a_failure(
    tasks, impatient_pool, impatient_broker, journal, gates, name, hold
):
    """Only SUCCESS drops the second delivery: after a failure it runs, when the first has ended."""
    held = delivered_twice(journal, hold, tasks.late_failure, name, connection=impatient_broker)
    gates(name)
    gates(name)
    journal.wait_for("end", count=2, task_id=held.result.id)
    assert not side_by_side(journal, held.result.id)
    journal.wait_for("released", count=2, task_id=held.result.id)


@pytest.mark.parametrize("impatient_pool", ["prefork", "gevent"], indirect=True)
def test_delivered_twice_with_ignore_result_runs_again(
    tasks, impatient_pool, impatient_broker, journal, gates, name, hold
):
    """Nobody knows how the first ended: the second runs after it."""
    held = delivered_twice(journal, hold, tasks.resultless, name, connection=impatient_broker)
    gates(name)
    gates(name)
    journal.wait_for("end", count=2, task_id=held.result.id)
    assert not side_by_side(journal, held.result.id)
    first, second = journal.entries(what="start", task_id=held.result.id)
    assert first["fence"] < second["fence"]


@in_pools("prefork")
@pytest.mark.parametrize("kind", ["requeued_if_lost", "retried_if_lost"])
def test_redelivered_after_a_killed_child_runs_at_once(tasks, pool, journal, gates, name, hold, kind):
    """reject_on_worker_lost and retry_on_worker_lost: not locked out by its own dead run, lease 30 s."""
    held = hold(getattr(tasks, kind), pool, name, singleton=LONG)
    os.kill(held.pid, signal.SIGKILL)
    again = started(journal, held.result, 2)
    assert again.fence > held.fence
    assert again.at - held.at < 15
    assert has_ended(held.pid)
    gates(name)
    assert held.result.get(timeout=10) == (name if kind == "requeued_if_lost" else 1)
    assert journal.entries(what="lost") == []
    assert journal.entries(what="conflict") == []


@pytest.mark.parametrize(("same_host", "lease"), [("yes", 600), ("no", 1)])
def test_redelivered_after_a_killed_worker_takes_over(
    tasks, impatient, impatient_broker, journal, gates, name, hold, same_host, lease
):
    """acks_late, the whole worker killed: the call is delivered again, and not locked out by its dead run."""
    doomed = impatient(queues="again")
    options = {"lease": lease}
    held = hold(tasks.late, "again", name, connection=impatient_broker, singleton=options)
    doomed.kill()
    impatient_broker.default_channel.client.delete("unacked_mutex")  # it may have died with it
    impatient(queues="again", environment={"SETNX_TEST_SAME_HOST": same_host})
    again = started(journal, held.result, 2)
    assert again.fence > held.fence
    (taken,) = journal.entries(what="taken_over", task_id=held.result.id)
    assert taken["holder"]["pid"] == held.pid
    gates(name)
    assert held.result.get(timeout=10) == "return"
