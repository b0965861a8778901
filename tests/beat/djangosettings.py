"""Django for beats with the DatabaseScheduler: the admin tables, in an SQLite file that they share."""

from __future__ import annotations

import os

SECRET_KEY = "x"
INSTALLED_APPS = ["django_celery_beat"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("BEAT_TEST_DATABASE", ":memory:"),
        "OPTIONS": {"timeout": 20},
    }
}
USE_TZ = True
TIME_ZONE = "UTC"
LOGGING_CONFIG = None
