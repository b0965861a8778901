"""Run a page's Python, block after block, in one namespace.

Blocks in `python` are run as they stand, those that begin with `>>>` as doctests, and `<!-- setup` comments
with them. Before the first block the names of `prelude` are there; what fragments need, and what is
asserted of them, stands in `setups`. `redis://localhost:6379` is the server of the test.
"""

import ast
import doctest
import linecache
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import redis
from celery import Celery

import celery_setnx
from tests.docs.pages import ROOT, Block, blocks, text_of
from tests.docs.setups import SETUPS

MODULE = "proj"
_HERE = re.compile(r"redis://(?:localhost|127\.0\.0\.1):6379")


def run(page: str, server: str) -> None:
    """Run the Python of a page against a server, whose URL is without a database.

    Raises:
        Exception: What a block raises; its traceback has the page's own lines.
    """
    os.chdir(ROOT)  # pages name files of the repository
    module = types.ModuleType(MODULE)
    sys.modules[MODULE] = module
    names = vars(module)
    names.update(prelude(server))
    path = ROOT / page
    unused = list(SETUPS.get(page, ()))
    for block in blocks(text_of(page)):
        if block.language == "setup":
            _execute(block.text, str(path), block.line, server, names)
        elif block.is_run:
            fragments = [fragment for fragment in unused if fragment.marks in block.text]
            for fragment in fragments:
                _execute(fragment.before, f"before {page}:{block.line}", 1, server, names)
            if block.text.startswith(">>>"):
                _run_doctest(block, path, server, names)
            else:
                _execute(block.text, str(path), block.line, server, names)
            for fragment in fragments:
                _execute(fragment.after, f"after {page}:{block.line}", 1, server, names)
                unused.remove(fragment)
    if unused:
        raise LookupError(f"no block of {page} has {[fragment.marks for fragment in unused]}")


def prelude(server: str) -> dict[str, Any]:
    """The names that every page may use: an app, a client of its lock server, and all of celery_setnx."""
    app = Celery(MODULE, broker=f"{server}/0", backend=f"{server}/0")
    app.conf.update(setnx_url=f"{server}/1", broker_connection_retry_on_startup=True)
    public = {name: getattr(celery_setnx, name) for name in celery_setnx.__all__}
    return {**public, "app": app, "client": redis.Redis.from_url(f"{server}/1", decode_responses=True)}


def _run_doctest(block: Block, path: Path, server: str, names: dict[str, Any]) -> None:
    text = _HERE.sub(server, block.text)
    test = doctest.DocTestParser().get_doctest(text, names, path.name, str(path), block.line - 1)
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE | doctest.REPORT_NDIFF
    said: list[str] = []
    results = doctest.DocTestRunner(optionflags=flags).run(test, out=said.append, clear_globs=False)
    if results.failed:
        raise AssertionError("".join(said))
    names.update(test.globs)


def _execute(text: str, file: str, line: int, server: str, names: dict[str, Any]) -> None:
    text = "\n" * (line - 1) + _HERE.sub(server, text)
    tree = ast.parse(text, file)
    if not Path(file).exists():  # what a traceback shows of a fragment
        linecache.cache[file] = (len(text), None, text.splitlines(keepends=True), file)
    # A page may define a task again, with other options; an app keeps the first.
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.decorator_list:
            names["app"]._tasks.pop(f"{MODULE}.{node.name}", None)
    exec(compile(tree, file, "exec"), names)
    for made in {id(value): value for value in names.values() if isinstance(value, Celery)}.values():
        celery_setnx.check(made)  # binds the tasks, and refuses bad options
