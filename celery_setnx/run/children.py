"""The worker's children: their deaths are noticed within a fraction of a second, to free their locks."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from celery_setnx.forks import between_forks
from celery_setnx.lock.process import has_ended

logger = logging.getLogger("celery_setnx")

LOOK_S = 0.2
KEEP_S = 60.0


class ChildWatch:
    """Notices within a fraction of a second that a child which runs a guarded task has died.

    Celery may take seconds to notice. A thread, because the parent's event loop must wait for no Redis.
    """

    def __init__(self) -> None:
        self._running: WeakSet[Any] = WeakSet()
        self._kept: dict[Any, float] = {}
        self._changed = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, request: Any) -> None:
        """Watch the child of a request for as long as the request lives."""
        self._running.add(request)
        if self._thread is None:
            self._thread = in_thread(self._run)
        if not self._changed.is_set():
            self._changed.set()

    def keep(self, request: Any) -> None:
        """Watch on although Celery has done with the request: its child has died, or is about to."""
        if request in self._running:
            self._kept[request] = time.monotonic() + KEEP_S

    def _run(self) -> None:
        while True:
            self._changed.wait()
            self._changed.clear()
            # Sleep before the first look: a stream of short tasks wakes this thread five times a second.
            time.sleep(LOOK_S)
            while self._look():
                time.sleep(LOOK_S)

    def _look(self) -> bool:
        """Free the locks of the dead; true while there is anybody to look at."""
        try:
            requests = list(self._running)
        except RuntimeError:  # changed by the main thread meanwhile
            return True
        for request in requests:
            if request.worker_pid and has_ended(request.worker_pid):
                self._running.discard(request)
                self._kept.pop(request, None)
                survive(request.free_dead)
        for request, until in list(self._kept.items()):
            if time.monotonic() > until:
                self._kept.pop(request, None)
        return bool(requests)


def survive(free: Callable[[], object]) -> None:
    """One request's trouble must not end the watch over all the others."""
    try:
        with between_forks:
            free()
    except Exception:
        logger.exception("The lock of a dead child was not freed; its lease ends it.")


def watch_of_process() -> ChildWatch:
    """The watch of this process, made at first use: threads do not survive a fork."""
    pid = os.getpid()
    watch = _watches.get(pid)
    if watch is None:
        watch = _watches.setdefault(pid, ChildWatch())
    return watch


_watches: dict[int, ChildWatch] = {}


def in_thread(function: Callable[[], None]) -> threading.Thread:
    """The parent's event loop must wait neither for a child's end nor for Redis."""
    thread = threading.Thread(target=function, name="celery_setnx-request", daemon=True)
    thread.start()
    return thread
