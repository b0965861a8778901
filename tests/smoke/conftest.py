"""Real brokers and two real workers, each in a container of its own, and a table at the end.

    python -m pytest tests/smoke

It needs the `dev` extra, a Docker engine (DOCKER_HOST, if it is elsewhere) and three images: that of the
Dockerfile, and those in SMOKE_REDIS_IMAGE and SMOKE_RABBITMQ_IMAGE (redis:7 and rabbitmq:3). The workers run
the wheel SMOKE_WHEEL, or one that is built now. Servers live for the whole run, workers for a test: every
test has queues and keys of its own.
"""

import json
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import redis
from pytest_celery import (
    RABBITMQ_CONTAINER_TIMEOUT,
    REDIS_CONTAINER_TIMEOUT,
    CeleryTestBackend,
    CeleryTestBroker,
    CeleryTestWorker,
    CeleryWorkerCluster,
)
from pytest_docker_tools import container, fxtr, network, volume

from tests.harness import CONF, redelivery, wait_until
from tests.smoke.containers import Logs, RabbitMQServer, RedisServer, WorkerContainer
from tests.tables import Recorded, failover_table, write

# tests.app asks for it when it is imported; only in the containers is it used.
os.environ["SETNX_TEST_URL"] = "redis://unused"
from tests.smoke.app import LEASE_S, make_tasks

TOP = Path(__file__).parents[2]
REDIS_IMAGE = os.environ.get("SMOKE_REDIS_IMAGE", "redis:7")
RABBITMQ_IMAGE = os.environ.get("SMOKE_RABBITMQ_IMAGE", "rabbitmq:3")
BROKERS = ("redis", "rabbitmq")
REDELIVERY = redelivery(5)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Broker, tests passed, and seconds from kill or cut to the next body."""
    lines = failover_table(
        terminalreporter, lambda nodeid: f"containers, {nodeid[:-1].rpartition('[')[2]} broker"
    )
    redelivery = f"Redis delivers again after {REDELIVERY['visibility_timeout']} s"
    write(terminalreporter, "topologies", [*lines, f"leases of {LEASE_S:g} s; {redelivery}"])


@pytest.fixture(scope="session")
def docker_client() -> docker.DockerClient:
    """The engine. Without one there is nothing to test here."""
    try:
        client = docker.from_env()
        client.ping()
    except docker.errors.DockerException as error:
        pytest.exit(f"tests/smoke needs a Docker engine, and DOCKER_HOST if it is elsewhere: {error}", 1)
    return client


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The package as users get it."""
    if "SMOKE_WHEEL" in os.environ:
        return Path(os.environ["SMOKE_WHEEL"])
    directory = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(directory), str(TOP)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(directory.glob("*.whl"))


