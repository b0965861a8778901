"""Returns, raises, soft time limit, Ignore, Reject: released in `__call__`, before Celery goes on."""

import pytest
from celery import chain

from celery_setnx import is_skipped
from tests.exits import every_pool, in_pools

RUN = ["acquired", "start", "end", "released", "postrun"]


@every_pool
def test_returns_releases(tasks, pool, journal, gates, locks, name, hold):
    """Whoever sees the result finds the lock free."""
    held = hold(tasks.work, pool, name)
    assert locks.exists(held.key)
    gates(name)
    assert held.result.get(timeout=10) == "return"
    assert not locks.exists(held.key)
    journal.wait_for("postrun", task_id=held.result.id)
    assert journal.words(held.result.id) == RUN


@every_pool
def test_returns_releases_before_the_next_step_is_published(tasks, pool, journal):
    """A chain of equal calls never meets its own lock."""
    step = tasks.work.si("equal").set(queue=pool, singleton={"on_conflict": "raise"})
    assert chain(*[step.clone() for _ in range(6)]).apply_async().get(timeout=10) == "return"
    assert journal.entries(what="conflict") == []


@every_pool
def test_raises_releases(tasks, pool, journal, gates, locks, name, hold):
    """Whoever sees the error finds the lock free."""
    held = hold(tasks.work, pool, name, "raise")
    gates(name)
    with pytest.raises(ZeroDivisionError):
        held.result.get(timeout=10)
    assert not locks.exists(held.key)
    journal.wait_for("postrun", task_id=held.result.id)
    assert journal.words(held.result.id) == RUN


@every_pool
@pytest.mark.parametrize("way", ["ignore", "reject"])
def test_ignore_and_reject_release(tasks, pool, journal, gates, locks, name, hold, way):
    """Ignore, and Reject without requeue: released, and the body does not run again."""
    held = hold(tasks.work, pool, name, way)
    gates(name)
    journal.wait_for("postrun", task_id=held.result.id)
    assert not locks.exists(held.key)
    assert journal.words(held.result.id) == RUN


@every_pool
def test_reject_with_requeue_releases_and_runs_again(tasks, pool, journal, gates, name, hold):
    """acks_late: the second delivery finds the lock free, and has a larger fence."""
    held = hold(tasks.late, pool, name, "requeue")
    gates(name)
    gates(name)
    assert held.result.get(timeout=10) == "return"
    journal.wait_for("postrun", count=2, task_id=held.result.id)
    assert journal.words(held.result.id) == RUN * 2
    first, second = journal.entries(what="start", task_id=held.result.id)
    assert first["fence"] < second["fence"]


@in_pools("prefork")
def test_soft_time_limit_releases(tasks, pool, journal, locks, name, hold):
    """Whoever sees the error finds the lock free."""
    held = hold(tasks.work, pool, name, soft_time_limit=3)
    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        held.result.get(timeout=10)
    assert not locks.exists(held.key)
    journal.wait_for("postrun", task_id=held.result.id)
    assert journal.words(held.result.id) == ["acquired", "start", "released", "postrun"]


@every_pool
def test_at_least_for_rests_after_the_end(tasks, pool, observer, journal, locks):
    """The lock rests, also for calls in other workers, and comes free by itself."""
    result = tasks.work.apply_async(["short"], queue=pool, singleton={"at_least_for": 4})
    result.get(timeout=10)
    rival = tasks.work.apply_async(["short"], queue=observer).get(timeout=10)
    assert is_skipped(rival)
    assert rival["holder"]["state"] == "resting"
    assert journal.wait_for("released", task_id=result.id)[0]["outcome"] == "resting"
    follower = tasks.work.apply_async(["short"], queue=pool, singleton={"on_conflict": "retry"})
    assert follower.get(timeout=10) == "return"
    assert journal.entries(what="taken_over") == []
    ((first,), (second,)) = (journal.entries(what="start", task_id=call.id) for call in (result, follower))
    assert second["fence"] - first["fence"] >= 4_000_000  # microseconds of the server's clock


@every_pool
def test_at_most_for_ends_the_lock(tasks, pool, observer, journal, gates, name, hold):
    """Renewal stops: the loss is told once, another takes over, and its lock is left alone."""
    held = hold(tasks.careful, pool, name, singleton={"at_most_for": 0.2})
    rival = tasks.careful.apply_async([name], queue=observer, singleton={"on_conflict": "retry"})
    (taken,) = journal.wait_for("taken_over", task_id=rival.id)
    journal.wait_for("start", task_id=rival.id)
    assert taken["fence"] > held.fence
    (lost,) = journal.wait_for("lost", task_id=held.result.id)
    assert "at_most_for is over" in lost["reason"]
    gates(name)
    with pytest.raises(Exception, match="at_most_for is over"):
        held.result.get(timeout=10)
    gates(name)
    assert rival.get(timeout=10) == name
    assert len(journal.entries(what="lost")) == 1
