"""Pauses and whole workers: what they hold, what kills them, how they start and stop. None loses a call."""

from collections.abc import Iterator
from typing import Any

import pytest

from celery_setnx import is_skipped
from celery_setnx.terms import Whose
from tests.pausing import Operator


@pytest.fixture
def operator(stage) -> Iterator[Operator]:
    """An operator, who leaves nothing paused."""
    operator = Operator(stage.tasks.app)
    yield operator
    operator.resume_all()


@pytest.fixture
def work_with(stage, start_worker, operator):
    """Starts a worker of the test's own queue, which the operator asks."""

    def work_with(**options):
        options = {"concurrency": 1, "queues": stage.key, **options}
        operator.workers += (start_worker("tests.waitapp", **options),)
        return operator.workers[-1]

    return work_with


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_call_that_its_worker_has_goes_by_what_is_known_when_it_starts(stage, operator, work_with, pool):
    """One that waits there for a slot, or for its eta, is paused though it came before; and resumed."""
    worker = work_with(pool=pool, conf={"worker_prefetch_multiplier": 8})
    skips, decorated = stage.tasks.stopped, stage.tasks.app.tasks["tests.workerapp.decorated"]
    options = {"queue": stage.key, "singleton": {"on_conflict": "skip"}}

    def has_received() -> list[Any]:
        calls = [skips.apply_async([f"{stage.key}-{delay}"], countdown=delay, **options) for delay in (0, 4)]
        calls.append(decorated.apply_async([f"{stage.key}-d"], queue=stage.key))
        worker.has_read_all(stage.tasks.app)
        return calls

    scopes = [Whose(scope=task.name) for task in (skips, decorated)]
    running, calls = stage.held(queue=stage.key), has_received()
    for scope in scopes:
        operator.pause(scope)
    operator.is_known(decorated.name)
    stage.open()
    stage.has_run(running)
    assert all(is_skipped(call.get(timeout=60)) for call in calls)
    running, calls = stage.held(queue=stage.key), has_received()
    for scope in scopes:
        operator.resume(scope)
    operator.is_known(decorated.name, False)
    stage.open()
    stage.have_run([running, *calls], in_order=False)
