"""Base classes as projects have them: each with a `__call__` of its own that does not know of a lock.

Every task's bodies are at most one at a time per name; each `__call__` journals that it was entered.
"""

import functools
from collections.abc import Callable
from typing import Any

from celery import Celery, Task, current_task

from celery_setnx import SingletonTask
from tests.app import body, journal, make_app

KEYED = {"key": "name", "lease": 600, "on_conflict": "skip"}

AROUND = {"@__call__": lambda call: lambda self, *args, **kwargs: plain_run(self, args, kwargs)}

app: Celery = make_app("bases", task_default_queue="bases", task_annotations={"bases.annotated": AROUND})


def entered() -> None:
    journal.write("entered", task_id=current_task.request.id)


def plain_run(task: Any, args: Any, kwargs: Any) -> Any:
    """As Flask documents it."""
    entered()
    return task.run(*args, **kwargs)


def logged(call: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator in whose code nothing names `__call__`."""

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return wrapper


class Named(Task):  # type: ignore[misc]
    """As Superset and many tutorials have it: a class by its name."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered()
        return Task.__call__(self, *args, **kwargs)


TaskBase = app.Task


class OfTheApp(TaskBase):  # type: ignore[misc, valid-type]
    """The same, of the app's own task class."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered()
        return TaskBase.__call__(self, *args, **kwargs)


class Decorated(Task):  # type: ignore[misc]
    """Its `__call__` is decorated."""

    abstract = True

    @logged
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered()
        return super().__call__(*args, **kwargs)


class Property(Task):  # type: ignore[misc]
    """Its `__call__` is made for each call."""

    abstract = True

    @property
    def __call__(self) -> Any:  # type: ignore[override]
        return functools.partial(lambda *args, **kwargs: plain_run(self, args, kwargs))


class Twice(Task):  # type: ignore[misc]
    """Tries again by itself."""

    abstract = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        entered()
        super().__call__(*args, **kwargs)
        return super().__call__(*args, **kwargs)


class Mixin:
    """No task at all."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return plain_run(self, args, kwargs)


class Classy(SingletonTask):
    """A class-based task that runs its body itself."""

    name = "bases.classy"
    singleton = KEYED

    def run(self, name: str) -> str:
        return body(name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return plain_run(self, args, kwargs)


class OfAnother(Classy):
    """Another task, of a class that is a task itself."""

    name = "bases.another"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return super().__call__(*args, **kwargs)


def run(name: str) -> str:
    return body(name)


def make(name: str, *bases: type) -> Any:
    base = type("Base", bases, {"abstract": True})
    options = {"singleton": KEYED, "shared": False, "lazy": False}
    return app.task(base=base, name=f"bases.{name}", **options)(run)


tasks = {
    "named": make("named", Named, SingletonTask),
    "named-behind": make("named_behind", SingletonTask, Named),
    "of-the-app": make("of_the_app", OfTheApp, SingletonTask),
    "decorated": make("decorated", Decorated, SingletonTask),
    "property": make("property", Property, SingletonTask),
    "mixin": make("mixin", Mixin, SingletonTask),
    "classy": app.register_task(Classy()),
    "another": app.register_task(OfAnother()),
    "annotated": make("annotated", SingletonTask),
    "patched": make("patched", SingletonTask),
    "twice": make("twice", Twice, SingletonTask),
}


def run_patched(self: Any, *args: Any, **kwargs: Any) -> Any:
    return plain_run(self, args, kwargs)


type(tasks["patched"]).__call__ = run_patched  # after it was bound
