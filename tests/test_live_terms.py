"""Live terms of a lock, as its callers see them, on a real server whose clock is the test's.

What an operator, or a body, has said counts above the task's own terms, and ends by itself.
"""

import re
from typing import Any

import pytest
import redis

from celery_setnx import LockLost, SetnxLock
from celery_setnx.lock import verbs
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.line import LineEntry, ParkReply, leave, park, who_waits
from celery_setnx.lock.live import (
    NewTerm,
    change_key_terms,
    change_task_terms,
    live_terms_of,
    live_terms_of_tasks,
)
from celery_setnx.lock.look import look
from celery_setnx.lock.names import line_names, live_terms_name, starts_name, terms_name
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import ORIGINAL, ServeReply, Terms, task_token
from celery_setnx.lock.verbs import Caller
from tests.model.injected import EPOCH, ServerClock

NAME = "t:{live}"
LINE, _CALLS = line_names(NAME)
LEASE = 600.0


def the_lock(client: redis.Redis, live: str = "", **options: Any) -> SetnxLock:
    """The lock, in hands of its own; `live`: what its task's live terms are."""
    return SetnxLock(client, NAME, live=live, **{"lease": LEASE, "line": True, **options})


def of_task(
    client: redis.Redis, task_id: str, live: str = "", retries: int = 0, copy: str = ORIGINAL, **options: Any
) -> Outcome:
    """A task's attempt to acquire the lock."""
    token, caller = task_token(task_id, retries, "0a"), Caller(copy=copy, attempt=retries)
    return the_lock(client, live, **options).acquire(token=token, caller=caller)


def start(client: redis.Redis, task_id: str = "runs", live: str = "", **options: Any) -> HeldLock:
    """A start that is allowed."""
    outcome = of_task(client, task_id, live, **options)
    assert outcome.lock is not None
    return outcome.lock


def wait(client: redis.Redis, task_id: str, since: float = 1.0, **about: Any) -> ParkReply:
    """A task enters the line."""
    place = LineEntry(NAME, task_id, 0, 6000.0, **{"terms": Terms(), **about})
    return park(client, place, copy=ORIGINAL, since=since, call=f"wake {task_id}")


def serve(client: redis.Redis, live: str = "", **options: Any) -> ServeReply:
    """The line goes on, if it may."""
    return verbs.serve(the_lock(client, live, **options), knows_terms=True)


def set_term(client: redis.Redis, name: Any, for_s: float = 60.0, value: str = "-", **about: str) -> None:
    """An operator sets a live term of the key; with 0 seconds it ends."""
    change_key_terms(client, NAME, NewTerm(name, for_s, value, **about))


def of_the_task(clock: ServerClock, *terms: str, for_s: float = 60.0) -> str:
    """Live terms of the task, as a worker hands them on."""
    until = clock.now + round(for_s * 1e6)
    pairs = (term.partition(" ")[::2] for term in terms)
    return "\n".join(f"{name} {until} {value or '-'} {{}}" for name, value in pairs)


# A pause


@pytest.mark.parametrize("whose", ["key", "task"])
def test_pause_starts_nothing_until_it_ends(locks, clock, whose):
    """Of a key or of its task; the outcome says how long it lasts still."""
    live = ""
    if whose == "key":
        set_term(locks, "pause", because="partner down", by="ana")
    else:
        live = of_the_task(clock, "pause")
    outcome = of_task(locks, "comes", live)
    assert (outcome.acquired, outcome.paused, outcome.paced, outcome.remaining_s) == (False, True, True, 60)
    assert (outcome.holder.state, outcome.holder.deadline) == ("paused", EPOCH / 1e6 + 70)
    assert outcome.mark is None
    of, by, ends = " of all calls of live", "", "live"
    if whose == "key":
        of, by, ends = "", " by ana: partner down", "'t:{live}'"
    until = rf"a pause{of} until \d.* UTC{by} \(celery -A APP setnx resume {ends} ends it\)"
    assert re.fullmatch(until, str(outcome.holder))
    clock.set(69.999_999)
    assert of_task(locks, "comes", live).paused
    clock.set(70)
    start(locks, "comes", live)


