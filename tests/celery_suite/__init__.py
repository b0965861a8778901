"""Celery's own integration suite, without us and with every task guarded: `python -m tests.celery_suite`."""
