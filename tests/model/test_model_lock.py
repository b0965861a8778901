"""Our lock among our own clients: every property holds in every reachable state, within the bounds.

tests/bounds.py says how to allow more time, crashes and lost replies.
"""

import pytest

from tests.bounds import DEEP, bound
from tests.model.clients import Classic, Freed, LateCopy, Ours, Parent
from tests.model.explorer import World, assert_broken, assert_holds
from tests.model.properties import PERMITS_SAFETY, SAFETY, fences_rise, lost_permit, slowest_acquire

LONGEST = 5  # ticks: the longest lease below; rests and holds are shorter
pytestmark = pytest.mark.timeout(3_600 if DEEP else 600)

WORLDS = {
    "two clients and two crashes": lambda: World(Ours("a", tries=3), Ours("b", tries=3),
        ticks=bound(12, small=6, deep=20), crashes=2),
    "three clients with unequal leases": lambda: World(Ours("a", lease=2, tries=1 + DEEP), Ours("b", lease=5),
        Ours("c", lease=1), ticks=bound(6, small=3, full=7, deep=9), crashes=1 + DEEP),
    "renewals": lambda: World(Ours("a", lease=2, beats=2), Ours("b", lease=2, beats=1),
        ticks=bound(7, small=5, full=8, deep=11), crashes=1 + DEEP),
    "lost replies": lambda: World(Ours("a", beats=1), Ours("b", tries=1 + DEEP),
        ticks=bound(5, small=3, full=6, deep=7), crashes=1, losses=2 + DEEP),
    "sends that take their time": lambda: World(Ours("a", beats=1, slow_send=True), Ours("b", slow_send=True),
        ticks=bound(5, small=4, full=6, deep=9), crashes=1 + DEEP),
    "copies that arrive late": lambda: World(Ours("a"), Ours("b", beats=DEEP), LateCopy("acquire", 0),
        LateCopy("release", 0), ticks=bound(6, small=4, deep=8), crashes=1),
    "a lock that rests": lambda: World(Ours("a", lease=2, at_least_for=4, retries=1),
        Ours("b", tries=2 + DEEP), ticks=bound(6, small=3, full=7, deep=12), crashes=1, losses=1),
    "a lock held for retry, with a second delivery": lambda: World(Ours("a", lease=2, hold=3, retries=1),
        Ours("a", tries=1), Ours("b", lease=2, tries=1 + DEEP), ticks=bound(4, small=3, full=5, deep=7),
        crashes=1),
    "a lock held for a retry that may be revoked": lambda: World(Ours("a", lease=2, hold=3, retries=1 + DEEP),
        Ours("b", tries=1 + DEEP), Freed("a"), ticks=bound(4, small=2, full=6, deep=7), crashes=1, losses=1),
    "death that can be proved": lambda: World(Ours("a", at_least_for=2), Ours("b", tries=2, proof=True),
        Ours("c", tries=1 + DEEP, proof=True), ticks=bound(4, small=2, deep=5), crashes=2),
    "a worker parent": lambda: World(Ours("a"), Ours("b", proof=True), Parent(0),
        ticks=bound(7, small=5, deep=9), crashes=2),
}  # fmt: skip

