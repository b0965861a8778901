"""A worker per pool for the whole run, workers to be killed or shut down, and calls that wait at gates."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import redis
from kombu import Connection

from celery_setnx import SetnxLock
from celery_setnx.testing import pass_time
from tests.exits import POOLS
from tests.harness import Journal, Worker, redelivery, wait_until
from tests.stage import Stage

APP = "tests.exits.app"
OBSERVER = "observer"
ELSEWHERE = {"setnx_same_host": False}
LONG = {"lease": 600}
RETRY = {"on_conflict": "retry"}
IMPATIENT_DB = 2


class Held(NamedTuple):
    """A call whose body has started."""

    result: Any
    key: str
    fence: int
    pid: int


class Scene(Stage):
    """One test's calls: those of `gate` wait at the gate of that name, those of `key` do not.

    Attributes:
        locks: A client of the lock database.
        later: A queue that nobody serves yet.
    """

    def __init__(self, tasks: Any, journal: Journal, gates: Any, locks: redis.Redis) -> None:
        super().__init__(tasks, journal, gates)
        self.locks = locks
        self.later = f"later-{self.key}"

    def send(self, task: Any, queue: str, *args: Any, name: str = "", **options: Any) -> Any:
        """Send a call, of `key` unless told otherwise."""
        return task.apply_async((name or self.key, *args), queue=queue, **options)

    def hold(self, task: Any, queue: str, *args: Any, name: str = "", **options: Any) -> Held:
        """Send a call of `gate`, and come back when its body waits at its gate."""
        before = self._at_gates()
        held = self.started(self.send(task, queue, *args, name=name or self.gate, **options))
        wait_until(lambda: self._at_gates() > before, f"{held.result.id} at its gate")
        return held

    def started(self, result: Any, count: int = 1) -> Held:
        """The call, once its body has started that many times."""
        start = self.journal.wait_for("start", count, task_id=result.id)[count - 1]
        return Held(result, start["key"], start["fence"], start["pid"])

    def serve_later(self, worker: Worker) -> None:
        """Have a worker serve the queue `later` too."""
        worker.take_from(self.tasks.app, self.later)

    def told(self, queue: str, name: str = "") -> Any:
        """What another call of the key ends with, which does not wait."""
        return self.send(self.tasks.work, queue, name=name).get(timeout=60)

    def age(self, seconds: float, name: str = "") -> None:
        """Let time pass for the lock."""
        pass_time(seconds, self.tasks.work, name or self.key)

    def lock_words(self, result: Any) -> list[str]:
        """What happened to a call, in order, but for Celery's "revoked", which comes at any time."""
        return [word for word in self.journal.words(result.id) if word != "revoked"]

    def fences(self, result: Any) -> list[int]:
        """Of all acquisitions of a call, in order."""
        return [entry["fence"] for entry in self.journal.entries(what="acquired", task_id=result.id)]

    def outcomes(self, result: Any, count: int = 1) -> list[str]:
        """Of all releases of a call, once there are that many."""
        return [e["outcome"] for e in self.journal.wait_for("released", count, task_id=result.id)]

    def wait_until_free(self, key: str) -> None:
        """A rival who proves nothing of other processes gets the lock."""
        rival = SetnxLock(self.locks, key)
        wait_until(lambda: (lock := rival.acquire().lock) and lock.release(), f"{key} is free")

    def assert_renewed(self, *keys: str, leases: float = 1.5) -> None:
        """Rivals never get the locks until renewals have held them for so many leases more."""

        def deadline(key: str) -> float:
            outcome = SetnxLock(self.locks, key).acquire()
            assert not outcome.acquired, f"a rival got {key}"
            return outcome.holder.deadline  # type: ignore[union-attr]

        enough = {key: deadline(key) + leases * self.tasks.LEASE_S for key in keys}
        wait_until(lambda: all(deadline(key) >= enough[key] for key in keys), f"{keys} renewed")

    def _at_gates(self) -> int:
        clients = self.journal._client.client_list()
        return sum(client["cmd"] == "blpop" and "b" in client["flags"] for client in clients)


@pytest.fixture(scope="session")
def impatient(server) -> dict[str, Any]:
    """Settings of workers that deliver again what is not acknowledged in 2 s, on a broker of their own."""
    return {"broker_url": server.url(IMPATIENT_DB), "broker_transport_options": redelivery(2)}


@pytest.fixture
def impatient_broker(server) -> Iterator[Connection]:
    """Their broker."""
    with Connection(server.url(IMPATIENT_DB)) as connection:
        yield connection


@pytest.fixture(scope="session")
def worker_of(server, logs, impatient) -> Iterator[Callable[[str], Worker]]:
    """The worker of a queue, started at its first use. Not to be killed.

    The queue has the name of its worker's pool; `observer` is served by one on another host, as far as it can
    prove: it takes no lock over before its deadline. `again-<pool>` is served by an impatient one.
    """
    from tests.exits.app import app

    workers: dict[str, Worker] = {}

    def worker_of(queue: str) -> Worker:
        if queue not in workers or workers[queue].process.poll() is not None:
            again, pool = queue.startswith("again-"), queue.removeprefix("again-")
            conf = ELSEWHERE if queue == OBSERVER else impatient if again else {}
            pool = pool if pool in POOLS else "prefork"
            workers[queue] = Worker(logs, APP, queues=queue, pool=pool, concurrency=3, conf=conf)
            if not again:  # a worker of greenlets says that it is ready before it listens to `revoke`
                node = [workers[queue].node]
                ping = app.control.ping
                wait_until(lambda: ping(destination=node, timeout=0.5, limit=1), f"{node} listening")
        return workers[queue]

    yield worker_of
    for worker in workers.values():
        worker.kill()


@pytest.fixture
def scene(server, locks, journal, gates) -> Iterator[Scene]:
    """Clean databases, and a key of the test's own; in the end no body waits at its gate."""
    from tests.exits import app

    scene = Scene(app, journal, gates, locks)
    yield scene
    scene.open(1 + journal.unended())


@pytest.fixture
def pool(request, worker_of) -> str:
    """A pool whose worker is ready; also the name of its queue."""
    worker_of(request.param)
    return str(request.param)


@pytest.fixture
def observer(worker_of) -> str:
    """The queue of a worker that can prove nothing of other processes."""
    worker_of(OBSERVER)
    return OBSERVER


@pytest.fixture
def start(start_worker) -> Callable[..., Worker]:
    """Starts workers of the test's own, to be killed or shut down."""
    return lambda queues, **options: start_worker(APP, queues=queues, **options)
