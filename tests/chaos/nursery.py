"""Processes forked from one that has imported what each needs: a start takes a fifth of the time."""

import ctypes
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing import forkserver, get_context
from multiprocessing.context import ForkServerProcess
from typing import Any

_PR_SET_PDEATHSIG = 1
_NEEDED = [
    "celery.apps.worker", "celery.backends.redis", "celery.bin.celery", "celery.concurrency.prefork",
    "celery.fixups.django", "celery.worker.autoscale", "celery.worker.components", "celery.worker.consumer",
    "celery.worker.strategy", "kombu.transport.redis", "tests.chaos.bare",
]  # fmt: skip
get_context("forkserver").set_forkserver_preload(_NEEDED)


class Fork(ForkServerProcess):
    """A process that says what a `subprocess.Popen` does, and does not outlive who has started it."""

    def __init__(self, target: Any, *args: Any) -> None:
        super().__init__(target=target, args=args, daemon=True)
        self.start()

    returncode = ForkServerProcess.exitcode

    def run(self) -> None:
        """Called in the process."""
        # The nursery ends with its driver only if nobody else has this end of their pipe.
        os.close(forkserver._forkserver._forkserver_alive_fd)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        super().run()

    def poll(self) -> int | None:
        """Its exit code, once it has ended."""
        return self.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless it has ended."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, number)

    def wait(self, timeout: float = 60.0) -> int:
        """Wait for its end."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(self.name, timeout)
        return self.exitcode


def worker(command: list[str], *, stdout: Any, env: dict[str, str], **_as_always: Any) -> Fork:
    """In place of `subprocess.Popen`, for a Celery worker: a session of its own, its output in a file."""
    return Fork(_be_worker, command[2:], env, stdout.name)


def _be_worker(argv: list[str], env: dict[str, str], log: str) -> None:
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.environ.clear()
    os.environ.update(env)
    sys.argv = argv
    from celery.__main__ import main

    main()
