"""The line beside a lock, as its callers see it: who is next, for how long, and who may start.

What each script answers in every state, tests/model says.
"""

import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations
from typing import Any

import pytest
import redis

from celery_setnx import LockRefused, SetnxLock
from celery_setnx.lock.line import Found, Place, leave, park
from celery_setnx.lock.lock import Outcome
from celery_setnx.lock.names import line_names, permit_names, ticket_name
from celery_setnx.lock.record import ORIGINAL, Heir, task_token
from examples.embedded import EmbeddedServer
from tests.harness import age, server_us

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
        return lock.heirs.pop() if lock.heirs else None

    def wait(self, task_id: str, since: float = 10.0) -> Found:
        """A task's conflict: it enters the line."""
        return park(self.client, place(task_id), copy=ORIGINAL, since=since, call=f"wake {task_id}")

    def visit(self, task_id: str, since: float = 10.0) -> Found:
        """A courier's visit."""
        return park(self.client, place(task_id), since=since, call=f"wake {task_id}")

    def attempt(self, task_id: str, copy: str = ORIGINAL, **details: Any) -> Outcome:
        """A task's attempt to acquire the lock."""
        return self.another().acquire(token=task_token(task_id, 0, "0a"), copy=copy, **details)

    def members(self) -> list[str]:
        """Who waits, the first in line first."""
        return [str(member) for member in self.client.zrange(LINE, 0, -1)]


def place(task_id: str, remember: float = 6000.0, attempt: int = 0) -> Place:
    return Place(NAME, task_id, attempt, remember)


@pytest.fixture
def line(locks) -> Line:
    """A lock that is held, and nobody waits."""
    return Line(locks)


@pytest.fixture
def handed(line) -> Line:
    """A lock that was released while `a` waited: it is kept for it."""
    line.wait("a")
    line.hand_on()
    return line


@pytest.fixture
def pair(line) -> Line:
    """Two wait for the lock: `a` longer than `b`."""
    line.wait("a", 10.0)
    line.wait("b", 20.0)
    return line


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
        outcome = held.acquire(token=task_token(task_id, 0, "0a"), copy=f"{task_id}1")
        assert (outcome.acquired, outcome.taken_over_from) == (True, None)
        assert line.hand_on(held) == heir
    assert not locks.exists(NAME, LINE, CALLS)
    assert line.lock.holder_and_waiters() is None  # nobody has it, nobody waits


def test_place_is_kept_by_asking_again(line):
    """A courier's visit changes nobody's place, and names the holder."""
    assert line.wait("a", 10.0).state == "new"
    line.wait("b", 20.0)
    found = line.visit("b", 20.0)
    assert (found.state, found.place, found.holder and found.holder.state) == ("parked", 2, "running")
    assert found.server_time <= server_us(line.client) / 1e6
    assert found.server_time == pytest.approx(time.time(), abs=60)
    assert line.members() == ["a", "b"]


def test_handed_lock_refuses_all_but_its_heir_and_names_it(locks, handed):
    """Nobody overtakes: another task, a lock without a line, and a program of the recipe find it held."""
    holder = handed.attempt("b").holder
    assert (holder.state, holder.task_id, holder.as_dict()["task_id"]) == ("handed", "a", "a")
    assert "task a, the first in line, which was woken at" in str(holder)
    assert not SetnxLock(locks, NAME).acquire().acquired
    assert not locks.setnx(NAME, int(time.time()) + 60)
    assert int(str(locks.get(NAME))) >= locks.time()[0]
    assert handed.attempt("a", "a1").acquired


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


def test_resting_lock_keeps_its_line(locks, line):
    """The first is named, and the time until its turn; after the rest whoever serves the line hands it on."""
    line.wait("a")
    held = line.lock.acquire(token=line.lock.token).lock
    assert held.release(at_least_for=50) == "resting"
    (heir,) = line.lock.heirs
    assert (heir.task_id, heir.call) == ("a", "wake a")
    assert 20 < heir.rest_s <= 50
    assert line.members() == ["a"]
    assert not line.attempt("a", "a1").acquired
    age(locks, NAME, 50)
    assert line.another().serve().heir == A


