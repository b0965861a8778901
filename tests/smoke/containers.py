"""The containers of these tests: servers that can be paused, and workers whose log is the journal."""

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from celery.utils.nodenames import worker_direct
from pytest_celery import CeleryTestWorker, CeleryWorkerContainer, RabbitMQContainer, RedisContainer

from tests.harness import Journal


class Server:
    """A server by way of its published port, as `host_url` says.

    Where there is a file /.dockerenv, pytest-docker-tools would give its port inside the network.
    """

    _container: Any
    ports: Any

    def get_addr(self, port: str) -> tuple[str, int]:
        return "127.0.0.1", self.ports[port][0]

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Every process of it stands still; its connections stay open."""
        self._container.pause()
        try:
            yield
        finally:
            self._container.unpause()


class RedisServer(Server, RedisContainer):
    """A Redis."""


class RabbitMQServer(Server, RabbitMQContainer):
    """A RabbitMQ."""


class WorkerContainer(CeleryWorkerContainer):
    """A worker whose readiness the fixture `workers` waits for, so that two can start side by side."""

    ready_prompt = None

    def output(self) -> list[str]:
        """The lines of its standard output."""
        return self._container.logs(stderr=False).decode().splitlines()


class Logs(Journal):
    """What the bodies in some containers have printed, in order."""

    def __init__(self, containers: Iterable[WorkerContainer]) -> None:
        self._containers = list(containers)

    def entries(self, **wanted: Any) -> list[dict[str, Any]]:
        lines = [line for container in self._containers for line in container.output()]
        entries = [json.loads(line) for line in lines if line.startswith('{"what": ')]
        entries.sort(key=lambda entry: entry["at"])
        return [e for e in entries if all(e.get(name) == value for name, value in wanted.items())]


def call_on(worker: CeleryTestWorker, task: Any, *args: Any, **options: Any) -> Any:
    """Send a call to one worker and no other."""
    return task.apply_async(args, queue=worker_direct(worker.hostname()), **options)
