"""Every scenario that is explored: who takes part, how much may go wrong, and what must hold.

tests/bounds.py says how to allow more time, more clients and more that goes wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from tests.bounds import DEEP, bound
from tests.model import properties
from tests.model.clients import Call, Classic, Counted, Freed, LateCopy, Ours, Parent, ParentOfCounted
from tests.model.explorer import Property, Result, World, explore
from tests.model.newest import SAFETY as REPLACES
from tests.model.newest import Replacing
from tests.model.properties import (
    MARKS,
    PACED,
    PERMITS_SAFETY,
    SAFETY,
    WINDOW,
    fences_rise,
    lost_permit,
    slowest_acquire,
    slowest_publish,
)
from tests.model.store import MS, Store
from tests.model.waiters import (
    Waiters,
    at_most_once,
    beyond_drains,
    in_order,
    known_in_line,
    late_takes_a_start,
    line_moves,
    one_permit_each,
    one_wake_up,
    pace_of_who_starts,
    passed_over_unwoken,
    serves_all,
    side_by_side,
    stands_where_it_stood,
    starts_left,
    with_the_broker,
    woken_are_let_in,
    woken_may_start,
)

InTime = Callable[[Any, Result], str]
"""Of a world and what was explored: what does not come in time; '' if all does."""


class Scenario(NamedTuple):
    """A world; what holds of every step; where a way leads from every state; and what comes in time."""

    make: Callable[[], Any]
    properties: Sequence[Property]
    goal: str = ""
    in_time: InTime | None = None

    def explored(self, limit: int = 10_000_000) -> Result:
        """What is found; `broken` names what does not hold."""
        world = self.make()
        found = explore(world, self.properties, limit, goal=getattr(world, self.goal) if self.goal else None)
        if found.broken or self.in_time is None:
            return found
        return found._replace(broken=self.in_time(world, found))


def acquires_within(ticks: int) -> InTime:
    """From every state a lone client acquires in so many ticks."""

    def late(world: World, found: Result) -> str:
        return "" if slowest_acquire(world.lock, found, ticks) <= ticks else "acquired_in_time"

    return late


def all_permits_within(ticks: int, pace: str = "") -> InTime:
    """From every state lone clients have all permits, and all starts, after so many ticks."""

    def lost(world: World, found: Result) -> str:
        limit = world.limit
        terms = pace
        if world.period:
            most, period = properties.pace_of(world)
            limit = min(most, limit)
            terms = f":{limit}/{period}"
        return "" if lost_permit(world.lock, found, ticks, limit, terms) is None else "no_permit_lost"

    return lost


def publishes_within(ticks: int, *, until_done: bool) -> InTime:
    """From every state a lone publisher is no duplicate after so many ticks."""

    def late(world: World, found: Result) -> str:
        slowest = slowest_publish(world.lock, found, ticks, until_done=until_done)
        return "" if slowest <= ticks else "published_in_time"

    return late


LONGEST = 5  # ticks: the longest lease below; rests and holds are shorter
LOCKS: dict[str, Callable[[], World]] = {
    "two clients and two crashes": lambda: World(Ours("a", tries=3), Ours("b", tries=3),
        ticks=bound(6, full=12, deep=20), crashes=2),
    "three clients with unequal leases": lambda: World(Ours("a", lease=2, tries=1 + DEEP), Ours("b", lease=5),
        Ours("c", lease=1), ticks=bound(3, full=7, deep=9), crashes=1 + DEEP),
    "renewals": lambda: World(Ours("a", lease=2, beats=2), Ours("b", lease=2, beats=1),
        ticks=bound(5, full=8, deep=11), crashes=1 + DEEP),
    "lost replies": lambda: World(Ours("a", beats=1), Ours("b", tries=1 + DEEP),
        ticks=bound(3, full=6, deep=7), crashes=1, losses=2 + DEEP),
    "sends that take their time": lambda: World(Ours("a", beats=1, slow_send=True), Ours("b", slow_send=True),
        ticks=bound(4, full=6, deep=9), crashes=1 + DEEP),
    "copies that arrive late": lambda: World(Ours("a"), Ours("b", beats=DEEP), LateCopy("acquire", 0),
        LateCopy("release", 0), ticks=bound(4, full=6, deep=8), crashes=1),
    "a lock that rests": lambda: World(Ours("a", lease=2, at_least_for=4, retries=1),
        Ours("b", tries=2 + DEEP), ticks=bound(3, full=7, deep=12), crashes=1, losses=1),
    "a lock held for retry, with a second delivery": lambda: World(Ours("a", lease=2, hold=3, retries=1),
        Ours("a", tries=1), Ours("b", lease=2, tries=1 + DEEP), ticks=bound(3, full=5, deep=7),
        crashes=1),
    "a lock held for a retry that may be revoked": lambda: World(Ours("a", lease=2, hold=3, retries=1 + DEEP),
        Ours("b", tries=1 + DEEP), Freed("a"), ticks=bound(2, full=6, deep=7), crashes=1, losses=1),
    "death that can be proved": lambda: World(Ours("a", at_least_for=2), Ours("b", tries=2, proof=True),
        Ours("c", tries=1 + DEEP, proof=True), ticks=bound(2, full=4, deep=5), crashes=2),
    "a worker parent": lambda: World(Ours("a"), Ours("b", proof=True), Parent(0),
        ticks=bound(5, full=7, deep=9), crashes=2),
}  # fmt: skip

# A limit of two, unless it is said.
TWO = {"limit": 2}
PERMITS: dict[str, Callable[[], World]] = {
    "three clients and a crash": lambda: World(Ours("a", lease=2, **TWO), Ours("b", **TWO), Ours("c", **TWO),
        ticks=bound(2, full=6, deep=9), crashes=1 + DEEP),
    "four clients, three permits": lambda: World(*[Ours(task, limit=3, tries=1, lease=2) for task in "abcd"],
        ticks=bound(1, full=3, deep=5), crashes=1 + DEEP),
    "renewals": lambda: World(Ours("a", lease=2, beats=1, **TWO), Ours("b", lease=2, **TWO),
        Ours("c", tries=1 + DEEP, **TWO), ticks=bound(2, full=5, deep=7), crashes=1),
    "lost replies": lambda: World(Ours("a", **TWO), Ours("b", tries=1, **TWO), Ours("c", tries=1, **TWO),
        ticks=bound(1, full=4, deep=5), crashes=1, losses=1 + DEEP),
    "a second delivery": lambda: World(Ours("a", lease=2, **TWO), Ours("a", **TWO), Ours("b", **TWO),
        ticks=bound(2, full=5, deep=7), crashes=1),
    "limits that differ": lambda: World(Ours("a", limit=3, lease=2), Ours("b", tries=1), Ours("c", **TWO),
        *bound([], deep=[Ours("d", limit=3, tries=1)]), ticks=bound(2, full=4), crashes=1),
    "a second delivery with another limit": lambda: World(Ours("a", lease=2, limit=3), Ours("a", tries=1),
        Ours("b", limit=3), ticks=bound(2, full=4, deep=6), crashes=1),
    "permits that rest": lambda: World(Ours("a", lease=2, at_least_for=4, retries=1, **TWO), Ours("b", **TWO),
        Ours("c", tries=1, **TWO), ticks=bound(2, full=5, deep=7), crashes=1),
    "permits held for a retry, with a second delivery": lambda: World(
        Ours("a", lease=2, hold=3, retries=1, **TWO), Ours("a", tries=1, **TWO),
        Ours("b", lease=2, tries=1, **TWO), ticks=bound(2, full=5, deep=6), crashes=1),
    "permits held for a retry that may be revoked": lambda: World(
        Ours("a", lease=2, hold=3, retries=1, **TWO), Ours("b", tries=1, **TWO), Ours("c", tries=1, **TWO),
        Freed("a"), ticks=bound(1, full=4, deep=5), crashes=1),
    "death that can be proved": lambda: World(Ours("a", **TWO), Ours("b", **TWO),
        Ours("c", tries=2, proof=True, **TWO), ticks=bound(2, full=4, deep=5), crashes=2),
    "a worker parent": lambda: World(Ours("a", **TWO), Ours("b", proof=True, **TWO), Ours("c", **TWO),
        Parent(0), ticks=bound(1, full=4, deep=6), crashes=1 + DEEP),
    "a classic client": lambda: World(Ours("a", **TWO), Ours("b", **TWO), Classic(timeout=1),
        ticks=bound(4, full=6, deep=8), crashes=1),
}  # fmt: skip

DEAD_CLASSIC = Store("9")
CLASSICS: dict[str, Callable[[], World]] = {
    "a recipe that is strict": lambda: beside_a_recipe(strict=True),
    "a recipe that is not": lambda: beside_a_recipe(strict=False),
    # Losers that do not pause may overwrite the value, if our lease <= their timeout + 1.
    "losers": lambda: World(Ours("a", lease=4, beats=2), Classic(timeout=1, tries=1 + DEEP),
        Classic(timeout=1), Ours("b", lease=3, tries=1), store=DEAD_CLASSIC,
        ticks=bound(2, full=5, deep=9), crashes=1),
    "a longer lease than the recipe's": lambda: World(Ours("a", lease=3),
        Classic(timeout=1, tries=2, strict=False), ticks=8),
}  # fmt: skip


def beside_a_recipe(*, strict: bool) -> World:
    """On a free key, and past either's death."""
    recipes = Classic(timeout=1, tries=3, strict=strict), Classic(timeout=1, strict=strict)
    return World(Ours("a", beats=1), *recipes, ticks=bound(4, full=7, deep=12), crashes=1)


