"""Plays scenarios, checks their histories, and prints what was measured."""

import math
import time
from dataclasses import dataclass
from statistics import median

from tests.chaos.checker import CHILD_KILL_HAND_OVER_S, CHILD_KILL_MEDIAN_S, Report, check, median_and_max
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.stage import Play, Stage

_HEAD = (
    "fault", "times", "violations", "recovery median s", "max s", "hand-over median s", "max s", "tasks",
    "bodies", "took s",
)  # fmt: skip


@dataclass
class Result:
    """What one scenario has shown."""

    name: str
    injected: int
    report: Report
    took_s: float

    def row(self) -> tuple[str, ...]:
        """Its line of the table."""
        recovery, hand_over = median_and_max(self.report.recovery_s), median_and_max(self.report.hand_over_s)
        numbers = (self.report.tasks, self.report.lives, round(self.took_s))
        broken = len(self.report.violations)
        return (self.name, str(self.injected), str(broken), *recovery, *hand_over, *map(str, numbers))


def count_of(scenario: Scenario, scale: str) -> int:
    """How often a fault is injected: `full`, or a multiple of what CI does."""
    return scenario.full if scale == "full" else max(1, math.ceil(scenario.ci * float(scale)))


def play(stage: Stage, name: str, count: int) -> Result:
    """Play one scenario, wait until all is quiet, and check its history.

    Raises:
        MissingTool: This machine has not got what the scenario needs.
        BrokenStage: A worker did not start.
    """
    SCENARIOS[name].check_tools()
    began = time.monotonic()
    short = "_".join([SCENARIOS[name].play.__name__, *SCENARIOS[name].policies])
    run = Play(stage, short, count, SCENARIOS[name].policies)
    try:
        SCENARIOS[name].play(run)
    except AssertionError as error:
        run.fail(str(error))
    # A flaw that was found already may keep the tasks from ending.
    if not SCENARIOS[name].own_stage and not (stage.mutant and run.failures):
        run.settle()
    time.sleep(0.05)  # the last records are on their way from the file
    report = check(list(stage.log.records), short)
    report.violations += run.failures
    report.recovery_s += run.recovery_s
    if CHILD_KILL_MEDIAN_S is not None and short == "child_kill_retry" and report.recovery_s:
        middle = median(report.recovery_s)
        if middle > CHILD_KILL_MEDIAN_S:
            report.violations.append(f"after kill -9 of a child the key ran again only after {middle:.2f} s")
    if short == "child_kill_wait" and report.hand_over_s:
        middle = median(report.hand_over_s)
        if middle > CHILD_KILL_HAND_OVER_S:
            report.violations.append(f"the next in line began only {middle:.2f} s after a release")
    return Result(name, run.injected, report, time.monotonic() - began)


def table(results: list[Result]) -> str:
    """What was measured, one fault per line."""
    rows = [_HEAD, *(result.row() for result in results)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEAD))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        )
        for row in rows
    )


def bite(name: str, mutant: str, seed: int) -> Result:
    """Play one scenario, at a small scale, on workers that have a flaw: there must be a violation."""
    stage = Stage(seed, mutant)
    try:
        return play(stage, name, SCENARIOS[name].teeth)
    finally:
        stage.close()
