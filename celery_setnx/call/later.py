"""Calls that another class publishes in its own time, such as on commit: their marks wait for the message."""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

from celery import Celery, Task
from celery.signals import after_task_publish

AT_MOST = 10_000
"""Calls at most whose message is waited for. A rolled back transaction sends none, and says nothing."""

_unsent: dict[str, Callable[[], None]] = {}


def is_published_at_once(send: Any, app: Celery) -> bool:
    """True if Celery's own code publishes, and nobody's who may put that off.

    A tracer puts its own function in the place of Celery's, or a wrapper around it.
    """
    applies = isinstance(send, FunctionType) or _is_method(send, vars(Task)["apply_async"])
    return applies and _is_method(app.send_task, vars(Celery)["send_task"])


def _is_method(method: Any, of_celery: Any) -> bool:
    function = getattr(method, "__func__", None)
    return function is of_celery or function is getattr(of_celery, "__wrapped__", of_celery)


def when_sent(task_id: str, then: Callable[[], None]) -> None:
    """Call this when the message of a call is sent; it must not raise."""
    after_task_publish.connect(_sent, dispatch_uid="celery_setnx.later")
    while len(_unsent) >= AT_MOST:
        _unsent.pop(next(iter(_unsent)), None)
    _unsent[task_id] = then


def will_not_be_sent(task_id: str) -> None:
    """Wait for this call's message no longer."""
    _unsent.pop(task_id, None)


def _sent(headers: Any = None, **_details: Any) -> None:
    then = _unsent.pop(str((headers or {}).get("id")), None) if _unsent else None
    if then is not None:
        then()
