"""A worker in the test's own process (celery.contrib.testing), as users' test suites run it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
from celery import Celery, Task
from celery.contrib.testing.worker import start_worker
from pydantic import BaseModel

from celery_setnx import SingletonTask, current_lock, is_skipped, singleton
from tests.versions.conditions import needs_dumped_models

pytestmark = pytest.mark.slow


class User(BaseModel):
    """An argument that is a model."""

    id: int


GATE = threading.Barrier(2, timeout=60)


def pass_gate() -> None:
    """A body and its test meet twice: once it has begun, and before it ends."""
    GATE.wait()
    GATE.wait()


@pytest.fixture
def holding(locks) -> Callable[..., AbstractContextManager[Any]]:
    """`with holding(task, ...) as first`: the body of a call waits, and afterwards has a result."""
    GATE.reset()

    @contextmanager
    def holding(task: Task, *args: Any) -> Iterator[Any]:
        first = task.delay(*args)
        GATE.wait()
        yield first
        GATE.wait()
        first.get(timeout=60)

    return holding


@pytest.fixture(scope="module")
def app(server) -> Iterator[Any]:
    """An app on an in-memory broker with a threaded worker; only the locks are in Redis."""
    app = Celery("embedded", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), broker_transport_options={"polling_interval": 0.01})

    @app.task(base=SingletonTask, bind=True, shared=False, name="bound", singleton={"retry_delay": 0.1})
    def bound(self: Task, wait: bool) -> Any:
        assert self.lock is current_lock()
        if wait:
            pass_gate()
        return [self.request.id, self.lock.fence]

    @app.task(base=SingletonTask, bind=True, shared=False, name="nested", singleton={"key": ()})
    def nested(self: Task, depth: int) -> Any:
        return [depth, self(depth - 1) if depth else bool(self.lock)]

    @app.task(shared=False, name="plain")
    @singleton(key=())
    def plain(wait: bool) -> Any:
        if wait:
            pass_gate()
        return current_lock().key

    @app.task(
        base=SingletonTask, shared=False, name="modelled", pydantic=True, singleton={"key": "{user.id}"}
    )
    def modelled(user: User, note: str = "") -> Any:
        pass_gate()
        return [user.id, current_lock().key]

    with start_worker(app, pool="threads", concurrency=3, perform_ping_check=False, shutdown_timeout=30):
        yield app


def test_bound_task_sees_its_own_request_and_lock(app, locks):
    """Also where Celery does not protect its request stack, `self.request` is the call."""
    result = app.tasks["bound"].delay(False)
    task_id, fence = result.get(timeout=60)
    assert task_id == result.id
    assert fence > 0


@pytest.mark.parametrize("name", ["bound", "plain"])
def test_threads_of_one_process_exclude_each_other(app, holding, name):
    """Two calls in two threads of one worker: one body, of a function that is only decorated, too."""
    task = app.tasks[name]
    with holding(task, True) as first:
        assert is_skipped(task.delay(True).get(timeout=60))
    assert first.get() == ("setnx:{plain}" if name == "plain" else [first.id, first.get()[1]])


def test_nested_direct_call_is_not_guarded(app, locks):
    """A body that calls its own task as a function does not meet its own lock."""
    assert app.tasks["nested"].delay(1).get(timeout=60)[0] == 1


@needs_dumped_models
def test_pydantic_argument_is_keyed_alike_by_producer_and_worker(app, holding):
    """A model, its dumped form, and a message sent by name have one key."""
    task = app.tasks["modelled"]
    with holding(task, User(id=5)) as first:
        assert is_skipped(task.delay({"id": 5}, note="other").get(timeout=60))
        assert is_skipped(app.send_task("modelled", [{"id": 5}]).get(timeout=60))
    assert first.get()[0] == 5


def test_retry_waits_on_any_broker(app, holding):
    """A conflict with retry comes back through the in-memory broker."""
    with holding(app.tasks["bound"], True) as first:
        second = app.tasks["bound"].apply_async([True], singleton={"on_conflict": "retry"})
    pass_gate()
    assert first.get()[1] < second.get(timeout=60)[1]
