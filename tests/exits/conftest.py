"""A worker per pool for the whole run, workers to be killed or shut down, and calls that wait at gates."""

import uuid
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import redis
from kombu import Connection

from tests.harness import Journal, Worker, wait_until

APP = "tests.exits.app"
OBSERVER = "observer"
IMPATIENT_DB = 2
VISIBILITY_S = 2


class Held(NamedTuple):
    """A call whose body has started and waits at its gate."""

    result: Any
    key: str
    fence: int
    pid: int
    at: float


@pytest.fixture(scope="session")
def worker_of(server, logs) -> Iterator[Callable[[str], Worker]]:
    """The worker of a pool, started at its first use. Its queue has the pool's name. Not to be killed.

    The observer is on another host, as far as it can prove: it takes no lock over before its deadline.
    A worker of greenlets says that it is ready before it listens to `revoke`, hence the ping.
    """
    from tests.exits.app import app

    workers: dict[str, Worker] = {}

    def worker_of(pool: str) -> Worker:
        if pool not in workers or workers[pool].process.poll() is not None:
            if pool == OBSERVER:
                environment = {"SETNX_TEST_SAME_HOST": "no"}
                workers[pool] = Worker(logs, APP, concurrency=2, queues=pool, environment=environment)
            else:
                workers[pool] = Worker(logs, APP, concurrency=3, pool=pool, queues=pool)
            node = [f"{workers[pool].name}@test"]
            wait_until(lambda: app.control.ping(destination=node, timeout=0.5, limit=1), f"{node} listening")
        return workers[pool]

    yield worker_of
    for worker in workers.values():
        worker.kill()


@pytest.fixture
def start_worker(server, logs) -> Iterator[Callable[..., Worker]]:
    """Starts workers of the test's own, to be killed or shut down."""
    workers: list[Worker] = []

    def start(**options: Any) -> Worker:
        workers.append(Worker(logs, APP, **{"concurrency": 2, **options}))
        return workers[-1]

    yield start
    for worker in workers:
        if worker.process.poll() is None:
            worker.kill()


@pytest.fixture
def tasks(server, locks, journal) -> Any:
    """The module of tasks, with clean databases."""
    from tests.exits import app

    return app


@pytest.fixture
def pool(request, worker_of, tasks) -> str:
    """A pool whose worker is ready; also the name of its queue."""
    worker_of(request.param)
    return str(request.param)


@pytest.fixture
def observer(worker_of, tasks) -> str:
    """The queue of a worker that can prove nothing of other processes."""
    worker_of(OBSERVER)
    return OBSERVER


@pytest.fixture
def name() -> str:
    """The test's own key, and the name of its gate."""
    return f"gated-{uuid.uuid4().hex}"


@pytest.fixture
def hold(server, journal) -> Iterator[Callable[..., Held]]:
    """Sends a call to a queue, and comes back when its body waits at its gate."""
    with redis.Redis.from_url(server.url(0), decode_responses=True) as client:

        def at_gates() -> int:
            return sum(c["cmd"] == "blpop" and "b" in c["flags"] for c in client.client_list())

        def hold(task: Any, queue: str, *args: Any, **options: Any) -> Held:
            before = at_gates()
            held = started(journal, task.apply_async(args, queue=queue, **options))
            if str(args[0]).startswith("gated"):
                wait_until(lambda: at_gates() > before, f"{held.result.id} at its gate")
            return held

        yield hold


def started(journal: Journal, result: Any, count: int = 1) -> Held:
    """The call, once its body has started that many times."""
    start = journal.wait_for("start", count, task_id=result.id)[count - 1]
    return Held(result, start["key"], start["fence"], start["pid"], start["at"])


@pytest.fixture
def impatient_broker(server) -> Iterator[Connection]:
    """A broker of its own for workers that deliver again what is not acknowledged within 2 s."""
    with redis.Redis.from_url(server.url(IMPATIENT_DB)) as client:
        client.flushdb()
    with Connection(server.url(IMPATIENT_DB)) as connection:
        yield connection


@pytest.fixture
def impatient(start_worker, impatient_broker) -> Callable[..., Worker]:
    """Starts workers of that broker."""

    def start(*, environment: dict[str, str] | None = None, **options: Any) -> Worker:
        own = {"EXITS_BROKER_DB": str(IMPATIENT_DB), "EXITS_VISIBILITY_S": str(VISIBILITY_S)}
        return start_worker(environment={**own, **(environment or {})}, **options)  # type: ignore[no-any-return]

    return start
