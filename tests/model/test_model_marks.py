"""Marks: at most one call queued (or running), no mark outlives its lease, no call is dropped for a ghost."""

from collections.abc import Iterator

import pytest

from tests.bounds import DEEP, bound
from tests.model.clients import Call, Ours
from tests.model.explorer import Client, Move, State, World, assert_holds
from tests.model.properties import MARKS, slowest_publish

QUEUE_LEASE = LEASE = 3
GRACE = 1
pytestmark = pytest.mark.timeout(3_600 if DEEP else 120)

WORLDS = {
    "until_started": (False, {}),
    "until_started, skipped on conflict": (False, {"skips": True}),
    "until_started, retried": (False, {"retries": 1}),
    "until_done": (True, {}),
    "until_done, skipped on conflict": (True, {"skips": True}),
    "until_done, retried": (True, {"retries": 1}),
    "until_done, retried later": (True, {"retries": 1, "countdown": 2}),
    "until_done, retried, the lock rests": (True, {"retries": 1, "at_least_for": 2}),
    "until_done, retried, the lock is held": (True, {"retries": 1, "hold": 2}),
}


def call(task: str, until_done: bool, **options: int) -> Call:
    """A call with the leases of this module."""
    return Call(task, until_done=until_done, queue_lease=QUEUE_LEASE, grace=GRACE, lease=LEASE, **options)


@pytest.mark.parametrize("name", WORLDS)
def test_marks_hold_in_every_interleaving(name):
    """Two calls, crashes, lost replies, lapsed marks: every property holds, and no mark blocks for long."""
    until_done, options = WORLDS[name]
    world = World(
        call("a", until_done, **options),
        call("b", until_done, skips=options.get("skips", False)),
        ticks=bound(3, small=2, full=5 if until_done and options == {"retries": 1} else 4, deep=7),
        crashes=bound(1, small=0, deep=2),
        losses=1,
    )
    result = assert_holds(world, MARKS)
    # A key lives to the end of its last millisecond.
    longest = max(QUEUE_LEASE + options.get("countdown", 0), LEASE) + 1
    assert slowest_publish(world.lock, result, longest, until_done=until_done) <= longest


@pytest.mark.parametrize("until_done", [False, True])
def test_marks_hold_beside_calls_without_marks(until_done):
    """A third call that has no mark excludes the others at run time, and leaves their marks alone."""
    programs = call("a", until_done), call("b", until_done), Ours("c", tries=1)
    assert_holds(World(*programs, ticks=bound(2, small=1, full=3, deep=5), crashes=1), MARKS)


class NeverSent(Call):
    """A call whose publisher dies between mark and send."""

    def _when_marked(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        yield from ()


@pytest.mark.parametrize(("grace", "holds"), [(GRACE, True), (QUEUE_LEASE, False)])
@pytest.mark.parametrize("until_done", [False, True])
def test_publisher_that_dies_before_the_send_blocks_for_the_grace_lease(until_done, grace, holds):
    """A mark whose message was never sent is gone after the grace lease; in one phase it would not be."""
    dead = NeverSent("a", until_done=until_done, queue_lease=QUEUE_LEASE, grace=grace)
    world = World(dead, ticks=2, crashes=1, losses=1)
    result = assert_holds(world, MARKS)
    assert (slowest_publish(world.lock, result, GRACE + 1, until_done=until_done) <= GRACE + 1) == holds
