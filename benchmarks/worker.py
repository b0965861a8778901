"""What the lock costs a worker: tasks that do nothing, beside plain Celery and the peers.

python -m benchmarks.worker [--rounds 7] [--quick]

Each way to run the task has a worker of its own, of one process (solo) or with a pool of two (prefork), which
lives through all rounds. The queue of one way after the other is filled, apart from its worker, and then
moved before it: publishing costs the worker nothing. A round is several such slices of each way, because what
disturbs a machine for a second should disturb all of them. Until the last task has ended, measured are

- CPU: what all processes of the worker use, as the kernel counts it in nanoseconds, per task;
- rate: tasks per second in the same slices;
- what a way adds to plain Celery, in CPU and in wall time: the same figures less those of plain Celery;
- CPU with publication: the first, and what the publisher has used, per task.

Broker and locks are two databases of one server, as in small deployments. The arguments of all calls differ,
so no call meets a held lock. The floor is a task with two bare commands (`SET NX PX` and `DEL`) about its
body, over the same connection as ours: no lock that asks Redis twice in the worker can cost it less. The
peers take their lock when a call is published, and only free it in the worker; ours is taken and freed there.
Workers log warnings only, and have their default prefetch; results are ignored.
"""

from __future__ import annotations

import functools
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from benchmarks.figures import Promise, Samples, Table, command
from benchmarks.peers import new_clients
from benchmarks.workerapp import (
    BARE,
    BROKER_URL,
    COUNT,
    LOCK_URL,
    OURS,
    PLAIN,
    WAY,
    WAYS,
    make_app,
    queue_of,
)
from celery_setnx.lock.names import KNOWN_LINES
from examples.embedded import EmbeddedServer
from tests.harness import Worker, wait_until

POOLS = {"solo": ("solo", 1), "prefork -c 2": ("prefork", 2)}
SLICES, TASKS = 8, 250
QUICK_SLICES, QUICK_TASKS = 2, 150
WARM_UP = 100
BROKER_DB, LOCK_DB, HIDDEN_DB = 0, 1, 2
DEADLINE_S = 120.0

CPU_OF_PLAIN = 1.12
ADDS_OF_BARE = 2.0
RATE_OF_PEERS = 1.0


@dataclass(frozen=True)
class Slice:
    """What tasks have taken, in milliseconds per task.

    Attributes:
        worker: Processor time of the worker.
        publisher: Processor time of who has published them.
        wall: Time from the first to the last.
    """

    worker: float
    publisher: float
    wall: float


class Bench:
    """For each way a worker and its app.

    Args:
        server: Broker and locks.
        pool: The pool of the workers.
        concurrency: How many processes it has.
    """

    def __init__(self, server: EmbeddedServer, pool: str, concurrency: int) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(new_clients())
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._server = server
        self._broker, self._locks, self._hidden = (
            self._stack.enter_context(redis.Redis(port=self._server.port, db=db))
            for db in (BROKER_DB, LOCK_DB, HIDDEN_DB)
        )
        self._workers: dict[str, Worker] = {}
        start = functools.partial(self._start, pool=pool, concurrency=concurrency)
        with ThreadPoolExecutor() as threads:
            list(threads.map(start, WAYS))
        lock_url = self._server.url(LOCK_DB)
        self._apps = {name: make_app(name, self._server.url(HIDDEN_DB), lock_url) for name in WAYS}

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_exc: object) -> None:
        for app in self._apps.values():
            app.close()
        self._stack.close()

    def sample(self, name: str, tasks: int) -> Slice:
        """Fill the queue of a way, and let its worker empty it.

        Raises:
            AssertionError: The tasks have not run in time.
            RuntimeError: A task has not run once, or not under its lock.
        """
        session, count = self._workers[name].process.pid, self._count(name)
        published_s = time.process_time()
        self._publish(name, tasks)
        published_s = time.process_time() - published_s
        self._check_locks(name, tasks if WAYS[name].locks_at == "publish" else 0)
        ran, used_s, began = count.stat().st_size, cpu_s(session), time.time()
        self._hidden.move(queue_of(name), BROKER_DB)
        wait_until(lambda: count.stat().st_size >= ran + tasks, f"{tasks} tasks of {name}", DEADLINE_S)
        records = tasks if WAYS[name].locks_at == "run" else 0
        wait_until(lambda: self._is_done(records), f"an idle worker of {name}")
        used_s = cpu_s(session) - used_s
        self._check_locks(name, 0, records)
        if count.stat().st_size != ran + tasks:
            raise RuntimeError(f"{name}: tasks have run more than once")
        took_s = count.stat().st_mtime - began  # when the last one wrote its byte
        return Slice(*(seconds / tasks * 1000 for seconds in (used_s, published_s, took_s)))

    def _start(self, name: str, pool: str, concurrency: int) -> None:
        self._count(name).touch()
        worker = Worker(
            self._directory,
            "benchmarks.workerapp",
            pool=pool,
            concurrency=concurrency,
            queues=queue_of(name),
            arguments=("-l", "WARNING"),
            environment={
                WAY: name,
                COUNT: str(self._count(name)),
                BROKER_URL: self._server.url(BROKER_DB),
                LOCK_URL: self._server.url(LOCK_DB),
            },
        )
        self._stack.callback(worker.kill)
        self._workers[name] = worker

    def _count(self, name: str) -> Path:
        return self._directory / f"{queue_of(name)}.count"

    def _publish(self, name: str, tasks: int) -> None:
        """Fill a queue that no worker sees."""
        self._locks.flushdb()
        task: Any = self._apps[name].tasks["benchmark.work"]
        for number in range(tasks):
            task.delay(number)

    def _is_done(self, records: int) -> bool:
        return not self._broker.hlen("unacked") and len(self._keys()) == records

    def _keys(self) -> list[bytes]:
        """The keys of locks, without what our workers sweep by."""
        of_sweeps = re.compile(rb".*:lines:|%b$" % KNOWN_LINES.encode())
        return [key for key in self._locks.keys("*") if not of_sweeps.match(key)]

    def _check_locks(self, name: str, locks: int, records: int = 0) -> None:
        """So many locks are held, and so many records tell that one was."""
        keys = self._keys()
        found = sum(key.endswith(b":holder") for key in keys)
        if (len(keys) - found, found) != (locks, records):
            raise RuntimeError(f"{name}: {len(keys) - found} locks of {locks}, {found} records of {records}")


