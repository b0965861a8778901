"""The app of the benchmark of paces: one task for each way to start so many calls in a period, and no more.

A body asks the broker's server for its time before it does anything else; both servers have the machine's
clock.
"""

from __future__ import annotations

import json
import os
import time
import uuid
from typing import Any

import redis
from celery import Celery, Task
from celery.signals import task_postrun, task_prerun
from celery_heimdall.task import RateLimit

from benchmarks.peers import Heimdall
from benchmarks.serialapp import BROKER_URL, LOCK_URL, RUNS, WAITS
from celery_setnx import SingletonTask, current_lock
from tests.harness import redelivery, server_us

PACE, REDELIVERED, STARTS = "BENCHMARK_PACE", "BENCHMARK_REDELIVERED", "starts"
LIMIT = 10
LEASE_S, SHORT_LEASE_S = 30, 4  # the usual one, and where workers die
POLL_S, POLL_MAX_S = 0.1, 1.0
VISIBILITY_S = 10

WAIT, RETRY = 'celery_setnx, "wait"', 'celery_setnx, "retry"'
WINDOW, RATE = "a sorted set as window", "celery-heimdall, RateLimit"
FREE, UNREACHED = "celery_setnx, no rate", "celery_setnx, a rate never reached"
WAYS = (WAIT, RETRY, WINDOW, RATE)
OURS = (WAIT, RETRY, FREE, UNREACHED)

_note: dict[str, Any] = {}


class Window:
    """The sliding window of Redis University's course for Python developers (RU102PY), its seventh challenge.

    Hits are the members of a sorted set, by the time at which each came, on its own clock. The course notes a
    hit that is refused as well. Of calls that come again until they may start nearly none then ever does, so
    a refused one is taken back here.
    """

    def __init__(self, client: redis.Redis, name: str, starts: int, period_s: float) -> None:
        self.client, self.name, self.starts, self.period_s = client, name, starts, period_s

    def hit(self) -> bool:
        """Whether there is room for one more."""
        hit, now = str(uuid.uuid4()), time.time()
        pipe = self.client.pipeline(transaction=True)
        pipe.zadd(self.name, {hit: now})
        pipe.zremrangebyscore(self.name, 0, now - self.period_s)
        pipe.zcard(self.name)
        if pipe.execute()[-1] <= self.starts:
            return True
        self.client.zrem(self.name, hit)
        return False


def make_app(
    broker_url: str, lock_url: str, starts: int = 50, period_s: int = 2, *, redelivered: bool = False
) -> Celery:
    """An app with the task of every way.

    Args:
        broker_url: The broker.
        lock_url: Where the locks are.
        starts: How many calls may start within a period. Defaults to 50.
        period_s: The period, in seconds. Defaults to 2.
        redelivered: Whether the broker soon delivers again what a worker that died had. Defaults to False.
    """
    app = Celery("paces", broker=broker_url, set_as_current=False)
    app.conf.update(
        setnx_url=lock_url,
        broker_connection_retry_on_startup=True,
        task_ignore_result=True,
        task_acks_late=redelivered,
        task_reject_on_worker_lost=redelivered,
        broker_transport_options=redelivery(VISIBILITY_S) if redelivered else {},
    )
    polling = {"on_conflict": "retry", "retry_delay": POLL_S, "retry_delay_max": POLL_MAX_S}
    paces = {
        WAIT: {"rate": (starts, period_s), "on_conflict": "wait"},
        RETRY: {"rate": (starts, period_s), **polling},
        FREE: {"on_conflict": "wait"},
        UNREACHED: {"rate": (1000, period_s), "on_conflict": "wait"},
    }
    lease_s = SHORT_LEASE_S if redelivered else LEASE_S
    for name, options in paces.items():
        settled = {"key": "line", "limit": LIMIT, "lease": lease_s, **options}
        app.task(base=SingletonTask, shared=False, name=name, singleton=settled)(_paced)
    locks = redis.Redis.from_url(lock_url)

    @app.task(bind=True, shared=False, name=WINDOW, max_retries=None)  # type: ignore[untyped-decorator]
    def counted(self: Task, number: int, line: int, seconds: float) -> None:
        if not Window(locks, f"window:{line}", starts, period_s).hit():
            raise self.retry(countdown=POLL_S)
        work(number, seconds)

    limited = {"rate_limit": RateLimit((starts, period_s)), "key": lambda args, _kwargs: str(args[1])}

    @app.task(base=Heimdall, shared=False, name=RATE, heimdall=limited)  # type: ignore[untyped-decorator]
    def rated(number: int, line: int, seconds: float) -> None:
        work(number, seconds)

    return app


def _paced(number: int, line: int, seconds: float) -> None:
    work(number, seconds)


def work(number: int, seconds: float) -> None:
    """Note the server's time of this start, and take a while."""
    began_us, lock = server_us(broker), current_lock()
    _note.update(number=number, began_us=began_us, acquired_us=lock.fence if lock else began_us)
    broker.rpush(STARTS, json.dumps(_note))
    if seconds:
        time.sleep(seconds)
    _note["ended_us"] = server_us(broker)


@task_prerun.connect(weak=False)  # type: ignore[untyped-decorator]
def _note_arrival(sender: Any, args: Any, **_: Any) -> None:
    _note.clear()
    if sender.name in (*WAYS, *OURS):
        _note.update(number=args[0], came=time.monotonic())


@task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
def _send_note(sender: Any, **_: Any) -> None:
    if sender.name in (*WAYS, *OURS):
        broker.rpush(RUNS if "ended_us" in _note else WAITS, json.dumps(_note))


def _of_environment() -> Celery:
    starts, _, period_s = os.environ.get(PACE, "50/2").partition("/")
    urls = os.environ.get(BROKER_URL, ""), os.environ.get(LOCK_URL, "redis://")
    return make_app(*urls, int(starts), int(period_s), redelivered=REDELIVERED in os.environ)


app = _of_environment()
broker = redis.Redis.from_url(os.environ.get(BROKER_URL, "redis://"), socket_timeout=None)
