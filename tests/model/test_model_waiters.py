"""Calls that wait in line: none is lost, none runs twice, none overtakes, whoever dies at whatever moment.

tests/bounds.py says how to have more calls, more workers and more that goes wrong.
"""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.bounds import DEEP, SMALL, bound
from tests.model.explorer import Event, Property, assert_broken, assert_holds
from tests.model.test_model_mutants import changed
from tests.model.waiters import (
    ORIGINAL,
    VISITOR,
    Process,
    Scene,
    Waiters,
    at_most_once,
    beyond_drains,
    in_order,
    known_in_line,
    line_moves,
    one_permit_each,
    one_wake_up,
    passed_over_in_vain,
    serves_all,
    side_by_side,
    with_the_broker,
    woken_are_let_in,
)

SAFE = (at_most_once, side_by_side, in_order, woken_are_let_in)
SAFE_PERMITS = (*SAFE, one_permit_each, beyond_drains, line_moves, serves_all)
pytestmark = pytest.mark.timeout(3_600 if DEEP else 600)

FEW = "abc" if DEEP else "ab"
# Both retry themselves, and their workers' parents hear that after the retry has asked for the lock.
HEARD: dict[str, Any] = {"linger": True, "retries": {"a": 1, "b": 1}, "hears": True}
ALONE: dict[str, Any] = {"couriers": False, "sweeps": False}  # only wake-ups, and newcomers, move the line
SWEPT: dict[str, Any] = {"couriers": False}
LATE: dict[str, Any] = {"late_wakes": 1, **SWEPT}
WORLDS = {
    "wake-ups alone": lambda: Waiters("abcd", slots=3, late_wakes=DEEP, **ALONE),
    "wake-ups alone, asking again first": lambda: Waiters("abc", slots=2 + DEEP, linger=True, late_wakes=DEEP,
        **ALONE),
    "wake-ups alone, calls that leave": lambda: Waiters("abc", slots=3, revokes=1 + DEEP, **ALONE),
    "wake-ups alone, a lock that rests": lambda: Waiters("abc", slots=3, rests=True, **ALONE),
    "workers that die": lambda: Waiters(FEW, slots=3, crashes=2, late_wakes=bound(2, small=1), **SWEPT),
    "workers that die, three calls": lambda: Waiters("abc", slots=bound(2, full=3), crashes=1,
        late_wakes=bound(1, small=0, deep=2), **SWEPT),
    "workers that die, asking again first": lambda: Waiters("ab", linger=True, crashes=1 + DEEP, late_wakes=1,
        **SWEPT),
    "workers that die, late acknowledgement": lambda: Waiters("ab", late=bound("ab", small="a"), crashes=1,
        late_wakes=1, **SWEPT),
    "children that die": lambda: Waiters("abc", slots=3, proof=True, parents=True, crashes=bound(2, small=1),
        **SWEPT),
    "wake-ups that come late": lambda: Waiters("abc", slots=2 + DEEP, late_wakes=bound(2, small=1), **SWEPT),
    "calls that leave": lambda: Waiters(FEW, revokes=1, crashes=1, late_wakes=1, **SWEPT),
    "calls that retry themselves": lambda: Waiters("ab", retries={"a": 1, "b": DEEP}, hears=True,
        crashes=bound(1, small=0), late_wakes=bound(0, full=1), **SWEPT),
    "a lock that rests": lambda: Waiters(FEW, rests=True, crashes=1, late_wakes=1, **SWEPT),
    "anybody who lets the line go on": lambda: Waiters(FEW, slots=3, visits=2, crashes=1, late_wakes=1,
        **SWEPT),
    "second deliveries": lambda: Waiters("ab", late=bound("ab", small="a"), seconds=1 + DEEP),
    "second deliveries, amid parking": lambda: Waiters("ab", late="ab", seconds=1, early_seconds=True),
    "tickets that are forgotten": lambda: Waiters("ab", forgets=True, late_wakes=1),
}  # fmt: skip


