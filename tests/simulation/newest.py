"""A scenario: calls of one key of which the newest wins, by publishers that race, die and are late."""

from __future__ import annotations

import random
from itertools import pairwise
from math import inf
from typing import Any

from celery import Celery
from celery.states import FAILURE, READY_STATES

from celery_setnx import superseded_by
from celery_setnx.call.away import PAUSE_S
from celery_setnx.call.message import HEADER
from celery_setnx.lock.names import newest_name
from celery_setnx.run.conflict import is_skipped
from tests.simulation.calls import NEWEST, TASKS, Calls, played
from tests.simulation.checker import Life
from tests.simulation.publisher import Publisher
from tests.simulation.scheduler import US, Process, World
from tests.simulation.substitutes import sleep

FLOOD_S = 12.0
FLOODED_S = 9.0  # of calm, after which one begins: every lease of before is over
TRAVEL_S = 0.5
SLACK_S = 4.0  # a body, the way of a message, and a worker's turn
EXACT_US = 2_000


class NewestPublisher(Publisher):
    """Some of its calls equal the one before; one that is alone may publish faster than they travel."""

    scene: NewestCalls
    last: tuple[int, float, str] | None = None

    def run(self) -> None:
        """As every publisher; no call may have an expiry."""
        self.repeats = self.random.choice((0.0, 0.2))
        is_alone = len(self.scene.publishers) == 1
        super().run()
        if is_alone and self.scene.floods:
            self.flood()

    def send(self, calls: list[tuple[int, float, str]]) -> None:
        """As every publisher."""
        self.expires, self.was_full = 0.0, self.scene.server.data.is_full
        super().send(calls)

    def drawn(self) -> tuple[int, float, str]:
        """Arguments: often new ones."""
        if self.last is None or self.random.random() >= self.repeats:
            self.last = super().drawn()
        return self.last

    def is_sent(self, call: tuple[int, float, str], task_id: str) -> None:
        """Its publishing has returned."""
        super().is_sent(call, task_id)
        self.scene.published[task_id] = self.asked_us, self.world.now_us
        was_full = self.was_full or self.scene.server.data.is_full
        if was_full or self.world.process.was_hindered(self.asked_us - round(2 * PAUSE_S * US)):
            self.scene.unsure.add(task_id)

    def flood(self) -> None:
        """Publish for longer than calls may wait, each before the one before it has arrived."""
        scene, world = self.scene, self.world
        sleep((world.calm_at_us - world.now_us) / US + FLOODED_S)
        scene.broker.travel_s = TRAVEL_S
        self.revokes, began_us = 0.0, world.now_us
        while world.now_us - began_us < FLOOD_S * US:
            sleep(0.1 + 0.1 * self.random.random())
            self.try_to_send([(*self.drawn()[:2], "ok")])
        scene.flooded_us = began_us, world.now_us


