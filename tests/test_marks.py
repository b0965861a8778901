"""The mark beside a lock: who is first, for how long, and when it ends. Redis only."""

from collections.abc import Iterator
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_setnx import LockRefused, LockUnavailable, SetnxLock
from celery_setnx.keys import mark_name
from celery_setnx.lock import task_token
from celery_setnx.marks import Mark, Marked, extend_all, free_all, mark_all
from tests.conftest import LOCK_DB
from tests.harness import wait_until
from tests.proxy import Proxy
from tests.versions.conditions import needs_pipelines_sent_again

KEY = "t:{marked}"
NAME = "t:{marked}:queued"
MODES = ("until_started", "until_done")


def mark(client: redis.Redis, task_id: str, dedupe: str = "until_started", lease: float = 30.0) -> Marked:
    (marked,) = mark_all(client, [Mark(KEY, task_id)], dedupe=dedupe, lease=lease)
    assert isinstance(marked, Marked)
    return marked


def a_lock(client: redis.Redis, **options: Any) -> SetnxLock:
    return SetnxLock(client, KEY, mark=NAME, **options)


def run(client: redis.Redis, task_id: str, retries: int = 0, lease: float = 30.0) -> Any:
    """A running task's held lock."""
    held = a_lock(client, lease=lease).acquire(token=task_token(task_id, retries, "ab")).lock
    assert held is not None
    return held


@pytest.fixture
def proxy(server) -> Iterator[Proxy]:
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def shaky(proxy) -> Iterator[redis.Redis]:
    """A client by way of the proxy that sends again once."""
    # redis-py before 6 sends again after the errors that are named, and after no others.
    named = {"retry": Retry(NoBackoff(), 1), "retry_on_error": [redis.ConnectionError, redis.TimeoutError]}
    with redis.Redis.from_url(proxy.url(LOCK_DB), **named, socket_timeout=5) as client:
        client.ping()
        yield client


def test_mark_lives_in_the_slot_of_its_lock():
    """The mark's name holds the lock's, braces and all."""
    assert Mark(KEY, "a").name == mark_name(KEY) == NAME


@pytest.mark.parametrize("dedupe", MODES)
def test_first_is_marked(locks, dedupe):
    """A free key is marked with the task's id, for the lease."""
    marked = mark(locks, "a", dedupe)
    assert marked == Marked("a", "marked")
    assert not marked.is_duplicate
    assert locks.get(NAME) == "a"
    assert 29_000 < locks.pttl(NAME) <= 30_000


@pytest.mark.parametrize("dedupe", MODES)
def test_second_is_a_duplicate_of_the_first(locks, dedupe):
    """A marked key answers with the task that it is marked for, and nothing changes."""
    mark(locks, "a", lease=10)
    marked = mark(locks, "b", dedupe, lease=3600)
    assert marked == Marked("a", "queued")
    assert marked.is_duplicate
    assert locks.get(NAME) == "a"
    assert locks.pttl(NAME) <= 10_000


def test_same_task_marks_again(locks):
    """A mark that is sent twice is no duplicate of itself."""
    mark(locks, "a")
    assert mark(locks, "a") == Marked("a", "marked")


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
    assert extend_all(locks, marks, [30]) is None
    assert locks.pttl(NAME) > 9_000
    locks.script_flush()
    assert free_all(locks, marks) is None
    assert not locks.exists(NAME)


def test_running_task_makes_duplicates_only_until_done(locks):
    """until_done counts the running task, with its record; until_started does not."""
    held = run(locks, "a")
    marked = mark(locks, "b", "until_done")
    assert (marked.task_id, marked.state) == ("a", "running")
    assert marked.holder is not None
    assert marked.holder.fence == held.fence
    assert not locks.exists(NAME)
    assert mark(locks, "b", "until_started") == Marked("b", "marked")


def test_lock_held_for_a_retry_makes_duplicates_until_done(locks):
    """A task that waits for its retry under its lock is not done."""
    run(locks, "a").hold(30)
    assert mark(locks, "b", "until_done").task_id == "a"


def test_resting_lock_makes_no_duplicate(locks):
    """at_least_for says when the next may run, not whether it may be queued."""
    held = run(locks, "a")
    assert held.release(at_least_for=20) == "resting"
    assert mark(locks, "b", "until_done") == Marked("b", "marked")


def test_released_lock_makes_no_duplicate(locks):
    """The record of a release is no holder."""
    assert run(locks, "a").release() == "released"
    assert mark(locks, "b", "until_done") == Marked("b", "marked")


def test_expired_holder_makes_no_duplicate(locks):
    """A holder that is past its deadline is dead, although its lock and record are there still."""
    run(locks, "a", lease=1)
    wait_until(lambda: not mark(locks, "b", "until_done").is_duplicate, "the lease is over")
    assert locks.exists(KEY)


@pytest.mark.parametrize("value", ["99999999999", "maintenance"])
def test_foreign_lock_makes_no_duplicate(locks, foreign_keys, value):
    """A lock without a record of a task names nobody whose result could be waited for."""
    foreign_keys.add(KEY)
    assert locks.setnx(KEY, value)
    assert mark(locks, "b", "until_done") == Marked("b", "marked")


