"""docker-compose.yml, brought up under a name of its own."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import docker
from docker.models.containers import Container

TOP = Path(__file__).parents[2]
PATIENCE_S = 600  # images may have to be pulled


Ran = subprocess.CompletedProcess[str]


def compose_command() -> list[str] | None:
    """`DOCKER_COMPOSE`, else `docker compose` or `docker-compose`, whichever is there."""
    named = os.environ.get("DOCKER_COMPOSE")
    for command in [shlex.split(named)] if named else [["docker", "compose"], ["docker-compose"]]:
        version = [*command, "version"]
        if shutil.which(command[0]) and not subprocess.run(version, capture_output=True).returncode:
            return command
    return None


class Stack:
    """The containers of one project.

    Args:
        engine: The engine that they run on.
        command: How Compose is called.
        project: The name of the project.
        environment: What the head of docker-compose.yml says to export.
    """

    def __init__(
        self, engine: docker.DockerClient, command: list[str], project: str, environment: dict[str, str]
    ) -> None:
        self.engine = engine
        self.project = project
        self._command = [*command, "-f", "docker-compose.yml", "-f", "tests/compose/published.yml"]
        self._environment = {**os.environ, "COMPOSE_PROJECT_NAME": project, **environment}

    def run(self, *arguments: str) -> Ran:
        """Run a command of Compose."""
        return subprocess.run(
            [*self._command, *arguments],
            cwd=TOP,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE_S,
        )

    def up(self) -> None:
        """What the head of docker-compose.yml says."""
        self._check(self.run("up", "--build", "--wait"))

    def start_again(self) -> None:
        """Start what has ended, from the images that are there."""
        self._check(self.run("up", "--no-build", "--wait"))

    def containers(self) -> dict[str, Container]:
        """The containers by service."""
        found = self.engine.containers.list(all=True, filters=self._ours)
        return {container.labels["com.docker.compose.service"]: container for container in found}

    def health(self, service: str) -> str:
        """`starting`, `healthy` or `unhealthy`; the state of a container that does not run."""
        labels = [self._ours["label"], f"com.docker.compose.service={service}"]
        [container] = self.engine.containers.list(all=True, filters={"label": labels})
        state = container.attrs["State"]
        return state["Health"]["Status"] if state["Running"] else state["Status"]

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

    def _check(self, up: Ran) -> None:
        assert up.returncode == 0, f"{up.stdout}\n{self.run('logs', '--tail', '50').stdout}"

    @property
    def _ours(self) -> dict[str, str]:
        return {"label": f"com.docker.compose.project={self.project}"}
