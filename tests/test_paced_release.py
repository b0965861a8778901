"""What follows on the release of a lock whose starts are paced: the line goes on, if anybody waits in it."""

from typing import Any

import pytest
from celery import Celery

from celery_setnx import SetnxLock
from celery_setnx.call import wake
from celery_setnx.call.wake import give_turns, lines_of
from celery_setnx.lock.line import LineEntry, leave, park
from celery_setnx.lock.names import key_name, starts_name
from celery_setnx.lock.record import ORIGINAL, Terms
from celery_setnx.lock.verbs import serve
from tests.harness import due_set, server_us

KEY = key_name("t", "t", "")


@pytest.fixture
def app(server) -> Celery:
    """An app whose locks are on the server of the tests, and whose lines no worker of other tests sweeps."""
    app = Celery("paced", broker="memory://paced", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t")
    return app


@pytest.fixture
def woken(monkeypatch) -> list[Any]:
    """Who was woken, in order."""
    woken: list[Any] = []
    monkeypatch.setattr(wake, "wake", lambda app, heir, key: woken.append(heir and heir.task_id))
    return woken


def paced_lock(locks: Any, starts: int) -> SetnxLock:
    """The lock of a task of which three may run at a time, and so many start in a minute."""
    return SetnxLock(locks, KEY, lease=60, line=True, limit=3, rate=(starts, 60))


def ends(app: Celery, locks: Any, *waiting: str, starts: int = 10) -> None:
    """Two calls run, and one ends; who waits has come since it began."""
    assert paced_lock(locks, starts).acquire().acquired
    lock = paced_lock(locks, starts)
    held = lock.acquire().lock
    assert held is not None
    for place, task_id in enumerate(waiting):
        there = LineEntry(KEY, task_id, 0, 600, terms=Terms(3, starts, 60.0))
        park(locks, there, copy=ORIGINAL, since=10.0 + place, call="c")
    assert held.release() == "released"
    give_turns(app, "t", lock)


def test_release_with_nobody_in_line_hands_nothing_over(app, locks, woken):
    """Though another permit is held: that costs no script more, and leaves no line to be swept."""
    ends(app, locks)
    assert woken == []
    assert not locks.keys(f"{lines_of(app)}*")


def test_release_hands_over_while_starts_are_left(app, locks, woken):
    """In the same step, to the first; and no line is noted for that."""
    ends(app, locks, "first", "second", starts=3)
    assert woken == ["first"]
    assert paced_lock(locks, 3).holders()[1].task_id == "first"
    assert not locks.keys(f"{lines_of(app)}*")


def test_release_notes_when_the_next_may_start(app, locks, woken):
    """Where no start is left, or those that are left are those of calls which were woken."""
    ends(app, locks, "first", "second", starts=2)
    assert woken == []
    due_s = (locks.zscore(due_set(app, "t"), KEY) - server_us(locks)) / 1e6
    assert 55 < due_s <= 60


def test_release_that_is_sent_again_has_the_line_looked_at(locks):
    """Its reply was lost: whether it had handed the permit over, or when one more may start."""
    lock = paced_lock(locks, 1)
    held = lock.acquire().lock
    assert held is not None
    park(locks, LineEntry(KEY, "first", 0, 600, terms=Terms(3, 1, 60.0)), copy=ORIGINAL, since=10.0, call="c")
    assert [held.release(), held.release()] == ["released"] * 2
    first, again = lock.turns
    assert 55 < first.look_in_s <= 60
    assert again.look_in_s == 0


def test_call_that_leaves_again_has_the_line_looked_at(locks):
    """Its worker asks twice when it is revoked, or the reply was lost: no start was left for the next."""
    terms = Terms(3, 1, 60.0)
    first, second = (LineEntry(KEY, task_id, 0, 600, terms=terms) for task_id in ("first", "second"))
    for place in (first, second):
        park(locks, place, copy=ORIGINAL, since=10.0, call="c")
    lock = paced_lock(locks, 1)
    assert serve(lock, knows_terms=True).heir.task_id == "first"
    start_us = int(server_us(locks))
    locks.zadd(starts_name(KEY), {f"{start_us}#1#1": start_us})  # as of one that was woken late
    locks.pexpire(starts_name(KEY), 60_000)
    once, again = (leave(locks, first, copy="c1").turn for _ in range(2))
    assert 55 < once.look_in_s <= 60
    assert again.look_in_s == 0


def test_permit_that_was_handed_over_counts_as_a_start(app, locks, woken):
    """Until its call has come: so the next release hands nothing over."""
    third = paced_lock(locks, 4)
    held = third.acquire().lock
    assert held is not None
    ends(app, locks, "first", "second", starts=4)
    assert woken == ["first"]
    held.release()
    give_turns(app, "t", third)
    assert woken == ["first"]
    assert locks.zscore(due_set(app, "t"), KEY)
