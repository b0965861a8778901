"""A rolling deploy: workers and producers of any stage on one Redis, and what the journal says of it."""

import os
import random
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from threading import Event
from typing import Any, NamedTuple

import django.conf
import redis
from celery import Celery, Task, _state
from celery.result import AsyncResult
from celery_heimdall import AlreadyQueuedError

from tests.harness import Journal, Worker, wait_until
from tests.migration import pages

DB = 4
RETRY_DELAY_S = 0.2
TIMEOUT_S = 120
ACCOUNTS = ("1", "2")

_OLD = ("qo_*", "SINGLETONLOCK_*", "h-lock:*", "*settle-lock-*")


def shop_url() -> str:
    """The shop's database on the server of the tests."""
    return f"{os.environ['SETNX_TEST_URL']}/{DB}"


def use_django_cache() -> None:
    """Have Django's cache in the shop's database."""
    if not django.conf.settings.configured:
        cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": shop_url()}
        django.conf.settings.configure(CACHES={"default": cache})


def shop_of(page: str, stage: str, edits: Iterable[Any], book: Any = None) -> tuple[Celery, Task]:
    """The app of one stage, and its task `settle`; no other app of this process knows the task."""
    if page == pages.CACHE:
        use_django_cache()
    shared = set(_state._on_app_finalizers)
    namespace = pages.load(page, stage, shop_url(), tuple(edits), book=book)
    app = namespace["app"]
    app.conf.update(
        broker_connection_retry_on_startup=True,
        result_expires=600,
        setnx_defaults={"retry_delay": RETRY_DELAY_S},
        worker_prefetch_multiplier=1,
    )
    app.finalize()
    _state._on_app_finalizers.intersection_update(shared)
    return app, namespace["settle"]


_producer_of = cache(shop_of)
"""A producer's view of a stage, made once: it never runs a body."""


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
        if entry["what"] == "start":
            of_account = running.setdefault(entry["account"], {})
            found += [Overlap(entry["account"], run_by, entry["run_by"]) for run_by in of_account.values()]
            of_account[entry["task_id"]] = entry["run_by"]
        elif entry["what"] in ("end", "failed"):
            running[entry["account"]].pop(entry["task_id"], None)
    return found


@dataclass
class Deploy:
    """The processes of one shop."""

    page: str  # the section of docs/moving.md that they run the code of
    shop: redis.Redis  # a client of the shop's database: broker, results and locks
    journal: Journal  # what the workers write
    start_worker: Callable[..., Worker]
    fleet: dict[tuple[str, str], Worker]  # its workers, by page and stage; it may find some that run already
    edits: tuple[tuple[str, str], ...] = ()  # what is changed in the code: pairs of old and new text
    handed: set[str] = field(default_factory=set)  # ids that producers were handed: each must have an answer
    _results: Celery = field(default_factory=lambda: Celery(backend=shop_url(), set_as_current=False))
    _consumers: list[Worker] = field(default_factory=list)
    _producers: dict[str, tuple[Event, Future[None]]] = field(default_factory=dict)
    _pool: ThreadPoolExecutor = field(default_factory=ThreadPoolExecutor)

    def worker(self, stage: str) -> Worker:
        """The worker with the code of a stage: it takes the calls of a queue of its own."""
        found = self.fleet.get((self.page, stage))
        if found is None or found.process.poll() is not None:
            shop = (self.page, stage, self.edits)
            found = self.start_worker("tests.migration.app", queues=self.queue(stage), conf={"shop": shop})
            self.fleet[self.page, stage] = found
        return found

    def workers_of(self, *stages: str) -> list[Worker]:
        """The workers of these stages, started all at once."""
        return list(self._pool.map(self.worker, stages))

    def queue(self, stage: str) -> str:
        """The queue that the worker of a stage alone consumes."""
        return f"{self.page}-{stage}{'-edited' if self.edits else ''}"

    def settle(self, stage: str) -> Any:
        """The task, with the code of a stage."""
        return _producer_of(self.page, stage, self.edits)[1]

    def publish(self, stage: str, account: str, **options: Any) -> str | None:
        """Publish one call with the code of a stage.

        Returns the id that it was handed: its own call's, or that of the call that is queued or runs.
        """
        try:
            task_id: str | None = self.settle(stage).apply_async((account, stage), **options).id
        except AlreadyQueuedError:  # of heimdall: the lock was freed before it asked whose it is
            return None
        if task_id is not None:
            self.handed.add(task_id)
        return task_id

    def publish_to(self, worker: str, stage: str, account: str) -> str | None:
        """Publish one call with the code of a stage, for the worker of another."""
        return self.publish(stage, account, queue=self.queue(worker))

    def start_producer(self, stage: str) -> None:
        """Let a producer with the code of a stage publish to the shop's queue, until it is stopped."""
        ends = Event()

        def produce() -> None:
            while not ends.wait(random.uniform(0, 0.03)):
                self.publish(stage, random.choice(ACCOUNTS))

        self._producers[stage] = ends, self._pool.submit(produce)

    def stop_producers(self, *stages: str) -> None:
        """Let the producers of these stages end."""
        for ends, _producer in (running := [self._producers.pop(stage) for stage in stages]):
            ends.set()
        for _ends, producer in running:
            producer.result(TIMEOUT_S)

    def consume(self, stage: str) -> Worker:
        """Have the worker of a stage take calls from the shop's queue as well, until the deploy ends."""
        worker = self.worker(stage)
        self._consumers.append(worker)
        worker.take_from(self.settle(stage).app, "celery")
        return worker

    def retire(self, worker: Worker) -> None:
        """Warm shutdown to its end, which may take more than 30 s: what the worker holds goes back."""
        worker.process.terminate()
        worker.process.wait(TIMEOUT_S)

    def wait_for(self, *pairs: tuple[str, str], count: int) -> None:
        """Wait until so many calls of each kind have run: (published by, run by)."""

        def seen() -> bool:
            ends = [(e["published_by"], e["run_by"]) for e in self.journal.entries(what="end")]
            return all(ends.count(pair) >= count for pair in pairs)

        wait_until(seen, f"{pairs}, {count} times each", TIMEOUT_S)

    def result(self, task_id: str | None) -> AsyncResult:
        """The result of a call."""
        return self._results.AsyncResult(task_id)

    def answers(self) -> dict[str, Any]:
        """What every id that was handed out has ended with, once all have."""
        results = {task_id: self.result(task_id) for task_id in self.handed}
        wait_until(lambda: all(r.ready() for r in results.values()), f"{len(results)} answers", TIMEOUT_S)
        assert {r.state for r in results.values()} == {"SUCCESS"}
        return {task_id: r.result for task_id, r in results.items()}

    def locks_left(self) -> set[str]:
        """Keys that lock or mark something: theirs and ours, but not the records of released locks."""
        ours = {key for key in self.shop.scan_iter("setnx:{shop.*") if not key.endswith(":holder")}
        return ours | self.old_locks()

    def old_locks(self) -> set[str]:
        """Keys of the locks of the peers and of cache.add."""
        return {key for pattern in _OLD for key in self.shop.scan_iter(pattern)}

    def end(self) -> None:
        """Stop what still publishes to the shop's queue, or takes from it."""
        self.stop_producers(*self._producers)
        for worker in self._consumers:
            if worker.process.poll() is None:
                worker.kill()
        self._pool.shutdown()
