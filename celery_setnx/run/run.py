"""Running an attempt, and the attempts that run in this process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Task
from celery._state import _task_stack
from celery.app.task import Context

from celery_setnx.exceptions import LockUnavailable
from celery_setnx.lock.held import HeldLock
from celery_setnx.log import Log
from celery_setnx.run.attempt import Attempt
from celery_setnx.run.give_back import end_attempt, give_back

logger = Log("celery_setnx")

RUNNING: dict[int, Attempt] = {}
"""The attempts that run in this process, by their ids."""


def run(attempt: Attempt, body: Callable[[], Any]) -> Any:
    """The body's result, or what the call ends with instead; lock, mark and place are given back."""
    attempt.request._setnx_run = RUNNING[id(attempt)] = attempt
    try:
        return _given_back(attempt, body)
    except (SoftTimeLimitExceeded, LockUnavailable) as error:
        if not attempt.has_begun and getattr(error, "unsent", True):
            end_attempt(attempt)  # a message of it may wait in line, or be on its way
        raise
    finally:  # the same request may run another body, with a lock of its own
        del attempt.request._setnx_run
        RUNNING.pop(id(attempt), None)


def _given_back(attempt: Attempt, body: Callable[[], Any]) -> Any:
    error: BaseException | None = None
    try:
        return attempt.decided(body)
    except BaseException as raised:
        error = raised
        raise
    finally:
        give_back(attempt, error)


def lock_of(task: Task) -> HeldLock | None:
    """The lock that the task's running call holds, or None where it is not guarded."""
    request = task.request_stack.top
    if request is None:
        warn_of_thread(task)
    held = getattr(request, "setnx_lock", None)
    return held if isinstance(held, HeldLock) else None


def warn_of_thread(task: Task | None) -> None:
    """Warn, once for each running call, that a thread without a call has asked for its lock.

    Mostly the body has started that thread, and the thread's work is not fenced. It is no error: another
    thread of the process may call the body directly. Without a task the warning is about all tasks.
    """
    if _task_stack.top is not None:  # the thread runs a call, of another task
        return
    untold = [run for run in list(RUNNING.values()) if not run.is_told and (task is None or run.task is task)]
    for run in untold:
        run.is_told = True
    if untold:
        text = "%s runs, and thread %s asked for its lock, which is None in other threads: the work of that "
        text += "thread is not fenced. Pass it the lock of the body, lock = self.lock."
        logger.warning(text, untold[0], threading.current_thread().name)


def is_running(request: Context) -> bool:
    """Whether an attempt of this request runs: a body that it calls directly runs under its lock."""
    return id(vars(request).get("_setnx_run")) in RUNNING
