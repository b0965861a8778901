"""Open edX: Django settings by their old names, the old protocol, queues as a mapping, gzip, a router.

Its base classes log each call and keep the failed ones; receivers read the body of what is published, and put
a trace on each request.
"""

import json
import logging
import os
from typing import Any

import django
from celery import Celery, Task
from celery.signals import before_task_publish, task_postrun, task_prerun
from django.conf import settings

from tests import app as tests_app
from tests.real_configurations import Configuration

URL = os.environ["SETNX_TEST_URL"]
HIGH, DEFAULT, LOW, HIGH_MEM = (f"edx.lms.core.{name}" for name in ("high", "default", "low", "high_mem"))
logger = logging.getLogger("openedx")

settings.configure(
    INSTALLED_APPS=["django_celery_results"],
    DATABASES={},
    USE_TZ=True,
    TIME_ZONE="UTC",
    CACHES={
        "celery": {
            "BACKEND": "django.core.cache.backends.filebased.FileBasedCache",
            "LOCATION": os.path.join(os.environ["SETNX_TEST_DIRECTORY"], "cache"),
        }
    },
    BROKER_URL=f"{URL}/2",
    BROKER_POOL_LIMIT=0,
    BROKER_CONNECTION_TIMEOUT=1,
    BROKER_HEARTBEAT=60.0,
    BROKER_HEARTBEAT_CHECKRATE=2,
    CELERY_RESULT_BACKEND="django-cache",
    CELERY_CACHE_BACKEND="celery",
    CELERY_TASK_SERIALIZER="json",
    CELERY_RESULT_SERIALIZER="json",
    CELERY_MESSAGE_COMPRESSION="gzip",
    CELERY_IGNORE_RESULT=False,
    CELERY_STORE_ERRORS_EVEN_IF_IGNORED=True,
    CELERY_TRACK_STARTED=True,
    CELERY_SEND_EVENTS=True,
    CELERY_SEND_TASK_SENT_EVENT=True,
    CELERY_DEFAULT_EXCHANGE="edx.lms.core",
    CELERY_DEFAULT_EXCHANGE_TYPE="direct",
    CELERY_DEFAULT_QUEUE=DEFAULT,
    CELERY_DEFAULT_ROUTING_KEY=DEFAULT,
    CELERY_QUEUES={HIGH: {}, DEFAULT: {}, LOW: {}, HIGH_MEM: {}},
    CELERY_ROUTES="tests.real.openedx.route_task",
    CELERY_CREATE_MISSING_QUEUES=True,
    CELERYD_HIJACK_ROOT_LOGGER=True,
    CELERYD_PREFETCH_MULTIPLIER=1,
    EXPLICIT_QUEUES={"real.base.wait": {"queue": HIGH}, "real.base.retry": {"queue": LOW}},
)
django.setup()
app = Celery("proj")
app.config_from_object("django.conf:settings")
app.autodiscover_tasks()
app.conf.task_protocol = 1
app.conf.setnx_url = f"{URL}/1"


def route_task(name: str, args: Any, kwargs: Any, options: Any, task: Any = None, **_more: Any) -> Any:
    """A mapping, the name of a queue, or nothing."""
    return settings.EXPLICIT_QUEUES.get(name) or (HIGH_MEM if name.endswith("join") else None)


@before_task_publish.connect
def create_user_task(sender: str, body: Any, headers: Any, **_details: Any) -> None:
    """What is published is of the first protocol: a mapping."""
    if sender.startswith("real") and not (isinstance(body, dict) and body["task"] == sender and body["id"]):
        tests_app.journal.write("unread", sender=sender, body=repr(body))


@task_prerun.connect
def start_celery_trace(task_id: str, task: Task, args: Any, kwargs: Any, **_details: Any) -> None:
    task.request.trace = {"celery.queue": task.request.delivery_info.get("exchange"), "is": object()}


@task_postrun.connect
def end_celery_trace(task: Task, state: str, **_details: Any) -> None:
    assert task.request.trace


class LoggedTask(Task):
    abstract = True

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> Any:
        result = super().apply_async(args=args, kwargs=kwargs, **options)
        logger.info("Task %s[%s] submitted with arguments %s, %s", self.name, result.id, args, kwargs)
        return result

    def on_retry(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        logger.warning("[%s] retried: %r", task_id, exc)
        super().on_retry(exc, task_id, args, kwargs, einfo)

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        logger.error("[%s] failed due to %r", task_id, exc)
        super().on_failure(exc, task_id, args, kwargs, einfo)


class PersistOnFailureTask(Task):
    abstract = True
    typing = False

    def on_failure(self, exc: Any, task_id: str, args: Any, kwargs: Any, einfo: Any) -> None:
        tests_app.journal.write("kept", task_id=task_id, args=json.dumps(args), kwargs=json.dumps(kwargs))
        super().on_failure(exc, task_id, args, kwargs, einfo)


class LoggedPersistOnFailureTask(PersistOnFailureTask, LoggedTask):
    abstract = True


CONFIGURATION = Configuration(
    app,
    LoggedPersistOnFailureTask,
    calls=[{}, {"routing_key": LOW}, {"countdown": 0.3}, {"queue": HIGH, "priority": 5}],
)
