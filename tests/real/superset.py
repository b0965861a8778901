"""Superset: a class of settings, the app's own task class that calls its base by name, annotations.

Its default broker and results are SQLite; most run it on Redis.
"""

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from celery import Celery

from tests import app as tests_app  # noqa: F401 - it journals
from tests.real_configurations import Configuration

URL = os.environ["SETNX_TEST_URL"]


class CeleryConfig:
    """Its docker image's, with the annotations of its default."""

    broker_url = f"{URL}/2"
    result_backend = f"{URL}/3"
    imports = ("tests.real.superset",)
    worker_log_level = "DEBUG"
    worker_prefetch_multiplier = 1
    task_acks_late = False
    task_annotations = {
        "real.plain": {"rate_limit": "100/s"},
        "real.base.wait": {"rate_limit": "100/s"},
        "real.base.raise": {
            "rate_limit": "1/s",
            "time_limit": int(timedelta(seconds=120).total_seconds()),
            "soft_time_limit": int(timedelta(seconds=110).total_seconds()),
            "ignore_result": True,
        },
    }
    beat_schedule: dict[str, Any] = {}


@contextmanager
def app_context():
    yield


app = Celery()
app.config_from_object(CeleryConfig)
app.set_default()
task_base = app.Task


class AppContextTask(task_base):
    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with app_context():
            return task_base.__call__(self, *args, **kwargs)


app.Task = AppContextTask
CONFIGURATION = Configuration(
    app, calls=[{}, {"expires": 3600}, {"countdown": 0.3}], options={"soft_time_limit": 60}
)
