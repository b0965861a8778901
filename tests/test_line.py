"""The line beside a lock, as Redis keeps it: who is next, who may start, and what stays behind."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import Celery

from celery_setnx import LockRefused, SetnxLock, SingletonTask
from celery_setnx.keys import line_names, record_name, ticket_name
from celery_setnx.line import Found, Place, leave, park
from celery_setnx.lock import ORIGINAL, Heir, HeldLock, Outcome, Waiter, task_token
from examples.embedded import EmbeddedServer
from tests.harness import wait_until

NAME = "t:{line}"
LINE, CALLS = line_names(NAME)


def place(task_id: str, retries: int = 0, remember: float = 60.0) -> Place:
    return Place(NAME, task_id, retries, remember)


def wait(
    client: redis.Redis, task_id: str, since: float = 10.0, *, retries: int = 0, copy: str = ORIGINAL
) -> Found:
    """A task's conflict: it enters the line."""
    return park(client, place(task_id, retries), copy=copy, since=since, call=f"wake {task_id}")


def visit(client: redis.Redis, task_id: str, since: float = 10.0, *, watch: float = 0.0) -> Found:
    """A courier's visit."""
    return park(client, place(task_id), since=since, call=f"wake {task_id}", watch=watch)


def lock_on(client: redis.Redis, **options: Any) -> SetnxLock:
    return SetnxLock(client, NAME, line=True, **options)


def attempt(
    client: redis.Redis, task_id: str, *, retries: int = 0, copy: str = ORIGINAL, **details: Any
) -> Outcome:
    """A task's attempt to acquire the lock."""
    details = {"attempt": retries, **details}
    return lock_on(client).acquire(token=task_token(task_id, retries, "0a"), copy=copy, **details)


def held_by(outcome: Outcome) -> HeldLock:
    """The lock that was acquired."""
    assert outcome.lock is not None
    return outcome.lock


@pytest.fixture
def lock(locks) -> SetnxLock:
    """A lock with a line, held by somebody."""
    lock = lock_on(locks)
    assert lock.acquire().acquired
    return lock


def members(client: redis.Redis) -> list[str]:
    """Who waits, the first in line first."""
    return [str(member) for member in client.zrange(LINE, 0, -1)]


def test_line_is_in_order_of_waiting_time(locks, lock):
    """First come, first served: by the first conflict, whoever has asked Redis first."""
    assert wait(locks, "b", 20.0).place == 1
    assert wait(locks, "a", 10.0).place == 1
    assert wait(locks, "c", 30.0).place == 3
    assert members(locks) == ["a", "b", "c"]


def test_line_is_served_to_its_end(locks, lock):
    """Every release hands the lock to the first in line, with what wakes it; the last one frees the lock."""
    for task_id, since in (("b", 20.0), ("a", 10.0), ("c", 30.0)):
        wait(locks, task_id, since)
    assert lock.release() == "released"
    assert lock.heir == Heir("a", "wake a")
    for task_id, heir in (("a", Heir("b", "wake b")), ("b", Heir("c", "wake c")), ("c", None)):
        held = lock_on(locks)
        outcome = held.acquire(token=task_token(task_id, 0, "0a"), copy=f"{task_id}1")
        assert outcome.acquired
        assert outcome.taken_over_from is None
        held.release()
        assert held.heir == heir
    assert not locks.exists(NAME, LINE, CALLS)


def test_place_is_kept_by_asking_again(locks, lock):
    """A courier's visit changes nobody's place, and names the holder."""
    assert wait(locks, "a", 10.0).state == "new"
    wait(locks, "b", 20.0)
    found = visit(locks, "b", 20.0)
    assert (found.state, found.place) == ("parked", 2)
    assert found.holder is not None
    assert found.holder.state == "running"
    assert found.server_time == pytest.approx(time.time(), abs=5)
    assert members(locks) == ["a", "b"]


def test_place_is_found_again_after_redis_has_lost_it(locks, lock):
    """The courier brings the call and its waiting time along."""
    for task_id, since in (("a", 10.0), ("b", 20.0)):
        wait(locks, task_id, since)
    locks.flushdb()
    again = lock_on(locks)
    again.acquire()
    assert (visit(locks, "b", 20.0).state, visit(locks, "a", 10.0).state) == ("new", "new")
    again.release()
    assert again.heir == Heir("a", "wake a")


