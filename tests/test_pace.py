"""The pace of a lock, on a real server whose clock is the test's: how many may start within any period."""

from typing import Any

import pytest
import redis

from celery_setnx import LockRefused, SetnxLock
from celery_setnx.lock.line import Found, Place, park
from celery_setnx.lock.lock import AHEAD_S, HeldLock, Outcome
from celery_setnx.lock.names import line_names, permits_name, record_name, starts_name
from celery_setnx.lock.record import ORIGINAL, Served, Terms, task_token
from tests.harness import lock_keys
from tests.model.injected import CLOCK_KEY, EPOCH, ServerClock

NAME = "t:{pace}"
LINE, CALLS = line_names(NAME)
STARTS, PERMITS = starts_name(NAME), permits_name(NAME)
LEASE = 600.0
TWO_IN_60 = (2, 60.0)


@pytest.fixture
def clock(locks, foreign_keys, monkeypatch) -> ServerClock:
    """The server's clock, at second 10 of the test's count."""
    foreign_keys.add(CLOCK_KEY)
    return ServerClock(locks, monkeypatch)


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
    client: redis.Redis, task_id: str, limit: int = 1, rate: Any = TWO_IN_60, retries: int = 0, **about: Any
) -> Outcome:
    """A task's attempt to acquire the lock."""
    return the_lock(client, limit, rate).acquire(token=task_token(task_id, retries, "0a"), **about)


def wait(client: redis.Redis, task_id: str, since: float, limit: int = 1, rate: Any = TWO_IN_60) -> Found:
    """A task enters the line."""
    place = Place(NAME, task_id, 0, 6000.0, terms=Terms(limit, *rate))
    return park(client, place, copy=ORIGINAL, since=since, call=f"wake {task_id}")


def serve(client: redis.Redis, limit: int = 1, rate: Any = TWO_IN_60, **about: Any) -> Served:
    """The line goes on, if it may."""
    return the_lock(client, limit, rate).serve(knows_terms=True, **about)


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


def test_a_held_lock_is_held_whatever_its_pace(locks, clock):
    """Who asks is told of the holder, as if there were no pace."""
    starts(locks, 10, clock=clock)
    start(locks)
    outcome = the_lock(locks).acquire()
    assert (outcome.acquired, outcome.paced, outcome.holder.state) == (False, False, "running")


def test_permits_and_pace_are_two_conditions(locks, clock):
    """A call needs both: with two permits and three starts the third call is held, the fourth paced."""
    first, second = (start(locks, 2, (3, 60)) for _ in range(2))
    assert the_lock(locks, 2, (3, 60)).acquire().holder.state == "running"
    first.release()
    third = start(locks, 2, (3, 60))
    second.release()
    third.release()
    assert the_lock(locks, 2, (3, 60)).acquire().paced


def test_same_command_twice_is_one_start(locks, clock):
    """A reply that was lost: who asks again with its token has the lock, and has started once."""
    lock = the_lock(locks)
    assert lock.acquire(token="one").acquired
    assert lock.acquire(token="one").acquired
    assert noted(locks) == [10]


def test_acquisition_without_a_body_takes_its_start_back(locks, clock):
    """A joined result, a call that has succeeded before: the next may start in its place."""
    starts(locks, 10, clock=clock)
    clock.set(11)
    held = start(locks)
    held.take_start_back()
    held.release()
    assert noted(locks) == [10]
    starts(locks, 12, clock=clock)


def test_start_outlives_its_holder(locks, clock):
    """It died, and its lock is taken over: its start has been one all the same."""
    start(locks, lease=5)
    clock.set(30)
    heir = the_lock(locks).acquire()
    assert heir.taken_over_from is not None
    assert noted(locks) == [10, 30]
    heir.lock.release()
    assert the_lock(locks).acquire().remaining_s == 40


def test_expired_lock_is_not_taken_over_before_its_pace_allows_it(locks, clock):
    """And nothing of it is changed."""
    starts(locks, 10, clock=clock)
    clock.set(20)
    start(locks, lease=5)
    before = locks.get(f"{NAME}:holder")
    clock.set(40)
    assert the_lock(locks).acquire().remaining_s == 30
    assert locks.get(f"{NAME}:holder") == before
    clock.set(70)
    assert the_lock(locks).acquire().taken_over_from is not None


