"""Threads of ours: none ends by an exception, whoever raised it; one that has ended is started anew."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

from celery_setnx.forks import between_forks
from celery_setnx.log import Log

logger = Log("celery_setnx")

_PAUSE_S = 0.05  # before it goes on after an exception; doubled each time
_PAUSE_MAX_S = 1.0


class Lasting:
    """A daemon thread that takes one step after the other, as long as they say that it is to go on.

    `real`: one of the operating system, also under gevent and eventlet. `in_parent`: beside a thread that
    forks. No fork happens during a step, but where that waits or gives way: see `between_forks`.
    """

    def __init__(
        self, name: str, step: Callable[[], bool], *, real: bool = False, in_parent: bool = False
    ) -> None:
        self.runs = False
        self._name, self._step, self._real = name, step, real
        self._at_work = between_forks if in_parent else nullcontext()
        self._starting = threading.Lock()
        self._has_run = False
        self._kept_alive_by: Any = None

    def ensure(self) -> None:
        """See to it that it runs; RuntimeError if no thread can be started."""
        if self.runs:
            return
        with self._starting:
            if self.runs:
                return
            if self._has_run:
                logger.error("The thread %s had died and is restarted.", self._name)
            self.runs = True
            try:
                start = start_real_thread if self._real else _start_thread
                self._kept_alive_by = start(self._run, self._name)
            except BaseException:
                self.runs = False
                raise
            self._has_run = True

    def _run(self) -> None:
        pause_s = _PAUSE_S
        try:
            while True:
                try:
                    with self._at_work:
                        goes_on = self._step()
                    if not goes_on:
                        self._has_run = False  # it was told to end
                        return
                    pause_s = _PAUSE_S
                except BaseException as error:
                    if is_killed(error):
                        raise
                    with suppress(Exception), self._at_work:
                        text = "The thread %s hit an error and continues in %g s."
                        logger.error(text, self._name, pause_s, exc_info=error)
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _PAUSE_MAX_S)
        finally:
            self.runs = False


def is_killed(error: BaseException) -> bool:
    """True of what ends a greenlet from outside: swallowed, it would hang who waits for that end."""
    greenlet = sys.modules.get("greenlet")
    return greenlet is not None and isinstance(error, greenlet.GreenletExit)


def start_real_thread(function: Callable[[], None], name: str) -> Any:
    """Start a daemon thread of the operating system, and return what keeps it alive."""
    green = greenlets()
    if green == "gevent":
        import gevent.threadpool

        pool = gevent.threadpool.ThreadPool(1)
        pool.spawn(function)
        return pool
    if green == "eventlet":
        import eventlet.patcher

        return _start_thread(function, name, eventlet.patcher.original("threading").Thread)
    return _start_thread(function, name)


def greenlets() -> str | None:
    """Which library has replaced the threads of this process by greenlets, if any has."""
    if "gevent.monkey" in sys.modules and sys.modules["gevent.monkey"].is_module_patched("threading"):
        return "gevent"
    if "eventlet.patcher" in sys.modules and sys.modules["eventlet.patcher"].is_monkey_patched("thread"):
        return "eventlet"
    return None


def _start_thread(function: Callable[[], None], name: str, of: type = threading.Thread) -> Any:
    thread = of(target=function, name=name, daemon=True)
    thread.start()
    return thread
