"""cookiecutter-django: its settings, and a receiver of `setup_logging` that configures logging itself."""

import os
from logging.config import dictConfig
from typing import Any

SECRET_KEY = "x"
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}}
USE_TZ = True
TIME_ZONE = "Europe/Berlin"
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {
        "verbose": {"format": "%(levelname)s %(asctime)s %(module)s %(process)d %(thread)d %(message)s"}
    },
    "handlers": {"console": {"level": "DEBUG", "class": "logging.StreamHandler", "formatter": "verbose"}},
    "root": {"level": "INFO", "handlers": ["console"]},
}
CELERY_TIMEZONE = TIME_ZONE
CELERY_BROKER_URL = f"{os.environ['SETNX_TEST_URL']}/2"
CELERY_BROKER_USE_SSL = None
CELERY_RESULT_BACKEND = f"{os.environ['SETNX_TEST_URL']}/2"
CELERY_REDIS_BACKEND_USE_SSL = CELERY_BROKER_USE_SSL
CELERY_RESULT_EXTENDED = True
CELERY_RESULT_BACKEND_ALWAYS_RETRY = True
CELERY_RESULT_BACKEND_MAX_RETRIES = 10
CELERY_ACCEPT_CONTENT = ["json"]
CELERY_TASK_SERIALIZER = "json"
CELERY_RESULT_SERIALIZER = "json"
CELERY_TASK_TIME_LIMIT = 5 * 60
CELERY_TASK_SOFT_TIME_LIMIT = 60
CELERY_WORKER_SEND_TASK_EVENTS = True
CELERY_TASK_SEND_SENT_EVENT = True
CELERY_WORKER_HIJACK_ROOT_LOGGER = False
CELERY_TASK_EAGER_PROPAGATES = True
os.environ["DJANGO_SETTINGS_MODULE"] = __name__

from celery import Celery  # noqa: E402
from celery.signals import setup_logging  # noqa: E402
from django.conf import settings  # noqa: E402

from tests import app as tests_app  # noqa: E402, F401 - it journals
from tests.real_configurations import Configuration  # noqa: E402

app = Celery("my_awesome_project")
app.config_from_object("django.conf:settings", namespace="CELERY")


@setup_logging.connect
def configure_logging(**_: Any) -> None:
    """Instead of Celery."""
    dictConfig(settings.LOGGING)


CONFIGURATION = Configuration(app, calls=[{}, {"expires": 3600}, {"countdown": 0.3}])
