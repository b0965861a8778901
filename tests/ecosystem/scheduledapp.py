"""The app of workers and beats with a library's schedule, and of those that store results in Django's tables.

The tests import it too, with results in Redis: they need no Django.
"""

from typing import Any

from celery_setnx import SingletonTask
from tests.app import URL, body, make_app

QUEUE = "scheduled"
app = make_app(
    "scheduled",
    result_extended=True,
    redbeat_redis_url=f"{URL}/0",
    redbeat_redis_options={"socket_timeout": 60},  # else the broker's
    redbeat_key_prefix="ecosystem-redbeat:",
    beat_max_loop_interval=1,
    redbeat_lock_timeout=600,  # else a beat that stands still for five seconds ends
)


def job(name: str, **singleton: Any) -> Any:
    """A task with a lock for each name."""
    options = {"base": SingletonTask, "name": f"scheduled.{name}", "shared": False}
    return app.task(**options, singleton={"key": "name", "lease": 600, **singleton})(work)


def work(name: str, gate: str = "") -> str:
    return body(gate or name)


slow = job("slow")
patient = job("patient", on_conflict="wait", retry_delay=0.1)
strict = job("strict", on_conflict="raise")
