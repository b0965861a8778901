"""The peers as their documentation has them, on a server of the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import celery_once.backends.redis
import celery_singleton.backends
import redis
from celery_heimdall import HeimdallTask

# By default it would wait nearly a second in the worker for the lock that its call has taken already.
UNIQUE = {"unique": True, "unique_lock_blocking": False}
"""What celery-heimdall's tasks have in every benchmark that runs them."""


def once_settings(lock_url: str, timeout_s: int) -> dict[str, Any]:
    """celery-once's own settings."""
    return {
        "backend": "celery_once.backends.Redis",
        "settings": {"url": lock_url, "default_timeout": timeout_s},
    }


class Heimdall(HeimdallTask):
    """Has its locks in the benchmark's database."""

    abstract = True

    def setup_redis(self) -> redis.Redis:
        """A client of the locks' database."""
        return redis.Redis.from_url(self.app.conf["setnx_url"])


@contextmanager
def new_clients() -> Iterator[None]:
    """Within, and afterwards, the peers connect anew: two of them keep their first client for good."""
    _forget()
    try:
        yield
    finally:
        _forget()


def _forget() -> None:
    celery_once.backends.redis.redis = None
    celery_singleton.backends._backend = None
