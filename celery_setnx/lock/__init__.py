"""The lock and all that stands beside it, in Redis. Nothing here knows Celery."""
