"""The app of the benchmark of limits: one task for each way to let five calls run at a time, and no more.

A body notes who runs beside it, by a set on the broker's server that knows nothing of locks.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery, Task
from celery.signals import task_postrun, task_prerun
from celery_heimdall.task import RateLimit

from benchmarks.peers import Heimdall
from benchmarks.serialapp import BROKER_URL, GATE, LOCK_URL, RUNS, WAITS
from celery_setnx import SingletonTask

DURATION, ELSEWHERE_TOO, STARTS, RUNNING = "BENCHMARK_DURATION_S", "BENCHMARK_ELSEWHERE", "starts", "running"
LIMIT = 5
BODY_S = 0.05
POLL_S = 0.1
UNTIL_OPEN = -1.0

WAIT, RETRY = 'celery_setnx, "wait"', 'celery_setnx, "retry"'
SEMAPHORE, RATE = "a sorted set as semaphore", "celery-heimdall, RateLimit"
WAYS = (WAIT, RETRY, SEMAPHORE, RATE)

_note: dict[str, Any] = {}


class Semaphore:
    """The basic counting semaphore of Josiah Carlson, "Redis in Action" (2013), section 6.3.1.

    Holders are the members of a sorted set, by the time at which each came, on its own clock. One that is
    older than the timeout counts no more, whether it lives or not; sections 6.3.2 to 6.3.4 refine that.
    """

    def __init__(self, client: redis.Redis, name: str, limit: int, timeout_s: float) -> None:
        self.client, self.name, self.limit, self.timeout_s = client, name, limit, timeout_s

    def acquire(self) -> str | None:
        """The holder's id, or None if there are too many."""
        identifier, now = str(uuid.uuid4()), time.time()
        pipe = self.client.pipeline(transaction=True)
        pipe.zremrangebyscore(self.name, "-inf", now - self.timeout_s)
        pipe.zadd(self.name, {identifier: now})
        pipe.zrank(self.name, identifier)
        if pipe.execute()[-1] < self.limit:
            return identifier
        self.client.zrem(self.name, identifier)
        return None

    def release(self, identifier: str) -> bool:
        """False if it had timed out."""
        return bool(self.client.zrem(self.name, identifier))


def make_app(broker_url: str, lock_url: str, duration_s: float = 10.0, *, elsewhere: bool = False) -> Celery:
    """An app with the task of every way.

    Args:
        broker_url: The broker.
        lock_url: Where the locks are.
        duration_s: Our lease, and the semaphore's timeout. Defaults to that of the book.
        elsewhere: Whether its workers take other workers to be on another host. Defaults to False.
    """
    app = Celery("limits", broker=broker_url, set_as_current=False)
    app.conf.update(
        setnx_url=lock_url,
        setnx_same_host=not elsewhere,
        broker_connection_retry_on_startup=True,
        task_ignore_result=True,
    )
    ours = {"key": "line", "limit": LIMIT, "lease": duration_s}
    polling = {"on_conflict": "retry", "retry_delay": POLL_S, "retry_delay_max": 1}
    locks = redis.Redis.from_url(lock_url)
    # Of five calls of 50 ms at a time a hundred begin in a second; for longer ones it is told another rate.
    rate = (round(LIMIT / BODY_S), 1) if duration_s > 5 else (LIMIT, int(duration_s))

    @app.task(base=SingletonTask, shared=False, name=WAIT, singleton={**ours, "on_conflict": "wait"})  # type: ignore[untyped-decorator]
    def wait(number: int, line: int, seconds: float) -> None:
        work(seconds)

    @app.task(base=SingletonTask, shared=False, name=RETRY, singleton={**ours, **polling})  # type: ignore[untyped-decorator]
    def retry(number: int, line: int, seconds: float) -> None:
        work(seconds)

    @app.task(bind=True, shared=False, name=SEMAPHORE, max_retries=None)  # type: ignore[untyped-decorator]
    def counted(self: Task, number: int, line: int, seconds: float) -> None:
        semaphore = Semaphore(locks, f"semaphore:{line}", LIMIT, duration_s)
        identifier = semaphore.acquire()
        if identifier is None:
            raise self.retry(countdown=POLL_S)
        try:
            work(seconds)
        finally:
            semaphore.release(identifier)

    limited = {"rate_limit": RateLimit(rate), "key": lambda args, _kwargs: str(args[1])}

    @app.task(base=Heimdall, shared=False, name=RATE, heimdall=limited)  # type: ignore[untyped-decorator]
    def rated(number: int, line: int, seconds: float) -> None:
        work(seconds)

    return app


def work(seconds: float) -> None:
    """Note who runs beside this one, and take a while; `UNTIL_OPEN`: until a gate is opened."""
    with _running() as pids:
        _note.update(began=time.monotonic(), pid=os.getpid(), beside=pids)
        broker.rpush(STARTS, json.dumps(_note))
        if seconds == UNTIL_OPEN:
            broker.blpop([GATE])
        else:
            time.sleep(seconds)
        _note["ended"] = time.monotonic()


@contextmanager
def _running() -> Iterator[list[int]]:
    with broker.pipeline() as pipe:
        pipe.sadd(RUNNING, os.getpid())
        pipe.smembers(RUNNING)
        _added, pids = pipe.execute()
    yield [int(pid) for pid in pids]
    broker.srem(RUNNING, os.getpid())


@task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
def _note_arrival(sender: Any, args: Any, **_: Any) -> None:
    _note.clear()
    if sender.name in WAYS:
        _note.update(number=args[0], came=time.monotonic())


@task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
def _send_note(sender: Any, **_: Any) -> None:
    if sender.name in WAYS:
        broker.rpush(RUNS if "ended" in _note else WAITS, json.dumps(_note))


app = make_app(
    os.environ.get(BROKER_URL, ""),
    os.environ.get(LOCK_URL, "redis://"),
    float(os.environ.get(DURATION, "10")),
    elsewhere=ELSEWHERE_TOO in os.environ,
)
broker = redis.Redis.from_url(os.environ.get(BROKER_URL, "redis://"), socket_timeout=None)
