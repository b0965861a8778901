"""The cleanup after children that die, and after calls that end before their run could begin.

A thread of the worker's parent frees the locks, marks and places that they leave behind: the parent's event
loop must wait neither for a child's end nor for Redis.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

from celery import Celery

from celery_setnx.call.message import Call
from celery_setnx.call.wake import leave_line
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockUnavailable
from celery_setnx.forks import between_forks
from celery_setnx.lock.marks import Failure, Mark, forget_done, free_all
from celery_setnx.lock.process import has_ended
from celery_setnx.log import Log, fields, say_loudly
from celery_setnx.run.sweep import look_again_in
from celery_setnx.threads import Lasting

logger = Log("celery_setnx")
T = TypeVar("T")

LOOK_S = 0.2
KEEP_S = 60.0
AT_MOST = 10_000
"""Calls that have ended and are not forgotten yet, at most: while Redis is away there may be more."""

_BATCH = 500
_AGAIN_S = 1.0


class EndedCall(NamedTuple):
    """A call that has ended, of a worker's app."""

    app: Celery
    call: Call
    may_wait: bool = False  # in line
    is_sent_again: bool = False  # as the task's own retry, which has its mark
    failure: Failure | None = None  # of its run, which may count as a success

    @property
    def is_anything_left(self) -> bool:
        """Whether there is anything to free, or to take back."""
        return self.has_mark or self.has_place or self.failure is not None

    @property
    def has_place(self) -> bool:
        """Whether it may stand in line."""
        call = self.call
        return bool(call.key) and call.may_have_twin and (call.is_woken or self.may_wait)

    @property
    def has_mark(self) -> bool:
        """Whether its mark ends with it."""
        return self.call.mark is not None and not self.is_sent_again


class Cleanup:
    """Frees what is left behind by children that die, and by calls that end outside their run.

    It notices a death within a fraction of a second, for which Celery may take seconds.
    """

    def __init__(self) -> None:
        self._running: WeakSet[Any] = WeakSet()
        self._kept: dict[Any, float] = {}
        self._ended: deque[EndedCall] = deque()
        self._at_work = 0  # how many more of them are being freed
        self._retries: dict[Any, float] = {}
        self._changed = threading.Event()
        self._has_ended = threading.Event()
        self._thread = Lasting("celery_setnx-cleanup", self._turn, in_parent=True)
        self._goes_on = False
        self._asks_again_at = 0.0
        self._fails = False

    def watch(self, request: Any) -> None:
        """Watch the child of a request for as long as the request lives."""
        self._running.add(request)
        self._look_soon()

    def keep(self, request: Any) -> None:
        """Watch on although Celery has done with the request: its child has died, or is about to."""
        if request in self._running:
            self._kept[request] = time.monotonic() + KEEP_S

    def forget(self, app: Celery, call: Call, *, may_wait: bool = False, is_sent_again: bool = False) -> None:
        """Free what a call has that ended, soon: its mark and its place."""
        self._note(EndedCall(app, call, may_wait, is_sent_again))

    def take_back(self, app: Celery, call: Call, failure: Failure) -> None:
        """Have a call that has failed count as no success, soon. Its mark may be its retry's by now."""
        self._note(EndedCall(app, Call(*call[:4]), failure=failure))

    def _note(self, ended: EndedCall) -> None:
        if ended.is_anything_left and self._has_room(len(self._ended) + self._at_work, ended.call):
            self._ended.append(ended)
            self._look_soon(has_ended=True)

    def free_retry(self, request: Any) -> None:
        """Free what a retry has that will not run, once the attempt that has sent it has ended."""
        if self._has_room(len(self._retries), request.call):
            self._retries[request] = time.monotonic() + KEEP_S
            self._look_soon()

    def _has_room(self, count: int, call: Call) -> bool:
        if count < AT_MOST:
            return True
        text = "%s has ended, and its mark of %s is not freed: %d others wait for that. It lapses by itself."
        logger.warning(text, call, call.key, count, extra=fields(of=call))
        return False

    def _look_soon(self, *, has_ended: bool = False) -> None:
        if not self._thread.runs:
            self._start()
        if has_ended:
            self._has_ended.set()
        if not self._changed.is_set():
            self._changed.set()

    def _start(self) -> None:
        """Start the thread; where that cannot be, it is tried again with whatever ends next."""
        try:
            self._thread.ensure()
        except RuntimeError as error:
            logger.warning("Locks, marks and places of ended calls are not freed yet: %s", error)

    def _turn(self) -> bool:
        if not self._goes_on:
            between_forks.wait(self._changed)
            self._changed.clear()
        # Before the first look, too: a stream of short tasks wakes this thread five times a second.
        self._pause()
        self._goes_on = True  # also after a look that has failed
        self._goes_on = self._look()
        return True

    def _pause(self) -> None:
        between_forks.wait(self._has_ended, LOOK_S)
        self._has_ended.clear()

    def _look(self) -> bool:
        """Free what is left behind; true while there is anything to look at."""
        is_watching = self._look_at_children()
        if time.monotonic() >= self._asks_again_at:
            try:
                self._forget_all()
                self._free_retries()
                self._fails = False
            except LockUnavailable as error:
                say_loudly(error)
                self._asks_again_at = time.monotonic() + _AGAIN_S
                if not self._fails:  # it is said once
                    text = "%d calls have ended, and their marks are not freed; tried again every %g s: %s"
                    logger.warning(text, len(self._ended) + len(self._retries), _AGAIN_S, error)
                self._fails = True
            except Exception:
                logger.exception("What ended calls have left behind was not freed; it lapses by itself.")
        return bool(is_watching or self._ended or self._retries)

    def _look_at_children(self) -> bool:
        """Free the locks of the dead; true while there is anybody to look at."""
        try:
            requests = list(self._running)
        except RuntimeError:  # changed by the main thread meanwhile
            return True
        for request in requests:
            if request.worker_pid and has_ended(request.worker_pid):
                self._running.discard(request)
                self._kept.pop(request, None)
                between_forks.give_way()
                _survive(request.free_dead)
        for request, until in list(self._kept.items()):
            if time.monotonic() > until:
                self._kept.pop(request, None)
        return bool(requests)

    def _forget_all(self) -> None:
        """Free the marks and places of all that have ended, many marks in one round trip."""
        while self._ended:
            self._at_work = min(len(self._ended), _BATCH)
            batch = [self._ended.popleft() for _ in range(self._at_work)]
            try:
                _forget(batch)
            except LockUnavailable:
                self._ended.extend(batch)  # behind the others: it may be one node of a cluster
                raise
            except Exception:  # noqa: BLE001 - one call's trouble is no other's: it is found, and named
                for ended in batch:
                    self._forget_alone(ended)
            finally:
                self._at_work = 0

    def _forget_alone(self, ended: EndedCall) -> None:
        try:
            _forget([ended])
        except LockUnavailable:
            self._ended.append(ended)
        except Exception as error:  # noqa: BLE001 - such as a name that the server's protocol cannot have
            text = "%s has ended; its lock, mark and place are not freed, and lapse by themselves: %s"
            logger.warning(text, ended.call, repr(error), extra=fields(of=ended.call))

    def _free_retries(self) -> None:
        for request, until in list(self._retries.items()):
            between_forks.give_way()
            if _survive(partial(request.free_held, at_last=time.monotonic() > until)):
                del self._retries[request]


