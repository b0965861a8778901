"""The pace of a lock, as its callers see it, on a real server whose clock is the test's.

When a call may start, and who is handed a permit, tests/model says.
"""

from typing import Any

import pytest
import redis

from celery_setnx import SetnxLock
from celery_setnx.lock import verbs
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.line import LineEntry, ParkReply, park
from celery_setnx.lock.lock import AHEAD_S
from celery_setnx.lock.names import line_names, permits_name, record_name, starts_name
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import ORIGINAL, ServeReply, Terms, task_token
from celery_setnx.lock.verbs import Caller
from tests.model.injected import EPOCH, ServerClock

NAME = "t:{pace}"
LINE, _ = line_names(NAME)
STARTS, PERMITS = starts_name(NAME), permits_name(NAME)
LEASE = 600.0
TWO_IN_60 = (2, 60.0)


def the_lock(client: redis.Redis, limit: int = 1, rate: Any = TWO_IN_60, **options: Any) -> SetnxLock:
    """The lock, in hands of its own."""
    return SetnxLock(client, NAME, limit=limit, rate=rate, **{"lease": LEASE, "line": True, **options})


def start(client: redis.Redis, limit: int = 1, rate: Any = TWO_IN_60, **options: Any) -> HeldLock:
    """A start that is allowed."""
    outcome = the_lock(client, limit, rate, **options).acquire()
    assert outcome.lock is not None
    return outcome.lock


def starts(client: redis.Redis, *seconds: float, clock: ServerClock, **options: Any) -> None:
    """Starts at these seconds, each over at once."""
    for second in seconds:
        clock.set(second)
        start(client, **options).release()


def of_task(
    client: redis.Redis, task_id: str, rate: Any = TWO_IN_60, retries: int = 0, **about: Any
) -> Outcome:
    """A task's attempt to acquire the lock."""
    return the_lock(client, rate=rate).acquire(
        token=task_token(task_id, retries, "0a"), caller=Caller(**about)
    )


def wait(client: redis.Redis, task_id: str, since: float) -> ParkReply:
    """A task enters the line."""
    place = LineEntry(NAME, task_id, 0, 6000.0, terms=Terms(1, *TWO_IN_60))
    return park(client, place, copy=ORIGINAL, since=since, call=f"wake {task_id}")


def serve(client: redis.Redis) -> ServeReply:
    """The line goes on, if it may."""
    return verbs.serve(the_lock(client), knows_terms=True)


def noted(client: redis.Redis) -> list[float]:
    """The starts that are known, in the test's seconds."""
    return [(score - EPOCH) / 1e6 for _, score in client.zrange(STARTS, 0, -1, withscores=True)]


# How many, and when the next may be


def test_so_many_start_in_any_period_and_the_next_when_the_first_has_left_it(locks, clock):
    """A sliding window: it has no edge at which twice as many could start."""
    starts(locks, 10, 50, clock=clock)
    clock.set(69.999_999)
    outcome = the_lock(locks).acquire()
    assert (outcome.acquired, outcome.paced) == (False, True)
    assert outcome.remaining_s == pytest.approx(0.000_001)
    starts(locks, 70, clock=clock)
    outcome = the_lock(locks).acquire()
    assert outcome.paced
    assert outcome.remaining_s == 40  # until 110
    assert noted(locks) == [10, 50, 70]


def test_refusal_says_that_it_is_for_the_pace(locks, clock):
    """Nobody has the lock; its state is `paced`, and its deadline the time of the next start."""
    starts(locks, 10, 20, clock=clock)
    outcome = the_lock(locks).acquire()
    assert (outcome.holder.state, outcome.holder.token, outcome.holder.task_id) == ("paced", "", None)
    assert outcome.holder.deadline == EPOCH / 1e6 + 70
    assert "its pace of 2 in 60 s until" in str(outcome.holder)
    assert the_lock(locks).holder() is None


def test_acquisition_without_a_body_takes_its_start_back(locks, clock):
    """A joined result, a call that has succeeded before: the next may start in its place."""
    starts(locks, 10, clock=clock)
    clock.set(11)
    held = start(locks)
    held.take_start_back()
    held.release()
    assert noted(locks) == [10]
    starts(locks, 12, clock=clock)


# What is kept


def test_no_more_starts_are_kept_than_any_rate_asks_for(locks, clock):
    """A deploy has made a thousand a day a thousand a second: the set does not grow for two days."""
    a_day, a_second = (1000, 86_400.0), (1000, 1.0)
    starts(locks, 10, clock=clock, rate=a_day)
    starts(locks, *[11 + n / 1000 for n in range(1200)], clock=clock, rate=a_second)
    assert 1000 <= len(noted(locks)) <= 1100
    assert the_lock(locks, rate=a_day).acquire().paced


def test_without_a_rate_there_is_no_key_of_starts(locks, clock):
    """Nor is anything known of terms."""
    start(locks, 1, None).release()
    assert not locks.exists(STARTS, PERMITS)
    start(locks, 3, None).release()
    assert locks.get(PERMITS) == "3 3"
    start(locks, 3, (5, 0.5)).release()
    assert locks.get(PERMITS) == "3 3:5/500000"


NO_RATES = [(0, 1), (1001, 1), (1, 0), (1, 0.0001), (1, 1e9), (-1, 60), (2.5, 60), (True, 60)]


@pytest.mark.parametrize("rate", NO_RATES)
def test_rate_out_of_range_is_refused(locks, rate):
    """1 to 1,000 starts, a whole number, in 1 ms to 366 days."""
    with pytest.raises(ValueError, match="must be 1 to 1000 in 1 ms to 366 days"):
        the_lock(locks, rate=rate)


# A task's own retry


def test_retry_that_comes_often_before_its_time_is_held_an_hour_longer_at_most(locks, clock):
    """A broker may bring it every quarter of an hour: were each time to add the rest of a day, a call that is
    lost would leave the lock held for weeks.
    """
    a_day: Any = {"rate": (1, 86_400.0)}
    clock.set(0)
    of_task(locks, "a", **a_day).lock.hold(7200)
    for second in range(0, 86_400, 1800):
        clock.set(second)
        assert of_task(locks, "a", retries=1, **a_day).paced
    assert the_lock(locks, **a_day).holder().deadline <= EPOCH / 1e6 + 86_400 + 3600


# The line


def test_permit_is_handed_a_moment_ahead_of_its_start(locks, clock):
    """The call is on its way meanwhile. If it comes early it keeps its permit, and asks again: nobody starts
    before the pace allows it.
    """
    starts(locks, 10, 20, clock=clock)
    for place, task_id in enumerate(("a", "b")):
        wait(locks, task_id, 20.0 + place)
    clock.set(70 - AHEAD_S - 0.001)
    assert serve(locks).heir is None
    clock.set(70 - AHEAD_S)
    assert serve(locks).heir.task_id == "a"
    handed = locks.mget(NAME, record_name(NAME))
    for second in (70 - AHEAD_S, 70 - 0.000_001):
        clock.set(second)
        early = of_task(locks, "a", copy="c")
        assert (early.acquired, early.paced, early.remaining_s) == (False, True, pytest.approx(70 - second))
    # As if it had not come yet.
    assert (locks.mget(NAME, record_name(NAME)), locks.zrange(LINE, 0, -1)) == (handed, ["b"])
    clock.set(70)
    assert of_task(locks, "a", copy="c").acquired
    assert noted(locks)[-1] == 70
