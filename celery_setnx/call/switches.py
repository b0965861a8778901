"""What a test may switch on for an app: guarded eager calls, or no guard at all. See `testing`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


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
"""Nothing is guarded, nothing deduplicated."""