# What is kept


def test_starts_are_kept_for_as_long_as_they_may_be_asked_for(locks, clock):
    """And not longer: no key stays for ever, and none grows with every call."""
    starts(locks, *range(10, 400, 30), clock=clock)
    assert 60 <= locks.pttl(STARTS) / 1000 <= 121
    assert len(noted(locks)) <= 5
    assert noted(locks)[-1] == 370
    assert {key for key in lock_keys(locks) if locks.pttl(key) < 0} <= {CLOCK_KEY}


def test_no_more_starts_are_kept_than_any_rate_asks_for(locks, clock):
    """A deploy has made a thousand a day a thousand a second: the set does not grow for two days."""
    a_day, a_second = (1000, 86_400.0), (1000, 1.0)
    starts(locks, 10, clock=clock, rate=a_day)
    starts(locks, *[11 + n / 1000 for n in range(1200)], clock=clock, rate=a_second)
    assert 1000 <= len(noted(locks)) <= 1100
    assert the_lock(locks, rate=a_day).acquire().paced


def test_server_that_forbids_to_expire_keys_is_left_without_starts(locks, clock, limited):
    """The acquisition is refused before anything is written that would stay."""
    client = redis.Redis.from_url(limited("~*", "+@all", "-pexpire"), decode_responses=True)
    with pytest.raises(LockRefused, match=r"(?i)pexpire"):
        the_lock(client).acquire()
    assert not locks.exists(STARTS, NAME)
    client.close()


def test_two_rates_see_each_others_starts(locks, clock):
    """For a minute of a deploy: each call goes by its own, and counts what both have started."""
    old, new = (4, 60.0), (2, 10.0)
    starts(locks, 10, 11, clock=clock, rate=old)
    assert the_lock(locks, rate=new).acquire().remaining_s == 9
    starts(locks, 20, 21, clock=clock, rate=new)
    clock.set(35)
    assert noted(locks) == [10, 11, 20, 21]  # the shorter period has dropped nothing
    assert the_lock(locks, rate=old).acquire().remaining_s == 35


def test_start_that_is_later_than_now_is_none(locks, clock):
    """The server's clock was set back by an hour: no call waits for it to come there again."""
    starts(locks, 3600, 3601, clock=clock)
    clock.set(20)
    start(locks)
    assert noted(locks) == [20]


def test_redis_that_has_lost_its_data_allows_one_burst(locks, clock):
    """At most so many starts more than the pace allows."""
    starts(locks, 10, 11, clock=clock)
    locks.delete(STARTS, f"{NAME}:holder", PERMITS)
    starts(locks, 12, 13, clock=clock)
    assert the_lock(locks).acquire().remaining_s == 59


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


def test_held_lock_of_a_retry_that_comes_too_early_is_held_for_longer(locks, clock):
    """It comes back when it may start; by then the lock would have been another's."""
    starts(locks, 10, clock=clock)
    clock.set(11)
    first = of_task(locks, "a").lock
    assert first.hold(20) == "held_for_retry"
    outcome = of_task(locks, "a", retries=1)
    assert (outcome.paced, outcome.holder.state, outcome.holder.task_id) == (True, "held_for_retry", "a")
    assert outcome.remaining_s == 59
    assert outcome.holder.deadline == pytest.approx(EPOCH / 1e6 + 31 + 59)  # later by as much
    assert of_task(locks, "b").holder.state == "held_for_retry"
    clock.set(70)
    resumed = of_task(locks, "a", retries=1)
    assert resumed.acquired
    assert resumed.lock.fence == first.fence
    assert noted(locks) == [10, 11, 70]


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


def test_redelivery_of_a_running_call_is_held_not_paced(locks, clock):
    """What it waits for is its own other delivery."""
    starts(locks, 10, clock=clock)
    assert of_task(locks, "a").acquired
    again = the_lock(locks).acquire(token=task_token("a", 0, "0b"))
    assert (again.paced, again.holder.task_id) == (False, "a")


