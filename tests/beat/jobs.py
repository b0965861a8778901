"""The app of the workers that run beat's jobs. Bodies and journal are workerapp's."""

from typing import Any

from celery import Celery

from celery_setnx import SingletonTask
from tests.beat.beats import JOBS_QUEUE
from tests.workerapp import BROKER_DB, LOCK_DB, URL, body

app = Celery("jobs", broker=f"{URL}/{BROKER_DB}", backend=f"{URL}/{BROKER_DB}")
app.conf.update(
    setnx_url=f"{URL}/{LOCK_DB}",
    setnx_prefix="t",
    task_default_queue=JOBS_QUEUE,
    broker_connection_retry_on_startup=True,
    worker_prefetch_multiplier=1,
)

LEASE: dict[str, Any] = {"key": "name", "lease": 2, "retry_delay": 0.1, "retry_delay_max": 0.5}


@app.task(base=SingletonTask, shared=False, name="jobs.slow", singleton=LEASE)
def slow(name: str) -> str:
    """Skips while it runs."""
    return body(name)


@app.task(
    base=SingletonTask, shared=False, name="jobs.follow", singleton={**LEASE, "dedupe": "until_started"}
)
def follow(name: str) -> str:
    """Runs once more after the run, if it was called meanwhile."""
    return body(name)


@app.task(base=SingletonTask, shared=False, name="jobs.rest", singleton={**LEASE, "at_least_for": 0.9})
def rest(name: str) -> str:
    """Rests until just before the next tick."""
    return body(name)
