"""Explore every scenario, and say how many states it has: python -m tests.model"""

from __future__ import annotations

import sys
import time

from tests.model.scenarios import SCENARIOS


def main() -> int:
    """A line for each kind of scenario; what is broken, if anything is."""
    print("| scenarios | how many | states | CPU seconds |", "|---|---|---|---|", sep="\n")
    broken = 0
    for kind in dict.fromkeys(name.partition(",")[0] for name in SCENARIOS):
        began, states = time.process_time(), 0
        of_kind = {name: scenario for name, scenario in SCENARIOS.items() if name.partition(",")[0] == kind}
        for name, scenario in of_kind.items():
            found = scenario.explored()
            states += found.states
            if found.broken:
                broken += 1
                print(f"{name}: {found}", file=sys.stderr)
        print(f"| {kind} | {len(of_kind)} | {states:,} | {time.process_time() - began:.0f} |", flush=True)
    return broken > 0


if __name__ == "__main__":
    sys.exit(main())
