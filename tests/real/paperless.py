"""Paperless-ngx: Django, pickles, results in the database, a child for each task, and a table of its tasks.

Receivers of Celery's signals keep that table: one row a task id, made when a call is published.
"""

import logging
import os
from pathlib import Path
from typing import Any

SECRET_KEY = "x"
INSTALLED_APPS = ["django_celery_results"]
FILE = Path(os.environ["SETNX_TEST_DIRECTORY"], "paperless.sqlite3")
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": FILE,
        "OPTIONS": {"timeout": 60},
    }
}
USE_TZ = True
TIME_ZONE = "UTC"
LOGGING_CONFIG = None

CELERY_BROKER_URL = f"{os.environ['SETNX_TEST_URL']}/2"
CELERY_TIMEZONE = TIME_ZONE
CELERY_WORKER_HIJACK_ROOT_LOGGER = True  # so that the harness can read its log
CELERY_WORKER_MAX_TASKS_PER_CHILD = 1
CELERY_WORKER_SEND_TASK_EVENTS = True
CELERY_TASK_SEND_SENT_EVENT = True
CELERY_SEND_TASK_SENT_EVENT = True
CELERY_BROKER_CONNECTION_RETRY = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"global_keyprefix": "paperless"}
CELERY_TASK_TRACK_STARTED = True
CELERY_TASK_TIME_LIMIT = 1800
CELERY_RESULT_EXTENDED = True
CELERY_RESULT_BACKEND = "django-db"
CELERY_CACHE_BACKEND = "default"
CELERY_TASK_SERIALIZER = "pickle"
CELERY_ACCEPT_CONTENT = ["application/json", "application/x-python-serialize"]
CELERY_SETNX_URL = f"{os.environ['SETNX_TEST_URL']}/1"

os.environ["DJANGO_SETTINGS_MODULE"] = __name__

import django  # noqa: E402
from celery import Celery, signals, states  # noqa: E402
from django.core.management import call_command  # noqa: E402
from django.db import close_old_connections, connection, connections  # noqa: E402
from django.db.backends.sqlite3.base import DatabaseWrapper  # noqa: E402

from tests import app as tests_app  # noqa: E402, F401 - it journals
from tests.real_configurations import Configuration  # noqa: E402

logger = logging.getLogger(__name__)
# Its PostgreSQL locks rows; SQLite must lock before it reads, to which Django 5.1 has an option of its own.
DatabaseWrapper._start_transaction_under_autocommit = lambda self: self.cursor().execute("BEGIN IMMEDIATE")
TABLE = "create table if not exists tasks (task_id text unique, status text, result text)"

app = Celery("paperless")
app.config_from_object("django.conf:settings", namespace="CELERY")
django.setup()
if not FILE.exists():
    call_command("migrate", verbosity=0)
    connection.cursor().execute(TABLE)
    connections.close_all()


def execute(statement: str, *values: Any) -> None:
    try:
        close_old_connections()
        connection.cursor().execute(statement, values)
    except Exception:
        logger.exception("The row of a task was not written: %s", statement)


@signals.before_task_publish.connect
def add_row(headers: Any, **_: Any) -> None:
    """A second message of a task has none: that is logged."""
    if headers["task"].startswith("real."):
        execute("insert into tasks values (%s, %s, null)", headers["id"], states.PENDING)


@signals.task_prerun.connect
def start_row(task_id: str, **_: Any) -> None:
    execute("update tasks set status = %s where task_id = %s", states.STARTED, task_id)


@signals.task_postrun.connect
def end_row(task_id: str, retval: Any, state: Any, **_: Any) -> None:
    execute("update tasks set status = %s, result = %s where task_id = %s", state, str(retval), task_id)


@signals.worker_process_init.connect
def leave_parents_connections(**_: Any) -> None:
    for each in connections.all(initialized_only=True):
        each.close()


CONFIGURATION = Configuration(
    app,
    calls=[{}, {"expires": 3600}, {"countdown": 0.3}],
)
