"""Who publishes the calls of a scenario, one by one or fanned out, and what it is told of each."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

from billiard.exceptions import WorkerLostError
from celery.states import FAILURE, READY_STATES, REVOKED
from kombu.exceptions import OperationalError

from celery_setnx.exceptions import SetnxError
from celery_setnx.lock.marks import GRACE_S
from celery_setnx.lock.names import mark_name
from tests.simulation.checker import TOLD_S
from tests.simulation.scheduler import US
from tests.simulation.substitutes import sleep

if TYPE_CHECKING:
    from tests.simulation.calls import Calls

SWEPT_S = 5.0  # of calm, after which each worker has swept


class Publisher:
    """Calls of one task, until the trouble is over; some are revoked, or have an expiry."""

    def __init__(self, scene: Calls) -> None:
        self.scene, self.world = scene, scene.world
        self.random = random.Random(f"{self.world.seed} fans")  # apart: other seeds are what they were
        self.fans = self.random.choice((0.0, 0.0, 0.3))
        self.count = 0
        self.asked_us = self.epoch = 0
        self.failed: dict[str, int] = {}  # when calls were first seen to have failed, or to be revoked

    def run(self) -> None:
        """A thread of a process of its own."""
        world, rng = self.world, self.world.random
        self.task = self.scene.take_app().tasks[self.scene.task]
        self.revokes, self.expires = rng.choice((0.0, 0.0, 0.3)), rng.choice((0.0, 0.0, 0.3))
        for _ in range(rng.choice((3, 6, 10))):
            sleep(rng.choice((0.0, 0.05, 2.0)) * rng.random())
            calls = [self.drawn()]
            if self.random.random() < self.fans:
                calls += [self.drawn() for _ in range(self.random.choice((1, 2, 4)))]
            if rng.random() < 0.1:
                sleep((world.calm_at_us - world.now_us) / US + 2.0 * SWEPT_S * rng.random())
            self.try_to_send(calls)
        if self.scene.server.came_back_older:  # and may have marks, and locks held, of what has ended
            sleep((world.calm_at_us - world.now_us) / US + 2.0 * SWEPT_S)
            self.try_to_send([self.drawn()])

    def try_to_send(self, calls: list[tuple[int, float, str]]) -> None:
        """Send them, and know what was so before; where Redis or the broker is away, it is said."""
        self.asked_us, self.epoch = self.world.now_us, self.scene.server.epoch
        for task_id in self.scene.sent:
            if self.task.AsyncResult(task_id).state in (FAILURE, REVOKED):
                self.failed.setdefault(task_id, self.asked_us)
        try:
            self.send(calls)
        except (SetnxError, OperationalError) as error:
            self.world.note("is not published", error)

    def send(self, calls: list[tuple[int, float, str]]) -> None:
        """One call, or several at a time."""
        rng = self.world.random
        expires = 9.0 * rng.random() if rng.random() < self.expires else None
        if len(calls) == 1:
            result = self.task.apply_async(calls[0], expires=expires)
            if getattr(result, "deduplicated", False):
                self.is_dropped(calls[0], result.id)
            else:
                self.is_sent(calls[0], result.id)
            return
        for_each = {"accepted": self.is_sent, "duplicate": self.is_dropped}
        self.task.fan_out(
            calls,
            batch_size=self.random.choice((1, 2, 5)),
            each=lambda one: for_each[one.state](calls[one.index], one.task_id),
            expires=expires,
        )

    def drawn(self) -> tuple[int, float, str]:
        """A call's arguments: its number, what its body does, and for how long."""
        rng = self.world.random
        self.count += 1
        seconds = rng.choice((0.0, 0.01, 0.3, 2.0)) * rng.random()
        return self.count, seconds, rng.choice(("ok", "ok", "ok", "fails", "retries", "unstorable"))

    def is_sent(self, call: tuple[int, float, str], task_id: str) -> None:
        """The broker has taken it, and anybody may revoke it."""
        scene, world = self.scene, self.world
        world.note("publishes", task_id, *call)
        scene.sent[task_id] = call[2], self.epoch
        if world.random.random() < self.revokes:
            world.at(self.asked_us + world.random.randrange(9 * US), partial(scene.revoke, task_id))

    def is_dropped(self, call: tuple[int, float, str], task_id: str) -> None:
        """It is a duplicate of one that is queued, runs or has succeeded; or that may be so."""
        scene, world, asked_us = self.scene, self.world, self.asked_us
        world.note("is a duplicate of", task_id, *call)
        why = ""
        failed_us = max(self.failed.get(task_id, asked_us), world.calm_at_us)
        if asked_us - failed_us > SWEPT_S * US and not scene.has_lost_its_parent(task_id):
            why = "had failed"
        if scene.mark_ends_at_start and scene.began.get(task_id, asked_us) < asked_us:
            why = "had begun"
        refused_us = scene.broker.failed.get(("refused", task_id), asked_us)
        is_hindered = world.process.was_hindered(refused_us)  # when it took the mark back
        if asked_us - refused_us > (GRACE_S * US if is_hindered else 0) and task_id not in scene.sent:
            why = "was not sent"
        mark = scene.server.data.keys.get(mark_name(scene.key).encode())
        if mark and task_id not in scene.broker.taken and mark.expiry - asked_us // 1_000 > GRACE_S * 1_000:
            why = "is marked for longer than its sending may take"
        if scene.server.came_back_older and self.had_ended(task_id):
            world.broken(f"call {call[0]} was dropped for {task_id}, which has ended, by older data")
        if why and not scene.server.epoch:
            world.broken(f"call {call[0]} was dropped for {task_id}, which {why}")

    def had_ended(self, task_id: str) -> bool:
        """Whether a call has ended so long ago that nothing of it counts, whatever older data say."""
        scene, end = self.scene, self.task.AsyncResult(task_id)
        is_known = end.state in READY_STATES and not isinstance(end.result, WorkerLostError)  # it may retry
        at_us = max(scene.ended.at.get(task_id, self.asked_us), self.world.calm_at_us, *scene.server.lost_at)
        counts_s = TOLD_S + (self.task._guard.options.dedupe_for or 0.0)
        return is_known and self.asked_us - at_us > counts_s * US
