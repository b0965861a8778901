"""What it costs to take a free lock and give it back: ours beside others', and beside two bare commands.

python -m benchmarks.lock_cycle [--rounds 7] [--quick]

One process, one server over loopback TCP, hiredis, and the same client options for all; only a task's lock
has the client that a worker makes for it. Every lock lasts 30 s, nobody waits, and nobody renews. A hundred
names are used in turns, all as long as those of tasks' locks. Every cycle makes a new lock object, as the
README of each lock does. Connections and scripts are there before the clock starts.

- ours: `SetnxLock(client, name)`, acquired and released;
- ours, a task's: what the call of a `SingletonTask` does with its lock, from its message on: it
  says who holds the lock, looks at its call's line and ticket, and its token is the task's;
- SET + DEL: `SET NX PX` and `DEL`, and nothing else. That is no lock, as it deletes what may be another's by
  now, but no lock that sends two commands in the same way can be cheaper. Over a raw connection it is the
  floor, beside which all are shown: a ratio to redis-py's lock depends on what a system call costs.

Wall time and processor time are taken in the same samples; the latter is that of this process alone. Samples
are short, and every round has five of them.
"""

from __future__ import annotations

import inspect
import itertools
import os
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import redis
import redis_lock
from celery import Celery
from redis.utils import HIREDIS_AVAILABLE

from benchmarks.figures import Curve, Promise, Samples, Table, command, interleaved
from celery_setnx import SetnxLock
from celery_setnx.arguments import Arguments
from celery_setnx.call.guard import Guard
from celery_setnx.call.message import Call
from celery_setnx.keys import digest
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.names import key_name
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import task_token
from celery_setnx.lock.verbs import Caller
from celery_setnx.run.attempt import info_of
from examples.embedded import EmbeddedServer

LEASE_S = 30
TIMEOUT_S = 2.0  # the default of setnx_timeout
TASK, WORKER = "billing.tasks.settle_the_account", "celery@worker-1.example.com"
CYCLES, QUICK_CYCLES, WARM_UP = 400, 200, 20
MESSAGES = 5000
SHORT_ROUNDS = 5  # for each round that is asked for: what disturbs the machine meets fewer samples of one way

REDIS_PY, PYTHON_REDIS_LOCK = "redis-py Lock", "python-redis-lock"
OURS, TASKS = "ours", "ours, a task's"
FLOOR, RAW_FLOOR = "SET + DEL, redis-py", "SET + DEL, raw Connection"

Cycle = Callable[[str], None]
"""Takes the lock of a name and gives it back."""


def new_client(server: EmbeddedServer) -> redis.Redis:
    """A client as one gives it to a lock: with short timeouts.

    Raises:
        RuntimeError: hiredis is not there.
    """
    if not HIREDIS_AVAILABLE:
        raise RuntimeError("these figures are taken with hiredis: pip install 'celery_setnx[hiredis]'")
    return redis.Redis(port=server.port, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S)


def names(count: int) -> list[str]:
    """So many keys of a task's locks."""
    return [key_name("setnx", TASK, digest([number])) for number in range(count)]


def held_by(outcome: Outcome) -> HeldLock:
    """The lock that was acquired.

    Raises:
        RuntimeError: It was not.
    """
    if outcome.lock is None:
        raise RuntimeError(f"a free lock was not acquired: {outcome}")
    return outcome.lock


def of_redis_py(client: redis.Redis) -> Cycle:
    """redis-py's own lock."""

    def cycle(name: str) -> None:
        lock = client.lock(name, timeout=LEASE_S)
        _expect(lock.acquire(blocking=False), True)
        lock.release()  # raises unless it was ours

    return cycle


def of_python_redis_lock(client: redis.Redis) -> Cycle:
    """The lock of python-redis-lock."""

    def cycle(name: str) -> None:
        lock = redis_lock.Lock(client, name, expire=LEASE_S)
        _expect(lock.acquire(blocking=False), True)
        lock.release()  # raises unless it was ours

    return cycle


def of_ours(client: redis.Redis) -> Cycle:
    """Our lock, without Celery."""

    def cycle(name: str) -> None:
        held = held_by(SetnxLock(client, name, lease=LEASE_S).acquire())
        _expect(held.release(), "released")

    return cycle


