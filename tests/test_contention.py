"""Sixteen processes, one lock, an unprotected counter in a file: no increment is lost."""

import multiprocessing
import os
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_setnx.lock.lock import SetnxLock
from tests.bounds import bound
from tests.conftest import LOCK_DB

pytestmark = pytest.mark.slow

PROCESSES = 16
INCREMENTS = bound(1_000, full=20_000)
DIGITS = 12


def increment(directory: Path) -> None:
    """Count in a file, as unprotected as can be: between read and write it is another's turn."""
    file = os.open(directory / "number", os.O_RDWR)
    number = int(os.pread(file, DIGITS, 0))
    os.sched_yield()
    os.pwrite(file, f"{number + 1:0{DIGITS}}".encode(), 0)
    os.close(file)
    with (directory / "writers").open("a") as writers:
        writers.write(f"{os.getpid()}\n")


def increment_locked(directory: Path, times: int, begin: Any, url: str) -> None:
    with redis.Redis.from_url(url) as client:
        lock = SetnxLock(client, "lock.counter", lease=30)
        begin.wait(60)
        for _time in range(times):
            held = None
            # Asked in short spells, so that the pauses between the tries stay short: many fight at any time.
            while held is None:
                held = lock.acquire(wait=0.05).lock
            increment(directory)
            assert held.release() == "released"


def increment_unlocked(directory: Path, times: int, begin: Any) -> None:
    begin.wait(60)
    for _time in range(times):
        increment(directory)


def counted(directory: Path, increments: int, run: Callable[..., None], *args: Any) -> int:
    """What the number is when all processes have incremented it; each must end well."""
    (directory / "number").write_text("0" * DIGITS)
    forking = multiprocessing.get_context("fork")
    begin = forking.Barrier(PROCESSES)
    shares = [increments // PROCESSES + (number < increments % PROCESSES) for number in range(PROCESSES)]
    processes = [forking.Process(target=run, args=(directory, share, begin, *args)) for share in shares]
    for process in processes:
        process.start()
    give_up = time.monotonic() + 60 + increments * 0.02
    for process in processes:
        process.join(max(0.1, give_up - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * PROCESSES
    return int((directory / "number").read_text())


def test_counter_under_the_lock_loses_no_increment(server, locks, tmp_path):
    """Sixteen processes that fight for one lock count every increment; another one comes next often."""
    assert counted(tmp_path, INCREMENTS, increment_locked, server.url(LOCK_DB)) == INCREMENTS
    handovers = sum(one != other for one, other in pairwise((tmp_path / "writers").read_text().split()))
    assert handovers > INCREMENTS / 50
    assert locks.get("lock.counter") is None


def test_counter_without_the_lock_loses_increments(tmp_path):
    """The counter would not come out right by itself, so the test above can fail."""
    assert counted(tmp_path, 4_000, increment_unlocked) < 4_000
