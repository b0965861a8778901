"""Violations per 1,000 kills: the same soak over our lock and the peers', on real workers that are killed.

python -m benchmarks.soak [--kills 1000] [--only NAME ...] [--seed 0] [--out docs/performance/soak.json]

Six workers (prefork -c 1) serve three keys. Each key is called once a second: without any lock the workers
would still have time for all calls. The killer chooses a running body. It kills either the pool process, as
a kernel without memory does, or the worker with all its processes, as the end of a container does, and then
starts the worker again. Every body notes its beginning and its end in one journal. The publishers and the
killer note what they do. `benchmarks.soaked` judges the journal.

All have one duration, 2 s: our lease, and the others' timeout. It stands for the 30 s and the hour of
production. Three bodies of four take up to half of it. One takes 1.25 to 2 times as long: a run longer than
was expected. All acknowledge late, with `reject_on_worker_lost`. The visibility timeout is 10 s, longer than
any body: Redis redelivers the call of a dead worker, and never the call of a living one. Each lock is
configured as its documentation recommends. python-redis-lock renews itself; redis-py's lock has a timeout.
The body takes both without waiting, and releases them in `finally`. "Other hosts" is our lock with
`setnx_same_host=False`: its workers cannot see that a holder's process is dead.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import redis
from celery_heimdall.errors import AlreadyQueuedError
from celery_once import AlreadyQueued

from benchmarks.machine import machine
from benchmarks.peers import new_clients
from benchmarks.soakapp import LEASE_S, OURS, TASK, WAYS, make_app
from benchmarks.soaked import Verdict, check, table
from examples.embedded import EmbeddedServer
from tests.chaos import nursery
from tests.chaos.history import History, Record
from tests.harness import Worker

WORKERS, KEYS, CALL_EVERY_S, KILL_WITHIN_S = 6, 3, 1.0, 0.8
STUCK_S = LEASE_S + 4.0
LONG_SHARE, SHORT, LONG = 0.25, (0.05, 0.5), (1.25, 2.0)  # the last two as shares of the lease
DRAIN_S, LOOK_S = 120.0, 0.02


class ForkedWorker(Worker):
    """Forked from a process that has imported Celery."""

    popen = staticmethod(nursery.worker)


class Soak:
    """One library's soak: a server, workers, publishers and a killer.

    Args:
        way: Whose lock.
        seed: Of the bodies' lengths, and of the killer's choices.
    """

    def __init__(self, way: str, seed: int) -> None:
        self._seed = seed
        self._stack = ExitStack()
        self._stack.enter_context(new_clients())
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="soak-")))
        server = self._stack.enter_context(EmbeddedServer())
        self.machine = [line.replace(", kept awake", "") for line in machine(server)]
        self._way, self._path = way, self._directory / "journal"
        arguments = way, server.url(0), server.url(1)
        self._environment = {"SOAK_APP": json.dumps([*arguments, str(self._path)])}
        self._journal = History(self._path)
        self._broker = self._stack.enter_context(redis.Redis.from_url(server.url(0)))
        app = make_app(*arguments)
        self._stack.callback(app.close)
        self._task = app.tasks[TASK]
        self._over = threading.Event()
        self._read = 0
        self.records: list[Record] = []
        self._running: dict[int, str] = {}
        self._met = 0
        self._workers = [self._start() for _ in range(WORKERS)]

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        for worker in self._workers:
            with suppress(ProcessLookupError):
                worker.kill()
        self._stack.close()

    def run(self, kills: int) -> Verdict:
        """Publish and kill, let the workers finish what is left, and judge."""
        keys = [f"key-{number}" for number in range(KEYS)]
        publishers = [threading.Thread(target=self._publish, args=(key,)) for key in keys]
        for publisher in publishers:
            publisher.start()
        try:
            self._kill(kills)
            time.sleep(STUCK_S)  # whether the last kills left a stuck key shows by calls
        finally:
            self._over.set()
            for publisher in publishers:
                publisher.join()
        left = self._drain()
        for call in {record["call"] for record in self.records if record["kind"] == "sent"}:
            if call in left:
                self._journal.note("queued", call=call)
        self._look()
        return check(self.records, STUCK_S)

    def _start(self) -> Worker:
        return ForkedWorker(
            self._directory, "benchmarks.soakworker", concurrency=1, environment=self._environment
        )

    def _publish(self, key: str) -> None:
        chance = random.Random(f"{self._seed} {key}")
        due = time.monotonic()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            due = max(due + CALL_EVERY_S, time.monotonic())
            seconds = LEASE_S * chance.uniform(*(LONG if chance.random() < LONG_SHARE else SHORT))
            try:
                result = self._task.apply_async((key, round(seconds, 3)))
            except (AlreadyQueued, AlreadyQueuedError):
                self._journal.note("refused", key=key)
            else:
                self._journal.note("sent", key=key, call=result.id, seconds=round(seconds, 3))

    def _kill(self, kills: int) -> None:
        """Kill bodies that run, until so many kills have met one."""
        chance = random.Random(f"{self._seed} killer")
        while self._met < kills:
            time.sleep(chance.uniform(0.0, KILL_WITHIN_S))
            while not self._look():
                time.sleep(LOOK_S)
            pid, call = chance.choice(sorted(self._running.items()))
            self._kill_one(pid, call, chance.choice(("process", "worker")))
            self._look()
            if self._met % 50 == 0:
                print(f"{self._way}: {self._met} kills", file=sys.stderr, flush=True)

    def _kill_one(self, pid: int, call: str, how: str) -> None:
        """Kill a pool process or its worker, and start the worker anew."""
        worker = next((w for w in self._workers if w.process.pid == _group_of(pid)), None)
        if worker is None:
            return
        before = time.monotonic()
        with suppress(ProcessLookupError):
            worker.kill() if how == "worker" else os.kill(pid, signal.SIGKILL)
        self._journal.note("kill", how=how, pid=pid, before=before, call=call)
        if how == "worker":
            self._workers[self._workers.index(worker)] = self._start()

    def _look(self) -> dict[int, str]:
        """Read what the journal has since the last look; the calls whose bodies run, by process."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        for record in map(json.loads, whole.splitlines()):
            self.records.append(record)
            if record["kind"] == "begin":
                self._running[record["pid"]] = record["call"]
            elif record["kind"] in ("end", "kill"):
                met = self._running.pop(record["pid"], None) is not None
                self._met += met and record["kind"] == "kill"
        return self._running

    def _drain(self) -> str:
        """Wait until the workers have nothing left to do; what the broker has then.

        A message that is on its way to a worker is nowhere for a moment, so one empty look proves nothing.
        """
        give_up, empty = time.monotonic() + DRAIN_S, 0
        while True:
            left = [*self._broker.lrange("celery", 0, -1), *self._broker.hvals("unacked")]
            empty = 0 if self._look() or left else empty + 1
            if empty == 10 or time.monotonic() > give_up:
                return b" ".join(left).decode()
            time.sleep(10 * LOOK_S)