def test_holder_that_is_no_task_makes_no_duplicate(locks):
    """A SetnxLock used by itself has no task id to answer with."""
    SetnxLock(locks, KEY).acquire()
    assert mark(locks, "b", "until_done") == Marked("b", "marked")


def test_extended_mark_lasts_for_the_new_lease(locks):
    """Each mark gets its own lease, but none gets shorter: its retry may have been marked meanwhile."""
    marks = [Mark("t:{x}", "a"), Mark("t:{y}", "a")]
    mark_all(locks, marks, dedupe="until_started", lease=30)
    assert extend_all(locks, marks, [3600, 5]) is None
    assert 3_590_000 < locks.pttl(marks[0].name) <= 3_600_000
    assert 25_000 < locks.pttl(marks[1].name) <= 30_000


def test_marking_again_does_not_shorten(locks):
    """A mark that is sent again late leaves the longer lease that was given meanwhile."""
    mark(locks, "a", lease=60)
    assert mark(locks, "a", lease=10) == Marked("a", "marked")
    assert locks.pttl(NAME) > 10_000


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
    assert free_all(locks, [Mark(KEY, "a")]) is None
    assert free_all(locks, [Mark(KEY, "a")]) is None
    assert not locks.exists(NAME)


def test_mark_ends_when_its_task_acquires(locks):
    """Start and end of the mark are one step, and the outcome says that the mark was there."""
    mark(locks, "a")
    outcome = a_lock(locks).acquire(token=task_token("a", 0, "ab"))
    assert outcome.acquired
    assert outcome.mark == "a"
    assert not locks.exists(NAME)


def test_mark_of_another_stays_when_a_task_acquires(locks):
    """A task that starts without its mark learns whose it is, and leaves it."""
    mark(locks, "b")
    outcome = a_lock(locks).acquire(token=task_token("a", 0, "ab"))
    assert outcome.acquired
    assert outcome.mark == "b"
    assert locks.get(NAME) == "b"


def test_mark_stays_when_its_task_meets_a_held_lock(locks):
    """A task that has to wait is queued still."""
    run(locks, "other")
    mark(locks, "a")
    outcome = a_lock(locks).acquire(token=task_token("a", 0, "ab"))
    assert not outcome.acquired
    assert outcome.mark == "a"
    assert locks.get(NAME) == "a"


def test_acquire_whose_reply_was_lost_still_knows_its_mark(locks, proxy, shaky):
    """Asked again, the mark is gone because this very acquire took it: that is no lapse."""
    SetnxLock(shaky, "t:{warm}").acquire()
    mark(locks, "a")
    with proxy.fault("drop_reply", containing=NAME.encode()):
        outcome = a_lock(shaky).acquire(token=task_token("a", 0, "ab"))
    assert outcome.acquired
    assert outcome.mark == "a"


def test_mark_of_the_wrong_type_never_keeps_a_task_from_running(locks, foreign_keys):
    """What is no text is no mark of ours, and stays."""
    foreign_keys.add(NAME)
    locks.lpush(NAME, "x")
    outcome = a_lock(locks).acquire(token=task_token("a", 0, "ab"))
    assert outcome.acquired
    assert outcome.mark is None
    (found,) = mark_all(locks, [Mark(KEY, "b")], dedupe="until_done", lease=9)
    assert isinstance(found, LockRefused)


@pytest.mark.parametrize(("rest", "word"), [(0.0, "released"), (20.0, "resting")])
def test_release_marks_again_for_the_retry(locks, rest, word):
    """Lock and mark change in one step: no publisher can come between."""
    held = run(locks, "a")
    assert held.release(at_least_for=rest, mark_for=60) == word
    assert locks.get(NAME) == "a"
    assert 59_000 < locks.pttl(NAME) <= 60_000
    assert mark(locks, "b", "until_done") == Marked("a", "queued")


def test_release_without_a_retry_marks_nothing(locks):
    """A task that is done is not queued."""
    run(locks, "a").release()
    assert not locks.exists(NAME)


def test_release_leaves_anothers_mark(locks):
    """A call that was published meanwhile keeps its mark."""
    held = run(locks, "a")
    mark(locks, "b", lease=10)
    held.release(mark_for=3600)
    assert locks.get(NAME) == "b"
    assert locks.pttl(NAME) <= 10_000


def test_resent_release_marks_once(locks, proxy, shaky):
    """The retry may have started by the time a lost release is sent again: its mark does not come back."""
    mark(locks, "a")
    held = run(shaky, "a")
    with proxy.fault("drop_reply", containing=NAME.encode()):
        assert held.release(mark_for=60) == "released"
    assert locks.get(NAME) == "a"
    retry = run(locks, "a", retries=1)
    assert not locks.exists(NAME)
    assert held.release(mark_for=60) in ("lost", "released")
    assert not locks.exists(NAME)
    retry.release()


def test_lost_holder_marks_nothing(locks):
    """A holder whose lock is another's has no say in what is queued."""
    held = run(locks, "a", lease=1)
    wait_until(lambda: a_lock(locks).acquire(token=task_token("b", 0, "cd")).acquired, "taken over")
    assert held.release(mark_for=60) == "lost"
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
    """Nothing to do is done without a server."""
    nowhere = redis.Redis(port=1)
    assert mark_all(nowhere, [], dedupe="until_started", lease=30) == []
    assert extend_all(nowhere, [], []) is None
    assert free_all(nowhere, []) is None
