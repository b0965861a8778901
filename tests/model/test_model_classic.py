"""Our lock beside the classic recipe: rule 5, and the conditions under which it suffices."""

import pytest

from tests.bounds import DEEP, bound
from tests.model.clients import Classic, Ours
from tests.model.explorer import World, assert_broken
from tests.model.properties import exclusion
from tests.model.test_model_lock import assert_safe
from tests.model.test_model_mutants import DEAD_CLASSIC

pytestmark = pytest.mark.timeout(3_600 if DEEP else 600)


@pytest.mark.parametrize("strict", [True, False])
def test_lock_and_recipe_exclude_each_other(strict):
    """On a free key, and past either's death, ours and a prompt classic client never run together."""
    classics = Classic(timeout=1, tries=3, strict=strict), Classic(timeout=1, strict=strict)
    assert_safe(World(Ours("a", beats=1), *classics, ticks=bound(7, small=4, deep=12), crashes=1), 8)


def test_lock_holds_beside_prompt_classic_losers():
    """Losers that do not pause may overwrite the value, if our lease <= their timeout + 1."""
    ours = Ours("a", lease=4, beats=2), Ours("b", lease=3, tries=1)
    losers = Classic(timeout=1, tries=1 + DEEP), Classic(timeout=1)
    ticks = bound(4, small=2, full=5, deep=9)
    assert_safe(World(ours[0], *losers, ours[1], store=DEAD_CLASSIC, ticks=ticks, crashes=1), 8)


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
