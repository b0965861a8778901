"""Every command that a page shows, and how it is known to work.

A command line is looked up here by its first match. One that is not here fails `test_commands`: write down
how it is checked, or what checks it already.
"""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Run:
    """A command that is run here, in a directory with the modules of `PROJECT`, on an empty server."""

    command: str
    """A pattern of the whole line."""
    code: int
    says: str


@dataclass(frozen=True)
class Elsewhere:
    """A command that a test runs, `tests/file.py::name`, or a line of `.ci/run`, `.ci/run: text`."""

    command: str
    by: str
    pages: tuple[str, ...] = ()
    """Only on these pages. Defaults to all."""


# What `-A app`, `-A shop` and `-A proj` are, where a command is run here.
PROJECT = """
import os
from celery import Celery
from celery_setnx import SingletonTask

app = Celery(__name__, broker=os.environ["SERVER"] + "/0", backend=os.environ["SERVER"] + "/0")
app.conf.setnx_url = os.environ["SERVER"] + "/1"


@app.task(base=SingletonTask, singleton={"key": "account_id"})
def sync(account_id): ...


@app.task(base=SingletonTask, singleton={"key": "month", "on_conflict": "wait"})
def report(month): ...


@app.task(base=SingletonTask, singleton={"dedupe": "until_started"})
def reindex(name): ...


@app.task(base=SingletonTask, singleton={"key": "page_id", "debounce": 5})
def save(page_id, text): ...


@app.task(base=SingletonTask, singleton={"rate": "10/m"})
def notify(partner): ...


@app.task(base=SingletonTask, singleton={"key": "user_id", "dedupe": "until_done", "dedupe_for": 86400})
def remind(user_id): ...
"""

_APP = r"celery -A (app|shop|proj) setnx "

_PRINTED = "tests/docs/test_printed.py"
_BEAT = r"celery -A proj beat -S celery_setnx\.beat:HotStandbyScheduler"
_METRICS = r"PROMETHEUS_MULTIPROC_DIR=\S+ celery -A shop worker -c 8"

COMMANDS: list[Run | Elsewhere] = [
    # Whole pages, as they are printed.
    Elsewhere(".*", f"{_PRINTED}::test_quickstart_goes_as_printed", ("docs/quickstart.md",)),
    Elsewhere(".*", "tests/docs/test_runbook.py::test_runbook_goes_as_printed", ("docs/runbook.md",)),
    Elsewhere(
        r"celery -A shop setnx (pause|limit|rate|terms)\b.*",
        "tests/docs/test_runbook.py::test_live_terms_go_as_printed",
        ("docs/cli.md",),
    ),
    Elsewhere(
        r"redis-cli -u \S+ (SETNX|SET) .*|celery -A shop setnx release --force --yes \S+",
        f"{_PRINTED}::test_lock_by_hand_goes_as_printed",
        ("docs/recipes.md",),
    ),
    Elsewhere(
        r"python manage\.py check",
        "tests/test_refused.py::test_check_of_django_finds_what_is_refused",
        ("docs/django.md",),
    ),
    Run(_APP + "doctor", 0, "The lock server answers"),
    Run(_APP + "doctor --acl", 0, r"ACL SETUSER celery_setnx on >PASSWORD ~\S+:\* \+eval"),
    Run(_APP + "check", 0, "their options fit together"),
    Run(_APP + "list", 0, "No locks"),
    Run(_APP + "list --queued", 0, "No marks"),
    Run(_APP + r"list --done( --task shop\.remind)?", 0, "No done calls"),
    # On the pages some of these are held, or marked: tests/test_cli.py has those.
    Run(_APP + r"show \w+\.sync 42", 0, "state +free"),
    Run(_APP + r"why \w+\.(sync 42|report 2026-10|reindex A|remind 42)", 0, "Yes"),
    Run(_APP + r"why shop\.save 7", 1, r"No: a new call would wait 5\.0 s for newer ones \(debounce=5\)"),
    Run(_APP + r"release (setnx:\S+|KEY|shop\.sync 42 --force)", 1, "Nothing to release"),
    Run(_APP + r"release --queued --task shop\.reindex", 1, "Nothing to free"),
    Run(_APP + r"release --done (--task )?shop\.remind( 42)?", 1, "Nothing to forget"),
    Run(_APP + r"release --starts shop\.notify partner", 1, "Nothing to forget"),
    Elsewhere(_APP + "watch", "tests/terminal/test_terminal.py::test_watch_shows_locks_as_they_come_and_go"),
    Elsewhere(
        r"promtool (check config prometheus|test rules alerts_test)\.yml",
        "tests/monitoring/test_rules.py::test_promtool_accepts_the_files",
    ),
    Elsewhere("pip install celery_setnx", "tests/release/__main__.py::installed"),
    Elsewhere("make demo", ".ci/run: make -C"),
    Elsewhere("make test", ".ci/run: make test"),
    Elsewhere(_BEAT, ".ci/run: $pytest -n 3 tests/beat"),
    Elsewhere(
        _METRICS, "tests/test_metrics.py::test_scrape_of_a_prefork_worker_counts_exactly_what_happened"
    ),
]


def of(line: str, page: str) -> Run | Elsewhere | None:
    """How a command line of a page is checked; None if nobody knows."""
    for command in COMMANDS:
        pages = command.pages if isinstance(command, Elsewhere) else ()
        if page in (pages or (page,)) and re.fullmatch(command.command, line):
            return command
    return None
