"""Calls of one key of which several may run at a time, and who ran beside whom."""

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import redis

from celery_setnx.lock.process import has_ended
from tests.harness import Journal, Worker, wait_until
from tests.stage import Stage, redeliver, unacknowledged

LIMIT, TWO = 5, 2


class Bench(Stage):
    """Calls of one key, and who has its permits."""

    def __init__(self, tasks: Any, journal: Journal, gates: Callable[..., None], broker: redis.Redis) -> None:
        super().__init__(tasks, journal, gates)
        self.broker = broker
        self.killed: dict[int, float] = {}

    def fill(self, count: int = LIMIT, gate: str = "", task: Any = None, **options: Any) -> list[Any]:
        """Calls that hold so many permits, at their gate."""
        results = [
            (task or self.task).apply_async([self.key, gate or self.gate], **options) for _ in range(count)
        ]
        return [self.journal.reached("start", result) for result in results]

    def permits(self, task: Any = None) -> dict[int, str | None]:
        """Which call has which permit."""
        return {holder.permit: holder.task_id for holder in (task or self.task).holders(self.key)}

    def told(self, what: str = "start") -> list[dict[str, Any]]:
        """What the bodies of the key have told."""
        return self.journal.entries(what=what, key=self.key)

    def of(self, result: Any) -> dict[str, Any]:
        """What the body of a call has told when it started."""
        (start,) = self.journal.entries(what="start", task_id=result.id)
        return start

    def kill(self, pid: int) -> None:
        """kill -9 of a pool process."""
        self.killed.setdefault(pid, time.monotonic())
        os.kill(pid, signal.SIGKILL)

    def kill_one(self, worker: Worker) -> None:
        """kill -9 of a process of a worker's pool; not of one that is dying still."""

        def is_killed() -> bool:
            for pid in set(worker_children(worker)) - self.killed.keys():
                with suppress(ProcessLookupError):
                    self.kill(pid)
                    return True
            return False

        wait_until(is_killed, f"a process of {worker.name} to kill")

    def lose_worker(self, worker: Worker, queue: str, aside: str) -> None:
        """Kill a worker that takes calls from two queues; what it had of the first is delivered again."""
        worker.take_no_more_from(self.tasks.app, queue)
        self.tasks.note.apply_async(queue=aside).get(timeout=60)  # it ends a read that is under way
        children, at = worker_children(worker), time.monotonic()
        worker.kill()
        wait_until(lambda: all(map(has_ended, children)), "its processes have ended")
        replaced = {start["pid"] for start in self.told() if has_ended(start["pid"])}  # meanwhile
        self.killed = dict.fromkeys(replaced.union(children), at) | self.killed
        redeliver(self.broker, unacknowledged(self.broker, queue))

    def most(self) -> int:
        """How many ran at a time, at most, when one started.

        Who was killed before does not count, nor who was told, on a busy machine, that its lock was lost.
        """
        lost = {entry["task_id"] for entry in self.journal.entries(what="lost")}

        def living(start: dict[str, Any]) -> int:
            not_lost = [int(pid) for pid, task_id in start["beside"].items() if task_id not in lost]
            return sum(start["at"] < self.killed.get(pid, float("inf")) for pid in not_lost)

        return max((living(start) for start in self.told()), default=0)

    def free(self, task: Any = None) -> None:
        """Wait until nobody holds a permit, or waits for one."""
        task = task or self.task

        def is_free() -> bool:
            return not task.holders(self.key) and not task._lock((self.key,), {}).look().waiting

        wait_until(is_free, "all permits are free, and nobody waits")


def worker_children(worker: Worker) -> list[int]:
    """The process ids of a worker's pool; without those that have been killed."""
    parent = worker.process.pid
    with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as children:
        return [int(pid) for pid in children.read().split() if not has_ended(int(pid))]
