"""The app of the workers that run beat's jobs."""

from typing import Any

from celery_setnx import SingletonTask
from tests.app import body, make_app
from tests.beat.beats import JOBS_QUEUE

app = make_app("jobs", task_default_queue=JOBS_QUEUE)


def job(name: str, **options: Any) -> Any:
    """A task with a lock for each name."""
    singleton = {"key": "name", "lease": 60, "retry_delay": 0.1, "retry_delay_max": 0.5, **options}
    return app.task(base=SingletonTask, shared=False, name=f"jobs.{name}", singleton=singleton)


slow = job("slow")(body)  # skips while it runs
follow = job("follow", dedupe="until_started")(body)  # runs once more after the run, if called meanwhile
rest = job("rest", at_least_for=0.9)(body)  # rests until just before the next tick
several = job("several", limit=2)(body)  # two at a time; skips while both run