TWO: dict[str, Any] = {"limit": 2}
DOWN: dict[str, Any] = {"limit": 2, "limits": dict.fromkeys("cd", 1)}
UP: dict[str, Any] = {"limit": 1, "limits": dict.fromkeys("cd", 2)}
RAISED: dict[str, Any] = {"limit": 3, "parked": "bcd"}
PERMITS = {
    "wake-ups alone": lambda: Waiters(bound("abcd", full="abcde"), slots=5, **TWO, **ALONE),
    "wake-ups alone, three permits": lambda: Waiters("abcd", slots=4, limit=3, **ALONE),
    "wake-ups alone, beside a call that runs for ever": lambda: Waiters("abcd", slots=bound(3, full=4),
        endless="a", **TWO, **ALONE),
    "wake-ups alone, two of three run for ever": lambda: Waiters("abcd", slots=4, endless="ab", limit=3,
        **ALONE),
    "wake-ups alone, asking again first": lambda: Waiters("abc", slots=3, linger=True, **TWO, **ALONE),
    "wake-ups alone, calls that leave": lambda: Waiters(bound("abc", full="abcd"), slots=4, revokes=1, **TWO,
        **ALONE),
    "wake-ups alone, limits that differ": lambda: Waiters(bound("abc", full="abcd"), slots=4, **DOWN,
        **ALONE),
    "wake-ups alone, a limit that was raised": lambda: Waiters(bound("abcd", full="abcde"), slots=4, visits=1,
        **RAISED, **ALONE),
    "workers that die": lambda: Waiters("abc", slots=3, crashes=bound(1, full=2),
        late_wakes=bound(1, full=2), **TWO, **SWEPT),
    "workers that die, four calls": lambda: Waiters("abcd", slots=3, crashes=bound(1, full=2), **TWO,
        **SWEPT),
    "workers that die, three permits": lambda: Waiters("abcd", slots=4, crashes=1,
        late_wakes=bound(0, full=1), limit=3, **SWEPT),
    "workers that die, beside a call that runs for ever": lambda: Waiters("abc", slots=3, crashes=1,
        late_wakes=1, endless="a", **TWO, **SWEPT),
    "workers that die, asking again first": lambda: Waiters("abc", slots=3, linger=True,
        crashes=bound(1, small=0), late_wakes=bound(0, full=1), **TWO, **SWEPT),
    "workers that die, late acknowledgement": lambda: Waiters("abc", slots=bound(2, full=3), late="a",
        crashes=bound(1, small=0), late_wakes=bound(0, full=1), **TWO, **SWEPT),
    "workers that die, a limit that was raised": lambda: Waiters("abcd", slots=bound(2, full=3), crashes=1,
        late_wakes=bound(0, full=1), **RAISED, **SWEPT),
    "children that die": lambda: Waiters("abc", slots=3, proof=True, parents=True, crashes=2, **TWO, **SWEPT),
    "calls that leave": lambda: Waiters("abc", slots=3, revokes=1, crashes=1, late_wakes=bound(0, full=1),
        **TWO, **SWEPT),
    "calls that retry themselves": lambda: Waiters("abc", slots=bound(2, full=3), retries={"a": 1},
        hears=True, crashes=bound(0, full=1), **TWO, **SWEPT),
    "permits that rest": lambda: Waiters("abc", slots=3, rests=True, crashes=1, late_wakes=bound(0, full=1),
        **TWO, **SWEPT),
    "anybody who lets the line go on": lambda: Waiters("abc", slots=3, visits=bound(1, full=2), crashes=1,
        late_wakes=1, **TWO, **SWEPT),
    "limits that differ": lambda: Waiters(bound("abc", deep="abcd"), slots=3, crashes=1,
        late_wakes=bound(0, full=1), **DOWN, **SWEPT),
    "second deliveries": lambda: Waiters("abc", late="a", seconds=1, slots=bound(2, full=3), **TWO),
    "couriers": lambda: Waiters("abc", slots=3, crashes=1, late_wakes=bound(0, full=1), **TWO),
}  # fmt: skip


@pytest.mark.parametrize("name", PERMITS)
def test_no_line_stands_beside_a_free_permit(name):
    """Whoever waits has his turn, though others run for ever; nobody overtakes, runs twice, or has two."""
    world = PERMITS[name]()
    assert_holds(world, SAFE_PERMITS, goal=world.all_end if world.endless else world.is_over)


def test_no_line_of_several_permits_waits_for_one_call():
    """All others end, though one is never there when it is woken, and does not leave the line."""
    world = Waiters("abc", slots=3, absent="a", crashes=1, late_wakes=DEEP, **TWO, **SWEPT)
    assert_holds(world, SAFE_PERMITS, goal=world.all_end)


def test_nobody_is_passed_over_who_was_not_woken_for_a_permit():
    """Nobody would wake it for a lease: who hands out several wakes everybody for whom one is kept."""
    assert_holds(Waiters("abc", slots=3, late_wakes=1, **TWO, **SWEPT), [passed_over_in_vain])
    assert_holds(Waiters("abcde", slots=3, **RAISED, **ALONE), [passed_over_in_vain])