def _forget(batch: list[EndedCall]) -> None:
    """Free the marks and places of some calls."""
    marks: dict[Celery, list[Mark]] = {}
    failures: dict[Celery, list[Failure]] = {}
    for ended in batch:
        if ended.has_place:
            between_forks.give_way()
            word, seconds = leave_line(ended.app, ended.call)
            look_again_in(ended.app, seconds)
            if word == "stale":
                continue  # another message has started it, and what there is may be that one's
        if ended.has_mark and (mark := ended.call.mark):
            marks.setdefault(ended.app, []).append(mark)
        if ended.failure is not None:
            failures.setdefault(ended.app, []).append(ended.failure)
    _free(marks, free_all)
    _free(failures, forget_done)


def _free(what: Mapping[Celery, list[T]], free: Callable[[Any, list[T]], Exception | None]) -> None:
    for app, of_app in what.items():
        between_forks.give_way()
        error = free(client_for(app), of_app)
        if isinstance(error, LockUnavailable):
            raise error
        if error is not None:
            logger.warning("Marks of calls that have ended are not freed, and lapse by themselves: %s", error)


def _survive(free: Callable[[], object]) -> object:
    """One request's trouble must not end the watch over all the others: it is done with."""
    try:
        return free()
    except LockUnavailable:
        raise
    except Exception:
        logger.exception("The lock of a call that has ended was not freed; its lease ends it.")
        return True


def cleanup_of_process() -> Cleanup:
    """The one of this process, made at first use: threads do not survive a fork."""
    pid = os.getpid()
    cleanup = _of_process.get(pid)
    if cleanup is None:
        cleanup = _of_process.setdefault(pid, Cleanup())
    return cleanup


_of_process: dict[int, Cleanup] = {}
