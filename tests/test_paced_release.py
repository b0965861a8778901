"""What follows on the release of a lock whose starts are paced: the line goes on, if anybody waits in it."""

from typing import Any

import pytest
from celery import Celery

from celery_setnx import SetnxLock
from celery_setnx.call import wake
from celery_setnx.call.wake import let_others_start, lines_of
from celery_setnx.lock.line import Place, park
from celery_setnx.lock.names import key_name
from celery_setnx.lock.record import ORIGINAL, Terms

KEY = key_name("t", "t", "")
TERMS = Terms(3, 10, 60.0)


@pytest.fixture
def app(server) -> Celery:
    """An app whose locks are on the server of the tests."""
    app = Celery("paced", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t")
    return app


@pytest.fixture
def woken(monkeypatch) -> list[Any]:
    """Who was woken, in order; None for a line that was served in vain."""
    woken: list[Any] = []
    monkeypatch.setattr(wake, "wake", lambda app, heir, key: woken.append(heir and heir.task_id))
    return woken


def paced_lock(locks: Any) -> SetnxLock:
    """The lock of a task of which three may run at a time, and ten start in a minute."""
    return SetnxLock(locks, KEY, lease=60, line=True, limit=3, rate=(10, 60))


def test_release_with_nobody_in_line_serves_none(app, locks, woken):
    """Though another permit is held: that costs no script more, and leaves no line to be swept."""
    assert paced_lock(locks).acquire().acquired
    lock = paced_lock(locks)
    held = lock.acquire().lock
    assert held is not None
    assert held.release() == "released"
    let_others_start(app, "t", lock)
    assert woken == []
    assert not locks.keys(f"{lines_of(app)}*")


def test_release_with_somebody_in_line_serves_it(app, locks, woken):
    """Who has come since the acquisition, too."""
    lock = paced_lock(locks)
    held = lock.acquire().lock
    assert held is not None
    park(locks, Place(KEY, "first", 0, 600, terms=TERMS), copy=ORIGINAL, since=10.0, call="c")
    assert held.release() == "released"
    let_others_start(app, "t", lock)
    assert woken[0] == "first"
