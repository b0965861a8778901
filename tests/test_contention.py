"""Sixteen processes, one lock, an unprotected counter in a file: no increment is lost."""

import multiprocessing
import os
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_setnx.lock import SetnxLock
from tests.bounds import bound
from tests.conftest import LOCK_DB

pytestmark = pytest.mark.slow

PROCESSES = 16
INCREMENTS = bound(1_000, full=20_000)
DIGITS = 12


class Counter:
    """A number in a file, and who wrote it when: each increment reads, adds one and writes."""

    def __init__(self, directory: Path) -> None:
        self._number = directory / "number"
        self._writers = directory / "writers"
        self._number.write_text("0" * DIGITS)

    def increment(self) -> None:
        """As unprotected as can be: between read and write it is another's turn."""
        file = os.open(self._number, os.O_RDWR)
        number = int(os.pread(file, DIGITS, 0))
        os.sched_yield()
        os.pwrite(file, f"{number + 1:0{DIGITS}}".encode(), 0)
        os.close(file)
        with self._writers.open("a") as writers:
            writers.write(f"{os.getpid()}\n")

    def value(self) -> int:
        """The number."""
        return int(self._number.read_text())

    def handovers(self) -> int:
        """How often another process came next."""
        return sum(one != other for one, other in pairwise(self._writers.read_text().split()))


def _increment_locked(url: str, counter: Counter, times: int, begin: Any) -> None:
    with redis.Redis.from_url(url) as client:
        lock = SetnxLock(client, "lock.counter", lease=30)
        begin.wait(60)
        for _time in range(times):
            held = None
            # Asked in short spells, so that the pauses between the tries stay short: many fight at any time.
            while held is None:
                held = lock.acquire(wait=0.05).lock
            counter.increment()
            assert held.release() == "released"


def _increment_unlocked(_url: str, counter: Counter, times: int, begin: Any) -> None:
    begin.wait(60)
    for _time in range(times):
        counter.increment()


def _count(increment: Any, url: str, counter: Counter, increments: int) -> None:
    """Let all processes increment; each must end well."""
    forking = multiprocessing.get_context("fork")
    begin = forking.Barrier(PROCESSES)
    shares = [increments // PROCESSES + (number < increments % PROCESSES) for number in range(PROCESSES)]
    processes = [forking.Process(target=increment, args=(url, counter, share, begin)) for share in shares]
    for process in processes:
        process.start()
    give_up = time.monotonic() + 60 + increments * 0.02
    for process in processes:
        process.join(max(0.1, give_up - time.monotonic()))
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * PROCESSES


def test_counter_under_the_lock_loses_no_increment(server, locks, tmp_path):
    """Sixteen processes that fight for one lock count every increment."""
    counter = Counter(tmp_path)
    _count(_increment_locked, server.url(LOCK_DB), counter, INCREMENTS)
    assert counter.value() == INCREMENTS
    assert counter.handovers() > INCREMENTS / 50
    assert locks.get("lock.counter") is None


def test_counter_without_the_lock_loses_increments(tmp_path):
    """The counter would not come out right by itself, so the test above can fail."""
    counter = Counter(tmp_path)
    _count(_increment_unlocked, "", counter, 4_000)
    assert counter.value() < 4_000
