"""Fifty starts of a key within any two seconds: `rate=(50, 2)` beside a window that polls, and RateLimit.

python -m benchmarks.pace [--rounds 7] [--quick]

In every round 300 calls of one key go to two fresh workers of four processes each, at once, one way after the
other. Ten may run at a time:

- `rate=(50, 2)` with `on_conflict="wait"`, and with `"retry"` (0.1 s, then doubled up to 1 s);
- a sliding window made at home, the recipe of Redis University's course for Python developers (RU102PY): a
  sorted set. A call that finds it full retries 0.1 s later;
- celery-heimdall's `RateLimit`, told 50 in 2 s. It has no limit of those that run.

The first of these once more when all calls wait in line before one may start.

- total: from the first body's start to the last one's end, beside the ideal: fifty at once every two seconds,
  so that the last fifty start 10 s after the first. Bodies take nothing, or 20 ms;
- starts: how many there were in any window of two seconds, at most, by the server's clock. Of ours the moment
  is the acquisition, which is what we promise; of the others the first thing that a body does. Once more by
  that for all: what comes between the two is Celery's, and differs from call to call;
- overtaken: calls that began after one which had come more than 5 ms later; farthest: by how many such;
- commands: what was sent to the lock server, and to the broker, per call; and the time that the first of them
  spent on it. What a rate costs that is never reached is pace_cost's;
- messages: how many were published, per call; deliveries: how often a worker's process was given a call;
- processor: what workers and servers used, per call.

The same with ten starts in any ten seconds and 40 calls, because the delays of `RateLimit` are whole seconds.

Then one of the two workers is killed when 120 have begun. Messages are acknowledged late, and the broker
delivers again after ten seconds what a worker has not acknowledged. What counts is how much later the last
call has run than it could have, the longest time in which no call began, how many bodies began twice, and how
many calls started in any two seconds.
"""

from __future__ import annotations

import bisect
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks import paceapp
from benchmarks.figures import Promise, Samples, Table, command, interleaved
from benchmarks.hand_over import overtaken
from benchmarks.limit import farthest
from benchmarks.paceapp import (
    OURS,
    PACE,
    RATE,
    REDELIVERED,
    RETRY,
    STARTS,
    WAIT,
    WAYS,
    WINDOW,
)
from benchmarks.peers import new_clients
from benchmarks.serialapp import RUNS, WAITS
from benchmarks.stage import Stage
from celery_setnx.lock.names import starts_name
from tests.harness import server_us, wait_until

WORKERS, PROCESSES = 2, 4
QUICK_CALLS = 150
OF_IDEAL = 1.1
US = 1_000_000
GATHER_S = 0.2

KILLED_AFTER, DEADLINE_S = 120, 120.0

# What the benchmark sends itself, what connections begin with, and what is in a script's time already.
_NOT_SENT = (
    "info",
    "config",
    "hello",
    "client",
    "select",
    "ping",
    "command",
    "rpush",
    "llen",
    "lrange",
    "time",
)
_SCRIPTS = ("eval", "evalsha")


@dataclass(frozen=True)
class Batch:
    """Calls of one key.

    Attributes:
        way: How they are kept to their pace.
        body_ms: How long a body sleeps.
        starts: How many may start within a period. Defaults to 50.
        period_s: The period. Defaults to 2.
        calls: How many calls there are. Defaults to 300.
        gathered: Whether all wait in line before one may start. Defaults to False: they are sent at once.
    """

    way: str
    body_ms: int
    starts: int = 50
    period_s: int = 2
    calls: int = 300
    gathered: bool = False

    @property
    def ideal_s(self) -> float:
        """From the first start to the last one's end, if all that may start do so at once."""
        return (self.calls - 1) // self.starts * self.period_s + self.body_ms / 1000

    @property
    def is_steady(self) -> bool:
        """Whether it takes the calls little time to get into their line, beside the ideal."""
        return self.gathered or self.period_s >= LONG_S

    @property
    def environment(self) -> dict[str, str]:
        """What tells its workers of the pace."""
        return {PACE: f"{self.starts}/{self.period_s}"}

    def __str__(self) -> str:
        gathered = ", all in line" if self.gathered else ""
        return f"{self.way}, {self.starts} in {self.period_s} s, {self.body_ms} ms{gathered}"


EMPTY, SHORT, LONG_S = 0, 20, 10
FAST = [Batch(way, body_ms) for body_ms in (EMPTY, SHORT) for way in WAYS]
SLOW_CALLS = 40
SLOW = [Batch(way, SHORT, starts=10, period_s=10, calls=SLOW_CALLS) for way in (WAIT, WINDOW, RATE)]
GATHERED = [Batch(WAIT, SHORT, gathered=True)]
QUICK = (*GATHERED, Batch(RETRY, SHORT), Batch(WINDOW, SHORT))


