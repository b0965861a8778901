"""A shop with a worker, a web server and a browser, for all tests of the page."""

from collections.abc import Iterator

import pytest
import redis

from tests.admin.shop import Browser, Shop, WebServer

DB = 7


@pytest.fixture(scope="module")
def shop(server, tmp_path_factory, module_worker) -> Iterator[Shop]:
    """The shop on an empty database for broker, results and locks, with a worker."""
    with redis.Redis.from_url(server.url(DB), decode_responses=True) as client:
        client.flushdb()
        shop = Shop(server.url(DB), tmp_path_factory.mktemp("shop"))
        module_worker("shop", queues=shop.queue, concurrency=3, environment=shop.environment)
        yield shop
        endless = [key for key in client.scan_iter("shop:*") if client.pttl(key) == -1]
        assert not endless, f"keys without a TTL: {endless}"


@pytest.fixture(scope="module")
def web(shop) -> Iterator[WebServer]:
    server = WebServer(shop)
    yield server
    server.kill()


@pytest.fixture
def lost_web(shop) -> Iterator[WebServer]:
    """A web server that reaches no Redis."""
    server = WebServer(shop, REDIS_URL="redis://127.0.0.1:1/0")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def chromium(web, tmp_path_factory) -> Iterator[Browser]:
    browser = Browser(web, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.driver.quit()


@pytest.fixture
def browser(chromium, shop) -> Iterator[Browser]:
    """The browser; afterwards every call of the test has ended."""
    yield chromium
    shop.end_all()
