"""What `benchmarks.count` counts, one scene to a process: callers, workers.

python -m benchmarks.counted SCENE LOCK_PORT BROKER_PORT [NOTES]

Without a file for its notes, a scene only fills the queue of its worker. Else it does each thing in windows
of so many calls. A window begins and ends with getsid(2), at which callgrind writes down what this process
has executed, and with an ECHO, at which it does so for the lock server. Commands and bytes are the servers'
own figures. Nothing of ours is imported before that import has been counted.

Garbage collections, sweeps, timed looks, readings of live terms and kombu's own looks come by the clock or by
chance: there are none. Messages and records name the host: all hosts have one name here.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, cycle, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from celery import Celery

    from benchmarks.workerapp import Way

WINDOWS = 3
"""Windows of each way; their median counts. One more comes before, in which everything warms up."""

IMPORTS = {
    "Celery and Task": "from celery import Celery, Task",
    "kombu's Redis transport": "import kombu.transport.redis",
    "celery_setnx, after both": "import celery_setnx",
    "SingletonTask, after both": "from celery_setnx import SingletonTask",
}
NOTHING, RATED, WAITS = "nothing", "celery_setnx, a rate", "celery_setnx, waits in line"
QUEUED, NEWEST, BURST = (
    *("celery_setnx, until_started", "celery_setnx, newest wins"),
    "celery_setnx, newest wins, five times",
)
FIVE = 5
"""Calls of each key in a burst, whose arguments differ."""
CYCLES, CALLS = 50, 10
BATCH = 20  # calls of a fan_out: the server reads what they send to it in one go
HOST = "worker-1.example.com"
LEASE_S = 3600  # nothing is renewed, but by us


class Server:
    """A server's own figures, by a connection of ours.

    Args:
        port: Its port.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
        self._replies = self._socket.makefile("rb")

    def url(self, db: int = 0) -> str:
        """The URL of one of its databases."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def begin(self) -> None:
        """Count from here on. Garbage of its scripts has been collected; no more is for a while."""
        self._ask(b"EVAL collectgarbage();collectgarbage('stop') 0")
        self._ask(b"CONFIG RESETSTAT")
        self._ask(b"ECHO x")

    def end(self) -> dict[str, int]:
        """What it has counted."""
        self._ask(b"ECHO x")
        said = self._ask(b"INFO commandstats stats").decode()
        calls = {name: int(times) for name, times in re.findall(r"cmdstat_([^:]+):calls=(\d+)", said)}
        stats = dict(re.findall(r"^(\w+):(\d+)\r$", said, re.MULTILINE))
        return {
            "trips": int(stats["total_reads_processed"]),
            "commands": sum(calls.values()),
            "scripts": sum(calls.get(name, 0) for name in ("eval", "evalsha")),
            "sent": int(stats["total_net_input_bytes"]),
            "received": int(stats["total_net_output_bytes"]),
        }

    def _ask(self, command: bytes) -> bytes:
        self._socket.sendall(command + b"\r\n")
        line = self._replies.readline()
        return self._replies.read(int(line[1:]) + 2) if line[:1] == b"$" else line


class Windows:
    """Windows, and what the servers counted in each.

    Args:
        notes: Where that is written in the end.
        locks: The lock server.
        broker: The broker.
    """

    def __init__(self, notes: Path, locks: Server, broker: Server) -> None:
        self._file = notes
        self.locks, self.broker = locks, broker
        self._notes: list[dict[str, Any]] = []
        for _ in range(WINDOWS):
            self.begin()
            self.end(NOTHING, 1)

    def begin(self) -> None:
        """A window begins."""
        self.broker.begin()
        self.locks.begin()
        os.getsid(0)

    def end(self, name: str, calls: int) -> None:
        """The window ends in which there were so many calls of this."""
        os.getsid(0)
        found = {"locks": self.locks.end(), "broker": self.broker.end()}
        self._notes.append({"name": name, "calls": calls, **found})

    def take(self, name: str, calls: int, do: Callable[[list[int]], Any], repeats: int = 1) -> None:
        """Do something with numbers that are new, each of them so many times, in all windows."""
        for first in range(0, (WINDOWS + 1) * calls, calls):
            numbers = list(islice(cycle(range(first, first + calls // repeats)), calls))
            if first:
                self.begin()
            do(numbers)
            if first:
                self.end(name, calls)

    def leave(self) -> NoReturn:
        """End this process, once all is noted."""
        self._file.write_text(json.dumps(self._notes))
        os._exit(0)

    def steps(self, name: str, each: int = 1) -> Iterator[None]:
        """Windows of a worker, from one body to another: each takes a step, which is of so many calls."""
        for number in range(MESSAGES):
            if number > CALLS and number % CALLS == 0:
                self.end(name, CALLS * each)
            if number >= CALLS and number % CALLS == 0 and number + 1 < MESSAGES:
                self.begin()
            yield


MESSAGES = (WINDOWS + 1) * CALLS + 1
"""How many bodies run in a worker in each way."""


def callers(windows: Windows) -> None:
    """All that is done without a worker."""
    _import(windows)
    _publish(windows)
    _lock(windows)


def _import(windows: Windows) -> None:
    """What is imported, one after the other, as in `benchmarks.startup`."""
    for name, statement in IMPORTS.items():
        windows.begin()
        exec(statement, {})
        windows.end(f"import: {name}", 1)


def _publish(windows: Windows) -> None:
    """Calls that nobody runs, as in `benchmarks.fan_out`."""
    from benchmarks import fan_out
    from benchmarks.workerapp import OURS, WAYS, add_task, new_app

    app = new_app("celery", windows.broker.url(), windows.locks.url())

    def take(name: str, calls: int, way: Any, publish: fan_out.Publish, repeats: int = 1) -> None:
        task = add_task(app, name, way, fan_out.work)
        windows.take(f"publish: {name}", calls, partial(publish, task), repeats)

    for name in sorted(WAYS, key=lambda name: name == OURS):  # ours come last
        take(name, CALLS, WAYS[name], fan_out.delay)
    take("celery_setnx, dedupe", CALLS, fan_out.OWN_LOOP, fan_out.delay)
    take("fan_out, dedupe", BATCH, fan_out.OWN, fan_out.fan_out)
    take("celery-singleton, ten times", CALLS, fan_out.SINGLETON_90, fan_out.delay, fan_out.REPEATS)
    take("fan_out, dedupe, ten times", BATCH, fan_out.OWN_90, fan_out.fan_out, fan_out.REPEATS)
    for name, way in _of_newest(WAYS[OURS].base).items():
        take(name, CALLS, way, fan_out.delay)


def key_of_five(number: int) -> int:
    """The key of a burst's calls."""
    return number // FIVE