@dataclass(frozen=True)
class Sample:
    """What the calls of one way took.

    Attributes:
        total: From the first start to the last end, beside the ideal.
        starts: How many acquired within any period, at most; of peers: began.
        bodies: How many began within any period, at most.
        overtaken: How many calls began after one that came later.
        farthest: By how many of those one was overtaken, at most.
        commands: What was sent to the lock server, per call.
        server_us: The time that it spent on that, per call.
        broker_commands: What was sent to the broker, per call.
        messages: How many messages were published, per call.
        deliveries: How often a call was given to a process, in the mean.
        cpu_ms: Processor time of workers and servers, per call.
    """

    total: float
    starts: float
    bodies: float
    overtaken: float
    farthest: float
    commands: float
    server_us: float
    broker_commands: float
    messages: float
    deliveries: float
    cpu_ms: float


def measured(batch: Batch) -> Sample:
    """Send the calls to two new workers, and wait until they have run.

    Raises:
        AssertionError: They have not, in time.
        RuntimeError: A call has not run exactly once.
    """
    with new_clients(), Stage(paceapp) as stage:
        task: Any = stage.tasks[batch.way]
        ready(stage, task, batch.environment)
        stage.broker.config_resetstat()
        before_s = stage.cpu_s()
        if batch.gathered:
            note_starts(stage, task, batch)
        for number in range(batch.calls):
            task.apply_async((number, 0, batch.body_ms / 1000))
        while batch.gathered and stage.broker.llen(WAITS) < batch.calls:
            note_starts(stage, task, batch)
            time.sleep(GATHER_S)
        stage.wait_for(RUNS, batch.calls)
        return sampled(batch, stage, stage.cpu_s() - before_s)


def ready(stage: Stage, task: Any, environment: dict[str, str]) -> list[Any]:
    """The workers, once each of their processes has its connections."""
    workers = [
        stage.start_worker(concurrency=PROCESSES, queues=f"celery,own-{number}", environment=environment)
        for number in range(WORKERS)
    ]
    for number in range(WORKERS * PROCESSES):
        task.apply_async((-1, number + 1, 0.3), queue=f"own-{number % WORKERS}")
    stage.wait_for(RUNS, WORKERS * PROCESSES)
    stage.forget()
    stage.broker.delete(STARTS)
    return workers


def note_starts(stage: Stage, task: Any, batch: Batch) -> None:
    """Note as many starts as there may be, so that no call may start for a period."""
    now_us = server_us(stage.locks)
    starts = {f"{now_us}#{number}": now_us for number in range(batch.starts)}
    stage.locks.zadd(starts_name(task.lock_key(0, 0, 0.0)), starts)


def sampled(batch: Batch, stage: Stage, cpu_s: float) -> Sample:
    """The sample that the workers' notes make.

    Raises:
        RuntimeError: A call has not run exactly once.
    """
    runs, waits = stage.notes(RUNS), stage.notes(WAITS)
    bodies = sorted(runs, key=lambda note: int(note["began_us"]))
    if sorted(note["number"] for note in bodies) != list(range(batch.calls)):
        raise RuntimeError(f"{batch}: not every call has run once; there were {len(bodies)} runs")
    came: dict[int, float] = {}
    for note in (*runs, *waits):
        came[note["number"]] = min(note["came"], came.get(note["number"], note["came"]))
    arrivals = [came[note["number"]] for note in bodies]
    took_us = max(note["ended_us"] for note in bodies) - bodies[0]["began_us"]
    commands, server_us = sent(batch.way, stage.locks.info("commandstats"))
    told: Any = stage.broker.info("commandstats")
    return Sample(
        total=took_us / US / batch.ideal_s if batch.ideal_s else 0.0,
        starts=most_within(batch.period_s, [note["acquired_us"] for note in bodies]),
        bodies=most_within(batch.period_s, [note["began_us"] for note in bodies]),
        overtaken=overtaken(arrivals),
        farthest=farthest(arrivals),
        commands=commands / batch.calls,
        server_us=server_us / batch.calls,
        broker_commands=sent("", told)[0] / batch.calls,
        messages=told["cmdstat_lpush"]["calls"] / batch.calls,
        deliveries=(len(runs) + len(waits)) / batch.calls,
        cpu_ms=1000 * cpu_s / batch.calls,
    )


def most_within(period_s: float, moments_us: list[int]) -> int:
    """How many of these moments there are in any window of a period, at most; its end is the next one's."""
    found = sorted(moments_us)
    period_us = round(period_s * US)
    return max(bisect.bisect_left(found, at + period_us) - place for place, at in enumerate(found))


def sent(way: str, stats: Any) -> tuple[int, float]:
    """How many commands a server was sent, and how many microseconds it spent on them."""
    named = {name.removeprefix("cmdstat_"): stat for name, stat in stats.items()}
    counted = [
        stat
        for name, stat in named.items()
        if (name in _SCRIPTS if way in OURS else name.partition("|")[0] not in _NOT_SENT)
    ]
    return sum(stat["calls"] for stat in counted), sum(stat["usec"] for stat in counted)


# Deaths


