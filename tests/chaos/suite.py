"""Plays scenarios, checks their histories, and prints what was measured."""

import math
import time
from dataclasses import dataclass
from multiprocessing.util import Finalize
from statistics import median

from tests.chaos.checker import CHILD_KILL_HAND_OVER_S, CHILD_KILL_MEDIAN_S, check
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.stage import Play, Stage
from tests.soak.history import Report

_HEAD = (
    "fault", "times", "violations", "recovery median s", "max s", "hand-over median s", "max s", "tasks",
    "bodies", "took s",
)  # fmt: skip
_stage: Stage | None = None


@dataclass
class Result:
    """What one scenario has shown, and where its logs and its history are if not all was well."""

    name: str
    injected: int
    report: Report
    took_s: float
    logs: str = ""

    def row(self) -> tuple[str, ...]:
        """Its line of the table."""
        report = self.report
        recovery, hand_over = _median_and_max(report.recovery_s), _median_and_max(report.hand_over_s)
        numbers = (report.counts["tasks"], report.counts["bodies"], round(self.took_s))
        broken = len(report.violations + report.late)
        return (self.name, str(self.injected), str(broken), *recovery, *hand_over, *map(str, numbers))


def play(name: str, scale: str, seed: int) -> Result:
    """Play one scenario on the stage of this process, which lives as long as the process does."""
    global _stage
    if _stage is None:
        _stage = Stage(seed)
        Finalize(None, _stage.close, exitpriority=1)
    scenario = SCENARIOS[name]
    count = scenario.full if scale == "full" else max(1, math.ceil(scenario.ci * float(scale)))
    result = _play(_stage, name, count)
    if result.report.violations or result.report.late:
        _stage.keep = True
        result.logs = str(_stage.directory)
    return result


def bite(name: str, mutant: str, seed: int) -> list[str]:
    """Play one scenario, at a small scale, on workers that have a flaw: there must be a violation."""
    stage = Stage(seed, mutant)
    try:
        report = _play(stage, name, SCENARIOS[name].teeth).report
        return report.violations + report.late
    finally:
        stage.close()


def _play(stage: Stage, name: str, count: int) -> Result:
    """Play one scenario, wait until all is quiet, and check its history."""
    scenario = SCENARIOS[name]
    began = time.monotonic()
    short = "_".join([scenario.play.__name__, *scenario.policies])
    run = Play(stage, short, count, scenario.policies)
    if not scenario.own_stage:
        stage.company()
    try:
        scenario.play(run)
    except AssertionError as error:
        run.fail(error)
    time.sleep(0.05)  # the last records are on their way from the file
    # A flaw that was found already may keep the tasks from ending.
    found = False
    if stage.mutant:
        so_far = check(list(stage.log.records), short, final=False)
        found = bool(so_far.violations or so_far.late)
    if not (scenario.own_stage or found or (stage.mutant and (run.failures or run.late))):
        run.settle()
        time.sleep(0.05)
    # Who was late ended its own stage with what was under way there: it plays again, whole.
    broken_off = scenario.own_stage and bool(run.late)
    report = check(list(stage.log.records), short, final=not (found or broken_off))
    report.violations += run.failures
    report.late += run.late
    report.recovery_s += run.recovery_s
    if not (run.injected or run.late or stage.mutant):
        report.broken("no fault has struck")
    after_kill, hand_over = median(report.recovery_s or [0.0]), median(report.hand_over_s or [0.0])
    if short == "child_kill_retry" and after_kill > CHILD_KILL_MEDIAN_S:
        report.late.append(f"after kill -9 of a child the key ran again only after {after_kill:.2f} s")
    if short == "child_kill_wait" and hand_over > CHILD_KILL_HAND_OVER_S:
        report.late.append(f"the next in line began only {hand_over:.2f} s after a release")
    return Result(name, run.injected, report, time.monotonic() - began)


def table(results: list[Result]) -> str:
    """What was measured, one fault per line, in the order of the scenarios."""
    order = list(SCENARIOS)
    rows = [_HEAD, *(result.row() for result in sorted(results, key=lambda result: order.index(result.name)))]
    first, *others = [max(map(len, column)) for column in zip(*rows)]
    return "\n".join(
        "  ".join([row[0].ljust(first), *(cell.rjust(width) for cell, width in zip(row[1:], others))])
        for row in rows
    )


def _median_and_max(seconds: list[float]) -> tuple[str, str]:
    return (f"{median(seconds):.2f}", f"{max(seconds):.2f}") if seconds else ("-", "-")
