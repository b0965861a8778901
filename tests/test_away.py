"""A lock server that does not answer costs who publishes one wait, and no more for some seconds."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery

from celery_setnx import LockUnavailable, SingletonTask
from celery_setnx.call import away
from celery_setnx.lock.marks import Mark
from tests.conftest import LOCK_DB

TIMEOUT_S = 0.25


@pytest.fixture
def work(proxy, locks) -> Any:
    """A deduplicated task whose lock server is behind the proxy, and does not answer for long."""
    app = Celery("away", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=proxy.url(LOCK_DB), setnx_prefix="t", setnx_timeout=TIMEOUT_S)

    @app.task(base=SingletonTask, shared=False, singleton={"key": "a", "dedupe": "until_started"})
    def work(a: int) -> int:
        return a

    return work


def test_lock_server_that_hangs_is_waited_for_once(work, proxy, caplog):
    """The first publisher has waited for both attempts; the next ones, a fan-out too, do not even ask."""
    with proxy.fault("stall", times=99) as stall:
        assert not work.delay(1).deduplicated
        asked = stall.struck
        assert [work.delay(1).deduplicated, work.delay(2).deduplicated] == [False, False]
        assert work.fan_out((n,) for n in range(50)).accepted == 50
        assert stall.struck == asked
    assert caplog.text.count("is published without a check for duplicates; its run takes the lock") == 3
    assert caplog.text.count("Timeout reading from socket; it is asked again within 5 s.") == 3


def test_lock_server_that_answers_again_is_asked_for_each_call(work, proxy, monkeypatch):
    """When the pause is over the next publisher asks, and its answer ends the outage."""
    monkeypatch.setattr(away, "PAUSE_S", 0.0)
    with proxy.fault("stall", times=99):
        work.delay(1)
    monkeypatch.setattr(away, "PAUSE_S", 60.0)
    first = work.delay(2)
    assert (first.deduplicated, work.delay(2).id) == (False, first.id)


class _Client:
    """A client of a server, or of a cluster of two nodes, of which some do not answer."""

    def __init__(self, *silent: str) -> None:
        self.silent = silent
        self.asked: list[str] = []


class _Cluster(_Client):
    def keyslot(self, key: str) -> int:
        raise AssertionError("nobody asks for it")

    def get_node_from_key(self, key: str) -> Any:
        return SimpleNamespace(name=key[0])


@pytest.fixture
def clock(monkeypatch) -> Callable[[float], None]:
    """A clock of the module's own: a silent server takes a second. Called, it moves on."""
    now = [100.0]

    def free_all(client: _Client, marks: list[Mark]) -> LockUnavailable | None:
        client.asked += [mark.key for mark in marks]
        silent = [mark for mark in marks if mark.key[0] in client.silent]
        now[0] += len(silent)
        return LockUnavailable(silent[0].key, "TimeoutError: Timeout") if silent else None

    monkeypatch.setattr(away, "free_all", free_all)
    monkeypatch.setattr(away, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def move(seconds: float) -> None:
        now[0] += seconds

    return move


def test_one_publisher_asks_for_all_when_the_pause_is_over(clock, monkeypatch):
    """The others would wait beside it."""
    client = _Client("a")
    away.free_unless_away(client, [Mark("a1", "id")])
    clock(away.PAUSE_S)
    asking, free_all = threading.Event(), away.free_all

    def others_come_meanwhile(client: Any, marks: Any) -> Any:
        if not asking.is_set():
            asking.set()
            assert isinstance(away.free_unless_away(client, [Mark("a3", "id")]), LockUnavailable)
        return free_all(client, marks)

    monkeypatch.setattr(away, "free_all", others_come_meanwhile)
    away.free_unless_away(client, [Mark("a2", "id")])
    assert client.asked == ["a1", "a2"]


def test_node_that_does_not_answer_costs_other_nodes_nothing(clock):
    """Of a cluster; and each error names its own key."""
    client = _Cluster("a")
    away.free_unless_away(client, [Mark("a1", "id")])
    error = away.free_unless_away(client, [Mark("a2", "id"), Mark("b1", "id")])
    assert client.asked == ["a1", "b1"]
    assert error is not None
    assert error.key == "a2"


def test_failure_that_took_no_time_is_no_reason_to_leave_a_server_alone(clock, monkeypatch):
    """A refused connection: the next one asks."""
    client = _Client()
    refused = LockUnavailable("a1", "ConnectionError: refused")
    monkeypatch.setattr(away, "free_all", lambda client, marks: client.asked.append(marks[0].key) or refused)
    for key in ("a1", "a2"):
        assert away.free_unless_away(client, [Mark(key, "id")]) is refused
    assert client.asked == ["a1", "a2"]
