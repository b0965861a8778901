"""The topologies, workers whose locks live there, and a table at the end."""

import json
import os
import statistics
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from docker.errors import DockerException

from tests.harness import Worker
from tests.topologies.rabbitmq import IMAGE, RabbitMQ
from tests.topologies.servers import Certificates, Cluster, Sentinels, Server, tls_server

APP = "tests.topologies.app"
_FAILOVERS = pytest.StashKey[dict[str, list[float]]]()
_NOTES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_FAILOVERS] = {}
    config.stash[_NOTES] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Topology, tests run, failover median and maximum."""
    passed = [report.nodeid for report in terminalreporter.getreports("passed")]
    tests = [nodeid.rpartition("/")[2] for nodeid in passed if "test_topology_" in nodeid]
    topologies = sorted({name.removeprefix("test_topology_").partition(".py")[0] for name in tests})
    terminalreporter.section("topologies")
    lines = ["| topology | tests passed | failovers | median s | max s |", "|---|---|---|---|---|"]
    for topology in topologies:
        count = sum(name.startswith(f"test_topology_{topology}.py") for name in tests)
        times = config.stash[_FAILOVERS].get(topology)
        figures = (
            f"{len(times)} | {statistics.median(times):.1f} | {max(times):.1f}" if times else "- | - | -"
        )
        lines.append(f"| {topology} | {count} | {figures} |")
    for line in [*lines, *config.stash[_NOTES]]:
        terminalreporter.write_line(line)


@pytest.fixture
def note(request) -> Callable[[str], None]:
    """Adds a line below the table."""
    return request.config.stash[_NOTES].append


@pytest.fixture
def failovers(request) -> list[float]:
    """Seconds of each failover of this module's topology, for the table."""
    topology = Path(request.path).stem.removeprefix("test_topology_")
    return request.config.stash[_FAILOVERS].setdefault(topology, [])


@pytest.fixture(scope="session")
def sentinels(tmp_path_factory) -> Iterator[Sentinels]:
    """A master, two replicas and three Sentinels."""
    sentinels = Sentinels(tmp_path_factory.mktemp("sentinels"))
    try:
        sentinels.start()
        yield sentinels
    finally:
        sentinels.stop()


@pytest.fixture(scope="session")
def cluster(tmp_path_factory) -> Iterator[Cluster]:
    """A cluster of three masters."""
    cluster = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory) -> Certificates:
    """Made anew for every run."""
    return Certificates(tmp_path_factory.mktemp("tls") / "certificates")


@pytest.fixture(scope="session")
def secured(tmp_path_factory, certificates) -> Iterator[Server]:
    """A server that speaks nothing but TLS."""
    server = tls_server(tmp_path_factory.mktemp("secured"), certificates)
    if server is None:
        not_here("no server here knows TLS: apt-get install redis-tools, or put redis-server on the PATH")
    yield server
    server.kill()


def not_here(missing: str) -> NoReturn:
    """Skip what this machine cannot run; the CI's machine can."""
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def rabbitmq() -> Iterator[RabbitMQ]:
    """A RabbitMQ that tests may kill, unless AMQP_URL names another."""
    try:
        rabbitmq = RabbitMQ()
    except DockerException as error:
        not_here(f"no RabbitMQ: give AMQP_URL, or a container engine with {IMAGE} ({error})")
    yield rabbitmq
    rabbitmq.stop()


@pytest.fixture
def name() -> str:
    """The test's own key, and the name of its gate."""
    return f"gated-{uuid.uuid4().hex}"


@pytest.fixture
def tasks_of(server, journal) -> Callable[..., Any]:
    """The tasks of an app with these settings, in this process. The journal is empty."""

    def tasks_of(**conf: Any) -> Any:
        from tests.topologies.app import make_app, make_tasks

        return make_tasks(make_app(**conf))

    return tasks_of


@pytest.fixture
def work_with(tasks_of, logs) -> Iterator[Callable[..., Any]]:
    """Starts a worker with these settings; returns the same tasks in this process, and the worker."""
    workers: list[Worker] = []

    def work_with(*, concurrency: int = 2, queues: str | None = None, **conf: Any) -> Any:
        environment = {"TOPOLOGY_CONF": json.dumps(conf)}
        queues = queues or conf.get("task_default_queue", "celery")
        workers.append(Worker(logs, APP, concurrency=concurrency, queues=queues, environment=environment))
        tasks = tasks_of(**conf)
        tasks.worker = workers[-1]
        return tasks

    yield work_with
    for worker in workers:
        if worker.process.poll() is None:
            worker.kill()