class TaskLocks:
    """Our locks as a worker takes them for calls of a task.

    Args:
        server: Where they live.
        lease: Seconds. Defaults to 30.
    """

    def __init__(self, server: EmbeddedServer, lease: float = LEASE_S) -> None:
        self._app = Celery("benchmark", broker="memory://", set_as_current=False)
        self._app.conf.setnx_url = server.url()
        self._guard = Guard(self._app, TASK, inspect.signature(_settle), [{"lease": lease}])
        # What a call's message brings along: the task's id, the nonce of the delivery, and the call's id.
        self._messages = itertools.cycle(
            [(str(uuid.uuid4()), os.urandom(6).hex(), os.urandom(6).hex()) for _ in range(MESSAGES)]
        )

    def acquire(self, name: str) -> HeldLock:
        """Acquire a lock as a new call does, see `celery_setnx.run.attempt.Attempt`.

        Raises:
            RuntimeError: It is held.
        """
        task_id, nonce, call_id = next(self._messages)
        call = Call(TASK, task_id, key=name, about="account_id=7")
        lock = self._guard.lock(call, Arguments((), {}), info_of(call, WORKER))
        token = task_token(task_id, 0, nonce)
        return held_by(lock.acquire_at_death(same_host=True, token=token, caller=Caller(call_id)))

    def cycle(self, name: str) -> None:
        """Acquire, and release."""
        held = self.acquire(name)
        _expect(held.release(at_least_for=0.0, mark_for=0.0), "released")


def of_set_and_del(client: redis.Redis) -> Cycle:
    """No lock, but two commands."""
    lease_ms = LEASE_S * 1000

    def cycle(name: str) -> None:
        _expect(client.set(name, uuid.uuid4().hex, nx=True, px=lease_ms), True)
        _expect(client.delete(name), 1)

    return cycle


def of_raw_set_and_del(client: redis.Redis) -> Cycle:
    """The same two commands, without redis-py's command layer."""
    connection = client.connection_pool.make_connection()
    lease_ms = LEASE_S * 1000

    def cycle(name: str) -> None:
        connection.send_command("SET", name, uuid.uuid4().hex, "NX", "PX", lease_ms)
        _expect(connection.read_response(), b"OK")
        connection.send_command("DEL", name)
        _expect(connection.read_response(), 1)

    return cycle


def sample(cycle: Cycle, keys: Sequence[str], count: int, cpu_us: list[float]) -> float:
    """Microseconds that a cycle takes; those of processor time are added to a list."""
    for number in range(WARM_UP):
        cycle(keys[number % len(keys)])
    cpu_began, began = time.process_time(), time.perf_counter()
    for number in range(count):
        cycle(keys[number % len(keys)])
    took, cpu = time.perf_counter() - began, time.process_time() - cpu_began
    cpu_us.append(cpu / count * 1e6)
    return took / count * 1e6


def measure(rounds: int, quick: bool) -> Iterator[Table | Curve]:
    """The wall time and the processor time of a cycle."""
    count, keys = QUICK_CYCLES if quick else CYCLES, names(100)
    with EmbeddedServer() as server, new_client(server) as client:
        cycles = {
            REDIS_PY: of_redis_py(client),
            PYTHON_REDIS_LOCK: of_python_redis_lock(client),
            OURS: of_ours(client),
            TASKS: TaskLocks(server).cycle,
            FLOOR: of_set_and_del(client),
            RAW_FLOOR: of_raw_set_and_del(client),
        }
        cpu: Samples = {name: [] for name in cycles}
        wall = interleaved(
            {name: partial(sample, cycle, keys, count, cpu[name]) for name, cycle in cycles.items()},
            rounds * SHORT_ROUNDS,
        )
    about = f"{count:,} times acquire and release of a free lock, over {len(keys)} names"
    fast = Promise(OURS, 0.60, REDIS_PY)
    slower = Promise(PYTHON_REDIS_LOCK, 2.0, OURS, at_least=True)
    cheap = tuple(Promise(name, 0.50, REDIS_PY) for name in (OURS, TASKS))
    few = Promise(OURS, 1.6, RAW_FLOOR), Promise(TASKS, 1.9, RAW_FLOOR)
    little = Promise(OURS, 1.25, RAW_FLOOR), Promise(TASKS, 1.5, RAW_FLOOR)
    yield Table("Lock cycle: wall time", "us", wall, RAW_FLOOR, (fast, slower, *few), about)
    yield Table("Lock cycle: processor time", "us", cpu, RAW_FLOOR, (*cheap, *little), about)


def _expect(found: object, expected: object) -> None:
    if found != expected:
        raise RuntimeError(f"expected {expected!r}, found {found!r}: a lock was not acquired or released")


def _settle() -> None:
    """The task: nobody runs it."""


if __name__ == "__main__":
    command(__doc__, measure)
