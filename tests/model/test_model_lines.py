"""Lines of calls that wait, in every interleaving that the bounds allow; and what is not promised."""

import pytest

from tests.bounds import DEEP
from tests.model.explorer import assert_broken, spinning
from tests.model.scenarios import LATE, SCENARIOS, SWEPT
from tests.model.waiters import Waiters, at_most_once, is_paced, one_wake_up, side_by_side, time_passes

pytestmark = pytest.mark.timeout(3_600 if DEEP else 600)


@pytest.mark.parametrize("name", [name for name in SCENARIOS if "line" in name])
def test_it_holds_in_every_interleaving(name):
    """No step breaks a property, and from every state each call may end."""
    found = SCENARIOS[name].explored()
    print(found)
    assert not found.broken, str(found)


def test_line_does_not_survive_a_loss_of_data():
    """What is not promised: then two run side by side, or one runs twice; but all end."""
    world = Waiters("ab", wipes=1 + DEEP)
    assert_broken(world, "side_by_side", [side_by_side])
    assert_broken(world, "at_most_once", [at_most_once])


def test_lease_that_ends_too_soon_lets_another_in():
    """What is not promised: a holder that stands still past its lease runs beside the next one."""
    assert_broken(Waiters("ab", lapses=1), "side_by_side", [side_by_side])


def test_overtaken_call_that_parks_again_may_be_woken_twice():
    """By its own first message, while a wake-up of it is on its way.

    One message more than is needed: to know of each whether it comes would cost hand-overs that are in vain.
    """
    assert_broken(Waiters("abc", **LATE), "one_wake_up", [one_wake_up])


SPINS = {
    "one permit": lambda: Waiters("ab", slots=2, pace=1, late_wakes=1, **SWEPT),
    "two permits": lambda: Waiters("abc", slots=2, limit=2, pace=1, crashes=1, **SWEPT),
}


@pytest.mark.parametrize("name", SPINS)
def test_paced_call_asks_again_when_time_has_passed(name):
    """No call is refused for its pace, parked and woken again and again at one moment."""
    assert not spinning(SPINS[name](), time_passes, is_paced)