def test_only_one_message_of_a_call_starts_it(locks, handed):
    """The first copy that has the lock; it may be delivered again, any other is stale and changes nothing."""
    handed.attempt("a", "a1").lock.release()
    late = handed.attempt("a", "a2")
    assert (late.stale, late.acquired, late.holder, locks.exists(NAME)) == (True, False, None, 0)
    assert handed.attempt("a", "a1").acquired


def test_dead_holders_lock_goes_to_the_first_in_line_and_not_to_a_newcomer(locks, pair):
    """Whoever finds it serves the line, is refused, and is told whom to wake and who has died."""
    age(locks, NAME, 600)
    newcomer = pair.another()
    outcome = newcomer.acquire(token=task_token("new", 0, "0a"))
    assert (outcome.acquired, outcome.holder.state, outcome.holder.task_id) == (False, "handed", "a")
    (heir,) = newcomer.heirs
    assert (heir.task_id, heir.call, heir.taken_over_from.token) == ("a", "wake a", pair.lock.token)
    assert pair.attempt("a", "a1").acquired


def test_holder_that_is_proved_dead_is_served_at_once(pair):
    """Before its deadline; a proof of another's death changes nothing."""
    served = pair.another().serve(dead="another")
    assert (served.heir, served.holder.state, served.waits) == (None, "running", True)
    assert 590 < served.look_in <= 600
    assert pair.another().serve(dead=pair.lock.token).heir.task_id == "a"


def test_call_that_does_not_come_is_passed_over_for_a_lease_then_for_two(locks, handed):
    """Then the lock is handed to it again; that nobody else waits is said, and when to look."""
    for away in (600, 1200):
        age(locks, NAME, 10)
        served = handed.another().serve()
        assert (served.heir, served.holder) == (None, None)
        assert served.look_in == pytest.approx(away, abs=1)
        age(locks, NAME, away - 1)
        assert handed.another().serve().heir is None
        age(locks, NAME, 1)
        assert handed.another().serve().heir == A


def test_call_that_was_passed_over_stands_where_it_stood(locks, handed):
    """Before those who came later; meanwhile it is not among those who wait, and others have the lock."""
    age(locks, NAME, 10)
    assert handed.another().serve().heir is None
    held = SetnxLock(locks, NAME, line=True, lease=5000)
    assert held.acquire().acquired
    handed.wait("b", 20.0)
    assert [waiter.task_id for waiter in held.holder_and_waiters().waiters] == ["b"]
    age(locks, NAME, 600)
    assert handed.another().serve().holder.state == "running"
    assert handed.members() == ["a", "b"]
    assert handed.hand_on(held) == A


def test_call_that_comes_late_comes_before_the_one_to_which_the_lock_was_handed(locks, pair):
    """That one has its place again, and its wake-up, which is on its way, is its next one too."""
    pair.hand_on()
    age(locks, NAME, 10)
    assert pair.another().serve().heir == B
    late = pair.another()
    assert late.acquire(token=task_token("a", 0, "0a"), copy="a1").acquired
    assert pair.members() == ["b"]
    assert pair.hand_on(late) is None  # nobody is to be woken
    assert pair.lock.holder().task_id == "b"
    assert pair.attempt("b", "b1").acquired


def test_waiters_are_seen_with_place_and_age(line):
    """Whoever looks at a held lock sees who waits for it, since when, and in what order."""
    now = line.visit("a").server_time
    line.wait("b", now - 500)
    line.wait("a", now - 6000)
    holder = line.lock.holder_and_waiters()
    assert (holder.state, holder.waiting) == ("running", 2)
    assert [(waiter.task_id, waiter.place) for waiter in holder.waiters] == [("a", 1), ("b", 2)]
    first = holder.waiters[0]
    assert first.since == pytest.approx(now - 6000, abs=0.01)
    assert first.age_s == pytest.approx(6000, abs=60)
    assert line.lock.holder().waiters == ()