class NewestCalls(Calls):
    """One seed of it."""

    tasks, of_app = NEWEST, {**TASKS, **NEWEST}
    made: list[Celery] = []
    publisher = NewestPublisher

    def __init__(self, seed: int, task: str = "") -> None:
        self.draw = random.Random(f"{seed} newest")
        self.published: dict[str, tuple[int, float]] = {}  # by id: when it was asked for, and was done
        self.unsure: set[str] = set()  # who may have its generation from the clock of its publisher
        self.generations: dict[str, int] = {}  # of all that the broker has taken
        self.taken_us: dict[str, int] = {}
        self.leading: set[str] = set()
        self.reserved_us: dict[int, int] = {}  # by generation
        self.starts: dict[int, list[tuple[int, int, str]]] = {}  # by epoch: when, generation, id
        self.ends: dict[str, tuple[str, Any]] = {}
        self.flooded_us = (0, 0)
        super().__init__(seed, task)
        options = NEWEST[self.task][0]
        self.quiet_s, self.most_s = options.get("debounce", 0.0), options["debounce_max"]
        self.floods = seed % 4 != 2 and self.draw.random() < 0.2
        self.newest_key = newest_name(self.key).encode()
        self.deadly, self.slow = self.draw.choice((0.0, 0.0, 0.1)), self.draw.choice((0.0, 0.0, 0.1))
        self.broker.on_taken = self.on_taken
        self.server.after = self.after_command
        if self.quiet_s:  # a countdown is as good as the clocks
            self.process_of, self.world.process_of = self.world.process_of, self.on_one_clock  # type: ignore[method-assign]
            for process in self.world.processes:
                process.skew_us = 0
        for _ in range(self.draw.choice((0, 1, 2))):
            self.publish()

    @property
    def mark_ends_at_start(self) -> bool:
        """Whether no call is a duplicate of one that has begun."""
        return True

    def on_one_clock(self, name: str) -> Process:
        """A new process whose clock is right."""
        process = self.process_of(name)
        process.skew_us = 0
        return process

    def after_command(self) -> None:
        """See which generation is reserved, and when."""
        self.checker._check_keys()
        entry = self.server.data.keys.get(self.newest_key)
        if entry is not None:
            self.reserved_us.setdefault(int(entry.value.split(b"\n")[0]), self.world.now_us)

    def on_taken(self, message: Any) -> None:
        """The broker has a call, perhaps for the first time: its publisher may die, or be late."""
        world, headers = self.world, message["headers"]
        task_id = headers["id"]
        if headers["task"] != self.task or task_id in self.generations:
            return
        self.generations[task_id] = headers[HEADER].get("generation", 0)
        self.taken_us[task_id] = world.now_us
        self.sent.setdefault(task_id, ("unknown", self.server.epoch))
        if headers[HEADER].get("leads"):
            self.leading.add(task_id)
        if not world.is_calm and world.process in self.publishers:
            if self.draw.random() < self.deadly:
                world.kill(world.process)
            if self.draw.random() < self.slow:
                world.freeze(world.process, 4.0 * self.draw.random())

    def begins(self, task: Any, what: str) -> Life:
        """A body begins: no newer one has begun before, and it has waited for newer ones."""
        life, task_id = super().begins(task, what), task.request.id
        mine = self.generations[task_id]
        starts = self.starts.setdefault(life.epoch, [])
        for since_us, other, its_id in starts:
            came_first = self.published_us(its_id)[0] > self.published_us(task_id)[1]
            is_older = mine < other or (came_first and not self.unsure & {task_id, its_id})
            if is_older and since_us < life.since_us:
                self.world.broken(f"{task_id} begins, and {its_id}, which is newer, had begun")
        if self.quiet_s and not task.request.retries and task_id not in self.leading:
            self.check_quiet(task_id, life)
        starts.append((life.since_us, mine, task_id))
        return life

    def check_quiet(self, task_id: str, life: Life) -> None:
        """A call waits for newer ones, unless one before it has waited for as long as any may."""
        reserved_us = self.reserved_us.get(self.generations[task_id])
        if (
            self.server.epoch
            or reserved_us is None
            or life.since_us >= reserved_us + self.quiet_s * US - EXACT_US
        ):
            return
        begun = [gen for since_us, gen, _ in self.starts[life.epoch] if since_us < reserved_us]
        for other, taken_us in self.taken_us.items():
            waits = self.generations[other] > max(begun, default=0)
            if waits and taken_us <= life.since_us - self.most_s * US:
                return
        waited_s = (life.since_us - reserved_us) / US
        self.world.broken(f"{task_id} begins {waited_s:.3f} s after it was published")

    def note_ends(self, left: list[str]) -> None:
        """What has become of each."""
        super().note_ends(left)
        app = self.take_app()
        for task_id in self.generations:
            end = app.AsyncResult(task_id)
            self.ends[task_id] = end.state, end.result

    def play(self) -> World:
        """The world, when all is over."""
        world = super().play()
        self.check_superseded()
        self.check_newest()
        self.check_flood()
        return world

    def check_superseded(self) -> None:
        """Whoever was skipped names a newer call."""
        for task_id, (state, result) in self.ends.items():
            if not is_skipped(result) or state not in READY_STATES:
                continue
            by = superseded_by(result) or ""
            if self.generations.get(by, 0) <= self.generations[task_id]:
                self.world.broken(f"{task_id} was superseded by {by!r}, which is no newer call")

    def check_newest(self) -> None:
        """The newest call of all has begun: by its generation, and as it was published after all others."""
        taken = self.generations
        newest = max(taken, key=lambda task_id: taken[task_id], default="")
        if newest and not self.is_lost(newest) and newest not in self.began:
            self.world.broken(f"{newest} is the newest, and has not begun")
        last = max(taken, key=lambda task_id: self.published_us(task_id)[0], default="")
        done_us = max((self.published_us(each)[1] for each in taken if each != last), default=0)
        is_last = last and self.published_us(last)[0] > done_us and not self.unsure
        if is_last and not self.is_lost(last) and last not in self.began:
            self.world.broken(f"{last} was published last, and has not begun")

    def published_us(self, task_id: str) -> tuple[int, float]:
        """When it was asked for, and was done; of one whose publisher has died, at any time."""
        return self.published.get(task_id, (0, inf))

    def is_lost(self, task_id: str) -> bool:
        """Whether a call may not run: it is revoked, or nobody has its message."""
        if task_id in self.broker.discarded | self.dropped:
            return True
        if self.server.came_back_older and self.has_died(task_id):
            return True
        acks_late = NEWEST[self.task][1].get("acks_late")
        return not acks_late and (self.has_died(task_id) or self.ends[task_id][0] == FAILURE)

    def check_flood(self) -> None:
        """A key that is published all the time runs all the same."""
        began_us, ended_us = self.flooded_us
        most_us = (self.most_s + self.quiet_s + SLACK_S) * US
        starts = [
            since for all_ in self.starts.values() for since, _, _ in all_ if began_us < since < ended_us
        ]
        times = sorted([began_us, *starts, ended_us])
        for before, after in pairwise(times):
            if after - before > most_us:
                self.world.broken(f"none has begun for {(after - before) / US:.3f} s, though it is published")


def play(seed: int, task: str = "") -> World:
    """One seed; of one task, if it is named."""
    return played(NewestCalls, seed, task)
