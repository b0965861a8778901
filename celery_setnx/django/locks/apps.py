"""What Django is told of the page "Locks"."""

from django.apps import AppConfig


class LocksConfig(AppConfig):  # type: ignore[misc]
    """Has a label that is no project's own."""

    name = "celery_setnx.django.locks"
    label = "setnx_locks"
    verbose_name = "Locks"
    default_auto_field = "django.db.models.BigAutoField"
