"""Marks: at most one call queued (or running), no mark outlives its lease, no call is dropped."""

from __future__ import annotations

import os

import pytest

from tests.model.clients import Call, Ours
from tests.model.explorer import World, explore
from tests.model.properties import MARKS, slowest_publish

DEEP = int(os.environ.get("MODEL_SCALE", "1")) > 1
QUEUE_LEASE = LEASE = 3
pytestmark = pytest.mark.timeout(3_600 if DEEP else 120)


def call(task: str, until_done: bool, **options: int) -> Call:
    """A call with the leases of this module."""
    return Call(task, until_done=until_done, queue_lease=QUEUE_LEASE, lease=LEASE, **options)


@pytest.mark.parametrize("until_done", [False, True])
@pytest.mark.parametrize("retries", [0, 1])
def test_marks_hold_in_every_interleaving(until_done: bool, retries: int) -> None:
    """Two calls, crashes, lost replies, lapsed marks: every property holds, and no mark blocks for long."""
    world = World(
        call("a", until_done, retries=retries),
        call("b", until_done),
        ticks=8 if DEEP else 6,
        crashes=1 + DEEP,
        losses=1,
    )
    result = explore(world, MARKS)
    print(f"until_done={until_done}, retries={retries}: {result}")
    assert not result.broken, str(result)
    longest = max(QUEUE_LEASE, LEASE) + 1  # a key lives to the end of its last millisecond
    assert slowest_publish(world.lock, result, longest, until_done=until_done) <= longest


@pytest.mark.parametrize("until_done", [False, True])
def test_marks_hold_beside_calls_without_marks(until_done: bool) -> None:
    """A third call that has no mark excludes the others at run time, and leaves their marks alone."""
    world = World(
        call("a", until_done),
        call("b", until_done),
        Ours("c", tries=1),
        ticks=5 if DEEP else 4,
        crashes=1,
    )
    result = explore(world, MARKS)
    print(f"until_done={until_done}: {result}")
    assert not result.broken, str(result)