def cpu_s(session: int) -> float:
    """Seconds of processor time that all processes of a session have used."""
    return sum(map(_cpu_s_of, _processes(session)))


def _processes(session: int) -> Iterator[int]:
    for process in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = process.read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if int(fields[3]) == session:
            yield int(process.parent.name)


def _cpu_s_of(pid: int) -> float:
    """As the kernel counts it, for all threads: clock_getcpuclockid(3) makes the clock's id in this way."""
    return time.clock_gettime(~pid << 3 | 2)


def measure(rounds: int, quick: bool) -> Iterator[Table]:
    """Five tables for each pool."""
    slices, tasks = (QUICK_SLICES, QUICK_TASKS) if quick else (SLICES, TASKS)
    about = f"{slices} x {tasks} tasks that do nothing, in each round."
    with EmbeddedServer() as server:
        for pool, (kind, concurrency) in POOLS.items():
            with Bench(server, kind, concurrency) as bench:
                taken = taken_by(bench, rounds, slices, tasks)
            cpu = folded(taken, lambda of: statistics.fmean(one.worker for one in of))
            rate = folded(taken, lambda of: 1000 / statistics.fmean(one.wall for one in of))
            wall = folded(taken, lambda of: statistics.fmean(one.wall for one in of))
            both = folded(taken, lambda of: statistics.fmean(one.worker + one.publisher for one in of))
            yield Table(f"worker, {pool}: CPU per task", "ms", cpu, PLAIN, promises_of_cpu(), about)
            promise = (Promise(OURS, ADDS_OF_BARE, to=BARE),)
            for what, all_of in ("CPU", cpu), ("wall time", wall):
                yield Table(f"worker, {pool}: added {what}", "ms", added(all_of), BARE, promise, about)
            yield Table(f"worker, {pool}: rate", "tasks/s", rate, PLAIN, promises_of_rate(), about)
            yield Table(f"worker, {pool}: CPU per task with its publication", "ms", both, PLAIN, about=about)


Taken = Mapping[str, Sequence[Sequence[Slice]]]
"""For each way, the slices of every round."""


def taken_by(bench: Bench, rounds: int, slices: int, tasks: int) -> Taken:
    """What every slice has taken, all ways in turns, in an order drawn anew each time."""
    taken: dict[str, list[list[Slice]]] = {name: [] for name in WAYS}
    for name in WAYS:
        bench.sample(name, WARM_UP)
    for number in range(rounds):
        for of_way in taken.values():
            of_way.append([])
        for part in range(slices):
            for name in random.Random(number * slices + part).sample(list(WAYS), len(WAYS)):
                taken[name][-1].append(bench.sample(name, tasks))
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return taken


def folded(taken: Taken, figure: Callable[[Sequence[Slice]], float]) -> Samples:
    """For each way one figure a round."""
    return {name: [figure(of_round) for of_round in rounds] for name, rounds in taken.items()}


def added(samples: Samples) -> Samples:
    """For each way what a task of it takes beyond one of plain Celery, in each round."""
    return {
        name: [one - plain for one, plain in zip(figures, samples[PLAIN])]
        for name, figures in samples.items()
        if name != PLAIN
    }


def promises_of_cpu() -> tuple[Promise, ...]:
    """What the lock may cost."""
    return (Promise(OURS, CPU_OF_PLAIN, to=PLAIN),)


def promises_of_rate() -> tuple[Promise, ...]:
    """Who must be slower."""
    peers = [name for name, way in WAYS.items() if way.locks_at == "publish"]
    return tuple(Promise(OURS, RATE_OF_PEERS, to=peer, at_least=True) for peer in peers)


if __name__ == "__main__":
    command(__doc__, measure)
