"""The containers of docker-compose.yml, once with each broker, and what their demo says."""

import os
import socket
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

import docker
import pytest
from docker.errors import DockerException

from tests.compose.stack import Ran, Stack, compose_command


def not_here(missing: str) -> NoReturn:
    """Skip what this machine cannot run; the CI's machine can."""
    if os.environ.get("CI") == "true":
        pytest.fail(missing)
    pytest.skip(missing)


@pytest.fixture(scope="session")
def engine() -> Iterator[docker.DockerClient]:
    try:
        engine = docker.from_env()
        engine.ping()
    except DockerException as error:
        not_here(f"no Docker engine answers: {error}")
    yield engine
    engine.close()


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


@dataclass(frozen=True)
class Demonstration(Ran):
    """What the demo said, and how often alpha's container was started again meanwhile."""

    restarts: int


@pytest.fixture(scope="session")
def demo(stack) -> Demonstration:
    """One run of the demo."""
    before = stack.containers()["alpha"].attrs["RestartCount"]
    ran = stack.run("run", "--rm", "-T", "demo")
    restarts = stack.containers()["alpha"].attrs["RestartCount"] - before
    return Demonstration(ran.code, ran.text, restarts)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
