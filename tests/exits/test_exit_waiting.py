"""Calls that wait in line, in the pools of greenlets."""

from typing import Any

import pytest

from tests.harness import Journal
from tests.test_waiting import (  # noqa: F401 - fixtures
    Start,
    alone,
    assert_each_ran_once_in_order,
    held,
    key,
    line_up,
    start,
)


@pytest.mark.parametrize("pool", ["gevent", "eventlet"])
def test_greenlets_park_and_wake_in_order(
    alone: Any,  # noqa: F811
    key: str,  # noqa: F811
    journal: Journal,
    gates: Any,
    start: Start,  # noqa: F811
    pool: str,
) -> None:
    """Twenty calls of one key: each runs once, in order, one at a time."""
    start("only", pool=pool, concurrency=4)
    first = held(journal, alone.work, key, queue="only")
    results = line_up(journal, alone.work, key, 20, queue="only")
    gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, [first, *results])
