"""The line beside a lock, as Redis keeps it: who is next, who may start, and what stays behind."""

import time
from typing import Any

import pytest
import redis

from celery_setnx import LockRefused, SetnxLock
from celery_setnx.keys import line_names, record_name, ticket_name
from celery_setnx.line import Found, Place, leave, park
from celery_setnx.lock import ORIGINAL, Heir, HeldLock, Outcome, task_token
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
        return lock.heir

    def wait(self, task_id: str, since: float = 10.0, *, retries: int = 0, copy: str = ORIGINAL) -> Found:
        """A task's conflict: it enters the line."""
        return park(self.client, place(task_id, retries), copy=copy, since=since, call=f"wake {task_id}")

    def visit(self, task_id: str, since: float = 10.0, *, watch: float = 0.0) -> Found:
        """A courier's visit."""
        return park(self.client, place(task_id), since=since, call=f"wake {task_id}", watch=watch)

    def attempt(self, task_id: str, copy: str = ORIGINAL, *, retries: int = 0, **details: Any) -> Outcome:
        """A task's attempt to acquire the lock."""
        details = {"attempt": retries, **details}
        return self.another().acquire(token=task_token(task_id, retries, "0a"), copy=copy, **details)

    def start(self, task_id: str, copy: str = ORIGINAL, **details: Any) -> HeldLock:
        """An attempt that has the lock."""
        held = self.attempt(task_id, copy, **details).lock
        assert held is not None
        return held

    def run(self, task_id: str, copy: str = ORIGINAL, **details: Any) -> None:
        """A call that starts, and ends."""
        self.start(task_id, copy, **details).release()

    def leave(self, task_id: str, retries: int = 0) -> str:
        return leave(self.client, place(task_id, retries), copy="a1")

    def members(self) -> list[str]:
        """Who waits, the first in line first."""
        return [str(member) for member in self.client.zrange(LINE, 0, -1)]

    def record(self) -> Any:
        return self.client.get(record_name(NAME))


def place(task_id: str, retries: int = 0, remember: float = 60.0) -> Place:
    return Place(NAME, task_id, retries, remember)


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
def ended(handed) -> Line:
    """A call that has waited, and was started by its copy `a1`, has ended."""
    handed.run("a", "a1")
    return handed


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


def test_place_is_found_again_after_redis_has_lost_it(locks, pair):
    """The courier brings the call and its waiting time along."""
    locks.flushdb()
    again = pair.hold()
    assert (pair.visit("b", 20.0).state, pair.visit("a", 10.0).state) == ("new", "new")
    assert pair.hand_on(again) == A


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


def test_heir_that_does_not_come_is_put_back_by_its_courier(locks, pair):
    """While the lock is kept for it, it has been woken; afterwards it waits again, in its old place."""
    pair.hand_on()
    found = pair.visit("a", 10.0)
    assert (found.state, found.place) == ("handed", 0)
    assert pair.members() == ["b"]
    age(locks, NAME, 10)
    found = pair.visit("a", 10.0)
    assert (found.state, found.place, found.holder) == ("parked", 1, None)


def test_resent_release_answers_as_the_first(pair):
    """A reply that was lost loses no wake-up: the heir is named again, and a release is a release."""
    assert pair.hand_on() == A
    pair.lock.heir = None
    assert pair.hand_on() == A
    assert pair.members() == ["b"]


def test_release_of_a_vanished_lock_hands_it_on(locks, line):
    """The holder is told that it was gone; who waits is served all the same."""
    line.wait("a")
    locks.delete(NAME)
    assert line.lock.release() == "gone"
    assert line.lock.heir == A
    assert not line.attempt("b").acquired


def test_lock_of_a_dead_holder_is_handed_on(line):
    """Freed on behalf of the dead, it goes to the first in line."""
    line.wait("a")
    parent = line.another()
    assert parent.free_dead(str(line.lock.token)) == "freed"
    assert parent.heir == A


def test_release_by_who_knows_no_line_leaves_it(locks, line):
    """The lock is anybody's then; whoever has it next hands it to the first in line."""
    line.wait("a")
    plain = SetnxLock(locks, NAME)
    assert plain._release(str(line.lock.token))[0] == "released"
    assert (plain.heir, line.members()) == (None, ["a"])
    after = line.another()
    assert after.acquire().waiters == 1
    assert line.hand_on(after) == A


def test_lock_that_vanished_when_handed_is_free_to_who_knows_no_line(locks, handed):
    """Its record names the heir still; who comes without the line's keys has the lock, and no error."""
    locks.delete(NAME)
    plain = SetnxLock(locks, NAME)
    assert (plain._release(str(handed.lock.token))[0], plain.heir) == ("released", None)
    assert plain.acquire(token=task_token("a", 0, "cd")).acquired
    locks.delete(NAME)
    assert plain.acquire().acquired