@pytest.mark.parametrize("lease_s", [5, LEASE], ids=["its lease has ended", "it is proved dead"])
def test_redelivery_of_a_dead_call_waits_for_its_pace(locks, clock, lease_s):
    """Another body is another start. It is told of its own first delivery, and waits whatever its policy."""
    starts(locks, 10, clock=clock)
    clock.set(11)
    first, second = task_token("a", 0, "0a"), task_token("a", 0, "0b")
    assert the_lock(locks, lease=lease_s).acquire(token=first).acquired
    clock.set(20)
    again = the_lock(locks).acquire(token=second, dead=first)
    assert (again.paced, again.remaining_s, again.holder.task_id) == (True, 50, "a")
    assert noted(locks) == [10, 11]
    clock.set(70)
    assert the_lock(locks).acquire(token=second, dead=first).taken_over_from.token == first
    assert noted(locks) == [10, 11, 70]


# The line


def test_line_is_served_when_the_pace_allows_it(locks, clock):
    """Before, nobody is handed anything, and it is said when to look again."""
    starts(locks, 10, 20, clock=clock)
    assert wait(locks, "a", 20.0).state == "new"
    served = serve(locks)
    assert (served.heir, served.holder, served.look_in) == (None, None, 50 - AHEAD_S)
    clock.set(70)
    assert serve(locks).heir.task_id == "a"
    assert of_task(locks, "a", copy="c").acquired


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


def test_no_more_permits_are_handed_ahead_than_there_are_starts(locks, clock):
    """Also of a rate whose period is shorter than that."""
    about: Any = {"limit": 3, "rate": (1, 0.005)}
    clock.set(10)
    held = start(locks, **about)
    held.release()
    # The server's own clock goes on, and by that the start may be forgotten already.
    locks.zadd(STARTS, {f"{held._since_us}#{held.permit}#{held.fence}": held._since_us})
    locks.expire(STARTS, 60)
    for place, task_id in enumerate(("a", "b")):
        wait(locks, task_id, 10.0 + place, **about)
    assert serve(locks, **about).heir.task_id == "a"
    assert serve(locks, **about).heir is None
    assert of_task(locks, "a", copy="c", **about).remaining_s == 0.005


def test_two_heirs_of_whom_one_may_start_do_not_wait_for_each_other(locks, clock):
    """They were handed permits by one who knew another pace: each finds its start promised to the other."""
    faster, slower = ({"limit": 2, "rate": (count, 0.005)} for count in (9, 1))
    for place, task_id in enumerate(("a", "b")):
        wait(locks, task_id, 10.0 + place, **faster)
        assert serve(locks, **faster).heir.task_id == task_id
    assert of_task(locks, "a", copy="c", **slower).paced
    assert locks.zrange(LINE, 0, -1) == ["a"]
    assert of_task(locks, "b", copy="c", **slower).acquired


def test_permit_that_is_handed_too_far_ahead_is_given_back(locks, clock):
    """By one who knew another pace: the call waits in line, and not in its slot."""
    starts(locks, 10, clock=clock)
    wait(locks, "a", 10.0, rate=(9, 60))
    assert serve(locks, rate=(9, 60)).heir.task_id == "a"
    clock.set(70 - AHEAD_S - 0.001)
    assert not of_task(locks, "a", rate=(1, 60), copy="c").acquired
    assert locks.zrange(LINE, 0, -1) == ["a"]


def test_empty_line_is_not_looked_at(locks, clock):
    """Whatever its pace."""
    starts(locks, 10, 20, clock=clock)
    assert not serve(locks).waits


def test_release_hands_nothing_over_past_the_pace(locks, clock):
    """Whoever releases serves the line: on the way from hand to hand no start is forgotten."""
    starts(locks, 10, clock=clock)
    clock.set(20)
    held, lock = start(locks), the_lock(locks)
    wait(locks, "a", 20.0)
    assert held.release() == "released"
    assert lock.heirs == []
    assert serve(locks).look_in == 50 - AHEAD_S


def test_newcomer_stands_behind_a_line_that_is_paced(locks, clock):
    """It is told when the next start may be, not to serve a line that nobody can serve."""
    starts(locks, 10, 20, clock=clock)
    wait(locks, "a", 20.0)
    newcomer = of_task(locks, "b")
    assert (newcomer.paced, newcomer.remaining_s, newcomer.waiters) == (True, 50, 1)
    clock.set(70)
    lock = the_lock(locks)
    assert not lock.acquire().acquired  # it has served the line instead
    assert [heir.task_id for heir in lock.heirs] == ["a"]


