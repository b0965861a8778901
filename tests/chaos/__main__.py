"""`python -m tests.chaos --scale 1`: every fault, then a table; `--teeth`: every flaw must be found."""

import argparse
import signal
import sys
import time

from tests.chaos.scenarios import SCENARIOS
from tests.chaos.stage import BrokenStage, MissingTool, Stage
from tests.chaos.suite import bite, count_of, play, table

CHANCES = 3
"""How often a flaw is looked for: when a process is killed is the driver's choice, and may miss it."""


def main() -> int:
    """The status says whether every promise was kept, or with --teeth whether every flaw was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--scale", default="1", help="multiple of what CI injects, or 'full'; default 1")
    parser.add_argument("--seed", type=int, default=0, help="of the driver's choices; default 0")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name contains this")
    parser.add_argument("--teeth", action="store_true", help="play on flawed workers instead")
    parser.add_argument("--keep", action="store_true", help="keep logs and history")
    options = parser.parse_args()
    names = [name for name in SCENARIOS if options.only in name]
    signal.signal(signal.SIGTERM, lambda *_arguments: sys.exit(143))  # the workers end with the driver
    try:
        for name in names:
            SCENARIOS[name].check_tools()
        if options.teeth:
            return _teeth(names, options.seed)
        return _chaos(names, options.scale, options.seed, options.keep)
    except MissingTool as missing:
        print(f"the chaos suite needs {missing}", file=sys.stderr)
        return 2
    except BrokenStage as broken:
        print(f"a worker did not start: {broken}", file=sys.stderr)
        return 3


def _chaos(names: list[str], scale: str, seed: int, keep: bool) -> int:
    began, results = time.monotonic(), []
    stage = Stage(seed)
    try:
        for name in names:
            result = play(stage, name, count_of(SCENARIOS[name], scale))
            results.append(result)
            print(f"{name}: {result.injected} times, {dict(result.report.ends)}", flush=True)
            for violation in result.report.violations:
                print("VIOLATION", violation, flush=True)
    finally:
        keep = keep or any(result.report.violations for result in results)
        stage.close(keep=keep)
        if keep:
            print(f"logs and history: {stage.directory}")
    print(f"\n{table(results)}\n\nseed {seed}, scale {scale}, {time.monotonic() - began:.0f} s")
    return 1 if any(result.report.violations for result in results) else 0


def _teeth(names: list[str], seed: int) -> int:
    blunt = 0
    for name in names:
        for mutant in SCENARIOS[name].mutants:
            for chance in range(CHANCES):
                result = bite(name, mutant, seed + chance)
                found = result.report.violations
                if found:
                    break
            blunt += not found
            where = f"{name} / {mutant}, chance {chance + 1}, {result.took_s:.0f} s"
            print(f"{where}: {found[0] if found else 'NOT FOUND'}", flush=True)
    return 1 if blunt else 0


if __name__ == "__main__":
    sys.exit(main())
