"""`python -m tests.soak --seconds 60`: the soak, then every mutant, which must be caught."""

import argparse
import sys
from dataclasses import replace

from tests.soak.driver import MUTANTS, PACED, PERMITS, Scenario, catch, soak
from tests.soak.history import Report
from tests.soak.hunt import end_on_sigterm, hunt, side_by_side

ROUND_S = 60.0
CONTROL_S = 5.0
# Soaks beside each other do less in a second: with so much more time they do no less in all.
BESIDE = 1.2


def main() -> int:
    """Soak, print the figures; the status says whether every promise was kept and every mutant caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the main soak; default 60")
    parser.add_argument("--seed", type=int, default=0, help="of the driver's choices; default 0")
    parser.add_argument("--mutants", choices=["all", "none", *MUTANTS], default="all", metavar="WHICH")
    parser.add_argument("--controls", action="store_true", help="also the mutants' soaks without their flaws")
    parser.add_argument(
        "--lanes", type=int, default=4, help="soaks at a time, which share the seconds; default 4"
    )
    options = parser.parse_args()
    end_on_sigterm()
    held = options.seconds <= 0 or _main_soak(options.seconds, options.seed, options.lanes)
    held &= options.seconds <= 0 or _permits_soak(options.seconds / 3, options.seed, options.lanes)
    held &= options.seconds <= 0 or _paced_soak(options.seconds / 6, options.seed, options.lanes)
    wanted = {"all": list(MUTANTS), "none": []}.get(options.mutants, [options.mutants])
    if options.controls:
        plain = [(replace(MUTANTS[name], flaw="none"), CONTROL_S, options.seed) for name in wanted]
        held &= _total(f"{len(plain)} soaks without the flaw", plain, options.lanes)
    return 0 if hunt(catch, [(name,) for name in wanted], options.seed, options.lanes) and held else 1


def _main_soak(seconds: float, seed: int, lanes: int) -> bool:
    """In rounds, each with a server and a history of its own, so that no history outgrows the memory."""
    rounds = max(lanes, round(seconds / ROUND_S))
    rows = [(Scenario(), BESIDE * seconds / rounds, seed + number) for number in range(rounds)]
    floors = {"kills of a holder": seconds / 3, "connection faults": seconds}
    return _total(f"soak of {seconds:g} s, {lanes} at a time", rows, lanes, floors)


def _permits_soak(seconds: float, seed: int, lanes: int) -> bool:
    """The same on a lock that three may hold."""
    rounds = max(lanes, round(seconds / ROUND_S))
    rows = [(PERMITS, BESIDE * seconds / rounds, seed + number) for number in range(rounds)]
    floors = {"kills of a holder": seconds / 6, "connection faults": seconds / 2}
    return _total(f"soak of {seconds:g} s with three permits, {lanes} at a time", rows, lanes, floors)


def _paced_soak(seconds: float, seed: int, lanes: int) -> bool:
    """And at a pace."""
    rounds = max(lanes, round(seconds / ROUND_S))
    rows = [(PACED, BESIDE * seconds / rounds, seed + number) for number in range(rounds)]
    floors = {"refused for their pace": seconds, "connection faults": seconds / 4}
    return _total(f"soak of {seconds:g} s at a pace, {lanes} at a time", rows, lanes, floors)


def _total(title: str, rows: list[tuple], lanes: int, floors: dict[str, float] | None = None) -> bool:
    """Whether nothing was violated, and enough done."""
    total = Report()
    for report in side_by_side(soak, rows, lanes):
        total.add(report)
    for name, least in (floors or {}).items():
        if total.counts[name] <= least:
            total.broken(f"only {total.counts[name]} {name}: that shows little")
    for violation in total.violations:
        print("VIOLATION", violation)
    print(f"{title}\n{total.table()}", flush=True)
    return not total.violations


if __name__ == "__main__":
    sys.exit(main())