def test_waiter_that_finds_the_lock_free_waits_no_more(locks, line):
    """It has the lock, and no release hands it over once more."""
    line.wait("a")
    locks.delete(NAME)
    line.start("a", "a1")
    assert line.members() == []
    assert not locks.hexists(CALLS, "a")


def test_resting_lock_keeps_its_line(locks, line):
    """The first is named, and the time until its turn; after the rest who sees to the lock hands it on."""
    line.wait("a")
    held = line.lock.acquire(token=line.lock.token).lock
    assert held.release(at_least_for=50) == "resting"
    heir = line.lock.heir
    assert (heir.task_id, heir.call) == ("a", "wake a")
    assert 20 < heir.rest_s <= 50
    assert line.members() == ["a"]
    assert not line.attempt("a", "a1").acquired
    age(locks, NAME, 50)
    nudge = line.another()
    outcome = nudge.acquire()
    assert (outcome.acquired, outcome.taken_over_from) == (True, None)
    assert line.hand_on(nudge) == A


def test_only_one_message_of_a_call_starts_it(locks, handed):
    """The first copy that has the lock; it may be delivered again, any other is stale and changes nothing."""
    held = handed.start("a", "a1")
    assert handed.attempt("a", "a2").stale
    held.release()
    before = handed.record()
    late = handed.attempt("a", "a2")
    assert (late.stale, late.acquired, late.holder) == (True, False, None)
    assert handed.attempt("a").stale
    assert (locks.exists(NAME), handed.record()) == (0, before)
    assert handed.attempt("a", "a1").acquired


@pytest.mark.parametrize(("remember", "stale"), [(0, False), (60, True)])
def test_start_is_remembered_where_another_message_may_come(locks, line, remember, stale):
    """A second delivery that acquires at once leaves its ticket as one that has waited; else none is left."""
    line.hand_on()
    assert line.lock.holder_and_waiters() is None  # nor has anybody waited
    line.run("a", remember=remember)
    again = line.attempt("a", "a1")
    assert (again.stale, again.acquired) == (stale, not stale)
    assert bool(locks.exists(ticket_name(NAME, "a"))) == stale


def test_own_retry_passes_the_ticket_of_the_attempt_before(ended):
    """What has started is one attempt; the next one starts, or waits, and the old one is stale then."""
    held = ended.start("a", retries=1)
    assert ended.wait("a", retries=1, copy="b1").state == "stale"
    held.release()
    assert ended.attempt("a", "a1").stale
    assert ended.wait("a", copy="a1").state == "stale"


def test_successor_passes_the_ticket_of_the_call_that_it_replaces(ended):
    """replace() keeps the task's id and its retries: that it is another attempt is said beside them."""
    assert ended.attempt("a").stale
    ended.run("a", attempt=1_000_000)
    assert ended.attempt("a", "a1").stale


@pytest.mark.parametrize(("retries", "copy"), [(1, "b1"), (0, "a1")])
def test_ticket_of_a_started_call_keeps_it_not_from_the_line(ended, retries, copy):
    """The next attempt waits in a place of its own; the started copy may be delivered again after a crash."""
    other = ended.hold()
    found = ended.wait("a", retries=retries, copy=ORIGINAL if retries else copy)
    assert (found.state, found.place) == ("parked", 1)
    assert ended.hand_on(other) == A
    assert ended.attempt("a", copy, retries=retries).acquired


def test_what_comes_late_for_a_started_call_changes_nothing(locks, handed):
    """Its late message and its courier do not let it wait; a release that is sent again is a stranger's."""
    handed.start("a", "a1")
    record = handed.record()
    assert handed.wait("a", copy="a2").state == handed.visit("a").state == "stale"
    assert (handed.lock.release(), handed.lock.heir) == ("lost", None)
    assert (handed.record(), handed.members()) == (record, [])
    # It outlives every other message of the call, and no more.
    assert locks.get(ticket_name(NAME, "a")) == "0|a1"
    assert 0 < locks.pttl(ticket_name(NAME, "a")) <= 60_000


def test_task_that_leaves_is_passed_over(pair):
    """The next in line is served, and no other message of the one that left starts it."""
    assert pair.leave("a") == "left"
    assert pair.hand_on() == B
    assert pair.attempt("a", "a2").stale
    assert pair.visit("a").state == "stale"