def _of_newest(base: Any) -> dict[str, Way]:
    """Calls of which each key's first, or newest, counts: of a key each, and five of a key."""
    from benchmarks.workerapp import Way

    first: dict[str, Any] = {"dedupe": "until_started"}
    newest = {
        **first,
        "on_duplicate": "replace",
        "debounce_max": LEASE_S,
    }  # else older ones run after a minute
    ways = {QUEUED: first, NEWEST: newest, "celery_setnx, debounce": {"debounce": 5}}
    found = {name: Way(base, {"singleton": options}) for name, options in ways.items()}
    for name, options in ways.items():
        found[f"{name}, five times"] = Way(base, {"singleton": {**options, "key": key_of_five}})
    return found


def _lock(windows: Windows) -> None:
    """Locks without calls, as in `benchmarks.lock_cycle` and `benchmarks.renewal`."""
    import redis

    from benchmarks import lock_cycle, renewal, server_cost

    client, keys = redis.Redis(port=windows.locks.port), lock_cycle.names(CYCLES)
    cycles = {
        "two bare commands": lock_cycle.of_raw_set_and_del(client),
        "a single key": server_cost.SingleKeyLocks(client).cycle,
        "SetnxLock": lock_cycle.of_ours(client),
        "the lock of a task": lock_cycle.TaskLocks(windows.locks).cycle,
        "redis-py Lock": lock_cycle.of_redis_py(client),
        "python-redis-lock": lock_cycle.of_python_redis_lock(client),
    }
    for name, one in cycles.items():
        windows.take(f"cycle: {name}", CYCLES, lambda _numbers, one=one: [one(key) for key in keys])
    tasks = lock_cycle.TaskLocks(windows.locks, LEASE_S)
    ours, theirs = [tasks.acquire(key) for key in keys], renewal.redis_py_locks(client, CYCLES)
    windows.take("renewal: redis-py Lock", CYCLES, lambda _numbers: renewal.reacquire_each(theirs))
    windows.take("renewal: the lock of a task", CYCLES, lambda _numbers: renewal.renew_each(ours))
    windows.take("renewal: all in one trip", CYCLES, lambda _numbers: renewal.renew_at_once(ours))


