"""Calls that wait in line: none is lost, none runs twice, none overtakes, whoever dies at whatever moment.

tests/bounds.py says how to have more calls, more workers and more that goes wrong.
"""

from collections.abc import Callable
from typing import Any

import pytest

from tests.bounds import DEEP, SMALL, bound
from tests.model.explorer import Property, assert_broken, assert_holds
from tests.model.lock import Lock
from tests.model.store import Ticket
from tests.model.test_model_mutants import changed, wrong
from tests.model.waiters import ORIGINAL, Scene, Waiters, at_most_once, in_order, side_by_side

SAFE = (at_most_once, side_by_side, in_order)
pytestmark = pytest.mark.timeout(3_600 if DEEP else 120)

FEW = "abc" if DEEP else "ab"
ALONE = {"couriers": False}
WORLDS = {
    "wake-ups alone": lambda: Waiters("abcd" if DEEP else "abc", slots=3, **ALONE),
    "wake-ups alone, asking again first": lambda: Waiters("abc", slots=2 + DEEP, linger=True, late_wakes=DEEP,
        **ALONE),
    "wake-ups alone, calls that leave": lambda: Waiters("abc", slots=3, revokes=1 + DEEP, **ALONE),
    "workers that die": lambda: Waiters("ab", slots=3, crashes=bound(2, small=1, deep=3), late_wakes=1),
    "workers that die, three calls": lambda: Waiters(bound("abc", small="ab"), slots=2 + DEEP, crashes=1),
    "workers that die, asking again first": lambda: Waiters("ab", linger=True, crashes=1 + DEEP,
        late_wakes=bound(1, small=0)),
    "workers that die, late acknowledgement": lambda: Waiters(FEW, late=bound("ab", small="a"), crashes=1,
        late_wakes=DEEP),
    "children that die": lambda: Waiters(FEW, slots=3, proof=True, parents=True, crashes=2),
    "wake-ups that come late": lambda: Waiters(bound("abc", small="ab"), late_wakes=1 + DEEP),
    "one watches for all": lambda: Waiters(FEW, slots=3, watch=True, crashes=1),
    "calls that leave, and workers that die": lambda: Waiters(FEW, revokes=1, crashes=1,
        late_wakes=bound(1, small=0)),
    "calls that retry themselves": lambda: Waiters("ab", retries={"a": 1, "b": DEEP},
        crashes=bound(1, small=0), late_wakes=DEEP),
    "a lock that rests": lambda: Waiters("ab", slots=2 + DEEP, rests=True, crashes=1,
        late_wakes=bound(1, small=0)),
    "wake-ups alone, a lock that rests": lambda: Waiters("abc", slots=3, rests=True, **ALONE),
    "second deliveries": lambda: Waiters("ab", late=bound("ab", small="a"), seconds=1 + DEEP),
    "second deliveries amid parking": lambda: Waiters("ab", late=bound("ab", small="a"), seconds=1,
        early_seconds=True),
}  # fmt: skip


@pytest.mark.parametrize("name", WORLDS)
def test_no_wake_is_lost_in_any_interleaving(name):
    """From every state every call may still end; on no way to that one runs twice or overtakes."""
    world = WORLDS[name]()
    assert_holds(world, SAFE, goal=world.is_over)


@pytest.mark.parametrize("late", ["", "a", *["ab"] * DEEP])
def test_no_call_is_lost_when_its_worker_and_the_next_die(late):
    """Whatever a call that is acknowledged late has begun before its worker died, it ends."""
    world = Waiters("ab", late=late, crashes=bound(2, small=1))
    assert_holds(world, [at_most_once], goal=world.all_end)


@pytest.mark.parametrize("crashes", [0, 1])
def test_no_call_is_lost_with_the_data(crashes):
    """When Redis loses its data every waiting call runs all the same, perhaps beside another or twice."""
    world = Waiters("ab", wipes=1 + DEEP, crashes=bound(crashes, small=0))
    assert_holds(world, [], goal=world.all_end)
    assert_broken(world, "side_by_side", [side_by_side])
    assert_broken(world, "at_most_once", [at_most_once])


def test_no_call_is_lost_when_a_lease_ends_too_soon():
    """A holder that stands still past its lease runs beside the next one; that loses or repeats no call."""
    world = Waiters("ab", lapses=1, crashes=bound(1, small=0))
    assert_holds(world, [at_most_once], goal=world.is_over)
    assert_broken(world, "side_by_side", [side_by_side])


def hands_to_the_last(lock: Lock, store: Any, now: int) -> tuple[str | None, int, tuple[str, ...]]:
    """To the other end of the line."""
    return store.line.places[-1][1] if store.line.places else None, 0, ()


