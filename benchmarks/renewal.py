"""What it costs to renew 10,000 locks of one process, as its keeper does each third of a lease.

python -m benchmarks.renewal [--rounds 7] [--quick]

The locks are tasks' locks, with the client that a worker makes for them. A period renews each of them once:

- ours, all at once: `celery_setnx.lock.held.renew_all`, which is what the keeper calls;
- ours, one by one: `renew()` of each;
- redis-py, one by one: `reacquire()` of each, which sets a lock's time to live anew. redis-py's locks renew
  themselves no other way.

Every period is checked: all locks must last longer after it than before. A round trip is a write to the
connection, of one command or of many, after which replies are read. They are counted in a period of their
own; for ours also after `SCRIPT FLUSH`, as a server's successor in a failover knows no scripts. With
`--quick` there are fewer locks, and no promise of an absolute time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import redis
from redis.lock import Lock

from benchmarks.figures import Curve, Promise, Samples, Table, command, interleaved
from benchmarks.lock_cycle import TaskLocks, names, new_client
from benchmarks.server_cost import cpu_s
from celery_setnx.lock.held import HeldLock, renew_all
from examples.embedded import EmbeddedServer

LOCKS, QUICK_LOCKS = 10_000, 3000
LEASE_S = 600  # no lock may end while those of the others are renewed
ROUND_TRIPS, TIMES, CPU_S = 100, 0.35, 0.5

ALL, EACH, REDIS_PY = "ours, all at once", "ours, one by one", "redis-py, one by one"
FLUSHED = "ours, all at once, scripts flushed"

Renew = Callable[[], None]


def renew_at_once(locks: Sequence[HeldLock]) -> None:
    """Renew all in one go.

    Raises:
        RuntimeError: One was not renewed.
    """
    failed = [error for error in renew_all(locks) if error is not None]
    lost = [held.lost for held in locks if held.lost is not None]
    if failed or lost:
        raise RuntimeError(f"{len(failed)} renewals failed, and {len(lost)} locks are lost: {failed + lost}")


def renew_each(locks: Sequence[HeldLock]) -> None:
    """Renew one after the other; raises if one cannot be."""
    for held in locks:
        held.renew()


def reacquire_each(locks: Sequence[Lock]) -> None:
    """Renew redis-py's locks one after the other; raises if one cannot be."""
    for lock in locks:
        lock.reacquire()


def redis_py_locks(client: redis.Redis, count: int) -> list[Lock]:
    """So many held locks of redis-py.

    Raises:
        RuntimeError: One is held by another.
    """
    locks = [client.lock(f"{name}:of-redis-py", timeout=LEASE_S) for name in names(count)]
    if not all(lock.acquire(blocking=False) for lock in locks):
        raise RuntimeError("a free lock was not acquired")
    return locks


def last_longer(client: redis.Redis, keys: Sequence[str], since: float, before: Sequence[int]) -> bool:
    """True if all keys live as much longer as time has passed."""
    passed_ms = (time.monotonic() - since) * 1000
    return all(now > then - passed_ms for now, then in zip(times_to_live(client, keys), before))


def times_to_live(client: redis.Redis, keys: Sequence[str]) -> list[int]:
    """Milliseconds for which each key lives."""
    with client.pipeline(transaction=False) as pipe:
        for key in keys:
            pipe.pttl(key)
        return [int(found) for found in pipe.execute()]


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many writes the connections of this process do meanwhile, in a list of one number."""
    writes, send = [0], redis.Connection.send_packed_command

    def send_counted(self: redis.Connection, *args: Any, **kwargs: Any) -> Any:
        writes[0] += 1
        return send(self, *args, **kwargs)

    redis.Connection.send_packed_command = send_counted  # type: ignore[method-assign]
    try:
        yield writes
    finally:
        redis.Connection.send_packed_command = send  # type: ignore[method-assign]


class Period:
    """One way to renew all locks, and what periods of it have used.

    Args:
        renew: Renews each lock once.
        keys: The locks' keys.
        client: Asks the server about these.

    Attributes:
        renew: See above.
        wall_s: Seconds that each period took.
        server_s: Processor time that the server used in it.
    """

    def __init__(self, renew: Renew, keys: Sequence[str], client: redis.Redis) -> None:
        self.renew = renew
        self._keys = keys
        self._client = client
        self.wall_s: list[float] = []
        self.server_s: list[float] = []

    def cpu_s(self) -> float:
        """Renew all: seconds of processor time of this process.

        Raises:
            RuntimeError: A lock does not last longer than before.
        """
        before, since = times_to_live(self._client, self._keys), time.monotonic()
        server_s, own_s, began = cpu_s(self._client), time.process_time(), time.perf_counter()
        self.renew()
        took_s, used_s = time.perf_counter() - began, time.process_time() - own_s
        self.wall_s.append(took_s)
        self.server_s.append(cpu_s(self._client) - server_s)
        if not last_longer(self._client, self._keys, since, before):
            raise RuntimeError("a lock was not renewed")
        return used_s

    def round_trips(self) -> float:
        """Renew all, and count the writes.

        Raises:
            RuntimeError: There was none.
        """
        with counted() as writes:
            self.renew()
        if not writes[0]:
            raise RuntimeError("nothing was written to any connection that is known here")
        return float(writes[0])


def measure(rounds: int, quick: bool) -> Iterator[Table | Curve]:
    """Round trips, processor time of both sides, and wall time of a period."""
    count = QUICK_LOCKS if quick else LOCKS
    with EmbeddedServer() as server, new_client(server) as client:
        periods = _periods(server, client, count)
        for period in periods.values():
            period.renew()
        cpu = interleaved({name: period.cpu_s for name, period in periods.items()}, rounds)
        trips = {name: [period.round_trips()] for name, period in periods.items()}
        client.script_flush()
        trips[FLUSHED] = [periods[ALL].round_trips()]
    about = f"one period of {count:,} locks"
    few = (Promise(ALL, ROUND_TRIPS),)
    cheap = (Promise(ALL, TIMES, REDIS_PY), *(() if quick else (Promise(ALL, CPU_S),)))
    server_s: Samples = {name: period.server_s for name, period in periods.items()}
    wall_s: Samples = {name: period.wall_s for name, period in periods.items()}
    yield Table("Renewal: round trips", "round trips", trips, REDIS_PY, few, about)
    yield Table("Renewal: processor time", "s", cpu, REDIS_PY, cheap, about)
    yield Table("Renewal: server's processor time", "s", server_s, REDIS_PY, (), about)
    yield Table("Renewal: wall time", "s", wall_s, REDIS_PY, (), about)


def _periods(server: EmbeddedServer, client: redis.Redis, count: int) -> dict[str, Period]:
    tasks, keys = TaskLocks(server, LEASE_S), names(count)
    ours = [tasks.acquire(key) for key in keys]
    theirs = redis_py_locks(client, count)
    return {
        ALL: Period(partial(renew_at_once, ours), keys, client),
        EACH: Period(partial(renew_each, ours), keys, client),
        REDIS_PY: Period(partial(reacquire_each, theirs), [str(lock.name) for lock in theirs], client),
    }


if __name__ == "__main__":
    command(__doc__, measure)