def test_longer_of_two_pauses_counts(locks, clock):
    """A key's beside its task's, whichever ends later."""
    set_term(locks, "pause", 30)
    assert of_task(locks, "comes", of_the_task(clock, "pause")).remaining_s == 60
    assert of_task(locks, "comes", of_the_task(clock, "pause", for_s=10)).remaining_s == 30


def test_pause_stops_nothing_that_runs(locks, clock):
    """It renews, and gives back; then nobody follows, and the line is looked at within 30 s."""
    lock = the_lock(locks)
    held = lock.acquire(token=task_token("runs", 0, "0a")).lock
    assert wait(locks, "waits").state == "new"
    set_term(locks, "pause")
    clock.set(20)
    held.renew()
    assert held.release() == "released"
    (turn,) = lock.turns
    assert (turn.heir, turn.look_in_s) == (None, 30)
    served = serve(locks)
    assert (served.heir, served.look_in_s) == (None, 30)


def test_resume_lets_the_line_go_on(locks, clock):
    """In the order in which the calls came."""
    set_term(locks, "pause")
    for place, task_id in enumerate(("a", "b"), 1):
        assert wait(locks, task_id, place).state == "new"
    assert serve(locks).heir is None
    set_term(locks, "pause", 0)
    assert locks.exists(terms_name(NAME)) == 0
    assert serve(locks).heir.task_id == "a"


def test_woken_call_gives_back_what_it_was_handed_and_is_not_passed_over(locks, clock):
    """The pause came after the hand-over: at its end that call is the first again."""
    held = start(locks)
    wait(locks, "a", 1.0)
    wait(locks, "b", 2.0)
    held.release()
    set_term(locks, "pause")
    outcome = of_task(locks, "a", copy="w1")
    assert outcome.paused
    assert list(who_waits(locks, NAME, ["a", "b"])) == ["a", "b"]
    clock.set(70)
    assert serve(locks).heir.task_id == "a"


def test_lock_that_is_held_for_a_retry_lasts_through_a_pause(locks, clock):
    """For ten minutes from each time on that the retry asks, and no longer; it resumes with its fence."""
    held = start(locks, "again")
    assert held.hold(30) == "held_for_retry"
    set_term(locks, "pause", 7200)
    for second in range(20, 7200, 500):
        clock.set(second)
        outcome = of_task(locks, "again", retries=1)
        assert (outcome.paused, outcome.holder.state) == (True, "held_for_retry")
        assert outcome.holder.deadline == EPOCH / 1e6 + second + 600
        assert serve(locks).heir is None
    clock.set(7300)
    resumed = start(locks, "again", retries=1)
    assert resumed.fence == held.fence


def test_holder_may_come_again_in_a_pause(locks, clock):
    """Its reply was lost: it has started."""
    lock = the_lock(locks)
    token = task_token("runs", 0, "0a")
    assert lock.acquire(token=token, caller=Caller(copy=ORIGINAL)).acquired
    set_term(locks, "pause")
    assert lock.acquire(token=token, caller=Caller(copy=ORIGINAL)).acquired


def test_call_that_waits_alone_is_the_only_one(locks, clock):
    """Where `auto` would skip all, one waits; the next is told so, and its courier need not come."""
    set_term(locks, "pause")
    assert wait(locks, "first", alone=True).state == "new"
    assert wait(locks, "first", alone=True).state == "parked"
    assert wait(locks, "second", alone=True).state == "crowded"
    assert list(who_waits(locks, NAME, ["first", "second"])) == ["first"]
    assert of_task(locks, "second", copy="again").stale


