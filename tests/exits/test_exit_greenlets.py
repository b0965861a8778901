"""What is told and woken in the pools of greenlets, where the keeper's thread is a real one."""

import pytest

from tests.harness import wait_until
from tests.test_events import apart, ear  # noqa: F401 - fixtures

beside_greenlets = pytest.mark.parametrize("pool", ["gevent", "eventlet"])


@beside_greenlets
def test_loss_is_told_beside_greenlets(ear, apart, start_worker, pool):  # noqa: F811
    """By a connection of its own."""
    start_worker("tests.watchapp", pool=pool, queues=pool, arguments=("-E",))
    call = apart(pool).lose()
    wait_until(lambda: ear.types(call.id) == ["task-lock-lost"], "the loss")


@beside_greenlets
def test_greenlets_park_and_wake_in_order(stage, start_worker, pool):
    """Twenty calls of one key: each runs once, in order, one at a time."""
    start_worker("tests.waitapp", queues=stage.key, pool=pool, concurrency=4)
    first = stage.held(queue=stage.key)
    results = stage.line_up(20, queue=stage.key)
    stage.open()
    stage.have_run([first, *results])
