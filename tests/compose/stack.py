"""docker-compose.yml, brought up under a name of its own."""

import os
import shlex
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import docker
from docker.models.containers import Container

TOP = Path(__file__).parents[2]
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
            [*self.command, "-f", "docker-compose.yml", "-f", "tests/compose/published.yml", *arguments],
            cwd=TOP,
            env={**os.environ, "COMPOSE_PROJECT_NAME": self.project, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )

    def up(self, images: str = "--build") -> None:
        """What the head of docker-compose.yml says; with `--no-build` from the images that are there."""
        ran = self.run("up", images, "--wait")
        assert ran.returncode == 0, f"{ran.stdout}\n{self.run('logs', '--tail', '50').stdout}"

    def containers(self) -> dict[str, Container]:
        """The containers by service."""
        found = self.engine.containers.list(all=True, filters=self._ours)
        return {container.labels["com.docker.compose.service"]: container for container in found}

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


def health_of(container: Container) -> str:
    """`starting`, `healthy` or `unhealthy`; the state of a container that does not run."""
    state = container.attrs["State"]
    return state["Health"]["Status"] if state["Running"] else state["Status"]
