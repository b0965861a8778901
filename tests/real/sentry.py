"""Sentry: old names of settings, the old protocol, pickles, no results, a router that takes turns.

Its task class adds to each call, publishes past its parents, and has a Request of its own. Its decorator of
tasks wraps each function, and then each method of the task.
"""

import functools
import itertools
import os
import time
from types import SimpleNamespace
from typing import Any

from celery import VERSION, Celery, Task
from celery.worker.request import Request
from kombu import Exchange, Queue

from celery_setnx import SingletonTask
from celery_setnx.request import SingletonRequest
from tests import app as tests_app  # noqa: F401 - it journals
from tests.real_configurations import Configuration

os.environ.setdefault("C_FORCE_ROOT", "1")
URL = os.environ["SETNX_TEST_URL"]
control = Exchange("control", type="direct")

settings = SimpleNamespace(
    BROKER_URL=f"{URL}/2",
    BROKER_TRANSPORT_OPTIONS={},
    CELERY_ALWAYS_EAGER=False,
    CELERY_COMPLAIN_ABOUT_BAD_USE_OF_PICKLE=False,
    CELERY_IGNORE_RESULT=True,
    CELERY_SEND_EVENTS=False,
    CELERY_RESULT_BACKEND=None,
    CELERY_TASK_RESULT_EXPIRES=1,
    CELERY_DISABLE_RATE_LIMITS=True,
    CELERY_DEFAULT_QUEUE="default",
    CELERY_DEFAULT_EXCHANGE="default",
    CELERY_DEFAULT_EXCHANGE_TYPE="direct",
    CELERY_DEFAULT_ROUTING_KEY="default",
    CELERY_CREATE_MISSING_QUEUES=True,
    CELERY_REDIRECT_STDOUTS=False,
    CELERYD_HIJACK_ROOT_LOGGER=True,
    CELERY_TASK_SERIALIZER="pickle",
    CELERY_RESULT_SERIALIZER="pickle",
    CELERY_ACCEPT_CONTENT={"pickle"},
    CELERY_TASK_PROTOCOL=1,
    CELERY_ROUTES=("tests.real.sentry.SplitQueueTaskRouter",),
    CELERY_QUEUES=[
        Queue("activity.notify", routing_key="activity.notify"),
        Queue("default", routing_key="default"),
        Queue("incidents", routing_key="incidents"),
        Queue("incidents", routing_key="incidents"),
        Queue("events.save_event", routing_key="events.save_event"),
        Queue("events.save_event_1", routing_key="events.save_event_1"),
        Queue("events.save_event_2", routing_key="events.save_event_2"),
        Queue("nudge.invite_missing_org_members", routing_key="invite_missing_org_members"),
        Queue("appstoreconnect", routing_key="sentry.tasks.app_store_connect.#"),
        Queue("options.control", routing_key="options.control", exchange=control),
    ],
)


# Celery 5.4 cannot retry a call of the first protocol that expires.
EXPIRES = {"expires": 60} if VERSION >= (5, 5) else {}


class SplitQueueTaskRouter:
    """Each message goes to the next queue."""

    def __init__(self) -> None:
        self.queues = itertools.cycle(["events.save_event_1", "events.save_event_2"])

    def route_for_task(self, task: str, *_args: Any, **_kwargs: Any) -> dict[str, str] | None:
        return {"queue": next(self.queues)} if task.startswith("real.base") else None


class SentryTask(Task):
    Request = "tests.real.sentry:SentryRequest"

    @classmethod
    def _add_metadata(cls, kwargs: dict[str, Any] | None) -> None:
        if kwargs is not None:
            kwargs["__start_time"] = time.time()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)

    def delay(self, *args: Any, **kwargs: Any) -> Any:
        self._add_metadata(kwargs)
        return super().delay(*args, **kwargs)

    def apply_async(self, *args: Any, **kwargs: Any) -> Any:
        self._add_metadata(kwargs)
        return Task.apply_async(self, *args, **kwargs)


class SentryRequest(Request):
    def __init__(self, message: Any, **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self._request_dict["headers"] = message.headers


class GuardedRequest(SingletonRequest, SentryRequest):
    """As our documentation says."""


class GuardedTask(SingletonTask, SentryTask):
    abstract = True
    Request = "tests.real.sentry:GuardedRequest"


class SentryCelery(Celery):
    task_cls = SentryTask


app = SentryCelery("sentry", set_as_current=True)
app.config_from_object(settings)
app.conf.setnx_url = f"{URL}/1"


def instrumented_task(**kwargs: Any) -> Any:
    def wrapped(func: Any) -> Any:
        @functools.wraps(func)
        def _wrapped(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("__transaction_id", None)
            kwargs.pop("__start_time", None)
            return func(*args, **kwargs)

        kwargs["trail"] = False
        task = app.task(**kwargs)(_wrapped)
        for name in ("delay", "apply_async", "s", "signature", "retry", "apply", "run"):
            setattr(task, name, limited(getattr(task, name)))
        return task

    return wrapped


def limited(method: Any) -> Any:
    """Its silo is the right one."""

    @functools.wraps(method)
    def override(*args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    return override


CONFIGURATION = Configuration(
    app,
    SentryTask,
    GuardedTask,
    make=instrumented_task,
    calls=[
        {},
        {"queue": "nudge.invite_missing_org_members"},
        {"queue": "options.control", **EXPIRES},
        {"countdown": 0.2},
    ],
)
