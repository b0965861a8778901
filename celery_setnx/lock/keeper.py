"""The thread that renews leases: one per process, started by the first lock that needs it.

A lock is renewed every third of its lease, all that are due in one round trip per Redis client. A task
shorter than that costs two dictionary operations. The thread is a real one also under gevent and eventlet,
where a patched thread would starve while a greenlet computes. It only renews: what may wait, also for a log's
handler, it hands to a second thread (see `_Errands`).
"""

from __future__ import annotations

import functools
import os
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import MethodType
from typing import Any

import redis

from celery_setnx.exceptions import SetnxError
from celery_setnx.lock.held import HeldLock, renew_all
from celery_setnx.lock.record import task_of
from celery_setnx.log import Log, fields, hand_lines_to, say_loudly
from celery_setnx.threads import Lasting, greenlets, is_killed

try:
    from _queue import Empty, SimpleQueue  # gevent patches the one in the module queue
except ImportError:  # pragma: no cover - not CPython
    from queue import Empty, SimpleQueue

logger = Log("celery_setnx")

OnLost = Callable[[HeldLock, str], None]
_NEVER = float("inf")
_AGAIN_S = 1.0
_LOOK_S = 0.2


@dataclass
class _Watched:
    held: HeldLock
    on_lost: Callable[[], OnLost | None]
    due: float
    stop_at: float
    failing: bool = False


class Keeper:
    """Renews the leases of the locks that this process holds, by the monotonic clock of those locks."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Written by any thread, one operation at a time; the keeper's thread reads a copy. No lock that a
        # greenlet and a real thread would have to share.
        self._watched: dict[str, _Watched] = {}
        self._wake: SimpleQueue[float] = SimpleQueue()
        self._wakes_at = -_NEVER
        self._idle_s, self._rested = _NEVER, True
        self._thread = Lasting("celery_setnx-keeper", self._turn, real=True)
        self._clients: dict[int, redis.Redis] = {}
        self._errands = _Errands(clock)

    def watch(self, held: HeldLock, on_lost: OnLost, at_most_for: float | None = None) -> None:
        """Renew a lock until it is forgotten or lost; for `at_most_for` seconds, and then its lease runs out.

        A loss is told once, by a thread of its own, with the lock and the reason. When the object of a bound
        `on_lost` is gone, the lock is renewed no more: an exception that strikes on the way out may leave
        nobody behind who would forget it.
        """
        now = self._clock()
        stop_at = _NEVER if at_most_for is None else now + at_most_for
        watched = _Watched(held, _weak(on_lost), now + _pace(held), stop_at)
        self._watched[held.token] = watched
        held.is_watched = True
        if not (self._thread.runs and self._errands.is_ready()):
            self._start()
        if watched.due < self._wakes_at:
            self._wake.put(held.lease_s)

    def forget(self, held: HeldLock) -> bool:
        """Stop renewing a lock, before it is released. False if it is lost already."""
        held.is_watched = False
        return self._watched.pop(held.token, None) is not None

    def try_again(self, release: Callable[[], None], until: float) -> None:
        """Call what gives a lock back, until it raises no `SetnxError`, or a time is reached."""
        self._errands.start()
        self._errands.add(release, until)

    def _start(self) -> None:
        """Before the first lock, and should a thread have died."""
        if greenlets() is not None:  # of which the keeper's real thread cannot start one
            self._errands.start()
        self._thread.ensure()

    def _turn(self) -> bool:
        """Renew what is due, or wait until something is."""
        hand_lines_to(self._errands.add)
        now = self._clock()
        # Announced before looking: a lock that comes after the look sees it, and wakes us.
        self._wakes_at = _NEVER
        watched = list(self._watched.values())
        if watched:
            self._idle_s, self._rested = min(w.held.lease_s for w in watched) / 3, False
        # Once idle, sleep one more time as if there were a lock: a stream of short tasks wakes nobody.
        next_due = min((w.due for w in watched), default=_NEVER if self._rested else now + self._idle_s)
        if next_due > now:
            self._wakes_at = next_due
            lease_s = self._sleep(next_due - now)
            if lease_s is not None:  # of a lock that may have been forgotten by now
                self._idle_s, self._rested = lease_s / 3, False
            elif not watched:
                self._rested = True
            return True
        self._wakes_at = -_NEVER
        # What is due soon goes along: fewer round trips, and never later than planned.
        self._renew([w for w in watched if w.due - w.held.lease_s / 12 <= now and not self._is_gone(w)])
        return True

    def _is_gone(self, watched: _Watched) -> bool:
        """True if nobody is left who would forget the lock; it is forgotten."""
        if watched.on_lost() is not None:
            return False
        if self._watched.pop(watched.held.token, None) is watched:
            logger.warning(
                "%s has ended without releasing %s. It is no longer renewed; its lease of %g s ends it.",
                _owner(watched.held, first=True),
                watched.held.key,
                watched.held.lease_s,
                extra=fields(task_id=task_of(watched.held.token), key=watched.held.key),
            )
        return True

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
            self._renew_group(group)
        for watched in due:
            self._plan(watched)

    def _renew_group(self, group: list[_Watched]) -> None:
        """Renew the locks of one client; what is wrong with it is no other's business."""
        try:
            errors = renew_all([w.held for w in group], self._client_of(group[0].held))
        except Exception:
            logger.exception("Renewing %d leases failed; it is tried again.", len(group))
            for watched in group:
                watched.failing = True
            return
        for watched, error in zip(group, errors):
            if error is not None:
                say_loudly(error)
            if error is not None and not watched.failing:
                logger.warning(
                    "The lease of %s was not renewed for %s. The lock is kept for %.1f s more, and "
                    "renewal is tried again. %s",
                    watched.held.key,
                    _owner(watched.held),
                    watched.held.remaining_s(),
                    error.brief,
                    extra=fields(task_id=task_of(watched.held.token), key=watched.held.key),
                )
            watched.failing = error is not None

    def _client_of(self, held: HeldLock) -> Any:
        """The lock's own client; under gevent and eventlet one that no greenlet uses."""
        if greenlets() is None:
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
                on_lost = watched.on_lost()
                if on_lost is not None:
                    self._errands.add(functools.partial(_tell, on_lost, held, reason))
        elif watched.stop_at <= now:
            watched.due = now + left
        else:
            watched.due = now + (min(left, held.lease_s / 20) if watched.failing else _pace(held))


