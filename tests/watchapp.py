"""The app of the tests that watch: every signal goes to the journal, and then its receiver fails."""

import os
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import Task
from celery.signals import worker_process_init
from celery.utils.dispatch import Signal
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from celery_setnx import SetnxLock, SingletonTask, metrics, signals
from celery_setnx.lock.look import look
from celery_setnx.lock.marks import Mark
from celery_setnx.lock.record import task_token
from tests.app import body, journal, make_app
from tests.harness import age, wait_until

SIGNALS = {name: value for name, value in vars(signals).items() if isinstance(value, Signal)}

app = make_app("watchapp", 11)
if "test_metrics_port" in app.conf:
    metrics.serve(app, app.conf.test_metrics_port, "127.0.0.1")
if "test_opentelemetry" in app.conf:
    metrics.opentelemetry(app)

reader: Any = None


def record_and_fail(name: str) -> Callable[..., None]:
    """A receiver that writes down what it is given, and fails. Other apps' tasks are none of its business."""

    def receiver(sender: Any, signal: Any, **details: Any) -> None:
        if isinstance(sender, Task) and sender.app != app:
            return
        shown = {k: v for k, v in details.items() if isinstance(v, (str, int, float, type(None)))}
        journal.apart().write("signal", signal=name, sender=sender.name, given=sorted(details), **shown)
        raise ZeroDivisionError(name)

    return receiver


for _name, _signal in SIGNALS.items():
    _signal.connect(record_and_fail(_name), weak=False)


@app.task(base=SingletonTask, singleton={"key": "name", "lease": 30, "retry_delay": 0.1})
def work(name: str) -> str:
    return body(name)


@app.task(base=SingletonTask, singleton={"key": "name", "dedupe": "until_started"})
def marked(name: str) -> str:
    """At most one is queued."""
    return body(name)


@app.task(base=SingletonTask, singleton={"key": "name", "dedupe": "until_started", "on_duplicate": "replace"})
def newest(name: str, version: int = 0) -> str:
    """The newest one runs."""
    return body(name)


@worker_process_init.connect
def measure(**_details: Any) -> None:
    """Each process of the pool has a provider of its own."""
    if "test_opentelemetry" in app.conf:
        global reader
        reader = InMemoryMetricReader()
        set_meter_provider(MeterProvider([reader]))


@app.task
def measured() -> dict[str, float]:
    """What this process has counted."""
    return telemetry(reader)


def telemetry(reader: Any) -> dict[str, float]:
    """Each instrument's sum over its labels; of a histogram how often."""
    data = reader.get_metrics_data()
    found: dict[str, float] = {}
    for resource in data.resource_metrics if data else ():
        for scope in resource.scope_metrics:
            for metric in scope.metrics:
                points: Any = metric.data.data_points
                name = metric.name.removeprefix("celery_setnx.")
                found[name] = sum(getattr(p, "count", None) or getattr(p, "value", 0) for p in points)
    return found


class Scenes:
    """What may happen to a call, played in a worker. Each returns the call to which it happens."""

    def __init__(self, locks: redis.Redis, gates: Callable[[str], None], queue: str = "celery") -> None:
        self._queue, self._locks, self._open = queue, locks, gates
        self._name = f"gated-{time.monotonic_ns()}"
        self.key = work.lock_key(self._name)
        self.about = f"name={self._name!r}"

    def _saw(self, call: Any, signal: str, **details: Any) -> None:
        journal.wait_for("signal", task_id=call.id, signal=signal, **details)

    def holder(self, **options: Any) -> Any:
        """A call that has the lock until its gate opens."""
        result = work.apply_async([self._name], queue=self._queue, singleton=options)
        journal.wait_for("start", task_id=result.id)
        return result

    def conflict(self, policy: str) -> tuple[Any, Any]:
        """The holder, and a call that meets it."""
        holder = self.holder()
        second = work.apply_async([self._name], queue=self._queue, singleton={"on_conflict": policy})
        self._saw(second, "lock_conflict")
        return holder, second

    def skip(self, policy: str = "skip") -> Any:
        """A call is skipped."""
        holder, second = self.conflict(policy)
        second.get(timeout=60, propagate=False)
        self.end(holder)
        return second

    def fail(self) -> Any:
        """A call fails, because it meets a held lock."""
        return self.skip("raise")

    def retry(self) -> Any:
        """A call comes back, and runs after the holder."""
        holder, second = self.conflict("retry")
        self._saw(second, "lock_conflict", count=2)
        self.end(holder, second)
        return second

    def wait(self) -> Any:
        """A call waits in line, and is woken when the holder ends."""
        holder, second = self.conflict("wait")
        self._saw(second, "lock_waiting")
        journal.wait_for("postrun", task_id=second.id)  # its event has been sent too
        self.end(holder, second)
        return second

    def take_over(self) -> Any:
        """A call takes the lock over from a holder that has died on another host."""
        info = {"task": work.name, "task_id": "dead", "worker": "gone@host", "host": "elsewhere", "pid": 7}
        SetnxLock(self._locks, self.key, info=info).acquire(token=task_token("dead", 0, "0"))
        age(self._locks, self.key, 31)
        call = self.holder()
        self.end(call)
        return call

    def lose(self) -> Any:
        """The lock of a running call vanishes, which its next renewal tells."""
        call = self.holder(lease=4)
        self._locks.delete(self.key)
        self._saw(call, "lock_lost")
        self.end(call)
        return call

    def lapse(self) -> Any:
        """The mark of a queued call vanishes before a worker gets it."""
        call = marked.apply_async([self._name], queue="aside")
        self.key = marked.lock_key(self._name)
        self._locks.delete(Mark(self.key, call.id).name)
        with app.connection_for_write() as connection:
            connection.default_channel.client.rpoplpush("aside", self._queue)
        self.end(call)
        return call

    def supersede(self) -> Any:
        """A call is received after a newer one was sent."""
        old, new = (newest.apply_async([self._name, n], queue="aside") for n in range(2))
        self.key = newest.lock_key(self._name)
        wait_until(lambda: look(self._locks, self.key).queued == new.id, "the newer call counts")
        with app.connection_for_write() as connection:
            for _ in range(2):
                connection.default_channel.client.rpoplpush("aside", self._queue)
        old.get(timeout=60)
        self.end(new)
        return old

    def supersede_in_line(self) -> Any:
        """A call waits in line, and a newer one comes to wait there."""
        self.key = newest.lock_key(self._name)
        first = newest.apply_async([self._name, 0], queue=self._queue)
        journal.wait_for("start", task_id=first.id)
        old = newest.apply_async([self._name, 1], queue=self._queue)
        self._saw(old, "lock_waiting")
        new = newest.apply_async([self._name, 2], queue=self._queue)
        old.get(timeout=60)
        self.end(first, new)
        return old

    def free(self) -> Any:
        """The process of a running call is killed."""
        call = self.holder()
        (started,) = journal.wait_for("start", task_id=call.id)
        os.kill(started["pid"], 9)
        self._saw(call, "lock_released", outcome="freed")
        call.get(timeout=60, propagate=False)
        return call

    def duplicate(self) -> Any:
        """A call is not published, because its like is queued."""
        marked.apply_async([self._name], queue="nowhere")
        self.key = marked.lock_key(self._name)
        return marked.delay(self._name)

    def end(self, *calls: Any) -> None:
        """Let calls that have the lock, or are about to have it, end."""
        for call in calls:
            self._open(self._name)
            call.get(timeout=60)
