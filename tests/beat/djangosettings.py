"""Django for beats with the DatabaseScheduler: the admin tables, in an SQLite file that they share."""

import os

import django

# A transaction that reads before it writes is refused at once if another has written meanwhile; one that
# takes the write lock when it begins waits for it. Django before 5.1 cannot be told to.
WAITS = {"transaction_mode": "IMMEDIATE"} if django.VERSION >= (5, 1) else {}

SECRET_KEY = "x"
INSTALLED_APPS = ["django_celery_beat"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ.get("BEAT_TEST_DATABASE", ":memory:"),
        "OPTIONS": {"timeout": 20, **WAITS},
    }
}
USE_TZ = True
TIME_ZONE = "UTC"
LOGGING_CONFIG = None
