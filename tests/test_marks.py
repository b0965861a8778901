"""The mark beside a lock: who is first, for how long, and when it ends. Redis only."""

from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from celery_setnx import LockRefused, LockUnavailable, SetnxLock
from celery_setnx.lock.marks import (
    Failure,
    Mark,
    MarkReply,
    done_by,
    extend_all,
    forget_done,
    free_all,
    mark_all,
)
from celery_setnx.lock.record import task_token
from tests.proxy import Proxy
from tests.versions.conditions import needs_pipelines_sent_again

KEY = "t:{marked}"
NAME = "t:{marked}:queued"


def mark(client: redis.Redis, task_id: str, lease: float = 600.0) -> Any:
    (marked,) = mark_all(client, [Mark(KEY, task_id)], dedupe="until_started", lease=lease)
    return marked


def acquire(client: redis.Redis, retries: int = 0) -> Any:
    """The attempt of the task "a" to acquire the lock."""
    return SetnxLock(client, KEY, mark=NAME).acquire(token=task_token("a", retries, "ab"))


@pytest.fixture
def shaky(far) -> redis.Redis:
    """A client by way of the proxy that sends again once."""
    return far(sends_again=1)


@needs_pipelines_sent_again
def test_mark_whose_reply_was_lost_is_not_its_own_duplicate(locks, proxy, shaky):
    """The client sends again after a lost reply, and is told that the key is its own."""
    mark(shaky, "warm")
    locks.flushdb()
    with proxy.fault("drop_reply", containing=NAME.encode()):
        assert mark(shaky, "a") == MarkReply("a", "marked")
    assert mark(shaky, "b") == MarkReply("a", "queued")


def test_many_keys_take_one_round_trip_and_equal_ones_meet(locks):
    """Of two equal keys the second is a duplicate of the first."""
    marks = [Mark("t:{x}", "a"), Mark("t:{y}", "b"), Mark("t:{x}", "c")]
    found = mark_all(locks, marks, dedupe="until_started", lease=30)
    assert found == [MarkReply("a", "marked"), MarkReply("b", "marked"), MarkReply("a", "queued")]


def test_scripts_are_sent_again_after_a_script_flush(locks):
    """A server that has forgotten the scripts is taught them anew."""
    marks = [Mark(KEY, "a")]
    locks.script_flush()
    assert mark_all(locks, marks, dedupe="until_done", lease=9) == [MarkReply("a", "marked")]
    locks.script_flush()
    assert extend_all(locks, marks, [600]) is None
    assert locks.pttl(NAME) > 9_000
    locks.script_flush()
    assert free_all(locks, marks) is None
    assert not locks.exists(NAME)


def test_extended_mark_lasts_for_the_new_lease(locks):
    """Each mark gets its own lease, but none gets shorter: its retry may have been marked meanwhile."""
    marks = [Mark("t:{x}", "a"), Mark("t:{y}", "a")]
    mark_all(locks, marks, dedupe="until_started", lease=600)
    assert extend_all(locks, marks, [3600, 5]) is None
    assert 3_500_000 < locks.pttl(marks[0].name) <= 3_600_000
    assert 500_000 < locks.pttl(marks[1].name) <= 600_000


def test_anothers_mark_is_left_as_it_is(locks):
    """A late publisher and an ended run neither extend nor free a later mark; nor do they create one."""
    held, late = acquire(locks).lock, [Mark(KEY, "a")]
    assert (extend_all(locks, late, [3600]), free_all(locks, late)) == (None, None)
    assert not locks.exists(NAME)
    mark(locks, "b", lease=10)
    assert (extend_all(locks, late, [3600]), free_all(locks, late)) == (None, None)
    assert held.release(mark_for=3600) == "released"
    assert locks.get(NAME) == "b"
    assert locks.pttl(NAME) <= 10_000


def test_mark_of_the_wrong_type_never_keeps_a_task_from_running(locks, foreign_keys):
    """What is no text is no mark of ours, and stays."""
    foreign_keys.add(NAME)
    locks.lpush(NAME, "x")
    outcome = acquire(locks)
    assert (outcome.acquired, outcome.mark) == (True, None)
    assert isinstance(mark(locks, "b"), LockRefused)


def test_acquire_whose_reply_was_lost_still_knows_its_mark(locks, proxy, shaky):
    """Asked again, the mark is gone because this very acquire took it: that is no lapse."""
    SetnxLock(shaky, "t:{warm}").acquire()
    mark(locks, "a")
    with proxy.fault("drop_reply", containing=NAME.encode()):
        outcome = acquire(shaky)
    assert (outcome.acquired, outcome.mark) == (True, "a")


