"""Beats within workers: `celery worker -B --scheduler celery_setnx.beat:HotStandbyScheduler`."""

import os
from contextlib import suppress
from typing import Any

import pytest
import redis

from celery_setnx import SetnxLock
from tests.beat.beats import HOT_STANDBY, LOCK
from tests.harness import Worker, wait_until


@pytest.fixture
def embed(start_worker, tmp_path) -> Any:
    """Starts a worker with a beat in it."""

    def embed(name: str, lease: float) -> Worker:
        return start_worker(  # type: ignore[no-any-return]
            "tests.beat.app",
            queues=f"idle-{name}",
            concurrency=1,
            conf={"entries": {"every": 1.0}, "setnx_beat_lease": lease},
            arguments=("-B", "--scheduler", HOT_STANDBY, "-s", str(tmp_path / name)),
        )

    return embed


def leading(locks: redis.Redis, workers: list[Worker]) -> Worker:
    """The worker whose beat leads."""

    def found() -> Worker | None:
        holder = SetnxLock(locks, LOCK).holder()
        with suppress(ProcessLookupError):  # it is dead, and leads until its lease ends
            group = os.getpgid(holder.info["pid"]) if holder else 0
            return next((worker for worker in workers if worker.process.pid == group), None)
        return None

    return wait_until(found, "a leader")


@pytest.mark.parametrize(("end", "lease"), [("kill", 3), ("stop", 60)])
def test_beat_of_another_worker_goes_on(beats, embed, locks, end, lease):
    """After kill -9 of the worker by its lease; after a warm shutdown at once."""
    workers = [embed(name, lease) for name in ("a", "b")]
    leader = leading(locks, workers)
    beats.wait_for_ticks(2)
    getattr(leader, end)()
    ended = len(beats.ticks())
    follower = leading(locks, [worker for worker in workers if worker is not leader])
    beats.wait_for_ticks(ended + 3)
    beats.assert_each_once(1.0)
    assert "Traceback" not in follower.log_text() + leader.log_text()
