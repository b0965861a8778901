"""The tasks of `tests.waitapp` after a deploy: one is plain, one has lost a parameter, others are gone."""

from typing import Any

from celery import Celery

from celery_setnx import SingletonTask
from tests.app import body, make_app

app: Celery = make_app("later")
WAITS = {"key": "name", "on_conflict": "wait", "lease": 600}


@app.task(bind=True, name="tests.waitapp.work")
def work(self: Any, name: str, gate: str = "") -> Any:
    """Guarded before."""
    body(gate)
    return [name, gate, self.request.retries]


@app.task(
    base=SingletonTask,
    name="tests.waitapp.silent",
    singleton={"key": "name", "on_conflict": "wait", "lease": 600},
)
def silent(name: str) -> str:
    """It had a gate before."""
    return body(name)
