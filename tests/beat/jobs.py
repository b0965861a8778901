"""The app of the workers that run beat's jobs."""

from typing import Any

from celery_setnx import SingletonTask
from tests.app import body, make_app
from tests.beat.beats import JOBS_QUEUE

app = make_app("jobs", task_default_queue=JOBS_QUEUE)


def job(name: str, **options: Any) -> Any:
    """A task with a lock for each name."""
    singleton = {"key": "name", "lease": 2, "retry_delay": 0.1, "retry_delay_max": 0.5, **options}
    return app.task(base=SingletonTask, shared=False, name=f"jobs.{name}", singleton=singleton)


@job("slow")
def slow(name: str) -> str:
    """Skips while it runs."""
    return body(name)


@job("follow", dedupe="until_started")
def follow(name: str) -> str:
    """Runs once more after the run, if it was called meanwhile."""
    return body(name)


@job("rest", at_least_for=0.9)
def rest(name: str) -> str:
    """Rests until just before the next tick."""
    return body(name)
