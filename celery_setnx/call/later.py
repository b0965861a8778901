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

    A tracer puts its own function in the place of Celery's.
    """
    applies = getattr(send, "__func__", None) is vars(Task)["apply_async"] or isinstance(send, FunctionType)
    return applies and getattr(app.send_task, "__func__", None) is vars(Celery)["send_task"]


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
