"""Pauses and whole workers: what they hold, what kills them, how they start and stop. None loses a call."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from celery_setnx import is_skipped, superseded_by
from celery_setnx.call.wake import look_within
from celery_setnx.lock.names import mark_name
from celery_setnx.terms import Whose
from tests.harness import due_set, server_us, wait_until
from tests.pausing import Operator
from tests.stage import SOON


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


def key_of(task: Any, stage: Any) -> Whose:
    """The test's own key of a task."""
    return Whose(key=task.lock_key(stage.key))


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


def test_worker_that_starts_in_a_pause_has_read_it_before_its_first_call(stage, operator, work_with):
    """And ends by a warm shutdown in it, with calls that wait and one that comes back: none is lost."""
    task = stage.tasks.stopped
    operator.pause(Whose(scope=task.name))
    calls = [task.apply_async([stage.key], queue=stage.key) for _ in range(3)]
    again = {"on_conflict": "retry", "retry_delay": 2, "retry_delay_max": 2}
    calls.append(task.apply_async([f"{stage.key}-again"], queue=stage.key, singleton=again))
    worker = work_with()
    for call in calls:
        stage.journal.reached("postrun", call)
    assert stage.starts() == []
    worker.process.terminate()
    assert worker.process.wait(60) == 0
    work_with()
    operator.resume(Whose(scope=task.name))
    stage.have_run(calls[:3])
    stage.has_run(calls[3])


def test_turn_that_a_killed_worker_cannot_take_is_kept_through_the_pause(stage, operator, work_with):
    """Its lock was handed to it before the pause; another worker that has it in the pause is killed, too."""
    lasting, aside = work_with(concurrency=2), f"{stage.key}-aside"
    parked_by = work_with(queues=aside)
    running = stage.held(queue=stage.key)
    calls = [stage.parked(queue=queue) for queue in (aside, stage.key)]
    parked_by.has_read_all(stage.tasks.app)
    parked_by.kill()
    stage.open()
    stage.has_run(running)
    whose = key_of(stage.task, stage)
    operator.pause(whose)
    parked_by = work_with(queues=aside)
    stage.journal.reached("postrun", calls[0], 2)
    parked_by.kill()
    lasting.take_from(stage.tasks.app, aside)
    assert stage.starts() == [running.id]
    operator.resume(whose)
    stage.have_run(calls)


def test_mark_of_a_call_that_waits_in_a_pause_lasts_as_long_as_it_does(stage, operator, locks):
    """Its courier sees to that: an equal call is a duplicate, until the first one starts."""
    task, whose = stage.tasks.pending, key_of(stage.tasks.pending, stage)
    operator.pause(whose)
    first = stage.parked(task=task, singleton={"retry_delay": 0.1, **SOON})
    locks.pexpire(mark_name(whose.key), 5000)
    wait_until(lambda: locks.pttl(mark_name(whose.key)) > 5000, "a courier has come")
    second = task.delay(stage.key)
    assert (second.deduplicated, second.id) == (True, first.id)
    operator.resume(whose)
    stage.has_run(first)
    stage.has_run(task.delay(stage.key))


def test_change_is_not_lost_if_a_mark_ends_in_the_pause(stage, operator, locks):
    """A `queue_lease` that is shorter than a courier's way: an equal call is accepted, and runs as well."""
    task, whose = stage.tasks.pending, key_of(stage.tasks.pending, stage)
    operator.pause(whose)
    first = stage.parked(task=task)
    locks.pexpire(mark_name(whose.key), 1)
    wait_until(lambda: not locks.exists(mark_name(whose.key)), "no mark")
    second = stage.parked(task=task)
    assert not second.deduplicated
    operator.resume(whose)
    stage.have_run([first, second])


def test_newest_call_of_a_pause_runs_alone(stage, operator):
    """The older ones end in the pause."""
    from tests import newestapp

    whose = key_of(newestapp.save, stage)
    operator.pause(whose)
    calls = [stage.parked(version, task=newestapp.save) for version in (1, 2, 3)]
    for older, newer in pairwise(calls):
        assert superseded_by(older.get(timeout=60)) == newer.id
    assert stage.starts() == []
    operator.resume(whose)
    stage.has_run(calls[-1])
    assert stage.starts() == [calls[-1].id]


def test_task_that_is_resumed_while_no_worker_runs_is_looked_at_by_the_next(locks):
    """Its lines are due at once: no worker has seen the change."""
    from tests import cliapp

    app, task = cliapp.app, cliapp.sync
    whose, key = Whose(scope=task.name), task.lock_key(7)
    Operator(app).pause(whose)
    look_within(app, task.name, key, 30.0)
    Operator(app).resume(whose)
    assert locks.zscore(due_set(app, task.name), key) <= server_us(locks)
