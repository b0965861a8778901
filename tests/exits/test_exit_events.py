"""Celery events beside greenlets: the keeper's thread is a real one there too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.test_events import Ear, apart, assert_loss_is_told, ear

__all__ = ["apart", "ear"]  # fixtures


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_loss_is_told_beside_greenlets(logs: Path, ear: Ear, apart: Callable[[str], Any], pool: str) -> None:
    """By a connection of its own."""
    assert_loss_is_told(logs, ear, apart, pool)
