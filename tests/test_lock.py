"""SetnxLock without Celery, on a real server."""

import gc
import itertools
import threading
import time
from datetime import timedelta
from enum import Enum
from typing import Any

import pytest

from celery_setnx import AlreadyRunning, LockLost, LockUnavailable, SetnxLock
from celery_setnx.lock import held as held_module
from celery_setnx.lock import verbs
from celery_setnx.lock.verbs import RELEASE
from tests.harness import age, lock_keys, raising, server_us

NAME, RECORD = "lock.foo", "{lock.foo}:holder"


def test_free_lock_is_acquired_with_a_fence(locks):
    """A free lock: acquired, nobody taken over, and the value is the second at which it ends."""
    before_us = server_us(locks)
    outcome = SetnxLock(locks, NAME, lease=600).acquire()
    assert outcome.acquired
    assert outcome.taken_over_from is None
    assert outcome.lock is not None
    assert outcome.lock.fence > 0
    assert 500 < outcome.lock.remaining_s() < 600
    assert before_us / 1e6 + 600 <= int(locks.get(NAME)) < server_us(locks) / 1e6 + 601  # rounded up


def test_held_lock_is_an_outcome_that_names_the_holder(locks):
    """Not getting the lock is a value: who holds it, since when, how long still. To `with` it is an error."""
    info = {"task": "proj.report", "task_id": "id-1", "worker": "celery@web1", "pid": 4711}
    SetnxLock(locks, NAME, lease=timedelta(seconds=600), info=info).acquire()
    outcome = SetnxLock(locks, NAME).acquire()
    assert not outcome.acquired
    assert outcome.lock is None
    assert 500 < outcome.remaining_s <= 600
    assert outcome.holder.task_id == "id-1"
    assert outcome.holder.info == info
    with pytest.raises(AlreadyRunning, match=r"lock\.foo is held by proj\.report\[id-1\]"):
        SetnxLock(locks, NAME).__enter__()
    assert str(outcome.holder).startswith("proj.report[id-1] on celery@web1 (pid 4711), running since 20")