def test_call_that_leaves_in_a_pause_hands_on_to_nobody(locks, clock):
    """Its permit is free, and the line is looked at in 30 s at the latest."""
    held = start(locks)
    wait(locks, "a", 1.0)
    wait(locks, "b", 2.0)
    held.release()
    set_term(locks, "pause")
    left = leave(locks, LineEntry(NAME, "a", 0, 600, terms=Terms()), copy="w1")
    assert left.word == "left"
    assert (left.turn.heir, left.turn.look_in_s) == (None, 30)
    clock.set(70)
    assert serve(locks).heir.task_id == "b"


@pytest.mark.parametrize("whose", ["key", "task"])
def test_full_server_lets_an_operator_pause_and_resume(own_locks, whose):
    """It is then that they want to."""

    def change(name: Any, for_s: float, value: str = "-") -> list[str]:
        term = NewTerm(name, for_s, value)
        if whose == "task":
            found = change_task_terms(own_locks, "t", "live", term)
        else:
            found = change_key_terms(own_locks, NAME, term)
        return [each.name for each in found.after]

    change("limit", 600, "2")
    change("pause", 600)
    own_locks.config_set("maxmemory", 1)
    assert change("pause", 0) == ["limit"]
    assert change("pause", 30) == ["limit", "pause"]
    assert change("limit", 0) == ["pause"]


def test_full_server_lets_a_body_hold_back_its_key(own_locks):
    """As it lets the body renew."""
    held = start(own_locks)
    own_locks.config_set("maxmemory", 1)
    assert held.hold_back(30) == 30


# A body that says "not now"


def test_body_holds_its_key_back(locks, clock):
    """Nobody starts, it itself goes on; the pause says who, and why, and ends by itself."""
    held = start(locks)
    assert held.hold_back(30, "429 from the partner") == 30
    held.renew()
    held.release()
    outcome = of_task(locks, "comes")
    assert (outcome.paused, outcome.remaining_s) == (True, 30)
    info = outcome.holder.info
    assert (info["because"], info["by"]) == ("429 from the partner", "task runs")
    clock.set(40)
    start(locks, "comes")


def test_lock_that_knows_no_pause_holds_nobody_back(locks, clock):
    """A plain one: the next to acquire it does not ask, so that is said."""
    held = SetnxLock(locks, NAME).acquire().lock
    with pytest.raises(ValueError, match="hold_back needs a lock of a task"):
        held.hold_back(30)
    assert not locks.exists(terms_name(NAME))


def test_body_ends_no_pause_sooner(locks, clock):
    """An operator's stands; a longer one of its own takes its place."""
    set_term(locks, "pause", 0)
    held = start(locks)
    set_term(locks, "pause", 60, by="ana")
    assert held.hold_back(30) == 60
    (term,) = live_terms_of(locks.get(terms_name(NAME)))
    assert (term.by, term.until) == ("ana", EPOCH / 1e6 + 70)
    assert held.hold_back(90) == 90
    set_term(locks, "pause", 0)
    held.release()
    start(locks, "comes")


def test_body_that_has_lost_its_lock_holds_nobody_back(locks, clock):
    """Else a process that stood still would pause the work of its successor."""
    held = start(locks)
    clock.set(700)
    with pytest.raises(LockLost, match="hold nobody back"):
        held.hold_back(30)
    assert locks.exists(terms_name(NAME)) == 0


@pytest.mark.parametrize("because", ["429 " * 1000, RuntimeError("429 " * 1000)])
def test_reason_of_a_body_is_short(locks, because):
    """It travels with each delivery, and a partner's answer may be a page."""
    start(locks).hold_back(30, because)
    (term,) = live_terms_of(locks.get(terms_name(NAME)))
    assert (term.because[:4], len(term.because)) == ("429 ", 300)


@pytest.mark.parametrize("seconds", [0, -1, 86_401])
def test_body_holds_back_for_a_day_at_most(locks, clock, seconds):
    """And for some time."""
    with pytest.raises(ValueError, match="hold_back takes more than 0 seconds and at most a day"):
        start(locks).hold_back(seconds)


# A limit


