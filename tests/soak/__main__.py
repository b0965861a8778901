"""`python -m tests.soak --seconds 60`: the soak, then every mutant, which must be caught."""

import argparse
import sys
import time

from tests.soak.checker import Report
from tests.soak.driver import MUTANTS, Scenario, soak

ROUND_S = 60.0
MUTANT_S = 40.0
CHANCES = 3


def main() -> int:
    """Soak, print the figures; the status says whether every promise was kept and every mutant caught."""
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the main soak; default 60")
    parser.add_argument("--seed", type=int, default=0, help="of the driver's choices; default 0")
    parser.add_argument("--mutants", choices=["all", "none", *MUTANTS], default="all", metavar="WHICH")
    options = parser.parse_args()
    held = _main_soak(options.seconds, options.seed)
    wanted = {"all": list(MUTANTS), "none": []}.get(options.mutants, [options.mutants])
    caught = [any(_is_caught(name, options.seed + chance) for chance in range(CHANCES)) for name in wanted]
    return 0 if held and all(caught) else 1


def _main_soak(seconds: float, seed: int) -> bool:
    """In rounds, each with a server and a history of its own, so that no history outgrows the memory."""
    total = Report()
    rounds = max(1, round(seconds / ROUND_S))
    for number in range(rounds if seconds > 0 else 0):
        report = soak(Scenario(), seconds / rounds, seed=seed + number)
        total.add(report)
        for violation in report.violations:
            print("VIOLATION", violation)
    print(f"soak of {seconds:g} s\n{total.table()}", flush=True)
    return not total.violations


def _is_caught(name: str, seed: int) -> bool:
    began = time.monotonic()
    report = soak(MUTANTS[name], MUTANT_S, seed=seed, stop_at_violation=True)
    took = time.monotonic() - began
    verdict = report.violations[0] if report.violations else "NOT CAUGHT"
    print(f"mutant {name!r} after {took:.1f} s: {verdict}", flush=True)
    return bool(report.violations)


if __name__ == "__main__":
    sys.exit(main())
