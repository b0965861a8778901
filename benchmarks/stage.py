"""Where the benchmarks of waiting take place: two servers, workers, and what these have noted."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import redis

from benchmarks import serialapp
from benchmarks.serialapp import BROKER_URL, LOCK_URL, RUNS, WAITS
from examples.embedded import EmbeddedServer
from tests.harness import Worker, wait_until

Note = Mapping[str, Any]

DEADLINE_S = 600.0


class Stage:
    """A broker, a lock server of its own, so that its figures are the locks', and workers.

    Args:
        module: The module of the app, with its `make_app`. Defaults to that of the benchmarks of waiting.

    Attributes:
        tasks: The tasks of the app, by the last part of their names.
        broker: A client of the broker's server.
        locks: A client of the lock server.
    """

    def __init__(self, module: Any = serialapp) -> None:
        self._module = module.__name__
        self._stack = ExitStack()
        self._logs = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        broker, locks = (self._stack.enter_context(EmbeddedServer()) for _ in range(2))
        self._environment = {BROKER_URL: broker.url(), LOCK_URL: locks.url()}
        self._workers: list[Worker] = []
        app = module.make_app(broker.url(), locks.url())
        self._stack.callback(app.close)
        self.tasks = {name.rpartition(".")[2]: task for name, task in app.tasks.items()}
        self.broker = self._stack.enter_context(redis.Redis.from_url(broker.url()))
        self.locks = self._stack.enter_context(redis.Redis.from_url(locks.url()))

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def start_worker(self, *, environment: Mapping[str, str] | None = None, **options: Any) -> Worker:
        """Start a worker; it is killed at the end."""
        settled = {**self._environment, **(environment or {})}
        worker = Worker(self._logs, self._module, environment=settled, **options)
        self._stack.callback(_end, worker)
        self._workers.append(worker)
        return worker

    def notes(self, of: str) -> list[Note]:
        """What the workers have noted of all deliveries that were `RUNS` of a body, or `WAITS`."""
        return [json.loads(note) for note in self.broker.lrange(of, 0, -1)]

    def wait_for(self, of: str, count: int) -> None:
        """Wait for so many notes.

        Raises:
            AssertionError: They have not come in time.
        """
        wait_until(lambda: self.broker.llen(of) >= count, f"{count} {of}", DEADLINE_S)

    def scripts(self) -> int:
        """How many scripts the lock server has run: all that we send it."""
        commands = self.locks.info("commandstats")
        return sum(commands.get(f"cmdstat_{name}", {"calls": 0})["calls"] for name in ("eval", "evalsha"))

    def forget(self) -> None:
        """Begin to count, and to note, anew."""
        self.broker.delete(RUNS, WAITS)
        self.locks.config_resetstat()

    def cpu_s(self) -> float:
        """Seconds of processor time that the workers and both servers have used, as Linux counts them."""
        sessions = {worker.process.pid for worker in self._workers}
        servers = (client.info("cpu") for client in (self.broker, self.locks))
        return sum(_cpu_s_by_session(sessions)) + sum(
            float(about["used_cpu_user"]) + float(about["used_cpu_sys"]) for about in servers
        )


def _end(worker: Worker) -> None:
    if worker.process.poll() is None:
        worker.kill()


def _cpu_s_by_session(sessions: set[int]) -> Iterator[float]:
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = process.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) in sessions:
            yield (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
