"""`python -m tests.stress`: the suite again and again on a machine that does something else.

Beside each run, processes that compute keep every core busy, and one writes to the disk and syncs, without a
pause. What is given after `--` are pytest's arguments.
"""

import argparse
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

BLOCK = bytes(1 << 20)


def compute() -> None:
    """Keep a core busy."""
    while True:
        sum(range(10_000))


def sync() -> None:
    """Keep a disk busy."""
    with tempfile.TemporaryFile(dir=".") as file:
        while True:
            file.seek(0)
            file.write(BLOCK)
            file.flush()
            os.fsync(file.fileno())


@contextmanager
def busy(computing: int) -> Iterator[None]:
    """A machine that does something else."""
    others = [multiprocessing.Process(target=what, daemon=True) for what in [compute] * computing + [sync]]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.terminate()
            other.join()


def main() -> int:
    """Run the suite; 1 if a run of it failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.stress", description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=5, metavar="N", help="how often (default 5)")
    parser.add_argument("--computing", type=int, default=4, metavar="N", help="busy processes (default 4)")
    parser.add_argument("pytest", nargs="*", metavar="ARGUMENT", help="pytest's own, after --")
    chosen = parser.parse_args()
    rows = []
    for number in range(1, chosen.runs + 1):
        began = time.monotonic()
        with busy(chosen.computing):
            code = subprocess.call([sys.executable, "-m", "pytest", *chosen.pytest])
        rows.append((number, code, time.monotonic() - began))
        for run, code, took in rows:
            print(f"run {run}: {'FAILED' if code else 'ok'} in {took:.0f} s", flush=True)
    return int(any(code for _run, code, _took in rows))


if __name__ == "__main__":
    sys.exit(main())