QUEUE_LEASE = LEASE = 3
GRACE = 1
MARKED: dict[str, tuple[bool, dict[str, Any]]] = {
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


def marked(until_done: bool, options: dict[str, Any]) -> Scenario:
    """Two calls, crashes, lost replies, lapsed marks."""
    # A key lives to the end of its last millisecond.
    longest = max(QUEUE_LEASE + options.get("countdown", 0), LEASE) + 1
    return Scenario(
        lambda: World(
            call("a", until_done, **options),
            call("b", until_done, skips=options.get("skips", False)),
            ticks=bound(2, full=5 if until_done and options == {"retries": 1} else 4, deep=7),
            crashes=bound(0, full=1, deep=2),
            losses=1,
        ),
        MARKS,
        in_time=publishes_within(longest, until_done=until_done),
    )


def beside_a_bare_call(until_done: bool) -> World:
    """A third call that has no mark excludes the others at run time, and leaves their marks alone."""
    programs = call("a", until_done), call("b", until_done), Ours("c", tries=1)
    return World(*programs, ticks=bound(1, full=3, deep=5), crashes=1)


def counted(task: str, **options: Any) -> Counted:
    """A call whose success counts for two ticks."""
    return Counted(task, queue_lease=2, grace=GRACE, lease=LEASE, window=2, **options)


WINDOWS: dict[str, tuple[Any, ...]] = {
    "two publishers": (counted("a"), counted("b")),
    "one that nobody asks": (counted("a"), counted("b", is_bare=True, tries=1)),
    "none that anybody asks": (counted("a", is_bare=True), counted("b", is_bare=True, tries=1)),
    "skipped on conflict": (counted("a"), counted("b", skips=True)),
    "the lock rests": (counted("a", at_least_for=2), counted("b", is_bare=True, tries=1)),
    "released late": (counted("a", is_late=True), counted("b", is_bare=True, tries=1)),
    "its worker lives": (counted("a", publishes=1), counted("b", publishes=1), ParentOfCounted(0)),
}


def window(name: str) -> World:
    """Bodies that succeed or fail, results that cannot be stored, crashes, lost replies, lapsed marks."""
    is_watched = name == "its worker lives"
    ticks = bound(2, full=3 if is_watched else 4, deep=6)
    return World(*WINDOWS[name], ticks=ticks, crashes=1, losses=0 if is_watched else 1)


ONE: dict[str, Any] = {"starts": 1, "period": 2}
PAIR: dict[str, Any] = {"limit": 2, "starts": 2, "period": 3}
SHORT: dict[str, Any] = {"lease": 1, "tries": 1}
PACES: dict[str, Callable[[], World]] = {
    "one permit, one start": lambda: World(Ours("a", lease=1, **ONE), Ours("b", lease=2, **ONE),
        Ours("c", lease=1, tries=1 + DEEP, **ONE), ticks=bound(2, full=6, deep=8), crashes=1),
    "one permit, two starts": lambda: World(
        *[Ours(task, starts=2, period=2, **SHORT) for task in bound("ab", deep="abd")], Ours("c", lease=1,
        starts=2, period=2), ticks=bound(2, full=5, deep=7), crashes=1),
    "two permits, one start": lambda: World(*[Ours(task, lease=2, limit=2, **ONE) for task in "ab"],
        Ours("c", limit=2, lease=1, tries=1, **ONE), ticks=bound(2, full=5, deep=7), crashes=1),
    "two permits, two starts": lambda: World(*[Ours(task, **SHORT, **PAIR) for task in "ab"],
        *[Ours(task, lease=2, **PAIR) for task in bound("c", deep="cd")],
        ticks=bound(2, full=5), crashes=bound(0, full=1)),
    "lost replies": lambda: World(Ours("a", **SHORT, **ONE), Ours("b", lease=2, **ONE),
        *bound([], full=[Ours("c", **SHORT, **ONE)]), ticks=bound(2, full=5, deep=6), crashes=1,
        losses=1 + DEEP),
    "sends that take their time": lambda: World(Ours("a", lease=1, slow_send=True, **ONE),
        Ours("b", lease=2, slow_send=True, **ONE), ticks=bound(4, full=7), crashes=1),
    "copies that arrive late": lambda: World(Ours("a", lease=1, **ONE), Ours("b", lease=2, **ONE),
        LateCopy("acquire", 0), LateCopy("release", 0), ticks=bound(3, full=6), crashes=1),
    "calls that run no body": lambda: World(Ours("a", lease=1, bodiless=True, **ONE),
        Ours("b", lease=1, tries=1 + DEEP, **ONE),
        *bound([], full=[Ours("c", bodiless=True, **SHORT, **ONE)]),
        ticks=bound(2, full=5), crashes=1, losses=1),
    "two permits, calls that run no body": lambda: World(Ours("a", **SHORT, bodiless=True, **PAIR),
        Ours("b", **SHORT, **PAIR), Ours("c", **SHORT, **PAIR), ticks=bound(1, full=5), crashes=1),
    "a second delivery": lambda: World(Ours("a", lease=2, **ONE), Ours("a", lease=1, **ONE),
        Ours("b", lease=1, **ONE), ticks=bound(2, full=6), crashes=1),
    "a permit held for a retry": lambda: World(Ours("a", lease=1, hold=2, retries=1, **ONE),
        Ours("b", **SHORT, **ONE), ticks=bound(3, full=8), crashes=bound(0, full=1), losses=1),
    "a permit held for a retry, with a second delivery": lambda: World(
        Ours("a", lease=1, hold=2, retries=1, **ONE), Ours("a", **SHORT, **ONE), Ours("b", **SHORT, **ONE),
        ticks=bound(3, full=6), crashes=bound(0, full=1)),
    "a permit held for a retry that may be revoked": lambda: World(
        Ours("a", lease=1, hold=2, retries=1, **ONE), Ours("b", **SHORT, **ONE), Freed("a"),
        ticks=bound(3, full=7), crashes=1),
    "permits that rest": lambda: World(Ours("a", lease=1, at_least_for=2, retries=1, **PAIR),
        Ours("b", **SHORT, **PAIR), *bound([], full=[Ours("c", **SHORT, **PAIR)]),
        ticks=bound(2, full=4), crashes=bound(0, full=1)),
    "death that can be proved": lambda: World(Ours("a", **ONE), Ours("b", proof=True, **ONE),
        Ours("c", **SHORT, **ONE), ticks=bound(2, full=6), crashes=2),
    "a redelivery after a death that can be proved": lambda: World(Ours("a", lease=2, **ONE),
        Ours("a", proof=True, **ONE), *bound([], full=[Ours("b", **SHORT, **ONE)]),
        ticks=bound(3, full=6), crashes=1),
    "rates that differ": lambda: World(Ours("a", lease=1, limit=2, starts=2, period=2),
        Ours("b", limit=2, starts=1, period=4, **SHORT), Ours("c", **SHORT, **ONE),
        ticks=bound(2, full=6), crashes=bound(0, full=1)),
}  # fmt: skip

SAFE = (at_most_once, side_by_side, in_order, woken_are_let_in)
SAFE_PERMITS = (*SAFE, one_permit_each, beyond_drains, line_moves, serves_all)
FEW = "abc" if DEEP else "ab"
# Both retry themselves, and their workers' parents hear that after the retry has asked for the lock.
HEARD: dict[str, Any] = {"linger": True, "retries": {"a": 1, "b": 1}, "hears": True}
ALONE: dict[str, Any] = {"couriers": False, "sweeps": False}  # only wake-ups move the line
SWEPT: dict[str, Any] = {"couriers": False}
LATE: dict[str, Any] = {"late_wakes": 1, **SWEPT}
LINES: dict[str, Callable[[], Waiters]] = {
    "wake-ups alone": lambda: Waiters("abcd", slots=3, late_wakes=DEEP, **ALONE),
    "wake-ups alone, asking again first": lambda: Waiters("abc", slots=2 + DEEP, linger=True, late_wakes=DEEP,
        **ALONE),
    "wake-ups alone, calls that leave": lambda: Waiters("abc", slots=3, revokes=1 + DEEP, **ALONE),
    "workers that die": lambda: Waiters(FEW, slots=3, crashes=2, late_wakes=bound(1, full=2), **SWEPT),
    "workers that die, three calls": lambda: Waiters("abc", slots=bound(2, full=3), crashes=1,
        late_wakes=bound(0, full=1, deep=2), **SWEPT),
    "workers that die, asking again first": lambda: Waiters("ab", linger=True, crashes=1 + DEEP, late_wakes=1,
        **SWEPT),
    "workers that die, late acknowledgement": lambda: Waiters("ab", late=bound("a", full="ab"), crashes=1,
        late_wakes=1, **SWEPT),
    "children that die": lambda: Waiters("abc", slots=3, proof=True, parents=True, crashes=bound(1, full=2),
        **SWEPT),
    "wake-ups that come late": lambda: Waiters("abc", slots=2 + DEEP, late_wakes=bound(1, full=2), **SWEPT),
    "calls that leave": lambda: Waiters(FEW, revokes=1, crashes=1, late_wakes=1, **SWEPT),
    "calls that retry themselves": lambda: Waiters("ab", retries={"a": 1, "b": DEEP}, hears=True,
        crashes=bound(0, full=1), late_wakes=bound(0, full=1), **SWEPT),
    "a lock that rests": lambda: Waiters(FEW, rests=True, crashes=1, late_wakes=1, **SWEPT),
    "second deliveries": lambda: Waiters("ab", late=bound("a", full="ab"), seconds=1 + DEEP),
    "second deliveries, amid parking": lambda: Waiters("ab", late="ab", seconds=1, early_seconds=True),
    "tickets that are forgotten": lambda: Waiters("ab", forgets=True, late_wakes=1),
}  # fmt: skip

TWO: dict[str, Any] = {"limit": 2}
DOWN: dict[str, Any] = {"limit": 2, "limits": dict.fromkeys("cd", 1)}
UP: dict[str, Any] = {"limit": 1, "limits": dict.fromkeys("cd", 2)}
RAISED: dict[str, Any] = {"limit": 3, "parked": "bcd"}
LINES_OF_PERMITS: dict[str, Callable[[], Waiters]] = {
    "nobody dies": lambda: Waiters(bound("abcd", full="abcde"), slots=5, **TWO, **SWEPT),
    "wake-ups alone, three permits": lambda: Waiters("abcd", slots=4, limit=3, **ALONE),
    "nobody dies, beside a call that runs for ever": lambda: Waiters("abcd", slots=bound(3, full=4),
        endless="a", **TWO, **SWEPT),
    "wake-ups alone, two of three run for ever": lambda: Waiters("abcd", slots=4, endless="ab", limit=3,
        **ALONE),
    "wake-ups alone, asking again first": lambda: Waiters("abc", slots=3, linger=True, **TWO, **ALONE),
    # A fourth call may park beside a free permit, behind one that has its turn: that is left to a sweep.
    "wake-ups alone, calls that leave": lambda: Waiters("abc", slots=4, revokes=1, **TWO, **ALONE),
    "wake-ups alone, limits that differ": lambda: Waiters("abc", slots=4, **DOWN, **ALONE),
    "a limit that was raised": lambda: Waiters(bound("abcd", full="abcde"), slots=4, **RAISED, **SWEPT),
    "workers that die": lambda: Waiters("abc", slots=3, crashes=bound(1, full=2),
        late_wakes=bound(1, full=2), **TWO, **SWEPT),
    "workers that die, four calls": lambda: Waiters("abcd", slots=3, crashes=bound(0, full=2), **TWO,
        **SWEPT),
    "workers that die, three permits": lambda: Waiters("abcd", slots=4, crashes=1,
        late_wakes=bound(0, full=1), limit=3, **SWEPT),
    "workers that die, beside a call that runs for ever": lambda: Waiters("abc", slots=3, crashes=1,
        late_wakes=1, endless="a", **TWO, **SWEPT),
    "workers that die, asking again first": lambda: Waiters("abc", slots=3, linger=True,
        crashes=bound(0, full=1), late_wakes=bound(0, full=1), **TWO, **SWEPT),
    "workers that die, late acknowledgement": lambda: Waiters("abc", slots=bound(2, full=3), late="a",
        crashes=bound(0, full=1), late_wakes=bound(0, full=1), **TWO, **SWEPT),
    "workers that die, a limit that was raised": lambda: Waiters("abcd", slots=bound(2, full=3), crashes=1,
        late_wakes=bound(0, full=1), **RAISED, **SWEPT),
    "children that die": lambda: Waiters("abc", slots=3, proof=True, parents=True, crashes=2, **TWO, **SWEPT),
    "calls that leave": lambda: Waiters("abc", slots=3, revokes=1, crashes=1, late_wakes=bound(0, full=1),
        **TWO, **SWEPT),
    "calls that retry themselves": lambda: Waiters("abc", slots=bound(2, full=3), retries={"a": 1},
        hears=True, crashes=bound(0, full=1), **TWO, **SWEPT),
    "permits that rest": lambda: Waiters("abc", slots=3, rests=True, crashes=1, late_wakes=bound(0, full=1),
        **TWO, **SWEPT),
    "limits that differ": lambda: Waiters(bound("abc", deep="abcd"), slots=3, crashes=1,
        late_wakes=bound(0, full=1), **DOWN, **SWEPT),
    "second deliveries": lambda: Waiters("abc", late="a", seconds=1, slots=bound(2, full=3), **TWO),
    "couriers": lambda: Waiters("abc", slots=3, crashes=1, late_wakes=bound(0, full=1), **TWO),
}  # fmt: skip

PACE = (
    *SAFE_PERMITS,
    starts_left,
    pace_of_who_starts,
    woken_may_start,
    late_takes_a_start,
    stands_where_it_stood,
)
PACED_LINES: dict[str, Callable[[], Waiters]] = {
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
    "couriers": lambda: Waiters("ab", pace=1, crashes=1),
    "rates that differ": lambda: Waiters("ab", limit=2, pace=1, paces={"b": 2}, crashes=1, **SWEPT),
}  # fmt: skip

LEFT_OUT: dict[str, tuple[str, ...]] = {
    # Who knows of fewer starts wakes fewer.
    "rates that differ": ("starts_left", "woken_may_start", "serves_all"),
    # Who is late takes the start that is kept for another, which is told so when it comes.
    "two permits, one start, wake-ups that come late": ("starts_left", "woken_may_start"),
}


def _by_its_rate(name: str) -> list[Property]:
    by_one = name != "rates that differ"
    return [holds for holds in PACED if by_one or holds is not properties.paced_with_reason]


def _of_paced_line(name: str) -> list[Property]:
    return [holds for holds in PACE if holds.__name__ not in LEFT_OUT.get(name, ())]


def _of_permits(world: Callable[[], Waiters]) -> Scenario:
    return Scenario(world, SAFE_PERMITS, "all_end" if world().endless else "is_over")


# What one property is about, or one goal.
OF_LINES = {
    "one that never comes": Scenario(
        # All others end, though one is never there when it is woken, and does not leave the line.
        lambda: Waiters("abc", slots=2 + DEEP, absent="a", crashes=1, late_wakes=DEEP, **SWEPT),
        SAFE,
        "all_end",
    ),
    "one that never comes for a permit": Scenario(
        lambda: Waiters("abc", slots=3, absent="a", crashes=1, late_wakes=DEEP, **TWO, **SWEPT),
        SAFE_PERMITS,
        "all_end",
    ),
    # Of no call two wake-ups are on their way.
    "woken once": Scenario(lambda: Waiters("abc", slots=3, **SWEPT), [one_wake_up]),
    "woken once, beside the dead": Scenario(
        lambda: Waiters("abc", slots=3, proof=True, crashes=1, **SWEPT), [one_wake_up]
    ),
    # Nobody would wake it for a lease, though its hand-over only ended while it asked again, or parked.
    "passed over though not woken, asking again": Scenario(
        lambda: Waiters(bound("ab", full="abc"), linger=True, **LATE), [passed_over_unwoken]
    ),
    "passed over though not woken": Scenario(lambda: Waiters("abc", slots=3, **LATE), [passed_over_unwoken]),
    "passed over though not woken, retries": Scenario(
        lambda: Waiters("ab", **HEARD, **SWEPT), [passed_over_unwoken]
    ),
    # Who hands out several permits wakes everybody for whom one is kept.
    "passed over for a permit though not woken": Scenario(
        lambda: Waiters("abc", slots=3, late_wakes=1, **TWO, **SWEPT), [passed_over_unwoken]
    ),
    "passed over for a permit though not woken, a limit that was raised": Scenario(
        lambda: Waiters("abcde", slots=3, **RAISED, **SWEPT), [passed_over_unwoken]
    ),
    # With what wakes them, also while one that has been woken asks again.
    "known in line": Scenario(lambda: Waiters("ab", linger=True, retries={"a": 1}, **LATE), [known_in_line]),
    # At every step a message of the call is there, if only its courier, whoever dies at whatever moment.
    "with the broker": Scenario(
        lambda: Waiters("ab", crashes=bound(1, full=2), late_wakes=1), [*SAFE, with_the_broker], "is_over"
    ),
    "with the broker, late acknowledgement": Scenario(
        lambda: Waiters("ab", late=bound("a", full="ab"), crashes=1 + DEEP, late_wakes=bound(0, full=1)),
        [*SAFE, with_the_broker],
        "is_over",
    ),
    # When Redis loses its data every waiting call runs all the same, perhaps beside another or twice.
    "data is lost": Scenario(lambda: Waiters("ab", wipes=1 + DEEP), [], "all_end"),
    "data is lost, and a worker": Scenario(
        lambda: Waiters("ab", wipes=1 + DEEP, crashes=bound(0, full=1)), [], "all_end"
    ),
    "data of several permits is lost": Scenario(
        lambda: Waiters("abc", slots=bound(2, full=3), wipes=1, **TWO), [], "all_end"
    ),
    # A holder that stands still past its lease runs beside the next one; that loses or repeats no call.
    "a lease ends too soon": Scenario(
        lambda: Waiters("ab", lapses=1, crashes=bound(0, full=1)), [at_most_once], "is_over"
    ),
}
FEW, MANY = "xyz", bound("xyz", deep="xyzx")  # arguments of calls, in order
OF_NEWEST: dict[str, Callable[[], Replacing]] = {
    "three calls": lambda: Replacing("xyz", slots=3),
    "equal calls": lambda: Replacing("xyx"),
    "equal calls of which one is revoked": lambda: Replacing("xyy", revokes=1),
    "a call that is revoked": lambda: Replacing(MANY, revokes=1),
    "messages that are lost, publishers that die": lambda: Replacing(MANY, drops=1, deaths=1),
    "a second delivery": lambda: Replacing(FEW, seconds=1),
    "the bound passes": lambda: Replacing(MANY, bounds=2),
    "the bound passes, and a worker dies": lambda: Replacing("xy", bounds=1, crashes=1),
    "the first leads": lambda: Replacing(FEW, leading=True),
    "the first leads, and a worker dies": lambda: Replacing("xy", leading=True, crashes=1),
    "equal calls are debounced": lambda: Replacing("xxx", debounce=MS),
    "an older one retries": lambda: Replacing(bound("xy", deep="xyz"), retries={0: 1}),
    "a newer one retries": lambda: Replacing("xy", retries={1: 1}),
    "locks held for retries": lambda: Replacing("xy", retries={0: 1}, hold=True, crashes=1),
    "replies that are lost": lambda: Replacing(FEW, losses=1),
    "workers that die": lambda: Replacing(bound("xy", deep="xyz"), crashes=2),
    "data is lost": lambda: Replacing("xy", wipes=1, crashes=1),
}
SCENARIOS: dict[str, Scenario] = {
    **{
        f"lock, {name}": Scenario(make, SAFETY, in_time=acquires_within(LONGEST))
        for name, make in LOCKS.items()
    },
    **{
        f"permits, {name}": Scenario(
            make, PERMITS_SAFETY, in_time=all_permits_within(LONGEST + 3 * (name == "a classic client"))
        )
        for name, make in PERMITS.items()
    },
    **{
        f"recipe, {name}": Scenario(make, SAFETY, in_time=acquires_within(8))
        for name, make in CLASSICS.items()
    },
    # Fences rise across a loss of all data, though exclusion does not survive it.
    "lock, data is lost": Scenario(
        lambda: World(
            Ours("a", lease=2), Ours("b"), Ours("c", tries=1 + DEEP), ticks=bound(3, full=5), wipes=1 + DEEP
        ),
        [fences_rise],
    ),
    **{f"mark, {name}": marked(*about) for name, about in MARKED.items()},
    "mark, until_started, beside a bare call": Scenario(lambda: beside_a_bare_call(False), MARKS),
    "mark, until_done, beside a bare call": Scenario(lambda: beside_a_bare_call(True), MARKS),
    **{f"window, {name}": Scenario(lambda name=name: window(name), (*SAFETY, *WINDOW)) for name in WINDOWS},
    **{
        f"pace, {name}": Scenario(make, _by_its_rate(name), in_time=all_permits_within(8))
        for name, make in PACES.items()
    },
    **{f"line, {name}": Scenario(make, SAFE, "is_over") for name, make in LINES.items()},
    **{f"line of permits, {name}": _of_permits(make) for name, make in LINES_OF_PERMITS.items()},
    **{f"line, {name}": scenario for name, scenario in OF_LINES.items()},
    **{f"newest, {name}": Scenario(make, REPLACES, "is_over") for name, make in OF_NEWEST.items()},
    **{
        f"paced line, {name}": Scenario(make, _of_paced_line(name), "is_over")
        for name, make in PACED_LINES.items()
    },
}
