"""The containers of docker-compose.yml, once with each broker, and what their demo says."""

import uuid
from collections.abc import Iterator
from typing import Any

import docker
import pytest
import redis
from docker.errors import DockerException

from examples.demo import History
from tests.deploy.stack import Scene, Stack, compose_command
from tests.tables import Recorded, failover_table, write
from tests.topologies.servers import free_port, not_here


def topology_of(nodeid: str) -> str:
    """What a test is about."""
    return "containers" if "test_deploy_containers" in nodeid else "deployment files"


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Tests passed, and seconds from a cut to the next body."""
    lines = failover_table(terminalreporter, topology_of)
    write(terminalreporter, "topologies", lines)


@pytest.fixture
def failovers(request) -> Recorded:
    """Seconds from a holder's end to the next body, for the table."""
    return Recorded(request.node, "failover")


@pytest.fixture(scope="session")
def engine() -> docker.DockerClient:
    try:
        engine = docker.from_env()
        engine.ping()
    except DockerException as error:
        not_here(f"no Docker engine answers: {error}")
    return engine


@pytest.fixture(scope="session")
def project(engine) -> Iterator[str]:
    """What the names of this run's projects start with; their images are removed at the end."""
    project = f"setnx-test-{uuid.uuid4().hex[:8]}"
    yield project
    for image in engine.images.list():
        for tag in image.tags:
            if tag.startswith(f"{project}-"):
                engine.images.remove(tag)


@pytest.fixture(scope="session", params=["redis", "rabbitmq"])
def broker(request) -> str:
    """The broker's service."""
    return request.param


@pytest.fixture(scope="session")
def stack(engine, project, broker) -> Iterator[Stack]:
    """Everything is up; Flower too, beside RabbitMQ."""
    command = compose_command()
    if command is None:
        not_here("neither `docker compose` nor `docker-compose` is here; DOCKER_COMPOSE may name it")
    environment = {"FLOWER_PORT": str(free_port())}
    if broker == "rabbitmq":
        environment |= {"COMPOSE_PROFILES": "rabbitmq,flower", "BROKER_URL": "amqp://rabbitmq"}
    stack = Stack(engine, command, f"{project}-{broker}", environment)
    try:
        stack.up()
        yield stack
    finally:
        stack.down()


@pytest.fixture
def scene(stack) -> Iterator[Scene]:
    """Calls of one key; nothing has happened to any before."""
    with redis.Redis.from_url(stack.redis_url(), decode_responses=True) as client:
        client.delete("demo:history", "demo:gate:settle")
        yield Scene(stack, client, History(client, "demo:history"), uuid.uuid4().hex)
