"""A run of the suite in the sdist of the installed Celery: with plain tasks, or with every task guarded."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from examples.embedded import EmbeddedServer
from tests.celery_suite.table import ROOT

FOLDER = "t/integration/"
# Its own plugins, and no other that is installed here.
PLUGINS = ("celery.contrib.pytest", "pytest_timeout", "tests.celery_suite.outcomes")
# Most tests of the suite may begin six times. With a flaw that only takes its time.
AGAIN = "pytest_rerunfailures"
GUARD = Path(__file__).parent / "site"


class Broken(Exception):
    """A run of the suite says nothing: it did not begin, or did not end."""


@dataclass(frozen=True)
class Side:
    """How the suite's tasks are made.

    Attributes:
        name: For whoever reads the figures.
        options: Of every task beside its key; None for Celery's own class of tasks.
        flaw: Whether what a chord's members return is lost.
    """

    name: str
    options: dict[str, Any] | None = None
    flaw: bool = False


@dataclass
class Test:
    """What became of a test in the end, and how often it began."""

    outcome: str = "passed"
    why: str = ""
    begun: int = 1


@dataclass
class Result:
    """What became of the tests of a side, and of the calls in its workers."""

    tests: dict[str, Test] = field(default_factory=dict)
    runs: Counter[str] = field(default_factory=Counter)
    locks: Counter[str] = field(default_factory=Counter)

    def add(self, other: "Result") -> None:
        """Later results of a test replace earlier ones."""
        self.tests.update(other.tests)
        self.runs += other.runs
        self.locks += other.locks

    def outcome(self, name: str) -> str:
        """What became of a test."""
        return self.tests[name].outcome if name in self.tests else "absent"

    def why(self, name: str) -> str:
        """Why it did not pass."""
        return self.tests[name].why if name in self.tests else ""

    def begun(self, name: str) -> int:
        """How often a test began."""
        return self.tests[name].begun if name in self.tests else 0

    def begun_again(self) -> set[str]:
        """The tests that did not end well at first, and began again."""
        return {name for name, test in self.tests.items() if test.begun > 1}

    def count(self, outcome: str) -> int:
        """How many tests ended so."""
        return sum(test.outcome == outcome for test in self.tests.values())


def sources(directory: Path) -> Path:
    """The suite of the installed Celery, where there is no Celery but the installed one.

    Raises:
        Broken: The sdist could not be had.
    """
    release = f"celery-{version('celery')}"
    wanted = ["--no-binary", "celery", "--no-deps", f"--dest={directory}", release.replace("-", "==")]
    got = subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", *wanted])
    if got.returncode != 0:
        raise Broken(f"no sdist of {release}: pip download ended with {got.returncode}")
    (sdist,) = directory.glob(f"{release}.tar*")
    shutil.unpack_archive(sdist, directory)
    suite = directory / "suite"
    shutil.copytree(directory / release / "t", suite / "t", ignore=shutil.ignore_patterns("unit", "smoke"))
    shutil.copy(directory / release / "pyproject.toml", suite)
    return suite


def run(suite: Path, deadline_s: float, *rows: tuple[Side, list[list[str]]]) -> list[Result]:
    """The results of each side; all its processes, each with its own arguments, run at the same time.

    Raises:
        Broken: pytest could not run, or did not end.
    """
    results = {side.name: Result() for side, _processes in rows}
    give_up = time.monotonic() + deadline_s
    with ExitStack() as stack:
        started = [
            (side, *stack.enter_context(_started(side, arguments, suite)))
            for side, processes in rows
            for arguments in processes
        ]
        for side, process, directory in started:
            results[side.name].add(_ended(process, directory, give_up))
    return list(results.values())


@contextmanager
def _started(side: Side, arguments: list[str], suite: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """pytest in a directory and on a server of its own: tests write files and purge queues."""
    with EmbeddedServer() as server:
        directory = Path(tempfile.mkdtemp(prefix=f"{side.name}-", dir=suite.parent))
        shutil.copytree(suite, directory, dirs_exist_ok=True)
        plugins = [*PLUGINS, *([] if side.flaw else [AGAIN])]
        command = [sys.executable, "-m", "pytest", "--timeout=300", *(f"-p{name}" for name in plugins)]
        with (directory / "log").open("wb") as log:
            process = subprocess.Popen(
                [*command, *arguments],
                cwd=directory,
                env=_environment(side, server, directory),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            yield process, directory
        finally:
            with suppress(ProcessLookupError):  # nor is any of its workers left
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _ended(process: subprocess.Popen, directory: Path, give_up: float) -> Result:
    """What is known when pytest has ended."""
    with suppress(subprocess.TimeoutExpired):
        process.wait(max(0.0, give_up - time.monotonic()))
    if process.returncode not in (0, 1):  # all passed, or not all; None if it has not ended
        said = (directory / "log").read_text(errors="replace")[-5000:]
        raise Broken(f"pytest in {directory.name} ended with {process.returncode}\n{said}")
    return _read(directory)


def _environment(side: Side, server: EmbeddedServer, directory: Path) -> dict[str, str]:
    guarded = side.options is not None
    return {
        **os.environ,
        "TEST_BROKER": server.url(),
        "TEST_BACKEND": server.url(),
        "REDIS_HOST": "127.0.0.1",
        "REDIS_PORT": str(server.port),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "PYTHONPATH": os.pathsep.join(map(str, [GUARD, ROOT] if guarded else [ROOT])),
        "CELERY_SUITE_OUTCOMES": str(directory / "outcomes"),
        "CELERY_SUITE_JOURNAL": str(directory / "journal"),
        "CELERY_SUITE_OPTIONS": json.dumps(side.options),
        **({"CELERY_SUITE_FLAW": "1"} if side.flaw else {}),
    }


def _read(directory: Path) -> Result:
    result, journal, outcomes = Result(), directory / "journal", directory / "outcomes"
    for line in outcomes.read_text().splitlines():
        about = json.loads(line)
        name, outcome = about["test"].removeprefix(FOLDER), about["outcome"]
        test = result.tests.setdefault(name, Test())
        if outcome == "rerun":
            result.tests[name] = Test(begun=test.begun + 1)
        elif outcome != "passed" and test.outcome != "failed":
            test.outcome, test.why = outcome, about["why"]
    if journal.exists():
        for line in journal.read_text().splitlines():
            word, task_id = line.split()
            (result.runs if word == "run" else result.locks)[task_id] += 1
    return result
