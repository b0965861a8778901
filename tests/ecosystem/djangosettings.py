"""Django for results and schedules in its tables: an SQLite file, ECOSYSTEM_DATABASE."""

import os

SECRET_KEY = "x"
INSTALLED_APPS = ["django_celery_results", "django_celery_beat"]
DATABASES = {
    "default": {
        "ENGINE": "django.db.backends.sqlite3",
        "NAME": os.environ["ECOSYSTEM_DATABASE"],
        # A transaction that reads before it writes waits for the others, and is not refused.
        "OPTIONS": {"timeout": 60, "transaction_mode": "IMMEDIATE"},
    }
}
USE_TZ = True
TIME_ZONE = "UTC"
LOGGING_CONFIG = None
