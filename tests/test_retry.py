"""The key of a task's own retry; the lock, the mark and the hold of the key before. No worker."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.trace import build_tracer
from celery.exceptions import Reject

from celery_setnx import SingletonTask
from celery_setnx.call.message import HEADER
from celery_setnx.lock.names import mark_name

HOLD = {"hold_on_retry": True, "on_conflict": "wait"}
DONE = {"dedupe": "until_done"}


class World(SimpleNamespace):
    """What a key function may look up, and a body may change."""


@pytest.fixture
def world() -> World:
    return World(tenant="north", is_down=False)


@pytest.fixture
def app(server, locks) -> Celery:
    app = Celery("retrying", broker="memory://", backend="cache+memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t", task_default_queue="retrying")
    return app


class Queue:
    """The messages that nobody has taken, and a pool of one process, which is this one."""

    def __init__(self, app: Celery) -> None:
        self.app = app
        self.requests: list[dict[str, Any]] = []

    def run(self) -> Any:
        """Run the oldest message as a worker does; its id, its header, and what became of it."""
        with self.app.connection_for_read() as connection:
            message = self.app.amqp.queues["retrying"].bind(connection.default_channel).get(no_ack=True)
        assert message is not None, "nothing is queued"
        args, kwargs, embedded = message.payload
        headers, info = message.headers, message.delivery_info
        request = {**headers, "args": args, "kwargs": kwargs, "delivery_info": info, "is_eager": False}
        request |= {"properties": message.properties, "called_directly": False, **embedded}
        task = self.app.tasks[headers["task"]]
        tracer = build_tracer(task.name, task, app=self.app)
        tracer(headers["id"], args, kwargs, request)
        return SimpleNamespace(id=headers["id"], call=headers.get(HEADER), state=self.state(headers["id"]))

    def state(self, task_id: str) -> str:
        return str(self.app.AsyncResult(task_id).state)


@pytest.fixture
def queue(app) -> Iterator[Queue]:
    queue = Queue(app)
    yield queue
    with app.connection_for_write() as connection:
        app.amqp.queues["retrying"].bind(connection.default_channel).purge()


Make = Callable[..., Any]


@pytest.fixture
def make(app) -> Make:
    """Makes the one task of a test."""

    def make(body: Callable[..., Any], base: type[Any] = SingletonTask, **options: Any) -> Any:
        singleton = options.pop("singleton")
        options |= {"bind": True, "shared": False, "name": "retried", "max_retries": 3, "retry_jitter": False}
        task = app.task(base=base, singleton=singleton, **options)(body)
        app.finalize()
        return app.tasks[task.name]

    return make


def change(self: Any, payload: Any, world: Any = None) -> Any:
    """Changes what it was given, and fails once."""
    payload.pop("token", None)
    payload.setdefault("seen", []).append(self.request.retries)
    if not self.request.retries:
        raise ConnectionError


def other(self: Any, payload: Any) -> Any:
    """Retries itself with other arguments."""
    if not self.request.retries:
        raise self.retry(kwargs={"payload": {"to": 8}}, args=(), countdown=0)


def other_by_option(self: Any, payload: Any) -> Any:
    """Retries itself under another key of its own."""
    if not self.request.retries:
        raise self.retry(countdown=0, singleton={"key": ()})


def returned(self: Any, payload: Any) -> Any:
    """Raises by itself what the retry has returned."""
    if not self.request.retries:
        raise self.retry(args=[{"to": 8}], kwargs={}, countdown=0, throw=False)


AGAIN = {"autoretry_for": (ConnectionError,), "default_retry_delay": 0}


def again(self: Any, payload: Any) -> Any:
    """Retries itself as it is."""
    if not self.request.retries:
        raise self.retry(countdown=0)


def under_another_id(self: Any, payload: Any) -> Any:
    """Is another call from then on."""
    if not self.request.retries:
        raise self.retry(task_id="another", countdown=0)


BODIES = {
    "changed in place": (change, AGAIN),
    "other arguments": (other, {}),
    "an option of the retry": (other_by_option, {}),
    "raised by hand": (returned, {}),
}


def assert_nothing_is_left(locks: Any, key: str) -> None:
    """Neither the lock, nor a hold, nor a mark."""
    assert not locks.exists(key, mark_name(key))


@pytest.mark.parametrize("singleton", [HOLD, DONE], ids=["held", "done"])
@pytest.mark.parametrize("why", BODIES)
def test_retry_with_another_key_gives_the_old_one_back(make, queue, locks, why, singleton):
    """When its attempt ends, and the retry is still queued: an equal call may be sent, and may run."""
    body, options = BODIES[why]
    task = make(body, **options, singleton=singleton)
    first = task.delay({"to": 7, "token": "t"})
    key = task.lock_key({"to": 7, "token": "t"})
    assert queue.run().state == "RETRY"
    assert_nothing_is_left(locks, key)
    again = queue.run()
    assert (again.id, again.state) == (first.id, "SUCCESS")
    assert again.call["key"] != key
    assert "marked" not in again.call
    assert_nothing_is_left(locks, again.call["key"])


@pytest.mark.parametrize("singleton", [HOLD, DONE], ids=["held", "done"])
def test_retry_under_another_id_finds_the_lock_free(make, queue, locks, singleton):
    """Nothing is kept for the id that has ended."""
    task = make(under_another_id, singleton=singleton)
    task.delay(7)
    queue.run()
    assert_nothing_is_left(locks, task.lock_key(7))
    assert (again := queue.run()).state == "SUCCESS"
    assert again.id == "another"
    assert_nothing_is_left(locks, task.lock_key(7))


@pytest.mark.parametrize("has_header", [True, False], ids=["published", "by name"])
@pytest.mark.parametrize("singleton", [HOLD, DONE], ids=["held", "done"])
def test_retry_is_asked_what_a_key_function_says_then(make, queue, locks, world, singleton, has_header):
    """The function looks something up that the body has changed: what the retry's message says counts."""

    def body(self: Any, payload: Any) -> Any:
        world.tenant = "south"
        if not self.request.retries:
            raise self.retry(countdown=0)

    task = make(body, singleton={**singleton, "key": lambda payload: [world.tenant]})
    key = task.lock_key(None)
    if has_header:
        task.delay({"to": 7})
    else:
        task.app.send_task(task.name, [{"to": 7}])
    assert queue.run().state == "RETRY"
    assert_nothing_is_left(locks, key)
    again = queue.run()
    assert again.state == "SUCCESS"
    assert again.call["key"] == task.lock_key(None) != key


