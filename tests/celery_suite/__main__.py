"""`python -m tests.celery_suite`: Celery's integration suite, without us and with every task guarded.

Both sides run at the same time. What becomes of a test must be the same on both, but for the differences that
`table.DIFFERENCES` names. A few tests that differ run again: what is late on a busy machine is no difference.
"""

import argparse
import json
import platform
import sys
import tempfile
import time
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path

from tests.celery_suite.sides import FOLDER, Broken, Result, Side, run, sources
from tests.celery_suite.table import DIFFERENCES, LEFT_OUT, PART, TEETH, WHOLE

PLAIN = Side("plain")
FLAWED = Side("flawed", {}, flaw=True)
AGAIN = 2
"""How often tests that differ run again, on both sides."""
FEW = 5
"""If more tests differ, none runs again."""
DEADLINE_S = 2400.0


def main() -> int:
    """Print the figures and what is wrong; the status says whether anything is."""
    parser = argparse.ArgumentParser(prog="python -m tests.celery_suite", description=__doc__)
    parser.add_argument("--part", action="store_true", help="what the CI runs: canvas, retries, errors")
    parser.add_argument("--options", type=json.loads, default={}, metavar="JSON", help="of every task")
    parser.add_argument("tests", nargs="*", metavar="TEST", help="such as test_tasks.py; defaults to all")
    chosen = parser.parse_args()
    is_whole = not chosen.tests and not chosen.part
    guarded = Side("guarded", chosen.options)
    try:
        with tempfile.TemporaryDirectory(prefix="celery_setnx-") as name:
            suite = sources(Path(name))
            results = _compared(guarded, _processes(chosen.tests, chosen.part), suite)
            problems = _problems(*results, is_whole=is_whole)
    except Broken as error:
        problems = [str(error)]
    for problem in problems:
        print(f"PROBLEM {problem}")
    return 1 if problems else 0


def _processes(tests: list[str], part: bool) -> list[list[str]]:
    """For each process of a side, the arguments of its pytest."""
    if tests:
        return [_in_folder(tests)]
    if part:
        return [_in_folder(each) for each in PART]
    named = [_in_folder(each) for each in WHOLE]
    others = [f"--ignore={FOLDER}{module}" for module in LEFT_OUT]
    return [[*each, *_apart(each, named)] for each in named] + [[FOLDER, *others, *_apart([FOLDER], named)]]


def _apart(tests: list[str], named: list[list[str]]) -> list[str]:
    """What lies within these tests, and another process runs."""
    others = {test for each in named if each != tests for test in each}
    return [f"--deselect={test}" for test in sorted(others) if test.startswith(tuple(tests))]


def _in_folder(tests: Iterable[str]) -> list[str]:
    return [f"{FOLDER}{test}" for test in tests]


def _compared(guarded: Side, processes: list[list[str]], suite: Path) -> list[Result]:
    """The results of both sides, and of a flawed guard; the figures are printed."""
    print(f"the logs: {suite.parent}/*/log", flush=True)
    began = time.monotonic()
    sides = [(PLAIN, processes), (guarded, processes), (FLAWED, [_in_folder(sorted(TEETH))])]
    plain, with_guard, flawed = run(suite, DEADLINE_S, *sides)
    _print_figures(guarded, (plain, with_guard), time.monotonic() - began)
    for _ in range(AGAIN):
        few = sorted(_differing(plain, with_guard))
        if not few or len(few) > FEW:
            break
        print(f"they differ, and run again: {', '.join(few)}", flush=True)
        later = run(suite, DEADLINE_S, (PLAIN, [_in_folder(few)]), (guarded, [_in_folder(few)]))
        plain.add(later[0])
        with_guard.add(later[1])
    return [plain, with_guard, flawed]


def _differing(plain: Result, guarded: Result) -> set[str]:
    """What ended differently, or ran on one side alone; but not what is known to differ."""
    names = plain.tests.keys() | guarded.tests.keys()
    return {name for name in names if plain.outcome(name) != guarded.outcome(name)} - DIFFERENCES.keys()


def _problems(plain: Result, guarded: Result, flawed: Result, is_whole: bool) -> list[str]:
    problems = [
        f"{name}: {plain.outcome(name)} without us, {guarded.outcome(name)} guarded: {guarded.why(name)}"
        for name in sorted(_differing(plain, guarded))
    ]
    tried = sum(test.outcome != "skipped" for test in plain.tests.values())
    if plain.count("passed") < 0.9 * tried or not tried:
        problems.append("too little passes without us: of what fails on both sides nothing is shown")
    if guarded.locks.total() <= len(guarded.tests):
        problems.append(f"the guard was not on: {guarded.locks.total()} locks in {len(guarded.tests)} tests")
    if guarded.runs - guarded.locks:
        problems.append(f"tasks that ran without a lock: {guarded.runs - guarded.locks}")
    unnoticed = {name for name in TEETH & plain.tests.keys() if flawed.outcome(name) != "failed"}
    problems += [f"{name} does not notice a guard that loses results" for name in unnoticed]
    if is_whole:
        same = [name for name in DIFFERENCES if plain.outcome(name) == guarded.outcome(name)]
        problems += [f"{name} is told to differ, and is {plain.outcome(name)} on both sides" for name in same]
    return problems


def _print_figures(guarded: Side, results: tuple[Result, Result], took_s: float) -> None:
    """What stands in docs/evidence.md, and what fails on both sides."""
    versions = ", ".join(f"{name} {version(name)}" for name in ("celery", "kombu", "redis"))
    print(f"CPython {platform.python_version()}, {versions}; options {guarded.options}; {took_s:.0f} s")
    outcomes = ("passed", "failed", "skipped", "xfailed", "xpassed")
    heads = ["side", "tests", *outcomes, "began again", "runs", "locks"]
    print("|", " | ".join(heads), "|")
    for name, result in zip((PLAIN.name, guarded.name), results):
        figures = [len(result.tests), *map(result.count, outcomes), len(result.begun_again())]
        print("|", " | ".join(map(str, [name, *figures, result.runs.total(), result.locks.total()])), "|")
    plain = results[0]
    for name, test in sorted(plain.tests.items()):
        if test.outcome == "failed":
            print(f"fails without us: {name}: {test.why[:200]!r}")
    for name in sorted(set().union(*(result.begun_again() for result in results))):
        print(f"began again: {name}: {[result.begun(name) for result in results]}")
    print(flush=True)


if __name__ == "__main__":
    sys.exit(main())
