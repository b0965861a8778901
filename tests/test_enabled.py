"""`setnx_enabled = False`: every task runs plainly, and what stands in line drains."""

from typing import Any

import pytest
from celery import Celery

from celery_setnx import OptionError, SingletonTask
from celery_setnx.doctor.app import check
from celery_setnx.lock.names import line_names, mark_name
from celery_setnx.testing import pass_time
from tests.harness import Worker, wait_until

PLAIN = {"include": ["tests.waitapp"], "setnx_enabled": False}


@pytest.fixture
def plain(stage, start_worker) -> Worker:
    """A worker that guards nothing, on the test's own queue."""
    return start_worker(queues=stage.key, conf=PLAIN)


def test_calls_of_one_key_run_side_by_side_and_that_is_said_once(stage, plain, journal):
    """Nobody asks for a lock, and none is left."""
    calls = [stage.held(queue=stage.key) for _ in range(2)]
    assert [entry["key"] for entry in journal.entries(what="start")] == [None, None]
    stage.open(2)
    for call in calls:
        call.get(timeout=60)
    assert plain.log_text().count("setnx_enabled is False: every task runs without its lock") == 1


def test_mark_of_a_guarded_publisher_is_freed_when_its_call_comes(stage, plain, locks):
    """Else the publisher would send no other for its queue lease."""
    pending = stage.tasks.pending
    call = pending.apply_async([stage.key], queue=stage.key)
    wait_until(lambda: not locks.exists(mark_name(pending.lock_key(stage.key))), "the mark is freed")
    call.get(timeout=60)
    assert pending.apply_async([stage.key], queue=stage.key).id != call.id


def test_line_drains_though_nothing_is_guarded(stage, start_worker, locks):
    """Workers are started anew without guards while a call runs and another waits: that one runs soon."""
    guarded = start_worker(queues=stage.key, conf={"include": ["tests.waitapp"]})
    stage.held(queue=stage.key)
    waiting = stage.parked(queue=stage.key)
    guarded.kill()
    start_worker(queues=stage.key, conf=PLAIN)
    pass_time(600, stage.task, stage.key)
    assert waiting.get(timeout=60)
    key = stage.task.lock_key(stage.key)
    wait_until(lambda: not locks.exists(*line_names(key)), "the line is empty")


@pytest.mark.parametrize(("value", "is_told"), [(False, True), (True, False)])
def test_check_says_that_nothing_is_guarded(value, is_told):
    """Before somebody forgets it."""
    app = Celery("plain", set_as_current=False)
    app.conf.update(setnx_url="redis://nowhere", setnx_enabled=value)
    told = [found for found in check(app) if found.subject == "enabled"]
    assert bool(told) == is_told


def test_publisher_that_guards_nothing_asks_no_server():
    """A mark would be taken by nobody."""
    app = Celery("plain", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url="redis://nowhere.invalid", setnx_enabled=False)

    def once() -> None: ...

    options: dict[str, Any] = {"key": (), "dedupe": "until_started"}
    task = app.task(base=SingletonTask, shared=False, singleton=options)(once)
    assert task.delay().id != task.delay().id


def test_flag_is_a_flag():
    """A text that means something would count as true."""
    app = Celery("plain", set_as_current=False)
    app.conf.update(setnx_url="redis://nowhere", setnx_enabled="false")

    def once() -> None: ...

    task = app.task(base=SingletonTask, shared=False)(once)
    with pytest.raises(OptionError, match="setnx_enabled"):
        task.delay()