def test_handed_lock_refuses_all_but_its_heir(locks, lock):
    """Nobody overtakes: another task, a lock without a line, and a program of the recipe find it held."""
    wait(locks, "a")
    lock.release()
    assert not attempt(locks, "b").acquired
    assert not SetnxLock(locks, NAME).acquire().acquired
    assert not locks.setnx(NAME, int(time.time()) + 60)
    assert int(str(locks.get(NAME))) >= int(time.time())
    assert attempt(locks, "a", copy="a1").acquired


def test_handed_lock_says_for_whom_it_is_kept(locks, lock):
    """Its holder is the one that was woken."""
    wait(locks, "a")
    lock.release()
    holder = attempt(locks, "b").holder
    assert holder is not None
    assert (holder.state, holder.task_id, holder.as_dict()["task_id"]) == ("handed", "a", "a")
    assert "task a, the first in line, which was woken at" in str(holder)


def test_handed_lock_is_free_when_its_heir_does_not_come(locks):
    """It is kept for a lease at most; its end is no crash, and nobody is reported dead."""
    lock = lock_on(locks, lease=1)
    lock.acquire()
    wait(locks, "a")
    lock.release()
    assert not attempt(locks, "b").acquired
    outcome = attempt(locks, "b", wait=5)
    assert outcome.acquired
    assert outcome.taken_over_from is None


def test_heir_that_does_not_come_is_put_back_by_its_courier(locks):
    """While the lock is kept for it, it has been woken; afterwards it waits again, in its old place."""
    lock = lock_on(locks, lease=1)
    lock.acquire()
    wait(locks, "a", 10.0)
    wait(locks, "b", 20.0)
    lock.release()
    found = visit(locks, "a", 10.0)
    assert (found.state, found.place) == ("handed", 0)
    assert members(locks) == ["b"]
    wait_until(lambda: visit(locks, "a", 10.0).state == "parked", "the time is over")
    found = visit(locks, "a", 10.0)
    assert (found.state, found.place, found.holder) == ("parked", 1, None)


def test_hand_over_takes_ten_seconds_at_most(locks):
    """However long the lease: a wake-up is on its way already."""
    lock = lock_on(locks, lease=600)
    lock.acquire()
    wait(locks, "a")
    lock.release()
    outcome = attempt(locks, "b")
    assert outcome.remaining_s is not None
    assert 5 < outcome.remaining_s <= 10


def test_resent_release_names_the_heir_again(locks, lock):
    """A reply that was lost loses no wake-up."""
    wait(locks, "a")
    wait(locks, "b", 20.0)
    lock.release()
    lock.heir = None
    lock.release()
    assert lock.heir == Heir("a", "wake a")
    assert members(locks) == ["b"]


def test_resent_release_answers_as_the_first(locks, lock):
    """Whether or not somebody waits, a release is a release."""
    wait(locks, "a")
    assert [lock.release(), lock.release()] == ["released", "released"]


def test_release_after_the_heir_has_come_changes_nothing(locks, lock):
    """A release that is sent once more, late, is that of a stranger."""
    wait(locks, "a")
    lock.release()
    attempt(locks, "a", copy="a1")
    record = locks.get(record_name(NAME))
    assert lock.release() == "lost"
    assert lock.heir is None
    assert locks.get(record_name(NAME)) == record


def test_release_of_a_vanished_lock_hands_it_on(locks, lock):
    """The holder is told that it was gone; who waits is served all the same."""
    wait(locks, "a")
    locks.delete(NAME)
    assert lock.release() == "gone"
    assert lock.heir == Heir("a", "wake a")
    assert not attempt(locks, "b").acquired


def test_lock_of_a_dead_holder_is_handed_on(locks, lock):
    """Freed on behalf of the dead, it goes to the first in line."""
    wait(locks, "a")
    parent = lock_on(locks)
    assert lock.token is not None
    assert parent.free_dead(lock.token) == "freed"
    assert parent.heir == Heir("a", "wake a")


def test_release_by_who_knows_no_line_leaves_it(locks, lock):
    """The lock is anybody's then; whoever has it next hands it to the first in line."""
    wait(locks, "a")
    assert lock.token is not None
    plain = SetnxLock(locks, NAME)
    assert plain._release(lock.token)[0] == "released"
    assert (plain.heir, members(locks)) == (None, ["a"])
    after = lock_on(locks)
    assert after.acquire().waiters == 1
    after.release()
    assert after.heir == Heir("a", "wake a")


