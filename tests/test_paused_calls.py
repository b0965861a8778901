"""Calls in a pause, or on other live terms, in real workers: what each policy makes of it; none is lost."""

import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from celery_setnx import AlreadyRunning, is_skipped
from celery_setnx.terms import NewTerm, Whose, end_term, live_terms, set_term
from tests.harness import Worker, wait_until
from tests.stage import Stage


class Operator:
    """Somebody who pauses and resumes one key, and whole tasks."""

    def __init__(self, stage: Stage, worker: Worker) -> None:
        self._app, self._worker, self._key = stage.tasks.app, worker, stage.key

    def of(self, task: Any) -> Whose:
        """The test's own key of a task."""
        return Whose(key=task.lock_key(self._key))

    def pause(self, whose: Whose, for_s: float = 600.0) -> None:
        """Pause it; of a scope, until the worker knows."""
        set_term(self._app, whose, NewTerm("pause", for_s, because="partner down", by="ana"))
        if whose.scope:
            wait_until(lambda: whose.scope in self._known(), "the worker knows")

    def resume(self, whose: Whose) -> None:
        """End the pause."""
        end_term(self._app, whose, "pause", by="ana")
        if whose.scope:
            wait_until(lambda: whose.scope not in self._known(), "the worker knows")

    def _known(self) -> list[str]:
        node = self._worker.node
        replies = self._app.control.broadcast(
            "setnx_terms", reply=True, destination=[node], limit=1, timeout=30
        )
        return [scope for reply in replies for scope in reply[node]["scopes"]]


@pytest.fixture
def operator(stage, worker) -> Iterator[Operator]:
    """An operator, who leaves nothing paused."""
    yield Operator(stage, worker)
    for whose in live_terms(stage.tasks.app):
        Operator(stage, worker).resume(whose)


@pytest.fixture
def paused(stage, operator) -> Callable[[Any], Whose]:
    """Pause the test's own key of a task."""

    def pause(task: Any) -> Whose:
        whose = operator.of(task)
        operator.pause(whose)
        return whose

    return pause


@pytest.mark.parametrize("whose", ["key", "task"])
def test_paused_calls_run_in_their_order_once_they_are_resumed(stage, operator, whose):
    """None is lost, and none has started before."""
    task = stage.tasks.work if whose == "key" else stage.tasks.stopped
    what = operator.of(task) if whose == "key" else Whose(scope=task.name)
    operator.pause(what)
    calls = [stage.parked(task=task) for _ in range(3)]
    assert stage.starts() == []
    operator.resume(what)
    stage.have_run(calls)


def test_pause_stops_no_body_and_lets_none_follow(stage, paused, operator):
    """The one that runs ends; the next waits on."""
    first, second = stage.held(), stage.parked()
    whose = paused(stage.task)
    stage.open()
    stage.has_run(first)
    third = stage.parked()
    assert stage.starts() == [first.id]
    operator.resume(whose)
    stage.have_run([second, third])


def test_body_that_began_before_a_pause_of_its_task_wakes_nobody(stage, operator, journal):
    """Its release heeds what was set while it ran: for a limit, more would run than that."""
    task, began = stage.tasks.stopped, time.monotonic()
    first, second = stage.held(task=task), stage.parked(task=task)
    operator.pause(Whose(scope=task.name))
    wait_until(lambda: time.monotonic() > began + 4, "what its delivery has brought is old")
    stage.open()
    stage.has_run(first)
    operator.resume(Whose(scope=task.name))
    stage.has_run(second)
    assert len(journal.entries(what="waiting", task_id=second.id)) == 1


def test_skipped_call_says_why(stage, paused):
    """on_conflict="skip": a pause is a conflict like any other."""
    paused(stage.task)
    result = stage.task.apply_async([stage.key], singleton={"on_conflict": "skip"}).get(timeout=60)
    assert is_skipped(result)
    assert {name: result["holder"][name] for name in ("state", "because", "by")} == {
        "state": "paused", "because": "partner down", "by": "ana"
    }  # fmt: skip


