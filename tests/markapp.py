"""The app of `tests.workerapp` with tasks that are deduplicated when they are published."""

from typing import Any

from celery import current_task
from celery.signals import task_prerun

from celery_setnx import Conflict, SingletonTask
from tests.workerapp import app, body, control, journal

DONE = {"key": "name", "lease": 600, "retry_delay": 0.1, "dedupe": "until_done"}
STARTED = {**DONE, "dedupe": "until_started"}


@task_prerun.connect
def stand_still(task_id: str, kwargs: Any, **_details: Any) -> None:
    """A call with `stands=` has been accepted, and has not started."""
    if kwargs.get("stands"):
        journal.write("prerun", task_id=task_id)
        control.blpop([f"gate:{task_id}"], timeout=30)


@app.task(base=SingletonTask, singleton=STARTED)
def started(name: str, stands: bool = False) -> str:
    """At most one is queued."""
    return body(name)


@app.task(base=SingletonTask, acks_late=True, singleton=STARTED)
def late(name: str, stands: bool = False) -> str:
    """At most one is queued; acknowledged when it is done."""
    return body(name)


@app.task(base=SingletonTask, singleton=DONE)
def done(name: str) -> str:
    """At most one is queued or running."""
    return body(name)


@app.task(base=SingletonTask, bind=True, singleton=DONE)
def done_twice(self: Any, name: str, countdown: int = 0) -> str:
    """Retries itself once, by way of a queue that nobody consumes."""
    body(name)
    if not self.request.retries:
        raise self.retry(countdown=countdown, queue="parked")
    return name


@app.task(
    base=SingletonTask,
    autoretry_for=(ZeroDivisionError,),
    retry_kwargs={"max_retries": 1, "countdown": 0, "queue": "parked"},
    singleton=DONE,
)
def done_autoretried(name: str) -> str:
    body(name)
    if not current_task.request.retries:
        raise ZeroDivisionError
    return name


@app.task(base=SingletonTask, bind=True, singleton=DONE)
def done_page(self: Any, name: str) -> str:
    """Retries itself with another argument, and so with another key."""
    body(name)
    if not self.request.retries:
        raise self.retry(args=["next"], countdown=0)
    return name


@app.task(base=SingletonTask, bind=True, singleton=DONE)
def done_lingering(self: Any, name: str) -> str:
    """Publishes its retry, and takes its time to end."""
    try:
        raise self.retry(countdown=0)
    finally:
        body(name)


def busy(conflict: Conflict) -> Any:
    return {"busy": conflict.holder.task_id}


@app.task(base=SingletonTask, singleton={**DONE, "on_conflict": busy})
def done_own_policy(name: str) -> Any:
    return body(name)
