"""What newest wins costs a call: published and run, beside plain Celery and `until_started`.

python -m benchmarks.newest_cost [--rounds 7] [--quick]

Every round publishes calls in every way, one after the other, in an order drawn anew, and has them run by a
worker of one process (solo) with empty bodies. In a burst five calls in a row have one key, and different
arguments: with `until_started` the first runs, and the others are not sent; where the newest wins the last
runs, and the others are skipped by the worker. A ratio is taken within a round. The calls that are published
count, whether they run or not. What was sent to the servers is counted by `benchmarks.count`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

import redis
from celery import Celery, Task
from celery.signals import task_postrun

from benchmarks.counted import FIVE, key_of_five
from benchmarks.fan_out import work
from benchmarks.figures import Table, command, interleaved
from celery_setnx import SingletonTask
from examples.embedded import EmbeddedServer

CALLS, QUICK_CALLS = 1000, 200
BROKER_DB, LOCK_DB = 0, 1
PLAIN = "plain Celery"
FIRST: dict[str, Any] = {"dedupe": "until_started"}
NEWEST = {**FIRST, "on_duplicate": "replace", "debounce_max": 3600}
OPTIONS = {PLAIN: None, "until_started": FIRST, "newest wins": NEWEST}


@dataclass
class Sample:
    """Calls per second, published and run."""

    published: float
    run: float


def sample(server: EmbeddedServer, options: dict[str, Any] | None, calls: int, is_burst: bool) -> Sample:
    """One way: publish so many calls, and run them."""
    given = {**(options or {}), **({"key": key_of_five} if is_burst else {})}
    base, singleton = (Task, {}) if options is None else (SingletonTask, {"singleton": given})
    app = Celery("newest", broker=server.url(BROKER_DB), set_as_current=False)
    app.conf.update(setnx_url=server.url(LOCK_DB), task_ignore_result=True)
    task = app.task(base=base, shared=False, name="newest.cost", **singleton)(work)
    with redis.Redis(port=server.port, db=BROKER_DB) as broker:
        task.delay(-1)  # connections and scripts are there
        broker.flushall()
        began = time.perf_counter()
        for number in range(calls):
            task.delay(number)
        published_s = time.perf_counter() - began
        messages = broker.llen("celery")
    app.close()
    return Sample(calls / published_s, calls / _run_s(app, messages))


def _run_s(app: Celery, messages: int) -> float:
    """Seconds from the first end of a call to the last, in a worker of its own; as if there were one more."""
    fork = get_context("fork")
    ours, its = fork.Pipe(duplex=False)
    process = fork.Process(target=_be_worker, args=(app, messages, its))
    process.start()
    took_s = float(ours.recv()) * messages / (messages - 1)
    process.join()
    return took_s


def _be_worker(app: Celery, messages: int, pipe: Any) -> None:
    ends: list[float] = []

    @task_postrun.connect(weak=False)  # type: ignore[untyped-decorator]
    def ended(**_: Any) -> None:
        ends.append(time.perf_counter())
        if len(ends) == messages:
            pipe.send(ends[-1] - ends[0])
            os._exit(0)

    alone = dict.fromkeys(("without_gossip", "without_mingle", "without_heartbeat", "quiet"), True)
    app.Worker(pool="solo", concurrency=1, loglevel="ERROR", **alone).start()


def measure(rounds: int, quick: bool) -> Iterator[Table]:
    """Tables of calls with a key each, and of bursts: published, and run."""
    calls = QUICK_CALLS if quick else CALLS
    for title, is_burst in (("each key once", False), (f"each key {FIVE} times", True)):
        samples: dict[str, list[Sample]] = {way: [] for way in OPTIONS}

        def taken(way: str, samples: dict[str, list[Sample]] = samples, is_burst: bool = is_burst) -> float:
            with EmbeddedServer() as server:
                samples[way].append(sample(server, OPTIONS[way], calls, is_burst))
            return samples[way][-1].published

        interleaved({way: partial(taken, way) for way in OPTIONS}, rounds)
        figures: dict[str, Callable[[Sample], float]] = {
            "published": lambda of: of.published,
            "run": lambda of: of.run,
        }
        for what, figure in figures.items():
            found = {way: [figure(one) for one in of] for way, of in samples.items()}
            yield Table(f"{what}, {title}", "calls/s", found, PLAIN, about=f"{calls:,} calls in each round.")


if __name__ == "__main__":
    command(__doc__, measure)
