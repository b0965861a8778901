"""A server for what the pages run: of their own, because they publish, and empty before each."""

from collections.abc import Iterator

import pytest
import redis

from examples.embedded import EmbeddedServer


@pytest.fixture(scope="session")
def docs_server() -> Iterator[EmbeddedServer]:
    """A server that no worker of the suite listens to."""
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
def empty_server(docs_server) -> str:
    """Its URL, without a database; nothing is in it."""
    with redis.Redis.from_url(docs_server.url()) as client:
        client.flushall()
    return docs_server.url().rpartition("/")[0]
