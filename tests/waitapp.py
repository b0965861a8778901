"""Tasks that wait in line, or for another's result, on the app of `tests.workerapp`.

A process may die between a release and the wake-up (the setting `dies_before_wake`).
"""

import os
import signal
from contextvars import ContextVar
from typing import Any

from celery import Celery
from celery.app import trace as tracing
from celery.exceptions import Ignore, Reject
from celery.signals import before_task_publish, task_prerun, task_success, worker_process_init
from kombu.serialization import prepare_accept_content

from celery_setnx import Conflict, LockUnavailable, SetnxLock, SingletonTask, signals
from celery_setnx.run import attempt, held
from tests.app import wait_for_gate
from tests.workerapp import app, arrival, body, control, journal, plain, variant

__all__ = ["app", "arrival", "plain"]


@worker_process_init.connect
def die_before_wake(**_details: Any) -> None:
    """The first process that has handed a lock over dies before it sends the wake-up."""
    go_on = vars(attempt)["give_turns"]

    def die(app: Celery, task: str, lock: SetnxLock) -> None:
        if lock.turns and control.set("gate:died", "once", nx=True, ex=60):
            journal.write("died", key=lock.name)
            os.kill(os.getpid(), signal.SIGKILL)
        go_on(app, task, lock)

    if app.conf.get("dies_before_wake"):
        vars(attempt)["give_turns"] = die


if app.conf.get("lets_go_soon"):  # and not after a minute
    held._ASKS_S = held._YOUNG_S = 0.5


@worker_process_init.connect
def die_before_count(**_details: Any) -> None:
    """The first worker that is to count a chord's member dies (the setting `dies_before_count`)."""
    count = type(app.backend).on_chord_part_return

    def die(self: Any, *args: Any, **options: Any) -> Any:
        if control.set("gate:died", "once", nx=True, ex=60):
            os.kill(0, signal.SIGKILL)
        return count(self, *args, **options)

    if app.conf.get("dies_before_count"):
        type(app.backend).on_chord_part_return = die


@task_success.connect
def die_after_success(sender: Any, **_details: Any) -> None:
    """The first worker that has stored a success dies (the setting `dies_after_success`)."""
    if app.conf.get("dies_after_success") and control.set("gate:died", "once", nx=True, ex=60):
        os.kill(0, signal.SIGKILL)


trace: ContextVar[str] = ContextVar("trace", default="")


@before_task_publish.connect
def inject(headers: dict[str, Any], **_details: Any) -> None:
    """As tracers do: what is published in a call's trace is a part of it, and they know."""
    if trace.get():
        headers["_trace"] = trace.get()
        journal.write("traced", task=headers["task"], trace=trace.get())


@task_prerun.connect
def extract(task: Any, **_details: Any) -> None:
    trace.set(getattr(task.request, "_trace", ""))


@worker_process_init.connect
def accept_less(**_details: Any) -> None:
    """Have the pool's processes refuse what the worker's parent has read (the setting `pool_accepts`)."""
    if app.conf.get("pool_accepts"):
        tasks, _accepted, hostname = tracing._localized
        tracing._localized[:] = [tasks, prepare_accept_content(app.conf.pool_accepts), hostname]


