"""A shop to migrate: one empty database for broker, results and locks, and its processes."""

from collections.abc import Callable, Iterator

import pytest
import redis

from tests.migration.deploy import DB, HANDED, STOP, Deploy


@pytest.fixture
def shop(server) -> Iterator[redis.Redis]:
    """A client of the shop's empty database. Afterwards every key of ours must have a TTL."""
    with redis.Redis.from_url(server.url(DB), decode_responses=True) as client:
        client.flushdb()
        yield client
        endless = [key for key in client.scan_iter("setnx:*") if client.pttl(key) == -1]
        assert not endless, f"keys without a TTL: {endless}"
        client.flushdb()


@pytest.fixture
def deploy_of(server, shop, journal, logs) -> Iterator[Callable[[str], Deploy]]:
    """Call it with a page: the deploy that the page describes."""
    deploys: list[Deploy] = []
    with redis.Redis.from_url(server.url(0), decode_responses=True) as control:
        control.delete(HANDED, *control.scan_iter(f"{STOP}:*"))

        def deploy_of(page: str) -> Deploy:
            deploys.append(Deploy(page, server.url().rpartition("/")[0], logs, shop, control))
            return deploys[-1]

        yield deploy_of
        for deploy in deploys:
            deploy.end()
        control.delete(HANDED, *control.scan_iter(f"{STOP}:*"))
