"""Tells Django's system checks what is refused of the project's tasks."""

from __future__ import annotations

from celery import current_app
from django.apps import AppConfig
from django.core.checks import CheckMessage, Error, Warning, register

from celery_setnx.exceptions import SetnxError
from celery_setnx.task import import_tasks, refusals


class SetnxConfig(AppConfig):  # type: ignore[misc]
    """Registers the check."""

    name = "celery_setnx.django"
    label = "celery_setnx"
    verbose_name = "celery_setnx"
    _is_checking = False

    def ready(self) -> None:
        """Have it run with all others: by `check`, `migrate`, `runserver`, and before tests."""
        register(lambda **_options: self.check_tasks())

    def check_tasks(self) -> list[CheckMessage]:
        """An error for each refusal of the project's Celery app, which is the current one.

        The modules of its tasks are imported for that; then Celery runs Django's checks, and so this one. A
        worker, which does the same, refuses them by itself.
        """
        app = current_app._get_current_object()
        if self._is_checking or app.loader.worker_initialized:
            return []
        self._is_checking = True
        try:
            import_tasks(app)
            app.finalize()
            found: list[SetnxError] = [*refusals(app)]
        except SetnxError as error:  # of @singleton, where it stands
            found = [error]
        except Exception as error:  # noqa: BLE001 - of the project's own modules: `migrate` may be what they need
            return [_unchecked(error)]
        finally:
            self._is_checking = False
        return [Error(text, id="celery_setnx.E001") for text in dict.fromkeys(map(str, found))]


def _unchecked(error: Exception) -> CheckMessage:
    """What is said if the tasks cannot be imported."""
    return Warning(
        f"The options of guarded tasks were not checked: the tasks cannot be imported here "
        f"({type(error).__name__}: {error}).",
        hint="Fix the module that raises this: a worker, which imports the tasks as well, would not start.",
        id="celery_setnx.W001",
    )
