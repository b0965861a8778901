"""The tasks of the workers that another library watches."""

from typing import Any

from celery import current_task

from celery_setnx import SingletonTask
from tests.app import body, make_app
from tests.ecosystem.play import QUEUE

BROKER_DB = 4
LOCKED = {"key": "name", "lease": 600, "retry_delay": 0.3, "retry_delay_max": 0.3}

app = make_app("watched", BROKER_DB, task_default_queue=QUEUE)


def gated(name: str, gate: str = "") -> str:
    """Waits for its gate, if it is told one."""
    return body(gate)


def guarded(name: str, send_events: bool = True, **options: Any) -> Any:
    """A task with a lock for each name."""
    about = {"name": f"watched.{name}", "send_events": send_events, "singleton": {**LOCKED, **options}}
    return app.task(base=SingletonTask, **about)(gated)


waits = guarded("waits", on_conflict="wait")
skips = guarded("skips", on_conflict="skip", scope="watched.waits")
quiet = guarded("quiet", send_events=False, on_conflict="skip", scope="watched.waits")
retries = guarded("retries", on_conflict="retry", scope="watched.waits")
refuses = guarded("refuses", on_conflict="raise", scope="watched.waits")
once = guarded("once", dedupe="until_started")


@app.task(base=SingletonTask, name="watched.fails", singleton=LOCKED)
def fails(name: str) -> None:
    """An error of the body's own."""
    raise ZeroDivisionError(name)


@app.task(name="watched.expects", throws=(KeyError,))
def expects() -> None:
    """A plain task that fails with what it says it throws."""
    raise KeyError("expected")


@app.task(name="watched.front")
def front(task: str, *args: str) -> str:
    """Publishes a call, as a request of a site does: each in a trace of its own."""
    return str(app.tasks[task].delay(*args).id)


@app.task(name="watched.announces")
def announces(event: str = "") -> bool:
    """A plain task, which may send an event of its own."""
    if event:
        current_task.send_event(event, percent=50)
    return True
