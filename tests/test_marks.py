"""The mark beside a lock: who is first, for how long, and when it ends. Redis only."""

from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_setnx import LockRefused, LockUnavailable, SetnxLock
from celery_setnx.keys import mark_name
from celery_setnx.lock import task_token
from celery_setnx.marks import Mark, Marked, extend_all, free_all, mark_all
from tests.harness import age
from tests.proxy import Proxy
from tests.versions.conditions import needs_pipelines_sent_again

KEY = "t:{marked}"
NAME = "t:{marked}:queued"
MODES = ("until_started", "until_done")
MARKED = Marked("b", "marked")


def mark(client: redis.Redis, task_id: str, dedupe: str = "until_started", lease: float = 600.0) -> Marked:
    (marked,) = mark_all(client, [Mark(KEY, task_id)], dedupe=dedupe, lease=lease)
    assert isinstance(marked, Marked)
    return marked


def acquire(client: redis.Redis, task_id: str = "a", retries: int = 0) -> Any:
    """A task's attempt to acquire the lock."""
    return SetnxLock(client, KEY, mark=NAME).acquire(token=task_token(task_id, retries, "ab"))


def run(client: redis.Redis, task_id: str = "a", retries: int = 0) -> Any:
    """A running task's held lock."""
    held = acquire(client, task_id, retries).lock
    assert held is not None
    return held


@pytest.fixture
def shaky(far) -> redis.Redis:
    """A client by way of the proxy that sends again once."""
    return far(sends_again=1)


@pytest.mark.parametrize("dedupe", MODES)
def test_first_is_marked(locks, dedupe):
    """A free key is marked with the task's id, for the lease; the second is a duplicate, changing nothing.

    A mark that is sent twice is no duplicate of itself, and leaves a longer lease that it was given.
    """
    assert Mark(KEY, "a").name == mark_name(KEY) == NAME  # in the slot of its lock
    marked = mark(locks, "a", dedupe)
    assert marked == Marked("a", "marked")
    assert not marked.is_duplicate
    assert locks.get(NAME) == "a"
    assert 500_000 < locks.pttl(NAME) <= 600_000
    marked = mark(locks, "b", dedupe, lease=3600)
    assert marked == Marked("a", "queued")
    assert marked.is_duplicate
    assert mark(locks, "a", dedupe, lease=10) == Marked("a", "marked")
    assert locks.get(NAME) == "a"
    assert 10_000 < locks.pttl(NAME) <= 600_000


@needs_pipelines_sent_again
def test_mark_whose_reply_was_lost_is_not_its_own_duplicate(locks, proxy, shaky):
    """The client sends again after a lost reply, and is told that the key is its own."""
    mark(shaky, "warm")
    locks.flushdb()
    with proxy.fault("drop_reply", containing=NAME.encode()):
        assert mark(shaky, "a") == Marked("a", "marked")
    assert mark(shaky, "b") == Marked("a", "queued")


def test_many_keys_take_one_round_trip_and_equal_ones_meet(locks):
    """Of two equal keys the second is a duplicate of the first."""
    marks = [Mark("t:{x}", "a"), Mark("t:{y}", "b"), Mark("t:{x}", "c")]
    found = mark_all(locks, marks, dedupe="until_started", lease=30)
    assert found == [Marked("a", "marked"), Marked("b", "marked"), Marked("a", "queued")]


def test_scripts_are_sent_again_after_a_script_flush(locks):
    """A server that has forgotten the scripts is taught them anew."""
    marks = [Mark(KEY, "a")]
    locks.script_flush()
    assert mark_all(locks, marks, dedupe="until_done", lease=9) == [Marked("a", "marked")]
    locks.script_flush()
    assert extend_all(locks, marks, [600]) is None
    assert locks.pttl(NAME) > 9_000
    locks.script_flush()
    assert free_all(locks, marks) is None
    assert not locks.exists(NAME)


def test_running_task_makes_duplicates_only_until_done(locks):
    """until_done counts the running task, with its record, or one that holds its lock for its retry."""
    held = run(locks)
    marked = mark(locks, "b", "until_done")
    assert (marked.task_id, marked.state) == ("a", "running")
    assert marked.holder is not None
    assert marked.holder.fence == held.fence
    held.hold(600)
    assert mark(locks, "b", "until_done").task_id == "a"
    assert not locks.exists(NAME)
    assert mark(locks, "b", "until_started") == MARKED


LEFT = {
    "released": lambda locks: run(locks).release(),  # the record of a release is no holder
    "resting": lambda locks: run(locks).release(at_least_for=600),  # that says when the next may run
    "expired": lambda locks: run(locks) and age(locks, KEY, 30),  # dead, although lock and record are there
    "foreign number": lambda locks: locks.setnx(KEY, "99999999999"),  # names nobody to wait for
    "foreign text": lambda locks: locks.setnx(KEY, "maintenance"),
    "no task": lambda locks: SetnxLock(locks, KEY).acquire(),  # has no task id to answer with
}


@pytest.mark.parametrize("left", LEFT)
def test_lock_without_a_task_that_runs_makes_no_duplicate(locks, foreign_keys, left):
    """until_done counts what a caller could wait for."""
    foreign_keys.update({KEY} if "foreign" in left else ())
    LEFT[left](locks)
    assert bool(locks.exists(KEY)) == (left != "released")
    assert mark(locks, "b", "until_done") == MARKED


