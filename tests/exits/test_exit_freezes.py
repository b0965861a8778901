"""Frozen past its lease, or past at_most_for: the loss is told, the next holder's lock is never touched."""

import os
import signal
from typing import Any

import pytest

from celery_setnx import LockLost, SetnxLock
from tests.exits import every_pool
from tests.exits.conftest import LONG, RETRY, Held, Scene

BRIEF = {"lease": 1}


def hold_next(scene: Scene, observer: str) -> Held:
    """The rival that takes the lock over, at a gate of its own."""
    gate = f"{scene.gate} rival"
    return scene.hold(scene.tasks.careful, observer, gate, singleton={**RETRY, **LONG})


def assert_lost(scene: Scene, call: Any, fence: int, rival: Held, reason: str = "") -> None:
    """The call was told so, once; the rival keeps its lock until its end, and gives it back itself."""
    (lost,) = scene.journal.wait_for("lost", task_id=call.id)
    assert lost["fence"] == fence < rival.fence
    assert reason in lost["reason"]
    scene.open()
    with pytest.raises(LockLost, match=reason or None):
        call.get(timeout=60)
    assert not SetnxLock(scene.locks, rival.key).acquire().acquired
    scene.open(gate=f"{scene.gate} rival")
    assert rival.result.get(timeout=60) == scene.gate
    assert scene.outcomes(rival.result) == ["released"]
    (taken,) = scene.journal.entries(what="taken_over")
    assert (taken["task_id"], taken["fence"]) == (rival.result.id, rival.fence)
    assert len(scene.journal.entries(what="lost")) == 1


@every_pool
def test_frozen_past_its_lease_leaves_the_next_holder_alone(scene, pool, observer):
    """SIGSTOP of the holder's process: taken over at the deadline; awake again, it learns of its loss."""
    frozen = scene.hold(scene.tasks.careful, pool, singleton=BRIEF)
    os.kill(frozen.pid, signal.SIGSTOP)
    try:
        rival = hold_next(scene, observer)
    finally:
        os.kill(frozen.pid, signal.SIGCONT)
    assert_lost(scene, frozen.result, frozen.fence, rival)


@every_pool
def test_at_most_for_ends_the_lock(scene, pool, observer):
    """Renewal stops: the loss is told once, another takes over, and its lock is left alone."""
    held = scene.hold(scene.tasks.careful, pool, singleton={"at_most_for": 0.2, **BRIEF})
    rival = hold_next(scene, observer)
    assert_lost(scene, held.result, held.fence, rival, "at_most_for is over")


@every_pool
def test_gil_held_past_the_lease_leaves_the_next_holder_alone(scene, pool, observer, tmp_path):
    """The documented bound: while C code keeps the GIL nobody renews; taken over, and the loss is told."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    hog = scene.send(scene.tasks.hogging, pool, str(pipe), name=scene.gate, singleton=BRIEF)
    (hogging,) = scene.journal.wait_for("hogging", task_id=hog.id)
    try:
        rival = hold_next(scene, observer)
        assert scene.journal.entries(what="hogged") == []
    finally:
        pipe.write_bytes(b"!")
    assert_lost(scene, hog, hogging["fence"], rival)