def test_no_call_is_lost_with_the_data_of_several_permits():
    """When Redis loses its data every waiting call runs all the same."""
    world = Waiters("abc", slots=bound(2, full=3), wipes=1, **TWO)
    assert_holds(world, [], goal=world.all_end)


@pytest.mark.parametrize("name", WORLDS)
def test_no_wake_is_lost_in_any_interleaving(name):
    """From every state every call may still end; on no way to that one runs twice or overtakes."""
    world = WORLDS[name]()
    assert_holds(world, SAFE, goal=world.is_over)


def test_no_line_waits_for_one_call():
    """All others end, though one is never there when it is woken, and does not leave the line."""
    world = Waiters("abc", slots=2 + DEEP, absent="a", crashes=1, late_wakes=DEEP, **SWEPT)
    assert_holds(world, SAFE, goal=world.all_end)


def test_every_message_is_done_with_at_once():
    """A call that is refused, as others wait, lets the line go on itself, and waits for no sweep."""
    world = Waiters("abc", slots=2 + DEEP, crashes=1, late_wakes=DEEP, **ALONE)
    assert_holds(world, SAFE, goal=world.all_is_done)


@pytest.mark.parametrize("options", [{"slots": 3}, {"slots": 3, "proof": True, "crashes": 1}])
def test_calls_are_woken_once(options):
    """Of no call two wake-ups are on their way."""
    assert_holds(Waiters("abc", **options, **SWEPT), [one_wake_up])


@pytest.mark.parametrize(
    "options",
    [
        {"tasks": "abc", "linger": True},
        {"tasks": "abc", "slots": 3},
        {"tasks": "ab", "late_wakes": 0, **HEARD},
    ],
)
def test_nobody_is_passed_over_who_was_not_woken(options):
    """Nobody would wake it for a lease, though its hand-over only ended while it asked again, or parked."""
    assert_holds(Waiters(**{"late_wakes": 1, **SWEPT, **options}), [passed_over_in_vain])


def test_waiting_calls_are_known_in_line():
    """With what wakes them, also while one that has been woken asks again."""
    assert_holds(Waiters("ab", linger=True, retries={"a": 1}, **LATE), [known_in_line])


@pytest.mark.parametrize("late", ["", "a", *bound([], full=["ab"])])
def test_calls_are_with_the_broker_until_they_end(late):
    """At every step a message of the call is there, if only its courier, whoever dies at whatever moment."""
    world = Waiters("ab", late=late, crashes=2 - SMALL if not late else 1 + DEEP, late_wakes=1)
    assert_holds(world, [*SAFE, with_the_broker], goal=world.is_over)


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


def only_asks_again(world: Waiters, scene: Scene, process: Process) -> Iterator[tuple[Event, Scene]]:
    """A call that is refused lets nobody go on."""
    yield Event(None, "asks again"), scene._replace(processes=(*scene.processes, process._replace(at="asks")))


def as_it_was(world: Waiters, scene: Scene, *_: Any) -> Scene:
    """Nothing is sent, and nobody woken."""
    return scene


def no(*_: Any) -> bool:
    """Whatever is asked."""
    return False


def yes(*_: Any, **__: Any) -> bool:
    """Whatever is asked."""
    return True


def woken_alone(world: Waiters, process: Process) -> bool:
    """A message that wakes a call, or was delivered again; not one that has parked it."""
    return process.message.copy != ORIGINAL or bool(process.message.again)


def asks_if_woken(world: Waiters, process: Process) -> bool:
    """A message that wakes a call, or was delivered again."""
    message = process.message
    return bool(message.again) or (message.copy != ORIGINAL and message.task in world.late)


def ends_if(word: str) -> Any:
    """Also if a courier is answered so."""
    return lambda world, reply: reply[0] == word or Waiters.courier_ends(world, reply)


def notes_later(world: Waiters, scene: Scene) -> Scene:
    """The line is noted in another step."""
    return scene._replace(processes=tuple(sorted((*scene.processes, Process("notes", VISITOR)))))


def notes(world: Waiters, scene: Scene, process: Process) -> Iterator[tuple[Event, Scene]]:
    """The line is noted."""
    yield Event(None, "notes the line"), Waiters.noted_before(world, scene)


def noted_too(world: Waiters, scene: Scene) -> Scene:
    """The line is noted once more."""
    return Waiters.noted_before(world, scene)


def with_methods(tasks: str, **options: Any) -> Waiters:
    """A world; options are its own, or other methods that it has."""
    own = [name for name in options if name not in Waiters.__dataclass_fields__]
    return changed(Waiters, **{name: options.pop(name) for name in own})(tasks, **options)


