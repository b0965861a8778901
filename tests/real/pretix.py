"""Pretix: queues on one direct exchange, with routing keys that look like patterns; a trace in a header.

Its base classes put an object in place of an id, and publish on commit.
"""

import os
import threading
import time
from typing import Any

SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
USE_TZ = True
LOGGING_CONFIG = None
from kombu import Queue  # noqa: E402

CELERY_BROKER_URL = f"{os.environ['SETNX_TEST_URL']}/2"
CELERY_RESULT_BACKEND = f"{os.environ['SETNX_TEST_URL']}/3"
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 3600}
CELERY_TASK_SERIALIZER = "json"
CELERY_RESULT_SERIALIZER = "json"
CELERY_TASK_DEFAULT_QUEUE = "default"
CELERY_TASK_QUEUES = (
    Queue("default", routing_key="default.#"),
    Queue("checkout", routing_key="checkout.#"),
    Queue("mail", routing_key="mail.#"),
    Queue("background", routing_key="background.#"),
    Queue("notifications", routing_key="notifications.#"),
)
CELERY_TASK_ROUTES = (
    [
        ("real.base.wait*", {"queue": "checkout"}),
        ("real.base.retry*", {"queue": "background"}),
        ("real.base.canvas*", {"queue": "mail"}),
        ("real.decorator.*", {"queue": "notifications"}),
    ],
)
os.environ["DJANGO_SETTINGS_MODULE"] = __name__

from celery import Celery, signals  # noqa: E402
from django.db import transaction  # noqa: E402
from django.dispatch import receiver  # noqa: E402

from tests import app as tests_app  # noqa: E402, F401 - it journals
from tests.real_configurations import Configuration  # noqa: E402

trail = threading.local()
app = Celery("pretix")
app.config_from_object("django.conf:settings", namespace="CELERY")


@receiver(signals.before_task_publish)
def send_trail(headers: Any, **_: Any) -> None:
    """The header is overwritten, whoever publishes."""
    headers["X-Trail"] = " ".join([*getattr(trail, "before", ()), getattr(trail, "now", "")])


@receiver(signals.task_received)
def read_trail(request: Any, **_: Any) -> None:
    request._request_dict["X-Trail"].split()


@receiver(signals.task_prerun)
def follow_trail(task_id: str, task: Any, **_: Any) -> None:
    trail.now, trail.before = task_id, (task.request.headers or {}).get("X-Trail", "").split()


@receiver(signals.task_postrun)
def leave_trail(**_: Any) -> None:
    trail.now, trail.before = "", []


class Event(str):
    """What the database has of an id."""


class Timed(app.Task):  # type: ignore[name-defined,misc]
    """Measures its bodies, and counts their ends."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        try:
            return super().__call__(*args, **kwargs)
        finally:
            self.took_s = time.perf_counter() - began

    def on_failure(self, exc: Any, *args: Any) -> Any:
        self.is_expected = isinstance(exc, self.throws)
        return super().on_failure(exc, *args)


class OfEvent(app.Task):  # type: ignore[name-defined,misc]
    """Its body gets an object for an id."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "name" in kwargs:
            kwargs["name"] = Event(kwargs["name"])
        else:
            args = (Event(args[0]), *args[1:])
        return super().__call__(*args, **kwargs)


class OnCommit(Timed, OfEvent):
    """Is published when a transaction ends; whoever publishes gets nothing."""

    def apply_async(self, *args: Any, **options: Any) -> None:
        transaction.on_commit(lambda: super(OnCommit, self).apply_async(*args, **options))


CONFIGURATION = Configuration(
    app,
    OnCommit,
    calls=[{}, {"queue": "mail"}, {"countdown": 0.3}],
    options={"acks_late": True, "max_retries": 9, "default_retry_delay": 900},
)
