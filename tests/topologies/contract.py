"""What holds wherever the locks live, and whatever the broker is."""

from collections.abc import Callable
from typing import Any

from celery_setnx import SetnxLock
from celery_setnx.connection import client_for
from celery_setnx.lock.names import record_name
from tests.harness import Journal, wait_until


def runs_under_its_lock(
    tasks: Any, journal: Journal, open_gate: Any, name: str, exists: Callable[..., int]
) -> None:
    """A lock with its record while the body runs: named, renewed, in the way of an equal call; then free."""
    result = tasks.once.delay(name)
    (start,) = journal.wait_for("start", task_id=result.id)
    assert exists(start["key"], record_name(start["key"])) == 2
    holder = tasks.once.locked(name)
    assert (holder.task_id, holder.state, holder.fence) == (result.id, "running", start["fence"])
    again = tasks.once.delay(name)
    assert (again.deduplicated, again.id) == (True, result.id)
    wait_until(lambda: tasks.once.locked(name).deadline > holder.deadline + 1, "two renewals")
    open_gate(name)
    assert again.get(timeout=60) == name
    (released,) = journal.wait_for("released")
    assert released["outcome"] == "released"
    assert tasks.once.locked(name) is None
    assert exists(start["key"]) == 0
    assert journal.entries(what="lost") == []


def each_key_runs_once(tasks: Any, journal: Journal, keys: int) -> None:
    """A fan-out of three calls of each key: a single body for each, and no mark is left."""
    counts = tasks.once.fan_out((f"k{number % keys}",) for number in range(3 * keys))
    assert (counts.accepted, counts.duplicates, counts.failed) == (keys, 2 * keys, 0)
    ends = journal.wait_for("end", keys)
    assert sorted(end["name"] for end in ends) == sorted(f"k{number}" for number in range(keys))
    wait_until(lambda: not list(client_for(tasks.app).scan_iter("t:*:queued")), "no mark")


def lock_lives_and_ends(client: Any) -> None:
    """acquire, held, renew, hold, look, resume, take over, release."""
    lock = SetnxLock(client, "t:{life}", lease=5)
    held = lock.acquire(token="id|0|aa").lock
    assert lock.acquire().holder.token == "id|0|aa"
    held.renew()
    assert held.hold(30) == "held_for_retry"
    assert lock.holder().state == "held_for_retry"
    again = lock.acquire(token="id|1|bb").lock
    assert again.fence == held.fence
    taken = lock.acquire(dead="id|1|bb")
    assert taken.taken_over_from.token == "id|1|bb"
    assert taken.lock.fence > held.fence
    assert again.release() == "lost"
    assert taken.lock.release() == taken.lock.release() == "released"
