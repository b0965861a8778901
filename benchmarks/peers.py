"""The peers as their documentation has them, on a server of the benchmark's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import celery_once.backends.redis
import celery_singleton.backends
import redis
from celery_heimdall import HeimdallTask


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
