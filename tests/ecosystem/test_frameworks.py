"""flask's task class, pydantic tasks and celery-progress, beside the lock."""

from collections.abc import Iterator
from typing import Any

import pytest
from celery_progress.backend import Progress

from celery_setnx import is_skipped
from tests.harness import wait_until

APP = "tests.ecosystem.frameworkapp"


@pytest.fixture(scope="module")
def worker(server, module_worker) -> Any:
    return module_worker(APP, concurrency=3)


@pytest.fixture
def tasks(worker, locks, journal, gates, name) -> Iterator[Any]:
    """The tasks that the worker runs."""
    from tests.ecosystem import frameworkapp

    yield frameworkapp
    gates(name, 1 + journal.unended())


@pytest.mark.parametrize("order", ["ours first", "ours last"])
def test_body_of_a_flask_task_runs_in_its_context_under_its_lock(tasks, journal, holding, name, order):
    """And an equal call is skipped meanwhile, whichever of the base classes comes first."""
    task = tasks.rendered if order == "ours first" else tasks.rendered_last
    with holding(task, name) as first:
        (told,) = journal.entries(what="context")
        assert told["flask"] == "shop"
        assert told["key"] == task.lock_key(name)
        skipped = task.delay(name).get(timeout=60)
        assert is_skipped(skipped)
        assert skipped["holder"]["task_id"] == first.id
        assert len(journal.entries(what="context")) == 1


def test_equal_models_are_one_key_and_the_body_gets_a_model(tasks, journal, gates, name):
    """The key of a model is that of what it is sent as."""
    order = tasks.Order(number=7)
    sent = order.model_dump()
    assert tasks.packed.lock_key(order) == tasks.packed.lock_key(sent)
    assert tasks.packed.lock_key(tasks.Order(number=8)) != tasks.packed.lock_key(order)
    first = journal.reached("start", tasks.packed.delay(sent, name))
    assert is_skipped(tasks.packed.delay(tasks.Order(number=7).model_dump(), name).get(timeout=60))
    gates(name)
    assert first.get(timeout=60) == {"type": "Order", "number": 7, "customer": "ann"}


def test_key_is_of_what_was_sent_and_not_of_what_it_is_validated_to(tasks, journal, gates, name):
    """Two spellings of one model are two keys: send what `model_dump` gives."""
    first = journal.reached("start", tasks.packed.delay({"number": "7"}, name))
    whole = tasks.packed.delay(tasks.Order(number=7).model_dump())
    same = {"type": "Order", "number": 7, "customer": "ann"}
    assert whole.get(timeout=60) == same
    gates(name)
    assert first.get(timeout=60) == same


def test_arguments_that_are_refused_fail_and_leave_no_lock(tasks, journal):
    """pydantic validates in the body's call; the next call has the lock."""
    wrong = tasks.packed.delay({"number": "seven"})
    with pytest.raises(Exception, match="ValidationError"):
        wrong.get(timeout=60)
    wait_until(lambda: tasks.packed.locked({"number": "seven"}) is None, "the lock is free")
    assert not journal.entries(what="start")


def test_progress_of_a_run_is_seen_and_a_skipped_call_is_complete(tasks, holding, name):
    """The skipped one's progress is that of a success, with its result."""
    with holding(tasks.counted, name) as first:
        running = Progress(first).get_info()
        assert (running["state"], running["complete"]) == ("PROGRESS", False)
        assert running["progress"]["percent"] == 75.0
        skipped = tasks.counted.delay(name)
        skipped.get(timeout=60)
        told = Progress(skipped).get_info()
        assert (told["state"], told["complete"], told["success"]) == ("SUCCESS", True, True)
        assert is_skipped(told["result"])
        assert Progress(first).get_info()["state"] == "PROGRESS"
    assert Progress(first).get_info()["complete"]