def test_lock_that_vanished_when_handed_is_free_to_who_knows_no_line(locks, lock):
    """Its record names the heir still; who comes without the line's keys has the lock, and no error."""
    wait(locks, "a")
    lock.release()
    locks.delete(NAME)
    plain = SetnxLock(locks, NAME)
    assert (plain._release(str(lock.token))[0], plain.heir) == ("released", None)
    assert plain.acquire(token=task_token("a", 0, "cd")).acquired
    locks.delete(NAME)
    assert plain.acquire().acquired


def test_waiter_that_finds_the_lock_free_waits_no_more(locks, lock):
    """It has the lock, and no release hands it over once more."""
    wait(locks, "a")
    locks.delete(NAME)
    outcome = attempt(locks, "a", copy="a1")
    assert outcome.acquired
    assert members(locks) == []
    assert not locks.hexists(CALLS, "a")


def test_resting_lock_keeps_its_line(locks, lock):
    """With at_least_for the first is named, and the time until its turn; it stays in line, and outside."""
    wait(locks, "a")
    assert held_by(lock.acquire(token=lock.token)).release(at_least_for=30) == "resting"
    assert lock.heir is not None
    assert (lock.heir.task_id, lock.heir.call) == ("a", "wake a")
    assert 20 < lock.heir.rest_s <= 30
    assert members(locks) == ["a"]
    assert not attempt(locks, "a", copy="a1").acquired


def test_line_goes_on_after_the_rest(locks, lock):
    """Whoever sees to the lock then hands it to the first; nobody is reported dead."""
    wait(locks, "a")
    held_by(lock.acquire(token=lock.token)).release(at_least_for=1)
    nudge = lock_on(locks)
    outcome = nudge.acquire(wait=5)
    assert outcome.acquired
    assert outcome.taken_over_from is None
    nudge.release()
    assert nudge.heir == Heir("a", "wake a")


def test_only_one_message_of_a_call_starts_it(locks, lock):
    """The first copy that has the lock; it may be delivered again, any other is stale and changes nothing."""
    wait(locks, "a")
    lock.release()
    held = held_by(attempt(locks, "a", copy="a1"))
    assert attempt(locks, "a", copy="a2").stale
    held.release()
    before = locks.get(record_name(NAME))
    late = attempt(locks, "a", copy="a2")
    assert (late.stale, late.acquired, late.holder) == (True, False, None)
    assert attempt(locks, "a", copy=ORIGINAL).stale
    assert (locks.exists(NAME), locks.get(record_name(NAME))) == (0, before)
    assert attempt(locks, "a", copy="a1").acquired


def test_call_that_has_not_waited_is_never_stale(locks):
    """Without a ticket a second delivery runs as it always did, and no ticket is left."""
    held_by(attempt(locks, "a", copy=ORIGINAL)).release()
    assert attempt(locks, "a", copy="a1").acquired
    assert not locks.exists(ticket_name(NAME, "a"))


def test_start_is_remembered_where_another_message_may_come(locks):
    """A second delivery that acquires at once leaves its ticket, as one that has waited."""
    held_by(attempt(locks, "a", copy=ORIGINAL, remember=60)).release()
    assert attempt(locks, "a", copy="a1").stale


def test_own_retry_passes_the_ticket_of_the_attempt_before(locks, lock):
    """What has started is one attempt; the next one starts, or waits, and the old one is stale then."""
    wait(locks, "a")
    lock.release()
    held_by(attempt(locks, "a", copy="a1")).release()
    held = held_by(attempt(locks, "a", retries=1))
    assert wait(locks, "a", retries=1, copy="b1").state == "stale"
    held.release()
    assert attempt(locks, "a", copy="a1").stale
    assert wait(locks, "a", copy="a1").state == "stale"


def test_successor_passes_the_ticket_of_the_call_that_it_replaces(locks, lock):
    """replace() keeps the task's id and its retries: that it is another attempt is said beside them."""
    wait(locks, "a")
    lock.release()
    held_by(attempt(locks, "a", copy="a1")).release()
    assert attempt(locks, "a").stale
    held_by(attempt(locks, "a", attempt=1_000_000)).release()
    assert attempt(locks, "a", copy="a1").stale