def test_extended_mark_lasts_for_the_new_lease(locks):
    """Each mark gets its own lease, but none gets shorter: its retry may have been marked meanwhile."""
    marks = [Mark("t:{x}", "a"), Mark("t:{y}", "a")]
    mark_all(locks, marks, dedupe="until_started", lease=600)
    assert extend_all(locks, marks, [3600, 5]) is None
    assert 3_500_000 < locks.pttl(marks[0].name) <= 3_600_000
    assert 500_000 < locks.pttl(marks[1].name) <= 600_000


def test_extend_leaves_anothers_mark_and_creates_none(locks):
    """A late publisher changes nothing of what came after it."""
    assert extend_all(locks, [Mark(KEY, "a")], [3600]) is None
    assert not locks.exists(NAME)
    mark(locks, "b", lease=10)
    assert extend_all(locks, [Mark(KEY, "a")], [3600]) is None
    assert locks.pttl(NAME) <= 10_000


def test_free_ends_only_ones_own_mark(locks):
    """Nobody frees another's mark; freeing twice is harmless."""
    mark(locks, "a")
    assert free_all(locks, [Mark(KEY, "b")]) is None
    assert locks.get(NAME) == "a"
    for _ in range(2):
        assert free_all(locks, [Mark(KEY, "a")]) is None
        assert not locks.exists(NAME)


@pytest.mark.parametrize(
    ("marked", "held", "left"), [("a", False, None), ("b", False, "b"), ("a", True, "a")]
)
def test_mark_ends_when_its_own_task_acquires(locks, marked, held, left):
    """In one step, and the outcome says whose it was; another's stays, and a waiting task's own."""
    if held:
        run(locks, "other")
    mark(locks, marked)
    outcome = acquire(locks)
    assert (outcome.acquired, outcome.mark) == (not held, marked)
    assert locks.get(NAME) == left
    if outcome.lock:
        outcome.lock.release()  # without a retry it marks nothing
    assert locks.get(NAME) == left


def test_acquire_whose_reply_was_lost_still_knows_its_mark(locks, proxy, shaky):
    """Asked again, the mark is gone because this very acquire took it: that is no lapse."""
    SetnxLock(shaky, "t:{warm}").acquire()
    mark(locks, "a")
    with proxy.fault("drop_reply", containing=NAME.encode()):
        outcome = acquire(shaky)
    assert (outcome.acquired, outcome.mark) == (True, "a")


def test_mark_of_the_wrong_type_never_keeps_a_task_from_running(locks, foreign_keys):
    """What is no text is no mark of ours, and stays."""
    foreign_keys.add(NAME)
    locks.lpush(NAME, "x")
    outcome = acquire(locks)
    assert (outcome.acquired, outcome.mark) == (True, None)
    (found,) = mark_all(locks, [Mark(KEY, "b")], dedupe="until_done", lease=9)
    assert isinstance(found, LockRefused)


@pytest.mark.parametrize(("rest", "word"), [(0.0, "released"), (600.0, "resting")])
def test_release_marks_again_for_the_retry(locks, rest, word):
    """Lock and mark change in one step: no publisher can come between."""
    assert run(locks).release(at_least_for=rest, mark_for=600) == word
    assert locks.get(NAME) == "a"
    assert 500_000 < locks.pttl(NAME) <= 600_000
    assert mark(locks, "b", "until_done") == Marked("a", "queued")


def test_release_leaves_anothers_mark(locks):
    """A call that was published meanwhile keeps its mark."""
    held = run(locks)
    mark(locks, "b", lease=10)
    held.release(mark_for=3600)
    assert locks.get(NAME) == "b"
    assert locks.pttl(NAME) <= 10_000


def test_resent_release_marks_once(locks, proxy, shaky):
    """The retry may have started by the time a lost release is sent again: its mark does not come back."""
    mark(locks, "a")
    held = run(shaky)
    with proxy.fault("drop_reply", containing=NAME.encode()):
        assert held.release(mark_for=600) == "released"
    assert locks.get(NAME) == "a"
    run(locks, retries=1)
    assert not locks.exists(NAME)
    assert held.release(mark_for=600) in ("lost", "released")
    assert not locks.exists(NAME)


def test_lost_holder_marks_nothing(locks):
    """A holder whose lock is another's has no say in what is queued."""
    held = run(locks)
    age(locks, KEY, 30)
    run(locks, "b")
    assert held.release(mark_for=600) == "lost"
    assert not locks.exists(NAME)


def test_unreachable_server_is_an_answer_for_each(server):
    """No exception: the caller decides, for every call."""
    with Proxy(server.port) as proxy:
        dead = redis.Redis(port=proxy.port, retry=Retry(NoBackoff(), 0))
    marks = [Mark("t:{x}", "a"), Mark("t:{y}", "b")]
    found = mark_all(dead, marks, dedupe="until_started", lease=30)
    assert [type(answer) for answer in found] == [LockUnavailable] * 2
    assert isinstance(extend_all(dead, marks, [1, 1]), LockUnavailable)
    assert isinstance(free_all(dead, marks), LockUnavailable)


def test_no_marks_take_no_round_trip():
    """Nothing to do is done without a client."""
    nobody: Any = object()
    assert mark_all(nobody, [], dedupe="until_started", lease=30) == []
    assert extend_all(nobody, [], []) is None
    assert free_all(nobody, []) is None