def test_waiters_of_a_long_line_are_counted(line):
    """All are counted, and the first hundred are named; who meets the lock is told how many."""
    for number in range(120):
        line.wait(f"task-{number:03}", 1000.0 + number)
    holder = line.lock.holder_and_waiters()
    assert holder.waiting == 120
    assert [waiter.task_id for waiter in holder.waiters] == [f"task-{number:03}" for number in range(100)]
    assert line.attempt("late").waiters == 120


def test_line_lives_as_long_as_the_longest_waiter(locks, line):
    """Every key of it expires; one who is remembered for longer keeps it, another does not shorten it."""
    park(locks, place("a", remember=600), copy=ORIGINAL, since=1.0, call="wake a")
    park(locks, place("b", remember=5), copy=ORIGINAL, since=2.0, call="wake b")
    assert min(locks.pttl(LINE), locks.pttl(CALLS), locks.pttl(ticket_name(NAME, "a"))) > 500_000
    assert 0 < locks.pttl(ticket_name(NAME, "b")) <= 5_000


def test_calls_with_one_task_id_leave_each_other_their_place(locks, line):
    """The place is taken, the second and its courier are told; it leaves, and the first has its turn."""
    first, second = (replace(place("nightly"), call_id=call_id, shared=True) for call_id in ("a", "b"))
    assert park(locks, first, copy=ORIGINAL, since=1.0, call="first").state == "new"
    for copy in (ORIGINAL, ""):
        assert park(locks, second, copy=copy, since=2.0, call="second").state == "taken"
    for _ in range(2):  # sent again, as the reply was lost
        assert leave(locks, second, copy=ORIGINAL) == "left"
    assert park(locks, second, since=2.0, call="second").state == "stale"
    retry = replace(second, attempt=1)
    assert park(locks, retry, copy=ORIGINAL, since=2.0, call="second").state == "taken"
    assert line.hand_on() == Heir("nightly", "first")
    assert leave(locks, replace(second, call_id="c"), copy=ORIGINAL) == "left"  # it is not kept for that one


def test_courier_of_a_later_attempt_puts_that_one_in_line(locks, line):
    """In the place of the attempt before it, which no message may start any more."""
    park(locks, place("nightly"), copy=ORIGINAL, since=1.0, call="first")
    assert park(locks, replace(place("nightly"), attempt=1), since=1.0, call="retry").state == "parked"
    assert line.hand_on() == Heir("nightly", "retry")


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
    lock.heirs.clear()

    second = lock.acquire(token=task_token("nightly", 0, "b2"), call_id="b", shared=True)
    assert (second.acquired, second.holder is not None) == (False, True)
    assert lock.heirs == [Heir("nightly", "first")] * (not is_handed)
    assert locks.hget(CALLS, "nightly").endswith("|first")
    woken = lock.acquire(token=task_token("nightly", 0, "a1"), call_id="a", shared=True, copy="x1")
    assert woken.acquired
    assert locks.hget(CALLS, "nightly") is None


def test_lock_is_kept_for_a_lingering_task_no_longer_than_it_lingers(line):
    """It may have died meanwhile: the next one need not wait out a hand-over, only 50 ms more."""
    asked = line.attempt("a", linger=60.0, since=10.0)
    line.hand_on()
    outcome = line.attempt("b")
    assert outcome.server_time + outcome.remaining_s == pytest.approx(asked.server_time + 60.05, abs=0.001)


def test_lingering_task_that_parks_late_has_its_turn(locks, line):
    """The lock was kept for it until it would ask again. Nobody has woken it: it was not handed in vain."""
    line.attempt("a", linger=5.0, since=10.0)
    line.hand_on()
    age(locks, NAME, 10.0)
    assert line.wait("a").state == "handed"
    assert line.attempt("a", remember=60.0).acquired


