"""A lock that was handed to a call whose wake-up is late: who may take it, and what is said of it."""

import uuid
from typing import Any

import pytest
import redis

from celery_setnx.line import Place, park
from celery_setnx.lock import Holder, SetnxLock, task_token
from tests.harness import wait_until

HAND_OVER_S = 1.0
COURIER = {"task": "celery_setnx.courier"}


def waiting(locks: redis.Redis, key: str, task_id: str, since: float) -> Place:
    """A task that waits in line."""
    place = Place(key, task_id, 0, remember=60)
    park(locks, place, copy="0", since=since, call=f"call of {task_id}")
    return place


def let_go(lock: SetnxLock) -> Any:
    """Hand the lock to the first in line, as a courier does once the lock is free or its lease has ended."""
    held = wait_until(lambda: lock.acquire(token="courier").lock, "a free lock")
    assert held is not None
    held.release()
    assert lock.heir is not None
    return lock.heir


def test_woken_call_takes_a_lock_that_is_kept_for_another(locks):
    """Its wake-up came after its turn was over: it runs now, before the other, and the other next."""
    lock = SetnxLock(locks, "t:{late}", lease=HAND_OVER_S, line=True)
    for since, task_id in enumerate(("first", "second"), 1):
        waiting(locks, lock.name, task_id, since)
    assert let_go(lock).task_id == "first"
    assert let_go(lock).task_id == "second"  # the first's wake-up is on its way still
    outcome = lock.acquire(token=task_token("first", 0, uuid.uuid4().hex), copy="woken", remember=60)
    assert outcome.acquired, outcome.holder
    assert outcome.lock is not None
    outcome.lock.release()
    assert lock.heir is not None
    assert (lock.heir.task_id, lock.heir.call) == ("second", "call of second")


@pytest.mark.parametrize("info", [COURIER, {"task": "a", "task_id": "b"}, {}])
def test_holder_says_who_it_is(info):
    """Whatever it knows of itself: a courier names its task, and has no id."""
    assert str(Holder("token", 1.0, 1, "running", 1.0, info)).endswith(
        "running since 1970-01-01 00:00:01 UTC"
    )
