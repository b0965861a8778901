"""The thread that renews leases: one per process, started by the first lock that needs it.

A lock is renewed every third of its lease, all that are due in one round trip per Redis client. A task
shorter than that costs two dictionary operations.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass

from celery_setnx.lock import HeldLock, renew_all

logger = logging.getLogger("celery_setnx")

OnLost = Callable[[HeldLock, str], None]
_NEVER = float("inf")


@dataclass
class _Watched:
    held: HeldLock
    on_lost: OnLost
    due: float
    stop_at: float
    failing: bool = False


class Keeper:
    """Renews the leases of the locks that this process holds.

    Args:
        clock: Monotonic clock in seconds. Must be the clock of the locks.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._watched: dict[str, _Watched] = {}
        self._changed = threading.Condition(threading.Lock())
        self._thread: threading.Thread | None = None
        self._wakes_at = _NEVER

    def watch(self, held: HeldLock, on_lost: OnLost, at_most_for: float | None = None) -> None:
        """Renew a lock until it is forgotten or lost.

        Args:
            held: The lock.
            on_lost: Called once, in the keeper's thread, with the lock and the reason if it is lost.
            at_most_for: Seconds after which renewal stops, and the lease runs out. Defaults to never.
        """
        now = self._clock()
        stop_at = _NEVER if at_most_for is None else now + at_most_for
        watched = _Watched(held, on_lost, now + held.lease_s / 3, stop_at)
        with self._changed:
            self._watched[held.token] = watched
            if self._thread is None or not self._thread.is_alive():
                self._thread = threading.Thread(target=self._run, name="celery_setnx-keeper", daemon=True)
                self._thread.start()
            if watched.due < self._wakes_at:
                self._changed.notify()

    def forget(self, held: HeldLock) -> bool:
        """Stop renewing a lock. To be called before it is released, so that no renewal comes after.

        Returns:
            False if the lock was lost before: `on_lost` has been called, or is about to be.
        """
        with self._changed:
            return self._watched.pop(held.token, None) is not None

    def _run(self) -> None:
        while True:
            with self._changed:
                now = self._clock()
                next_due = min((w.due for w in self._watched.values()), default=_NEVER)
                if next_due > now:
                    self._wakes_at = next_due
                    self._changed.wait(None if next_due == _NEVER else next_due - now)
                    continue
                self._wakes_at = -_NEVER
                # What is due soon goes along: fewer round trips, and never later than planned.
                due = [w for w in self._watched.values() if w.due - w.held.lease_s / 12 <= now]
            try:
                self._renew(due)
            except Exception:
                logger.exception("Renewing %d leases failed; it is tried again.", len(due))
                for watched in due:
                    watched.due = self._clock() + watched.held.lease_s / 20

    def _renew(self, due: list[_Watched]) -> None:
        by_client: dict[int, list[_Watched]] = {}
        for watched in due:
            if watched.stop_at > self._clock():
                by_client.setdefault(id(watched.held.client), []).append(watched)
        for group in by_client.values():
            for watched, error in zip(group, renew_all([watched.held for watched in group])):
                if error is not None and not watched.failing:
                    logger.warning(
                        "%s. It stays ours for %.1f s more; renewing goes on.",
                        error,
                        watched.held.remaining_s(),
                    )
                watched.failing = error is not None
        for watched in due:
            self._plan(watched)

    def _plan(self, watched: _Watched) -> None:
        held, now = watched.held, self._clock()
        left = held.remaining_s()
        if left <= 0:
            with self._changed:
                still_held = self._watched.pop(held.token, None) is watched
            if still_held:
                reason = held.lost or _ran_out(watched, now)
                held.lost = reason
                _tell(watched.on_lost, held, reason)
        elif watched.stop_at <= now:
            watched.due = now + left
        else:
            watched.due = now + (min(left, held.lease_s / 20) if watched.failing else held.lease_s / 3)


def _tell(on_lost: OnLost, held: HeldLock, reason: str) -> None:
    try:
        on_lost(held, reason)
    except Exception:
        logger.exception("What was to be told of the loss of %s failed.", held.key)


def _ran_out(watched: _Watched, now: float) -> str:
    if watched.stop_at <= now:
        return "its at_most_for is over, and its lease has ended"
    return f"Redis could not be reached for a whole lease of {watched.held.lease_s:g} s"


def keeper_for_process(clock: Callable[[], float]) -> Keeper:
    """The keeper of this process, made at first use: threads do not survive a fork.

    Args:
        clock: Monotonic clock in seconds.
    """
    pid = os.getpid()
    keeper = _keepers.get(pid)
    if keeper is None:
        keeper = _keepers.setdefault(pid, Keeper(clock))
    return keeper


_keepers: dict[int, Keeper] = {}