@pytest.mark.parametrize("has_header", [True, False], ids=["published", "by name"])
@pytest.mark.parametrize("singleton", [HOLD, DONE], ids=["held", "done"])
def test_retry_without_a_key_keeps_the_one_it_had(make, queue, locks, world, caplog, singleton, has_header):
    """Its key function fails in the worker: the retry is sent, with a warning, and nothing else changes."""

    def key_of(payload: Any) -> Any:
        if world.is_down:
            raise OSError("no database")
        return payload

    def body(self: Any, payload: Any) -> Any:
        world.is_down = not self.request.retries
        if not self.request.retries:
            raise self.retry(countdown=0)

    task = make(body, singleton={**singleton, "key": key_of})
    key = task.lock_key(7)
    if has_header:
        task.delay(7)
    else:
        task.app.send_task(task.name, [7])
    assert queue.run().state == "RETRY"
    assert f"keeps the key {key}" in caplog.text
    assert locks.exists(key if "hold_on_retry" in singleton else mark_name(key))
    again = queue.run()
    assert (again.state, again.call["key"]) == ("SUCCESS", key)
    assert_nothing_is_left(locks, key)


def test_retry_of_a_retry_is_asked_too(make, queue, locks):
    """Each attempt gives its own key back, and the last one leaves none."""

    def body(self: Any, page: list[int]) -> Any:
        page.append(0)
        if self.request.retries < 2:
            raise self.retry(countdown=0)

    task = make(body, singleton=HOLD)
    task.delay([])
    assert [queue.run().state for _attempt in range(3)] == ["RETRY", "RETRY", "SUCCESS"]
    for length in range(4):
        assert_nothing_is_left(locks, task.lock_key([0] * length))