def test_retry_waits_in_a_place_of_its_own(locks, lock):
    """The ticket of a started attempt does not keep the next one from the line."""
    wait(locks, "a")
    lock.release()
    held_by(attempt(locks, "a", copy="a1")).release()
    other = lock_on(locks)
    other.acquire()
    assert wait(locks, "a", retries=1).place == 1
    other.release()
    assert other.heir == Heir("a", "wake a")
    assert attempt(locks, "a", retries=1, copy="b1").acquired


def test_stale_call_is_not_put_in_line(locks, lock):
    """Neither its late message nor its courier lets a call wait that has started."""
    wait(locks, "a")
    lock.release()
    held_by(attempt(locks, "a", copy="a1"))
    assert wait(locks, "a", copy="a2").state == "stale"
    assert visit(locks, "a").state == "stale"
    assert members(locks) == []


def test_started_call_that_was_delivered_again_may_wait(locks, lock):
    """The copy that has started may come again after a crash: it is not stale, and waits for its lock."""
    wait(locks, "a")
    lock.release()
    held_by(attempt(locks, "a", copy="a1")).release()
    other = lock_on(locks)
    other.acquire()
    assert wait(locks, "a", copy="a1").state == "parked"
    other.release()
    assert other.heir == Heir("a", "wake a")


def test_task_that_leaves_is_passed_over(locks, lock):
    """The next in line is served, and no other message of the one that left starts it."""
    wait(locks, "a", 10.0)
    wait(locks, "b", 20.0)
    assert leave(locks, place("a"), copy="a1") == "left"
    lock.release()
    assert lock.heir == Heir("b", "wake b")
    assert attempt(locks, "a", copy="a2").stale
    assert visit(locks, "a").state == "stale"


def test_task_that_leaves_when_it_has_been_woken_says_so(locks, lock):
    """The lock is kept for it: it must be passed on, which the copy that leaves can do."""
    wait(locks, "a", 10.0)
    wait(locks, "b", 20.0)
    lock.release()
    assert leave(locks, place("a"), copy="a1") == "handed"
    passing = lock_on(locks)
    assert passing.acquire(token=task_token("a", 0, "0b"), copy="a1").acquired
    passing.release()
    assert passing.heir == Heir("b", "wake b")


def test_task_does_not_leave_what_another_message_has_started(locks, lock):
    """Nothing is changed: the started copy may be delivered again."""
    wait(locks, "a")
    lock.release()
    held_by(attempt(locks, "a", copy="a1")).release()
    assert leave(locks, place("a"), copy="a2") == "stale"
    assert attempt(locks, "a", copy="a1").acquired


def test_earlier_attempt_cannot_leave_for_a_later_one(locks, lock):
    """A late message of the attempt before does not cost the retry its place."""
    wait(locks, "a", retries=1)
    assert leave(locks, place("a", retries=0), copy="a1") == "stale"
    assert members(locks) == ["a"]


def test_task_may_leave_before_it_has_waited(locks):
    """Its messages are stale from then on."""
    assert leave(locks, place("a"), copy="a1") == "left"
    assert attempt(locks, "a").stale
    assert 0 < locks.pttl(ticket_name(NAME, "a")) <= 60_000


def test_one_courier_watches_the_lock(locks, lock):
    """The first that asks; it goes on as long as it comes back in time."""
    assert not visit(locks, "a").watches
    assert visit(locks, "a", watch=60).watches
    assert not visit(locks, "b", 20.0, watch=60).watches
    assert visit(locks, "a", watch=60).watches


def test_watch_goes_to_another_courier_when_it_was_not_kept(locks, lock):
    """A courier that died is replaced by the next one that asks."""
    assert visit(locks, "a", watch=1).watches
    assert not visit(locks, "b", 20.0, watch=60).watches
    wait_until(lambda: visit(locks, "b", 20.0, watch=60).watches, "the other watch is over")
    assert not visit(locks, "a", watch=60).watches