class _Errands:
    """A second thread, for what may wait: receivers of `lock_lost`, and releases that have failed.

    Under gevent and eventlet it is a greenlet, as receivers are made for; it looks into the queue, which a
    real thread fills.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._queue: SimpleQueue[tuple[Callable[[], None], float]] = SimpleQueue()
        self._thread = Lasting("celery_setnx-errands", self._turn)
        self._failed: list[tuple[Callable[[], None], float]] = []
        self._tried_at = -_NEVER

    def add(self, errand: Callable[[], None], until: float = -_NEVER) -> None:
        """Run it soon; and while it raises a `SetnxError`, again every second until a time."""
        self._queue.put((errand, until))
        if not self._thread.runs and greenlets() is None:
            with suppress(RuntimeError):  # no thread can be started now: the next one who comes may
                self.start()

    def is_ready(self) -> bool:
        """Whether it runs, or can be started by whoever has an errand."""
        return self._thread.runs or greenlets() is None

    def start(self) -> None:
        """See to it that it runs; in a greenlet's world not from the keeper's real thread."""
        self._thread.ensure()

    def _turn(self) -> bool:
        errands = self._next(_AGAIN_S if self._failed else None)
        # Once a second, however many there are: with a server that is away each may take a timeout.
        if self._failed and self._clock() >= self._tried_at + _AGAIN_S:
            errands, self._failed, self._tried_at = errands + self._failed, [], self._clock()
        for errand, until in errands:
            self._run(errand, until)
        return True

    def _run(self, errand: Callable[[], None], until: float) -> None:
        try:
            errand()
        except SetnxError as error:
            if self._clock() < until:
                self._failed.append((errand, until))
            else:
                logger.info("It is not tried again, because the lease has ended: %s", error)
        except BaseException as error:
            if is_killed(error):
                raise
            logger.exception("A late release, or a report of a lost lock, failed.")

    def _next(self, wait_s: float | None) -> list[tuple[Callable[[], None], float]]:
        """What is new; nothing if nothing comes for a while."""
        if greenlets() is not None:
            time.sleep(_LOOK_S)
            return [self._queue.get() for _ in range(self._queue.qsize())]
        try:
            return [self._queue.get(timeout=wait_s)]
        except Empty:
            return []


def _weak(on_lost: OnLost) -> Callable[[], OnLost | None]:
    """What gives it back for as long as the object of the bound method lives."""
    if not isinstance(on_lost, MethodType):
        return lambda: on_lost
    owner, function = weakref.ref(on_lost.__self__), on_lost.__func__
    return lambda: None if (it := owner()) is None else function.__get__(it)


def _copy(client: redis.Redis) -> redis.Redis:
    """A client of the same server that shares no connection with this one."""
    pool = client.connection_pool
    return redis.Redis(connection_pool=redis.ConnectionPool(pool.connection_class, **pool.connection_kwargs))


def _owner(held: HeldLock, *, first: bool = False) -> str:
    """Who has a lock; `first` if a sentence begins with that."""
    task_id = task_of(held.token)
    kind = "task" if task_id else "token"
    return f"{kind.capitalize() if first else kind} {task_id or held.token}"


def _pace(held: HeldLock) -> float:
    """Seconds until the next renewal; sooner where a slow reply has used up part of the lease."""
    return min(held.lease_s / 3, held.remaining_s() / 2)


def _tell(on_lost: OnLost, held: HeldLock, reason: str) -> None:
    try:
        on_lost(held, reason)
    except Exception:
        logger.exception(
            "The loss of %s could not be reported.",
            held.key,
            extra=fields(task_id=task_of(held.token), key=held.key),
        )


def _ran_out(watched: _Watched, now: float) -> str:
    if watched.stop_at <= now:
        return "its at_most_for is over, and its lease has ended"
    return f"Redis could not be reached for a whole lease of {watched.held.lease_s:g} s"


def keeper_for_process(clock: Callable[[], float]) -> Keeper:
    """The keeper of this process, made at first use: threads do not survive a fork."""
    pid = os.getpid()
    keeper = _keepers.get(pid)
    if keeper is None:
        keeper = _keepers.setdefault(pid, Keeper(clock))
    return keeper


_keepers: dict[int, Keeper] = {}