def test_record_is_readable_text_beside_the_lock(locks):
    """redis-cli GET shows the record: token, deadline, fence, state, since and info, a line each."""
    held = SetnxLock(locks, NAME, lease=10, info={"task": "t"}).acquire().lock
    token, deadline, fence, state, since, info = locks.get(RECORD).split("\n")
    assert (token, int(fence), state, info) == (held.token, held.fence, "running", '{"task":"t"}')
    assert int(deadline) - int(since) == 10_000_000
    assert int(locks.get(NAME)) == -(-int(deadline) // 1_000_000)


def test_lock_named_by_an_enum_has_its_record_beside_it(locks):
    """Lock and record are named by the member's text, and not by its value."""
    member = Enum("Name", {"REPORT": "report"}, type=str).REPORT
    assert SetnxLock(locks, member).acquire().acquired
    assert lock_keys(locks) == {"Name.REPORT", "{Name.REPORT}:holder"}


def test_release_frees_the_lock_and_is_answered_alike_twice(locks):
    """A second release with the same token answers as the first; before any acquire it is an error."""
    with pytest.raises(LockLost, match="never acquired"):
        SetnxLock(locks, NAME).release()
    held = SetnxLock(locks, NAME).acquire().lock
    assert held.release() == held.release() == "released"
    assert locks.get(NAME) is None
    assert 0 < locks.ttl(RECORD) <= 60


def test_lock_leaves_nothing_for_the_garbage_collector(locks):
    """No object keeps another in a circle: a stream of short locks costs no collections."""

    def cycle() -> None:
        lock = SetnxLock(locks, NAME)
        lock.acquire()
        lock.release()
        with SetnxLock(locks, NAME) as held:
            held.renew()

    cycle()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        cycle()
        gc.collect()  # and with it what other threads of this process have left
        ours = [each for each in gc.garbage if type(each).__module__.startswith("celery_setnx")]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert ours == []


@pytest.mark.parametrize(("fails", "word"), [(False, "lost"), (True, "released")], ids=["once", "again"])
def test_another_has_the_lock_by_a_release_only_if_that_was_asked_for_before(locks, monkeypatch, fails, word):
    """However long a reply takes: who was asked once, and says that it is another's, has not released it."""
    seconds = itertools.count()
    lock = SetnxLock(locks, NAME, lease=600, clock=lambda: float(next(seconds)))
    dead = lock.acquire().lock
    locks.delete(NAME, RECORD)
    if fails:
        with monkeypatch.context() as patch, pytest.raises(LockUnavailable):
            patch.setattr(held_module, "give_back", raising(LockUnavailable(NAME, "no reply")))
            dead.release()
    assert SetnxLock(locks, NAME).acquire().acquired
    assert [dead.release(), dead.release()] == [word, "lost"]


def test_expired_lock_is_taken_over_with_the_dead_holders_record(locks):
    """It says from whom; the old holder's release changes nothing. Fences grow, with all keys gone."""
    dead = SetnxLock(locks, NAME, info={"task": "t", "task_id": "dead"}).acquire().lock
    age(locks, NAME, 30)
    outcome = SetnxLock(locks, NAME).acquire()
    assert outcome.acquired
    assert outcome.taken_over_from.token == dead.token
    assert outcome.taken_over_from.task_id == "dead"
    assert outcome.lock.fence > dead.fence
    before = locks.mget(NAME, RECORD)
    assert dead.release() == "lost"
    assert locks.mget(NAME, RECORD) == before
    locks.flushdb()
    assert SetnxLock(locks, NAME).acquire().lock.fence > outcome.lock.fence


@pytest.mark.parametrize(
    "text", ["99999999999999999999 5", "9999 5", "5 9999", "0 0", "-1 5", "maintenance", ""]
)
def test_foreign_words_about_permits_say_nothing(locks, text):
    """What no client of ours has written is written anew; nobody is refused, or asks for a million keys."""
    locks.set(f"{{{NAME}}}:permits", text, px=60_000)
    assert len(SetnxLock(locks, NAME).look(waiters=100).holders) == 0
    held = [SetnxLock(locks, NAME, limit=2).acquire().lock for _ in range(3)]
    assert [one and one.permit for one in held] == [0, 1, None]
    assert locks.get(f"{{{NAME}}}:permits") == "2 2"


def test_ensure_raises_when_the_lease_may_be_over(locks):
    """ensure() trusts this process's own clock, with a margin."""
    now = [0.0]
    held = SetnxLock(locks, NAME, lease=10, clock=lambda: now[0]).acquire().lock
    held.ensure()
    now[0] = 9.8
    held.ensure()
    now[0] = 9.91
    with pytest.raises(LockLost, match=r"lock\.foo is lost: its lease of 10 s ended"):
        held.ensure()
    assert held.remaining_s() == 0


@pytest.mark.parametrize(
    ("lose", "message", "answer"),
    [
        (lambda locks: age(locks, NAME, 30), "its lease of 30 s ended before it was renewed", "released"),
        (lambda locks: locks.delete(NAME), "vanished", "gone"),  # deleted or evicted
        (lambda locks: locks.flushdb(), "vanished", "lost"),  # its record too: nothing says whose it was
        (lambda locks: locks.delete(RECORD), "it is no longer ours in Redis", "lost"),
    ],
    ids=["expired", "vanished", "flushed", "without-record"],
)
def test_lock_that_is_lost_is_not_renewed_back_to_life(locks, lose, message, answer):
    """Past its deadline, without its key or without its record it is lost, though nobody has taken it."""
    held = SetnxLock(locks, NAME).acquire().lock
    lose(locks)
    before = locks.get(RECORD)
    with pytest.raises(LockLost, match=message):
        held.renew()
    assert locks.get(RECORD) == before
    assert held.release() == held.release() == answer


def test_renewal_repairs_what_a_classic_loser_overwrote(locks):
    """The recipe's loser overwrites the value; while our record is unexpired the lock is ours."""
    held = SetnxLock(locks, NAME, lease=600).acquire().lock
    locks.getset(NAME, int(time.time()) - 100)
    rival = SetnxLock(locks, NAME).acquire()
    assert not rival.acquired
    assert rival.holder.token == held.token
    held.renew()
    assert int(locks.get(NAME)) > time.time() + 5
    locks.getset(NAME, int(time.time()) - 100)
    assert held.release() == held.release() == "repaired"
    assert locks.get(NAME) is None


def test_wait_ends_when_the_lock_is_released(locks, monkeypatch):
    """acquire(wait=...) gets a lock that is freed meanwhile, long before its deadline, at its next try."""
    held, acquire, tries = SetnxLock(locks, NAME, lease=600).acquire().lock, verbs.acquire, []

    def acquire_once(*args: Any, **more: Any) -> Any:
        tries.append(args)
        if len(tries) == 4:
            held.release()
        return acquire(*args, **more)

    monkeypatch.setattr(verbs, "acquire", acquire_once)
    assert SetnxLock(locks, NAME).acquire(wait=60).acquired
    assert len(tries) == 4


def test_wait_gives_up_in_time(locks):
    """acquire(wait=...) answers held when its time is over, long before the lock is free."""
    SetnxLock(locks, NAME, lease=600).acquire()
    before = time.monotonic()
    outcome = SetnxLock(locks, NAME).acquire(wait=0.2)
    assert not outcome.acquired
    assert time.monotonic() - before >= 0.2
    assert outcome.remaining_s > 300


def test_with_holds_and_releases(locks):
    """The README's three lines; also when the body raises, whose own error comes through."""
    with SetnxLock(locks, "nightly-report", lease=60) as held:
        assert held.fence
        assert locks.exists("nightly-report")
    assert not locks.exists("nightly-report")
    with pytest.raises(ZeroDivisionError), SetnxLock(locks, NAME):
        raise ZeroDivisionError
    assert not locks.exists(NAME)


def test_with_gives_back_what_its_own_thread_has_taken(locks):
    """Two threads, one object: the first stands still past its lease, and takes nothing from the second."""
    lock = SetnxLock(locks, NAME, lease=60)
    overtaken, over = threading.Event(), threading.Event()

    def stand_still() -> None:
        with lock:
            age(locks, NAME, 61)
            overtaken.set()
            over.wait(60)

    first = threading.Thread(target=stand_still)
    first.start()
    assert overtaken.wait(60)
    with lock as held:
        over.set()
        first.join(60)
        assert lock.holder().token == held.token
        held.renew()
    assert lock.holder() is None


def test_with_warns_of_no_loss_if_another_has_the_lock_since_its_end(far, proxy, locks, caplog):
    """The reply of the release is lost, and another acquires the lock before it is sent again."""
    rival, sha = SetnxLock(locks, NAME), RELEASE.sha.encode()
    rival.acquire()
    assert rival.release() == "released"  # and the server knows the script
    with (
        proxy.fault("drop_reply", containing=sha),
        proxy.fault("delay", containing=sha, skip=1, meanwhile=rival.acquire),
        SetnxLock(far(sends_again=1), NAME),
    ):
        assert not rival.acquire().acquired
    assert rival.release() == "released"
    assert caplog.text == ""


def test_with_warns_of_a_loss_if_nobody_has_the_lock_since_its_end(far, proxy, locks, caplog):
    """The reply of the release is lost, and the server loses its data before it is sent again."""
    rival, sha = SetnxLock(locks, NAME), RELEASE.sha.encode()
    rival.acquire()
    assert rival.release() == "released"  # and the server knows the script
    with (
        proxy.fault("drop_reply", containing=sha),
        proxy.fault("delay", containing=sha, skip=1, meanwhile=locks.flushdb),
        SetnxLock(far(sends_again=1), NAME),
    ):
        pass
    assert "was lost before it was released" in caplog.text


def test_with_warns_of_a_lock_that_it_cannot_give_back(locks, caplog, monkeypatch):
    """A lost lock is reported, not hidden; a failing release never hides the body's own error."""
    with SetnxLock(locks, NAME):
        locks.delete(NAME)
    assert "was gone before it was released" in caplog.text
    lock = SetnxLock(locks, NAME)
    monkeypatch.setattr(held_module, "give_back", raising(LockUnavailable(NAME, "gone away")))
    with pytest.raises(ZeroDivisionError), lock:
        raise ZeroDivisionError
    assert "was not released" in caplog.text
    monkeypatch.undo()
    assert lock.release() == "released"


LEASES = (0, -1, timedelta(0), float("nan"), float("inf"))


@pytest.mark.parametrize("options", [*({"lease": lease} for lease in LEASES), {"retention": -31}])
def test_lock_for_no_time_is_refused(locks, options):
    """A lease of nothing, at once, and a key that would expire before its deadline and let a second in."""
    message = "more than 0 seconds" if "lease" in options else "must be 0 seconds or more"
    with pytest.raises(ValueError, match=message):
        SetnxLock(locks, NAME, **options)


def test_token_is_one_line(locks):
    """A record has a line for each of its fields."""
    with pytest.raises(ValueError, match="line break"):
        SetnxLock(locks, NAME).acquire(token="a\nb")


def test_interrupted_acquire_gives_back_what_it_may_hold(locks, monkeypatch):
    """A time limit that strikes between the server's grant and our reading it leaves no lock behind."""
    lock = SetnxLock(locks, NAME)
    acquire = verbs.acquire

    def interrupted(*args: Any, **more: Any) -> Any:
        assert acquire(*args, **more).word == "acquired"
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt):
        lock.acquire()
    assert not locks.exists(NAME)


def test_rest_keeps_the_lock_closed_then_opens_it(locks):
    """release(at_least_for=...) lets a lock rest until then, and its end is no crash; past it, it frees."""
    held = SetnxLock(locks, NAME).acquire().lock
    assert [held.release(at_least_for=500), held.release(at_least_for=500)] == ["resting", "resting"]
    outcome = SetnxLock(locks, NAME).acquire()
    assert not outcome.acquired
    assert outcome.holder.state == "resting"
    age(locks, NAME, 500)
    taken = SetnxLock(locks, NAME).acquire()
    assert taken.acquired
    assert taken.taken_over_from is None
    assert taken.lock.fence > held.fence
    assert taken.lock.release(at_least_for=1e-6) == "released"
