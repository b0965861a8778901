"""Five calls of a key at a time: `limit=5` beside a semaphore that polls, and beside a rate.

python -m benchmarks.limit [--rounds 7] [--quick]

In every round 200 calls of one key go to two fresh workers of five processes each, at once, one way after the
other. No two ways are the same thing:

- `limit=5` with `on_conflict="wait"`, and with `"retry"` (0.1 s, then doubled up to 1 s);
- a counting semaphore made at home, as Josiah Carlson has it in "Redis in Action", section 6.3.1: a sorted
  set. A call that finds five before it retries 0.1 s later. A holder counts until its timeout, dead or alive;
- celery-heimdall's `RateLimit`, the nearest that it has: so many starts a period, and no limit of those that
  run. It is told a hundred a second, which is what five bodies of 50 ms at a time come to.

All moments are the machine's one monotonic clock's. Who ran beside whom is told by the bodies.

- total: from the first body's start to the last one's end, beside the sum of the bodies over five. Once more
  for 195 calls that all wait in line when five others let them go: without what it takes them to get there;
- at a time: how many bodies ran at a time, at most;
- overtaken: calls that began after one which had come more than 5 ms later; farthest: by how many such;
- commands: what was sent to the lock server, per call; and the time that the server spent on it;
- deliveries: how often a worker was given a call, in vain or not.

Then five calls hold for ten minutes, six wait, and one of the five is killed: its pool process, or its
worker. What counts is the time from the kill to the start of the next body, and how many lived at a time
until three seconds after our lease, which is the semaphore's timeout and the rate's period: four seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks import limitapp
from benchmarks.figures import Promise, Samples, Table, command, interleaved
from benchmarks.hand_over import SLACK_S, overtaken
from benchmarks.limitapp import (
    DURATION,
    ELSEWHERE_TOO,
    LIMIT,
    RATE,
    SEMAPHORE,
    STARTS,
    UNTIL_OPEN,
    WAIT,
    WAYS,
)
from benchmarks.peers import new_clients
from benchmarks.serialapp import GATE, RUNS, WAITS
from benchmarks.stage import Note, Stage
from tests.harness import wait_until

CALLS, QUICK_CALLS = 200, 100
WORKERS, PROCESSES = 2, 5
OF_IDEAL = 1.25

DURATION_S, QUICK_DURATION_S = 4, 2
LONGER_S, HOLD_S, SETTLE_S = 3.0, 600.0, 0.5
CHILD, WORKER, ELSEWHERE = "pool process", "worker", "celery_setnx, elsewhere"
KILLED = {CHILD: (WAIT, SEMAPHORE, RATE), WORKER: (WAIT, ELSEWHERE, SEMAPHORE, RATE)}

# What a script calls is listed as well, and is in its time already.
_NOT_SENT = ("info", "config", "hello", "client", "select", "ping", "command")


@dataclass(frozen=True)
class Batch:
    """Calls of one key.

    Attributes:
        way: How they are kept to five at a time.
        body_ms: How long a body sleeps.
        gathered: Whether all wait in line before the first may go. Defaults to False: they are sent at once.
    """

    way: str
    body_ms: int
    gathered: bool = False

    @property
    def is_steady(self) -> bool:
        """Whether it takes the calls little time to get into their line, beside their bodies."""
        return self.gathered or self.body_ms >= LONG

    def __str__(self) -> str:
        return f"{self.way}, {self.body_ms} ms" + (", all in line" if self.gathered else "")


SHORT, LONG = 50, 250
AT_ONCE = [Batch(way, SHORT) for way in WAYS] + [Batch(way, LONG) for way in WAYS if way != RATE]
GATHERED = [Batch(WAIT, SHORT, gathered=True), Batch(WAIT, LONG, gathered=True)]


@dataclass(frozen=True)
class Sample:
    """What the calls of one way took.

    Attributes:
        total: From the first start to the last end, beside the sum of the bodies over five.
        at_a_time: How many bodies ran at a time, at most.
        overtaken: How many calls began after one that came later.
        farthest: By how many of those one was overtaken, at most.
        commands: What was sent to the lock server, per call.
        server_us: The time that it spent on that, per call.
        deliveries: How often a call was given to a worker, in the mean.
    """

    total: float
    at_a_time: float
    overtaken: float
    farthest: float
    commands: float
    server_us: float
    deliveries: float


def measured(batch: Batch, calls: int) -> Sample:
    """Send the calls to two new workers, and wait until they have run.

    Raises:
        AssertionError: They have not, in time.
        RuntimeError: A call has not run exactly once.
    """
    with new_clients(), Stage(limitapp) as stage:
        task: Any = stage.tasks[batch.way]
        for number in range(WORKERS):
            stage.start_worker(concurrency=PROCESSES, queues=f"celery,own-{number}")
        for number in range(WORKERS * PROCESSES):  # each process has its connections
            task.apply_async((-1, number + 1, 0.3), queue=f"own-{number % WORKERS}")
        stage.wait_for(RUNS, WORKERS * PROCESSES)
        stage.forget()
        stage.broker.delete(STARTS)
        first = LIMIT if batch.gathered else 0
        for number in range(first):
            task.apply_async((number, 0, UNTIL_OPEN))
        stage.wait_for(STARTS, first)
        for number in range(first, calls):
            task.apply_async((number, 0, batch.body_ms / 1000))
        if batch.gathered:
            stage.wait_for(WAITS, calls - LIMIT)
            stage.broker.rpush(GATE, *["open"] * LIMIT)
        stage.wait_for(RUNS, calls)
        return sampled(batch, calls, stage)


def sampled(batch: Batch, calls: int, stage: Stage) -> Sample:
    """The sample that the workers' notes make.

    Raises:
        RuntimeError: A call has not run exactly once.
    """
    runs, waits = stage.notes(RUNS), stage.notes(WAITS)
    bodies = sorted(runs, key=lambda note: float(note["began"]))
    if sorted(note["number"] for note in bodies) != list(range(calls)):
        raise RuntimeError(f"{batch}: not every call has run once; there were {len(bodies)} runs")
    came: dict[int, float] = {}
    for note in (*runs, *waits):
        came[note["number"]] = min(note["came"], came.get(note["number"], note["came"]))
    arrivals = [came[note["number"]] for note in bodies]
    began = bodies[0]["began"]
    if batch.gathered:  # from when they could go on
        began = min(note["ended"] for note in bodies)
        bodies = bodies[LIMIT:]
    ideal_s = sum(note["ended"] - note["began"] for note in bodies) / LIMIT
    commands, server_us = sent(batch.way, stage.locks.info("commandstats"))
    return Sample(
        total=(max(note["ended"] for note in bodies) - began) / ideal_s,
        at_a_time=max(len(note["beside"]) for note in bodies),
        overtaken=overtaken(arrivals),
        farthest=farthest(arrivals),
        commands=commands / calls,
        server_us=server_us / calls,
        deliveries=(len(runs) + len(waits)) / calls,
    )


def farthest(arrivals: list[float]) -> int:
    """By how many that came later a call was overtaken, at most; given when each came, as they began."""
    return max(
        sum(before - came > SLACK_S for before in arrivals[:number]) for number, came in enumerate(arrivals)
    )


def sent(way: str, stats: Any) -> tuple[int, float]:
    """How many commands a lock server was sent, and how many microseconds it spent on them."""
    named = {name.removeprefix("cmdstat_"): stat for name, stat in stats.items()}
    scripts = ("eval", "evalsha")
    ours = way not in (SEMAPHORE, RATE)
    counted = [
        stat
        for name, stat in named.items()
        if (name in scripts if ours else name.partition("|")[0] not in _NOT_SENT)
    ]
    return sum(stat["calls"] for stat in counted), sum(stat["usec"] for stat in counted)


# Deaths


@dataclass(frozen=True)
class Death:
    """What the death of one of five holders has come to.

    Attributes:
        lost_s: From the kill to the start of the next body.
        at_a_time: How many bodies lived at a time, at most.
    """

    lost_s: float
    at_a_time: float


def killed(what: str, way: str, duration_s: int) -> Death:
    """Five calls that hold, six that wait; one of the five is killed.

    Raises:
        AssertionError: No body has started in time.
    """
    environment = {DURATION: str(duration_s), **({ELSEWHERE_TOO: "1"} if way == ELSEWHERE else {})}
    with new_clients(), Stage(limitapp) as stage:
        task: Any = stage.tasks[WAIT if way == ELSEWHERE else way]
        victim = stage.start_worker(concurrency=1, queues="victim", environment=environment)
        stage.start_worker(concurrency=12, queues="others", environment=environment)
        task.apply_async((0, 0, HOLD_S), queue="victim")
        for number in range(1, LIMIT):
            task.apply_async((number, 0, HOLD_S), queue="others")
        stage.wait_for(STARTS, LIMIT)
        for number in range(LIMIT, 2 * LIMIT + 1):
            task.apply_async((number, 0, HOLD_S), queue="others")
        time.sleep(SETTLE_S)
        (pid,) = (note["pid"] for note in stage.notes(STARTS) if note["number"] == 0)
        killed_at = time.monotonic()
        if what == CHILD:
            os.kill(pid, signal.SIGKILL)
        else:
            victim.kill()
        wait_until(lambda: stage.broker.llen(STARTS) > LIMIT, "the next body")
        time.sleep(max(0.0, killed_at + duration_s + LONGER_S - time.monotonic()))
        return of_death(stage.notes(STARTS), pid, killed_at)


def of_death(starts: list[Note], pid: int, killed_at: float) -> Death:
    """What the notes of all starts make; the one that was killed lives until then."""
    later = [note for note in starts if note["number"] >= LIMIT]
    living = [sum(one != pid or note["began"] < killed_at for one in note["beside"]) for note in starts]
    return Death(min(note["began"] for note in later) - killed_at, max(living))


# Tables


def measure(rounds: int, quick: bool) -> Iterator[Table]:
    """A table of each figure."""
    calls = QUICK_CALLS if quick else CALLS
    batches = [AT_ONCE[0], AT_ONCE[2], GATHERED[1]] if quick else AT_ONCE + GATHERED
    samples: dict[str, list[Sample]] = {str(batch): [] for batch in batches}

    def total(batch: Batch) -> float:
        samples[str(batch)].append(measured(batch, calls))
        return samples[str(batch)][-1].total

    interleaved({str(batch): partial(total, batch) for batch in batches}, rounds)
    about = f"{calls} calls, {LIMIT} at a time, {WORKERS} workers of {PROCESSES} processes."

    def table(title: str, unit: str, figure: Callable[[Sample], float], *promises: Promise) -> Table:
        found = {batch: [figure(sample) for sample in of] for batch, of in samples.items()}
        return Table(f"limit, {title}", unit, found, str(Batch(SEMAPHORE, SHORT)), promises, about)

    ideal = [Promise(str(batch), OF_IDEAL) for batch in batches if batch.way == WAIT and batch.is_steady]
    yield table("total", "x the ideal", lambda sample: sample.total, *ideal)
    ours = [str(batch) for batch in batches if batch.way in WAYS[:2]]
    never = tuple(Promise(name, LIMIT) for name in ours)
    yield table("bodies at a time", "at most", lambda sample: sample.at_a_time, *never)
    yield table("overtaken", "calls", lambda sample: sample.overtaken)
    yield table("overtaken, farthest", "calls", lambda sample: sample.farthest)
    yield table("commands on the lock server", "per call", lambda sample: sample.commands)
    yield table("time on the lock server", "us per call", lambda sample: sample.server_us)
    yield table("deliveries", "per call", lambda sample: sample.deliveries)
    yield from deaths(1 if quick else rounds, quick)


def deaths(rounds: int, quick: bool) -> Iterator[Table]:
    """Two tables of what the death of a pool process costs, and two of that of a worker."""
    duration_s = QUICK_DURATION_S if quick else DURATION_S
    for what, all_ways in KILLED.items():
        ways = (WAIT, SEMAPHORE) if quick else all_ways
        lost: Samples = {way: [] for way in ways if way != RATE}
        lived: Samples = {way: [] for way in ways}
        for number in range(rounds):
            for way in ways:
                death = killed(what, way, duration_s)
                lived[way].append(death.at_a_time)
                if way != RATE:  # which has no permits to lose
                    lost[way].append(death.lost_s)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
        title = f"limit, kill -9 of one {what} of five, duration {duration_s} s"
        never = tuple(Promise(way, LIMIT) for way in ways if way in (WAIT, ELSEWHERE))
        yield Table(f"{title}: until the next body", "s", lost, SEMAPHORE)
        yield Table(f"{title}: bodies at a time", "at most", lived, SEMAPHORE, never)


if __name__ == "__main__":
    command(__doc__, measure)
