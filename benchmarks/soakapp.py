"""The app of the soak: one task, under the lock of one library. Its bodies write to the journal."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import redis
import redis_lock
from celery import Celery, Task
from celery.signals import task_failure, task_postrun
from celery.utils.imports import symbol_by_name
from celery_once import QueueOnce

from benchmarks.peers import UNIQUE, Heimdall, once_settings
from tests.chaos.history import History
from tests.harness import redelivery

LEASE_S = 2
VISIBILITY_S = 10
TASK, DONE, SKIPPED = "soak.work", "done", "skipped"
OURS, ELSEWHERE = "celery_setnx", "celery_setnx, other hosts"


@dataclass(frozen=True)
class Way:
    """One library's lock.

    Attributes:
        base: Base class of the task; of ours its name, so that no other way's worker has our hooks.
        options: Of the task. Defaults to none.
        lock: Makes the lock that the body takes, without waiting. Defaults to none.
    """

    base: type[Task] | str = Task
    options: Mapping[str, Any] = field(default_factory=dict)
    lock: Callable[[redis.Redis, str], Any] | None = None


_ONCE = {"once": {"keys": ["key"], "timeout": LEASE_S}}
_HEIMDALL = {
    **UNIQUE,
    "unique_timeout": LEASE_S,
    "unique_raises": True,
    "key": lambda args, _kwargs: args[0],
}
_OURS = Way("celery_setnx:SingletonTask", {"singleton": {"key": "key", "lease": LEASE_S}})
WAYS = {
    OURS: _OURS,
    ELSEWHERE: _OURS,
    "python-redis-lock": Way(
        lock=lambda client, key: _without_waiting(
            redis_lock.Lock(client, key, expire=LEASE_S, auto_renewal=True)
        )
    ),
    "redis-py Lock": Way(lock=lambda client, key: _without_waiting(client.lock(key, timeout=LEASE_S))),
    "celery-once": Way(QueueOnce, _ONCE),
    "celery-heimdall": Way(Heimdall, {"heimdall": _HEIMDALL}),
}


def _without_waiting(lock: Any) -> Any:
    return lock if lock.acquire(blocking=False) else None


def make_app(way: str, broker_url: str, lock_url: str, journal: str = os.devnull) -> Celery:
    """An app with the task of one way; all other settings are the same for all.

    Args:
        way: Whose lock.
        broker_url: The broker.
        lock_url: Where the locks are.
        journal: The file that a worker's bodies write to. Defaults to none.
    """
    app = Celery("soak", broker=broker_url, set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_transport_options=redelivery(VISIBILITY_S),
        task_acks_late=True,
        task_reject_on_worker_lost=True,
        task_ignore_result=True,
        worker_prefetch_multiplier=1,
        setnx_url=lock_url,
        setnx_same_host=way != ELSEWHERE,
        ONCE=once_settings(lock_url, LEASE_S),
    )
    chosen, client, note = WAYS[way], redis.Redis.from_url(lock_url), History(Path(journal)).note

    def body(call: str, key: str, seconds: float) -> str:
        """Be alive for a while. Both notes are written while the lock is held."""
        note("begin", call=call, key=key, seconds=seconds, pid=os.getpid())
        time.sleep(seconds)
        note("end", call=call, key=key, pid=os.getpid())
        return DONE

    @app.task(base=symbol_by_name(chosen.base), bind=True, shared=False, name=TASK, **chosen.options)  # type: ignore[untyped-decorator]
    def work(self: Task, key: str, seconds: float) -> str:
        if chosen.lock is None:
            return body(self.request.id, key, seconds)
        lock = chosen.lock(client, key)
        if lock is None:
            return SKIPPED
        try:
            return body(self.request.id, key, seconds)
        finally:
            lock.release()

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def note_skip(task_id: str, state: str, retval: Any = None, **_: Any) -> None:
        if state == "SUCCESS" and retval != DONE:
            note("skip", call=task_id)

    @task_failure.connect(weak=False)  # type: ignore[untyped-decorator]
    def note_failure(task_id: str, exception: BaseException, **_: Any) -> None:
        note("failed", call=task_id, error=type(exception).__name__)

    return app
