"""When STARTED is stored (`task_track_started`): as a body begins.

Celery stores it for each message, before the lock is asked for. A message that starts nothing would leave
STARTED in place of the result of a call that has ended.
"""

from __future__ import annotations

import os

from celery import Task
from celery.app.task import Context
from celery.states import STARTED


class _AsBodiesBegin:
    """A task's `track_started` which Celery takes for False."""

    def __bool__(self) -> bool:
        return False


_AS_BODIES_BEGIN = _AsBodiesBegin()


def track_bodies(task: Task | type[Task]) -> None:
    """Have STARTED stored by `store_started`, and not by Celery; before the task has run."""
    if task.track_started:
        task.track_started = _AS_BODIES_BEGIN


def store_started(task: Task, request: Context) -> None:
    """Store that a body begins, as Celery does; whatever the result backend raises is raised."""
    if task.track_started is not _AS_BODIES_BEGIN or request.is_eager:
        return
    if request.ignore_result or task.ignore_result:
        return
    about = {"pid": os.getpid(), "hostname": request.hostname}
    task.backend.store_result(request.id, about, STARTED, request=request)