@pytest.mark.parametrize("whose", ["key", "task"])
def test_lower_limit_counts_while_it_lasts(locks, clock, whose):
    """Who holds a permit beyond it goes on; the task's own limit is what is noted."""
    live = of_the_task(clock, "limit 1") if whose == "task" else ""
    first, second = (start(locks, task_id, limit=3) for task_id in ("a", "b"))
    if whose == "key":
        set_term(locks, "limit", value="1")
    assert not of_task(locks, "c", live, limit=3).acquired
    second.release()
    assert not of_task(locks, "c", live, limit=3).acquired
    first.release()
    start(locks, "c", live, limit=3)
    assert not of_task(locks, "d", live, limit=3).acquired
    assert look(locks, NAME).terms == Terms(3)
    clock.set(70)
    start(locks, "d", live, limit=3)


def test_higher_limit_counts_while_it_lasts(locks, clock):
    """Of a task that has several; a newcomer asks for the permits that it needs."""
    set_term(locks, "limit", value="4")
    held = [start(locks, str(number), limit=2) for number in range(4)]
    assert not of_task(locks, "5", limit=2).acquired
    clock.set(70)
    for each in held[2:]:
        each.release()
    assert not of_task(locks, "6", limit=2).acquired
    held[0].release()
    start(locks, "6", limit=2)


def test_woken_call_has_its_permit_though_the_higher_limit_has_ended(locks, clock):
    """It was handed one beyond its own limit, which is noted: it asks for it, and is not refused."""
    for number in range(2):
        start(locks, str(number), limit=2)
    wait(locks, "waits", terms=Terms(2))
    set_term(locks, "limit", value="3")
    assert serve(locks, limit=2).heir.task_id == "waits"
    set_term(locks, "limit", 0)
    assert start(locks, "waits", copy="woken", limit=2).permit == 2


def test_holder_beyond_a_lowered_limit_hands_on_to_nobody(locks, clock):
    """Else the line would keep as many running as before."""
    held = [start(locks, str(number), limit=3) for number in range(3)]
    wait(locks, "waits", terms=Terms(3))
    set_term(locks, "limit", value="1")
    for each in held[1:]:
        each.release()
        assert serve(locks, limit=3).heir is None
    held[0].release()
    assert serve(locks, limit=3).heir is None  # it has been handed over already
    assert look(locks, NAME, terms=Terms(3)).holder.state == "handed"


# A rate


@pytest.mark.parametrize("whose", ["key", "task"])
def test_rate_of_a_task_that_has_none(locks, clock, whose):
    """Starts count from when it is known, and no longer than it lasts."""
    live = of_the_task(clock, "rate 2/10000000") if whose == "task" else ""
    if whose == "key":
        set_term(locks, "rate", value="2/10000000")
    for second in (10, 11):
        clock.set(second)
        start(locks, str(second), live).release()
    outcome = of_task(locks, "third", live)
    assert (outcome.paced, outcome.paused, outcome.remaining_s) == (True, False, 9)
    assert outcome.holder.info == {"pace": "2 in 10 s"}
    clock.set(20)
    start(locks, "third", live).release()
    clock.set(70)
    for task_id in ("x", "y", "z"):
        start(locks, task_id, live).release()
    assert locks.pttl(starts_name(NAME)) > 0


def test_rate_that_is_slower_than_ones_own(locks, clock):
    """It takes the place of the task's own, and not only its smaller part."""
    set_term(locks, "rate", value="1/60000000")
    start(locks, "a", rate=(100, 1.0)).release()
    assert of_task(locks, "b", rate=(100, 1.0)).remaining_s == 60
    clock.set(70)
    for number in range(50):
        start(locks, str(number), rate=(100, 1.0)).release()


@pytest.mark.parametrize("whose", ["key", "task"])
def test_outcome_tells_the_limit_that_counts(locks, clock, whose):
    """And not the task's own, which an operator has lowered."""
    live = of_the_task(clock, "limit 2") if whose == "task" else ""
    if whose == "key":
        set_term(locks, "limit", value="2")
    for task_id in ("a", "b"):
        start(locks, task_id, live, limit=5)
    outcome = of_task(locks, "c", live, limit=5)
    assert (outcome.acquired, outcome.limit) == (False, 2)
    clock.set(70)
    for task_id in ("c", "d", "e"):
        start(locks, task_id, limit=5)
    assert of_task(locks, "f", limit=5).limit == 5


