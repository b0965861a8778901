"""Starts at a pace: no more bodies begin within a period than may, and no start is lost for ever.

tests/bounds.py says how to allow more time, crashes and lost replies.
"""

from typing import Any

import pytest

from tests.bounds import DEEP, bound
from tests.model import properties
from tests.model.clients import Freed, LateCopy, Ours
from tests.model.explorer import TICK, Client, State, World, assert_broken, assert_holds, explore
from tests.model.lock import Lock
from tests.model.permits import Choice
from tests.model.properties import PACED, lost_permit
from tests.model.store import Answer, Store
from tests.model.test_model_mutants import changed, mutant, wrong

pytestmark = pytest.mark.timeout(3_600 if DEEP else 120)

LONGEST = 4  # ticks: the longest lease, rest or hold below, and the longest period
ONE: dict[str, Any] = {"starts": 1, "period": 2}
PAIR: dict[str, Any] = {"limit": 2, "starts": 2, "period": 3}
SHORT: dict[str, Any] = {"lease": 1, "tries": 1}
WORLDS = {
    "one permit, one start": lambda: World(Ours("a", lease=1, **ONE), Ours("b", lease=2, **ONE),
        Ours("c", lease=1, tries=1 + DEEP, **ONE), ticks=bound(3, small=2, full=6, deep=8), crashes=1),
    "one permit, two starts": lambda: World(*[Ours(task, starts=2, period=2, **SHORT) for task in bound("ab", full="abc")],
        Ours("c", lease=1, starts=2, period=2), ticks=bound(3, small=2, full=5, deep=7), crashes=1),
    "two permits, one start": lambda: World(*[Ours(task, lease=2, limit=2, **ONE) for task in "ab"],
        Ours("c", limit=2, lease=1, tries=1, **ONE), ticks=bound(3, small=2, full=5, deep=7), crashes=1),
    "two permits, two starts": lambda: World(*[Ours(task, **SHORT, **PAIR) for task in "ab"],
        *[Ours(task, lease=2, **PAIR) for task in bound("c", full="cd")],
        ticks=bound(3, small=2, full=5), crashes=bound(0, full=1)),
    "lost replies": lambda: World(Ours("a", **SHORT, **ONE), Ours("b", lease=2, **ONE),
        *bound([], full=[Ours("c", **SHORT, **ONE)]), ticks=bound(4, small=2, full=5, deep=6), crashes=1,
        losses=1 + DEEP),
    "sends that take their time": lambda: World(Ours("a", lease=1, slow_send=True, **ONE),
        Ours("b", lease=2, slow_send=True, **ONE), ticks=bound(5, small=4, full=7), crashes=1),
    "copies that arrive late": lambda: World(Ours("a", lease=1, **ONE), Ours("b", lease=2, **ONE),
        LateCopy("acquire", 0), LateCopy("release", 0), ticks=bound(5, small=3, full=6), crashes=1),
    "calls that run no body": lambda: World(Ours("a", lease=1, bodiless=True, **ONE),
        Ours("b", lease=1, tries=1 + DEEP, **ONE), *bound([], full=[Ours("c", bodiless=True, **SHORT, **ONE)]),
        ticks=bound(3, small=2, full=5), crashes=1, losses=1),
    "two permits, calls that run no body": lambda: World(Ours("a", **SHORT, bodiless=True, **PAIR),
        Ours("b", **SHORT, **PAIR), Ours("c", **SHORT, **PAIR), ticks=bound(2, small=1, full=5), crashes=1),
    "a second delivery": lambda: World(Ours("a", lease=2, **ONE), Ours("a", lease=1, **ONE),
        Ours("b", lease=1, **ONE), ticks=bound(3, small=2, full=6), crashes=1),
    "a permit held for a retry": lambda: World(Ours("a", lease=1, hold=2, retries=1, **ONE),
        Ours("b", **SHORT, **ONE), ticks=bound(4, small=3, full=8), crashes=bound(0, full=1), losses=1),
    "a permit held for a retry, with a second delivery": lambda: World(
        Ours("a", lease=1, hold=2, retries=1, **ONE), Ours("a", **SHORT, **ONE), Ours("b", **SHORT, **ONE),
        ticks=bound(3, full=6), crashes=bound(0, full=1)),
    "a permit held for a retry that may be revoked": lambda: World(
        Ours("a", lease=1, hold=2, retries=1, **ONE), Ours("b", **SHORT, **ONE), Freed("a"),
        ticks=bound(4, small=3, full=7), crashes=1),
    "permits that rest": lambda: World(Ours("a", lease=1, at_least_for=2, retries=1, **PAIR),
        Ours("b", **SHORT, **PAIR), *bound([], full=[Ours("c", **SHORT, **PAIR)]), ticks=bound(3, small=2, full=5),
        crashes=bound(0, full=1)),
    "death that can be proved": lambda: World(Ours("a", **ONE), Ours("b", proof=True, **ONE),
        Ours("c", **SHORT, **ONE), ticks=bound(2, full=6), crashes=2),
    "rates that differ": lambda: World(Ours("a", lease=1, limit=2, starts=2, period=2),
        Ours("b", limit=2, starts=1, period=4, **SHORT), Ours("c", **SHORT, **ONE),
        ticks=bound(3, small=2, full=6), crashes=bound(0, full=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_pace_is_kept_in_every_interleaving(name):
    """No more bodies begin within a period than may, and from every state all starts can be had in bounded time."""
    world = WORLDS[name]()
    checked = [holds for holds in PACED if name != "rates that differ" or holds.__name__ != "paced_with_reason"]
    found = assert_holds(world, checked)
    most, period = properties._pace(world)
    starts = min(most, world.limit)
    pace = f":{starts}/{period}"
    assert lost_permit(world.lock, found, 2 * LONGEST, starts, pace) is None


def test_pace_does_not_survive_a_loss_of_data():
    """What is not promised: as many starts once more, after Redis has lost its data; but not more than that."""
    clients = [Ours(task, **SHORT, **ONE) for task in "abc"]
    assert_broken(World(*clients, ticks=3, wipes=1), "pace_kept", PACED[-4:])
    assert_holds(World(*clients, ticks=3, wipes=1), [no_more_than_twice])


def no_more_than_twice(world: World, before: State, event: Any, after: State) -> bool:
    """Two within a period: one before the loss, and one after it."""
    return all(later - at >= 2 * TICK for at, later in zip(after.bodies, after.bodies[2:]))