def test_task_that_leaves_when_it_has_been_woken_says_so(pair):
    """The lock is kept for it: it must be passed on, which the copy that leaves can do."""
    pair.hand_on()
    assert pair.leave("a") == "handed"
    passing = pair.another()
    assert passing.acquire(token=task_token("a", 0, "0b"), copy="a1").acquired
    assert pair.hand_on(passing) == B


def test_task_does_not_leave_what_another_message_has_started(handed):
    """Nothing is changed: the started copy may be delivered again."""
    handed.run("a", "a2")
    assert handed.leave("a") == "stale"
    assert handed.attempt("a", "a2").acquired


def test_earlier_attempt_cannot_leave_for_a_later_one(line):
    """A late message of the attempt before does not cost the retry its place."""
    line.wait("a", retries=1)
    assert line.leave("a", retries=0) == "stale"
    assert line.members() == ["a"]


def test_task_may_leave_before_it_has_waited(locks, line):
    """Its messages are stale from then on."""
    assert (line.leave("a"), line.attempt("a").stale) == ("left", True)
    assert 0 < locks.pttl(ticket_name(NAME, "a")) <= 60_000


def test_one_courier_watches_the_lock(locks, line):
    """The first that asks, as long as it comes back in time; one that died is replaced by the next."""
    assert not line.visit("a").watches
    assert line.visit("a", watch=60).watches
    assert not line.visit("b", 20.0, watch=60).watches
    assert line.visit("a", watch=60).watches
    age(locks, NAME, 60)
    assert line.visit("b", 20.0, watch=60).watches
    assert not line.visit("a", watch=60).watches


def test_courier_of_a_started_call_watches_on_while_others_wait(pair):
    """The last one lays the watch down: there is nobody to watch for."""
    assert pair.visit("a", watch=60).watches
    pair.hand_on()
    held = pair.start("a", "a1")
    found = pair.visit("a", watch=60)
    assert (found.state, found.watches) == ("stale", True)
    held.release()
    pair.start("b", "b1")
    found = pair.visit("a", watch=60)
    assert (found.state, found.watches) == ("stale", False)


def test_heir_whose_call_is_lost_is_named_and_watched_all_the_same(locks, pair):
    """The lock is kept for it, and its courier wakes it; the watch is noted with a time to live."""
    locks.delete(CALLS)
    assert pair.hand_on() == Heir("a", None)
    assert (pair.visit("a", watch=60).watches, locks.hlen(CALLS)) == (True, 1)
    assert 0 < locks.pttl(CALLS) <= 60_000
    assert pair.attempt("a", "a1").acquired


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


def test_lingering_task_is_handed_the_lock_without_a_wake(locks, line):
    """It asks again by itself: nobody need be woken, and nobody comes before it."""
    assert line.attempt("a", linger=600, since=10.0).waiters == 0
    assert line.attempt("b").waiters == 1
    assert line.hand_on() is None
    assert not line.attempt("b").acquired
    assert line.attempt("a", linger=600, since=10.0).acquired
    assert not locks.exists(LINE, CALLS)


def test_lock_is_kept_for_a_lingering_task_no_longer_than_it_lingers(line):
    """It may have died meanwhile: the next one need not wait out a hand-over, only 50 ms more."""
    asked = line.attempt("a", linger=60.0, since=10.0)
    line.hand_on()
    outcome = line.attempt("b")
    assert outcome.server_time + outcome.remaining_s == pytest.approx(asked.server_time + 60.05, abs=0.001)


def test_task_that_lingers_no_more_is_passed_over(locks, line):
    """One that died while it lingered does not hold up who waits behind it."""
    line.attempt("a", linger=60, since=10.0)
    age(locks, NAME, 61)
    line.wait("b", 20.0)
    assert line.hand_on() == B
    assert line.members() == []
    assert locks.hkeys(CALLS) == ["b"]


def test_task_that_lingered_parks_in_its_place(line):
    """It gives up asking, and is woken when its turn has come."""
    line.attempt("a", linger=600, since=10.0)
    line.wait("b", 20.0)
    assert line.wait("a", 10.0).place == 1
    assert line.hand_on() == A


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
        assert line.leave("c") == "left"
        assert line.members() == ["b"]
        assert all(client.pttl(key) > 0 for key in client.scan_iter())


def test_woken_call_takes_a_lock_that_is_kept_for_another(locks, pair):
    """Its wake-up came after its turn was over: it runs now, before the other, and the other next."""
    assert pair.hand_on() == A
    age(locks, NAME, 10)
    assert pair.hand_on(pair.hold()) == B  # by a courier; the wake-up of `a` is on its way still
    late = pair.another()
    outcome = late.acquire(token=task_token("a", 0, "0a"), copy="woken", remember=60)
    assert outcome.acquired, outcome.holder
    assert pair.hand_on(late) == B