@dataclass(frozen=True)
class Death:
    """What the death of one worker of two has come to.

    Attributes:
        lost_s: How much later the last call has run than it could have.
        pause_s: The longest time in which no call began.
        twice: How many calls began twice.
        never: How many never ended.
        starts: How many acquired within any period, at most; of peers: began.
    """

    lost_s: float
    pause_s: float
    twice: float
    never: float
    starts: float


def killed(batch: Batch) -> Death:
    """Kill one of the workers while its calls start.

    Raises:
        AssertionError: Too few have started in time.
    """
    environment = {**batch.environment, REDELIVERED: "1"}
    with new_clients(), Stage(paceapp) as stage:
        task: Any = stage.tasks[batch.way]
        victim, *_others = ready(stage, task, environment)
        for number in range(batch.calls):
            task.apply_async((number, 0, batch.body_ms / 1000))
        stage.wait_for(STARTS, KILLED_AFTER)
        victim.kill()
        give_up = time.monotonic() + DEADLINE_S

        def ended() -> set[int]:
            return {note["number"] for note in stage.notes(RUNS)}

        wait_until(lambda: len(ended()) >= batch.calls or time.monotonic() > give_up, "all", 2 * DEADLINE_S)
        began = stage.notes(STARTS)
        moments = sorted(note["began_us"] for note in began)
        pauses = [after - before for before, after in itertools.pairwise(moments)]
        return Death(
            lost_s=max(note["ended_us"] for note in stage.notes(RUNS)) / US - moments[0] / US - batch.ideal_s,
            pause_s=max(pauses) / US,
            twice=len(began) - len({note["number"] for note in began}),
            never=batch.calls - len(ended()),
            starts=most_within(batch.period_s, [note["acquired_us"] for note in began]),
        )


def measure(rounds: int, quick: bool) -> Iterator[Table]:
    """A table of each figure."""
    batches = [*FAST, *GATHERED, *SLOW]
    if quick:
        batches = [replace(batch, calls=QUICK_CALLS) for batch in (*GATHERED, *FAST) if batch in QUICK]
    samples: dict[str, list[Sample]] = {str(batch): [] for batch in batches}

    def total(batch: Batch) -> float:
        samples[str(batch)].append(measured(batch))
        return samples[str(batch)][-1].total

    interleaved({str(batch): partial(total, batch) for batch in batches}, rounds)
    about = f"{batches[0].calls} calls, or {SLOW_CALLS} in 10 s, {WORKERS} workers of {PROCESSES} processes."

    def table(
        title: str, unit: str, figure: Callable[[Sample], float], of: list[Batch], *promises: Promise
    ) -> Table:
        found = {str(batch): [figure(sample) for sample in samples[str(batch)]] for batch in of}
        return Table(f"pace, {title}", unit, found, str(Batch(WINDOW, SHORT)), promises, about)

    ideal = [Promise(str(batch), OF_IDEAL) for batch in batches if batch.way == WAIT and batch.is_steady]
    yield table("total", "x the ideal", lambda sample: sample.total, batches, *ideal)
    ours = [batch for batch in batches if batch.way in OURS]
    never = [Promise(str(batch), batch.starts) for batch in ours]
    yield table("starts", "in a period, at most", lambda sample: sample.starts, batches, *never)
    yield table("bodies", "begun in a period, at most", lambda sample: sample.bodies, batches)
    yield table("overtaken", "calls", lambda sample: sample.overtaken, batches)
    yield table("overtaken, farthest", "calls", lambda sample: sample.farthest, batches)
    yield table("commands on the lock server", "per call", lambda sample: sample.commands, batches)
    yield table("time on the lock server", "us per call", lambda sample: sample.server_us, batches)
    yield table("commands on the broker", "per call", lambda sample: sample.broker_commands, batches)
    yield table("messages", "per call", lambda sample: sample.messages, batches)
    yield table("deliveries", "per call", lambda sample: sample.deliveries, batches)
    yield table("processor", "ms per call", lambda sample: sample.cpu_ms, batches)
    if not quick:
        yield from deaths(rounds)


def deaths(rounds: int) -> Iterator[Table]:
    """Tables of what the death of a worker costs."""
    batches = [Batch(way, SHORT) for way in WAYS]
    found: dict[str, list[Death]] = {batch.way: [] for batch in batches}
    for number in range(rounds):
        for batch in batches:
            found[batch.way].append(killed(batch))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)

    def table(title: str, unit: str, figure: Callable[[Death], float]) -> Table:
        samples: Samples = {way: [figure(death) for death in of] for way, of in found.items()}
        return Table(f"pace, kill -9 of one worker of two: {title}", unit, samples, batches[0].way)

    yield table("later than the ideal", "s", lambda death: death.lost_s)
    yield table("longest pause", "s", lambda death: death.pause_s)
    yield table("begun twice", "calls", lambda death: death.twice)
    # A message that a worker has taken from Redis, and has not noted there as its own yet, dies with it.
    yield table("never run", "calls", lambda death: death.never)
    yield table("starts", "in a period, at most", lambda death: death.starts)


if __name__ == "__main__":
    command(__doc__, measure)
