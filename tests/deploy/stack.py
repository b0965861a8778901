"""The stage of these tests: docker-compose.yml, brought up under a name of its own."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import docker
import redis
from docker.models.containers import Container
from docker.models.networks import Network

from celery_setnx import SetnxLock
from examples.demo import History
from tests.harness import Journal, wait_until

TOP = Path(__file__).parents[2]
STRANDED = Path(__file__).with_name("stranded.py")
SETTLE, LEASE_S = "examples.demo_app.settle", 3
PATIENCE_S = 600  # images may have to be pulled


def compose_command() -> list[str] | None:
    """`DOCKER_COMPOSE`, else `docker compose` or `docker-compose`, whichever is there."""
    named = os.environ.get("DOCKER_COMPOSE")
    for command in [shlex.split(named)] if named else [["docker", "compose"], ["docker-compose"]]:
        version = [*command, "version"]
        if shutil.which(command[0]) and not subprocess.run(version, capture_output=True).returncode:
            return command
    return None


@dataclass
class Stack:
    """The containers of one project."""

    engine: docker.DockerClient
    command: list[str]  # how Compose is called
    project: str
    environment: dict[str, str]  # what the head of docker-compose.yml says to export

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of Compose."""
        return subprocess.run(
            [*self.command, "-f", "docker-compose.yml", "-f", "tests/deploy/published.yml", *arguments],
            cwd=TOP,
            env={**os.environ, "COMPOSE_PROJECT_NAME": self.project, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )

    def up(self) -> None:
        """What the head of docker-compose.yml says."""
        ran = self.run("up", "--build", "--wait")
        assert ran.returncode == 0, f"{ran.stdout}\n{self.run('logs', '--tail', '50').stdout}"

    def containers(self) -> dict[str, Container]:
        """The containers by service."""
        labels = [self._ours["label"], "com.docker.compose.oneoff=False"]
        found = self.engine.containers.list(all=True, filters={"label": labels})
        return {container.labels["com.docker.compose.service"]: container for container in found}

    @contextmanager
    def stranded(self, queue: str) -> Iterator[Stranded]:
        """A worker of one queue in one more container, which has the image and the settings of the others.

        Beat's service is the one that names no host: each container of it is a host of its own.
        """
        name = f"{self.project}-{queue}"
        command = ["run", "--detach", "-T", "--no-deps", "--name", name, "beat"]
        ran = self.run(*command, "python", "-c", STRANDED.read_text(), queue)
        assert ran.returncode == 0, ran.stdout
        container = self.engine.containers.get(name)
        try:
            wait_until(lambda: b" ready." in container.logs(), f"{name} is ready")
            yield Stranded(container, self.engine.networks.list(names=[f"{self.project}_default"])[0])
        finally:
            container.remove(force=True)

    def redis_url(self) -> str:
        """Where the tests find the Redis of the containers."""
        return f"redis://{self.run('port', 'redis', '6379').stdout.strip()}/0"

    def down(self) -> None:
        """What the head of docker-compose.yml says; nothing may be left."""
        ran = self.run("down", "--volumes")
        left = self.engine.containers.list(all=True, filters=self._ours)
        left += [
            *self.engine.networks.list(filters=self._ours),
            *self.engine.volumes.list(filters=self._ours),
        ]
        assert (ran.returncode, left) == (0, []), ran.stdout

    @property
    def _ours(self) -> dict[str, str]:
        return {"label": f"com.docker.compose.project={self.project}"}


@dataclass
class Stranded:
    """The container of a worker whose bodies need no network."""

    container: Container
    network: Network

    @contextmanager
    def cut_off(self) -> Iterator[None]:
        """Without its network."""
        self.network.disconnect(self.container)
        yield
        self.network.connect(self.container)

    def go_on(self) -> None:
        """Let its bodies end."""
        assert self.container.exec_run(["touch", "/tmp/go-on"]).exit_code == 0


@dataclass
class Scene:
    """The demo's task on a stack: what has happened to calls of one key."""

    stack: Stack
    client: redis.Redis
    history: History
    key: str

    def settle(self, queue: str, until: str) -> str:
        """Have a call sent to the broker, whichever it is; its id, when this has happened to it."""
        command = ["celery", "-A", "examples.compose.app", "call", SETTLE, "--queue", queue]
        ran = self.stack.containers()["beta"].exec_run([*command, "--args", json.dumps([self.key])])
        assert ran.exit_code == 0, ran.output
        call = ran.output.decode().split()[-1]
        wait_until(lambda: self.seen(until, call), f"{until} of the call on {queue}")
        return str(call)

    def seen(self, what: str, call: str) -> list[dict[str, Any]]:
        """What has happened to a call."""
        self.history.read()
        return self.history.of(what, task_id=call)

    def open(self, times: int) -> None:
        """Let so many bodies end."""
        self.client.rpush("demo:gate:settle", *["open"] * times)

    def holder(self, lock: str) -> Any:
        """Who holds a lock."""
        return SetnxLock(self.client, lock).holder()


class Logs(Journal):
    """What stranded workers have printed, in order: one engine, one clock."""

    def __init__(self, *containers: Container) -> None:
        self._containers = containers

    def entries(self, **wanted: Any) -> list[dict[str, Any]]:
        logs = [container.logs(stderr=False).decode() for container in self._containers]
        lines = [line for log in logs for line in log.splitlines()]
        entries = [json.loads(line) for line in lines if line.startswith('{"what": ')]
        entries.sort(key=lambda entry: entry["at"])
        return [e for e in entries if all(e.get(name) == value for name, value in wanted.items())]


def health_of(container: Container) -> str:
    """`starting`, `healthy` or `unhealthy`; the state of a container that does not run."""
    state = container.attrs["State"]
    return state["Health"]["Status"] if state["Running"] else state["Status"]
