"""How far one Redis goes, and how a million locks fare on a Cluster.

python -m benchmarks.capacity [--rounds 7] [--quick]

- One Redis: one client process, and then several, acquire and release locks of their own as fast as they can.
  What a cycle costs the server is the processor time that it says it has used (`INFO cpu`), system calls and
  all: a core of its own is fully used by as many cycles as that goes into a second.
- A Cluster of three masters: 1,000,000 locks (quick: 10,000) with records as tasks have them are acquired by
  several processes, each of which stands for many; all are renewed once, listed, and released. A process asks
  a master through the client that its Cluster client has for it. One round, as it takes minutes. A Cluster's
  servers have tables of their own for each of 16,384 slots: with few locks these are most of the memory, so
  it is promised of many only.
"""

from __future__ import annotations

import gc
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis
from redis.cluster import RedisCluster

from benchmarks.figures import Curve, Promise, Samples, Table, command, interleaved
from celery_setnx import SetnxLock
from celery_setnx.call.message import Call
from celery_setnx.keys import digest
from celery_setnx.lock.held import HeldLock, renew_all
from celery_setnx.lock.names import key_name
from celery_setnx.lock.record import task_token
from celery_setnx.lock.survey import survey
from celery_setnx.run.attempt import info_of
from examples.embedded import EmbeddedServer
from tests.topologies.servers import HOST, Cluster

PREFIX, SCOPE, LEASE_S = "setnx", "shop.tasks.synchronise_account", 30
PLAIN, TASKS, RIVAL = "SetnxLock", "as a task's lock", "redis-py Lock"
PROCESSES = 4
SPELL_S, QUICK_SPELL_S = 1.0, 0.5
START_S = 60.0

LOCKS, QUICK_LOCKS = 1_000_000, 10_000
BATCH = 1_000  # locks that are renewed in one go
LONG_S = 3600.0  # their lease: all must still be held when the last is acquired
MOST_BYTES, MOST_UNEVEN = 600.0, 1.1

_forking = multiprocessing.get_context("fork")


def measure(rounds: int, quick: bool) -> Iterator[Table | Curve]:
    """One Redis, and then a Cluster."""
    yield from one_redis(rounds, QUICK_SPELL_S if quick else SPELL_S)
    yield from a_cluster(QUICK_LOCKS if quick else LOCKS)


def tasks_lock(client: Any, number: int, lease: float = LEASE_S) -> tuple[SetnxLock, str]:
    """A lock as a task has it, and the task's token."""
    task_id = f"1b4e28ba-2fa1-11d2-883f-{number:012x}"
    info = info_of(Call(SCOPE, task_id, about=f"number={number}"), "celery@worker-17.example")
    name = key_name(PREFIX, SCOPE, digest([["number", number]]))
    lock = SetnxLock(client, name, lease=lease, info=info, line=True)
    return lock, task_token(task_id, 0, f"{number:012x}")


# One Redis


def plain_cycle(client: redis.Redis, number: int) -> bool:
    """With a lock by name."""
    lock = SetnxLock(client, f"lock.{number}", lease=LEASE_S)
    return lock.acquire().acquired and lock.release() == "released"


def tasks_cycle(client: redis.Redis, number: int) -> bool:
    """With what a call of a task does."""
    lock, token = tasks_lock(client, number)
    return lock.acquire(token=token).acquired and lock.release() == "released"


def rivals_cycle(client: redis.Redis, number: int) -> bool:
    """With redis-py's Lock."""
    lock = client.lock(f"lock.{number}", timeout=LEASE_S)
    acquired = lock.acquire(blocking=False)
    lock.release()
    return acquired


WAYS: Mapping[str, Callable[[redis.Redis, int], bool]] = {
    PLAIN: plain_cycle,
    TASKS: tasks_cycle,
    RIVAL: rivals_cycle,
}


