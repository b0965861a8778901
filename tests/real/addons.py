"""Mozilla's addons-server: many queues, results that are ignored, receivers that time each task.

Its app's task class publishes on commit, and returns nothing.
"""

import os
import time
from functools import partial
from typing import Any

SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
URL = os.environ["SETNX_TEST_URL"]
CACHES = {"default": {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": f"{URL}/4"}}
USE_TZ = True
LOGGING_CONFIG = None

from kombu import Queue  # noqa: E402

CELERY_BROKER_URL = f"{URL}/2"
CELERY_BROKER_CONNECTION_TIMEOUT = 0.1
CELERY_BROKER_HEARTBEAT = 60 * 15
CELERY_TASK_DEFAULT_QUEUE = "default"
CELERY_RESULT_BACKEND = f"{URL}/3"
CELERY_TASK_IGNORE_RESULT = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = True  # so that the harness can read its log
CELERY_WORKER_DISABLE_RATE_LIMITS = True
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SERIALIZER = "json"
CELERY_RESULT_SERIALIZER = "json"
CELERY_TASK_EAGER_PROPAGATES = True
CELERY_TASK_SOFT_TIME_LIMIT = 60 * 30
CELERY_TASK_QUEUES = tuple(
    Queue(name, routing_key=name) for name in ("addons", "amo", "cron", "default", "devhub", "priority")
)
CELERY_TASK_ROUTES = {
    **{f"celery.{name}": {"queue": "default"} for name in ("accumulate", "chain", "chord", "group", "map")},
    "celery.chord_unlock": {"queue": "devhub"},
    "real.base.wait": {"queue": "priority"},
    "real.base.retry": {"queue": "devhub"},
    "real.base.canvas_wait": {"queue": "addons"},
    "real.decorator.retry": {"queue": "cron"},
}
os.environ["DJANGO_SETTINGS_MODULE"] = __name__

from celery import Celery  # noqa: E402
from celery.app.task import Task  # noqa: E402
from celery.signals import task_failure, task_postrun, task_prerun  # noqa: E402
from django.core.cache import cache  # noqa: E402
from django.db import transaction  # noqa: E402

from tests import app as tests_app  # noqa: E402, F401 - it journals
from tests.real_configurations import Configuration  # noqa: E402


class OnCommit(Task):  # type: ignore[misc]
    """The task class of the app: publishes on commit, and returns nothing."""

    abstract = True

    def publish(self, *args: Any, **options: Any) -> Any:
        return super().apply_async(*args, **options)

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> None:
        transaction.on_commit(partial(self.publish, args, kwargs, **options))


class Monitored(OnCommit):
    """Would come back without its body while a service is down."""

    abstract = True
    is_down = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_down:
            return self.retry(countdown=3600)
        return super().__call__(*args, **kwargs)


app = Celery("olympia", task_cls=OnCommit)
app.config_from_object("django.conf:settings", namespace="CELERY")


@task_failure.connect
def note_failure(task_id: str, exception: Any, **_: Any) -> None:
    cache.set(f"failed-{task_id}", repr(exception))


@task_prerun.connect
def start_timer(task_id: str, **_: Any) -> None:
    cache.set(f"began-{task_id}", time.time(), 3600)


@task_postrun.connect
def stop_timer(task_id: str, **_: Any) -> None:
    cache.delete(f"began-{task_id}")


CONFIGURATION = Configuration(app, Monitored, calls=[{}, {"expires": 3600}, {"countdown": 0.3}])
