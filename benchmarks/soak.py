"""Violations per 1,000 kills: the same soak over our lock and the peers', on real workers that are killed.

python -m benchmarks.soak [--kills 1000] [--only NAME ...] [--seed 0] [--out docs/performance/soak.json]

Eight workers (prefork -c 1) serve five keys. Each key is called once a second: without any lock the workers
would still have time for all calls. The killer kills every second body, at a random moment of its length. It
kills the pool process alone, as a kernel without memory does, or the worker with all its processes, as the
end of a container does; then the worker is started again. Every body notes its beginning and its end in one
journal. The publishers and the killer note what they do. `benchmarks.soaked` judges the journal.

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
from concurrent.futures import Future, ThreadPoolExecutor
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
from tests.chaos.history import History, Record, of_kind
from tests.harness import Worker

WORKERS, KEYS, CALL_EVERY_S, KILLED = 8, 5, 1.0, 0.5
STUCK_S = LEASE_S + 6.0  # on a busy machine a worker takes seconds to start
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
        self._running: dict[int, Record] = {}
        self._restarts: list[Future[None]] = []
        self._pool = self._stack.enter_context(ThreadPoolExecutor())
        self._met = 0
        self._workers = list(self._pool.map(lambda _: self._start(), range(WORKERS)))

    def __enter__(self) -> Soak:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        self._pool.shutdown()
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
        for restart in self._restarts:
            restart.result()
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
        """Kill bodies until so many kills have met one."""
        chance, seen, due = random.Random(f"{self._seed} killer"), 0, dict[float, Record]()
        while self._met < kills:
            time.sleep(LOOK_S)
            running = self._look()
            for body in of_kind(self.records[seen:], "begin"):
                at, is_killed = body["t"] + body["seconds"] * chance.random(), chance.random() < KILLED
                due |= {at: body} if is_killed else {}
            seen = len(self.records)
            for at in [at for at in due if at < time.monotonic()]:
                body = due.pop(at)
                if running.get(body["pid"]) == body:
                    self._kill_one(body["pid"], chance.choice(("process", "worker")))

    def _kill_one(self, pid: int, how: str) -> None:
        """Kill a pool process, or its worker, which is started again."""
        slot = next((n for n, w in enumerate(self._workers) if w.process.pid == _group_of(pid)), None)
        if slot is None:
            return
        before = time.monotonic()
        with suppress(ProcessLookupError):
            self._workers[slot].kill() if how == "worker" else os.kill(pid, signal.SIGKILL)
        self._journal.note("kill", how=how, pid=pid, before=before)
        if how == "worker":
            self._restarts.append(self._pool.submit(self._restart, slot))

    def _restart(self, slot: int) -> None:
        self._workers[slot] = self._start()

    def _look(self) -> dict[int, Record]:
        """Read what the journal has since the last look; the beginnings of bodies that run, by process."""
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        for record in map(json.loads, whole.splitlines()):
            self.records.append(record)
            if record["kind"] == "begin":
                self._running[record["pid"]] = record
            elif record["kind"] in ("end", "kill"):
                met = self._running.pop(record["pid"], None) is not None
                self._met += met and record["kind"] == "kill"
                if record["kind"] == "kill" and self._met % 50 == 0:
                    print(f"{self._way}: {self._met} kills", file=sys.stderr, flush=True)
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
    """Run the soak; it fails if our lock was violated, but not for what a slow machine can make late."""
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
    ours = results.get(OURS, {"violations": {}})["violations"]
    sys.exit(any(ours.get(name) for name in ("overlap", "twice", "lost")))


if __name__ == "__main__":
    main()
