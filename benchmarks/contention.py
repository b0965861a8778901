"""What a lock costs that many want, and one among many that are held.

python -m benchmarks.contention [--rounds 7] [--quick]

- One key: 1 to 64 processes, each with a client of its own, acquire it, hold it for 0.2 ms, release it, and
  begin again, for a second. `SetnxLock.acquire(wait=...)` stands beside `Lock.acquire(blocking_timeout=...)`
  of redis-py, which asks ten times a second; both know for how long they may wait. Under the lock a counter
  that all share is read, and written after the pause: were two ever in at once, an increment would be
  missing. The server's time is that of all commands of that second, those in vain too, per acquisition.
- Many keys: a server for each number of locks that are held, 1 to 100,000, and on each of them short spells
  of cycles of further keys, in turns. The server's time is that of the scripts, as it counts it.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from multiprocessing.sharedctypes import RawValue
from statistics import median
from typing import Any

import redis

from benchmarks.figures import Curve, Promise, Table, command, interleaved
from celery_setnx import SetnxLock
from examples.embedded import EmbeddedServer

OURS, RIVAL = "celery_setnx", "redis-py Lock"
WALL, SERVER = "wall time", "script time on the server"
NAME = "lock.contended"
LEASE_S = 30
BODY_S = 0.0002
CYCLES = 200  # a spell
START_S = 60.0

FLAT = 1.5

_forking = multiprocessing.get_context("fork")


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        processes: How many contend.
        compared: Those for which there is a table, with a promise: with many, and few rounds, chance decides.
        spell_s: For how long they do.
        held: How many locks are held.
        spells: How many spells of cycles of further keys there are beside them, a round.
    """

    processes: tuple[int, ...]
    compared: tuple[int, ...]
    spell_s: float
    held: tuple[int, ...]
    spells: int


FULL = Scale((1, 2, 4, 8, 16, 32, 64), (8, 64), 1.0, (1, 10, 100, 1_000, 10_000, 100_000), 10)
QUICK = Scale((1, 8, 32), (8,), 0.4, (1, 100, 10_000), 10)


def measure(rounds: int, quick: bool) -> Iterator[Table | Curve]:
    """Of one key three curves, and tables for some numbers of processes; of many keys one curve of two."""
    scale = QUICK if quick else FULL
    yield from one_key(scale, rounds)
    yield from many_keys(scale, rounds)


# One key, many processes


@dataclass(frozen=True)
class Spell:
    """What came of a while of contention.

    Attributes:
        per_s: How often the lock was acquired, a second.
        server_us: Server time per acquisition.
        served: How many of the processes had it at all, in parts of 1.
    """

    per_s: float
    server_us: float
    served: float


Cycle = Callable[[redis.Redis, str, float, Callable[[], None]], bool]
"""Acquires by name, waiting until a time (monotonic), runs a body, releases. False if it was not acquired."""


def our_cycle(client: redis.Redis, name: str, give_up: float, body: Callable[[], None]) -> bool:
    """With `SetnxLock`."""
    held = SetnxLock(client, name, lease=LEASE_S).acquire(wait=max(0.0, give_up - time.monotonic())).lock
    if held is None:
        return False
    body()
    return held.release() == "released"


def rivals_cycle(client: redis.Redis, name: str, give_up: float, body: Callable[[], None]) -> bool:
    """With redis-py's Lock."""
    lock = client.lock(name, timeout=LEASE_S)
    if not lock.acquire(blocking_timeout=max(0.0, give_up - time.monotonic())):
        return False
    body()
    lock.release()
    return True


WAYS: dict[str, Cycle] = {OURS: our_cycle, RIVAL: rivals_cycle}
# What the server runs for a client; what its scripts call is listed as well, and is in their time already.
SENT = {OURS: ("eval", "evalsha"), RIVAL: ("set", "eval", "evalsha")}


def one_key(scale: Scale, rounds: int) -> Iterator[Table | Curve]:
    """Acquisitions a second, and server time per acquisition, by the number of processes."""
    with EmbeddedServer() as server:
        found: dict[tuple[str, int], list[Spell]] = {}

        def spell(way: str, processes: int) -> float:
            one = contend(server, way, processes, scale.spell_s)
            found.setdefault((way, processes), []).append(one)
            return one.per_s

        interleaved(
            {
                f"{way}, {processes}": partial(spell, way, processes)
                for way in WAYS
                for processes in scale.processes
            },
            rounds,
        )
    yield curve("One key", "processes", "acquisitions a second", found, "per_s")
    yield curve("One key", "processes", "server us per acquisition", found, "server_us")
    yield curve("One key", "processes", "share of the processes that had the lock", found, "served")
    for processes in scale.compared:
        yield Table(
            f"One key, {processes} processes",
            "acquisitions a second",
            {way: [spell.per_s for spell in found[way, processes]] for way in WAYS},
            RIVAL,
            (Promise(OURS, 1.0, RIVAL, at_least=True),),
            f"For {scale.spell_s:g} s; the body, which sleeps for 0.2 ms, is in it.",
        )


