"""Tasks whose messages are delivered again, and whose results nobody stores, on an app of their own."""

from typing import Any

from celery import current_task

from celery_setnx import SingletonTask
from tests.app import body, control, journal, make_app

__all__ = ["app", "control", "journal"]

BROKER_DB = 15
app = make_app(
    "againapp",
    BROKER_DB,
    broker_transport_options={"polling_interval": 0.1},
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=10,
)
OPTIONS = {"key": "name", "lease": 600, "retry_delay": 0.1, "retry_delay_max": 0.2}


def run(name: str, ends: str = "well") -> str:
    """Run, and end as it is told."""
    task = current_task
    body(name)
    if ends == "retried" and not task.request.retries:
        raise task.retry(countdown=0.3)
    if ends == "failing":
        raise ValueError(name)
    return name


def variant(name: str, **options: Any) -> Any:
    """A task with this function and these options."""
    return app.task(base=SingletonTask, name=name, singleton={**OPTIONS, **options})(run)


skips = variant("skips")
waits = variant("waits", on_conflict="wait")
retries = variant("retries", on_conflict="retry")
daily = variant("daily", dedupe="until_done", dedupe_for=3600)
holds = variant("holds", hold_on_retry=True)
several = variant("several", limit=2)
paced = variant("paced", rate=(1, 0.5))


@app.task(name="after", acks_late=False)
def after(name: str) -> None:
    """What follows."""
    journal.write("after", name=name)
