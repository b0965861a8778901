"""What a lock costs the server: time per acquire and release, and memory while it is held.

python -m benchmarks.server_cost [--rounds 7] [--quick]

The least that a lock with an owner and a deadline can do on the server's clock is one key whose value is
both, and two scripts: `SINGLE_KEY_ACQUIRE` and `SINGLE_KEY_RELEASE` below. Ours is compared with that. It
does more: its value is the SETNX recipe's, and a record beside it says who the holder is, and its fence.

Time is what `INFO commandstats` adds up for the commands that a client sends. A server lists what a script
calls as well, and the time of the script contains it (which is checked here), so that is not added once more.
It is taken with names that were used before, of which our released record is still known, and with new ones.
Beside it stands the server's whole processor time (`INFO cpu`), which has the reading of commands and the
writing of replies in it.

Memory is what `INFO memory` calls used, before and while many locks are held, per lock: keys, values,
expiries, and what the server needs to find them. Names, tokens and what the record says are a task's.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from functools import partial

import redis

from benchmarks.figures import Curve, Promise, Samples, Table, command, interleaved
from benchmarks.lock_cycle import (
    FLOOR,
    LEASE_S,
    OURS,
    REDIS_PY,
    SHORT_ROUNDS,
    TASKS,
    Cycle,
    TaskLocks,
    names,
    new_client,
    of_ours,
    of_redis_py,
    of_set_and_del,
)
from celery_setnx import SetnxLock
from celery_setnx.lock.record import task_token
from examples.embedded import EmbeddedServer

# KEYS 1 lock: token|deadline (us). ARGV 1 token, 2 lease (ms). Returns {word, deadline us, lock if held}
SINGLE_KEY_ACQUIRE = """
local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000000 + tonumber(time[2])
local held = redis.call('GET', KEYS[1])
if held then
  local deadline = string.match(held, '|(%d+)$')
  if now < tonumber(deadline) then return {'held', deadline, held} end
end
local deadline = string.format('%.0f', now + tonumber(ARGV[2]) * 1000)
redis.call('SET', KEYS[1], ARGV[1] .. '|' .. deadline, 'PX', ARGV[2])
return {'acquired', deadline}
"""

# KEYS 1 lock. ARGV 1 token. Returns word
SINGLE_KEY_RELEASE = """
local held = redis.call('GET', KEYS[1])
if not held or string.match(held, '^(.*)|%d+$') ~= ARGV[1] then return 'lost' end
redis.call('DEL', KEYS[1])
return 'released'
"""

SINGLE_KEY = "a single key"
SENT = {
    SINGLE_KEY: ("evalsha",),
    REDIS_PY: ("set", "evalsha"),
    OURS: ("evalsha",),
    TASKS: ("evalsha",),
    FLOOR: ("set", "del"),
}
"""What a cycle of each way sends: as many commands of each kind, two in all."""

CYCLES, QUICK_CYCLES = 800, 200
LOCKS, QUICK_LOCKS = 20_000, 4000
LONG_LEASE_S = 600  # no lock may end while the others are acquired
TIMES, BYTES = 1.8, 600


class SingleKeyLocks:
    """A lock that is one key.

    Args:
        client: The client.
        lease: Seconds. Defaults to 30.
    """

    def __init__(self, client: redis.Redis, lease: float = LEASE_S) -> None:
        self._acquire = client.register_script(SINGLE_KEY_ACQUIRE)
        self._release = client.register_script(SINGLE_KEY_RELEASE)
        self._lease_ms = int(lease * 1000)

    def acquire(self, name: str) -> str:
        """Acquire a lock with a task's token, and return that.

        Raises:
            RuntimeError: It is held.
        """
        token = new_token()
        word, *_found = self._acquire(keys=[name], args=[token, self._lease_ms])
        if word != b"acquired":
            raise RuntimeError(f"{name} was not acquired: {word!r}")
        return token

    def cycle(self, name: str) -> None:
        """Acquire, and release.

        Raises:
            RuntimeError: It was not ours.
        """
        word = self._release(keys=[name], args=[self.acquire(name)])
        if word != b"released":
            raise RuntimeError(f"{name} was not released: {word!r}")


def new_token() -> str:
    """A token as tasks have it."""
    return task_token(str(uuid.uuid4()), 0, uuid.uuid4().hex)


def check_scripts_contain_calls(client: redis.Redis) -> None:
    """See that the time of a script has that of its commands in it.

    Raises:
        RuntimeError: It has not: what is added up here would be too little.
    """
    client.config_resetstat()
    client.eval("for _ = 1, 20000 do redis.call('SET', KEYS[1], 'value') end", 1, "a-key")
    used = client.info("commandstats")
    script_us, calls_us = (used[f"cmdstat_{name}"]["usec"] for name in ("eval", "set"))
    client.delete("a-key")
    if script_us < calls_us:
        raise RuntimeError(f"a script took {script_us} us, but its commands {calls_us} us")


def server_us(
    client: redis.Redis, cycle: Cycle, keys: list[str], sent: tuple[str, ...], cpu_us: list[float]
) -> float:
    """Microseconds per cycle, of the commands that are sent; the whole processor time is added to a list.

    Raises:
        RuntimeError: Other commands were sent than expected.
    """
    client.config_resetstat()
    cpu_began = cpu_s(client)
    for key in keys:
        cycle(key)
    cpu_us.append((cpu_s(client) - cpu_began) / len(keys) * 1e6)
    stats = client.info("commandstats")
    used = [stats.get(f"cmdstat_{name}", {"calls": 0, "usec": 0}) for name in sent]
    if sum(one["calls"] for one in used) != 2 * len(keys):
        raise RuntimeError(f"{2 * len(keys)} commands should have been sent, of {sent}: {used}")
    return sum(float(one["usec"]) for one in used) / len(keys)


def known(client: redis.Redis, cycle: Cycle, sent: tuple[str, ...], count: int, cpu_us: list[float]) -> float:
    """A cycle's time with names that were used a moment ago."""
    client.flushall()
    keys = names(100)
    for key in keys:
        cycle(key)
    return server_us(client, cycle, list(itertools.islice(itertools.cycle(keys), count)), sent, cpu_us)


