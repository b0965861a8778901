"""PostHog: Django with a namespace, queues by an enum, no pool of connections, results that are ignored.

Its tasks push metrics from a `__call__` that runs the body itself, with a registry of the thread.
"""

import os
import threading
import time
from datetime import timedelta
from enum import Enum
from typing import Any

from celery import Celery, Task, shared_task
from celery.signals import task_failure, task_postrun, task_prerun, task_retry, task_success
from django.conf import settings
from kombu import Exchange, Queue

from tests import app as tests_app  # noqa: F401 - it journals
from tests.real_configurations import Configuration

REDIS_URL = f"{os.environ['SETNX_TEST_URL']}/2"


class CeleryQueue(Enum):
    DEFAULT = "celery"
    STATS = "stats"
    EMAIL = "email"
    LONG_RUNNING = "long_running"
    ANALYTICS_QUERIES = "analytics_queries"
    FEATURE_FLAGS = "feature-flags"


settings.configure(
    INSTALLED_APPS=[],
    USE_TZ=True,
    TIME_ZONE="UTC",
    CELERY_QUEUES=(Queue("celery", Exchange("celery"), "celery"),),
    CELERY_DEFAULT_QUEUE="celery",
    CELERY_IMPORTS=[],
    CELERY_BROKER_URL=REDIS_URL,
    CELERY_BEAT_MAX_LOOP_INTERVAL=30,
    CELERY_RESULT_BACKEND=REDIS_URL,
    CELERY_IGNORE_RESULT=True,
    CELERY_RESULT_EXPIRES=timedelta(days=4),
    CELERY_TASK_CREATE_MISSING_QUEUES=True,
    REDBEAT_LOCK_TIMEOUT=45,
)
app = Celery("posthog")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
app.conf.broker_pool_limit = 0
app.set_current()

counters: dict[str, int] = {}
begun: dict[str, float] = {}


@task_prerun.connect
def tag_queries(task_id: str, task: Task, **_details: Any) -> None:
    begun[task_id] = time.time()
    counters[f"pre_run {task.name}"] = counters.get(f"pre_run {task.name}", 0) + 1


@task_postrun.connect
def observe(task_id: str, task: Task, **_details: Any) -> None:
    counters[f"seconds {task.name}"] = int(time.time() - begun.pop(task_id))


@task_success.connect
@task_failure.connect
@task_retry.connect
def count(sender: Task, **_details: Any) -> None:
    counters[sender.name] = counters.get(sender.name, 0) + 1


class PushGatewayTask(Task):
    abstract = True
    _local = threading.local()

    @property
    def metrics_registry(self) -> Any:
        return self._local.registry

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._local.registry = object()
        try:
            return self.run(*args, **kwargs)
        finally:
            self._local.registry = None


CONFIGURATION = Configuration(
    app,
    PushGatewayTask,
    make=lambda **options: shared_task(**{**options, "shared": True}),
    calls=[
        {},
        {"queue": CeleryQueue.STATS.value},
        {"queue": CeleryQueue.FEATURE_FLAGS.value, "priority": 0},
        {"expires": 120, "priority": 9},
    ],
    options={"ignore_result": True, "queue": CeleryQueue.LONG_RUNNING.value},
    worker={"queues": ",".join(queue.value for queue in CeleryQueue), "arguments": ("-O", "fair")},
)
