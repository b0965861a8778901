"""A timed look: at the lines that are due between two sweeps, such as when a lock has rested.

Which lines are due, and what is done with them, is the sweep's business.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from heapq import heappop, heappush
from typing import NamedTuple

from celery_setnx.exceptions import SetnxError
from celery_setnx.forks import between_forks
from celery_setnx.lock.line import SOON_S
from celery_setnx.log import Log
from celery_setnx.threads import Lasting

logger = Log("celery_setnx")

EARLIEST_S = 0.01
"""Seconds between two looks, at least."""

_AGAIN_S = 2.0  # after a look that has failed; that Redis is away is the sweep's to say


class SweepReport(NamedTuple):
    """What came of a look, or a sweep.

    Attributes:
        lines: How many lines were due.
        next_s: In how many seconds one is that this worker is to look at; None if none is.
        are_more: True if more may be due by now.
        error: Why the lines on a node of a cluster were not looked at; None if all were.
    """

    lines: int
    next_s: float | None
    are_more: bool = False
    error: SetnxError | None = None


class TimedLooks:
    """A thread that looks when lines are due soon.

    A call notes when that is while its delivery ends, in a process that may end with it. One that parks tells
    its parent. Where a release may note it, because the lock rests or no start is left, the parent asks Redis
    at the end of each delivery. Several may come for one line, and one of them finds it due: the
    others stop.
    """

    def __init__(self, look: Callable[[], SweepReport]) -> None:
        self._look = look
        self._due_at: list[float] = []  # a heap
        self._earliest_at = 0.0
        self._has_ended = False  # a delivery, and what it has noted is not known
        self._noting = threading.Lock()
        self._changed, self._stopped = threading.Event(), threading.Event()
        self._thread = Lasting("celery_setnx-looks", self._turn, in_parent=True)

    def soon(self) -> None:
        """Look now, and then for as long as a line is due soon: a delivery has ended."""
        with self._noting:
            self._has_ended = True
        self._wake()

    def within(self, seconds: float | None) -> None:
        """Look in so many seconds, too, if that is soon; None if there is no need."""
        if seconds is None or seconds >= SOON_S:
            return
        at = time.monotonic() + seconds
        with self._noting:  # a sweep and a look may say it at a time
            heappush(self._due_at, at)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        if not self._thread.runs and not self._stopped.is_set():
            try:
                self._thread.ensure()
            except RuntimeError as error:
                logger.info("Lines that are due soon are left to the sweep: %s", error)

    @property
    def runs(self) -> bool:
        """Whether its thread runs."""
        return self._thread.runs

    def stop(self) -> None:
        """Look no more."""
        self._stopped.set()
        self._changed.set()

    def _left_s(self) -> float:
        """Seconds until the next look."""
        if self._has_ended:
            return 0.0
        with self._noting:
            return max(self._due_at[0] - time.monotonic(), 0.0) if self._due_at else math.inf

    def _turn(self) -> bool:
        left_s = self._left_s()
        between_forks.wait(self._changed, left_s if left_s < math.inf else None)
        self._changed.clear()  # first: what is said from now on is heard in the next turn
        if self._left_s() > 0.0:
            return not self._stopped.is_set()
        if between_forks.wait(self._stopped, max(self._earliest_at - time.monotonic(), 0.0)):
            return False
        with self._noting:
            has_ended, self._has_ended = self._has_ended, False
            while self._due_at and self._due_at[0] <= time.monotonic():
                heappop(self._due_at)
        pause_s = _AGAIN_S
        try:
            swept = self._look()
            pause_s = EARLIEST_S
            if swept.lines or has_ended:
                self.within(0.0 if swept.are_more else swept.next_s)
        except SetnxError as error:
            logger.debug("No line is looked at between two sweeps: %s", error)
        finally:
            self._earliest_at = time.monotonic() + pause_s
        return True
