"""Processes of their own for pages and commands, forked from one that has imported Celery already."""

import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from celery.__main__ import main

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["celery.bin.celery", "tests.docs.runner", __name__])
_DEADLINE_S = 60


def ended(
    output: Path, function: Callable[..., Any], *args: Any, directory: str = ".", **environment: str
) -> tuple[int | None, str]:
    """Call a function in a process of its own: its exit code, and what it has printed to a file."""
    process = _FORKS.Process(target=_call, args=(output, directory, environment, function, args))
    process.start()
    process.join(_DEADLINE_S)
    process.kill()
    process.join()
    return process.exitcode, output.read_text()


def celery(*arguments: str) -> None:
    """What the executable does."""
    sys.argv[:] = ["celery", *arguments]
    main()


def _call(
    output: Path,
    directory: str,
    environment: dict[str, str],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    with output.open("wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    os.chdir(directory)
    os.environ.update(environment)
    function(*args)
