"""The app of `tests.watchapp`, with one more task: its pace allows one start an hour."""

from celery_setnx import SingletonTask
from tests.watchapp import app, body


@app.task(base=SingletonTask, singleton={"key": "name", "rate": "1/h", "on_conflict": "skip"})
def paced(name: str) -> str:
    return body(name)
