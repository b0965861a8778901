"""What 10,000 waiting calls cost: on 100 keys, at most 100 in a line.

python -m benchmarks.long_lines [--quick]

A hundred calls hold their locks until all others wait; then they let go. Bodies do nothing.

- park, drain: from the first call's publication until all wait, and from then until all have run;
- processor: what workers and servers have used until then, per call;
- deliveries: how often the call was given to a process, per call; two, unless a wake-up came too late;
- scripts: how many the lock server has run, per call;
- lock server, broker: how much more memory their servers use while all wait, per call.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import redis

from benchmarks.figures import Promise, Table, command
from benchmarks.serialapp import GATE, RUNS, WAITS
from benchmarks.stage import Stage
from tests.harness import wait_until

LINES = 100
WORKERS, CONCURRENCY = 2, 2
WAIT = {"on_conflict": "wait"}
GROWTH = 1.5
CALLS, QUICK_CALLS = (2500, 5000, 10000), (500, 2000)


@dataclass(frozen=True)
class Sample:
    """What so many waiting calls took.

    Attributes:
        calls: How many they were.
        park_s: Until all waited.
        drain_s: From then until all had run.
        cpu_s: Processor time of workers and servers in both.
        deliveries: How often they were given to a process.
        scripts: Scripts on the lock server.
        lock_bytes: Memory of the lock server while all waited.
        broker_bytes: Memory of the broker's.
    """

    calls: int
    park_s: float
    drain_s: float
    cpu_s: float
    deliveries: int
    scripts: int
    lock_bytes: int
    broker_bytes: int

    @property
    def cpu_ms(self) -> float:
        """Processor time per call."""
        return 1000 * self.cpu_s / self.calls


def measured(calls: int) -> Sample:
    """Park so many calls, and let them run.

    Raises:
        AssertionError: They have not in time.
        RuntimeError: A call has not run exactly once.
    """
    with Stage() as stage:
        stage.start_worker(pool="threads", concurrency=LINES, queues="holders")
        for _ in range(WORKERS):
            stage.start_worker(concurrency=CONCURRENCY)
        work, hold = stage.tasks["work"], stage.tasks["hold"]
        for line in range(LINES):
            hold.apply_async((line,), queue="holders")
        wait_until(lambda: all(hold.locked(line) for line in range(LINES)), "all locks to be held")
        before = memory(stage.locks), memory(stage.broker)
        cpu_s, scripts, began = stage.cpu_s(), stage.scripts(), time.monotonic()
        for number in range(calls):
            work.apply_async((number, number % LINES, 0.0), singleton=WAIT)
        stage.wait_for(WAITS, calls)
        parked = time.monotonic()
        lock_bytes, broker_bytes = memory(stage.locks) - before[0], memory(stage.broker) - before[1]
        stage.broker.rpush(GATE, *range(LINES))
        stage.wait_for(RUNS, calls)
        drained = time.monotonic()
        sample = Sample(
            calls,
            parked - began,
            drained - parked,
            stage.cpu_s() - cpu_s,
            stage.broker.llen(WAITS) + calls,
            stage.scripts() - scripts,
            lock_bytes,
            broker_bytes,
        )
        if sorted(note["number"] for note in stage.notes(RUNS)) != list(range(calls)):
            raise RuntimeError(f"not every one of {calls} calls has run once")
    return sample


def memory(client: redis.Redis) -> int:
    """Bytes that a server uses."""
    return int(client.info("memory")["used_memory"])


def measure(rounds: int, quick: bool) -> Iterator[Table]:
    """A table of each figure; the rounds are one, because the calls are many."""
    samples = {}
    for calls in QUICK_CALLS if quick else CALLS:
        samples[f"{calls:,} calls"] = measured(calls)
        print(f"{calls} calls", file=sys.stderr)
    few, *_, many = samples
    about = f"{WORKERS} workers of {CONCURRENCY} processes, {LINES} keys; one round of {rounds}."

    def table(title: str, unit: str, figure: Callable[[Sample], float], *promises: Promise) -> Table:
        found = {name: [figure(sample)] for name, sample in samples.items()}
        return Table(f"long lines, {title}", unit, found, few, promises, about)

    yield table("CPU", "ms per call", lambda sample: sample.cpu_ms, Promise(many, GROWTH, to=few))
    yield table("rate", "calls/s", lambda sample: sample.calls / (sample.park_s + sample.drain_s))
    yield table("deliveries", "per call", lambda sample: sample.deliveries / sample.calls)
    yield table("scripts on the lock server", "per call", lambda sample: sample.scripts / sample.calls)
    yield table(
        "memory of the lock server", "bytes per call", lambda sample: sample.lock_bytes / sample.calls
    )
    yield table("memory of the broker", "bytes per call", lambda sample: sample.broker_bytes / sample.calls)


if __name__ == "__main__":
    command(__doc__, measure)