def test_courier_of_a_started_call_watches_on_while_others_wait(locks, lock):
    """The last one lays the watch down: there is nobody to watch for."""
    wait(locks, "a", 10.0)
    wait(locks, "b", 20.0)
    assert visit(locks, "a", watch=60).watches
    lock.release()
    held = held_by(attempt(locks, "a", copy="a1"))
    found = visit(locks, "a", watch=60)
    assert (found.state, found.watches) == ("stale", True)
    held.release()
    attempt(locks, "b", copy="b1")
    found = visit(locks, "a", watch=60)
    assert (found.state, found.watches) == ("stale", False)


def test_watch_makes_no_endless_hash(locks, lock):
    """A watch is noted with a time to live, even where the calls of the line have been lost."""
    wait(locks, "a", 10.0)
    wait(locks, "b", 20.0)
    lock.release()
    locks.delete(CALLS)
    assert visit(locks, "a", watch=60).watches  # handed
    assert 0 < locks.pttl(CALLS) <= 60_000


def test_heir_whose_call_is_lost_is_named_all_the_same(locks, lock):
    """The lock is kept for it, and its courier wakes it."""
    wait(locks, "a")
    locks.delete(CALLS)
    lock.release()
    assert lock.heir == Heir("a", None)
    assert attempt(locks, "a", copy="a1").acquired


def test_waiters_are_seen_with_place_and_age(locks, lock):
    """Whoever looks at a held lock sees who waits for it, since when, and in what order."""
    now = time.time()
    wait(locks, "b", now - 5)
    wait(locks, "a", now - 60)
    holder = lock.holder_and_waiters()
    assert holder is not None
    assert (holder.state, holder.waiting) == ("running", 2)
    assert [(waiter.task_id, waiter.place) for waiter in holder.waiters] == [("a", 1), ("b", 2)]
    first = holder.waiters[0]
    assert isinstance(first, Waiter)
    assert first.since == pytest.approx(now - 60, abs=0.01)
    assert first.age_s == pytest.approx(60, abs=5)
    plain = lock.holder()
    assert plain is not None
    assert plain.waiters == ()


def test_waiters_of_a_long_line_are_counted(locks, lock):
    """All are counted, and the first hundred are named; who meets the lock is told how many."""
    for number in range(120):
        wait(locks, f"task-{number:03}", 1000.0 + number)
    holder = lock.holder_and_waiters()
    assert holder is not None
    assert holder.waiting == 120
    assert [waiter.task_id for waiter in holder.waiters] == [f"task-{number:03}" for number in range(100)]
    assert attempt(locks, "late").waiters == 120


def test_free_lock_has_no_holder_to_look_at(locks, lock):
    """Neither before nor after anybody waited."""
    lock.release()
    assert lock.holder_and_waiters() is None


def test_line_lives_as_long_as_the_longest_waiter(locks, lock):
    """Every key of it expires; one who is remembered for longer keeps it, another does not shorten it."""
    park(locks, place("a", remember=600), copy=ORIGINAL, since=1.0, call="wake a")
    park(locks, place("b", remember=5), copy=ORIGINAL, since=2.0, call="wake b")
    assert min(locks.pttl(LINE), locks.pttl(CALLS), locks.pttl(ticket_name(NAME, "a"))) > 500_000
    assert 0 < locks.pttl(ticket_name(NAME, "b")) <= 5_000


def test_claimed_ticket_keeps_its_time_to_live(locks, lock):
    """It must outlive every other message of the call, and no more."""
    wait(locks, "a")
    lock.release()
    attempt(locks, "a", copy="a1")
    assert locks.get(ticket_name(NAME, "a")) == "0|a1"
    assert 30_000 < locks.pttl(ticket_name(NAME, "a")) <= 60_000


def test_lingering_task_is_handed_the_lock_without_a_wake(locks, lock):
    """It asks again by itself: nobody need be woken, and nobody comes before it."""
    assert attempt(locks, "a", linger=5, since=10.0).waiters == 0
    assert attempt(locks, "b").waiters == 1
    lock.release()
    assert lock.heir is None
    assert not attempt(locks, "b").acquired
    assert attempt(locks, "a", linger=5, since=10.0).acquired
    assert not locks.exists(LINE, CALLS)


def test_lock_is_kept_for_a_lingering_task_no_longer_than_it_lingers(locks, lock):
    """It may have died meanwhile: the next one need not wait out a hand-over, only 50 ms more."""
    attempt(locks, "a", linger=1.0, since=10.0)
    lock.release()
    outcome = attempt(locks, "b")
    assert outcome.remaining_s is not None
    assert outcome.remaining_s <= 1.06


