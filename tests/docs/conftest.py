"""A server for what a page runs: of its own, because pages publish."""

from collections.abc import Iterator

import pytest

from examples.embedded import EmbeddedServer


@pytest.fixture
def empty_server() -> Iterator[str]:
    """Its URL, without a database; nothing is in it."""
    with EmbeddedServer() as server:
        yield server.url().rpartition("/")[0]
