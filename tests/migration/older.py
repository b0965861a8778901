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
KNOWS_NO_TERMS = "6606b100e6e9db90a11cc867a9c338269b183720"


def lay_out(commit: str, directory: Path) -> Path:
    """The package, its tests and examples as they were."""
    command = ["git", "-C", str(ROOT), "archive", commit, "celery_setnx", "tests", "examples"]
    archived = subprocess.run(command, capture_output=True, check=False)
    if archived.returncode:
        not_here(f"no commit {commit}: {archived.stderr.decode()}")
    with tarfile.open(fileobj=io.BytesIO(archived.stdout)) as tree:
        tree.extractall(directory, filter="data")
    return directory


def older_worker(tree: Path, logs: Path, app: str, **options: Any) -> Worker:
    """A worker that runs the code of a tree."""

    class Older(Worker):
        popen = partial(subprocess.Popen, cwd=tree)

    return Older(logs, app, **options)
