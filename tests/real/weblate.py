"""Weblate: queues by routes alone, no trail, autoretry for its own locks, receivers with Django's cache."""

import os
from typing import Any

SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
URL = os.environ["SETNX_TEST_URL"]
CACHES = {"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": f"{URL}/4"}}
USE_TZ = True
LOGGING_CONFIG = None
CELERY_TASK_ALWAYS_EAGER = False
CELERY_BROKER_URL = f"{URL}/2"
CELERY_RESULT_BACKEND = CELERY_BROKER_URL
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_CONNECTION_RETRY = True
CELERY_WORKER_MAX_MEMORY_PER_CHILD = 250000
CELERY_TASK_ROUTES = {
    "real.base.wait*": {"queue": "translate"},
    "real.base.retry*": {"queue": "notify"},
    "real.base.canvas*": {"queue": "backup"},
    "real.decorator.*": {"queue": "memory"},
}
os.environ["DJANGO_SETTINGS_MODULE"] = __name__

from celery import Celery  # noqa: E402
from celery.contrib.django.task import DjangoTask  # noqa: E402
from celery.signals import before_task_publish, task_failure, worker_before_create_process  # noqa: E402
from django.core.cache import cache  # noqa: E402

from tests import app as tests_app  # noqa: E402, F401 - it journals
from tests.real_configurations import Configuration  # noqa: E402

Celery.__class_getitem__ = classmethod(lambda cls, *args, **kwargs: cls)
DjangoTask.__class_getitem__ = classmethod(lambda cls, *args, **kwargs: cls)
app = Celery[DjangoTask[..., Any]]("weblate")
app.config_from_object("django.conf:settings", namespace="CELERY")


class LockTimeoutError(Exception):
    """Its own lock's."""


@worker_before_create_process.connect
def load(**_: Any) -> None:
    """The parent has a connection when it forks."""
    cache.get("loaded")


@before_task_publish.connect
def note_task(headers: Any, body: Any, **_: Any) -> None:
    _args, kwargs, _embedded = body
    cache.set(f"task-{headers['id']}", kwargs.get("component_id"), 3600)


@task_failure.connect
def note_failure(task_id: str, exception: Any, **_: Any) -> None:
    cache.set(f"failed-{task_id}", str(exception), 3600)


CONFIGURATION = Configuration(
    app,
    worker={
        "queues": "celery,notify,memory,translate,backup",
        "arguments": ("--prefetch-multiplier", "1"),
    },
    calls=[{}, {"expires": 3600}, {"countdown": 0.3}],
    options={"trail": False, "autoretry_for": (LockTimeoutError,), "retry_backoff_max": 3600},
)
