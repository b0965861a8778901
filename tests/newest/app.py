"""The app of the real run: one task, its workers' notes, and the process that publishes.

A worker's environment has the settings in JSON; a publisher is given them. All write to one journal.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from celery import Celery
from celery.signals import before_task_publish, task_received

from celery_setnx import SingletonTask, current_lock
from celery_setnx.call.message import HEADER, Call
from tests.chaos.history import History
from tests.harness import redelivery

TASK = "newest.save"
VISIBILITY_S = 6
SHORT_S, LONG_S, LONG_SHARE = (0.0, 0.03), (0.1, 0.4), 0.1
PRIORITIES = range(10)


class Settings(NamedTuple):
    """What all processes of a run are told.

    Attributes:
        broker: URL of the broker.
        locks: URL of the lock server.
        results: URL of the result backend.
        journal: File for the notes.
        singleton: Further options of the task.
    """

    broker: str = "memory://"
    locks: str = "redis://"
    results: str | None = None
    journal: str = os.devnull
    singleton: Mapping[str, Any] | None = None


class Planned(NamedTuple):
    """A call that is to be published: when (seconds from the run's start), of which key, its priority."""

    at_s: float
    key: str
    priority: int


def doom_of(settings: Settings) -> Path:
    """The file that has the next body killed."""
    return Path(f"{settings.journal}.doom")


def _is_doomed(settings: Settings) -> bool:
    try:
        doom_of(settings).unlink()
    except FileNotFoundError:
        return False
    return True


def make_app(settings: Settings) -> Celery:
    """An app with the task, whose bodies note their start under the lock."""
    app = Celery("newest", broker=settings.broker, backend=settings.results, set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_transport_options={
            **redelivery(VISIBILITY_S),
            "priority_steps": [*PRIORITIES],
            "queue_order_strategy": "priority",
        },
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        worker_prefetch_multiplier=1,
        setnx_url=settings.locks,
        setnx_prefix="newest",
    )
    note = History(Path(settings.journal)).note
    options = {
        "key": "key",
        "dedupe": "until_started",
        "on_duplicate": "replace",
        **(settings.singleton or {}),
    }

    @app.task(base=SingletonTask, bind=True, shared=False, name=TASK, singleton=options)  # type: ignore[untyped-decorator]
    def save(self: Any, key: str, version: str) -> str:
        lock, generation = current_lock(), Call.of(self.name, vars(self.request)).generation
        fence = lock.fence if lock else 0
        note("begin", id=self.request.id, key=key, generation=generation, fence=fence)
        seconds = random.uniform(*(LONG_S if random.random() < LONG_SHARE else SHORT_S))
        if _is_doomed(settings):
            time.sleep(random.random() * seconds)
            note("kill", how="body", id=self.request.id)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(seconds)
        return version

    @task_received.connect(weak=False)  # type: ignore[untyped-decorator]
    def note_received(request: Any, **_: Any) -> None:
        if request.name == TASK:
            again = bool((request.delivery_info or {}).get("redelivered"))
            note("received", id=request.id, again=again)

    return app


def publish(settings: Settings, slot: str, base: float, plan: Sequence[Planned]) -> None:
    """Publish the calls of a plan whose times are counted from `base` (monotonic)."""
    app, note, began = make_app(settings), History(Path(settings.journal)).note, 0.0

    @before_task_publish.connect(weak=False)  # type: ignore[untyped-decorator]
    def note_reserved(headers: Any, body: Any, **_: Any) -> None:
        """Its generation is reserved, and nothing is sent yet."""
        key, version = body[0]
        told = {"id": headers["id"], "key": key, "version": version}
        note("reserved", **told, generation=headers[HEADER]["generation"], began=began)

    for number, planned in enumerate(plan):
        time.sleep(max(0.0, base + planned.at_s - time.monotonic()))
        began = time.monotonic()
        version = f"{slot}.{number}"
        result = app.tasks[TASK].apply_async((planned.key, version), priority=planned.priority)
        note("sent", id=result.id, slot=slot)
