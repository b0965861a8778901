"""The app of the benchmarks of waiting: its workers note when each delivery came, and when each body ran."""

from __future__ import annotations

import json
import os
import time
from typing import Any

import redis
from celery import Celery
from celery.signals import task_postrun, task_prerun

from celery_setnx import SingletonTask

BROKER_URL, LOCK_URL = "BENCHMARK_BROKER_URL", "BENCHMARK_LOCK_URL"
RUNS, WAITS, GATE, WORK = "runs", "waits", "gate", "benchmarks.work"

_note: dict[str, Any] = {}


def make_app(broker_url: str, lock_url: str) -> Celery:
    """An app with a worker's view of the two servers."""
    app = Celery("serial", broker=broker_url, set_as_current=False)
    app.conf.update(setnx_url=lock_url, broker_connection_retry_on_startup=True, task_ignore_result=True)
    by_line = {"scope": "lines", "key": "line"}

    @app.task(base=SingletonTask, shared=False, name=WORK, singleton=by_line)  # type: ignore[untyped-decorator]
    def work(number: int, line: int, seconds: float) -> None:
        """Takes its time; calls of one line exclude each other."""
        _note["began"] = time.monotonic()
        time.sleep(seconds)
        _note["ended"] = time.monotonic()

    @app.task(base=SingletonTask, shared=False, name="benchmarks.hold", singleton=by_line)  # type: ignore[untyped-decorator]
    def hold(line: int) -> None:
        """Holds a line's lock until a gate is opened."""
        broker.blpop([GATE])

    return app


@task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
def _note_arrival(sender: Any, args: Any, **_: Any) -> None:
    _note.clear()
    if sender.name == WORK:
        _note.update(number=args[0], came=time.monotonic())


@task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
def _send_note(sender: Any, **_: Any) -> None:
    if sender.name == WORK:
        broker.rpush(RUNS if "ended" in _note else WAITS, json.dumps(_note))


app = make_app(os.environ.get(BROKER_URL, ""), os.environ.get(LOCK_URL, ""))
broker = redis.Redis.from_url(os.environ.get(BROKER_URL, "redis://"), socket_timeout=None)
