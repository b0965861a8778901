"""The embedded server, clean databases, and the rule that no key of ours stays without a TTL."""

import logging
import os
import uuid
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import _state
from celery.exceptions import TimeoutError
from celery.result import AsyncResult
from redis.backoff import NoBackoff
from redis.retry import Retry

from examples.embedded import EmbeddedServer
from tests.harness import GATE_S, Journal, Patience, Worker
from tests.limitstage import Bench
from tests.model.injected import CLOCK_KEY, ServerClock
from tests.proxy import Proxy
from tests.stage import Parked, Stage
from tests.topologies.servers import Cluster
from tests.versions.conditions import LOSES_RESULTS

LOCK_DB = 1


def ask_for_results() -> None:
    """Have `AsyncResult.get` ask for what it was not told, and say the task's state when it gives up.

    It waits for a message on a channel, and Redis does not promise that one arrives. Before Celery 5.7 two
    results of one id share a waiter, and the end of a forgotten one, amid garbage collection, uses the
    connection that another is reading; on a dead server that end tries for 20 s.
    """
    get = AsyncResult.get

    def ask(self: AsyncResult, timeout: float | None = None, **options: Any) -> Any:
        patience = Patience(timeout or 60)
        while True:
            try:
                return get(self, timeout=0.5, **options)
            except TimeoutError:
                if patience.is_over() and not self.ready():
                    raise TimeoutError(f"{self.id} is {self.state} after {timeout or 60} s") from None

    AsyncResult.get = ask
    if LOSES_RESULTS:
        del AsyncResult.__del__


ask_for_results()


CLOCK_RERUNS = 2
"""How many tests of real time may run a second time in one run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="nothing slow, nothing that starts a worker")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """A test marked `clock` may run a second time; `--quick` leaves out what is slow or starts workers."""
    for item in items:
        if item.get_closest_marker("clock"):
            item.add_marker(pytest.mark.flaky(reruns=1))
    if config.getoption("quick"):
        starters = {"start_worker", "module_worker"}
        slow = [
            item
            for item in items
            if item.get_closest_marker("slow") or starters & set(getattr(item, "fixturenames", ()))
        ]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def _rerun(config: pytest.Config) -> list[str]:
    """The tests that ran a second time."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")
    return [report.nodeid for report in reporter.stats.get("rerun", ())] if reporter else []


def pytest_sessionfinish(session: pytest.Session) -> None:
    """More than a few tests that needed a second run fail the whole: that is no accident any more."""
    if len(_rerun(session.config)) > CLOCK_RERUNS and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    again = _rerun(config)
    for nodeid in again:
        terminalreporter.write_line(f"ran a second time: {nodeid}")
    terminalreporter.write_line(f"tests of real time: {len(again)} ran a second time, {CLOCK_RERUNS} may")


@pytest.fixture(autouse=True)
def hear_us(caplog):
    """Our log lines are heard, whatever a worker in this process has done to logging."""
    caplog.set_level(logging.INFO, logger="celery_setnx")


@pytest.fixture
def alone(monkeypatch):
    """Apps that are made from now on have their own tasks only, not those that other apps share."""
    kept = {
        found
        for found in _state._on_app_finalizers
        if found.__module__ not in ("celery.app", "celery.app.base")  # @shared_task, @app.task
    }
    monkeypatch.setattr(_state, "_on_app_finalizers", kept)


@pytest.fixture(scope="session")
def server() -> Iterator[EmbeddedServer]:
    """One server for the whole run."""
    with EmbeddedServer() as server:
        os.environ["SETNX_TEST_URL"] = server.url().rpartition("/")[0]
        yield server
        if hasattr(AsyncResult, "__del__"):
            del AsyncResult.__del__  # on a server that is gone it tries for 20 s, at the end of the run


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A cluster of three masters."""
    with Cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        cluster.start()
        yield cluster


def leave_open(server: EmbeddedServer, gate: str) -> None:
    """Have a call that comes when its test has ended wait at this gate no more: it would keep a process."""
    with redis.Redis.from_url(server.url(0)) as client:
        client.rpush(f"left:{gate}", *["open"] * 20)
        client.expire(f"left:{gate}", 2 * GATE_S)


@pytest.fixture
def name(server) -> Iterator[str]:
    """The test's own key, and the name of its gate."""
    name = f"gated-{uuid.uuid4().hex}"
    yield name
    leave_open(server, name)


@pytest.fixture
def foreign_keys() -> set[str]:
    """Names of keys that a test sets without a TTL, as a foreign program would."""
    return set()


def emptied(client: redis.Redis, foreign_keys: set[str]) -> Iterator[redis.Redis]:
    """The client, when its database is empty; afterwards every key of ours must have a TTL."""
    client.flushdb()
    yield client
    endless = {key for key in client.scan_iter() if client.pttl(key) == -1}
    assert endless <= foreign_keys, f"keys without a TTL: {endless - foreign_keys}"


@pytest.fixture
def locks(server, foreign_keys) -> Iterator[redis.Redis]:
    """A client of the empty lock database; afterwards every key of ours must have a TTL."""
    with redis.Redis.from_url(server.url(LOCK_DB), decode_responses=True) as client:
        yield from emptied(client, foreign_keys)


@pytest.fixture
def clock(locks, foreign_keys, monkeypatch) -> ServerClock:
    """The lock server's clock, at second 10 of the test's count: in its scripts no other time passes."""
    foreign_keys.add(CLOCK_KEY)
    return ServerClock(locks, monkeypatch)


