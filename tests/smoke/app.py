"""The app that the worker containers run, and its tasks for any app. The journal is standard output."""

import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from celery import Celery

import tests.app
from celery_setnx import LockLost, SingletonTask
from tests.app import body, control, make_app
from tests.harness import Journal, wait_until

LEASE_S = 3.0
GO_ON = "/tmp/go-on"


class Output(Journal):
    """A journal in the container's log, which neither a kill nor a cut takes away from the tests."""

    def __init__(self) -> None:
        pass

    def apart(self) -> Journal:
        return self

    def write(self, what: str, **details: Any) -> None:
        # One engine, one clock: by it the tests put what several containers say in order.
        about = {"host": socket.gethostname(), "pid": os.getpid(), "at": time.monotonic()}
        line = json.dumps({"what": what, **about, **details})
        os.write(1, f"{line}\n".encode())  # past Celery, which turns prints into log lines


journal = tests.app.journal = Output()


def make_tasks(app: Celery) -> SimpleNamespace:
    """The tasks of an app. A conflict comes back soon, so that a rival starts as soon as it may."""
    options = {"key": "name", "lease": LEASE_S, "on_conflict": "retry"}
    options |= {"retry_delay": 0.1, "retry_delay_max": 0.4}

    def task(name: str, singleton: dict[str, Any] = options, **more: Any) -> Any:
        return app.task(
            base=SingletonTask, shared=False, bind=True, name=f"smoke.{name}", singleton=singleton, **more
        )

    @task("work")
    def work(self: Any, name: str) -> str:
        """Waits at its gate, if its name says so, and asks before it relies on its lock."""
        body(name)
        self.lock.ensure()
        return name

    @task("late", acks_late=True, reject_on_worker_lost=True)
    def late(self: Any, name: str) -> str:
        """Delivered again if its worker dies."""
        return body(name)

    @task("once", {**options, "dedupe": "until_started"})
    def once(self: Any, name: str) -> str:
        """At most one call of a name is queued."""
        return body(name)

    @task("count")
    def count(self: Any, name: str) -> None:
        """Adds one to a number in Redis in two steps, and says how many do so at this moment."""
        inside = control.incr(f"inside:{name}")
        number = int(control.get(f"number:{name}") or 0)
        journal.write("counted", name=name, inside=inside)
        time.sleep(0.02)  # a body must take time to be in the way
        control.set(f"number:{name}", number + 1)
        control.decr(f"inside:{name}")

    @task("stranded")
    def stranded(self: Any, name: str) -> None:
        """Asks after its lock until it is told of the loss; ends when it finds a file, needing no network."""
        about = {"task_id": self.request.id, "name": name, "fence": self.lock.fence}
        journal.write("start", **about)
        try:
            while True:
                self.lock.ensure()
                time.sleep(0.05)
        except LockLost:
            journal.write("told", **about)
            wait_until(Path(GO_ON).exists, GO_ON, 60)
            raise

    return SimpleNamespace(work=work, late=late, once=once, count=count, stranded=stranded)


app = make_app("smoke", broker_transport_options={})  # its URLs are in the environment
tasks = make_tasks(app)
