"""What every history is held to, while it happens: the checker sees the server and all processes at once."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from math import inf
from typing import Any

from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.line import PASSED_OVER
from celery_setnx.lock.names import line_names
from tests.simulation.scheduler import US, Process, World
from tests.simulation.substitutes import Redis, monotonic

TOLD_S = 6.0
"""Seconds of calm after which nothing that has ended holds a lock."""


@dataclass
class Life:
    """A body that has begun under a lock."""

    held: HeldLock
    process: Process
    limit: int
    epoch: int
    since_us: int
    ended_us: int = 0
    released_in: int | None = None
    is_lost: bool = False

    @property
    def has_ended(self) -> bool:
        return self.ended_us > 0

    def is_live(self, epoch: int) -> bool:
        """Whether it may rely on its lock now, in data that were not lost since it began."""
        return not self.has_ended and not self.process.is_dead and self.epoch == epoch and self.relies

    @property
    def relies(self) -> bool:
        return self.held.remaining_s() > 0


class Checker:
    """Holds one world to its promises."""

    def __init__(self, world: World, server: Redis) -> None:
        self.world, self.server = world, server
        self.lives: dict[str, list[Life]] = {}
        self._fences: dict[tuple[str, int, int], tuple[int, str]] = {}
        self._starts: dict[tuple[str, int], list[int]] = {}
        self._free_since: dict[str, int] = {}
        server.after = self._check_keys

    def begins(self, held: HeldLock, limit: int, rate: tuple[int, float] | None) -> Life:
        """A body begins: with the others no more than the limit, its fence higher than any, at its pace."""
        world, epoch = self.world, bisect_left(self.server.lost_at, held._since_us)
        life = Life(held, world.process, limit, epoch, held._since_us)
        world.note("begins", held.token, f"fence {held.fence}", f"permit {held.permit}", key=held.key)
        self.lives.setdefault(held.key, []).append(life)
        fence_of, task_id = (held.key, held.permit, epoch), held.token.partition("|")[0]
        before, holder = self._fences.get(fence_of, (0, ""))
        if (held.fence, task_id) != (before, holder) and held.fence <= before:  # a retry resumes its lock
            world.broken(f"{held.key}: fence {held.fence} of {held.token} after {before} of {holder}")
        self._fences[fence_of] = held.fence, task_id
        self.touches(life)
        starts = self._starts.setdefault((held.key, epoch), [])
        starts.append(held._since_us)
        if rate is not None:
            starts.sort()
            for first, later in zip(starts, starts[rate[0] :]):
                if later - first < round(rate[1] * US):
                    world.broken(f"{held.key}: more than {rate[0]} starts in {(later - first) / US:.6f} s")
        return life

    def touches(self, life: Life) -> None:
        """A body does something under its lock: it has it, and not too many others have."""
        epoch, key = self.server.epoch, life.held.key
        if not life.is_live(epoch):
            return
        live = [other for other in self.lives[key] if other.is_live(epoch)]
        if len(live) > life.limit:
            self.world.broken(f"{key}: {[other.held.token for other in live]} rely on it at a time")
        if life.held.token not in self.holders(key):
            self.world.broken(
                f"{key}: {life.held.token} relies on it, and the server has {self.holders(key)}"
            )

    def ends(self, life: Life) -> None:
        """A body ends."""
        self.world.note("ends", life.held.token, key=life.held.key)
        life.ended_us = self.world.now_us

    def released(self, life: Life, word: str, relied: bool) -> None:
        """A lock was given back: whoever could rely on it is told no loss."""
        life.released_in = self.server.epoch
        self.world.note("is told", word, life.held.token, key=life.held.key)
        if relied and life.epoch == self.server.epoch and word in ("lost", "gone"):
            self.world.broken(f"{life.held.key}: {life.held.token} relied on its lock and was told {word}")

    def loses(self, held: HeldLock) -> None:
        """A lock that is renewed is lost: only to lost data, or if nobody could renew it in time."""
        world = self.world
        since_us = world.now_us - round((monotonic() - held._valid_until + held.lease_s) * US)
        (life,) = [life for life in self.lives[held.key] if life.held is held]
        hindered = sum(at >= since_us for at in life.process.hindered_at)
        if held.lease_s >= 2.0 and hindered <= 2 and life.epoch == self.server.epoch:
            world.broken(f"{held.key}: {held.token} was lost, and only {hindered} of its commands failed")

    def check_idle(self) -> None:
        """No lock is held by a body that has ended in a process that lives."""
        for key, lives in self.lives.items():
            for life in lives:
                # What a late command has acquired once more ends with its lease; so does older data's.
                is_same = self.holders(key).get(life.held.token) == life.since_us
                is_told = life.released_in == self.server.epoch or life.released_in is None
                if life.has_ended and not life.process.is_dead and is_same and is_told:
                    self.world.broken(f"{key}: {life.held.token} has ended, and its lock is not free")

    def watch(
        self,
        key: str,
        limit: int,
        rate: tuple[int, float] | None,
        most_s: float,
        *,
        is_paused: bool = False,
    ) -> None:
        """No line stands beside a lock that a call may have for longer than promised."""
        now_us = self.world.now_us
        is_held = is_paused or not self.in_line(key) or len(self.holders(key, "")) >= limit
        if rate is not None:
            since_us = now_us - round(rate[1] * US)
            starts = [at for (of, _), all_ in self._starts.items() if of == key for at in all_]
            is_held = is_held or sum(at > since_us for at in starts) >= rate[0]
        if is_held or not self.world.is_calm:
            self._free_since.pop(key, None)
        elif now_us - self._free_since.setdefault(key, now_us) > most_s * US:
            self.world.broken(f"{key} is free, and its line has stood there for {most_s} s")

    def goes_on(self, key: str) -> None:
        """A line goes on, perhaps between two looks."""
        self._free_since.pop(key, None)

    def in_line(self, key: str) -> list[bytes]:
        """Who waits for a lock: not one that was woken in vain, or whose moment in its pool slot is over."""
        line, calls = (self.server.data.keys.get(name.encode()) for name in line_names(key))
        kept = dict(calls.value) if calls else {}
        found = [task for place, task in (line.value if line else ()) if place < PASSED_OVER]
        return [task for task in found if not self._has_lapsed(kept.get(task, b""))]

    def _has_lapsed(self, kept: bytes) -> bool:
        return kept[:1] == b"@" and int(kept[1:]) <= self.world.now_us

    def holders(self, key: str, state: str = "running") -> dict[str, int]:
        """Who holds a lock by the server's records, since when; in this state, or in any."""
        found = {}
        now_us = self.world.now_us
        for token, deadline, _fence, its_state, since, *_ in self._records(key):
            if state in ("", its_state) and int(deadline) > now_us:
                found[token] = int(since)
        return found

    def _records(self, key: str) -> list[list[str]]:
        """Those of all permits."""
        return [
            entry.value.decode().split("\n")
            for name, entry in self.server.data.keys.items()
            if name.startswith(key.encode()) and name.endswith(b":holder")
        ]

    def kept_for(self, key: str, task_id: str) -> float:
        """Since when a permit is kept for a call that is to be woken; infinity if none is."""
        handed = [words for words in self._records(key) if words[3] == "handed"]
        live = [words[4:] for words in handed if int(words[1]) > self.world.now_us]
        return min((int(since) for since, heir in live if heir == task_id), default=inf)

    def _check_keys(self) -> None:
        for name, entry in self.server.data.keys.items():
            if entry.expiry is None:
                self.world.broken(f"{name.decode()} has no TTL")


def told(world: World, key: str = "") -> str:
    """The history, of one key or of all."""
    lines = []
    for when, who, of, what, *words in world.history:
        if not key or of in ("", key):
            text = " ".join(map(str, words))
            lines.append(f"{(when - world.began_us) / US:11.6f}  {who:24} {of} {what} {text}")
    return "\n".join(lines)


def explained(world: World) -> str:
    """What a failing seed prints."""
    broken: Any = "\n".join(world.violations)
    return f"SEED={world.seed}\n{told(world)}\n{broken}"
