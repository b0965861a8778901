"""A worker of an older release: the tree of a commit, laid out beside this one."""

from __future__ import annotations

import io
import subprocess
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

from tests.harness import Worker
from tests.topologies.servers import not_here

ROOT = Path(__file__).parents[2]


def lay_out_before(path: str, directory: Path) -> Path:
    """The package, its tests and examples as they were before they had that file."""
    git = partial(subprocess.run, capture_output=True, check=False, cwd=ROOT)
    added = git(["git", "log", "--diff-filter=A", "--format=%P", "--", path])
    before = added.stdout.decode().split()
    archived = git(["git", "archive", *before[-1:], "celery_setnx", "tests", "examples"]) if before else added
    if archived.returncode or not before:
        not_here(f"no release before {path} in git: {archived.stderr.decode()}")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as tree:
        tree.extractall(directory, filter="data")
    return directory


def older_worker(tree: Path, logs: Path, app: str, **options: Any) -> Worker:
    """A worker that runs the code of a tree."""

    class Older(Worker):
        popen = partial(subprocess.Popen, cwd=tree)

    return Older(logs, app, **options)