@pytest.fixture(scope="session")
def worker_image(docker_client, wheel, tmp_path_factory) -> Iterator[Any]:
    """The wheel, and of the tests only what a worker runs."""
    context = tmp_path_factory.mktemp("context")
    shutil.copy(wheel, context)
    for name in ("harness.py", "app.py", "smoke/app.py"):
        (context / "tests" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(TOP / "tests" / name, context / "tests" / name)
    shutil.copy(TOP / "tests/smoke/Dockerfile", context)
    image, _log = docker_client.images.build(
        path=str(context), tag=f"celery-setnx-smoke:{uuid.uuid4().hex[:12]}", rm=True, forcerm=True
    )
    yield image
    docker_client.images.remove(image.id, force=True)


def redis_server() -> Any:
    """A Redis for the whole run. With /data in memory the VOLUME of the hub's image leaves nothing behind."""
    return container(
        scope="session",
        image=REDIS_IMAGE,
        command=RedisServer.command(),
        ports=RedisServer.ports(),
        network="{default_pytest_celery_network.name}",
        tmpfs={"/data": ""},
        wrapper_class=RedisServer,
        timeout=REDIS_CONTAINER_TIMEOUT,
    )


default_pytest_celery_network = network(scope="session")
default_redis_broker = redis_server()
default_redis_backend = redis_server()
lock_server = redis_server()
rabbitmq_volume = volume(scope="session")
default_rabbitmq_broker = container(
    scope="session",
    image=RABBITMQ_IMAGE,
    ports=RabbitMQServer.ports(),
    network="{default_pytest_celery_network.name}",
    # Instead of the nameless one that the VOLUME of the hub's image would leave behind.
    volumes={"{rabbitmq_volume.name}": {"bind": "/var/lib/rabbitmq", "mode": "rw"}},
    wrapper_class=RabbitMQServer,
    timeout=RABBITMQ_CONTAINER_TIMEOUT,
)


def worker_container() -> Any:
    """A worker for one test."""
    return container(
        image="{worker_image.id}",
        command=fxtr("default_worker_command"),
        environment=fxtr("default_worker_env"),
        network="{default_pytest_celery_network.name}",
        wrapper_class=WorkerContainer,
    )


default_worker_container = worker_container()
other_worker_container = worker_container()


@pytest.fixture(params=BROKERS)
def celery_broker(request) -> CeleryTestBroker:
    """Each broker in turn. The locks live in `lock_server` whatever it is."""
    return request.getfixturevalue(f"celery_{request.param}_broker")


@pytest.fixture
def celery_backend(celery_redis_backend) -> CeleryTestBackend:
    """The Redis of results and gates."""
    return celery_redis_backend


@pytest.fixture
def settings() -> dict[str, Any]:
    """What workers and tests agree on. Its own queue keeps a test from what others have left behind."""
    return {
        "task_default_queue": f"smoke-{uuid.uuid4().hex[:12]}",
        "worker_direct": True,
        "setnx_prefix": "t",
    }


@pytest.fixture
def celery_setup_app(celery_setup_app, settings, lock_server) -> Any:
    """The app of the test process."""
    celery_setup_app.conf.update({**settings, "setnx_url": lock_server.host_url})
    return celery_setup_app


@pytest.fixture
def default_worker_container_cls() -> type[WorkerContainer]:
    return WorkerContainer


@pytest.fixture
def default_worker_command(settings) -> list[str]:
    return [
        "celery", "-A", "tests.smoke.app", "worker", "-c", "2", "-l", "INFO",
        "-n", f"{WorkerContainer.worker_name()}@%h", "-Q", settings["task_default_queue"],
        "--without-gossip", "--without-mingle", "--without-heartbeat",
    ]  # fmt: skip


@pytest.fixture
def default_worker_env(default_worker_env, celery_backend, settings, lock_server) -> dict[str, str]:
    """Where the servers are, seen from a container."""
    conf = {**settings, "setnx_url": lock_server.url}
    if default_worker_env["CELERY_BROKER_URL"].startswith("redis:"):
        conf["broker_transport_options"] = REDELIVERY
    url = celery_backend.container.url.rpartition("/")[0]
    return {**default_worker_env, "SETNX_TEST_URL": url, CONF: json.dumps(conf)}


@pytest.fixture
def celery_worker(celery_setup_worker) -> CeleryTestWorker:
    return celery_setup_worker


@pytest.fixture
def celery_worker_cluster(celery_worker, other_worker_container, default_worker_app) -> CeleryWorkerCluster:
    """Two workers of one queue."""
    return CeleryWorkerCluster(celery_worker, CeleryTestWorker(other_worker_container, default_worker_app))


@pytest.fixture
def workers(celery_setup) -> tuple[CeleryTestWorker, ...]:
    """Both workers, ready."""
    workers = celery_setup.worker_cluster.nodes
    for worker in workers:
        wait_until(lambda w=worker: " ready." in w.logs(), f"{worker.hostname()} ready", 60)
    return workers


@pytest.fixture
def journal(workers) -> Logs:
    """What happens in the test's workers, whatever is done to them."""
    return Logs(worker.container for worker in workers)


@pytest.fixture
def tasks(celery_setup, workers) -> Any:
    """The tasks that the workers run."""
    return make_tasks(celery_setup.app)


@pytest.fixture
def control(celery_setup) -> Iterator[redis.Redis]:
    """The Redis in which bodies count and wait."""
    with redis.Redis.from_url(celery_setup.backend.container.host_url) as client:
        yield client


@pytest.fixture
def gates(control) -> Callable[..., None]:
    """Call it with a name to let one body of that name go on, or as many as are given."""

    def open_gate(name: str, times: int = 1) -> None:
        control.rpush(f"gate:{name}", *["open"] * times)
        control.expire(f"gate:{name}", 60)

    return open_gate


@pytest.fixture(autouse=True)
def locks(lock_server) -> Iterator[redis.Redis]:
    """A client of the lock server; after every test all of its keys must have a TTL."""
    with redis.Redis.from_url(lock_server.host_url, decode_responses=True) as client:
        yield client
        keys = list(client.scan_iter())
        assert keys
        assert {key for key in keys if client.pttl(key) == -1} == set()


@pytest.fixture
def name() -> str:
    """The test's own key, and the name of its gate."""
    return f"gated-{uuid.uuid4().hex}"


@pytest.fixture
def failovers(request) -> Recorded:
    """Seconds from a holder's end to the next body, under a lease of LEASE_S, for the table."""
    return Recorded(request.node, "failover")
