"""`python -m tests.chaos`: every fault, then a table; with `--teeth all` every flaw, which must be found."""

import argparse
import sys
import time
from collections.abc import Iterator

from tests.chaos.scenarios import SCENARIOS
from tests.chaos.stage import BrokenStage, MissingTool
from tests.chaos.suite import Result, end_on_sigterm, play, side_by_side, table

RERUNS = 2
Row = tuple[str, str, str, int]  # scenario, flaw, scale, seed


def main() -> int:
    """The status says whether every promise was kept, and every flaw found."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--scale", default="1", help="multiple of what CI injects, or 'full'; default 1")
    parser.add_argument("--seed", type=int, default=0, help="of the driver's choices; default 0")
    parser.add_argument("--only", default="", metavar="TEXT", help="scenarios whose name contains this")
    parser.add_argument("--teeth", choices=("none", "all", "only"), default="none", help="look for the flaws")
    parser.add_argument("--lanes", type=int, default=3, help="scenarios at a time; default 3")
    options = parser.parse_args()
    names = [name for name in SCENARIOS if options.only in name]
    if not names:
        parser.error(f"no scenario's name contains {options.only!r}")
    flaws = [(name, flaw) for name in names for flaw in SCENARIOS[name].mutants] * (options.teeth != "none")
    plain = [(name, "") for name in names] * (options.teeth != "only")
    end_on_sigterm()
    try:
        return _play([(*row, options.scale, options.seed) for row in plain + flaws], options.lanes)
    except MissingTool as missing:
        print(f"the chaos suite needs {missing}", file=sys.stderr)
        return 2
    except BrokenStage as broken:
        print(f"a worker did not start: {broken}", file=sys.stderr)
        return 3


def _play(rows: list[Row], lanes: int) -> int:
    """What is too late, and nothing else, may be the machine's fault: such a scenario plays again, alone."""
    began = time.monotonic()
    played = list(_told(rows, lanes))
    results = {result.name: result for result in played if not result.flaw}
    again = [name for name, result in results.items() if result.report.late and not result.report.violations]
    results |= {
        result.name: result for result in _told([row for row in rows if row[0] in again and not row[1]], 1)
    }
    took_s = time.monotonic() - began
    print(f"\n{table(list(results.values()))}")
    print(f"\nseed {rows[0][3]}, scale {rows[0][2]}, {lanes} at a time, {took_s:.0f} s")
    print(f"scenarios that were late, and played a second time: {len(again)}, {RERUNS} may be")
    # Once more, as pytest says it: where whoever looks at the end finds it.
    failed = [(result.name, what) for result in results.values() for what in result.found]
    failed += [
        (result.name, f"{result.flaw} was not found") for result in played if result.flaw and not result.found
    ]
    for name, what in failed:
        print(f"FAILED tests/chaos::{name} - {what}")
    return 1 if failed or len(again) > RERUNS else 0


def _told(rows: list[Row], lanes: int) -> Iterator[Result]:
    """What has come of each row, told as it comes."""
    for result in side_by_side(play, rows, lanes):
        if result.flaw:
            found = (result.found or ["NOT FOUND"])[0]
            print(
                f"{result.name} / {result.flaw}, seed {result.seed}, {result.took_s:.1f} s: {found}",
                flush=True,
            )
        else:
            counts = {
                what: count for what, count in result.report.counts.items() if what not in ("tasks", "bodies")
            }
            print(f"{result.name}: {result.injected} times, {counts}", flush=True)
            for what in result.found:
                print("LATE" if what in result.report.late else "VIOLATION", what, flush=True)
        if result.logs:
            print("logs and history:", result.logs, flush=True)
        yield result


if __name__ == "__main__":
    sys.exit(main())