def curve(title: str, x: str, y: str, found: dict[tuple[str, int], list[Spell]], of: str) -> Curve:
    """One figure of all spells, the median of the rounds."""
    curves: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    for (way, processes), spells in sorted(found.items(), key=lambda item: item[0][1]):
        curves[way].append((processes, median(getattr(spell, of) for spell in spells)))
    return Curve(title, x, y, curves)


def contend(server: EmbeddedServer, way: str, processes: int, spell_s: float) -> Spell:
    """Let so many processes contend for a while.

    Raises:
        RuntimeError: A process failed, or two had the lock at once.
    """
    counter = RawValue("q", 0)
    begin, ended = _forking.Barrier(processes + 1), _forking.SimpleQueue()
    contenders = [
        _forking.Process(target=_contend, args=(server.url(), way, counter, begin, ended, spell_s))
        for _ in range(processes)
    ]
    try:
        for contender in contenders:
            contender.start()
        with redis.Redis.from_url(server.url()) as client:
            begin.wait(START_S)  # all are connected
            client.config_resetstat()
            begin.wait(START_S)
            began = time.monotonic()
            acquired = [ended.get() for _ in contenders]
            took_s = time.monotonic() - began
            server_us = _time_us(client, SENT[way])
            client.flushall()
        for contender in contenders:
            contender.join()
    finally:
        for contender in contenders:
            contender.kill()
    if any(contender.exitcode for contender in contenders):
        raise RuntimeError(f"{way}: a process failed")
    total = sum(acquired)
    if not total:
        raise RuntimeError(f"{way}: nobody had the lock")
    if counter.value != total:
        raise RuntimeError(
            f"{way}: {counter.value} increments were kept of {total}: two had the lock at once"
        )
    return Spell(total / took_s, server_us / total, sum(map(bool, acquired)) / processes)


def _contend(url: str, way: str, counter: Any, begin: Any, ended: Any, spell_s: float) -> None:
    cycle, acquired = WAYS[way], 0

    def increment() -> None:
        number = counter.value
        time.sleep(BODY_S)
        counter.value = number + 1

    try:
        with redis.Redis.from_url(url) as client:
            # Connected, and the scripts are there.
            cycle(client, f"lock.{os.getpid()}", time.monotonic(), int)
            begin.wait(START_S)
            begin.wait(START_S)
            give_up = time.monotonic() + spell_s
            while time.monotonic() < give_up:
                acquired += cycle(client, NAME, give_up, increment)
    finally:
        ended.put(acquired)


# One key beside many that are held


def many_keys(scale: Scale, rounds: int) -> Iterator[Table | Curve]:
    """Wall time and server time of a cycle, by the number of locks that others hold."""
    with ExitStack() as stack:
        clients = {held: stack.enter_context(_holding(stack, held)) for held in scale.held}
        server_us: dict[str, list[float]] = {}

        def cycle_us(held: int) -> float:
            wall, server = cycles(clients[held], CYCLES)
            server_us.setdefault(str(held), []).append(server)
            return wall

        wall_us = interleaved(
            {str(held): partial(cycle_us, held) for held in scale.held}, rounds * scale.spells
        )
    curves = {WALL: _points(wall_us), SERVER: _points(server_us)}
    yield Curve("Many keys", "locks held", "us per cycle of one more", curves, flat={SERVER: FLAT})


def _points(samples: dict[str, list[float]]) -> list[tuple[float, float]]:
    return sorted((float(held), median(figures)) for held, figures in samples.items())


def _holding(stack: ExitStack, held: int) -> redis.Redis:
    """A client of a server of its own, where so many locks are held."""
    server = stack.enter_context(EmbeddedServer())
    client = redis.Redis.from_url(server.url())
    for number in range(held):
        if not SetnxLock(client, f"lock.held:{number}", lease=3600).acquire():
            raise RuntimeError(f"lock {number} of {held} was not acquired")
    return client


def cycles(client: redis.Redis, times: int) -> tuple[float, float]:
    """Microseconds per cycle of one more key: wall time, and the server's.

    Raises:
        RuntimeError: A cycle came to nothing.
    """
    _cycle(client, 0)  # connected, and the scripts are there
    client.config_resetstat()
    began = time.perf_counter()
    for number in range(times):
        _cycle(client, number)
    took_us = (time.perf_counter() - began) * 1e6
    return took_us / times, _time_us(client, SENT[OURS]) / times


def _cycle(client: redis.Redis, number: int) -> None:
    held = SetnxLock(client, f"lock.one-more:{number % 100}", lease=LEASE_S).acquire().lock
    if held is None or held.release() != "released":
        raise RuntimeError("a free lock was not acquired and released")


def _time_us(client: redis.Redis, commands: tuple[str, ...]) -> float:
    stats = client.info("commandstats")
    return float(sum(stats.get(f"cmdstat_{name}", {"usec": 0})["usec"] for name in commands))


if __name__ == "__main__":
    command(__doc__, measure)
