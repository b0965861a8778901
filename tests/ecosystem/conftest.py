"""Calls to be watched."""

from collections.abc import Callable, Iterator

import pytest
import redis

from tests.ecosystem.play import Play
from tests.harness import Journal


@pytest.fixture
def play(locks: redis.Redis, journal: Journal, gates: Callable[..., None], name: str) -> Iterator[Play]:
    """Calls of the test's own key, with clean databases; their worker is the module's."""
    from tests.ecosystem import watched

    yield Play(watched, journal, gates, name)
    gates(name, 1 + journal.unended())
