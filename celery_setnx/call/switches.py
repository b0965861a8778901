"""What may be switched for an app: guarded eager calls, or no guard at all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from celery_setnx.options import settings_of


class Switch:
    """Off, until a test turns it on for an app or for all apps of this process; in all its threads."""

    def __init__(self) -> None:
        self._apps: list[Any] = []

    def is_on(self, app: Any) -> bool:
        """True while it is on for this app."""
        return bool(self._apps) and any(each is None or each is app for each in self._apps)

    @contextmanager
    def on(self, app: Any = None) -> Iterator[None]:
        """Turn it on for a while; may be nested."""
        self._apps.append(app)
        try:
            yield
        finally:
            self._apps.remove(app)


EAGER_GUARDED = Switch()
"""Eager calls and `.apply()` take their locks."""

DISABLED = Switch()
"""Nothing is guarded, nothing deduplicated, and no server is asked."""


def runs_plainly(app: Celery) -> bool:
    """Whether nothing is guarded or deduplicated: a test says so, or `setnx_enabled`."""
    return DISABLED.is_on(app) or not settings_of(app).enabled
