"""A scenario: processes that take bare locks, with a keeper that renews them, until the trouble is over."""

from __future__ import annotations

from functools import partial
from typing import Any

from celery_setnx.exceptions import LockLost, LockUnavailable, SetnxError
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.keeper import keeper_for_process
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.process import identity
from tests.simulation.checker import TOLD_S, Checker, Life
from tests.simulation.scheduler import US, Process, World
from tests.simulation.substitutes import Redis, begin, client_of, monotonic, sleep

TROUBLE_S = 5.0
LAST_S = 60.0


class Locks:
    """One seed of it."""

    def __init__(self, seed: int) -> None:
        self.world = world = World(seed)
        begin(world)
        self.server = Redis(world)
        self.checker = Checker(world, self.server)
        choice = world.random.choice
        self.keys = [f"lock:{{{number}}}" for number in range(choice((1, 1, 2)))]
        self.lease_s = choice((0.5, 2.0, 2.0, 10.0, 30.0))
        self.limit = choice((1, 1, 1, 2, 3))
        self.rate: tuple[int, float] | None = choice((None, None, None, (1, 0.5), (3, 2.0)))
        world.calm_at_us = world.now_us + round(TROUBLE_S * US)
        world.at(world.now_us, self.server.trouble)
        world.on_death = lambda process: world.at(
            world.now_us + world.random.randrange(3 * US), partial(self.start, process.name)
        )
        for number in range(choice((2, 2, 3))):
            self.start(f"process-{number}")

    def start(self, name: str) -> None:
        """Start a process, or one in the stead of one that has died."""
        if self.world.is_calm:
            return
        process = self.world.process_of(name)
        client = client_of(self.server)
        for number in range(self.world.random.choice((1, 1, 2))):
            self.world.spawn(process, partial(self.work, process, client), f"thread-{number}")

    def play(self) -> World:
        """The world, when all is over."""
        world = self.world
        world.run(world.calm_at_us + round(TOLD_S * US))
        self.checker.check_idle()
        last = world.process_of("last")
        left = [thread for thread in world.threads if thread.name.startswith("thread") and not thread.is_over]
        for thread in left:
            world.broken(f"{thread.process}/{thread.name} has not ended")
        done: list[str] = []
        for key in self.keys:
            world.spawn(last, partial(self.last, key, client_of(self.server), done), "last")
        world.run(world.calm_at_us + round(LAST_S * US))
        for key in set(self.keys) - set(done):
            world.broken(f"{key}: it did not come free")
        world.close()
        return world

    def lock(self, client: Any, key: str) -> SetnxLock:
        """A lock, on this world's terms."""
        about = {"lease": self.lease_s, "info": identity(), "limit": self.limit, "rate": self.rate}
        return SetnxLock(client, key, retention=60.0, **about)

    def work(self, process: Process, client: Any) -> None:
        """What one thread does, again and again."""
        world, rng = self.world, self.world.random
        while not world.is_calm:
            sleep(rng.choice((0.0, 0.02, 1.0)) * rng.random())
            lock = self.lock(client, rng.choice(self.keys))
            try:
                if rng.random() < 0.5:
                    outcome = lock.acquire(rng.choice((0.0, 0.5)))
                else:
                    outcome = lock.acquire_at_death()
            except LockUnavailable as error:
                world.note("is not told", error.reason, key=lock.name)
                sleep(rng.random() / 2)
                continue
            if outcome.lock is not None:
                self.body(outcome.lock)

    def body(self, held: HeldLock) -> None:
        """A body, and its end as `Attempt` has it."""
        rng, keeper = self.world.random, keeper_for_process(monotonic)
        life = self.checker.begins(held, self.limit, self.rate)
        is_kept = rng.random() < 0.8
        if is_kept:
            keeper.watch(held, self.lost)
        for _ in range(rng.randrange(4)):
            sleep(rng.choice((0.001, 0.1, min(self.lease_s, 1.5))) * rng.random())
            try:
                held.ensure()
            except LockLost:
                if is_kept:
                    self.checker.loses(held)
                break
            self.checker.touches(life)
        keeper.forget(held)
        self.checker.ends(life)
        try:
            self.release(life)
        except SetnxError as error:
            self.world.note("is not released", error.brief, key=held.key)
            keeper.try_again(partial(self.release, life), monotonic() + held.lease_s)

    def release(self, life: Life) -> None:
        """Give it back."""
        relied = life.relies
        self.checker.released(life, life.held.release(), relied and life.relies)

    def lost(self, held: HeldLock, reason: str) -> None:
        """The keeper has noticed a loss."""
        self.world.note("is lost", held.token, reason, key=held.key)
        self.checker.loses(held)

    def last(self, key: str, client: Any, done: list[str]) -> None:
        """A lock comes free within its lease."""
        wait_s = self.lease_s + (self.rate[1] if self.rate else 0.0) + 1.0
        outcome = self.lock(client, key).acquire(wait_s)
        if outcome.lock is not None:
            outcome.lock.release()
            done.append(key)


def play(seed: int) -> World:
    """One seed."""
    return Locks(seed).play()
