"""The limit of a lock is another for some than for others, or none at all: what each of them gets."""

import pytest

from celery_setnx import SetnxLock
from celery_setnx.lock.names import permits_name

NAME = "t:{proj.sync:0}"


def test_limit_that_is_lowered_to_one_is_a_lock_again(locks):
    """Who has one permit only, and a line, waits for permit 0; when the others have ended nothing is left."""
    held = [SetnxLock(locks, NAME, limit=3).acquire().lock for _ in range(3)]
    alone = SetnxLock(locks, NAME, line=True)
    assert not alone.acquire().acquired
    assert held[1].release() == "released"
    assert not alone.acquire().acquired, "permit 1 is beyond its limit"
    assert [holder.permit for holder in alone.holders()] == [0, 2]
    assert held[0].release() == "released"
    last = alone.acquire().lock
    assert last.permit == 0
    assert held[2].release() == "released"
    assert last.release() == "released"
    assert alone.acquire().acquired
    assert not locks.exists(permits_name(NAME))


@pytest.mark.parametrize("limit", [0, 101, -1, True, 2.0, "3", None])
def test_limit_that_is_no_number_of_permits_is_refused(locks, limit):
    """In the same words whatever it is."""
    with pytest.raises(ValueError, match=r"must be a whole number from 1 to 100, not "):
        SetnxLock(locks, NAME, limit=limit)
