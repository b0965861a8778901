"""Returns, raises, soft time limit, Ignore, Reject: released in `__call__`, before Celery goes on."""

import pytest
from celery import chain

from celery_setnx import is_skipped
from tests.exits import every_pool, in_pools
from tests.exits.conftest import RETRY

RUN = ["acquired", "start", "end", "released", "postrun"]


@every_pool
@pytest.mark.parametrize("way", ["return", "raise", "ignore", "reject"])
def test_end_of_the_body_releases(scene, pool, way):
    """Whoever sees the result or the error finds the lock free; Ignore and Reject do not run again."""
    held = scene.hold(scene.tasks.work, pool, way)
    assert scene.locks.exists(held.key)
    scene.open()
    if way == "return":
        assert held.result.get(timeout=60) == "return"
    elif way == "raise":
        with pytest.raises(ZeroDivisionError):
            held.result.get(timeout=60)
    else:
        scene.journal.wait_for("postrun", task_id=held.result.id)
    assert not scene.locks.exists(held.key)
    scene.journal.wait_for("postrun", task_id=held.result.id)
    assert scene.journal.words(held.result.id) == RUN


@every_pool
def test_end_of_a_step_releases_before_the_next_is_published(scene, pool):
    """A chain of equal calls never meets its own lock."""
    step = scene.tasks.work.si(scene.key).set(queue=pool, singleton={"on_conflict": "raise"})
    assert chain(*[step.clone() for _ in range(6)]).apply_async().get(timeout=60) == "return"
    assert scene.journal.entries(what="conflict") == []


@every_pool
def test_reject_with_requeue_releases_and_runs_again(scene, pool):
    """acks_late: the second delivery finds the lock free, and has a larger fence."""
    held = scene.hold(scene.tasks.late, pool, "requeue")
    scene.open(times=2)
    assert held.result.get(timeout=60) == "return"
    scene.journal.wait_for("postrun", count=2, task_id=held.result.id)
    assert scene.journal.words(held.result.id) == RUN * 2
    first, second = scene.fences(held.result)
    assert first < second


@pytest.mark.clock  # Celery's limit is real time, and the body has to begin before
@in_pools("prefork")
def test_soft_time_limit_releases(scene, pool):
    """Whoever sees the error finds the lock free."""
    held = scene.hold(scene.tasks.work, pool, soft_time_limit=5)
    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        held.result.get(timeout=60)
    assert not scene.locks.exists(held.key)
    scene.journal.wait_for("postrun", task_id=held.result.id)
    assert scene.journal.words(held.result.id) == ["acquired", "start", "released", "postrun"]


@every_pool
def test_at_least_for_rests_after_the_end(scene, pool, observer):
    """The lock rests, also for calls in other workers, and comes free by itself."""
    result = scene.send(scene.tasks.work, pool, singleton={"at_least_for": 600})
    result.get(timeout=60)
    for _ in range(2):
        rival = scene.told(observer)
        assert is_skipped(rival)
        assert rival["holder"]["state"] == "resting"
        scene.age(300)
    assert scene.outcomes(result) == ["resting"]
    assert scene.send(scene.tasks.work, pool, singleton=RETRY).get(timeout=60) == "return"
    assert scene.journal.entries(what="taken_over") == []
