"""The apps of the benchmark of workers: a task that does nothing, in every way to run it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery import Celery, Task
from celery.signals import worker_ready
from celery.utils.imports import symbol_by_name
from celery_once import QueueOnce
from celery_singleton import Singleton

from benchmarks.peers import UNIQUE, Heimdall, once_settings
from celery_setnx.connection import client_for
from celery_setnx.lock.wire import ask

BROKER_URL, LOCK_URL = "BENCHMARK_BROKER_URL", "BENCHMARK_LOCK_URL"
WAY, COUNT = "BENCHMARK_WAY", "BENCHMARK_COUNT"
EXPIRY_S = 3600


class Bare(Task):  # type: ignore[misc]
    """No lock: two commands about the body, over the same connection as ours, which is the floor."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the body between the two."""
        client, name = client_for(self.app), f"bare:{self.request.id}"
        ask(client, ("SET", name, "1", "NX", "PX", str(EXPIRY_S * 1000)))
        try:
            return self.run(*args, **kwargs)
        finally:
            ask(client, ("DEL", name))


@dataclass(frozen=True)
class Way:
    """One way to run the task.

    Attributes:
        base: Base class of the task; of ours its name, so that no other way's worker has our hooks.
        options: Of the task. Defaults to none.
        locks_at: When it takes a lock: `"publish"`, `"run"`, or None.
    """

    base: type[Task] | str
    options: dict[str, Any] = field(default_factory=dict)
    locks_at: str | None = None


PLAIN, OURS, BARE = "plain Celery", "celery_setnx", "two bare commands"
ONCE, SINGLETON, HEIMDALL = "celery-once", "celery-singleton", "celery-heimdall"
WAYS = {
    PLAIN: Way(Task),
    OURS: Way("celery_setnx:SingletonTask", locks_at="run"),
    BARE: Way(Bare),
    ONCE: Way(QueueOnce, locks_at="publish"),
    SINGLETON: Way(Singleton, {"lock_expiry": EXPIRY_S}, "publish"),
    HEIMDALL: Way(Heimdall, {"heimdall": UNIQUE}, "publish"),
}


def queue_of(name: str) -> str:
    """The queue of a way."""
    return name.replace(" ", "-")


def new_app(name: str, broker_url: str, lock_url: str) -> Celery:
    """An app for any of the ways, without a task; results are ignored."""
    app = Celery(queue_of(name), broker=broker_url, set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        task_default_queue=queue_of(name),
        task_ignore_result=True,
        setnx_url=lock_url,
        singleton_backend_url=lock_url,
        ONCE=once_settings(lock_url, EXPIRY_S),
    )
    return app


def add_task(app: Celery, name: str, way: Way, work: Callable[..., object]) -> Task:
    """Give an app a task of a way."""
    base = symbol_by_name(way.base)
    return app.task(base=base, shared=False, name=name, **way.options)(work)


def make_app(name: str, broker_url: str, lock_url: str) -> Celery:
    """An app with the task in one way."""
    way, app = WAYS[name], new_app(name, broker_url, lock_url)
    add_task(app, "benchmark.work", way, work)
    return app


def work(number: int) -> None:
    """Next to nothing: one byte in a file counts the call."""
    os.write(_count, b".")


@worker_ready.connect(weak=False)  # type: ignore[untyped-decorator]
def _say_so(**_: Any) -> None:
    print(" ready.")  # a worker that logs warnings only, as by default, does not say it


_count = os.open(os.environ.get(COUNT, os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
app = make_app(
    os.environ.get(WAY, PLAIN), os.environ.get(BROKER_URL, "memory://"), os.environ.get(LOCK_URL, "redis://")
)
