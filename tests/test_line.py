"""The line beside a lock, as its callers see it: who is next, for how long, and who may start.

What each script answers in every state, tests/model says.
"""

import time
from dataclasses import replace
from typing import Any

import pytest
import redis

from celery_setnx import LockRefused, SetnxLock
from celery_setnx.lock.line import LineEntry, ParkReply, leave, park, successor_of
from celery_setnx.lock.names import line_names, permit_names, successor_name, ticket_name
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import ORIGINAL, Heir, task_token
from celery_setnx.lock.verbs import Caller
from tests.harness import age

NAME = "t:{line}"
LINE, CALLS = line_names(NAME)
A, B, C = (Heir(task_id, f"wake {task_id}") for task_id in "abc")


class Line:
    """A lock with a line, and what happens to it. At first somebody holds it."""

    def __init__(self, client: redis.Redis, lease: float = 600.0) -> None:
        self.client = client
        self.lease = lease
        self.lock = self.hold()

    def another(self) -> SetnxLock:
        """The same lock in other hands."""
        return SetnxLock(self.client, NAME, line=True, lease=self.lease)

    def hold(self) -> SetnxLock:
        """Somebody acquires the lock."""
        lock = self.another()
        assert lock.acquire().acquired
        return lock

    def hand_on(self, lock: SetnxLock | None = None) -> Heir | None:
        """Release the lock; to whom it is handed."""
        lock = lock or self.lock
        assert lock.release() == "released"
        return lock.turns.pop().heir if lock.turns else None

    def wait(self, task_id: str, since: float = 10.0) -> ParkReply:
        """A task's conflict: it enters the line."""
        return park(self.client, place(task_id), copy=ORIGINAL, since=since, call=f"wake {task_id}")

    def attempt(self, task_id: str, copy: str = ORIGINAL, **details: Any) -> Outcome:
        """A task's attempt to acquire the lock."""
        return self.another().acquire(token=task_token(task_id, 0, "0a"), caller=Caller(copy=copy, **details))

    def members(self) -> list[str]:
        """Who waits, the first in line first."""
        return [str(member) for member in self.client.zrange(LINE, 0, -1)]


def place(task_id: str) -> LineEntry:
    return LineEntry(NAME, task_id, 0, 6000.0)


@pytest.fixture
def line(locks) -> Line:
    """A lock that is held, and nobody waits."""
    return Line(locks)


def test_line_is_served_in_order_of_waiting_time_to_its_end(locks, line):
    """First come, first served, by the first conflict, whoever has asked Redis first.

    Every release hands the lock to the first, with what wakes it; the last one frees the lock.
    """
    calls = (("b", 20.0), ("a", 10.0), ("c", 30.0))
    assert [line.wait(who, since).place for who, since in calls] == [1, 1, 3]
    assert line.members() == ["a", "b", "c"]
    assert line.hand_on() == A
    for task_id, heir in (("a", B), ("b", C), ("c", None)):
        held = line.another()
        outcome = held.acquire(token=task_token(task_id, 0, "0a"), caller=Caller(copy=f"{task_id}1"))
        assert (outcome.acquired, outcome.taken_over_from) == (True, None)
        assert line.hand_on(held) == heir
    assert not locks.exists(NAME, LINE, CALLS)
    assert line.lock.holder_and_waiters() is None  # nobody has it, nobody waits


def test_handed_lock_refuses_all_but_its_heir_and_names_it(locks, line):
    """Nobody overtakes: another task, a lock without a line, and a program of the recipe find it held."""
    line.wait("a")
    line.hand_on()
    holder = line.attempt("b").holder
    assert (holder.state, holder.task_id, holder.as_dict()["task_id"]) == ("handed", "a", "a")
    assert "task a, the first in line, which was woken at" in str(holder)
    assert not SetnxLock(locks, NAME).acquire().acquired
    assert not locks.setnx(NAME, int(time.time()) + 60)
    assert int(str(locks.get(NAME))) >= locks.time()[0]
    assert line.attempt("a", "a1").acquired


def test_call_that_stays_hands_on_what_it_was_handed_once_each_time(line):
    """A joiner that asks for a result does so; sent again it names the same heir, then nobody any more."""
    for task_id in "ab":
        line.wait(task_id)
    assert line.hand_on() == A
    turns = [leave(line.client, place("a"), copy="a1", stays=time).turn for time in (1, 1, 2)]
    assert [turn and turn.heir for turn in turns] == [B, B, None]


@pytest.mark.parametrize(("lease", "kept"), [(9, 9), (600, 10)])
def test_hand_over_takes_a_lease_and_ten_seconds_at_most(locks, lease, kept):
    """Then the lock is free: that its heir does not come is no crash, and nobody is reported dead."""
    line = Line(locks, lease)
    line.wait("a")
    line.hand_on()
    outcome = line.attempt("b")
    assert not outcome.acquired
    assert outcome.server_time + outcome.remaining_s - outcome.holder.since == pytest.approx(kept, abs=0.01)
    age(locks, NAME, kept)
    outcome = line.attempt("b")
    assert outcome.acquired
    assert outcome.taken_over_from is None


def test_release_into_a_rest_says_when_to_look_at_the_line(line):
    """Also one that is sent again, as its reply was lost. If nobody waits there is nothing to be done."""
    lock = line.another()
    line.hand_on()
    held = lock.acquire().lock
    assert held.release(at_least_for=500) == "resting"
    assert lock.turns == []
    line.wait("a")
    assert held.release(at_least_for=500) == "resting"
    (turn,) = lock.turns
    assert turn.heir is None
    assert 490 < turn.look_in_s <= 500


