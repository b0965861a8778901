"""All benchmarks one after the other: their tables, a list of all promises, JSON and plots.

python -m benchmarks [--rounds 7] [--quick] [--server PATH] [--only NAME ...]
                     [--out docs/performance]

What was found is written to results.json, with all samples, and the machine and the date of each benchmark.
With `--only` the others' results stay as they are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.figures import QUICK_ROUNDS, ROUNDS, SERVER_HELP, show, use_server
from benchmarks.machine import awake, machine
from benchmarks.plot import draw
from examples.embedded import EmbeddedServer

NAMES = (
    "lock_cycle",
    "server_cost",
    "renewal",
    "worker",
    "fan_out",
    "hand_over",
    "long_lines",
    "limit",
    "pace",
    "pace_cost",
    "contention",
    "recovery",
    "startup",
    "capacity",
)
RESULTS = "results.json"


def run(name: str, rounds: int, quick: bool) -> tuple[dict[str, Any], list[str]]:
    """One benchmark: its tables are printed, and come back as plain values; and what is not kept."""
    module = importlib.import_module(f"benchmarks.{name}")
    began = time.monotonic()
    print("", f"== {name} ==", sep="\n", flush=True)
    found: list[dict[str, Any]] = []
    broken: list[str] = []
    with awake():
        for figure in module.measure(rounds, quick):
            show(figure)
            broken.extend(what for is_kept, what in figure.kept() if not is_kept)
            found.append(figure.as_json())
        with EmbeddedServer() as server:
            about = list(machine(server))
    result = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "machine": about,
        "rounds": rounds,
        "quick": quick,
        "took_s": round(time.monotonic() - began, 1),
        "figures": found,
    }
    return result, broken


def main() -> None:
    """Run the benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, help=f"rounds (default {ROUNDS}; quick: {QUICK_ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller samples")
    parser.add_argument("--only", nargs="+", choices=NAMES, default=NAMES, metavar="NAME", help="only these")
    parser.add_argument("--out", type=Path, default=Path("docs/performance"), help="where the results go")
    parser.add_argument("--server", help=SERVER_HELP)
    chosen = parser.parse_args()
    use_server(chosen.server)
    rounds = chosen.rounds or (QUICK_ROUNDS if chosen.quick else ROUNDS)
    chosen.out.mkdir(parents=True, exist_ok=True)
    file = chosen.out / RESULTS
    known = json.loads(file.read_text()) if file.exists() else {}
    broken: list[str] = []
    for name in chosen.only:
        known[name], not_kept = run(name, rounds, chosen.quick)
        broken.extend(not_kept)
        file.write_text(json.dumps(known, indent=1) + "\n")
    for picture in draw(known, chosen.out):
        print(picture)
    print("", *known[chosen.only[-1]]["machine"], f"{rounds} rounds", "", sep="\n")
    print("took", *(f"{name} {known[name]['took_s']:.0f} s" for name in chosen.only), sep=", ")
    print(*(f"BROKEN {what}" for what in broken), f"{len(broken)} promises are broken", sep="\n")


if __name__ == "__main__":
    main()