def test_refused_call_says_why(stage, paused):
    """on_conflict="raise": the message names who has paused it, why, and until when."""
    paused(stage.task)
    with pytest.raises(AlreadyRunning) as told:
        stage.task.apply_async([stage.key], singleton={"on_conflict": "raise"}).get(timeout=60)
    assert "may not start yet" in str(told.value)
    assert "held back by a pause until" in str(told.value)
    assert "by ana: partner down" in str(told.value)


def test_call_that_comes_back_runs_after_the_pause(stage, paused, operator, journal):
    """on_conflict="retry": it asks at its own pace, and not only when the pause was to end."""
    whose = paused(stage.task)
    result = stage.task.apply_async([stage.key], singleton={"on_conflict": "retry", "retry_delay_max": 0.3})
    journal.wait_for("postrun", count=2, task_id=result.id)
    operator.resume(whose)
    stage.has_run(result)


def test_one_waits_where_all_would_be_skipped(stage, paused, operator):
    """A daily job under `auto`: the pause costs no day, and the day has one run."""
    daily = stage.tasks.daily
    whose = paused(daily)
    first = stage.parked(task=daily)
    others = [daily.delay(stage.key) for _ in range(2)]
    assert all(is_skipped(other.get(timeout=60)) for other in others)
    operator.resume(whose)
    stage.has_run(first)
    assert stage.starts() == [first.id]


def retried_in_a_pause(stage, operator, journal, result, task) -> None:
    """A call that runs sends its retry in a pause, which it meets, and which ends then."""
    whose = operator.of(task)
    operator.pause(whose)
    stage.open(2)
    journal.wait_for("postrun", count=2, task_id=result.id)
    operator.resume(whose)


def test_retry_in_a_pause_is_not_skipped(stage, operator, journal):
    """Its call has begun: on_conflict="skip" is about new ones."""
    task = stage.tasks.persistent
    result = stage.held(task=task)
    retried_in_a_pause(stage, operator, journal, result, task)
    assert result.get(timeout=60) == 1


def test_retry_behind_others_in_a_pause_is_not_skipped(stage, operator, journal):
    """Under `auto` one call of the key waits, and others are skipped: but none that has begun."""
    task = stage.tasks.persistent
    result = stage.held(task=task, singleton={"on_conflict": "auto"})
    other = stage.parked(task=task, singleton={"on_conflict": "wait"})
    retried_in_a_pause(stage, operator, journal, result, task)
    assert result.get(timeout=60) == 1
    assert other.get(timeout=60) == 1


def test_lock_that_is_held_for_a_retry_is_its_own_after_the_pause(stage, operator, journal):
    """hold_on_retry: nobody else has the key meanwhile."""
    task = stage.tasks.patient
    result = stage.held(task=task)
    retried_in_a_pause(stage, operator, journal, result, task)
    assert result.get(timeout=60) == [result.id, 1]
    first, second = journal.wait_for("start", count=2, task_id=result.id)
    assert first["fence"] == second["fence"]


def test_body_that_is_told_not_now_holds_back_its_key(stage, journal):
    """No call of the key starts within it, though one waits and another comes; another key goes on."""
    task = stage.tasks.answered
    first = journal.reached("start", task.apply_async([stage.key, stage.gate, 3]))
    second = stage.parked(task=task)
    stage.open()
    assert first.get(timeout=60) == 3
    third = task.delay(stage.key)
    assert task.delay(f"{stage.key}-other").get(timeout=60) == 0
    for result in (second, third):
        result.get(timeout=60)
    starts = {entry["task_id"]: entry["fence"] for entry in journal.entries(what="start")}
    ends = {entry["task_id"]: entry["at"] for entry in journal.entries(what="end")}
    assert ends[first.id] + 3 <= min(starts[second.id], starts[third.id]) / 1e6
