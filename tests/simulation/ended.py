"""What a call owes to the others of its key: of their results, windows, retries and joins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from celery.states import READY_STATES, SUCCESS

from celery_setnx.lock.held import HeldLock
from celery_setnx.run.conflict import is_skipped
from tests.simulation.scheduler import US, World
from tests.simulation.substitutes import Redis

SURE_S = 5.0  # of a window: a reply, by which its beginning is known here, is not later


@dataclass
class EndedCall:
    """Which calls of one key have given their lock back, and what has become of them."""

    world: World
    server: Redis
    began: dict[str, int] = field(default_factory=dict)  # by id: in which epoch
    released: dict[str, tuple[int, int]] = field(default_factory=dict)  # by id: epoch, and when
    at: dict[str, int] = field(default_factory=dict)  # by id: when it has given it back, for the last time
    kept: tuple[str, int] = ("", 0)  # for whose retry the lock is held, and the epoch
    retries: dict[str, int] = field(default_factory=dict)  # by id: of the attempt that has begun last
    holds: dict[str, int] = field(default_factory=dict)  # by id: how often the lock was held for a retry
    is_discarded: Callable[[str], bool] = lambda _task_id: False  # whether a call may not come

    def begins(self, task: Any, held: HeldLock) -> None:
        """A body begins."""
        request, options = task.request, task._guard.options
        self.began[request.id] = self.server.epoch
        self.retries[request.id] = request.retries
        self._check_kept(task)
        joined = request._setnx_run.call.join
        if joined not in (None, request.id):
            self.world.broken(f"{request.id} runs though it has joined {joined}")
        if options.dedupe_for and not request.retries:
            self._check_window(task, held, options.dedupe_for - SURE_S)

    def _check_kept(self, task: Any) -> None:
        """Nobody has the lock that is held for a retry before that has come."""
        (kept_for, epoch), self.kept = self.kept, ("", 0)
        if kept_for in ("", task.request.id) or epoch != self.server.epoch or self.is_discarded(kept_for):
            return
        if task.AsyncResult(kept_for).state not in READY_STATES:
            self.world.broken(f"{task.request.id} runs under the lock that is held for {kept_for}")

    def _check_window(self, task: Any, held: HeldLock, window_s: float) -> None:
        for other, (epoch, at_us) in self.released.items():
            if epoch != self.server.epoch or held._since_us - at_us >= window_s * US:
                continue
            end = task.AsyncResult(other)
            if other != task.request.id and end.state == SUCCESS and not is_skipped(end.result):
                self.world.broken(f"{task.request.id} runs within the window of {other}")

    def on_released(self, task_id: str, outcome: str, **_details: Any) -> None:
        """A call has given its lock back."""
        self.at[task_id] = self.world.now_us
        is_same = self.began.get(task_id) == self.server.epoch
        if is_same and outcome in ("released", "repaired", "resting"):
            self.released[task_id] = self.server.epoch, self.world.now_us
        if outcome == "held_for_retry":
            has_come = self.retries.get(task_id, 0) > self.holds.get(task_id, 0)  # before this was told
            self.holds[task_id] = self.holds.get(task_id, 0) + 1
            if is_same and not has_come:  # else it may have been lost, unheard
                self.kept = task_id, self.server.epoch
