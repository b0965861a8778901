"""A rolling deploy: workers and producers of any stage on one Redis, and what the journal says of it."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import redis
from celery import Celery
from celery.result import AsyncResult

from tests.harness import Journal, Worker, wait_until

DB = 4
RETRY_DELAY_S = 0.2
HANDED = "migration:handed"
"""Redis set of the ids that producers were handed: each of them must have an answer in the end."""
STOP = "migration:stop"

ROOT = Path(__file__).parents[2]
_OLD = ("qo_*", "SINGLETONLOCK_*", "*settle-lock-*")
_STARTS, _ENDS = ("start",), ("end", "failed")


class Overlap(NamedTuple):
    """Two bodies of one account that ran at once: which codes ran them."""

    account: str
    first: str
    second: str


def overlaps(entries: list[dict[str, Any]]) -> list[Overlap]:
    """All bodies that started while another of the same account ran."""
    running: dict[str, dict[str, str]] = {}
    found = []
    for entry in entries:
        of_account = running.setdefault(entry["account"], {})
        if entry["what"] in _STARTS:
            found += [Overlap(entry["account"], run_by, entry["run_by"]) for run_by in of_account.values()]
            of_account[entry["task_id"]] = entry["run_by"]
        elif entry["what"] in _ENDS:
            of_account.pop(entry["task_id"], None)
    return found


class Deploy:
    """The processes of one shop.

    Args:
        page: The migration page whose code they run.
        url: The server, without a database.
        directory: Where the workers log to.
        shop: A client of the shop's database: broker, results and locks.
        control: A client of the journal's database.
    """

    def __init__(self, page: str, url: str, directory: Path, shop: redis.Redis, control: redis.Redis) -> None:
        self.page = page
        self.url = url
        self.shop = shop
        self.control = control
        self.journal = Journal(control)
        self._results = Celery(backend=f"{url}/{DB}", set_as_current=False)
        self._directory = directory
        self.workers: list[Worker] = []
        self.producers: list[tuple[str, subprocess.Popen[str]]] = []
        self.edits: list[tuple[str, str]] = []

    def worker(self, stage: str) -> Worker:
        """Start a worker with the code of a stage. A queue of the stage's name is its alone."""
        worker = Worker(
            self._directory,
            "tests.migration.app",
            queues=f"celery,{stage}",
            environment=self._environment(stage),
        )
        self.workers.append(worker)
        return worker

    def workers_of(self, *stages: str) -> list[Worker]:
        """Start a worker of each stage, all at once."""
        with ThreadPoolExecutor() as pool:
            return list(pool.map(self.worker, stages))

    def producer(self, stage: str) -> None:
        """Start a producer with the code of a stage."""
        self.producers.append((stage, self._publisher(stage)))

    def publish(self, stage: str, account: str, queue: str) -> str | None:
        """Publish one call with the code of a stage: the id that it was handed."""
        said, _ = self._publisher(stage, account, queue).communicate(timeout=30)
        word = said.strip()
        return None if word == "None" else word

    def stop_producers(self, *stages: str) -> None:
        """Let the producers of these stages end."""
        for stage in stages:
            self.control.set(f"{STOP}:{stage}", 1)
        for stage, process in self.producers:
            if stage in stages:
                assert process.wait(30) == 0, f"the producer with the code of {stage} failed"

    def wait_for(self, *pairs: tuple[str, str], count: int = 4) -> None:
        """Wait until so many calls of each kind have run: (published by, run by)."""

        def seen() -> bool:
            ends = [(e["published_by"], e["run_by"]) for e in self.journal.entries(what="end")]
            return all(ends.count(pair) >= count for pair in pairs)

        wait_until(seen, f"{pairs}, {count} times each", 40)

    def result(self, task_id: str | None) -> AsyncResult:
        """The result of a call."""
        return self._results.AsyncResult(task_id)

    def answers(self) -> dict[str, Any]:
        """What every id that was handed out has ended with, once all have."""
        ids = self.control.smembers(HANDED)

        def unanswered() -> list[str]:
            return [i for i in ids if self.result(i).state not in ("SUCCESS", "FAILURE", "REVOKED")]

        wait_until(lambda: not unanswered(), f"an answer for each of {len(ids)} ids", 30)
        results = {i: self.result(i) for i in ids}
        assert {r.state for r in results.values()} == {"SUCCESS"}
        return {i: r.result for i, r in results.items()}

    def locks_left(self) -> set[str]:
        """Keys that lock or mark something: theirs and ours, but not the records of released locks."""
        ours = {key for key in self.shop.scan_iter("setnx:{shop.*") if not key.endswith(":holder")}
        return ours | self.old_locks()

    def old_locks(self) -> set[str]:
        """Keys of the locks of celery-once, celery-singleton and cache.add."""
        return {key for pattern in _OLD for key in self.shop.scan_iter(pattern)}

    def end(self) -> None:
        """Kill what is left."""
        for worker in self.workers:
            if worker.process.poll() is None:
                worker.kill()
        for _stage, process in self.producers:
            if process.poll() is None:
                process.kill()
                process.wait()

    def _publisher(self, stage: str, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.migration.publisher", *arguments],
            cwd=ROOT,
            env={**os.environ, **self._environment(stage)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _environment(self, stage: str) -> dict[str, str]:
        return {
            "MIGRATION_PAGE": self.page,
            "MIGRATION_STAGE": stage,
            "MIGRATION_EDITS": json.dumps(self.edits),
            "SETNX_TEST_URL": self.url,
        }