# A limit of two, unless it is said.
TWO = {"limit": 2}
PERMITS = {
    "three clients and a crash": lambda: World(Ours("a", lease=2, **TWO), Ours("b", **TWO), Ours("c", **TWO),
        ticks=bound(3, full=6, deep=9), crashes=1 + DEEP),
    "four clients, three permits": lambda: World(*[Ours(task, limit=3, tries=1, lease=2) for task in "abcd"],
        ticks=bound(2, small=1, full=3, deep=5), crashes=1 + DEEP),
    "renewals": lambda: World(Ours("a", lease=2, beats=1, **TWO), Ours("b", lease=2, **TWO),
        Ours("c", tries=1 + DEEP, **TWO), ticks=bound(3, small=2, full=5, deep=7), crashes=1),
    "lost replies": lambda: World(Ours("a", **TWO), Ours("b", tries=1, **TWO), Ours("c", tries=1, **TWO),
        ticks=bound(2, full=4, deep=5), crashes=1, losses=1 + DEEP),
    "a second delivery": lambda: World(Ours("a", lease=2, **TWO), Ours("a", **TWO), Ours("b", **TWO),
        ticks=bound(3, full=5, deep=7), crashes=1),
    "limits that differ": lambda: World(Ours("a", limit=3, lease=2), Ours("b", tries=1), Ours("c", **TWO),
        *bound([], deep=[Ours("d", limit=3, tries=1)]), ticks=bound(3, small=2, full=4), crashes=1),
    "a second delivery with another limit": lambda: World(Ours("a", lease=2, limit=3), Ours("a", tries=1),
        Ours("b", limit=3), ticks=bound(3, full=4, deep=6), crashes=1),
    "permits that rest": lambda: World(Ours("a", lease=2, at_least_for=4, retries=1, **TWO), Ours("b", **TWO),
        Ours("c", tries=1, **TWO), ticks=bound(2, full=5, deep=7), crashes=1),
    "permits held for a retry, with a second delivery": lambda: World(
        Ours("a", lease=2, hold=3, retries=1, **TWO), Ours("a", tries=1, **TWO),
        Ours("b", lease=2, tries=1, **TWO), ticks=bound(3, full=5, deep=6), crashes=1),
    "permits held for a retry that may be revoked": lambda: World(
        Ours("a", lease=2, hold=3, retries=1, **TWO), Ours("b", tries=1, **TWO), Ours("c", tries=1, **TWO),
        Freed("a"), ticks=bound(2, full=4, deep=5), crashes=1),
    "death that can be proved": lambda: World(Ours("a", **TWO), Ours("b", **TWO),
        Ours("c", tries=2, proof=True, **TWO), ticks=bound(2, full=4, deep=5), crashes=2),
    "a worker parent": lambda: World(Ours("a", **TWO), Ours("b", proof=True, **TWO), Ours("c", **TWO),
        Parent(0), ticks=bound(2, full=4, deep=6), crashes=1 + DEEP),
    "a classic client": lambda: World(Ours("a", **TWO), Ours("b", **TWO), Classic(timeout=1),
        ticks=bound(5, small=4, full=6, deep=8), crashes=1),
}  # fmt: skip


def assert_safe(world: World, longest: int) -> None:
    """Fail if a property is broken, or a lone client needs more ticks than these to acquire."""
    assert slowest_acquire(world.lock, assert_holds(world, SAFETY), longest) <= longest


@pytest.mark.parametrize("name", WORLDS)
def test_lock_holds_in_every_interleaving(name):
    """No interleaving breaks a property, and from every state a lone client acquires in bounded time."""
    assert_safe(WORLDS[name](), LONGEST)


@pytest.mark.parametrize("name", PERMITS)
def test_permits_hold_in_every_interleaving(name):
    """Never more than the limit at a time, and from every state all permits can be had in bounded time."""
    world = PERMITS[name]()
    found = assert_holds(world, PERMITS_SAFETY)
    ticks = LONGEST + 3 * any(program.foreign for program in world.programs)  # which counts in seconds
    assert lost_permit(world.lock, found, ticks, world.limit) is None


def test_fences_rise_when_redis_loses_its_data():
    """Fences rise across a loss of all data, though exclusion does not survive it."""
    clients = Ours("a", lease=2), Ours("b"), Ours("c", tries=1 + DEEP)
    assert_holds(World(*clients, ticks=bound(5, small=3), wipes=1 + DEEP), [fences_rise])


def test_exclusion_does_not_survive_a_loss_of_data():
    """What is not promised: two holders after Redis lost its data."""
    assert_broken(World(Ours("a"), Ours("b"), ticks=3, wipes=1), "exclusion", SAFETY)
