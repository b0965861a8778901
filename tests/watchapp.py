# mypy: disable-error-code="untyped-decorator"
"""The app of the tests that watch: every signal goes to the journal, and then its receiver fails."""

import os
import time
from collections.abc import Callable
from typing import Any

import redis
from celery import Celery, Task, current_task
from celery.signals import task_postrun, worker_process_init
from celery.utils.dispatch import Signal
from opentelemetry.metrics import set_meter_provider
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader

from celery_setnx import SetnxLock, SingletonTask, current_lock, metrics, signals
from celery_setnx.lock import task_token
from celery_setnx.marks import Mark
from tests.harness import Journal, wait_until

CONTROL_DB, LOCK_DB, BROKER_DB = 0, 1, 11
URL = os.environ["SETNX_TEST_URL"]
SIGNALS = {name: value for name, value in vars(signals).items() if isinstance(value, Signal)}

app = Celery("watchapp", broker=f"{URL}/{BROKER_DB}", backend=f"{URL}/{BROKER_DB}", set_as_current=False)
app.conf.update(
    setnx_url=f"{URL}/{LOCK_DB}",
    setnx_prefix="t",
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 3600},
    worker_prefetch_multiplier=1,
    result_expires=600,
)
if "SETNX_TEST_METRICS_PORT" in os.environ:
    metrics.serve(app, int(os.environ["SETNX_TEST_METRICS_PORT"]), "127.0.0.1")

if "SETNX_TEST_OPENTELEMETRY" in os.environ:
    metrics.opentelemetry(app)

control = redis.Redis.from_url(f"{URL}/{CONTROL_DB}", socket_timeout=None)
journal = Journal(control)
reader: Any = None


def record(name: str) -> Callable[..., None]:
    """A receiver that writes down what it is given, and fails. Other apps' tasks are none of its business."""

    def receiver(sender: Any, signal: Any, **details: Any) -> None:
        if isinstance(sender, Task) and sender.app != app:
            return
        shown = {k: v for k, v in details.items() if isinstance(v, (str, int, float, type(None)))}
        journal.apart().write("signal", signal=name, sender=sender.name, given=sorted(details), **shown)
        raise ZeroDivisionError(name)

    return receiver


for _name, _signal in SIGNALS.items():
    _signal.connect(record(_name), weak=False)


def body(name: str) -> str:
    """Journal the start; a gated one waits until its gate opens."""
    journal.write("start", task_id=current_task.request.id, name=name, key=current_lock().key)
    if name.startswith("gated"):
        control.blpop([f"gate:{name}"], timeout=30)
    return name


@app.task(base=SingletonTask, singleton={"key": "name", "lease": 1, "retry_delay": 0.1})
def work(name: str) -> str:
    return body(name)


@app.task(base=SingletonTask, singleton={"key": "name", "lease": 2, "dedupe": "until_started"})
def marked(name: str) -> str:
    """At most one is queued."""
    return body(name)


@task_postrun.connect
def journal_postrun(task_id: str, **_details: Any) -> None:
    journal.write("postrun", task_id=task_id)


@worker_process_init.connect
def measure(**_details: Any) -> None:
    """Each process of the pool has a provider of its own."""
    if "SETNX_TEST_OPENTELEMETRY" in os.environ:
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
        self._queue = queue
        self._locks = locks
        self._open = gates
        self._name = f"gated-{time.monotonic_ns()}"
        self.key = work.lock_key(self._name)

    def holder(self) -> Any:
        """A call that has the lock until its gate opens."""
        result = work.apply_async([self._name], queue=self._queue)
        journal.wait_for("start", task_id=result.id)
        return result

    def conflict(self, policy: str) -> tuple[Any, Any]:
        """The holder, and a call that meets it."""
        holder = self.holder()
        second = work.apply_async([self._name], queue=self._queue, singleton={"on_conflict": policy})
        journal.wait_for("signal", signal="lock_conflict", task_id=second.id)
        return holder, second

    def skip(self) -> Any:
        """A call is skipped."""
        holder, second = self.conflict("skip")
        second.get(timeout=10)
        self.end(holder)
        return second

    def retry(self) -> Any:
        """A call comes back, and runs after the holder."""
        holder, second = self.conflict("retry")
        journal.wait_for("signal", count=2, signal="lock_conflict", task_id=second.id)
        self.end(holder)
        self.end(second)
        return second

    def wait(self) -> Any:
        """A call waits in line, and is woken when the holder ends."""
        holder, second = self.conflict("wait")
        journal.wait_for("signal", signal="lock_waiting", task_id=second.id)
        journal.wait_for("postrun", task_id=second.id)  # its event has been sent too
        self.end(holder)
        self.end(second)
        return second

    def fail(self) -> Any:
        """A call fails, because it meets a held lock."""
        holder, second = self.conflict("raise")
        second.get(timeout=10, propagate=False)
        self.end(holder)
        return second

    def take_over(self) -> Any:
        """A call takes the lock over from a holder that has died on another host."""
        info = {"task": work.name, "task_id": "dead", "worker": "gone@host", "host": "elsewhere", "pid": 7}
        lock = SetnxLock(self._locks, self.key, lease=1, info=info)
        lock.acquire(token=task_token("dead", 0, "0"))
        wait_until(lambda: lock.holder() is None, "the lease of the dead holder has ended")
        call = self.holder()
        self.end(call)
        return call

    def lose(self) -> Any:
        """The lock of a running call vanishes."""
        call = self.holder()
        self._locks.delete(self.key)
        journal.wait_for("signal", signal="lock_lost", task_id=call.id)
        self.end(call)
        return call

    def lapse(self) -> Any:
        """The mark of a queued call vanishes."""
        call = marked.apply_async([self._name], queue=self._queue, countdown=1)
        self.key = marked.lock_key(self._name)
        self._locks.delete(Mark(self.key, call.id).name)
        self.end(call)
        return call

    def free(self) -> Any:
        """The process of a running call is killed."""
        call = self.holder()
        (started,) = journal.wait_for("start", task_id=call.id)
        os.kill(started["pid"], 9)
        journal.wait_for("signal", signal="lock_released", task_id=call.id, outcome="freed")
        call.get(timeout=20, propagate=False)
        return call

    def duplicate(self) -> Any:
        """A call is not published, because its like is queued."""
        # Whichever worker has it when its time has come throws it away.
        marked.apply_async([self._name], countdown=60, expires=30)
        self.key = marked.lock_key(self._name)
        return marked.delay(self._name)

    def end(self, call: Any) -> None:
        """Let a call that has the lock, or is about to have it, end."""
        self._open(self._name)
        call.get(timeout=20)