# Where they stand


def test_keys_terms_count_above_its_tasks(locks, clock):
    """Field by field."""
    set_term(locks, "limit", value="1")
    live = of_the_task(clock, "limit 2", "rate 1/60000000")
    start(locks, "a", live, limit=3).release()
    assert of_task(locks, "b", live, limit=3).paced
    clock.set(69)
    seen = look(locks, NAME, terms=Terms(3, live=live))
    assert (seen.asked.limit, seen.asked.starts) == (1, 1)


def test_terms_end_by_themselves_and_leave_nothing(locks, clock):
    """Each when its time is over; the key lives as long as the last of them."""
    set_term(locks, "limit", 30, "2")
    set_term(locks, "pause", 100)
    assert [term.name for term in live_terms_of(locks.get(terms_name(NAME)))] == ["limit", "pause"]
    assert 99_000 < locks.pttl(terms_name(NAME)) <= 101_000
    clock.set(50)
    set_term(locks, "rate", 20, "1/1000000")
    assert [term.name for term in live_terms_of(locks.get(terms_name(NAME)))] == ["pause", "rate"]
    set_term(locks, "pause", 0)
    assert 19_000 < locks.pttl(terms_name(NAME)) <= 21_000


def test_terms_of_tasks_stand_by_their_scopes(locks, clock):
    """One hash, which lasts as long as the last of them."""
    change_task_terms(locks, "t", "shop.sync", NewTerm("pause", 60.0, because="down", by="ana"))
    change_task_terms(locks, "t", "shop.bill", NewTerm("limit", 30.0, "2"))
    change = change_task_terms(locks, "t", "shop.sync", NewTerm("rate", 40.0, "1/1000000"))
    assert [term.name for term in change.before] == ["pause"]
    assert [term.name for term in change.after] == ["pause", "rate"]
    found = live_terms_of_tasks(locks, "t")
    assert sorted(found) == ["shop.bill", "shop.sync"]
    assert 59_000 < locks.pttl("t:terms") <= 61_000
    change_task_terms(locks, "t", "shop.sync", NewTerm("pause", 0.0))
    change_task_terms(locks, "t", "shop.sync", NewTerm("rate", 0.0))
    assert sorted(live_terms_of_tasks(locks, "t")) == ["shop.bill"]


@pytest.mark.parametrize(
    "text",
    [
        "pause", "pause soon - {}", f"pause {'9' * 30} - {{}}", "limit 9000000000000000 0 {}", "\n\n",
        "limit 9000000000000000 1000 {}", "limit 9000000000000000 -1 {}", "rate 9000000000000000 0/5 {}",
        "rate 9000000000000000 1/0 {}", "rate 9000000000000000 1 {}", "stop 9000000000000000 - {}", "\x00",
    ],
)  # fmt: skip
def test_text_that_is_no_term_blocks_nobody(locks, clock, text):
    """Another program's, or of a release that knows more."""
    locks.set(terms_name(NAME), text, px=60_000)
    start(locks, "a", limit=2)
    start(locks, "b", limit=2)
    assert not of_task(locks, "c", limit=2).acquired
    assert isinstance(live_terms_of(text), list)


def test_key_of_another_type_blocks_nobody(locks, clock):
    """MGET shows nothing of it."""
    locks.lpush(terms_name(NAME), "x")
    locks.expire(terms_name(NAME), 60)
    start(locks).release()
    assert look(locks, NAME).live == ()


def test_value_of_another_type_beside_tasks_is_none_of_theirs(locks):
    """Another program's: no worker, and no command, stops at it."""
    locks.set(live_terms_name("t"), "foreign", px=60_000)
    assert live_terms_of_tasks(locks, "t") == {}
