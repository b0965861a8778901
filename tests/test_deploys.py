"""Calls that wait in line while what they are calls of changes. Real workers.

Each waits in a queue whose worker is killed, and started again with the tasks of `tests.laterapp`.
"""

import json
from collections.abc import Callable

import pytest

from celery_setnx.lock.names import line_names
from celery_setnx.testing import pass_time
from tests.harness import Worker, wait_until


@pytest.fixture
def deploy(stage, start_worker) -> Callable[..., Worker]:
    """Kill the worker of the queue that is named after the key, and start another, maybe with what it had."""
    before = start_worker("tests.waitapp", queues=stage.key)

    def deploy(*, redelivers: bool = False) -> Worker:
        before.has_read_all(stage.tasks.app)
        before.kill()
        if redelivers:
            stage.redeliver()
        return start_worker("tests.laterapp", queues=stage.key)

    return deploy


def test_waiting_calls_of_a_task_that_is_guarded_no_more_run_once(stage, journal, locks, deploy):
    """Without a lock, each once: whoever is woken waits no more, and the next one is woken.

    No time passes by hand: another worker of this host sees the death, and a call may have its turn by then.
    """
    stage.held(queue=stage.key)
    results = stage.line_up(5, queue=stage.key)
    deploy()
    stage.have_run(results, in_order=False)
    assert all(entry["key"] is None for entry in journal.entries(what="start")[1:])
    line = line_names(stage.tasks.work.lock_key(stage.key))
    wait_until(lambda: not locks.exists(*line), "nobody waits")


def test_waiting_call_whose_scope_is_no_more_its_tasks_runs(stage, deploy):
    """Whoever serves its line cannot tell that it belongs there; its courier, from the broker, is trusted."""
    options = {"queue": stage.key, "singleton": {"scope": "before", "lease": 4}}
    stage.held(**options)
    second = stage.parked("x", **options)
    deploy(redelivers=True)
    stage.has_run(second)


def test_late_copy_of_a_call_that_was_let_go_is_dropped(stage, deploy):
    """A task that is not guarded any more is not run again by a second wake-up."""
    stage.held(queue=stage.key)
    second = stage.parked("x", queue=stage.key)
    wake_again = stage.waker(stage.tasks.work, second)
    later = deploy()
    pass_time(600, stage.tasks.work, stage.key)
    stage.has_run(second)
    wake_again()
    third = stage.tasks.work.apply_async([stage.key, "y"], queue=stage.key)
    assert third.get(timeout=60) == [stage.key, "y", 0]
    later.wait_for_log(f"[{second.id}] leaves its line")
    assert stage.starts().count(second.id) == 1


def test_first_message_that_comes_again_when_its_call_was_let_go_is_dropped(stage, journal, deploy):
    """Its worker died before it acknowledged it: a plain task is not run again by that either."""
    broker = journal._client
    stage.held(queue=stage.key)
    second = stage.tasks.work.apply_async([stage.key, "x"], queue="aside")
    message = json.loads(broker.rpop("aside"))
    message["properties"]["delivery_info"]["routing_key"] = stage.key
    broker.lpush(stage.key, json.dumps(message))
    journal.reached("waiting", second)
    deploy()
    pass_time(600, stage.tasks.work, stage.key)
    stage.has_run(second)
    message["headers"]["redelivered"] = message["properties"]["delivery_info"]["redelivered"] = True
    broker.lpush(stage.key, json.dumps(message))
    third = stage.tasks.work.apply_async([stage.key, "y"], queue=stage.key)
    assert third.get(timeout=60) == [stage.key, "y", 0]
    stage.tasks.work.apply_async([stage.key, "z"], queue=stage.key).get(timeout=60)
    assert stage.starts().count(second.id) == 1


def test_waiting_call_of_a_task_that_is_gone_does_not_stop_its_line(stage, deploy, locks):
    """It is thrown away, as any message of an unknown task, and waits no more; the next one runs."""
    options = {"queue": stage.key, "singleton": {"scope": "shared"}}
    stage.held(task=stage.tasks.failing, **options)
    stage.parked(task=stage.tasks.failing, **options)
    last = stage.parked(task=stage.tasks.silent, ignore_result=False, **options)
    later = deploy(redelivers=True)  # the courier: nobody else need send its call
    pass_time(600, stage.tasks.app)
    stage.has_run(last)
    later.wait_for_log("Received unregistered task of type 'tests.waitapp.failing'")
    key = stage.tasks.silent.lock_key(stage.key).replace(stage.tasks.silent.name, "shared")
    wait_until(lambda: not locks.exists(*line_names(key)), "nobody waits")
    assert stage.starts()[1:] == [last.id]


def test_waiting_call_whose_arguments_no_longer_fit_fails_and_the_next_runs(stage, deploy):
    """As any call of a function that does not take them: with a TypeError, where its body would run."""
    silent = stage.tasks.silent
    stage.held(task=silent, queue=stage.key)
    second = stage.parked("x", task=stage.tasks.silent, queue=stage.key, ignore_result=False)
    third = stage.parked(task=stage.tasks.silent, queue=stage.key, ignore_result=False)
    deploy()
    pass_time(600, silent, stage.key)
    with pytest.raises(TypeError):
        second.get(timeout=60)
    assert third.get(timeout=60) == stage.key
