"""Plays scenarios in lanes beside each other, as they are and with flaws, and checks their histories."""

import math
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import active_children, get_context
from multiprocessing.util import Finalize
from statistics import median
from typing import Any

from tests.chaos.checker import check
from tests.chaos.history import Report
from tests.chaos.scenarios import SCENARIOS
from tests.chaos.stage import Play, Stage

CHANCES = 3
"""How often a flaw is looked for: which moment a fault strikes is a matter of chance, and may miss it."""

_HEAD = (
    "fault", "times", "violations", "recovery median s", "max s", "hand-over median s", "max s", "tasks",
    "bodies", "took s",
)  # fmt: skip
_stage: Stage | None = None


@dataclass
class Result:
    """What one scenario has shown, or whether a flaw was found by it."""

    name: str
    flaw: str
    seed: int
    injected: int
    report: Report
    took_s: float
    logs: str = ""  # where they are, and the history, if not all was well

    @property
    def found(self) -> list[str]:
        """All that was found broken."""
        return self.report.violations + self.report.late

    def row(self) -> tuple[str, ...]:
        """Its line of the table."""
        report = self.report
        recovery, hand_over = _median_and_max(report.recovery_s), _median_and_max(report.hand_over_s)
        numbers = (report.counts["tasks"], report.counts["bodies"], round(self.took_s))
        return (
            self.name,
            str(self.injected),
            str(len(self.found)),
            *recovery,
            *hand_over,
            *map(str, numbers),
        )


def end_on_sigterm() -> None:
    """What this process has started ends with it; what it forks just ends."""
    own = os.getpid()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143) if os.getpid() == own else os._exit(143))


def side_by_side(job: Callable[..., Any], rows: Sequence[tuple[Any, ...]], lanes: int) -> Iterator[Any]:
    """What `job(*row)` returns for each row, as it comes; so many jobs run at a time."""
    with ProcessPoolExecutor(lanes, get_context("spawn"), end_on_sigterm) as pool:
        try:
            for done in as_completed([pool.submit(job, *row) for row in rows]):
                yield done.result()
        except BaseException:
            for child in active_children():
                child.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def play(name: str, flaw: str, scale: str, seed: int) -> Result:
    """Play one scenario on the stage of this process, which lives as long; or see if it finds a flaw."""
    global _stage
    if flaw:
        return _hunt(name, flaw, seed)
    if _stage is None:
        _stage = Stage(seed)
        Finalize(None, _stage.close, exitpriority=1)
    scenario = SCENARIOS[name]
    count = scenario.full if scale == "full" else max(1, math.ceil(scenario.ci * float(scale)))
    result = _play(_stage, name, count)
    if result.found:
        _stage.keep = True
        result.logs = str(_stage.directory)
    return result


def _hunt(name: str, flaw: str, seed: int) -> Result:
    """Play a scenario on flawed workers, at a small scale, until there is a violation."""
    began = time.monotonic()
    for chance in range(CHANCES):
        stage = Stage(seed + chance, flaw)
        try:
            result = _play(stage, name, SCENARIOS[name].teeth)
        finally:
            stage.close()
        if result.found:
            break
    result.took_s = time.monotonic() - began
    return result


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
    found = run.is_found_out()
    if not (scenario.own_stage or found):
        run.settle()
        time.sleep(0.05)
    # Who was late ended its own stage with what was under way there: it plays again, whole.
    broken_off = scenario.own_stage and bool(run.late)
    report = check(list(stage.log.records), short, final=not (found or broken_off))
    report.violations += run.failures
    report.late += run.late
    report.recovery_s += run.recovery_s
    report.counts |= run.counts
    if not (run.injected or run.late or stage.mutant):
        report.broken("no fault has struck")
    return Result(name, stage.mutant, stage.seed, run.injected, report, time.monotonic() - began)


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
