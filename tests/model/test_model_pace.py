"""Starts at a pace: no more bodies begin within a period than may, and no start is lost for ever.

tests/bounds.py says how to allow more time, crashes and lost replies.
"""

from typing import Any

import pytest

from tests.bounds import DEEP, bound
from tests.model import properties
from tests.model.clients import Freed, LateCopy, Ours
from tests.model.explorer import (
    TICK,
    Client,
    Event,
    State,
    World,
    assert_broken,
    assert_holds,
    spinning,
)
from tests.model.properties import PACED, lost_permit
from tests.model.store import Start, Store
from tests.model.test_model_waiters import SAFE_PERMITS, SWEPT, as_it_was, assert_breaks, with_methods
from tests.model.waiters import (
    Waiters,
    late_takes_a_start,
    pace_of_who_starts,
    stands_where_it_stood,
    starts_left,
    woken_may_start,
)

pytestmark = pytest.mark.timeout(3_600 if DEEP else 600)

LONGEST = 4  # ticks: the longest lease, rest or hold below, and the longest period
ONE: dict[str, Any] = {"starts": 1, "period": 2}
PAIR: dict[str, Any] = {"limit": 2, "starts": 2, "period": 3}
SHORT: dict[str, Any] = {"lease": 1, "tries": 1}
WORLDS = {
    "one permit, one start": lambda: World(Ours("a", lease=1, **ONE), Ours("b", lease=2, **ONE),
        Ours("c", lease=1, tries=1 + DEEP, **ONE), ticks=bound(3, small=2, full=6, deep=8), crashes=1),
    "one permit, two starts": lambda: World(
        *[Ours(task, starts=2, period=2, **SHORT) for task in bound("ab", deep="abd")], Ours("c", lease=1,
        starts=2, period=2), ticks=bound(3, small=2, full=5, deep=7), crashes=1),
    "two permits, one start": lambda: World(*[Ours(task, lease=2, limit=2, **ONE) for task in "ab"],
        Ours("c", limit=2, lease=1, tries=1, **ONE), ticks=bound(3, small=2, full=5, deep=7), crashes=1),
    "two permits, two starts": lambda: World(*[Ours(task, **SHORT, **PAIR) for task in "ab"],
        *[Ours(task, lease=2, **PAIR) for task in bound("c", deep="cd")],
        ticks=bound(3, small=2, full=5), crashes=bound(0, full=1)),
    "lost replies": lambda: World(Ours("a", **SHORT, **ONE), Ours("b", lease=2, **ONE),
        *bound([], full=[Ours("c", **SHORT, **ONE)]), ticks=bound(4, small=2, full=5, deep=6), crashes=1,
        losses=1 + DEEP),
    "sends that take their time": lambda: World(Ours("a", lease=1, slow_send=True, **ONE),
        Ours("b", lease=2, slow_send=True, **ONE), ticks=bound(5, small=4, full=7), crashes=1),
    "copies that arrive late": lambda: World(Ours("a", lease=1, **ONE), Ours("b", lease=2, **ONE),
        LateCopy("acquire", 0), LateCopy("release", 0), ticks=bound(4, small=3, full=6), crashes=1),
    "calls that run no body": lambda: World(Ours("a", lease=1, bodiless=True, **ONE),
        Ours("b", lease=1, tries=1 + DEEP, **ONE),
        *bound([], full=[Ours("c", bodiless=True, **SHORT, **ONE)]),
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
        Ours("b", **SHORT, **PAIR), *bound([], full=[Ours("c", **SHORT, **PAIR)]),
        ticks=bound(3, small=2, full=4), crashes=bound(0, full=1)),
    "death that can be proved": lambda: World(Ours("a", **ONE), Ours("b", proof=True, **ONE),
        Ours("c", **SHORT, **ONE), ticks=bound(2, full=6), crashes=2),
    "a redelivery after a death that can be proved": lambda: World(Ours("a", lease=2, **ONE),
        Ours("a", proof=True, **ONE), *bound([], full=[Ours("b", **SHORT, **ONE)]),
        ticks=bound(4, small=3, full=6), crashes=1),
    "rates that differ": lambda: World(Ours("a", lease=1, limit=2, starts=2, period=2),
        Ours("b", limit=2, starts=1, period=4, **SHORT), Ours("c", **SHORT, **ONE),
        ticks=bound(3, small=2, full=6), crashes=bound(0, full=1)),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_pace_is_kept_in_every_interleaving(name):
    """No more bodies begin within a period than may, and from every state all starts can be had in time."""
    world = WORLDS[name]()
    by_one = name != "rates that differ"
    checked = [holds for holds in PACED if by_one or holds is not properties.paced_with_reason]
    found = assert_holds(world, checked)
    most, period = properties._pace(world)
    starts = min(most, world.limit)
    pace = f":{starts}/{period}"
    assert lost_permit(world.lock, found, 2 * LONGEST, starts, pace) is None


def test_pace_does_not_survive_a_loss_of_data():
    """What is not promised: as many starts once more, after Redis has lost its data; but not more."""
    clients = [Ours(task, **SHORT, **ONE) for task in "abc"]
    assert_broken(World(*clients, ticks=3, wipes=1), "pace_kept", PACED[-4:])
    assert_holds(World(*clients, ticks=3, wipes=1), [no_more_than_twice])


def no_more_than_twice(world: World, before: State, event: Any, after: State) -> bool:
    """Two within a period: one before the loss, and one after it."""
    return all(later - at >= 2 * TICK for at, later in zip(after.bodies, after.bodies[2:]))


def ours(tasks: str, kind: type[Ours] = Ours, **options: Any) -> list[Ours]:
    """Clients with a lease of a tick."""
    return [kind(task, **{**SHORT, **ONE, **options}) for task in tasks]


class TakesAnothersBack(Ours):
    """A call without a body that takes a start back, whose ever it is."""

    def its_start(self, me: Client, store: Store) -> Start:
        return store.starts.times[0] if store.starts.times else me.granted


def test_start_of_another_that_is_taken_back_lets_too_many_start():
    """A mistake of a client, found by the pace that it breaks."""
    world = World(*ours("abc", TakesAnothersBack, bodiless=True, limit=2), ticks=5, crashes=1)
    assert_broken(world, "pace_kept", [properties.pace_kept])


def passes(event: Event) -> bool:
    """Whether time passes."""
    return event.actor is None and any(
        what in event.what for what in ("counts no more", "passes", "is to have its place again")
    )


def is_paced(event: Event) -> bool:
    """Whether a call is refused for its pace."""
    return event.what.endswith(" is paced")


PACE = (
    *SAFE_PERMITS,
    starts_left,
    pace_of_who_starts,
    woken_may_start,
    late_takes_a_start,
    stands_where_it_stood,
)
LINES = {
    "one permit, one start": lambda: Waiters("abc", slots=2, pace=1, crashes=1, **SWEPT),
    "one permit, one start, wake-ups that come late": lambda: Waiters("ab", slots=2, pace=1, crashes=1,
        late_wakes=1, **SWEPT),
    "one permit, two starts": lambda: Waiters("abc", slots=2, pace=2, crashes=bound(0, full=1), **SWEPT),
    "two permits, one start": lambda: Waiters("abc", slots=2, limit=2, pace=1, crashes=bound(0, full=1),
        **SWEPT),
    "two permits, two starts": lambda: Waiters("abc", slots=2, limit=2, pace=2, late_wakes=1,
        crashes=bound(0, full=1), **SWEPT),
    "two permits, two starts, four calls": lambda: Waiters("abcd", slots=bound(2, full=3), limit=2, pace=2,
        **SWEPT),
    "two permits, one start, wake-ups that come late": lambda: Waiters("abc", slots=2, limit=2, pace=1,
        late_wakes=bound(1, full=2), **SWEPT),
    "late acknowledgement": lambda: Waiters("ab", late="a", pace=1, crashes=1, **SWEPT),
    "second deliveries": lambda: Waiters("ab", late="a", pace=1, seconds=1, **bound(SWEPT, full={})),
    "calls that retry themselves": lambda: Waiters("ab", retries={"a": 1}, pace=1, crashes=bound(0,
        full=1), **SWEPT),
    "calls that leave": lambda: Waiters("ab", revokes=1, pace=1, crashes=1, **SWEPT),
    "permits that rest": lambda: Waiters("ab", rests=True, pace=1, crashes=1, **SWEPT),
    "anybody who lets the line go on": lambda: Waiters("abc", slots=2, visits=1, pace=1, **SWEPT),
    "couriers": lambda: Waiters("ab", pace=1, crashes=1),
    "rates that differ": lambda: Waiters("ab", limit=2, pace=1, paces={"b": 2}, crashes=1, **SWEPT),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_line_goes_on_at_its_pace(name):
    """Whoever waits has his turn, nobody is woken before he may start, and no start is kept for ever."""
    left_out = LEFT_OUT.get(name, ())
    checked = [holds for holds in PACE if holds.__name__ not in left_out]
    world = LINES[name]()
    assert_holds(world, checked, goal=world.is_over)


LEFT_OUT = {
    # Who knows of fewer starts wakes fewer.
    "rates that differ": ("starts_left", "woken_may_start", "serves_all"),
    # Who is late takes the start that is kept for another, which is told so when it comes.
    "two permits, one start, wake-ups that come late": ("starts_left", "woken_may_start"),
}
SPINS = {
    "one permit": lambda **methods: with_methods("ab", slots=2, pace=1, late_wakes=1, **SWEPT, **methods),
    "two permits": lambda **methods: with_methods(
        "abc", slots=2, limit=2, pace=1, crashes=1, **SWEPT, **methods
    ),
    "wake-ups alone": lambda **methods: with_methods(
        "ab", pace=1, visits=1, couriers=False, sweeps=False, **methods
    ),
}


@pytest.mark.parametrize("name", SPINS)
def test_paced_call_asks_again_when_time_has_passed(name):
    """No call is refused for its pace, parked and woken again and again at one moment."""
    assert not spinning(SPINS[name](), passes, is_paced)


def test_paced_call_whose_line_is_not_noted_is_lost():
    """A mistake of a worker, found as not every call ends."""
    nowhere = {"noted_before": as_it_was, "noted_after": as_it_was}
    assert_breaks(with_methods("ab", pace=1, **nowhere, **SWEPT), "all_end")


def test_mutant_that_spins_is_killed():
    """A call that asks at once when it has parked does so again and again, though no time passes."""
    assert spinning(SPINS["one permit"](met_its_pace="comes_in"), passes, is_paced)
