"""The topologies, workers whose locks live there, and a table at the end."""

from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from docker.errors import DockerException

from celery_setnx.connection import client_for
from tests.tables import Recorded, failover_table, recorded, write
from tests.topologies.rabbitmq import IMAGE, RabbitMQ
from tests.topologies.servers import Sentinels, Server, make_certificates, not_here, tls_server

APP = "tests.topologies.app"


def topology_of(nodeid: str) -> str:
    """What the file of a test names."""
    return Path(nodeid.partition("::")[0]).stem.removeprefix("test_topology_")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Topology, tests passed, failover median and maximum; and what the tests have noted."""
    lines = failover_table(terminalreporter, topology_of)
    write(terminalreporter, "topologies", [*lines, *(line for _, line in recorded(terminalreporter, "note"))])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test with a RabbitMQ of our own that fails shows what is in its queues."""
    report = yield
    broker = getattr(item, "funcargs", {}).get("rabbitmq")
    if report.failed and broker and broker.is_own and broker.answers():
        report.sections.append(("queues", broker.queues()))
    return report


@pytest.fixture
def note(request) -> Callable[[str], None]:
    """Adds a line below the table."""
    return Recorded(request.node, "note").append


@pytest.fixture
def failovers(request) -> Recorded:
    """Seconds of each failover of this test, for the table."""
    return Recorded(request.node, "failover")


@pytest.fixture(scope="session")
def sentinels(tmp_path_factory) -> Iterator[Sentinels]:
    """A master, two replicas and three Sentinels."""
    with Sentinels(tmp_path_factory.mktemp("sentinels")) as sentinels:
        sentinels.start()
        yield sentinels


@pytest.fixture
def settings(cluster) -> Iterator[dict[str, Any]]:
    """Locks on the empty cluster; afterwards every key of ours must have a TTL."""
    for node in cluster.nodes:
        node.ask("FLUSHALL")
    yield {"setnx_url": cluster.url()}
    for node in cluster.nodes:
        client = node.client()
        assert not [key for key in client.scan_iter("t:*") if client.pttl(key) == -1]


@pytest.fixture
def client(tasks_of, settings) -> Any:
    """The client that the app's locks have."""
    return client_for(tasks_of(**settings).app)


@pytest.fixture(scope="session")
def certificates(tmp_path_factory) -> dict[str, str]:
    """A client's, made anew for every run."""
    return make_certificates(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="session")
def secured(tmp_path_factory, certificates) -> Iterator[Server]:
    """A server that speaks nothing but TLS."""
    server = tls_server(tmp_path_factory.mktemp("secured"), certificates)
    yield server
    server.kill()


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
def tasks_of(server, journal) -> Callable[..., Any]:
    """The tasks of an app with these settings, in this process. The journal is empty."""

    def tasks_of(**conf: Any) -> Any:
        from tests.topologies.app import make_app, make_tasks

        return make_tasks(make_app(**conf))

    return tasks_of


@pytest.fixture
def work_with(tasks_of, start_worker) -> Callable[..., Any]:
    """Starts a worker with these settings; returns the same tasks in this process, and the worker."""

    def work_with(*, concurrency: int = 2, queues: str | None = None, **conf: Any) -> Any:
        queues = queues or conf.get("task_default_queue", "celery")
        worker = start_worker(APP, concurrency=concurrency, queues=queues, conf=conf)
        tasks = tasks_of(**conf)
        tasks.worker = worker
        return tasks

    return work_with