def is_barred(task_id: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call is to end before its body: with `late`, only when it has waited."""
    return not kwargs.get("late") or "waiting" in journal.words(task_id)


class Barred(SingletonTask):
    """A call with `bar=` ends before its body, in a way of that name; a retry does not."""

    abstract = True

    def before_start(self, task_id: str, args: Any, kwargs: Any) -> None:
        bar = "" if self.request.retries else kwargs.get("bar")
        bars = {"fail": ZeroDivisionError(), "ignore": Ignore(), "reject": Reject()}
        if bar == "retry" and is_barred(task_id, kwargs):
            raise self.retry(countdown=0)
        if bar in bars and is_barred(task_id, kwargs):
            raise bars[bar]


def bar_at_init(task_id: str, task: Any) -> None:
    """Celery's loader is asked before every task."""
    kwargs = task.request.kwargs or {}
    if kwargs.get("bar") == "init" and is_barred(task_id, kwargs):
        raise ZeroDivisionError


app.loader.on_task_init = bar_at_init

WAITS = {"key": "name", "on_conflict": "wait", "lease": 600, "retry_delay": 0.1, "retry_delay_max": 600}
JOINS = {**WAITS, "on_conflict": "join"}


@app.task(base=SingletonTask, bind=True, max_retries=0, singleton=WAITS)
def work(self: Any, name: str, gate: str = "") -> Any:
    """The task of most tests; `name` is the key, and a gated body waits for its gate."""
    body(gate)
    return [name, gate, self.request.retries]


@app.task(base=SingletonTask, track_started=True, singleton={**WAITS, "retry_delay_max": 0.3})
def failing(name: str, gate: str = "", reason: str = "") -> None:
    """Fails, as if for Redis with a reason, and Celery tells when it starts."""
    body(gate)
    raise LockUnavailable(name, reason) if reason else ZeroDivisionError(gate)


def types_of(name: str, value: Any, gate: str = "") -> list[str]:
    """Tells the types of what it was given."""
    body(gate)
    values = value if isinstance(value, (list, tuple, set)) else [value]
    return sorted(type(item).__name__ for item in values)


def wait_twice(conflict: Conflict) -> Any:
    """A policy of one's own may let the call wait, and sees how often it has."""
    return conflict.wait() if conflict.waits < 1 else conflict.fail()


def plainly(name: str, gate: str = "") -> str:
    return body(gate)


def barrable(name: str, gate: str = "", bar: str = "", late: bool = False) -> str:
    return body(gate)


PENDING = {"key": "name", "lease": 600, "dedupe": "until_started"}


def publishing(name: str, gate: str = "") -> str:
    plain.delay(gate)
    return body(gate)


def traced(name: str, gate: str = "") -> str:
    body(gate)
    return trace.get()


parent = variant(publishing, "parent", acks_late=True, reject_on_worker_lost=True, singleton=WAITS)
told = variant(traced, "told", singleton=WAITS)
barred = variant(barrable, "barred", base=Barred, singleton=PENDING)
typed = {
    name: variant(types_of, f"typed_{name}", serializer=name, singleton=WAITS)
    for name in ("json", "yaml", "pickle")
}
silent = variant(plainly, "silent", ignore_result=True, singleton=WAITS)
tardy = variant(plainly, "tardy", acks_late=True, reject_on_worker_lost=True, singleton=WAITS)
resting = variant(plainly, "resting", singleton={**WAITS, "at_least_for": 0.5})
decided = variant(plainly, "decided", singleton={**WAITS, "on_conflict": wait_twice})
pending = variant(plainly, "pending", singleton=PENDING)  # one running and one pending, and no other option
daily = variant(plainly, "daily", singleton={"key": "name", "lease": 600})  # `auto`, which would skip
stopped = variant(
    plainly, "stopped", singleton=WAITS
)  # which tests pause as a whole, and use for nothing else


@app.task(base=SingletonTask, bind=True, singleton=WAITS)
def answered(self: Any, name: str, gate: str = "", seconds: float = 0) -> float:
    """A partner says "not now" to the first, for so many seconds."""
    body(gate)
    return self.lock.hold_back(seconds, "429 from the partner") if seconds else 0.0


@app.task(base=SingletonTask, bind=True, max_retries=1, singleton={**WAITS, "on_conflict": "skip"})
def persistent(self: Any, name: str, gate: str = "") -> int:
    """Retries itself once; others of its key are skipped."""
    body(gate)
    if self.request.retries == 0:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(base=SingletonTask, bind=True, singleton={**WAITS, "hold_on_retry": True})
def patient(self: Any, name: str, gate: str = "", queue: str | None = None, countdown: float = 0) -> Any:
    """Retries itself once, if it is gated, and keeps its lock until then."""
    body(gate)
    if self.request.retries == 0 and gate:
        raise self.retry(countdown=countdown, queue=queue)
    return [self.request.id, self.request.retries]


@app.task(base=SingletonTask, bind=True, singleton=WAITS)
def again(self: Any, name: str, left: int) -> int:
    """Sends itself while it has its lock."""
    if left:
        self.apply_async([name, left - 1])
    body(f"left-{left}")
    return left


@app.task(base=SingletonTask, bind=True, singleton=JOINS)
def joined(self: Any, name: str, gate: str = "", halts: str = "") -> list[str]:
    """Equal calls at a time have one run; its result tells whose."""
    body(gate)
    return [name, self.request.id]


@signals.lock_conflict.connect
def halt(sender: Any, **_details: Any) -> None:
    """A call with `halts=` has met its lock held, and does not wait yet."""
    if gate := (sender.request.kwargs or {}).get("halts"):
        journal.write("halts", task_id=sender.request.id)
        wait_for_gate(gate)