@pytest.fixture
def own_locks(foreign_keys) -> Iterator[redis.Redis]:
    """As `locks`, of a server that nobody else uses: the test may change its settings."""
    with EmbeddedServer() as own, redis.Redis.from_url(own.url(), decode_responses=True) as client:
        yield from emptied(client, foreign_keys)


@pytest.fixture
def limited(server, locks) -> Iterator[Callable[..., str]]:
    """Called with the rules for a user, it gives that user's URL of the lock database, or of another."""

    def url_of(*rules: str, db: int = LOCK_DB) -> str:
        locks.execute_command("ACL", "SETUSER", "limited", "reset", "on", ">pw", *rules)
        return server.url(db).replace("redis://", "redis://limited:pw@")

    yield url_of
    locks.execute_command("ACL", "DELUSER", "limited")


@pytest.fixture
def proxy(server) -> Iterator[Proxy]:
    """A way to the server whose connections fail on demand."""
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture
def far(proxy) -> Iterator[Callable[..., redis.Redis]]:
    """Makes clients of the lock database by way of the proxy.

    One never sends again, unless it is told so many times, and waits long for what is not answered.
    """
    with ExitStack() as clients:

        def far(sends_again: int = 0, socket_timeout: float = 20) -> redis.Redis:
            # redis-py before 6 sends again after the errors that are named, and after no others.
            errors = [redis.ConnectionError, redis.TimeoutError] if sends_again else []
            again = {"retry": Retry(NoBackoff(), sends_again), "retry_on_error": errors}
            client = redis.Redis.from_url(proxy.url(LOCK_DB), **again, socket_timeout=socket_timeout)
            clients.enter_context(client).ping()
            return client

        yield far


@pytest.fixture(scope="session")
def earlier() -> set[str]:
    """The ids of calls of earlier tests."""
    return set()


@pytest.fixture
def journal(server, earlier) -> Iterator[Journal]:
    """An empty journal, and gates that are all closed."""
    with redis.Redis.from_url(server.url(0), decode_responses=True) as client:
        earlier |= Journal(client).given_ids()
        client.delete(Journal.KEY, *client.scan_iter("gate:*"))
        yield Journal(client, earlier)


@pytest.fixture
def gates(journal) -> Callable[..., None]:
    """Call it with a name to let one body of that name go on, or as many as are given."""

    def open_gate(name: str, times: int = 1) -> None:
        journal._client.rpush(f"gate:{name}", *["open"] * times)
        journal._client.expire(f"gate:{name}", GATE_S)

    return open_gate


@pytest.fixture
def holding(journal, gates) -> Callable[..., AbstractContextManager[Any]]:
    """`with holding(task) as first`: the body of a call has started, and ends with its name afterwards."""

    @contextmanager
    def holding(task: Any, name: str = "gated", **options: Any) -> Iterator[Any]:
        first = journal.reached("start", task.apply_async([name], **options))
        yield first
        gates(name)
        assert first.get(timeout=60) == name

    return holding


@pytest.fixture(scope="session")
def logs(tmp_path_factory) -> Path:
    """Where workers log to."""
    return tmp_path_factory.mktemp("workers")


def _workers(server, logs) -> Iterator[Callable[..., Worker]]:
    """Starts workers, as `Worker` takes them; those that are left in the end are killed."""
    started: list[Worker] = []

    def start(app: str = "tests.workerapp", **options: Any) -> Worker:
        started.append(Worker(logs, app, **options))
        _started.append(started[-1])
        return started[-1]

    yield start
    for worker in started:
        _started.remove(worker)
        if worker.process.poll() is None:
            worker.kill()


_started: list[Worker] = []
"""The workers of this run, of its module and of its test."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that fails shows how the logs of its workers end."""
    report = yield
    if report.failed:
        for worker in reversed(_started[-3:]):  # of a long report the end may be cut off
            report.sections.append((f"end of {worker.log}", "\n".join(worker.log_text().splitlines()[-40:])))
    return report


start_worker = pytest.fixture(_workers)  # a test's own, to be killed or shut down
module_worker = pytest.fixture(scope="module")(_workers)  # not to be killed by a test


@pytest.fixture(scope="session")
def worker(server, logs) -> Iterator[Worker]:
    """A prefork worker with four processes that lives for the whole run. Not to be killed."""
    include = ["tests.waitapp", "tests.newestapp"]
    worker = Worker(logs, concurrency=4, queues="celery,first", conf={"include": include})
    _started.insert(0, worker)
    yield worker
    worker.stop()


@pytest.fixture
def tasks(worker, locks, journal) -> Any:
    """The module of tasks that the worker runs, with clean databases."""
    from tests import workerapp

    workerapp.app.set_current()  # for its shared tasks, whatever app another test has made the current one
    return workerapp


@pytest.fixture
def stage(server, worker, locks, journal, gates) -> Iterator[Stage]:
    """The tasks of `tests.waitapp` that the worker runs too, with clean databases."""
    from tests import waitapp

    stage = Stage(waitapp, journal, gates)
    yield stage
    leave_open(server, stage.gate)


@pytest.fixture
def bench(server, locks, journal, gates) -> Iterator[Bench]:
    """The tasks of `tests.limitapp`, with clean databases; their workers are the tests' own."""
    from tests import limitapp

    with redis.Redis.from_url(server.url(limitapp.BROKER_DB), decode_responses=True) as broker:
        bench = Bench(limitapp, journal, gates, broker)
        yield bench
        journal._client.delete(f"load:{bench.key}")
        bench.open(300)


@pytest.fixture
def parked(journal) -> Parked:
    """The queue that no worker consumes, empty."""
    return Parked(journal._client)