def new(client: redis.Redis, cycle: Cycle, sent: tuple[str, ...], count: int, cpu_us: list[float]) -> float:
    """A cycle's time with names that were never used before."""
    client.flushall()
    cycle("a-key")
    return server_us(client, cycle, names(count), sent, cpu_us)


def bytes_per_lock(client: redis.Redis, acquire: Callable[[str], object], keys: list[str]) -> float:
    """Bytes by which the server's memory grows with each lock that is held.

    Raises:
        RuntimeError: Not all are held.
    """
    client.flushall()
    client.config_resetstat()
    before = used_bytes(client)
    for key in keys:
        acquire(key)
    grown = used_bytes(client) - before
    held = client.exists(*keys)
    if held != len(keys):
        raise RuntimeError(f"{held} of {len(keys)} locks are held")
    return grown / len(keys)


def used_bytes(client: redis.Redis) -> int:
    """Memory that the server uses, once its tables have grown, which it does a bit at a time."""
    found = [int(client.info("memory")["used_memory"])]
    while len(found) < 3 or len(set(found[-3:])) > 1:
        time.sleep(0.12)
        found.append(int(client.info("memory")["used_memory"]))
        if len(found) > 50:
            raise RuntimeError(f"the server's memory goes on changing: {found[-3:]}")
    return found[-1]


def cpu_s(client: redis.Redis) -> float:
    """Processor time that the server has used."""
    about = client.info("cpu")
    return float(about["used_cpu_user"]) + float(about["used_cpu_sys"])


def measure(rounds: int, quick: bool) -> Iterator[Table | Curve]:
    """Time with known and with new names, and memory."""
    count = QUICK_CYCLES if quick else CYCLES
    with EmbeddedServer() as server, new_client(server) as client:
        check_scripts_contain_calls(client)
        cycles = {
            SINGLE_KEY: SingleKeyLocks(client).cycle,
            REDIS_PY: of_redis_py(client),
            OURS: of_ours(client),
            TASKS: TaskLocks(server).cycle,
            FLOOR: of_set_and_del(client),
        }
        cpu: Samples = {name: [] for name in cycles}
        unseen: Samples = {name: [] for name in cycles}
        about = f"{count:,} times acquire and release, one after the other"
        again = interleaved(_ways(known, client, cycles, count, cpu), rounds * SHORT_ROUNDS)
        yield Table("Server time, names used before", "us", again, SINGLE_KEY, _times(), about)
        yield Table("Server's whole processor time, names used before", "us", cpu, SINGLE_KEY, (), about)
        first = interleaved(_ways(new, client, cycles, count, unseen), rounds * SHORT_ROUNDS)
        yield Table("Server time, new names", "us", first, SINGLE_KEY, _times(), about)
        yield _memory(server, client, *((1, QUICK_LOCKS) if quick else (rounds, LOCKS)))


def _ways(
    take: Callable[..., float], client: redis.Redis, cycles: Mapping[str, Cycle], count: int, cpu: Samples
) -> dict[str, Callable[[], float]]:
    return {
        name: partial(take, client, cycle, SENT[name], count, cpu[name]) for name, cycle in cycles.items()
    }


def _times() -> tuple[Promise, ...]:
    return Promise(OURS, TIMES, SINGLE_KEY), Promise(TASKS, TIMES, SINGLE_KEY)


def _memory(server: EmbeddedServer, client: redis.Redis, rounds: int, count: int) -> Table:
    keys = names(count)
    tasks = TaskLocks(server, LONG_LEASE_S)
    ways = {
        SINGLE_KEY: SingleKeyLocks(client, LONG_LEASE_S).acquire,
        OURS: lambda name: SetnxLock(client, name, lease=LONG_LEASE_S).acquire(token=new_token()),
        TASKS: tasks.acquire,
    }
    samples = interleaved(
        {name: partial(bytes_per_lock, client, acquire, keys) for name, acquire in ways.items()}, rounds
    )
    about = f"{count:,} locks held at once"
    return Table("Memory of a held lock", "bytes", samples, SINGLE_KEY, (Promise(TASKS, BYTES),), about)


if __name__ == "__main__":
    command(__doc__, measure)
