"""The tasks of the recipes, taken from their pages: for a worker as they stand, and for publishers.

A recipe's blocks that define something are run here, in a namespace of the recipe's own. A call whose first
argument begins with `gated` waits for its gate while it holds its lock.
"""

import json
import sqlite3
from typing import Any

from celery import Celery, _state

from celery_setnx import FanOutFailed, SingletonTask, signals
from tests import app as tests_app
from tests.docs.pages import ROOT, Block, blocks, section, text_of

BROKER_DB = 13
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "fan-out": ("docs/recipes.md", ("Fan-out",)),
    "one-pending": ("docs/recipes.md", ("One running, one pending",)),
    "web": ("docs/django.md", ("Flask", "FastAPI", "Wait for the answer: single flight")),
}
"""By a name for tests: the page, and its sections that are read."""
TOUCHED = (3, 5, 3, 8, 5, 3, 3, 8)

control, journal = tests_app.control, tests_app.journal


def wait_for_gate(name: Any) -> None:
    """Wait until a test lets a body of this name go on."""
    if str(name).startswith("gated"):
        tests_app.wait_for_gate(name)


class Table:
    """A table of a database that all processes see: what pages write as a dictionary."""

    def __init__(self, name: str) -> None:
        self.name = f"howto:{name}"

    def __getitem__(self, row: Any) -> Any:
        """What is there now; a reader whose row is gated takes its time to go on with it."""
        value = json.loads(control.hget(self.name, row) or "null")
        journal.write("read", table=self.name, row=row, value=value)
        wait_for_gate(row)
        return value

    def __setitem__(self, row: Any, value: Any) -> None:
        control.hset(self.name, row, json.dumps(value))

    def all(self) -> dict[str, Any]:
        """Every row; nothing waits."""
        return {row.decode(): json.loads(text) for row, text in control.hgetall(self.name).items()}


def make_app(**conf: Any) -> Celery:
    """An app whose calls nobody consumes."""
    return tests_app.make_app("howto", BROKER_DB, **{"task_default_queue": "parked", **conf})


def blocks_of(recipe: str) -> list[Block]:
    """All that a recipe shows."""
    page, headings = RECIPES[recipe]
    return [block for heading in headings for block in blocks(section(text_of(page), heading))]


def execute(recipe: str, block: Block, names: dict[str, Any]) -> None:
    """Run one block; a traceback has the page's own lines."""
    page, _headings = RECIPES[recipe]
    code = compile("\n" * (block.line - 1) + block.text, str(ROOT / page), "exec", dont_inherit=True)
    exec(code, names)


def defined(recipe: str, app: Celery) -> dict[str, Any]:
    """A recipe's namespace: what its blocks define, and what they take for granted."""
    names = {
        "__name__": recipe.replace("-", "_"),
        "app": app,
        "SingletonTask": SingletonTask,
        "FanOutFailed": FanOutFailed,
        "touched_accounts": lambda: iter(TOUCHED),
        "accounts": Table("accounts"),
        "search": Table("search"),
        "database": sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False),
    }
    others = set(_state._on_app_finalizers)
    for block in blocks_of(recipe):
        if block.is_run and "def " in block.text:
            execute(recipe, block, names)
    # A reader's tasks are shared with all apps of the process, which here are those of other tests.
    _state._on_app_finalizers.intersection_update(others)
    app.finalize()
    return names


def rest(recipe: str) -> list[Block]:
    """The Python of a recipe that defines nothing, and so does something."""
    return [block for block in blocks_of(recipe) if block.is_run and "def " not in block.text]


app = make_app(task_default_queue="howto")
NAMES = {recipe: defined(recipe, app) for recipe in RECIPES}


@signals.lock_acquired.connect
def note_run(sender: Any, task_id: str, **_details: Any) -> None:
    """The body is about to run; that of a table's reader waits where it reads."""
    if sender.app is not app:
        return
    args = list(sender.request.args or ())
    journal.write("run", task=sender.name, task_id=task_id, args=args)
    if args and sender.name != "one_pending.reindex":
        wait_for_gate(args[0])
