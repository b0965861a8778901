"""How fast a lock goes from one call to the next: `on_conflict="wait"` beside polling `"retry"`.

python -m benchmarks.hand_over [--rounds 7] [--quick]

In every round calls of one key go to two fresh workers of one process each, with one policy after the other.
All moments are taken in the workers, by the machine's one monotonic clock:

- total: from the first body's start to the last one's end, as a multiple of the sum of the bodies;
- hand-over: from the end of a body to the start of the next one: the release, the wake-up, the acquire, and
  what Celery does between two tasks;
- overtaken: calls that began after one which had come more than 5 ms later. A call comes when a worker's
  process is given it for the first time;
- scripts: how many scripts the lock server has run, per call. They are all that we send it.

Couriers come later than all this: after ten minutes.
"""

from __future__ import annotations

import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.figures import Promise, Table, command
from benchmarks.serialapp import RUNS, WAITS
from benchmarks.stage import Note, Stage

WORKERS = 2
SLACK_S = 0.005

TOTAL_OF_SHORT = 1.4
HAND_OVER_MS = 15.0
# A call that waits in line: the acquire that is in vain, when to look at its line, its place, the acquire,
# and the release.
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
    """

    policy: str
    body_ms: int
    calls: int

    @property
    def options(self) -> dict[str, Any]:
        """The calls' own options; who polls does so more often than by default."""
        options: dict[str, Any] = {"on_conflict": self.policy}
        if self.policy == "retry":
            options.update(retry_delay=0.1, retry_delay_max=1)
        return options

    def __str__(self) -> str:
        return f"{self.policy}, {self.calls} of {self.body_ms} ms"


@dataclass(frozen=True)
class Sample:
    """What a batch took.

    Attributes:
        total: From the first start to the last end, as a multiple of the sum of the bodies.
        hand_overs_ms: From each end to the next start.
        overtaken: How many calls began after one that came later.
        scripts: Scripts on the lock server, per call.
    """

    total: float
    hand_overs_ms: list[float]
    overtaken: int
    scripts: float


SHORT, LONG = Batch("wait", 5, 200), Batch("wait", 50, 100)
BATCHES = (SHORT, Batch("retry", 5, 200), LONG, Batch("retry", 50, 100))
ABOUT = f"{WORKERS} workers of one process, one key."


def measured(batch: Batch) -> Sample:
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
    )


def overtaken(arrivals: list[float]) -> int:
    """How many began after one that came later; given when each came, in the order in which they began."""
    latest_before = itertools.accumulate(arrivals, max)
    return sum(latest - came > SLACK_S for came, latest in zip(arrivals, latest_before))


def scripts_allowed(batch: Batch, sample: Sample) -> float:
    """How many scripts a waiting call may need: a few, and its asking at first.

    While the line is empty, as between short bodies, every call asks for a body's time and a hand-over's; of
    longer ones only those do that meet the first.
    """
    asks = ASKS_PER_MS * LINGER_MS
    if batch.body_ms < LINGER_MS:
        at_first = min(asks, ASKS_PER_MS * (batch.body_ms + statistics.fmean(sample.hand_overs_ms)))
    else:
        at_first = asks * WORKERS / batch.calls
    return SCRIPTS_TO_WAIT + at_first


def measure(rounds: int, quick: bool) -> Iterator[Table]:
    """A table of each figure."""
    batches = BATCHES[:2] if quick else BATCHES
    samples: dict[Batch, list[Sample]] = {batch: [] for batch in batches}
    for number in range(rounds):
        for batch, of_batch in samples.items():
            of_batch.append(measured(batch))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    waits = [batch for batch in samples if batch.policy == "wait"]

    def table(title: str, unit: str, figure: Callable[[Sample], float], *promises: Promise) -> Table:
        found = {str(batch): [figure(sample) for sample in of] for batch, of in samples.items()}
        return Table(f"waiting, {title}", unit, found, str(BATCHES[1]), promises, ABOUT)

    allowed = {batch: statistics.median(scripts_allowed(batch, s) for s in samples[batch]) for batch in waits}
    yield table("total", "x the bodies", lambda sample: sample.total, Promise(str(SHORT), TOTAL_OF_SHORT))
    # A time of its own is promised of a quiet machine only.
    fast = () if quick else tuple(Promise(str(batch), HAND_OVER_MS) for batch in waits)
    yield table("hand-over, median", "ms", lambda sample: statistics.median(sample.hand_overs_ms), *fast)
    yield table("hand-over, 99th percentile", "ms", lambda sample: percentile(sample.hand_overs_ms, 0.99))
    # A call may say that it has come, and lose the processor before it asks for the lock.
    fair = tuple(Promise(str(batch), 0) for batch in waits)
    yield table("overtaken", "calls", lambda sample: sample.overtaken, *fair)
    few = tuple(Promise(str(batch), allowed[batch]) for batch in waits)
    yield table("scripts on the lock server", "per call", lambda sample: sample.scripts, *few)


def percentile(figures: list[float], share: float) -> float:
    """The figure that this share of them does not pass."""
    return sorted(figures)[int(len(figures) * share)]


if __name__ == "__main__":
    command(__doc__, measure)
