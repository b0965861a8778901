"""What importing costs: `celery_setnx` on top of what a program with Celery has imported anyway.

python -m benchmarks.startup [--rounds 7] [--quick]

Every sample is an interpreter of its own, which imports the one thing, and then times the import of the other
on top of it. All have been compiled before, as in an installed package. The garbage collector rests: it goes
through all that has been imported so far, and whose import it strikes is chance.

A worker, and most producers, have imported Celery's Redis transport, and with it redis-py, before they import
any of us; with another broker redis-py comes with us, and is most of what the import takes.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial

from benchmarks.figures import Curve, Promise, Table, command, interleaved

CELERY = "from celery import Celery, Task"
TRANSPORT = f"{CELERY}; import kombu.transport.redis"
PACKAGE = "import celery_setnx"
TASK = "from celery_setnx import SingletonTask"

ITSELF, REDIS = "Celery and Task themselves", "kombu's Redis transport, after them"
AFTER_NAME, AFTER_CELERY = "import celery_setnx, after import celery", "import celery_setnx, after them"
TASK_AFTER_CELERY = "SingletonTask, after them"
TASK_AFTER_TRANSPORT = "SingletonTask, after them and the transport"

WAYS = {
    ITSELF: ("import sys", CELERY),
    REDIS: (CELERY, "import kombu.transport.redis"),
    AFTER_NAME: ("import celery", PACKAGE),
    AFTER_CELERY: (CELERY, PACKAGE),
    TASK_AFTER_CELERY: (CELERY, TASK),
    TASK_AFTER_TRANSPORT: (TRANSPORT, TASK),
}
PEERS = {
    "celery-once, after them and the transport": (TRANSPORT, "from celery_once import QueueOnce"),
    "celery-singleton, after them and the transport": (TRANSPORT, "from celery_singleton import Singleton"),
    "celery-heimdall, after them and the transport": (TRANSPORT, "from celery_heimdall import HeimdallTask"),
}

MOST_MS = 15.0
MOST = 0.1  # of what Celery itself takes
MOST_OF_TASK = 0.35

_PROGRAM = """
{before}
import gc, time
gc.disable()
began = time.perf_counter()
{timed}
print((time.perf_counter() - began) * 1000)
"""


def measure(rounds: int, quick: bool) -> Iterator[Table | Curve]:
    """The one table; the peers are left out when it is to be quick."""
    with tempfile.TemporaryDirectory() as compiled:
        pairs = WAYS if quick else {**WAYS, **PEERS}
        ways: dict[str, Callable[[], float]] = {
            name: partial(import_ms, before, timed, compiled) for name, (before, timed) in pairs.items()
        }
        for way in ways.values():
            way()  # compiles
        samples = interleaved(ways, rounds)
    promises = [
        Promise(AFTER_NAME, MOST, ITSELF),
        Promise(AFTER_CELERY, MOST, ITSELF),
        Promise(TASK_AFTER_TRANSPORT, MOST_OF_TASK, ITSELF),
    ]
    if not quick:
        promises.append(Promise(AFTER_NAME, MOST_MS))
    yield Table(
        "Import",
        "ms",
        samples,
        ITSELF,
        tuple(promises),
        "Each sample in an interpreter of its own; all modules were compiled before; no garbage collection.",
    )


def import_ms(before: str, timed: str, compiled: str) -> float:
    """Milliseconds that the timed statement takes in a new interpreter, after the other.

    Args:
        before: What has been imported already.
        timed: The import that is timed.
        compiled: The directory that keeps compiled modules.
    """
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": compiled}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(before=before, timed=timed)],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    return float(ran.stdout)


if __name__ == "__main__":
    command(__doc__, measure)
