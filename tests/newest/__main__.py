"""A real run of newest wins, and one of debounce.

python -m tests.newest [--calls 10000] [--keys 100] [--only newest] [--seed 0] [--out FILE]

Four processes publish calls of the same keys, with random priorities; two workers run them, and note each
body's start under its lock. Publishers, workers and processes of their pools are killed (kill -9), and
messages come twice. In the end the last body of each key is that of its newest call, and no older body has
begun after a newer one; each call has ended, and nothing is left in the lock server. What is measured
depends on the machine, and fails nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.machine import machine
from tests.newest.app import PRIORITIES, Planned
from tests.newest.judge import Verdict, summary
from tests.newest.run import PUBLISHERS, Run

DEBOUNCE_S, MOST_S = 0.5, 2.0
GAP_S, BURST_S, QUIET_S = 0.2, (0.5, 3.5), (2.5, 8.0)
A_SECOND = 120
"""How many calls are published a second, at most."""


class Way(NamedTuple):
    """What is run: options of the task, and its debounce with its bound, if it has one."""

    singleton: dict[str, Any]
    quiet_s: float = 0.0
    most_s: float = 0.0


WAYS = {
    "newest": Way({}),
    "debounce": Way({"debounce": DEBOUNCE_S, "debounce_max": MOST_S}, DEBOUNCE_S, MOST_S),
}


def plan_of(way: str, calls: int, keys: int, seed: int) -> list[Planned]:
    """The calls, in order: at any time, or for a debounce in bursts."""
    chance = random.Random(f"{seed} {way}")
    names, length_s = [f"key-{number}" for number in range(keys)], calls / A_SECOND
    if way == "newest":
        times = [(chance.uniform(0.0, length_s), chance.choice(names)) for _ in range(calls)]
    else:
        times = [(at, name) for name in names for at in _bursts(chance, calls // keys)]
    return [Planned(at, name, chance.choice(PRIORITIES)) for at, name in sorted(times)]


def _bursts(chance: random.Random, calls: int) -> Iterator[float]:
    """When the calls of one key come: burst by burst, shorter and longer than `debounce_max`."""
    at, ends = chance.uniform(0.0, 2.0), 0.0
    for _ in range(calls):
        if not ends:
            ends = at + chance.uniform(*BURST_S)
        yield at
        at += chance.uniform(0.0, 2 * GAP_S)
        if at > ends:
            at, ends = at + chance.uniform(*QUIET_S), 0.0


def kills_of(calls: int) -> list[str]:
    """Whom to kill, in order."""
    return ["publisher", "body", "worker"] * (1 if calls < 5000 else PUBLISHERS)


def played(way: str, calls: int, keys: int, seed: int) -> tuple[Verdict, list[str]]:
    """What a run has shown, and on what machine."""
    of = WAYS[way]
    with Run(of.singleton, seed) as run:
        about = [line.replace(", kept awake", "") for line in machine(run.server)]
        return run.play(plan_of(way, calls, keys, seed), kills_of(calls), of.quiet_s, of.most_s), about


def lines(way: str, verdict: Verdict) -> Iterator[str]:
    """A run's tables."""
    yield f"{way}:"
    yield from (f"  {name:70} {count:6d}" for name, count in verdict.counts.items())
    for name, seconds in verdict.figures.items():
        of = summary(seconds)
        yield f"  {name:70} " + ", ".join(f"{word} {value:g}" for word, value in of.items())
    yield from (f"  BROKEN {what}" for what in verdict.broken)


def main() -> int:
    """Run, print, and write; 1 if anything was broken."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=10_000, help="of each run (default 10000)")
    parser.add_argument("--keys", type=int, default=100, help="of each run (default 100)")
    parser.add_argument("--only", choices=WAYS, help="one run of the two")
    parser.add_argument("--seed", type=int, default=0, help="of times, kills and copies (default 0)")
    parser.add_argument("--out", type=Path, help="a JSON file for the figures; another run's stay in it")
    chosen = parser.parse_args()
    broken = False
    for way in [chosen.only] if chosen.only else WAYS:
        began = time.monotonic()
        verdict, about = played(way, chosen.calls, chosen.keys, chosen.seed)
        print(*lines(way, verdict), sep="\n", flush=True)
        broken |= bool(verdict.broken)
        if chosen.out:
            known = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
            known[way] = {
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "seed": chosen.seed,
                "took_s": round(time.monotonic() - began),
                "machine": about,
                "load": round(os.getloadavg()[0], 1),  # delays are of that, above all
                "broken": verdict.broken,
                "counts": verdict.counts,
                "figures": {name: summary(seconds) for name, seconds in verdict.figures.items()},
            }
            chosen.out.write_text(json.dumps(known, indent=1) + "\n")
    return int(broken)


if __name__ == "__main__":
    sys.exit(main())
