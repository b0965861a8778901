"""The thread that renews leases: one per process, started by the first lock that needs it.

A lock is renewed every third of its lease, all that are due in one round trip per Redis client. A task
shorter than that costs two dictionary operations. The thread is a real one also under gevent and eventlet,
where a patched thread would starve while a greenlet computes.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import redis

from celery_setnx.lock import HeldLock, renew_all, task_of

try:
    from _queue import Empty, SimpleQueue  # gevent patches the one in the module queue
except ImportError:  # pragma: no cover - not CPython
    from queue import Empty, SimpleQueue

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
        # Written by any thread, one operation at a time; the keeper's thread reads a copy. No lock that a
        # greenlet and a real thread would have to share.
        self._watched: dict[str, _Watched] = {}
        self._wake: SimpleQueue[float] = SimpleQueue()
        self._wakes_at = -_NEVER
        self._starting = threading.Lock()
        self._thread: Any = None
        self._clients: dict[int, redis.Redis] = {}

    def watch(self, held: HeldLock, on_lost: OnLost, at_most_for: float | None = None) -> None:
        """Renew a lock until it is forgotten or lost.

        Args:
            held: The lock.
            on_lost: Called once, in the keeper's thread, with the lock and the reason if it is lost.
            at_most_for: Seconds after which renewal stops, and the lease runs out. Defaults to never.
        """
        now = self._clock()
        stop_at = _NEVER if at_most_for is None else now + at_most_for
        watched = _Watched(held, on_lost, now + _pace(held), stop_at)
        self._watched[held.token] = watched
        if self._thread is None:
            self._start()
        if watched.due < self._wakes_at:
            self._wake.put(held.lease_s)

    def forget(self, held: HeldLock) -> bool:
        """Stop renewing a lock. To be called before it is released, so that no renewal comes after.

        Returns:
            False if the lock was lost before: `on_lost` has been called, or is about to be.
        """
        return self._watched.pop(held.token, None) is not None

    def _start(self) -> None:
        with self._starting:
            if self._thread is None:
                self._thread = start_real_thread(self._run)

    def _run(self) -> None:
        idle_s, rested = _NEVER, True
        while True:
            now = self._clock()
            # Announced before looking: a lock that comes after the look sees it, and wakes us.
            self._wakes_at = _NEVER
            watched = list(self._watched.values())
            if watched:
                idle_s, rested = min(w.held.lease_s for w in watched) / 3, False
            # Once idle, sleep one more time as if there were a lock: a stream of short tasks wakes nobody.
            next_due = min((w.due for w in watched), default=_NEVER if rested else now + idle_s)
            if next_due > now:
                self._wakes_at = next_due
                lease_s = self._sleep(next_due - now)
                if lease_s is not None:  # of a lock that may have been forgotten by now
                    idle_s, rested = lease_s / 3, False
                elif not watched:
                    rested = True
                continue
            self._wakes_at = -_NEVER
            # What is due soon goes along: fewer round trips, and never later than planned.
            due = [w for w in watched if w.due - w.held.lease_s / 12 <= now]
            try:
                self._renew(due)
            except Exception:
                logger.exception("Renewing %d leases failed; it is tried again.", len(due))
                for failed in due:
                    failed.due = self._clock() + failed.held.lease_s / 20

    def _sleep(self, seconds: float) -> float | None:
        """The lease of the lock that has woken us because it is due earlier; None if none has."""
        try:
            return self._wake.get(timeout=None if seconds == _NEVER else seconds)
        except Empty:
            return None

    def _renew(self, due: list[_Watched]) -> None:
        by_client: dict[int, list[_Watched]] = {}
        for watched in due:
            if watched.stop_at > self._clock():
                by_client.setdefault(id(watched.held.client), []).append(watched)
        for group in by_client.values():
            client = self._client_of(group[0].held)
            for watched, error in zip(group, renew_all([w.held for w in group], client)):
                if error is not None and not watched.failing:
                    logger.warning(
                        "The lease of %s was not renewed for %s. It stays ours for %.1f s more, and "
                        "renewing goes on: %s",
                        watched.held.key,
                        _owner(watched.held),
                        watched.held.remaining_s(),
                        error,
                    )
                watched.failing = error is not None
        for watched in due:
            self._plan(watched)

    def _client_of(self, held: HeldLock) -> Any:
        """The lock's own client; under gevent and eventlet one that no greenlet uses."""
        if _green() is None:
            return held.client
        key = id(held.client)
        if key not in self._clients:
            again = getattr(held.client, "setnx_again", None)
            self._clients[key] = again() if again is not None else _copy(held.client)
        return self._clients[key]

    def _plan(self, watched: _Watched) -> None:
        held, now = watched.held, self._clock()
        left = held.remaining_s()
        if left <= 0:
            if self._watched.pop(held.token, None) is watched:
                reason = held.lost or _ran_out(watched, now)
                held.lost = reason
                _tell(watched.on_lost, held, reason)
        elif watched.stop_at <= now:
            watched.due = now + left
        else:
            watched.due = now + (min(left, held.lease_s / 20) if watched.failing else _pace(held))


def _copy(client: redis.Redis) -> redis.Redis:
    """A client of the same server that shares no connection with this one."""
    pool = client.connection_pool
    return redis.Redis(connection_pool=redis.ConnectionPool(pool.connection_class, **pool.connection_kwargs))


def _owner(held: HeldLock) -> str:
    task_id = task_of(held.token)
    return f"task {task_id}" if task_id else f"token {held.token}"


def _pace(held: HeldLock) -> float:
    """Seconds until the next renewal; sooner where a slow reply has used up part of the lease."""
    return min(held.lease_s / 3, held.remaining_s() / 2)


def _tell(on_lost: OnLost, held: HeldLock, reason: str) -> None:
    try:
        on_lost(held, reason)
    except Exception:
        logger.exception("What was to be told of the loss of %s failed.", held.key)


def _ran_out(watched: _Watched, now: float) -> str:
    if watched.stop_at <= now:
        return "its at_most_for is over, and its lease has ended"
    return f"Redis could not be reached for a whole lease of {watched.held.lease_s:g} s"


def start_real_thread(function: Callable[[], None]) -> Any:
    """Start a daemon thread of the operating system, and return what keeps it alive."""
    green = _green()
    if green == "gevent":
        import gevent.threadpool

        pool = gevent.threadpool.ThreadPool(1)
        pool.spawn(function)
        return pool
    thread_class = threading.Thread
    if green == "eventlet":
        import eventlet.patcher

        thread_class = eventlet.patcher.original("threading").Thread
    thread = thread_class(target=function, name="celery_setnx-keeper", daemon=True)
    thread.start()
    return thread


def _green() -> str | None:
    """Which library has replaced the threads of this process by greenlets, if any has."""
    if "gevent.monkey" in sys.modules and sys.modules["gevent.monkey"].is_module_patched("threading"):
        return "gevent"
    if "eventlet.patcher" in sys.modules and sys.modules["eventlet.patcher"].is_monkey_patched("thread"):
        return "eventlet"
    return None


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
