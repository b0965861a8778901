"""How fast a lock goes from one call to the next: `on_conflict="wait"` beside polling `"retry"`.

python -m benchmarks.hand_over [--rounds 3] [--check]

In every round calls of one key go to two fresh workers of one process each, with one policy after the other.
All moments are taken in the workers, by the machine's one monotonic clock:

- total: from the first body's start to the last one's end, as a multiple of the sum of the bodies;
- hand-over: from the end of a body to the start of the next one: the release, the wake-up, the acquire, and
  what Celery does between two tasks;
- overtaken: calls that began after one which had come more than 5 ms later. A call comes when a worker's
  process is given it for the first time;
- scripts: how many scripts the lock server has run, per call. They are all that we send it.

One more sample has a lease of two seconds, so that couriers come while calls wait, and ends with the last of
them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.machine import machine
from benchmarks.serialapp import RUNS, WAITS
from benchmarks.stage import Note, Stage
from examples.embedded import EmbeddedServer

WORKERS = 2
SLACK_S = 0.005

TOTAL_OF_SHORT = 1.4
HAND_OVER_MS = 15.0
# A call that waits in line: the acquire that is in vain, its place, the acquire, the release, and its
# courier, which finds that it has begun.
SCRIPTS_TO_WAIT = 5
# A call that meets a young lock asks for it every 0.5 ms at most, for 20 ms at most.
ASKS_PER_MS, LINGER_MS = 2, 20


@dataclass(frozen=True)
class Batch:
    """Calls of one key.

    Attributes:
        policy: What becomes of a conflict.
        body_ms: How long a body sleeps.
        calls: How many there are.
        lease_s: The lease, if it is not the default: the sample lasts until the last courier is gone.
    """

    policy: str
    body_ms: int
    calls: int
    lease_s: float | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The calls' own options; who polls does so more often than by default."""
        options: dict[str, Any] = {"on_conflict": self.policy}
        if self.policy == "retry":
            options.update(retry_delay=0.1, retry_delay_max=1)
        if self.lease_s is not None:
            options.update(lease=self.lease_s)
        return options

    def __str__(self) -> str:
        lease = "" if self.lease_s is None else f", lease {self.lease_s:g} s"
        return f"{self.policy}, {self.calls} of {self.body_ms} ms{lease}"


@dataclass(frozen=True)
class Sample:
    """What a batch took.

    Attributes:
        total: From the first start to the last end, as a multiple of the sum of the bodies.
        hand_overs_ms: From each end to the next start.
        overtaken: How many calls began after one that came later.
        scripts: Scripts on the lock server, per call.
        waited_s: From coming to start, in the mean.
    """

    total: float
    hand_overs_ms: list[float]
    overtaken: int
    scripts: float
    waited_s: float


SHORT, LONG = Batch("wait", 5, 200), Batch("wait", 50, 100)
BATCHES = (SHORT, Batch("retry", 5, 200), LONG, Batch("retry", 50, 100))
WATCHED = Batch("wait", 50, 100, lease_s=2)


def measure(batch: Batch) -> Sample:
    """Send the calls to two new workers, and wait until they have run.

    Raises:
        AssertionError: They have not, in time.
        RuntimeError: A call has not run exactly once, or two ran side by side.
    """
    with Stage() as stage:
        work = stage.tasks["work"]
        for number in range(WORKERS):
            stage.start_worker(concurrency=1, queues=f"celery,own-{number}")
            work.apply_async((number, number + 1, 0.0), queue=f"own-{number}")
        stage.wait_for(RUNS, WORKERS)  # each has its connections
        stage.forget()
        for number in range(batch.calls):
            work.apply_async((number, 0, batch.body_ms / 1000), singleton=batch.options)
        stage.wait_for(RUNS, batch.calls)
        if batch.lease_s is not None:
            stage.wait_until_empty()
        return sampled(batch, stage.notes(RUNS), stage.notes(WAITS), stage.scripts())


def sampled(batch: Batch, runs: list[Note], waits: list[Note], scripts: int) -> Sample:
    """The sample that the workers' notes make.

    Raises:
        RuntimeError: A call has not run exactly once, or two ran side by side.
    """
    bodies = sorted(runs, key=lambda note: float(note["began"]))
    if sorted(note["number"] for note in bodies) != list(range(batch.calls)):
        raise RuntimeError(f"{batch}: not every call has run once; there were {len(bodies)} runs")
    hand_overs = [after["began"] - before["ended"] for before, after in itertools.pairwise(bodies)]
    if min(hand_overs) < 0:
        raise RuntimeError(f"{batch}: two calls ran side by side")
    came: dict[int, float] = {}
    for note in (*runs, *waits):
        came[note["number"]] = min(note["came"], came.get(note["number"], note["came"]))
    ideal_s = sum(note["ended"] - note["began"] for note in bodies)
    return Sample(
        total=(bodies[-1]["ended"] - bodies[0]["began"]) / ideal_s,
        hand_overs_ms=[hand_over * 1000 for hand_over in hand_overs],
        overtaken=overtaken([came[note["number"]] for note in bodies]),
        scripts=scripts / batch.calls,
        waited_s=statistics.fmean(note["began"] - came[note["number"]] for note in bodies),
    )


