"""`python -m tests.chaos --scale 1`: every fault, then a table; `--teeth`: every flaw must be found."""

import argparse
import sys
import time
from collections.abc import Iterator

from tests.chaos.scenarios import SCENARIOS
from tests.chaos.stage import BrokenStage, MissingTool
from tests.chaos.suite import Result, bite, play, table
from tests.soak.hunt import end_on_sigterm, hunt, side_by_side


def main() -> int:
    """The status says whether every promise was kept, or with --teeth whether every flaw was found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--scale", default="1", help="multiple of what CI injects, or 'full'; default 1")
    parser.add_argument("--seed", type=int, default=0, help="of the driver's choices; default 0")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name contains this")
    parser.add_argument("--teeth", action="store_true", help="play on flawed workers instead")
    parser.add_argument("--lanes", type=int, default=3, help="scenarios at a time; default 3")
    options = parser.parse_args()
    # Those that take longest come first.
    names = sorted((name for name in SCENARIOS if options.only in name), key=_LONG.count, reverse=True)
    end_on_sigterm()
    try:
        if options.teeth:
            rows = [(name, mutant) for name in names for mutant in SCENARIOS[name].mutants]
            return 0 if hunt(bite, rows, options.seed, options.lanes) else 1
        return _chaos(names, options.scale, options.seed, options.lanes)
    except MissingTool as missing:
        print(f"the chaos suite needs {missing}", file=sys.stderr)
        return 2
    except BrokenStage as broken:
        print(f"a worker did not start: {broken}", file=sys.stderr)
        return 3


def _chaos(names: list[str], scale: str, seed: int, lanes: int) -> int:
    """What is too late, and nothing else, may be the machine's fault: such a scenario plays again, alone."""
    began = time.monotonic()
    results = {result.name: result for result in _played(names, scale, seed, lanes)}
    again = [name for name in names if results[name].report.late and not results[name].report.violations]
    results |= {result.name: result for result in _played(again, scale, seed, 1)}
    took_s = time.monotonic() - began
    print(f"\n{table(list(results.values()))}")
    print(f"\nseed {seed}, scale {scale}, {lanes} at a time, {took_s:.0f} s")
    print(f"scenarios that were late, and played a second time: {len(again)}, {RERUNS} may be")
    for result in results.values():  # once more, as pytest says it: where whoever looks at the end finds it
        for what in result.report.violations + result.report.late:
            print(f"FAILED tests/chaos::{result.name} - {what}")
    reports = [result.report for result in results.values()]
    return 1 if len(again) > RERUNS or any(report.violations or report.late for report in reports) else 0


def _played(names: list[str], scale: str, seed: int, lanes: int) -> Iterator[Result]:
    for result in side_by_side(play, [(name, scale, seed) for name in names], lanes):
        ends = {end: count for end, count in result.report.counts.items() if end not in ("tasks", "bodies")}
        print(f"{result.name}: {result.injected} times, {ends}", flush=True)
        _tell(result)
        yield result


def _tell(result: Result) -> None:
    """What it has found."""
    for kind, found in (("VIOLATION", result.report.violations), ("LATE", result.report.late)):
        for what in found:
            print(kind, what, flush=True)
    if result.logs:
        print("logs and history:", result.logs, flush=True)


RERUNS = 2
_LONG = (
    "kill -9 of a worker", "cuts, stalls, lost replies", "max_tasks_per_child", "kill -9 of a pool child",
    "server clock +-120 s", "worker clocks +-60 s", "deploy and roll-back", "broker killed, empty",
    "kill -9 of a waiting worker",
)  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
