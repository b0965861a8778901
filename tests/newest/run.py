"""A run: publishers and workers as processes, who kills them, and the wait for the end of all calls."""

from __future__ import annotations

import json
import os
import random
import signal
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import redis

from celery_setnx.lock.names import line_names
from examples.embedded import EmbeddedServer
from tests.chaos import nursery
from tests.chaos.history import History, Record, of_kind
from tests.harness import Worker, wait_until
from tests.newest.app import PRIORITIES, TASK, Planned, Settings, doom_of, publish
from tests.newest.judge import Verdict, judged

PUBLISHERS, WORKERS, CHILDREN = 4, 2, 3
BROKER, LOCKS, RESULTS = 0, 1, 2
DRAIN_S = 200.0
_TICK_S = 0.05
_NOWHERE_S = 2.0  # longer than a message is on its way from a queue to the list of the unacknowledged


class ForkedWorker(Worker):
    """Forked from a process that has imported Celery."""

    popen = staticmethod(nursery.worker)


class Run:
    """One run: a server, workers and publishers.

    Args:
        singleton: Further options of the task.
        seed: Of who is killed when, and of which message comes twice.
    """

    def __init__(self, singleton: dict[str, Any], seed: int) -> None:
        self._chance = random.Random(seed)
        self._stack = ExitStack()
        self._directory = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="newest-")))
        self.server = self._stack.enter_context(EmbeddedServer())
        self._path = self._directory / "journal"
        self._journal = History(self._path)
        self._over = threading.Event()
        urls = self.server.url(BROKER), self.server.url(LOCKS)
        self._publishing = Settings(*urls, None, str(self._path), singleton)
        serving = self._publishing._replace(results=self.server.url(RESULTS))
        self._environment = {"NEWEST_APP": json.dumps(serving)}
        self._broker, self._locks, self._results = (
            self._stack.enter_context(redis.Redis.from_url(self.server.url(db), decode_responses=True))
            for db in (BROKER, LOCKS, RESULTS)
        )
        self._workers = [self._worker() for _ in range(WORKERS)]
        self._publishers: list[nursery.Fork] = []
        self._plans: list[list[Planned]] = []
        self._lives = [0] * PUBLISHERS
        self._base = self._over_since = 0.0

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._over.set()
        for process in (*self._publishers, *(worker.process for worker in self._workers)):
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL) if process not in self._publishers else process.kill()
        self._stack.close()

    def play(self, plan: Sequence[Planned], kills: Sequence[str], quiet_s: float, most_s: float) -> Verdict:
        """Publish the plan, kill meanwhile, wait for the end, and judge."""
        self._base = time.monotonic() + 1.0
        self._plans = [list(plan[slot::PUBLISHERS]) for slot in range(PUBLISHERS)]
        self._publishers = [self._publisher(slot) for slot in range(PUBLISHERS)]
        copier = threading.Thread(target=self._copy)
        copier.start()
        try:
            length_s = plan[-1].at_s
            for number, how in enumerate(kills):
                due = self._base + length_s * (number + 1) / (len(kills) + 2)
                time.sleep(max(0.0, due - time.monotonic()))
                getattr(self, f"_kill_{how}")()
            for publisher in self._publishers:
                publisher.wait(timeout=length_s + DRAIN_S)
                assert publisher.returncode == 0, f"a publisher ended with {publisher.returncode}"
        finally:
            self._over.set()
            copier.join()
        wait_until(self._is_over, lambda: f"the end of {len(self._left())} calls", DRAIN_S)
        verdict = judged(self._records(), self._ends(), quiet_s, most_s)
        return verdict._replace(broken=[*verdict.broken, *self._left_in_locks()])

    def _worker(self) -> Worker:
        return ForkedWorker(
            self._directory, "tests.newest.worker", concurrency=CHILDREN, environment=self._environment
        )

    def _publisher(self, slot: int) -> nursery.Fork:
        """Begin, or go on after those calls that the publisher before it has begun to send."""
        names = [f"{slot}/{life}" for life in range(self._lives[slot] + 1)]
        published = sum(record["version"].partition(".")[0] in names for record in self._of("reserved"))
        self._lives[slot] += 1
        plan = self._plans[slot][published:]
        return nursery.Fork(publish, self._publishing, names[-1], self._base, plan)

    def _kill_publisher(self) -> None:
        """kill -9 of a publisher that has calls left to send; it is started anew."""
        slot = self._chance.choice([n for n, one in enumerate(self._publishers) if one.poll() is None])
        self._publishers[slot].kill()
        self._publishers[slot].wait()
        self._journal.note("kill", how="publisher")
        self._publishers[slot] = self._publisher(slot)

    def _kill_worker(self) -> None:
        """kill -9 of a worker with its pool; it is started anew."""
        slot = self._chance.randrange(WORKERS)
        self._journal.note("kill", how="worker")
        self._workers[slot].kill()
        self._workers[slot] = self._worker()

    def _kill_body(self) -> None:
        """kill -9 of the process of the pool that runs the next body, as that runs."""
        doom_of(self._publishing).touch()

    def _copy(self) -> None:
        """Put messages into the broker once more, as one does that delivers again; some much later."""
        chance, kept = random.Random(self._chance.random()), list[dict[str, Any]]()
        while not self._over.wait(_TICK_S):
            for tag in self._broker.hrandfield("unacked", 1) or ():
                text = self._broker.hget("unacked", tag)
                message = json.loads(text)[0] if text else {"headers": {"task": ""}}
                if message["headers"]["task"] == TASK:
                    kept.append(message)
            if kept and chance.random() < 0.5:
                copy = kept.pop(chance.randrange(len(kept)))
                copy["headers"]["redelivered"] = True
                copy["properties"]["delivery_info"]["redelivered"] = True
                copy["properties"]["delivery_tag"] = str(uuid.uuid4())
                self._broker.lpush("celery", json.dumps(copy))
                self._journal.note("copied", id=copy["headers"]["id"])

    def _is_over(self) -> bool:
        """Whether nothing is left, and was not a moment ago: a message is nowhere as a worker takes it."""
        now = time.monotonic()
        if self._left():
            self._over_since = 0.0
            return False
        self._over_since = self._over_since or now
        return now - self._over_since > _NOWHERE_S

    def _left(self) -> set[str]:
        """Messages that wait, and calls that workers have received, and that have not ended."""
        queues = [f"celery\x06\x16{priority}" if priority else "celery" for priority in PRIORITIES]
        held = [*self._broker.hvals("unacked")]
        texts = [text for queue in queues for text in self._broker.lrange(queue, 0, -1)]
        messages = [json.loads(text) for text in texts] + [json.loads(text)[0] for text in held]
        left = {message["headers"]["id"] for message in messages if message["headers"]["task"] == TASK}
        received = {record["id"] for record in self._of("received")}
        return left | (received - self._ends().keys())

    def _left_in_locks(self) -> Iterator[str]:
        """Locks, lines and waiting calls that are there still, and keys without a TTL."""
        names = set(self._locks.scan_iter(count=1000))
        locks = {name.rpartition("}")[0] + "}" for name in names if name.endswith(":newest")}
        for lock in locks:
            yield from (f"{name} is left" for name in (lock, *line_names(lock)) if name in names)
        yield from (f"{name} has no TTL" for name in names if self._locks.pttl(name) == -1)

    def _ends(self) -> dict[str, tuple[str, Any]]:
        """What each call has ended with."""
        names = list(self._results.scan_iter("celery-task-meta-*", count=1000))
        found = [json.loads(text) for text in (self._results.mget(names) if names else []) if text]
        return {end["task_id"]: (end["status"], end["result"]) for end in found}

    def _records(self) -> list[Record]:
        return [json.loads(line) for line in self._path.read_bytes().splitlines()]

    def _of(self, *kinds: str) -> list[Record]:
        return of_kind(self._records(), *kinds)