def test_task_that_lingers_no_more_is_passed_over(locks, lock):
    """One that died while it lingered does not hold up who waits behind it."""
    attempt(locks, "a", linger=0.05, since=10.0)
    wait(locks, "b", 20.0)
    until = float(str(locks.hget(CALLS, "a")).removeprefix("@"))
    wait_until(lambda: time.time() * 1e6 > until + 1e5, "it has lingered")
    lock.release()
    assert lock.heir == Heir("b", "wake b")
    assert members(locks) == []
    assert locks.hkeys(CALLS) == ["b"]


def test_task_that_lingered_parks_in_its_place(locks, lock):
    """It gives up asking, and is woken when its turn has come."""
    attempt(locks, "a", linger=5, since=10.0)
    wait(locks, "b", 20.0)
    assert wait(locks, "a", 10.0).place == 1
    lock.release()
    assert lock.heir == Heir("a", "wake a")


def test_foreign_line_stops_no_lock(locks):
    """Another program's value under the line's name: acquire and release work, only waiting is refused."""
    locks.set(LINE, "theirs", ex=60)
    lock = lock_on(locks)
    assert lock.acquire().acquired
    with pytest.raises(LockRefused, match="WRONGTYPE"):
        wait(locks, "a")
    assert lock.release() == "released"
    assert lock.heir is None
    assert locks.get(LINE) == "theirs"


def test_foreign_calls_let_nobody_wait(locks, lock):
    """Nobody is put in line with nothing to be woken with."""
    locks.set(CALLS, "theirs", ex=60)
    with pytest.raises(LockRefused, match="WRONGTYPE"):
        wait(locks, "a")
    assert members(locks) == []
    assert lock.release() == "released"


@pytest.fixture
def full() -> Iterator[redis.Redis]:
    """A server that has no memory left as soon as `maxmemory` is 1."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url(), decode_responses=True) as client:
        yield client


def test_line_goes_on_when_memory_is_full(full):
    """Who waits already is served: a hand-over needs no more memory than a release."""
    lock = lock_on(full)
    assert lock.acquire().acquired
    wait(full, "a", 10.0)
    wait(full, "b", 20.0)
    full.config_set("maxmemory", "1")
    assert lock.release() == "released"
    assert lock.heir == Heir("a", "wake a")
    assert visit(full, "b", 20.0).state == "parked"
    assert all(full.pttl(key) > 0 for key in full.scan_iter())


def test_task_may_leave_when_memory_is_full(full):
    """A revoked call does not keep its place because there is no memory to remember that it left."""
    lock_on(full).acquire()
    wait(full, "a")
    full.config_set("maxmemory", "1")
    assert leave(full, place("a"), copy="a1") == "left"
    assert members(full) == []


@pytest.fixture
def woken(server, locks) -> Iterator[Any]:
    """A call that was woken, and has a courier, as its worker runs it; the lock is another's."""
    app = Celery("lines", set_as_current=False, broker=server.url(0), backend=server.url(0))
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t", task_default_queue="lines-nowhere")

    @app.task(  # type: ignore[untyped-decorator]
        shared=False, base=SingletonTask, name="t.t", singleton={"on_conflict": "wait"}
    )
    def t() -> None: ...

    task = app.tasks["t.t"]
    key = task.lock_key()
    SetnxLock(locks, key, lease=60).acquire()
    wait_until(lambda: attempt_age(locks, key) > 0.1, "the lock is not young")
    waited = {"count": 1, "since": time.time() - 1, "retries": 0, "copy": "a1"}
    headers = {"singleton": {"key": key, "wait": waited}}
    task.push_request(id="a", args=[], kwargs={}, retries=0, headers=headers, called_directly=False)
    yield task
    task.pop_request()


def attempt_age(client: redis.Redis, key: str) -> float:
    """Seconds since a lock was acquired."""
    holder = SetnxLock(client, key).holder()
    return time.time() - ((holder and holder.since) or time.time())


def test_woken_call_whose_place_is_refused_says_so(woken, locks):
    """Its courier has sent it for that, and comes no more."""
    locks.set(line_names(woken.lock_key())[0], "theirs", ex=60)
    with pytest.raises(LockRefused, match="WRONGTYPE"):
        woken()
