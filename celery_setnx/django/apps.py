"""Tells Django's system checks what is refused of the project's tasks."""

from __future__ import annotations

from celery import current_app
from django.apps import AppConfig
from django.core.checks import Error, register

from celery_setnx.exceptions import SetnxError
from celery_setnx.task import refusals


class SetnxConfig(AppConfig):  # type: ignore[misc]
    """Registers the check."""

    name = "celery_setnx.django"
    label = "celery_setnx"
    verbose_name = "celery_setnx"
    _is_checking = False

    def ready(self) -> None:
        """Have it run with all others: by `check`, `migrate`, `runserver`, and before tests."""
        register(lambda **_options: self.check_tasks())

    def check_tasks(self) -> list[Error]:
        """An error for each refusal of the project's Celery app, which is the current one.

        The modules of its tasks are imported for that; then Celery runs Django's checks, and so this one.
        """
        if self._is_checking:
            return []
        self._is_checking = True
        app = current_app._get_current_object()
        try:
            app.loader.import_default_modules()
            app.finalize()
            found: list[SetnxError] = [*refusals(app)]
        except SetnxError as error:  # of @singleton, where it stands
            found = [error]
        finally:
            self._is_checking = False
        return [Error(text, id="celery_setnx.E001") for text in dict.fromkeys(map(str, found))]