def ways_of(scene: str) -> dict[str, Way]:
    """The tasks of a scene's worker, in the order in which they run."""
    from benchmarks.workerapp import OURS, WAYS, Way

    if scene == workers.__name__:
        return {name: way for name, way in WAYS.items() if name != OURS}
    ours, wait = WAYS[OURS], {"on_conflict": "wait", "lease": LEASE_S}
    rated = {"key": (), "limit": 10, "rate": (MESSAGES, LEASE_S), **wait}
    return {
        OURS: ours,
        RATED: Way(ours.base, {"singleton": rated}),
        **{name: way for name, way in _of_newest(ours.base).items() if name in (QUEUED, NEWEST, BURST)},
        WAITS: Way(ours.base, {"singleton": wait}),
    }


def app_of(scene: str, locks: Server, broker: Server, ran: Callable[[str], object] = bool) -> Celery:
    """An app with a scene's tasks, whose bodies say that they ran, and do nothing else."""
    from benchmarks.workerapp import add_task, new_app

    def work_of(name: str) -> Callable[[int], None]:
        def work(number: int) -> None:
            ran(name)

        return work

    app = new_app("celery", broker.url(), locks.url())
    app.conf.broker_transport_options = {"unacked_restore_interval": LEASE_S}
    for name, way in ways_of(scene).items():
        add_task(app, name, way, work_of(name))
    return app


def publish(scene: str, locks: Server, broker: Server) -> None:
    """Fill the queue of a scene's worker, but for calls that are to wait."""
    app = app_of(scene, locks, broker)
    for name in ways_of(scene):
        for number in range(MESSAGES * _each(name) if name != WAITS else 0):
            app.tasks[name].delay(number)
    app.close()


def _each(name: str) -> int:
    """How many calls there are to a body."""
    return FIVE if name == BURST else 1


def workers(windows: Windows) -> None:
    """A worker of plain Celery, of two bare commands and of the peers, as in `benchmarks.worker`."""
    _be_worker("workers", windows)


def our_workers(windows: Windows) -> None:
    """A worker of ours: calls that find their lock free, and then calls that wait in line for it."""
    from celery_setnx.call import live
    from celery_setnx.run import looks, sweep

    sweep.SWEEP_S = looks.EARLIEST_S = live.FRESH_S = LEASE_S
    _be_worker("our_workers", windows)


def _be_worker(scene: str, windows: Windows) -> None:
    """Run all that is in the queue, and then what waits."""
    steps = {name: windows.steps(f"run: {name}", _each(name)) for name in ways_of(scene)}
    if WAITS in steps:
        steps[WAITS] = _lines(windows, lambda: app.tasks[WAITS])
    left = iter(range((len(steps) - (WAITS in steps)) * MESSAGES - 1, -1, -1))

    def ran(name: str) -> None:
        next(steps[name])
        if name != WAITS and next(left) == 0:
            next(steps.get(WAITS) or windows.leave())

    app = app_of(scene, windows.locks, windows.broker, ran)
    alone = dict.fromkeys(("without_gossip", "without_mingle", "without_heartbeat", "quiet"), True)
    app.Worker(hostname=f"celery@{HOST}", pool="solo", concurrency=1, loglevel="WARNING", **alone).start()


def _lines(windows: Windows, task: Callable[[], Any]) -> Iterator[None]:
    """One line after the other: its calls park, its lock is released, and they are woken and run."""
    from celery.signals import task_postrun

    from celery_setnx.call.wake import give_turns
    from celery_setnx.task import lock_for

    ends = count(1)  # of deliveries: half of them have parked

    @task_postrun.connect(sender=task())  # type: ignore[untyped-decorator]
    def release(**_details: Any) -> None:
        if next(ends) % (2 * CALLS) == CALLS:
            held.release()
            give_turns(task().app, WAITS, lock)

    for line in range(WINDOWS + 1):
        lock = lock_for(task(), (line,), {})
        held = lock.acquire().lock
        for _ in range(CALLS):
            task().delay(line)
        if line:
            windows.begin()
        for _ in range(CALLS):
            yield
        if line:
            windows.end(f"run: {WAITS}", CALLS)
    windows.leave()


SCENES = {scene.__name__: scene for scene in (callers, our_workers, workers)}


def main() -> None:
    """Play a scene, or fill the queue of its worker."""
    scene, *ports = sys.argv[1:4]
    socket.gethostname = lambda: HOST
    servers = [Server(int(port)) for port in ports]
    if len(sys.argv) == 4:
        return publish(scene, *servers)
    gc.disable()
    windows = Windows(Path(sys.argv[4]), *servers)
    SCENES[scene](windows)
    return windows.leave()


if __name__ == "__main__":
    main()