def one_redis(rounds: int, spell_s: float) -> Iterator[Table | Curve]:
    """Cycles a second, of one process and of several, and the server's processor time for one."""
    server_us: Samples = {way: [] for way in WAYS}
    with EmbeddedServer() as server:

        def spell(way: str, processes: int) -> float:
            per_s, cpu_us = cycles(server, way, processes, spell_s)
            if processes > 1:
                server_us[way].append(cpu_us)
            return per_s

        counts = (1, PROCESSES)
        per_s = {count: {way: partial(spell, way, count) for way in WAYS} for count in counts}
        for count in counts:
            yield Table(
                f"One Redis, {count} {'process' if count == 1 else 'processes'}",
                "cycles a second",
                interleaved(per_s[count], rounds),
                RIVAL,
                (Promise(PLAIN, 1.0, RIVAL, at_least=True),),
                f"Each process on keys of its own, for {spell_s:g} s; all share the cores with the server.",
            )
    yield Table(
        "One Redis",
        "us of the server's core per cycle",
        server_us,
        RIVAL,
        about=f"Processor time as `INFO cpu` counts it, of the samples with {PROCESSES} processes.",
    )


def cycles(server: EmbeddedServer, way: str, processes: int, spell_s: float) -> tuple[float, float]:
    """Cycles a second, and the server's processor time (us) for each.

    Raises:
        RuntimeError: A process failed: a cycle came to nothing.
    """
    begin, ended = _forking.Barrier(processes + 1), _forking.SimpleQueue()
    clients = [
        _forking.Process(target=_cycle, args=(server.url(), way, number, begin, ended, spell_s))
        for number in range(processes)
    ]
    try:
        for client in clients:
            client.start()
        with redis.Redis.from_url(server.url()) as looker:
            begin.wait(START_S)
            before_s, began = _cpu_s(looker), time.monotonic()
            total = sum(ended.get() for _ in clients)
            took_s, cpu_s = time.monotonic() - began, _cpu_s(looker) - before_s
        for client in clients:
            client.join()
    finally:
        for client in clients:
            client.kill()
    if any(client.exitcode for client in clients):
        raise RuntimeError(f"{way}: a process failed")
    return total / took_s, cpu_s * 1e6 / total


def _cycle(url: str, way: str, process: int, begin: Any, ended: Any, spell_s: float) -> None:
    cycle, done = WAYS[way], 0
    try:
        with redis.Redis.from_url(url) as client:
            cycle(client, process)  # connected, and the scripts are there
            begin.wait(START_S)
            give_up = time.monotonic() + spell_s
            while time.monotonic() < give_up:
                if not cycle(client, process * 100 + done % 100):
                    raise RuntimeError(f"{way}: a free lock was not acquired and released")
                done += 1
    finally:
        ended.put(done)


# A Cluster


