"""Celery events beside greenlets: the keeper's thread is a real one there too."""

import pytest

from tests.test_events import apart, assert_loss_is_told, ear

__all__ = ["apart", "ear"]  # fixtures


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_loss_is_told_beside_greenlets(logs, ear, apart, pool):
    """By a connection of its own."""
    assert_loss_is_told(logs, ear, apart, pool)
