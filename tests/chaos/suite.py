"""Plays scenarios, checks their histories, and prints what was measured."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from tests.chaos.checker import CHILD_KILL_MEDIAN_S, Report, check
from tests.chaos.scenarios import SCENARIOS, Scenario
from tests.chaos.stage import Play, Stage

_HEAD = ("fault", "times", "violations", "recovery median s", "max s", "tasks", "bodies", "took s")


@dataclass
class Result:
    """What one scenario has shown."""

    name: str
    injected: int
    report: Report
    took_s: float

    def row(self) -> tuple[str, ...]:
        """Its line of the table."""
        middle, longest = self.report.recovery()
        numbers = (self.injected, len(self.report.violations), middle, longest, self.report.tasks)
        return (self.name, *map(str, numbers), str(self.report.lives), f"{self.took_s:.0f}")


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
    short = SCENARIOS[name].play.__name__
    run = Play(stage, short, count)
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
    if CHILD_KILL_MEDIAN_S is not None and short == "child_kill" and report.recovery_s:
        middle = float(report.recovery()[0])
        if middle > CHILD_KILL_MEDIAN_S:
            report.violations.append(f"after kill -9 of a child the key ran again only after {middle:.2f} s")
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