def test_key_of_a_call_alone_is_its_retrys_too(make, queue, locks):
    """`singleton={"key": ...}` of one call: the retry has it, and the lock is held for it."""

    def body(self: Any, a: Any, b: Any) -> Any:
        b.append("changed")
        if not self.request.retries:
            raise self.retry(countdown=0)

    task = make(body, singleton=HOLD)
    task.apply_async([7, []], singleton={"key": "a"})
    first = queue.run()
    key = first.call["key"]
    assert (first.state, locks.exists(key)) == ("RETRY", 1)
    assert queue.run().call["key"] == key
    assert_nothing_is_left(locks, key)


@pytest.mark.parametrize("payload", [{"to": 8}, {"to": 7}], ids=["another key", "the same"])
def test_retry_that_a_base_class_publishes_later_is_asked_for_its_key(make, queue, locks, payload):
    """On commit: when the attempt ends, there is no message yet, and its arguments say what it will be."""
    later: list[Callable[[], Any]] = []

    class OnCommit(SingletonTask):
        abstract = True

        def apply_async(self, *args: Any, **options: Any) -> Any:
            later.append(lambda: super(OnCommit, self).apply_async(*args, **options))

    def body(self: Any, payload: Any) -> Any:
        if not self.request.retries:
            raise self.retry(args=[payload_of_retry], kwargs={}, countdown=0)

    payload_of_retry = payload
    task = make(body, OnCommit, singleton=HOLD)
    key = task.lock_key({"to": 7})
    task.delay({"to": 7})
    later.pop()()
    assert queue.run().state == "RETRY"
    assert bool(locks.exists(key)) is (payload == {"to": 7})
    later.pop()()
    assert queue.run().state == "SUCCESS"
    assert_nothing_is_left(locks, key)


def test_success_of_no_attempt_is_noted_for_a_retry_with_another_key(make, queue, locks):
    """`dedupe_for`: a call that equals the first attempt is no duplicate of a success."""
    task = make(change, **AGAIN, singleton={"dedupe": "until_done", "dedupe_for": 600})
    first = task.delay({"to": 7, "token": "t"})
    assert [queue.run().state for _attempt in range(2)] == ["RETRY", "SUCCESS"]
    assert task.delay({"to": 7, "token": "t"}).id != first.id


def test_replaced_call_gives_its_key_back(make, queue, locks):
    """`self.replace()` with other arguments: another call under the same id."""

    def body(self: Any, payload: Any) -> Any:
        if payload == {"to": 7}:
            raise self.replace(self.s({"to": 8}))

    task = make(body, singleton={**HOLD, "key": "payload"})
    task.delay({"to": 7})
    queue.run()
    assert_nothing_is_left(locks, task.lock_key({"to": 7}))
    assert queue.run().state == "SUCCESS"
    assert_nothing_is_left(locks, task.lock_key({"to": 8}))


@pytest.mark.parametrize(
    "error", [KeyError("hook"), SoftTimeLimitExceeded(), Reject("hook", requeue=True)], ids=repr
)
def test_on_retry_that_raises_takes_nothing_from_the_retry(make, queue, locks, caplog, error):
    """Celery would store FAILURE, and the next call would free the lock that is held for the retry."""

    class Failing(SingletonTask):
        abstract = True

        def on_retry(self, *_details: Any) -> None:
            raise error

    task = make(again, base=Failing, singleton={**HOLD, "key": "payload"})
    task.delay(7)
    first = queue.run()
    assert first.state == "RETRY"
    assert task.locked(7).state == "held_for_retry"
    (said,) = [record for record in caplog.records if "on_retry" in record.getMessage()]
    call = f"retried(payload=7)[{first.id}] (key {task.lock_key(7)})"
    assert said.getMessage().startswith(f"on_retry of {call} has raised.")
    assert said.exc_info[1] is error
    assert queue.run().state == "SUCCESS"
    assert_nothing_is_left(locks, task.lock_key(7))
