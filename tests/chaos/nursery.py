"""Workers as forks of one process that has imported what each needs: a start takes a fifth of the time.

`python -m tests.chaos.nursery` reads orders in JSON, one a line: a worker's arguments, environment and log.
It answers each with the worker's pid, and ends with its standard input; who has ended is a zombie till then.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from importlib import import_module
from typing import Any

from celery_setnx.process import has_ended

_NEEDED = (
    "celery.apps.worker", "celery.backends.redis", "celery.bin.celery", "celery.concurrency.prefork",
    "celery.fixups.django", "celery.worker.autoscale", "celery.worker.components", "celery.worker.consumer",
    "celery.worker.strategy", "kombu.transport.redis", "tests.soak.flaws",
)  # fmt: skip


class Nursery:
    """Starts workers for as long as it is open."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._lock = threading.Lock()

    def popen(self, command: list[str], *, stdout: Any, env: dict[str, str], **_as_always: Any) -> "Sprout":
        """In place of `subprocess.Popen`: a session of its own, with its output in a file."""
        order = {"argv": command[2:], "env": env, "log": stdout.name}
        with self._lock:
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            return Sprout(int(self._process.stdout.readline()))

    def close(self) -> None:
        """Start no more, and kill those that live, also who never got ready."""
        self._process.communicate()


class Sprout:
    """What `subprocess.Popen` says of a process, of one that is another's child."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def poll(self) -> int | None:
        """0 once it has ended, however it did."""
        return 0 if has_ended(self.pid) else None

    def wait(self, timeout: float = 60.0) -> None:
        """Wait for its end."""
        give_up = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > give_up:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.005)

    def terminate(self) -> None:
        """Warm shutdown."""
        os.kill(self.pid, signal.SIGTERM)

    returncode = 0


def main() -> None:
    """Import all that a worker will, and fork; at the end kill those that live."""
    for module in _NEEDED:
        import_module(module)
    pids = []
    for line in sys.stdin:
        order = json.loads(line)
        pid = os.fork()
        if pid == 0:
            run(**order)
        pids.append(pid)
        print(pid, flush=True)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


def run(argv: list[str], env: dict[str, str], log: str) -> None:
    """Be a worker."""
    os.setsid()
    nothing, file = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND)
    for source, target in ((nothing, 0), (file, 1), (file, 2)):
        os.dup2(source, target)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    from celery.__main__ import main as worker

    sys.exit(worker())


if __name__ == "__main__":
    main()
