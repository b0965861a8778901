"""The events: sent while a worker's events are on, seen by `celery events`, and never in a task's way."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest
from celery import Celery
from celery.contrib.testing.worker import start_worker as worker_of_this_process
from celery.events.state import State

from celery_setnx.run import events
from tests.harness import wait_until
from tests.test_signals import TASK_OF, WORK, apart, scenes, watched

pytestmark = pytest.mark.slow

__all__ = ["apart", "scenes", "watched"]  # fixtures

EVENTS = {
    "skip": ["task-lock-conflict"],
    "retry": ["task-lock-conflict", "task-lock-conflict"],
    "wait": ["task-lock-conflict", "task-lock-waiting", "task-lock-woken"],
    "take_over": ["task-lock-taken-over"],
    "lose": ["task-lock-lost"],
    "lapse": ["task-lock-lapsed"],
    "supersede": ["task-lock-superseded"],
    "free": ["task-lock-freed"],
}
COMMON = {
    *[
        "type",
        "uuid",
        "name",
        "key",
        "about",
        "hostname",
        "pid",
        "clock",
        "timestamp",
        "utcoffset",
        "local_received",
    ]
}
FIELDS = {
    "task-lock-conflict": {"holder", "remaining_s", "policy"},
    "task-lock-waiting": {"holder", "place"},
    "task-lock-woken": {"waited_s"},
    "task-lock-taken-over": {"holder", "fence"},
    "task-lock-lapsed": {"marked_by"},
    "task-lock-superseded": {"superseded_by"},
    "task-lock-lost": {"fence", "reason"},
    "task-lock-freed": {"fence", "outcome", "held_s"},
}


class Ear:
    """Hears the events of an app, as `celery events` does."""

    def __init__(self, app: Any) -> None:
        self.heard: list[dict[str, Any]] = []
        self.state = State()
        self.app = app
        self._thread = threading.Thread(target=self._hear, daemon=True)

    def __enter__(self) -> Ear:
        self._thread.start()
        with self.app.events.default_dispatcher(hostname="probe@test") as dispatcher:

            def is_heard() -> bool:
                dispatcher.send("probe-sent")
                return bool(self.heard)

            wait_until(is_heard, "the receiver hears")
        return self

    def __exit__(self, *_exc: object) -> None:
        self._receiver.should_stop = True
        self._thread.join(10)

    def of(self, task_id: str) -> list[dict[str, Any]]:
        """The events of locks that were heard of a task, in order of their arrival."""
        return [e for e in self.heard if e.get("uuid") == task_id and e["type"].startswith("task-lock-")]

    def types(self, task_id: str) -> list[str]:
        return [event["type"] for event in self.of(task_id)]

    def _hear(self) -> None:
        with self.app.connection_for_read() as connection:
            self._receiver = self.app.events.Receiver(connection, handlers={"*": self._take})
            self._receiver.capture(limit=None, timeout=None, wakeup=False)

    def _take(self, event: dict[str, Any]) -> None:
        self.heard.append(dict(event))
        self.state.event(event)


@pytest.fixture
def ear(locks) -> Iterator[Ear]:
    """Hears what the workers of `tests.watchapp` say."""
    from tests import watchapp

    with Ear(watchapp.app) as ear:
        yield ear


@pytest.mark.parametrize(("scene", "expected"), EVENTS.items())
def test_events_are_sent_in_order_with_plain_values(watched, ear, scenes, scene, expected):
    """Under the worker's name, with the task's id, name and key, as JSON; conflicts name the holder.

    Whatever state an event of ours gave the task in between, one that succeeds is shown as succeeded.
    """
    call = getattr(scenes, scene)()
    # A call that retries may come back any number of times.
    wait_until(lambda: ear.types(call.id)[: len(expected)] == expected, f"{expected} of {scene}")
    for event in ear.of(call.id):
        assert event["type"] in expected
        assert set(event) == COMMON | FIELDS[event["type"]]
        about = (scenes.key, f"{watched.name}@test", TASK_OF.get(scene, WORK))
        assert (event["key"], event["hostname"], event["name"]) == about
        assert event["about"] == scenes.about
        if event["type"] == "task-lock-conflict":
            holder = event["holder"]
            assert (event["policy"], holder["worker"], holder["task"]) == (scene, *about[1:])
        json.dumps(event)
    if scene != "free":
        wait_until(lambda: ear.state.tasks[call.id].state == "SUCCESS", "SUCCESS")
        assert ear.state.tasks[call.id].name == event["name"]
    assert scene == "retry" or ear.types(call.id) == expected


def test_call_that_waits_in_line_is_shown_as_waiting(ear, scenes):
    """Until it is woken: Celery itself says nothing of a call that is parked."""
    holder, second = scenes.conflict("wait")
    wait_until(lambda: ear.types(second.id)[-1:] == ["task-lock-waiting"], "it waits")
    wait_until(lambda: ear.state.tasks[second.id].state == "LOCK-WAITING", "LOCK-WAITING")
    scenes.end(holder)
    wait_until(lambda: ear.state.tasks[second.id].state == "LOCK-WOKEN", "LOCK-WOKEN")
    scenes.end(second)


def test_task_that_is_revoked_by_kill_is_shown_as_freed(ear, scenes):
    """The parent frees its lock after Celery has said that it is revoked."""
    call = scenes.holder()
    call.revoke(terminate=True, signal="SIGKILL")
    wait_until(lambda: ear.types(call.id) == ["task-lock-freed"], "the freed lock")
    wait_until(lambda: ear.state.tasks[call.id].state == "LOCK-FREED", "LOCK-FREED")


def test_no_event_is_sent_while_events_are_off(start_worker, ear, apart):
    """From no process of the worker, whatever happens."""
    start_worker("tests.watchapp", queues="quiet")
    calls = [getattr(apart("quiet"), scene)() for scene in ("skip", "wait", "take_over", "lose", "free")]
    with Ear(ear.app):  # what was sent before its probe has arrived
        assert [ear.of(call.id) for call in calls] == [[]] * 5


def test_events_follow_the_remote_control(ear, apart):
    """On with `celery control enable_events`, off with `disable_events`, from the next delivery on.

    A worker of threads: of a lock that is lost the keeper's thread tells, by a connection of its own.
    """
    options = {"pool": "threads", "concurrency": 3, "queues": ["remote"]}
    quiet = {"perform_ping_check": False, "without_heartbeat": False}
    with worker_of_this_process(ear.app, **options, **quiet) as worker:
        heard = {}
        for command in (None, "enable_events", "disable_events"):
            if command:
                to = [worker.hostname]
                assert ear.app.control.broadcast(command, reply=True, destination=to, timeout=60, limit=1)
            call = apart("remote").skip()
            lost = apart("remote").lose() if command == "enable_events" else None
            with Ear(ear.app):
                if command == "enable_events":
                    wait_until(lambda call=call: ear.types(call.id), "the conflict")
                heard[command] = ear.types(call.id)
            if lost:
                wait_until(lambda lost=lost: ear.types(lost.id) == ["task-lock-lost"], "the loss")
    assert heard == {None: [], "enable_events": ["task-lock-conflict"], "disable_events": []}


def test_failing_broker_costs_one_attempt_and_one_line(caplog, monkeypatch):
    """Then nothing is tried for a while, and nothing raised."""
    monkeypatch.setattr(events, "_silent_until", 0.0)
    send = Mock(side_effect=ConnectionError("broker away"))
    fields = {"uuid": "id", "name": "task", "key": "t:{task}"}
    for _ in range(3):
        events._survive(send, "task-lock-conflict", fields)
    assert send.call_count == 1
    (line,) = caplog.messages
    assert "task[id]" in line
    assert "t:{task}" in line


def test_broker_that_is_away_is_not_waited_for(monkeypatch):
    """Celery's own way would try for ever."""
    monkeypatch.setattr(events, "_silent_until", 0.0)
    app = Celery("unheard", broker="redis://127.0.0.1:1/0", set_as_current=False)
    began = time.monotonic()
    events._send(app, "w@h", "task-lock-conflict", {"uuid": "id", "name": "task", "key": "k"})
    assert events._silent_until > began
