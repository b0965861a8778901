"""How fast calls are published: `fan_out` beside loops over `delay()`, our own and the peers'.

python -m benchmarks.fan_out [--rounds 7] [--quick]

Every round publishes the same calls in every way, one after the other, each with an app and empty databases
of its own. A ratio is taken within a round, and its median over the rounds is shown: what disturbs the
machine disturbs both sides. Nobody consumes, so nothing else is measured.
"""

from __future__ import annotations

import gc
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import redis
from celery import Celery, Task
from celery_once import AlreadyQueued, QueueOnce
from celery_singleton import Singleton

from benchmarks.figures import Promise, Table, command
from benchmarks.peers import new_clients, once_settings
from celery_setnx import SingletonTask
from examples.embedded import EmbeddedServer

REPEATS = 10  # calls per key where nine of ten are duplicates
CALLS, QUICK_CALLS = 5000, 1000
BROKER_DB, LOCK_DB, RESULT_DB = 0, 1, 2

Publish = Callable[[Any, list[int]], Any]


def work(number: int) -> None:
    """The task: nobody runs it."""


def delay(task: Any, numbers: list[int]) -> None:
    """One by one."""
    for number in numbers:
        task.delay(number)


def delay_or_refused(task: Any, numbers: list[int]) -> None:
    """One by one; a duplicate is an exception."""
    for number in numbers:
        try:
            task.delay(number)
        except AlreadyQueued:
            continue


def fan_out(task: Any, numbers: list[int]) -> None:
    """All at once."""
    task.fan_out((number,) for number in numbers)


@dataclass(frozen=True, eq=False)
class Way:
    """One way to publish, and the calls that it gets.

    Attributes:
        name: What it is.
        publish: Publishes the calls.
        repeats: Calls per key.
        base: Base class of the task.
        options: Of the task.
        sends_all: Duplicates are sent too.
    """

    name: str
    publish: Publish
    repeats: int
    base: type[Task]
    options: dict[str, Any]
    sends_all: bool = False


DEDUPED = {"singleton": {"dedupe": "until_done"}}
PLAIN = Way("plain delay()", delay, 1, Task, {}, sends_all=True)
IGNORED = Way("plain delay(), result ignored", delay, 1, Task, {"ignore_result": True}, sends_all=True)
OWN_LOOP = Way("our delay(), dedupe", delay, 1, SingletonTask, DEDUPED)
OWN = Way("fan_out, dedupe", fan_out, 1, SingletonTask, DEDUPED)
FREE = Way("fan_out, no dedupe", fan_out, 1, SingletonTask, {}, sends_all=True)
SINGLETON_90 = Way("celery-singleton delay()", delay, REPEATS, Singleton, {"lock_expiry": 3600})
ONCE_90 = Way("celery-once delay()", delay_or_refused, REPEATS, QueueOnce, {"once": {"graceful": False}})
OWN_LOOP_90 = Way("our delay(), dedupe", delay, REPEATS, SingletonTask, DEDUPED)
OWN_90 = Way("fan_out, dedupe", fan_out, REPEATS, SingletonTask, DEDUPED)

UNIQUE = (PLAIN, IGNORED, OWN_LOOP, FREE, OWN)
DUPLICATES = (SINGLETON_90, ONCE_90, OWN_LOOP_90, OWN_90)
PROMISES = ((OWN, PLAIN, 2.0), (OWN_90, SINGLETON_90, 8.0))


def sample(server: EmbeddedServer, way: Way, numbers: list[int]) -> float:
    """Calls per second, published by an app of its own into empty databases.

    Raises:
        RuntimeError: Not as many messages are queued as there should be.
    """
    app = Celery(
        "benchmark", broker=server.url(BROKER_DB), backend=server.url(RESULT_DB), set_as_current=False
    )
    app.conf.update(
        setnx_url=server.url(LOCK_DB),
        singleton_backend_url=server.url(LOCK_DB),
        ONCE=once_settings(server.url(LOCK_DB), 3600),
    )
    task = app.task(base=way.base, name="benchmark.task", shared=False, **way.options)(work)
    with redis.Redis(port=server.port, db=BROKER_DB) as broker:
        way.publish(task, [-1])  # connections and scripts are there
        broker.flushall()
        gc.collect()
        began = time.perf_counter()
        way.publish(task, numbers)
        took_s = time.perf_counter() - began
        queued, expected = broker.llen("celery"), len(numbers if way.sends_all else set(numbers))
    app.close()
    if queued != expected:
        raise RuntimeError(f"{way.name} has queued {queued} messages instead of {expected}")
    return len(numbers) / took_s


def rates_of(server: EmbeddedServer, calls: int, rounds: int) -> dict[Way, list[float]]:
    """Calls per second, for each way one figure a round."""
    rates: dict[Way, list[float]] = {way: [] for way in (*UNIQUE, *DUPLICATES)}
    for number in range(rounds):
        for way in random.Random(number).sample(list(rates), len(rates)):
            numbers = list(range(calls // way.repeats)) * way.repeats
            random.Random(number).shuffle(numbers)
            rates[way].append(sample(server, way, numbers))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return rates


def measure(rounds: int, quick: bool) -> Iterator[Table]:
    """A table of each key once, and one of each key many times."""
    calls = QUICK_CALLS if quick else CALLS
    with EmbeddedServer() as server, new_clients():
        rates = rates_of(server, calls, rounds)
    for title, ways in (("each key once", UNIQUE), (f"each key {REPEATS} times, shuffled", DUPLICATES)):
        samples = {way.name: rates[way] for way in ways}
        promised = tuple(
            Promise(way.name, least, to=to.name, at_least=True) for way, to, least in PROMISES if way in ways
        )
        about = f"{calls:,} calls in each round."
        yield Table(f"published, {title}", "calls/s", samples, ways[0].name, promised, about)


if __name__ == "__main__":
    command(__doc__, measure)
