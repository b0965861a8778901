"""The watch over a worker's children, without a worker."""

import subprocess
import sys
import threading
from typing import Any

from celery_setnx.run.children import ChildWatch
from tests.harness import raising, wait_until


class Delivery:
    """A request whose child has ended."""

    def __init__(self, free: Any) -> None:
        child = subprocess.Popen([sys.executable, "-c", ""])
        child.wait()
        self.worker_pid = child.pid
        self.free_dead = free


def test_trouble_with_one_dead_child_does_not_end_the_watch(caplog):
    """An error while one lock is freed is logged, and the next child's death is noticed all the same."""
    watch, freed = ChildWatch(), threading.Event()
    first = Delivery(raising(ZeroDivisionError))
    watch.add(first)  # type: ignore[arg-type]
    wait_until(lambda: "was not freed" in caplog.text, "the trouble is logged")
    second = Delivery(freed.set)
    watch.add(second)  # type: ignore[arg-type]
    assert freed.wait(10)
