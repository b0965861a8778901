"""Our lock, marks and paces in every interleaving that the bounds allow; and what is not promised."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bounds import DEEP
from tests.model.clients import Call, Classic, Ours
from tests.model.explorer import TICK, Client, Move, State, World, assert_broken, assert_holds
from tests.model.properties import MARKS, PACED, SAFETY, exclusion, slowest_publish
from tests.model.scenarios import DEAD_CLASSIC, GRACE, ONE, QUEUE_LEASE, SCENARIOS, SHORT

pytestmark = pytest.mark.timeout(3_600 if DEEP else 600)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "line" not in name])
def test_it_holds_in_every_interleaving(name):
    """No step breaks a property, a way leads to the goal from every state, and nobody is locked out."""
    found = SCENARIOS[name].explored()
    print(found)
    assert not found.broken, str(found)


def test_exclusion_does_not_survive_a_loss_of_data():
    """What is not promised: two holders after Redis lost its data."""
    assert_broken(World(Ours("a"), Ours("b"), ticks=3, wipes=1), "exclusion", SAFETY)


def assert_breaks_exclusion(*programs: Classic | Ours, ticks: int) -> None:
    """Fail unless two of them come to run side by side on a dead classic lock."""
    assert_broken(World(*programs, store=DEAD_CLASSIC, ticks=ticks), "exclusion", [exclusion])


def test_longer_lease_than_the_recipes_is_not_safe_beside_it():
    """What is not promised: with lease > timeout + 1 a loser's value lets another classic client in."""
    assert_breaks_exclusion(Ours("a", lease=8), Classic(timeout=1), Classic(timeout=1), ticks=10)


def test_pausing_classic_client_breaks_exclusion():
    """What is not promised: a loser that pauses between clock and GETSET ends our lease early."""
    pauses = Classic(timeout=1, pauses=True)
    assert_breaks_exclusion(Ours("a", lease=4), pauses, Classic(timeout=1), ticks=10)


def test_recipe_alone_breaks_exclusion():
    """F2: three classic clients with equal timeouts, one of which pauses, need nobody else."""
    pauses = Classic(timeout=1, pauses=True)
    assert_breaks_exclusion(pauses, Classic(timeout=1), Classic(timeout=1), ticks=8)


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


def test_pace_does_not_survive_a_loss_of_data():
    """What is not promised: as many starts once more, after Redis has lost its data; but not more."""
    clients = [Ours(task, **SHORT, **ONE) for task in "abc"]
    assert_broken(World(*clients, ticks=3, wipes=1), "pace_kept", PACED[-4:])
    assert_holds(World(*clients, ticks=3, wipes=1), [no_more_than_twice])


def no_more_than_twice(world: World, before: State, event: Any, after: State) -> bool:
    """Two within a period: one before the loss, and one after it."""
    return all(later - at >= 2 * TICK for at, later in zip(after.bodies, after.bodies[2:]))