def test_waiters_are_counted_and_the_first_hundred_are_seen(line):
    """Whoever looks at a held lock sees who waits, since when, in what order; who meets it, how many."""
    now = line.wait("task-000").server_time
    for number in range(120):
        line.wait(f"task-{number:03}", now - 6000 + number)
    holder = line.lock.holder_and_waiters()
    assert (holder.state, holder.waiting) == ("running", 120)
    expected = [(f"task-{number:03}", number + 1) for number in range(100)]
    assert [(waiter.task_id, waiter.place) for waiter in holder.waiters] == expected
    first = holder.waiters[0]
    assert first.since == pytest.approx(now - 6000, abs=0.01)
    assert first.age_s == pytest.approx(6000, abs=60)
    assert line.lock.holder().waiters == ()
    assert line.attempt("late").waiters == 120


@pytest.mark.parametrize("limit", [1, 2])
@pytest.mark.parametrize("is_handed", [False, True], ids=["in line", "handed"])
def test_call_with_the_task_id_of_one_that_waits_has_not_its_turn(locks, limit, is_handed):
    """Its lock came free without being handed, or is kept for the first: the second finds it held, and leaves
    the first its place.
    """
    first = replace(place("nightly"), call_id="a", shared=True)
    lock, holders = SetnxLock(locks, NAME, line=True, limit=limit), []
    for _ in range(limit):
        holders.append(lock.acquire().lock)
    park(locks, first, copy=ORIGINAL, since=1.0, call="first")
    if is_handed:
        holders[-1].release()
    else:
        locks.delete(holders[-1].key if limit == 1 else permit_names(NAME, 1)[0])

    second = lock.acquire(token=task_token("nightly", 0, "b2"), caller=Caller(call_id="b", shared=True))
    assert (second.acquired, second.holder is not None) == (False, True)
    assert second.is_due is not is_handed
    assert locks.hget(CALLS, "nightly").endswith("|first")
    woken = lock.acquire(
        token=task_token("nightly", 0, "a1"), caller=Caller(call_id="a", shared=True, copy="x1")
    )
    assert woken.acquired
    assert locks.hget(CALLS, "nightly") is None


def test_call_passes_nobody_who_waits_and_is_told_whose_turn_it_is(locks, line):
    """Another program's DEL has handed the lock to nobody: somebody is to look at its line."""
    line.wait("a")
    locks.delete(NAME)
    outcome = line.attempt("b")
    assert (outcome.acquired, outcome.is_due, outcome.remaining_s) == (False, True, 0.0)
    assert (outcome.holder.state, outcome.holder.task_id) == ("handed", "a")
    assert line.members() == ["a"]
    assert line.attempt("a", "a1").acquired


@pytest.mark.parametrize("gone", [1, 10])
def test_call_passes_those_who_have_not_asked_again(locks, line, gone):
    """Their processes have died while they asked. Behind ten of them somebody else may wait."""
    for number in range(gone):
        assert not line.attempt(f"dead-{number}", linger_s=0.001).acquired
    time.sleep(0.002)
    line.hand_on()
    for number in range(gone):  # a release has seen to the first ten
        locks.zadd(LINE, {f"dead-{number}": 1 + number})
        locks.hset(CALLS, f"dead-{number}", "@7")
    for key in (LINE, CALLS):
        locks.expire(key, 60)
    assert line.attempt("a").acquired == (gone < 10)


@pytest.mark.parametrize("key", [LINE, CALLS])
def test_foreign_line_stops_no_lock(locks, key):
    """Another program's value in the place of the line: acquire and release work, only waiting is refused."""
    locks.set(key, "theirs", ex=60)
    line = Line(locks)
    with pytest.raises(LockRefused, match="WRONGTYPE"):
        line.wait("a")
    assert key == LINE or line.members() == []  # with nothing to be woken with nobody is in line
    assert line.hand_on() is None
    assert locks.get(key) == "theirs"


@pytest.mark.parametrize(("attempt", "vain"), [(0, "2"), (1, "0")], ids=["its own", "a later attempt's"])
def test_wake_ups_in_vain_are_those_of_one_attempt(locks, attempt, vain):
    """A call's own retry begins to count anew."""
    ticket = ticket_name(NAME, "a")
    locks.set(ticket, "0||2", px=60_000)
    lock = SetnxLock(locks, NAME, lease=60, line=True)
    assert lock.acquire(
        token=task_token("a", attempt, "0a"), caller=Caller(copy="c", attempt=attempt)
    ).acquired
    assert locks.get(ticket) == f"{attempt}|c|{vain}"


def test_first_who_asks_runs_instead_of_one_that_has_died(locks):
    """All who ask are told so, for as long as it is remembered."""
    first, second = (LineEntry(NAME, task_id, 0, remember=60) for task_id in "ab")
    asked = [successor_of(locks, place, of="dead") for place in (first, second, first)]
    assert asked == ["a", "a", "a"]
    assert 0 < locks.pttl(successor_name(NAME, "dead")) <= 60_000


def test_refusal_to_say_who_runs_instead_is_an_error(locks, foreign_keys):
    """It names the key."""
    name = successor_name(NAME, "dead")
    foreign_keys.add(name)
    locks.lpush(name, "x")
    with pytest.raises(LockRefused, match=name):
        successor_of(locks, LineEntry(NAME, "a", 0, remember=60), of="dead")
