"""Our lock beside the classic recipe: rule 5, and the conditions under which it suffices."""

import os

import pytest

from tests.model.clients import Classic, Ours
from tests.model.explorer import World, explore
from tests.model.lock import Store
from tests.model.properties import SAFETY, exclusion, slowest_acquire

DEEP = int(os.environ.get("MODEL_SCALE", "1")) > 1
DEAD_CLASSIC = Store("9")
pytestmark = pytest.mark.timeout(3_600 if DEEP else 120)


@pytest.mark.parametrize("strict", [True, False])
def test_lock_and_recipe_exclude_each_other(strict):
    """On a free key, and past either's death, ours and a prompt classic client never run together."""
    world = World(
        Ours("a", beats=1),
        Classic(timeout=1, tries=3, strict=strict),
        Classic(timeout=1, strict=strict),
        ticks=12 if DEEP else 7,
        crashes=1,
    )
    result = explore(world, SAFETY)
    print(result)
    assert not result.broken, str(result)
    assert slowest_acquire(world.lock, result, 8) <= 8


def test_lock_holds_beside_prompt_classic_losers():
    """Losers that do not pause may overwrite the value, if our lease <= their timeout + 1."""
    world = World(
        Ours("a", lease=4, beats=2),
        Classic(timeout=1, tries=1 + DEEP),
        Classic(timeout=1),
        Ours("b", lease=3, tries=1),
        store=DEAD_CLASSIC,
        ticks=9 if DEEP else 5,
        crashes=1,
    )
    result = explore(world, SAFETY)
    print(result)
    assert not result.broken, str(result)
    assert slowest_acquire(world.lock, result, 8) <= 8


def test_longer_lease_than_the_recipes_is_not_safe_beside_it():
    """What is not promised: with lease > timeout + 1 a loser's value lets another classic client in."""
    world = World(Ours("a", lease=8), Classic(timeout=1), Classic(timeout=1), store=DEAD_CLASSIC, ticks=10)
    result = explore(world, [exclusion])
    print(result)
    assert result.broken == "exclusion"


def test_pausing_classic_client_breaks_exclusion():
    """What is not promised: a loser that pauses between clock and GETSET ends our lease early."""
    world = World(
        Ours("a", lease=4),
        Classic(timeout=1, pauses=True),
        Classic(timeout=1),
        store=DEAD_CLASSIC,
        ticks=10,
    )
    result = explore(world, [exclusion])
    print(result)
    assert result.broken == "exclusion"


def test_recipe_alone_breaks_exclusion():
    """F2: three classic clients with equal timeouts, one of which pauses, need nobody else."""
    world = World(
        Classic(timeout=1, pauses=True), Classic(timeout=1), Classic(timeout=1), store=DEAD_CLASSIC, ticks=8
    )
    result = explore(world, [exclusion])
    print(result)
    assert result.broken == "exclusion"