def assert_breaks(world: Waiters, must_break: Property | str) -> None:
    """Fail unless the property is broken, or the goal of this name out of reach."""
    if isinstance(must_break, str):
        assert_broken(world, must_break, [], goal=getattr(world, must_break))
    else:
        assert_broken(world, must_break.__name__, [must_break])


def test_overtaken_call_that_parks_again_may_be_woken_twice():
    """By its own first message, while a wake-up of it is on its way.

    One message more than is needed: to know of each whether it comes would cost hand-overs that are in vain.
    """
    assert_breaks(Waiters("abc", **LATE), one_wake_up)


def knows_the_last(world: Waiters, process: Process, heir: str, call: str) -> Process:
    """Whoever was to be woken before is forgotten."""
    return process._replace(heir=heir, call=call)


FORGETS = {"forgets": True, "late_wakes": 1}
LOST = "all_end"
MUTANTS: dict[str, tuple[Property | str, str, dict[str, Any]]] = {
    "newcomer lets nobody go on": ("all_is_done", "abc", {"crashes": 1, "_serves": only_asks_again, **ALONE}),
    "no wake-up": (LOST, "ab", {"with_wake": as_it_was, **ALONE}),
    "line never noted": (LOST, "ab",
        {"crashes": 1, "noted_before": as_it_was, "noted_after": as_it_was, **SWEPT}),
    "line noted when the call is parked": (LOST, "ab",
        {"crashes": 2, "noted_before": as_it_was, "noted_after": notes_later, "_notes": notes, **SWEPT}),
    "line forgotten though noted": (LOST, "abcd", { "crashes": 1, "is_unchanged": yes, **SWEPT}),
    "line noted before parking alone": (LOST, "ab", {"crashes": 1, "noted_after": as_it_was, **SWEPT}),
    "first message that waited, soon forgotten": (at_most_once, "ab", {"has_others": woken_alone, **FORGETS}),
    "backend not asked by one that has waited": (at_most_once, "ab",
        {"late": "ab", "seconds": 1, "early_seconds": True, "may_have_ended": asks_if_woken}),
    "no courier": (LOST, "ab", {"wipes": 1, "with_courier": as_it_was}),
    "courier sent when it is parked": (with_the_broker, "ab", {"crashes": 1, "sends_courier_later": yes}),
    "courier sent before a redelivered call is parked": (with_the_broker, "ab",
        {"late": "a", "crashes": 2, "sends_courier_later": no}),
    "no courier for a redelivered call": (with_the_broker, "ab",
        {"late": "a", "crashes": 2, "has_courier": lambda _, message: message.copy != ORIGINAL}),
    "courier ends when the lock is handed over": (with_the_broker, "ab", {"courier_ends": ends_if("handed")}),
    "courier ends when its call is parked": (with_the_broker, "ab", {"courier_ends": ends_if("parked")}),
    "parked without a second look": (LOST, "ab", {"is_free": no, **ALONE}),
    "handed over while it asked": (LOST, "ab", {"linger": True, "its_turn": "", **ALONE}),
    "parked during a rest": (LOST, "ab", {"rests": True, "met_a_rest": "", **ALONE}),
    "left without passing on": (LOST, "abc", {"revokes": 1, "passes_on": no, **ALONE}),
    "backend not asked": (at_most_once, "ab", {"late": "a", "seconds": 1, "may_have_ended": no}),
    "two handed a permit, and one woken": (passed_over_in_vain, "abcde",
        {"slots": 3, "knowing": knows_the_last, **RAISED, **ALONE}),
    "newcomer hands out one permit": (serves_all, "abcd",
        {"slots": 4, "visits": 1, "serves_again": no, **RAISED, **ALONE}),
    "raised limit, and nobody told": (line_moves, "abcd", {"lets_others_in": no, **RAISED, **ALONE}),
    "permit beyond the limit handed over by its holder": (beyond_drains, "abcd",
        {"slots": 4, "may_hand_over": yes, **DOWN, **ALONE}),
    "parked beside a free permit without a second look": (line_moves, "abc",
        {"slots": 3, "is_free": no, **TWO, **ALONE}),
    "left a permit without passing on": (line_moves, "abcd",
        {"slots": 4, "revokes": 1, "passes_on": no, **TWO, **ALONE}),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_of_the_line_is_killed(name):
    """The mistake loses a call, runs it twice, lets one overtake, or wakes one twice."""
    must_break, tasks, options = MUTANTS[name]
    assert_breaks(with_methods(tasks, **options), must_break)
