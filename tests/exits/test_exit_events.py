"""Celery events beside greenlets: the keeper's thread is a real one there too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.embedded import EmbeddedServer
from tests.harness import Worker, wait_until
from tests.test_events import Ear, apart, ear

__all__ = ["apart", "ear"]  # fixtures


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_loss_is_told_beside_greenlets(
    server: EmbeddedServer, logs: Path, ear: Ear, apart: Callable[[str], Any], pool: str
) -> None:
    """It sends by a connection of its own."""
    worker = Worker(logs, "tests.watchapp", pool=pool, queues=pool, arguments=("-E",))
    try:
        call = apart(pool).lose()
        wait_until(lambda: ear.types(call.id) == ["task-lock-lost"], "the loss")
    finally:
        worker.stop()
