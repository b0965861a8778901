"""Threads of ours: they outlive every exception, and one that has died is started anew."""

import asyncio
import threading
from typing import Any

import pytest

from celery_setnx import threads
from celery_setnx.threads import Lasting
from tests.harness import raising, wait_until

KINDS = [
    ZeroDivisionError,
    SystemExit,
    KeyboardInterrupt,
    MemoryError,
    RecursionError,
    asyncio.CancelledError,
]


@pytest.fixture
def steps(monkeypatch) -> Any:
    """What a thread does, step by step, in its own time: an exception is raised, True goes on."""
    monkeypatch.setattr(threads, "_PAUSE_S", 0.001)
    taken: list[str] = []
    todo: list[Any] = []

    def step() -> bool:
        if not todo:
            threading.Event().wait(0.001)
            return True
        taken.append("step")
        found = todo.pop(0)
        if isinstance(found, BaseException):
            raise found
        return bool(found)

    step.todo, step.taken = todo, taken  # type: ignore[attr-defined]
    lasting = Lasting("celery_setnx-test", step)
    lasting.steps = step  # type: ignore[attr-defined]
    yield lasting
    todo.append(False)
    wait_until(lambda: not lasting.runs, "it ends")


def do(lasting: Any, *steps: Any) -> None:
    """Let it take these steps."""
    lasting.steps.todo += steps
    wait_until(lambda: not lasting.steps.todo, "they are taken")


@pytest.mark.parametrize("kind", KINDS)
def test_thread_outlives_what_its_step_raises(steps, kind, caplog):
    """Whoever has raised it, and again and again."""
    steps.ensure()
    do(steps, *[kind("once more") for _ in range(3)], True)
    assert steps.runs
    assert caplog.text.count("celery_setnx-test hit an error and continues") == 3


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_thread_that_was_killed_is_started_anew(steps, monkeypatch, caplog):
    """As a greenlet may be; that is said."""
    steps.ensure()
    with monkeypatch.context() as patch:
        patch.setattr(threads, "is_killed", lambda error: True)
        do(steps, ZeroDivisionError())
        wait_until(lambda: not steps.runs, "it has died")
    steps.ensure()
    do(steps, True)
    assert "celery_setnx-test had died and is restarted" in caplog.text


def test_thread_that_cannot_be_started_is_started_later(steps, monkeypatch):
    """Whoever needs it now is told."""
    with monkeypatch.context() as patch:
        patch.setattr(threads, "_start_thread", raising(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError):
            steps.ensure()
    steps.ensure()
    do(steps, True)


def test_thread_that_was_told_to_end_has_not_died(steps, caplog):
    """It may be started again without a word."""
    steps.ensure()
    do(steps, False)
    wait_until(lambda: not steps.runs, "it ends")
    steps.ensure()
    do(steps, True)
    assert not caplog.records


def test_thread_is_one_however_many_ask_for_it(steps):
    """At once, too."""
    many = [threading.Thread(target=steps.ensure) for _ in range(20)]
    for thread in many:
        thread.start()
    for thread in many:
        thread.join()
    # One that a test before has killed may be writing its last words; a second one of this test would stay.
    name = "celery_setnx-test"
    wait_until(lambda: sum(thread.name == name for thread in threading.enumerate()) == 1, "there is one")