def overtaken(arrivals: list[float]) -> int:
    """How many began after one that came later; given when each came, in the order in which they began."""
    latest_before = itertools.accumulate(arrivals, max)
    return sum(latest - came > SLACK_S for came, latest in zip(arrivals, latest_before))


def scripts_allowed(batch: Batch, sample: Sample) -> float:
    """How many scripts a waiting call may need: a few, its courier's visits, and its asking at first.

    While the line is empty, as between short bodies, every call asks for a body's time and a hand-over's; of
    longer ones only those do that meet the first.
    """
    asks = ASKS_PER_MS * LINGER_MS
    if batch.body_ms < LINGER_MS:
        at_first = min(asks, ASKS_PER_MS * (batch.body_ms + statistics.fmean(sample.hand_overs_ms)))
    else:
        at_first = asks * WORKERS / batch.calls
    visits = 0.0 if batch.lease_s is None else sample.waited_s / batch.lease_s
    return SCRIPTS_TO_WAIT + visits + at_first


def merged(samples: list[Sample]) -> Sample:
    """The rounds in one: medians, all hand-overs, and every call that was overtaken."""
    return Sample(
        total=statistics.median(sample.total for sample in samples),
        hand_overs_ms=sorted(ms for sample in samples for ms in sample.hand_overs_ms),
        overtaken=sum(sample.overtaken for sample in samples),
        scripts=statistics.median(sample.scripts for sample in samples),
        waited_s=statistics.median(sample.waited_s for sample in samples),
    )


def table(samples: dict[Batch, Sample]) -> Iterator[str]:
    """The lines of the table."""
    hand_over = ("median", "p99", "highest")
    yield f"{'':32}{'total':>8}" + "".join(f"{name:>9}" for name in hand_over) + "  overtaken  scripts/call"
    for batch, sample in samples.items():
        ms = sample.hand_overs_ms
        figures = (statistics.median(ms), ms[int(len(ms) * 0.99)], ms[-1])
        yield (
            f"{batch!s:32}{sample.total:7.2f}x"
            + "".join(f"{figure:6.1f} ms" for figure in figures)
            + (f"{sample.overtaken:11}{sample.scripts:14.1f}")
        )


def promises(samples: dict[Batch, Sample]) -> Iterator[tuple[bool, str]]:
    """What is promised of `wait`, and whether it is kept."""
    total = samples[SHORT].total
    yield total <= TOTAL_OF_SHORT, f"{SHORT}: {total:.2f} times the ideal; promised {TOTAL_OF_SHORT:g}"
    for batch, sample in samples.items():
        if batch.policy != "wait":
            continue
        median, allowed = statistics.median(sample.hand_overs_ms), scripts_allowed(batch, sample)
        yield median <= HAND_OVER_MS, f"{batch}: hand-over {median:.1f} ms; promised {HAND_OVER_MS:g} ms"
        yield not sample.overtaken, f"{batch}: {sample.overtaken} calls were overtaken; promised none"
        yield sample.scripts <= allowed, f"{batch}: {sample.scripts:.1f} scripts; promised {allowed:.1f}"


def main() -> int:
    """Measure, print the table, and check the promises."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="rounds (default 3)")
    parser.add_argument("--check", action="store_true", help="fail unless the promises are kept")
    chosen = parser.parse_args()
    rounds: dict[Batch, list[Sample]] = {batch: [] for batch in BATCHES}
    for number in range(chosen.rounds):
        for batch, samples in rounds.items():
            samples.append(measure(batch))
        print(f"round {number + 1} of {chosen.rounds}", file=sys.stderr)
    found = {batch: merged(samples) for batch, samples in rounds.items()}
    found[WATCHED] = merged([measure(WATCHED)])
    with EmbeddedServer() as server:
        print(*machine(server), f"{WORKERS} workers of one process, {chosen.rounds} rounds", sep="\n")
    print("", *table(found), "", sep="\n")
    kept = True
    for is_kept, what in promises(found):
        kept &= is_kept
        print(f"{'kept  ' if is_kept else 'BROKEN'} {what}")
    return 0 if kept or not chosen.check else 1


if __name__ == "__main__":
    sys.exit(main())