def _group_of(pid: int) -> int:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return 0


def soak(way: str, kills: int, seed: int, keep: Path | None = None) -> dict[str, Any]:
    """One library's soak: what was counted; each violation is printed. The journal is kept, if asked for."""
    began = time.monotonic()
    with Soak(way, seed) as stage:
        verdict = stage.run(kills)
        if keep is not None:
            lines = (json.dumps(record) + "\n" for record in stage.records)
            keep.with_name(f"{keep.stem}.{way}.journal".replace(" ", "-")).write_text("".join(lines))
    for name, found in verdict.found.items():
        print(*(f"{way}: {name}: {what}" for what in found), sep="\n", end="\n" if found else "")
    about = {"seed": seed, "took_s": round(time.monotonic() - began), "machine": stage.machine}
    date = datetime.now(timezone.utc).isoformat(timespec="seconds")
    return {"date": date, **about, **verdict.as_json()}


def main() -> None:
    """Run the soak; it fails if our lock was violated."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1000, help="bodies to kill (default 1000)")
    parser.add_argument("--only", nargs="+", choices=WAYS, default=[*WAYS], metavar="NAME", help="only these")
    parser.add_argument("--seed", type=int, default=0, help="of lengths and kills (default 0)")
    parser.add_argument("--out", type=Path, help="a JSON file for the results; others' stay in it")
    parser.add_argument("--journals", action="store_true", help="keep the journals next to the results")
    chosen = parser.parse_args()
    results: dict[str, Any] = {}
    for way in chosen.only:
        results[way] = soak(way, chosen.kills, chosen.seed, chosen.out if chosen.journals else None)
        if chosen.out:
            known = json.loads(chosen.out.read_text()) if chosen.out.exists() else {}
            chosen.out.write_text(json.dumps(known | results, indent=1) + "\n")
    print(*results[chosen.only[-1]]["machine"], table(results), json.dumps(results), sep="\n")
    sys.exit(any(results.get(OURS, {"violations": {}})["violations"].values()))


if __name__ == "__main__":
    main()