def compares_no_copies(lock: Lock, ticket: Ticket, attempt: int, copy: str) -> bool:
    """Stale only if a later attempt waits or has begun."""
    return int(ticket.text.split("|")[0]) > attempt


def compares_no_attempts(lock: Lock, ticket: Ticket, attempt: int, copy: str) -> bool:
    """Stale only if another message of this very attempt has begun."""
    return ticket.text.split("|")[0] == str(attempt) and Lock.is_stale(lock, ticket, attempt, copy)


def as_it_was(world: Waiters, scene: Scene, *_: Any) -> Scene:
    """Nothing is sent, and nobody woken."""
    return scene


def no(*_: Any) -> bool:
    """Whatever is asked."""
    return False


def ends_if(word: str) -> Callable[[Waiters, Any], bool]:
    """Also if a courier is answered so."""
    return lambda world, reply: reply[0] == word or Waiters.courier_ends(world, reply)


def mutant(must_break: Property | str, tasks: str, **options: Any) -> tuple[Property | str, Waiters]:
    """What the mistake breaks, and where: options are the world's, or its own or its lock's other methods."""
    lock = wrong(**{name: options.pop(name) for name in list(options) if hasattr(Lock, name)})
    methods = {name: options.pop(name) for name in list(options) if callable(getattr(Waiters, name, None))}
    return must_break, changed(Waiters, **methods)(tasks, lock=lock, **options)


LOST = "a lost wake"
MUTANTS = {
    "release hands over to nobody": mutant(LOST, "ab", next_in_line=lambda *_: (None, 0, ())),
    "release hands over to the last": mutant(in_order, "abc", slots=3, next_in_line=hands_to_the_last),
    "lock kept for one open to all": mutant(in_order, "abcd", slots=3, **ALONE,
        is_for=lambda _, heir, task: heir is not None),
    "lock kept for one open to none": mutant(LOST, "ab", **ALONE, is_for=no, is_woken=no),
    "ticket not checked": mutant(at_most_once, "ab", late_wakes=1, is_stale=no),
    "ticket without copies": mutant(at_most_once, "ab", late_wakes=1, is_stale=compares_no_copies),
    "ticket without attempts": mutant(at_most_once, "ab", retries={"a": 1}, late_wakes=1,
        is_stale=compares_no_attempts),
    "ticket not claimed": mutant(at_most_once, "ab", late_wakes=1, begun=lambda _, store, *rest: store),
    "no wake-up": mutant(LOST, "ab", **ALONE, with_wake=as_it_was),
    "no courier": mutant(LOST, "ab", crashes=1, with_courier=as_it_was),
    "courier sent when it is parked": mutant(LOST, "ab", crashes=2, sends_courier_later=lambda *_: True),
    "courier sent before a redelivered call is parked": mutant(LOST, "ab", late="a", crashes=2,
        sends_courier_later=no),
    "no courier for a redelivered call": mutant(LOST, "ab", late="a", crashes=2,
        has_courier=lambda _, message: message.copy != ORIGINAL),
    "courier ends when the lock is handed over": mutant(LOST, "ab", crashes=1,
        courier_ends=ends_if("handed")),
    "courier ends when its call is parked": mutant(LOST, "ab", crashes=1, courier_ends=ends_if("parked")),
    "courier only looks": mutant(LOST, "ab", crashes=1, courier_goes_on=no),
    "courier acknowledged early": mutant(LOST, "ab", crashes=2, delivered_again=as_it_was),
    "parked without a second look": mutant(LOST, "ab", **ALONE, is_free=no),
    "handed over while it asked": mutant(LOST, "ab", linger=True, **ALONE, taken_to_ask_still=as_it_was),
    "parked during a rest": mutant(LOST, "ab", rests=True, **ALONE, met_a_rest=as_it_was),
    "left without passing on": mutant(LOST, "abc", revokes=1, **ALONE, passes_on=no),
    "backend not asked": mutant(at_most_once, "ab", late="ab", seconds=1,
        may_have_ended=lambda _, message: bool(message.again)),
}  # fmt: skip


DEAR = ("courier sent before a redelivered call is parked", "no courier for a redelivered call")


@pytest.mark.parametrize("name", [name for name in MUTANTS if not (SMALL and name in DEAR)])
def test_mutant_of_the_line_is_killed(name):
    """The mistake loses a call, runs it twice, or lets one overtake."""
    must_break, world = MUTANTS[name]
    if isinstance(must_break, str):
        assert_broken(world, "all_end", [], goal=world.all_end)
    else:
        assert_broken(world, must_break.__name__, [must_break])
