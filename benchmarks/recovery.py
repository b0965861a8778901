"""How long a key stays locked after kill -9: from the kill to the start of the next body with the same key.

python -m benchmarks.recovery [--rounds 7] [--quick]

In every round a body of each way starts, holds its lock, and is killed a moment later: its pool process
alone, or the whole worker with all its processes. From just before the kill the key is called again every
50 ms, until a body starts. (Who takes the lock when a call is published refuses these calls; ours come to a
worker and are skipped; redis-py's Lock waits in its one call, and polls.) After the death of a worker the
calls go to others: on the same host, or with `setnx_same_host=False`, which is how a worker on another host
sees it.

All have one duration: it is our lease and the others' expiry. But theirs runs from the acquisition, so it
must be longer than the longest body, and they are locked out for as long; ours is renewed, and need not.
They are killed early in it, which is the worst for everybody.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import redis
from celery_heimdall.errors import AlreadyQueuedError

from benchmarks.figures import Promise, Samples, Table, command
from benchmarks.peers import new_clients
from benchmarks.recoveryapp import (
    BROKER_URL,
    DURATION,
    ELSEWHERE,
    ELSEWHERE_TOO,
    HEIMDALL,
    LOCK,
    LOCK_URL,
    ONCE,
    OURS,
    SINGLETON,
    STARTS,
    make_app,
)
from examples.embedded import EmbeddedServer
from tests.harness import Worker, wait_until

DURATION_S, QUICK_DURATION_S = 4, 2
AGAIN_S, SETTLE_S, DEADLINE_S = 0.05, 0.2, 60.0
BROKER_DB, LOCK_DB = 0, 1

CHILD, WORKER = "pool process", "worker"
PEERS = (ONCE, SINGLETON, HEIMDALL, LOCK)
KILLED: Mapping[str, tuple[str, ...]] = {CHILD: (OURS, *PEERS), WORKER: (OURS, ELSEWHERE, *PEERS)}

# Of celery-once's time, which is what is left of the duration.
CHILD_OF_ONCE, WORKER_OF_ONCE, ELSEWHERE_OF_ONCE = 0.25, 0.25, 1.3

Row = tuple[str, str]
"""What is killed, and the way."""


class Bench:
    """A server, the worker that loses its pool processes, one that is killed, and those that live on.

    Args:
        duration_s: Our lease, and the others' expiry.
    """

    def __init__(self, duration_s: int) -> None:
        self._stack = ExitStack()
        self._stack.enter_context(new_clients())
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        server = self._stack.enter_context(EmbeddedServer())
        urls = server.url(BROKER_DB), server.url(LOCK_DB)
        self._environment = {BROKER_URL: urls[0], LOCK_URL: urls[1], DURATION: str(duration_s)}
        self._broker = self._stack.enter_context(redis.Redis.from_url(urls[0]))
        self._app = make_app(*urls, duration_s)
        self._stack.callback(self._app.close)
        # Ours is the only process of its pool to die: to replace many at once takes a worker its time.
        self._start(queues="child-of-ours", concurrency=2)
        self._start(queues="child-of-peers", concurrency=2 * len(PEERS))
        self._start(queues="rival", concurrency=len(KILLED[WORKER]))
        self._start(queues="elsewhere", concurrency=1, environment={ELSEWHERE_TOO: "1"})

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stack.close()

    def recoveries_s(self, number: int) -> dict[Row, float]:
        """Seconds from the kill to the next body, of everything that is killed in a round.

        Raises:
            AssertionError: No body has started in time.
            RuntimeError: A body has started beside the one that was to be killed.
        """
        victim = self._start(queues="victim", concurrency=len(KILLED[WORKER]))
        rows = [(killed, way) for killed, ways in KILLED.items() for way in ways]
        self._broker.delete(STARTS)
        for row in rows:
            self._call(row, number, holds=True)
        held = wait_until(lambda: self._all_started(rows, holds=True), "bodies that hold locks", DEADLINE_S)
        for row in rows:
            self._call(row, number, holds=False)
        time.sleep(SETTLE_S)
        killed_at = self._kill(victim, [int(note["pid"]) for row, note in held.items() if row[0] == CHILD])
        begun = self._await_next(rows, number)
        if min(note["at"] for note in begun.values()) < min(killed_at.values()):
            raise RuntimeError("a body has started although its lock was held")
        return {row: note["at"] - killed_at[row[0]] for row, note in begun.items()}

    def _start(self, *, queues: str, concurrency: int, environment: dict[str, str] | None = None) -> Worker:
        worker = Worker(
            self._directory,
            "benchmarks.recoveryapp",
            concurrency=concurrency,
            queues=queues,
            environment={**self._environment, **(environment or {})},
        )
        self._stack.callback(_end, worker)
        return worker

    def _call(self, row: Row, number: int, *, holds: bool) -> None:
        killed, way = row
        task: Any = self._app.tasks[way]
        # Heimdall raises it where its lock expires between its two looks: the next call will get the lock.
        with suppress(AlreadyQueuedError):
            task.apply_async((f"{killed}:{way}:{number}", holds), queue=queue_of(row, holds=holds))

    def _kill(self, victim: Worker, children: list[int]) -> dict[str, float]:
        """When each was killed."""
        children_at = time.monotonic()
        for pid in children:
            os.kill(pid, signal.SIGKILL)
        worker_at = time.monotonic()
        victim.kill()
        return {CHILD: children_at, WORKER: worker_at}

    def _await_next(self, rows: list[Row], number: int) -> dict[Row, Any]:
        """Call again what has not begun, until all have."""
        give_up = time.monotonic() + DEADLINE_S
        while len(begun := self._started(holds=False)) < len(rows):
            if time.monotonic() > give_up:
                raise AssertionError(f"not within {DEADLINE_S:g} s: {set(rows) - set(begun)}")
            next_at = time.monotonic() + AGAIN_S
            for row in rows:
                if row not in begun and row[1] != LOCK:
                    self._call(row, number, holds=False)
            time.sleep(max(0.0, next_at - time.monotonic()))
        return begun

    def _all_started(self, rows: list[Row], *, holds: bool) -> dict[Row, Any]:
        started = self._started(holds=holds)
        return started if len(started) == len(rows) else {}

    def _started(self, *, holds: bool) -> dict[Row, Any]:
        """The first start of each."""
        started: dict[Row, Any] = {}
        for entry in self._broker.lrange(STARTS, 0, -1):
            note = json.loads(entry)
            if note["holds"] == holds:
                started.setdefault((note["key"].partition(":")[0], note["way"]), note)
        return started


def queue_of(row: Row, *, holds: bool) -> str:
    """The queue of the worker that a call is for."""
    killed, way = row
    if killed == CHILD:
        return "child-of-ours" if way == OURS else "child-of-peers"
    if holds:
        return "victim"
    return "elsewhere" if way == ELSEWHERE else "rival"


def _end(worker: Worker) -> None:
    if worker.process.poll() is None:
        worker.kill()


def measure(rounds: int, quick: bool) -> Iterator[Table]:
    """A table for the death of a pool process, and one for that of a worker."""
    duration_s = QUICK_DURATION_S if quick else DURATION_S
    found: dict[str, Samples] = {killed: {way: [] for way in ways} for killed, ways in KILLED.items()}
    with Bench(duration_s) as bench:
        for number in range(rounds):
            for (killed, way), seconds in bench.recoveries_s(number).items():
                found[killed][way].append(seconds)
            print(f"round {number + 1} of {rounds}", file=sys.stderr)
    promises = {
        CHILD: (Promise(OURS, CHILD_OF_ONCE, to=ONCE),),
        WORKER: (Promise(OURS, WORKER_OF_ONCE, to=ONCE), Promise(ELSEWHERE, ELSEWHERE_OF_ONCE, to=ONCE)),
    }
    for killed, samples in found.items():
        title = f"recovery from kill -9 of a {killed}, duration {duration_s} s"
        yield Table(title, "s", samples, ONCE, promises[killed])


if __name__ == "__main__":
    command(__doc__, measure)
