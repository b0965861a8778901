"""The tasks of the how-to pages, taken from the pages: for a worker as they stand, and for publishers.

A page's blocks that define something are run here, in a namespace of the page's own. A call whose first
argument begins with `gated` waits for its gate while it holds its lock.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import redis
from celery import Celery, _state

from celery_setnx import FanOutFailed, SingletonTask, signals
from tests.docs.pages import DOCS, Block, blocks
from tests.harness import Journal

BROKER_DB, LOCK_DB = 13, 1
PAGES = ("fan-out", "one-pending", "web")
URL = os.environ.get("SETNX_TEST_URL", "redis://127.0.0.1:6379")
TOUCHED = (3, 5, 3, 8, 5, 3, 3, 8)

control = redis.Redis.from_url(f"{URL}/0", socket_timeout=None, decode_responses=True)
journal = Journal(control)


def wait_for_gate(name: Any) -> None:
    """Wait until a test lets a body of this name go on."""
    if str(name).startswith("gated") and control.blpop([f"gate:{name}"], timeout=60) is None:
        raise TimeoutError(f"nobody opened the gate of {name}")


class Table:
    """A table of a database that all processes see: what pages write as a dictionary."""

    def __init__(self, name: str) -> None:
        self.name = f"howto:{name}"

    def __getitem__(self, row: Any) -> Any:
        """What is there now; a reader whose row is gated takes its time to go on with it."""
        text = control.hget(self.name, row)
        journal.write("read", table=self.name, row=row, value=text)
        wait_for_gate(row)
        return None if text is None else json.loads(text)

    def __setitem__(self, row: Any, value: Any) -> None:
        control.hset(self.name, row, json.dumps(value))

    def all(self) -> dict[str, Any]:
        """Every row; nothing waits."""
        return {row: json.loads(text) for row, text in control.hgetall(self.name).items()}


def make_app(broker: str = f"{URL}/{BROKER_DB}", locks: str = f"{URL}/{LOCK_DB}", **conf: Any) -> Celery:
    """An app whose results are where its locks are."""
    app = Celery("howto", broker=broker, backend=locks, set_as_current=False)
    app.conf.update(
        setnx_url=locks,
        setnx_prefix="t",
        task_default_queue="howto",
        worker_prefetch_multiplier=1,
        broker_connection_retry_on_startup=True,
        result_expires=600,
    )
    app.conf.update(conf)
    return app


def python_blocks(page: str) -> Iterator[Block]:
    """The Python of a page that readers see."""
    for block in blocks((DOCS / f"{page}.md").read_text()):
        if block.language == "python" and block.info != "notest":
            yield block


def execute(page: str, block: Block, names: dict[str, Any]) -> None:
    """Run one block; a traceback has the page's own lines."""
    code = compile("\n" * (block.line - 1) + block.text, str(DOCS / f"{page}.md"), "exec", dont_inherit=True)
    exec(code, names)


def defined(page: str, app: Celery) -> dict[str, Any]:
    """A page's namespace: what its blocks define, and what they take for granted."""
    names = {
        "__name__": page.replace("-", "_"),
        "app": app,
        "SingletonTask": SingletonTask,
        "FanOutFailed": FanOutFailed,
        "touched_accounts": lambda: iter(TOUCHED),
        "accounts": Table("accounts"),
        "search": Table("search"),
    }
    others = set(_state._on_app_finalizers)
    for block in python_blocks(page):
        if "def " in block.text:
            execute(page, block, names)
    # A reader's tasks are shared with all apps of the process, which here are those of other tests.
    _state._on_app_finalizers.intersection_update(others)
    app.finalize()
    return names


def rest(page: str) -> list[Block]:
    """The blocks of a page that define nothing, and so do something."""
    return [block for block in python_blocks(page) if "def " not in block.text]


app = make_app()
NAMES = {page: defined(page, app) for page in PAGES}


@signals.lock_acquired.connect
def note_run(sender: Any, task_id: str, **_details: Any) -> None:
    """The body is about to run; that of a table's reader waits where it reads."""
    if sender.app is not app:
        return
    args = list(sender.request.args or ())
    journal.write("run", task=sender.name, task_id=task_id, args=args)
    if args and sender.name != "one_pending.reindex":
        wait_for_gate(args[0])
