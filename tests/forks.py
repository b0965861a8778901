"""Processes of their own for what a user starts, forked from one that has imported Celery already."""

import faulthandler
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from celery.__main__ import main

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["celery.bin.celery", "_pytest.terminal", __name__])
_DEADLINE_S = 240
SAID = "said.txt"


def ended(
    directory: Path, function: Callable[..., Any], *args: Any, **environment: str | None
) -> tuple[int | None, str]:
    """Call a function in a process of its own, in a directory: its exit code, and what it has printed.

    A variable of the environment that is None is not there.
    """
    return end(start(directory, function, *args, **environment), directory)


def start(
    directory: Path, function: Callable[..., Any], *args: Any, **environment: str | None
) -> multiprocessing.process.BaseProcess:
    """Start what is to end by a signal; what it prints is in SAID, in its directory."""
    now = {**os.environ, **environment}  # the server of forks has that of its start
    process = _FORKS.Process(target=_call, args=(directory / SAID, now, function, args))
    process.start()
    return process


def end(process: multiprocessing.process.BaseProcess, directory: Path) -> tuple[int | None, str]:
    """Wait for its end: its exit code, and what it has printed."""
    process.join(_DEADLINE_S)
    process.kill()
    process.join()
    return process.exitcode, (directory / SAID).read_text()


def celery(*arguments: str) -> None:
    """What the executable of that name does."""
    sys.argv[:] = ["celery", *arguments]
    main()


def run_pytest(*arguments: str) -> None:
    """What `python -m pytest` does."""
    sys.exit(pytest.main([*arguments]))


def _call(
    output: Path, environment: dict[str, str | None], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    with output.open("wb") as said:
        for stream in (1, 2):
            os.dup2(said.fileno(), stream)
    faulthandler.enable(sys.__stderr__)  # also where it crashes
    os.chdir(output.parent)
    sys.path.insert(0, str(output.parent))
    for name, value in environment.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    function(*args)