def test_permit_that_is_handed_counts_as_a_start(locks, clock):
    """For everybody but the call that takes it: two permits are free, and one start is left."""
    starts(locks, 10, clock=clock, limit=2)
    for task_id in ("a", "b"):
        wait(locks, task_id, 10.0, limit=2)
    assert serve(locks, 2).heir.task_id == "a"
    assert serve(locks, 2).heir is None
    assert of_task(locks, "c", 2).paced
    assert of_task(locks, "a", 2, copy="c").acquired
    assert noted(locks) == [10, 10]


def test_start_of_one_that_does_not_come_is_another_s(locks, clock):
    """When the hand-over is over the next in line has its start."""
    starts(locks, 10, clock=clock, limit=2)
    for task_id in ("a", "b"):
        wait(locks, task_id, 10.0, limit=2)
    assert serve(locks, 2).heir.task_id == "a"
    clock.set(20.1)
    assert serve(locks, 2).heir.task_id == "b"


@pytest.mark.parametrize("limit", [1, 2])
def test_call_that_is_woken_late_takes_the_start_of_the_next(locks, clock, limit):
    """Where each is woken late, each would find the start promised to the other, and none would ever run. The
    other stands where it stood.
    """
    about: Any = {"limit": limit, "rate": (1, 60.0)}
    for place, task_id in enumerate(("a", "b")):
        wait(locks, task_id, 10.0 + place, **about)
    assert serve(locks, **about).heir.task_id == "a"
    clock.set(20.1)
    assert serve(locks, **about).heir.task_id == "b"
    clock.set(22)
    assert of_task(locks, "a", copy="c", **about).acquired
    assert not of_task(locks, "b", copy="c", **about).acquired
    assert noted(locks) == [22]
    assert locks.zrange(LINE, 0, -1) == ["b"]


@pytest.mark.parametrize("late_s", [0, 15], ids=["in time", "late"])
def test_heir_that_may_not_start_gives_back_what_it_was_handed(locks, clock, late_s):
    """It was handed by one who knew another pace. It stands where it stood, and nobody else is kept out."""
    starts(locks, 10, clock=clock)
    for place, task_id in enumerate(("a", "b")):
        wait(locks, task_id, 10.0 + place, rate=(9, 60))
    assert serve(locks, rate=(9, 60)).heir.task_id == "a"
    clock.set(10 + late_s)
    outcome = of_task(locks, "a", rate=(1, 60), copy="c")
    assert (outcome.acquired, outcome.paced, outcome.remaining_s) == (False, True, 60 - late_s)
    assert the_lock(locks).holder() is None
    assert locks.zrange(LINE, 0, -1) == ["a", "b"]
    assert wait(locks, "a", 10.0, rate=(1, 60)).state == "parked"
    clock.set(70)
    assert serve(locks, rate=(1, 60)).heir.task_id == "a"


def test_dead_holders_permit_is_handed_on_when_the_pace_allows_it(locks, clock):
    """Its start counts, and so does its heir's."""
    starts(locks, 10, clock=clock)
    clock.set(20)
    dead = start(locks)
    wait(locks, "a", 20.0)
    served = serve(locks, dead=dead.token)
    assert (served.heir, served.look_in) == (None, 50 - AHEAD_S)
    clock.set(70)
    served = serve(locks, dead=dead.token)
    assert (served.heir.task_id, served.heir.taken_over_from.token) == ("a", dead.token)


def test_line_beside_held_permits_is_looked_at_when_a_start_leaves_the_window(locks, clock):
    """Who releases then may find no start left: whoever looks is there when there is one again."""
    starts(locks, 10, clock=clock)
    clock.set(20)
    start(locks)
    wait(locks, "a", 20.0)
    assert serve(locks).look_in == 50 - AHEAD_S
    clock.set(70 - AHEAD_S)  # from now on whoever releases may hand it over
    assert serve(locks).look_in == 10


def test_line_is_not_looked_at_for_a_start_that_is_later_than_now(locks, clock):
    """The clock was set back: whoever releases, or the holder's deadline, lets the line go on."""
    clock.set(100)
    start(locks)
    clock.set(20)
    wait(locks, "a", 20.0)
    assert serve(locks).look_in == 100 + LEASE - 20