def test_resent_release_marks_once(locks, proxy, shaky):
    """The retry may have started by the time a lost release is sent again: its mark does not come back."""
    mark(locks, "a")
    held = acquire(shaky).lock
    with proxy.fault("drop_reply", containing=NAME.encode()):
        assert held.release(mark_for=600) == "released"
    assert locks.get(NAME) == "a"
    assert acquire(locks, retries=1).acquired
    assert not locks.exists(NAME)
    assert held.release(mark_for=600) in ("lost", "released")
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


def success_of(locks: Any, token: str, **lock: Any) -> SetnxLock:
    """The lock of a run that has succeeded, and given it back."""
    given_back = SetnxLock(locks, "k", line=True, **lock)
    held = given_back.acquire(token=token).lock
    assert held is not None
    held.release(done_for=60)
    return given_back


def test_failure_takes_back_its_own_success_whoever_has_the_lock(locks):
    """It names the run: another's lock, and another's success, stay."""
    other = success_of(locks, "a|0|1a").acquire(token="b|0|2b").lock
    assert forget_done(locks, [Failure("k", "a|0|1a", 1)]) is None
    assert done_by(locks, "k") is None
    assert other.release(done_for=60) == "released"
    assert forget_done(locks, [Failure("k", "a|0|1a", 1)]) is None
    assert done_by(locks, "k") == "b"


def test_delivery_that_never_had_the_lock_takes_no_success_back(locks):
    """Its message was delivered again after the call had succeeded: it expired, or its process died."""
    success_of(locks, "a|0|1a")
    assert forget_done(locks, [Failure("k", "a|0|2b", 1)]) is None
    assert done_by(locks, "k") == "a"


def test_delivery_that_ran_again_takes_back_what_the_one_before_has_noted(locks):
    """That died before its result was stored, and its message came back: the call has failed."""
    success_of(locks, "a|0|1a").acquire(token="a|0|2b")
    assert forget_done(locks, [Failure("k", "a|0|2b", 1)]) is None
    assert done_by(locks, "k") is None


def test_success_is_taken_back_when_memory_is_full(own_locks):
    """What is removed needs no memory, and after a removal its record may be written too."""
    held = success_of(own_locks, "a|0|1a").acquire(token="a|0|2b").lock
    own_locks.config_set("maxmemory", 1)
    assert forget_done(own_locks, [Failure("k", "a|0|2b", 1)]) is None
    own_locks.config_set("maxmemory", 0)
    assert held.release(done_for=60) == "released"
    assert done_by(own_locks, "k") is None


@pytest.mark.parametrize("limit", [2, 3])
@pytest.mark.parametrize("is_later", [True, False], ids=["later", "earlier"])
def test_failure_takes_no_success_of_a_later_delivery_back_under_whichever_permits(locks, limit, is_later):
    """Each has had a permit of its own, whose records tell which of them was the first."""
    lock = SetnxLock(locks, "k", line=True, limit=limit)
    other = lock.acquire(token="b|0|3c").lock
    tokens = ["a|0|2b", "a|0|1a"] if is_later else ["a|0|1a", "a|0|2b"]
    for permit, token in zip((1, 0), tokens):
        held = lock.acquire(token=token).lock
        assert held.permit == permit
        other.release()  # so the next takes the first permit
        held.release(done_for=60 if token == "a|0|1a" else 0)
    assert forget_done(locks, [Failure("k", "a|0|2b", limit)]) is None
    assert done_by(locks, "k") == ("a" if is_later else None)


@pytest.mark.parametrize("permit", [0, 1])
def test_release_after_the_failure_notes_no_success(locks, permit):
    """The lock is given back as ever, under whichever permit; a run that has not failed counts."""
    lock = SetnxLock(locks, "k", line=True, limit=2)
    held = [lock.acquire(token=f"{task}|0|1a").lock for task in "ab"]
    assert forget_done(locks, [Failure("k", held[permit].token, 2)]) is None
    assert [holder.state for holder in lock.holders()].count("failed") == 1
    assert held[permit].release(done_for=60) == "released"
    assert done_by(locks, "k") is None
    assert held[1 - permit].release(done_for=60) == "released"
    assert done_by(locks, "k") == "ba"[permit]
    assert lock.holders() == []
