"""The app of the benchmark of recovery: one task for each way to lock, whose bodies note their start."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import redis
from celery import Celery, Task
from celery_once import QueueOnce
from celery_singleton import Singleton

from benchmarks.peers import UNIQUE, Heimdall, once_settings
from celery_setnx import SingletonTask

BROKER_URL, LOCK_URL = "BENCHMARK_BROKER_URL", "BENCHMARK_LOCK_URL"
DURATION, ELSEWHERE_TOO = "BENCHMARK_DURATION_S", "BENCHMARK_ELSEWHERE"
STARTS = "starts"
HOLD_S = 600.0

OURS, ELSEWHERE = "celery_setnx", "celery_setnx, elsewhere"
ONCE, SINGLETON, HEIMDALL = "celery-once", "celery-singleton", "celery-heimdall"
LOCK = "redis-py's Lock in the body"


def make_app(broker_url: str, lock_url: str, duration_s: int, *, elsewhere: bool = False) -> Celery:
    """An app with the task of every way.

    Args:
        broker_url: The broker.
        lock_url: Where the locks are.
        duration_s: Our lease, and the peers' expiry.
        elsewhere: Whether its workers take other workers to be on another host. Defaults to False.
    """
    app = Celery("recovery", broker=broker_url, set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        task_ignore_result=True,
        setnx_url=lock_url,
        setnx_same_host=not elsewhere,
        singleton_backend_url=lock_url,
        ONCE=once_settings(lock_url, duration_s),
    )
    client = redis.Redis.from_url(lock_url)
    ours = {"singleton": {"key": "key", "lease": duration_s}}
    heimdall = {**UNIQUE, "unique_timeout": duration_s, "key": lambda args, _kwargs: args[0]}
    _add(app, OURS, SingletonTask, ours)
    _add(app, ELSEWHERE, SingletonTask, ours)
    _add(app, ONCE, QueueOnce, {"once": {"keys": ["key"], "timeout": duration_s, "graceful": True}})
    _add(app, SINGLETON, Singleton, {"unique_on": ["key"], "lock_expiry": duration_s})
    _add(app, HEIMDALL, Heimdall, {"heimdall": heimdall})
    _add(app, LOCK, Task, {}, lambda key: client.lock(f"body:{key}", timeout=duration_s))
    return app


def _add(
    app: Celery,
    name: str,
    base: type[Task],
    options: dict[str, Any],
    lock: Callable[[str], Any] = nullcontext,
) -> None:
    @app.task(base=base, shared=False, name=name, **options)  # type: ignore[untyped-decorator]
    def work(key: str, holds: bool) -> None:
        with lock(key):
            note = {"way": name, "key": key, "holds": holds, "pid": os.getpid(), "at": time.monotonic()}
            notes.rpush(STARTS, json.dumps(note))
            if holds:
                time.sleep(HOLD_S)  # it is killed


notes = redis.Redis.from_url(os.environ.get(BROKER_URL, "redis://"))
app = make_app(
    os.environ.get(BROKER_URL, "memory://"),
    os.environ.get(LOCK_URL, "redis://"),
    int(os.environ.get(DURATION, "1")),
    elsewhere=ELSEWHERE_TOO in os.environ,
)
