"""What a rate costs the calls that it does not keep from starting: `rate=(1000, 2)` beside no rate.

python -m benchmarks.pace_cost [--rounds 7] [--quick]

1,000 calls with empty bodies go to two fresh workers of four processes each, `limit=10`. In every round the
two ways follow each other at once, in an order drawn anew: from one minute to the next the server's time for
a script differs by more than a rate makes. So only the ratio within a round says something.

- commands: what was sent to the lock server, per call;
- time: what it spent on that, per call;
- processor: what workers and servers used, per call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.figures import Promise, Table, command, interleaved
from benchmarks.pace import EMPTY, PROCESSES, WORKERS, Batch, Sample, measured
from benchmarks.paceapp import FREE, UNREACHED

CALLS, QUICK_CALLS = 1000, 300
COMMANDS = 1.05


def measure(rounds: int, quick: bool) -> Iterator[Table]:
    """A table of each figure."""
    calls = QUICK_CALLS if quick else CALLS
    samples: dict[str, list[Sample]] = {FREE: [], UNREACHED: []}

    def sent(way: str) -> float:
        samples[way].append(measured(Batch(way, EMPTY, calls=calls)))
        return samples[way][-1].commands

    interleaved({way: partial(sent, way) for way in samples}, rounds)
    about = f"{calls} calls, {WORKERS} workers of {PROCESSES} processes."

    def table(title: str, unit: str, figure: Callable[[Sample], float], *promises: Promise) -> Table:
        found = {way: [figure(sample) for sample in of] for way, of in samples.items()}
        return Table(f"pace cost, {title}", unit, found, FREE, promises, about)

    few = Promise(UNREACHED, COMMANDS, FREE)
    yield table("commands on the lock server", "per call", lambda sample: sample.commands, few)
    yield table("time on the lock server", "us per call", lambda sample: sample.server_us)
    yield table("processor", "ms per call", lambda sample: sample.cpu_ms)


if __name__ == "__main__":
    command(__doc__, measure)
