"""A shop to migrate: one empty database for broker, results and locks, and its processes."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis

from tests.harness import Worker
from tests.migration.deploy import DB, Deploy


@pytest.fixture
def shop(server) -> Iterator[redis.Redis]:
    """A client of the shop's empty database. Afterwards every key of ours must have a TTL."""
    with redis.Redis.from_url(server.url(DB), decode_responses=True) as client:
        client.flushdb()
        yield client
        endless = [key for key in client.scan_iter("setnx:*") if client.pttl(key) == -1]
        assert not endless, f"keys without a TTL: {endless}"
        client.flushdb()


@pytest.fixture(scope="module")
def fleet() -> dict[tuple[str, str], Worker]:
    """The workers of unchanged code, by page and stage: many tests have them, one may end them."""
    return {}


@pytest.fixture
def deploy_of(shop, journal, fleet, module_worker, start_worker) -> Iterator[Callable[..., Deploy]]:
    """Call it with a page, and edits of its code: the deploy that the page describes."""
    with ExitStack() as stack:

        def deploy_of(page: str, *edits: tuple[str, str]) -> Deploy:
            of_code = (start_worker, {}) if edits else (module_worker, fleet)
            deploy = Deploy(page, shop, journal, *of_code, edits)
            stack.callback(deploy.end)
            return deploy

        yield deploy_of
