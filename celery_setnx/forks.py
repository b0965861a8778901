"""Keeps a process from forking while a thread of ours is at work in it."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

WAIT_S = 1.0
"""Seconds for which a fork waits at most: a thread may be waiting for a Redis that does not answer."""


class BetweenForks:
    """A context for the work of threads beside one that forks, as the parent of a worker pool does.

    A child is born with every lock that another thread holds at that moment, of a log file or of a module
    that is being imported, and without the thread that would give it back: at its first line in the log it
    would hang, with its task. A fork waits until nobody is within, but no longer than `WAIT_S`.
    """

    def __init__(self) -> None:
        self.renew()

    def __enter__(self) -> None:
        own = threading.get_ident()
        with self._changed:
            self._changed.wait_for(lambda: not self._forking or own in self._within)
            self._within[own] += 1

    def __exit__(self, *_exc: object) -> None:
        own = threading.get_ident()
        with self._changed:
            self._within[own] -= 1
            self._within += Counter()  # forget who is out
            self._changed.notify_all()

    def wait(self, event: threading.Event, timeout: float | None = None) -> bool:
        """Wait for an event amid the work, as `event.wait`: meanwhile forks may happen."""
        with self._away():
            return event.wait(timeout)

    def give_way(self) -> None:
        """Between two pieces of work: let a fork happen that waits."""
        with self._away():
            pass

    @contextmanager
    def _away(self) -> Iterator[None]:
        own = threading.get_ident()
        with self._changed:
            count = self._within.pop(own, 0)
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._changed.wait_for(lambda: not self._forking)
                if count:
                    self._within[own] = count

    def close(self) -> None:
        """Before a fork: let nobody else in, and wait until nobody is within."""
        self._changed.acquire()
        self._forking = True
        self._changed.wait_for(lambda: not self._within, WAIT_S)

    def open(self) -> None:
        """After a fork, in the parent."""
        self._forking = False
        self._changed.notify_all()
        self._changed.release()

    def renew(self) -> None:
        """After a fork, in the child, where those threads are not."""
        self._changed = threading.Condition()
        self._within: Counter[int] = Counter()
        self._forking = False


between_forks = BetweenForks()
os.register_at_fork(
    before=between_forks.close,
    after_in_parent=between_forks.open,
    after_in_child=between_forks.renew,
)
