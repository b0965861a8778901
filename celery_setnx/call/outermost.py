"""How ours comes to stand before every method that a task's classes have by the same name.

A base class may call `Task.__call__` by its name, or run the body itself: who stands behind it is skipped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from celery import Task

# Where Celery's own methods are from: a worker puts another `__call__` into its Task.
_CELERYS = ("celery.app.task", "celery.app.trace")


def stand_outermost(task: type[Task], name: str, around: Callable[..., Any]) -> None:
    """Have `around(following, task, args, kwargs)` called for a task's method; `following` is the next one.

    The next one is looked up at each call: classes are patched at any time.
    """
    own = vars(task).get(name)
    if _is_ours(own):
        return

    def method(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        if own is None:
            following = getattr(super(task, self), name)
        else:
            following = own.__get__(self, type(self)) if hasattr(own, "__get__") else own
        return around(following, self, args, kwargs)

    method.__name__ = name
    # In itself, because functools.wraps copies attributes to what is put around it.
    vars(method).update(outermost=method, own=own)
    setattr(task, name, method)


def is_celerys_own(task: type[Task], name: str) -> bool:
    """Whether a task has Celery's own method, but for ours before it; not one that a library has patched."""
    for base in task.__mro__:
        method: Any = vars(base).get(name)
        while _is_ours(method):
            method = method.own
        if method is not None:
            return base is Task and is_from_celery(method)
    return False


def is_from_celery(method: Any) -> bool:
    """Whether a method is from where Celery's own are."""
    return getattr(method, "__module__", None) in _CELERYS


def _is_ours(method: Any) -> bool:
    return method is not None and getattr(method, "outermost", None) is method