class Retry:
    """A call whose retry asks for the lock while what its first attempt has left behind is being seen to."""

    def __init__(self, line: Line) -> None:
        self.line = line
        self.has_lock = self.is_woken = False

    def holder_ends(self) -> Iterator[None]:
        """Somebody else, who has the lock."""
        self.is_woken |= self.line.hand_on() == A
        yield

    def first_attempt_leaves(self) -> Iterator[None]:
        """As its worker's parent sees to, once it has heard how the attempt ended."""
        word = leave(self.line.client, place("a"), copy="a1")
        yield
        if word == "handed":
            self.is_woken |= self.line.another().serve(away="a").heir == A
        yield

    def retry_asks(self) -> Iterator[None]:
        """It lingers, parks, and asks again if it is told that it has its turn."""
        self.acquires(linger=60.0, since=10.0)
        yield
        has_turn = not self.has_lock and self.parks()
        yield
        if has_turn:
            self.acquires(remember=60.0)
            if not self.has_lock:
                self.parks()
        yield

    def acquires(self, **details: Any) -> None:
        token = task_token("a", 1, "0b")
        self.has_lock = self.line.another().acquire(token=token, attempt=1, copy=ORIGINAL, **details).acquired

    def parks(self) -> bool:
        details = {"copy": ORIGINAL, "since": 10.0, "call": A.call}
        found = park(self.line.client, place("a", attempt=1), **details)
        return found.state == "handed" or (found.holder is None and found.place == 1)


@pytest.mark.parametrize("others", [(), ("b",)], ids=["alone", "before another"])
@pytest.mark.parametrize("has_begun", [True, False], ids=["begun", "in line"])
def test_retry_does_not_lose_its_turn_as_its_first_attempt_leaves(locks, has_begun, others):
    """It has the lock, or is woken, or stands where it stood: in every order of what the three do."""
    steps = ("holder_ends", *["first_attempt_leaves"] * 2, *["retry_asks"] * 3)
    for order in sorted(set(permutations(steps))):
        locks.flushdb()
        retry = Retry(Line(locks))
        if has_begun:
            locks.set(ticket_name(NAME, "a"), "0|a1|0", px=60_000)
        else:  # it was woken late, and has raised Retry before its body
            park(locks, place("a"), copy=ORIGINAL, since=5.0, call="wake its first attempt")
        for other in others:
            retry.line.wait(other, 20.0)
        actors = {name: getattr(retry, name)() for name in set(steps)}
        for name in order:
            next(actors[name])
        stands = locks.zscore(LINE, "a") == 10e6
        assert retry.has_lock or retry.is_woken or stands, order


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


def test_line_goes_on_when_memory_is_full():
    """Who waits already is served, and may leave: that needs no more memory than a release."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url(), decode_responses=True) as client:
        line = Line(client)
        for task_id, since in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
            line.wait(task_id, since)
        client.config_set("maxmemory", "1")
        assert line.hand_on() == A
        assert line.visit("b", 20.0).state == "parked"
        sooner = Place(NAME, "b", 0, 30.0)  # than what is there ends
        assert park(client, sooner, copy="b2", since=20.0, call="wake b").state == "parked"
        assert leave(client, place("c"), copy="c1") == "left"
        assert line.members() == ["b"]
        assert all(client.pttl(key) > 0 for key in client.scan_iter())


@pytest.mark.parametrize(("attempt", "vain"), [(0, "2"), (1, "0")], ids=["its own", "a later attempt's"])
def test_wake_ups_in_vain_are_those_of_one_attempt(locks, attempt, vain):
    """A call's own retry begins to count anew."""
    ticket = ticket_name(NAME, "a")
    locks.set(ticket, "0||2", px=60_000)
    lock = SetnxLock(locks, NAME, lease=60, line=True)
    assert lock.acquire(token=task_token("a", attempt, "0a"), copy="c", attempt=attempt).acquired
    assert locks.get(ticket) == f"{attempt}|c|{vain}"