def a_cluster(locks: int) -> Iterator[Table | Curve]:
    """What many locks take, and where they are."""
    with ExitStack() as stack:
        directory = stack.enter_context(tempfile.TemporaryDirectory())
        cluster = stack.enter_context(Cluster(Path(directory, "cluster")))
        cluster.start()
        masters = [stack.enter_context(node.client()) for node in cluster.nodes]
        many = Many(cluster, masters, locks)
        stack.callback(many.stop)
        empty = [_memory(master) for master in masters]
        many.do("acquire")
        used = [_memory(master) - before for master, before in zip(masters, empty)]
        held = [master.dbsize() // 2 for master in masters]  # each has a record beside it
        many.do("renew")
        many.list_all()
        many.do("release")
    title = f"{locks:,} locks on a Cluster of {len(held)} masters"
    names = [f"master {number}" for number in range(1, len(held) + 1)]
    yield Table(title, "s", many.took_s, "acquire", about=f"{PROCESSES} processes on the same machine.")
    yield Table(title, "us of a master's core per lock", many.server_us, "acquire")
    yield Table(
        f"{title}: spread",
        "locks",
        {name: [float(count)] for name, count in zip(names, held)},
        names[0],
        (Promise(names[held.index(max(held))], MOST_UNEVEN, names[held.index(min(held))]),),
    )
    yield Table(
        f"{title}: memory",
        "bytes per lock",
        {name: [size / count] for name, size, count in zip(names, used, held)},
        names[0],
        tuple(Promise(name, MOST_BYTES) for name in names) if locks >= LOCKS else (),
    )


class Many:
    """Processes that hold many locks of a cluster, and do the same with all of them at a word.

    Args:
        cluster: The cluster.
        masters: Clients of its masters.
        locks: How many locks there are in all.

    Attributes:
        took_s: How long each verb took, until the last process was done.
        server_us: Processor time of all masters, per lock.
    """

    def __init__(self, cluster: Cluster, masters: list[redis.Redis], locks: int) -> None:
        self.took_s: Samples = {}
        self.server_us: Samples = {}
        self._masters = masters
        self._locks = locks
        self._port = cluster.nodes[0].port
        self._processes: list[tuple[Any, Any]] = []
        for first in range(PROCESSES):
            ours, theirs = _forking.Pipe()
            numbers = range(first, locks, PROCESSES)
            process = _forking.Process(target=_hold_many, args=(self._port, numbers, theirs), daemon=True)
            process.start()
            theirs.close()
            if not ours.poll(START_S):
                raise RuntimeError("a process did not begin")
            ours.recv()
            self._processes.append((process, ours))

    def stop(self) -> None:
        """Kill them."""
        for process, _ours in self._processes:
            process.kill()

    def do(self, verb: str) -> None:
        """Let all do it.

        Raises:
            RuntimeError: It was not done to all locks.
        """
        with self._timed(verb):
            for _process, ours in self._processes:
                ours.send(verb)
            done = sum(ours.recv() for _process, ours in self._processes)
        self._check(verb, done)

    def list_all(self) -> None:
        """List them, in this process alone.

        Raises:
            RuntimeError: They were not all there.
        """
        with RedisCluster(host=HOST, port=self._port) as client, self._timed("list"):
            seen = sum(sighting.holder is not None for sighting in survey(client, PREFIX))
        self._check("list", seen)

    @contextmanager
    def _timed(self, verb: str) -> Iterator[None]:
        before_s, began = sum(map(_cpu_s, self._masters)), time.monotonic()
        yield
        self.took_s[verb] = [time.monotonic() - began]
        used_s = sum(map(_cpu_s, self._masters)) - before_s
        self.server_us[verb] = [used_s * 1e6 / self._locks]
        print(f"{verb}: {self.took_s[verb][0]:.1f} s", file=sys.stderr)

    def _check(self, verb: str, done: int) -> None:
        if done != self._locks:
            raise RuntimeError(f"{verb}: done to {done} of {self._locks} locks")


def _hold_many(port: int, numbers: range, to_parent: Any) -> None:
    """One of the processes: answers each verb with the number of locks that it was done to."""
    gc.disable()  # it stands for many processes, none of which has as much to look through
    held: list[HeldLock] = []
    with RedisCluster(host=HOST, port=port) as cluster:
        verbs: dict[str, Callable[[], int]] = {
            "acquire": lambda: _acquire_many(cluster, numbers, held),
            "renew": lambda: _renew_many(cluster, held),
            "release": lambda: sum(lock.release() == "released" for lock in held),
        }
        to_parent.send("ready")
        with suppress(EOFError):  # the parent's end
            while True:
                to_parent.send(verbs[to_parent.recv()]())


def _acquire_many(cluster: Any, numbers: range, held: list[HeldLock]) -> int:
    for number in numbers:
        lock, token = tasks_lock(None, number, lease=LONG_S)
        lock.client = cluster.get_redis_connection(cluster.get_node_from_key(lock.name))
        acquired = lock.acquire(token=token).lock
        if acquired is not None:
            held.append(acquired)
    return len(held)


def _renew_many(cluster: Any, held: list[HeldLock]) -> int:
    batches = (held[first : first + BATCH] for first in range(0, len(held), BATCH))
    return sum(error is None for batch in batches for error in renew_all(batch, cluster))


def _cpu_s(client: redis.Redis) -> float:
    about = client.info("cpu")
    return float(about["used_cpu_user"]) + float(about["used_cpu_sys"])


def _memory(client: redis.Redis) -> int:
    return int(client.info("memory")["used_memory"])


if __name__ == "__main__":
    command(__doc__, measure)
