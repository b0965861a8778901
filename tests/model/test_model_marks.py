"""Marks: at most one call queued (or running), no mark outlives its lease, no call is dropped for a ghost.

And the window: no second body while a success counts, and a failure frees its key at once.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bounds import DEEP, bound
from tests.model.clients import Call, Counted, Ours, ParentOfCounted
from tests.model.explorer import Client, Move, State, World, assert_holds
from tests.model.properties import MARKS, SAFETY, WINDOW, slowest_publish

QUEUE_LEASE = LEASE = 3
GRACE = 1
pytestmark = pytest.mark.timeout(3_600 if DEEP else 600)

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


def counted(task: str, **options: Any) -> Counted:
    """A call whose success counts for two ticks."""
    return Counted(task, queue_lease=2, grace=GRACE, lease=LEASE, window=2, **options)


WINDOWS = {
    "two publishers": (counted("a"), counted("b")),
    "one that nobody asks": (counted("a"), counted("b", is_bare=True, tries=1)),
    "none that anybody asks": (counted("a", is_bare=True), counted("b", is_bare=True, tries=1)),
    "skipped on conflict": (counted("a"), counted("b", skips=True)),
    "the lock rests": (counted("a", at_least_for=2), counted("b", is_bare=True, tries=1)),
    "released late": (counted("a", is_late=True), counted("b", is_bare=True, tries=1)),
    "its worker lives": (counted("a", publishes=1), counted("b", publishes=1), ParentOfCounted(0)),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_window_holds_in_every_interleaving(name):
    """Bodies that succeed or fail, results that cannot be stored, crashes, lost replies, lapsed marks."""
    is_watched = name == "its worker lives"
    ticks = bound(3, small=2, full=3 if is_watched else 4, deep=6)
    world = World(*WINDOWS[name], ticks=ticks, crashes=1, losses=0 if is_watched else 1)
    assert_holds(world, (*SAFETY, *WINDOW))
