"""What 10,000 waiting calls cost: on 100 keys, at most 100 in a line.

python -m benchmarks.long_lines [--calls 2500 5000 10000] [--check]

A hundred calls hold their locks until all others wait; then they let go. Bodies do nothing, and the lease is
the default, so of many calls couriers come while these wait.

- park, drain: from the first call's publication until all wait, and from then until all have run;
- processor: what workers and servers have used until then, per call;
- deliveries: how often the call was given to a process, per call; two, unless a wake-up came too late;
- scripts: how many the lock server has run, per call;
- lock server, broker: how much more memory their servers use while all wait, per call.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

import redis

from benchmarks.machine import machine
from benchmarks.serialapp import GATE, RUNS, WAITS
from benchmarks.stage import Stage
from examples.embedded import EmbeddedServer
from tests.harness import wait_until

LINES = 100
WORKERS, CONCURRENCY = 2, 2
WAIT = {"on_conflict": "wait"}
GROWTH = 1.5


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


def measure(calls: int) -> Sample:
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


def table(samples: list[Sample]) -> Iterator[str]:
    """The lines of the table."""
    heads = (
        "calls",
        "park",
        "drain",
        "calls/s",
        "processor",
        "deliveries",
        "scripts",
        "lock server",
        "broker",
    )
    yield "".join(f"{head:>{len(head) + 6}}" for head in heads)
    for sample in samples:
        calls = sample.calls
        figures = (
            f"{calls:,}",
            f"{sample.park_s:.1f} s",
            f"{sample.drain_s:.1f} s",
            f"{calls / (sample.park_s + sample.drain_s):.0f}",
            f"{sample.cpu_ms:.1f} ms",
            f"{sample.deliveries / calls:.1f}",
            f"{sample.scripts / calls:.1f}",
            f"{sample.lock_bytes / calls:,.0f} B",
            f"{sample.broker_bytes / calls:,.0f} B",
        )
        yield "".join(f"{figure:>{len(head) + 6}}" for head, figure in zip(heads, figures))


def main() -> int:
    """Measure, print the table, and check that the cost of a call does not grow."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--calls", type=int, nargs="+", default=[2500, 5000, 10000], help="(default 2500 5000 10000)"
    )
    parser.add_argument("--check", action="store_true", help="fail if a call's cost grows with their number")
    chosen = parser.parse_args()
    samples = []
    for calls in chosen.calls:
        samples.append(measure(calls))
        print(f"{calls} calls", file=sys.stderr)
    with EmbeddedServer() as server:
        print(*machine(server), sep="\n")
    print(f"{WORKERS} workers of {CONCURRENCY} processes, {LINES} keys", "", *table(samples), "", sep="\n")
    grown = samples[-1].cpu_ms / samples[0].cpu_ms
    few, many = samples[0].calls, samples[-1].calls
    print(f"one of {many:,} calls costs {grown:.2f} times as much as one of {few:,}; promised {GROWTH:g}")
    return 0 if grown <= GROWTH or not chosen.check else 1


if __name__ == "__main__":
    sys.exit(main())
