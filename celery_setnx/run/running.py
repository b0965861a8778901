"""The guarded runs of this process: whose lock a body asks for."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from celery import Task
from celery._state import _task_stack
from celery.app.task import Context

from celery_setnx.lock.held import HeldLock
from celery_setnx.log import Log

if TYPE_CHECKING:
    from celery_setnx.run.attempt import Attempt

logger = Log("celery_setnx")

RUNNING: dict[int, Attempt] = {}
"""The attempts of this process that go on, by their own ids."""


def lock_of(task: Task) -> HeldLock | None:
    """The lock that the task's running call holds, or None where it is not guarded."""
    request = task.request_stack.top
    if request is None:
        warn_of_thread(task)
    held = getattr(request, "setnx_lock", None)
    return held if isinstance(held, HeldLock) else None


def warn_of_thread(task: Task | None) -> None:
    """Say, once a call of the task, or of any, that a thread which has none has asked for its lock.

    Mostly the body has started that thread, and what it does is not fenced. It is no error: another thread of
    the process may call the body directly.
    """
    if _task_stack.top is not None:  # it has a call, if of another task
        return
    untold = [run for run in list(RUNNING.values()) if not run.is_told and (task is None or run.task is task)]
    for run in untold:
        run.is_told = True
    if untold:
        text = "%s runs, and thread %s beside it asked for its lock. That is None there, and what the thread "
        text += "does is not fenced: hand it the lock that the body has, lock = self.lock."
        logger.warning(text, untold[0], threading.current_thread().name)


def is_running(request: Context) -> bool:
    """Whether a guarded run of this request goes on: what it calls of the task's runs under its lock."""
    return id(vars(request).get("_setnx_run")) in RUNNING
