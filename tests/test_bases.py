"""What stands between a task and its lock: base classes that know nothing of it, and loops of Celery's."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, Task, chunks, group, xmap, xstarmap
from celery.app.task import Context

from celery_setnx import OptionError, SingletonTask, current_lock, is_skipped, singleton
from celery_setnx.testing import assert_released, guarded, hold
from tests.harness import wait_until
from tests.stage import assert_one_at_a_time

pytestmark = pytest.mark.usefixtures("locks")


@pytest.fixture(scope="module")
def worker(server, module_worker) -> Any:
    return module_worker("tests.baseapp", concurrency=2)


@pytest.fixture
def bases(worker) -> Any:
    """The tasks that the worker runs."""
    from tests import baseapp

    return baseapp


KINDS = """
named named-behind of-the-app decorated property mixin classy another annotated patched twice
"""


@pytest.mark.parametrize("kind", KINDS.split())
def test_call_of_a_base_class_is_under_its_lock(bases, journal, gates, name, kind):
    """Whatever its `__call__` calls by name: it is entered under the lock, and by no call that is skipped."""
    task = bases.tasks[kind]
    first = journal.reached("start", task.delay(name))
    (started,) = journal.entries(what="start", task_id=first.id)
    assert started["key"] == task.lock_key(name)
    second = task.delay(name)
    assert is_skipped(second.get(timeout=60))
    gates(name, 2)
    assert first.get(timeout=60) == name
    assert {entry["task_id"] for entry in journal.entries(what="entered")} == {first.id}
    assert_released(task, within=30)
