"""What is told and woken in the pools of greenlets, where the keeper's thread is a real one."""

import pytest

from tests.test_events import apart, assert_loss_is_told, ear  # noqa: F401 - fixtures
from tests.test_waiting import (  # noqa: F401 - fixtures
    alone,
    assert_each_ran_once_in_order,
    held,
    key,
    line_up,
    start,
)

beside_greenlets = pytest.mark.parametrize("pool", ["gevent", "eventlet"])


@beside_greenlets
def test_loss_is_told_beside_greenlets(logs, ear, apart, pool):  # noqa: F811
    """By a connection of its own."""
    assert_loss_is_told(logs, ear, apart, pool)


@beside_greenlets
def test_greenlets_park_and_wake_in_order(alone, key, journal, gates, start, pool):  # noqa: F811
    """Twenty calls of one key: each runs once, in order, one at a time."""
    start("only", pool=pool, concurrency=4)
    first = held(journal, alone.work, key, queue="only")
    results = line_up(journal, alone.work, key, 20, queue="only")
    gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, [first, *results])
