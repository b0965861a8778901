"""Frozen past its lease, then awake: the loss is told, and the next holder's lock is never touched."""

import os
import signal
from typing import Any

import pytest
import redis

from celery_setnx import LockLost, SetnxLock
from tests.exits import every_pool
from tests.harness import Journal

# Longer than a lease of 2 s by enough for a rival that comes back every 0.1 to 0.2 s.
HOG_S = 5.0


@every_pool
def test_frozen_past_its_lease_leaves_the_next_holder_alone(
    tasks, pool, observer, journal, gates, locks, name, hold
):
    """SIGSTOP of the holder's process: taken over at the deadline; awake again, it learns of its loss."""
    frozen = hold(tasks.careful, pool, name)
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        rival = hold(tasks.patient, observer, name, singleton={"on_conflict": "retry"})
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    (lost,) = journal.wait_for("lost", task_id=frozen.result.id)
    assert lost["fence"] == frozen.fence < rival.fence
    gates(name)
    with pytest.raises(LockLost):
        frozen.result.get(timeout=10)
    assert_held_until_its_end(tasks, journal, gates, locks, name, rival)


@every_pool
def test_gil_held_past_the_lease_leaves_the_next_holder_alone(
    tasks, pool, observer, journal, gates, locks, name, hold
):
    """The documented bound: while C code keeps the GIL nobody renews; taken over, and the loss is told."""
    hog = tasks.hogging.apply_async([name, HOG_S], queue=pool)
    (hogging,) = journal.wait_for("hogging", task_id=hog.id)
    rival = hold(tasks.patient, observer, name, singleton={"on_conflict": "retry"})
    assert journal.entries(what="hogged") == []
    (lost,) = journal.wait_for("lost", task_id=hog.id)
    assert lost["fence"] == hogging["fence"] < rival.fence
    with pytest.raises(LockLost):
        hog.get(timeout=10)
    assert_held_until_its_end(tasks, journal, gates, locks, name, rival)


def assert_held_until_its_end(
    tasks: Any, journal: Journal, gates: Any, locks: redis.Redis, name: str, rival: Any
) -> None:
    """The rival, whose body waits at a gate of its own, has its lock still, and gives it back itself."""
    assert not SetnxLock(locks, rival.key).acquire().acquired
    gates(f"{name} patient")
    assert rival.result.get(timeout=10) == name
    outcomes = journal.wait_for("released", task_id=rival.result.id)
    assert [entry["outcome"] for entry in outcomes] == ["released"]
    assert len(journal.entries(what="taken_over")) == 1
    assert len(journal.entries(what="lost")) == 1
