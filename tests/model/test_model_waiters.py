"""Calls that wait in line: none is lost, none runs twice, none overtakes, whoever dies at whatever moment.

`MODEL_SCALE=10` has more calls, more workers and more that goes wrong.
"""

import os

import pytest

from tests.model.explorer import explore
from tests.model.waiters import Waiters, at_most_once, in_order, side_by_side

DEEP = int(os.environ.get("MODEL_SCALE", "1")) > 1
SAFE = (at_most_once, side_by_side, in_order)
pytestmark = pytest.mark.timeout(3_600 if DEEP else 120)

WORLDS = {
    "wake-ups alone": lambda: Waiters("abcd" if DEEP else "abc", slots=3, couriers=False),
    "wake-ups alone, asking again first": lambda: Waiters(
        "abc", slots=2 + DEEP, couriers=False, linger=True, late_wakes=DEEP
    ),
    "wake-ups alone, calls that leave": lambda: Waiters("abc", slots=3, couriers=False, revokes=1 + DEEP),
    "workers that die": lambda: Waiters("ab", slots=3, crashes=2 + DEEP, late_wakes=1),
    "workers that die, three calls": lambda: Waiters("abc", slots=2 + DEEP, crashes=1),
    "workers that die, asking again first": lambda: Waiters(
        "ab", linger=True, crashes=1 + DEEP, late_wakes=1
    ),
    "workers that die, late acknowledgement": lambda: Waiters(
        "abc" if DEEP else "ab", late="ab", crashes=1, late_wakes=DEEP
    ),
    "children that die": lambda: Waiters(
        "abc" if DEEP else "ab", slots=3, proof=True, parents=True, crashes=2
    ),
    "wake-ups that come late": lambda: Waiters("abc", late_wakes=1 + DEEP),
    "one watches for all": lambda: Waiters("abc" if DEEP else "ab", slots=3, watch=True, crashes=1),
    "calls that leave, and workers that die": lambda: Waiters(
        "abc" if DEEP else "ab", revokes=1, crashes=1, late_wakes=1
    ),
    "calls that retry themselves": lambda: Waiters(
        "ab", retries={"a": 1, "b": DEEP}, crashes=1, late_wakes=DEEP
    ),
    "a lock that rests": lambda: Waiters("ab", slots=2 + DEEP, rests=True, crashes=1, late_wakes=1),
    "wake-ups alone, a lock that rests": lambda: Waiters("abc", slots=3, couriers=False, rests=True),
    "second deliveries": lambda: Waiters("ab", late="ab", seconds=1 + DEEP),
    "second deliveries amid parking": lambda: Waiters("ab", late="ab", seconds=1, early_seconds=True),
}


@pytest.mark.parametrize("name", WORLDS)
def test_no_wake_is_lost_in_any_interleaving(name):
    """From every state every call may still end; on no way to that one runs twice or overtakes."""
    world = WORLDS[name]()
    result = explore(world, SAFE, goal=world.is_over)
    print(f"{name}: {result}")
    assert not result.broken, str(result)


@pytest.mark.parametrize("late", ["", "a", *["ab"] * DEEP])
def test_no_call_is_lost_when_its_worker_and_the_next_die(late):
    """Whatever a call that is acknowledged late has begun before its worker died, it ends."""
    world = Waiters("ab", late=late, crashes=2)
    result = explore(world, [at_most_once], goal=world.all_end)
    print(f"two deaths, acknowledged late: {late or 'none'}: {result}")
    assert not result.broken, str(result)


@pytest.mark.parametrize("crashes", [0, 1])
def test_no_call_is_lost_with_the_data(crashes):
    """When Redis loses its data every waiting call runs all the same, perhaps beside another or twice."""
    world = Waiters("ab", wipes=1 + DEEP, crashes=crashes)
    result = explore(world, [], goal=world.all_end)
    print(f"loss of data: {result}")
    assert not result.broken, str(result)
    assert explore(world, [side_by_side]).broken
    assert explore(world, [at_most_once]).broken


def test_no_call_is_lost_when_a_lease_ends_too_soon():
    """A holder that stands still past its lease runs beside the next one; that loses or repeats no call."""
    world = Waiters("ab", lapses=1, crashes=1)
    result = explore(world, [at_most_once], goal=world.is_over)
    print(f"a lease ends too soon: {result}")
    assert not result.broken, str(result)
    assert explore(world, [side_by_side]).broken
