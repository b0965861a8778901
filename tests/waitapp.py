# mypy: disable-error-code="untyped-decorator"
"""Tasks that wait in line, and the worker that dies between a release and the wake-up."""

import os
import signal
import time
from typing import Any

import redis
from celery import Celery, current_task
from celery.signals import task_postrun, task_revoked

from celery_setnx import Conflict, SingletonTask, current_lock, run, signals
from tests.harness import Journal

CONTROL_DB, LOCK_DB, BROKER_DB = 0, 1, 6
URL = os.environ["SETNX_TEST_URL"]

app = Celery("waitapp", broker=f"{URL}/{BROKER_DB}", backend=f"{URL}/{BROKER_DB}", set_as_current=False)
app.conf.update(
    setnx_url=f"{URL}/{LOCK_DB}",
    setnx_prefix="t",
    setnx_same_host=os.environ.get("SETNX_TEST_SAME_HOST") != "no",
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 3600},
    accept_content=["json", "yaml", "pickle"],
    worker_prefetch_multiplier=1,
    result_expires=600,
)

control = redis.Redis.from_url(f"{URL}/{CONTROL_DB}", socket_timeout=None)
journal = Journal(control)


def body(name: str) -> str:
    """Journal the start, wait until the gate of this name opens, journal the end."""
    lock = current_lock()
    about = {"task_id": current_task.request.id, "name": name, "key": lock and lock.key}
    journal.write("start", at=time.monotonic(), time=time.time(), **about)
    if name.startswith("gated"):
        control.blpop([f"gate:{name}"], timeout=60)
    journal.write("end", at=time.monotonic(), time=time.time(), **about)
    return name


def record(word: str) -> Any:
    def receiver(sender: Any, task_id: str, **details: Any) -> None:
        shown = {k: v for k, v in details.items() if isinstance(v, (str, int, float))}
        holder = details.get("holder")
        if holder is not None:
            shown["holder"] = holder.as_dict()
        journal.write(word, task_id=task_id, at=time.monotonic(), **shown)

    return receiver


for name in ("acquired", "conflict", "waiting", "woken", "taken_over", "released", "lost"):
    getattr(signals, f"lock_{name}").connect(record(name), weak=False)


@task_postrun.connect
def journal_postrun(task_id: str, state: str, **_details: Any) -> None:
    journal.write("postrun", task_id=task_id, state=state)


@task_revoked.connect
def journal_revoked(request: Any, expired: bool, **_details: Any) -> None:
    journal.write("revoked", task_id=request.id, expired=expired)


def _die_before_wake() -> None:
    """The first process that has handed a lock over dies before it sends the wake-up; or its whole worker."""
    wake = vars(run)["wake"]
    whole_worker = os.environ["WAIT_DIES_BEFORE_WAKE"] == "worker"

    def die(app: Celery, heir: Any, key: str) -> None:
        if heir is not None and control.set("gate:died", "once", nx=True, ex=60):
            journal.write("died", key=key)
            (os.killpg if whole_worker else os.kill)(
                os.getpgid(0) if whole_worker else os.getpid(), signal.SIGKILL
            )
        wake(app, heir, key)

    vars(run)["wake"] = die


if os.environ.get("WAIT_DIES_BEFORE_WAKE"):
    _die_before_wake()

WAITS = {"key": "name", "on_conflict": "wait", "lease": 2, "retry_delay": 0.1}
JOINS = {**WAITS, "on_conflict": "join"}


@app.task(base=SingletonTask, bind=True, max_retries=0, singleton=WAITS)
def work(self: Any, name: str, gate: str = "") -> Any:
    """The task of most tests; `name` is the key, and a gated body waits for its gate."""
    body(gate)
    return [name, gate, self.request.retries]


@app.task(base=SingletonTask, ignore_result=True, singleton=WAITS)
def silent(name: str, gate: str = "") -> None:
    """Has no result."""
    body(gate)


@app.task(base=SingletonTask, acks_late=True, reject_on_worker_lost=True, singleton=WAITS)
def tardy(name: str, gate: str = "") -> str:
    """Is acknowledged when it has ended."""
    return body(gate)


@app.task(base=SingletonTask, track_started=True, singleton=WAITS)
def failing(name: str, gate: str = "") -> None:
    """Fails, and Celery tells when it starts."""
    body(gate)
    raise ZeroDivisionError(gate)


@app.task(base=SingletonTask, bind=True, singleton=WAITS)
def inspected(self: Any, name: str, gate: str = "") -> dict[str, Any]:
    """Returns what its message said."""
    body(gate)
    request = self.request
    return {
        "tenant": request.headers.get("tenant"),
        "priority": request.delivery_info.get("priority"),
        "expires": request.expires is not None,
        "timelimit": list(request.timelimit),
        "shadow": request.shadow,
        "retries": request.retries,
    }


def types_of(name: str, value: Any, gate: str = "") -> list[str]:
    """Tells the types of what it was given."""
    body(gate)
    values = value if isinstance(value, (list, tuple, set)) else [value]
    return sorted(type(item).__name__ for item in values)


typed = {
    serializer: app.task(
        base=SingletonTask, name=f"typed_{serializer}", serializer=serializer, singleton=WAITS
    )(types_of)
    for serializer in ("json", "yaml", "pickle")
}


@app.task(base=SingletonTask, singleton={**WAITS, "at_least_for": 1})
def resting(name: str, gate: str = "") -> str:
    return body(gate)


@app.task(base=SingletonTask, bind=True, singleton={**WAITS, "hold_on_retry": True})
def patient(self: Any, name: str, gate: str = "", countdown: float = 0.5) -> str:
    """Retries itself once, and keeps its lock until then."""
    body(gate)
    if self.request.retries == 0 and gate:
        raise self.retry(countdown=countdown)
    return gate


@app.task(base=SingletonTask, bind=True, singleton=WAITS)
def again(self: Any, name: str, left: int) -> int:
    """Sends itself while it has its lock."""
    if left:
        self.apply_async([name, left - 1])
    body(f"left-{left}")
    return left


@app.task(base=SingletonTask, singleton={**WAITS, "key": ()})
def alone(number: int) -> int:
    """One at a time, whatever its argument."""
    body("alone")
    return number


@app.task(base=SingletonTask, singleton={"key": "name", "lease": 2, "dedupe": "until_started"})
def pending(name: str, gate: str = "") -> str:
    """One running and one pending, without any other option."""
    return body(gate)


def wait_twice(conflict: Conflict) -> Any:
    """A policy of one's own may let the call wait, and sees how often it has."""
    return conflict.wait() if conflict.waits < 1 else conflict.fail()


@app.task(base=SingletonTask, singleton={**WAITS, "on_conflict": wait_twice})
def decided(name: str, gate: str = "") -> str:
    return body(gate)


@app.task(base=SingletonTask, bind=True, singleton=JOINS)
def joined(self: Any, name: str, gate: str = "") -> list[str]:
    """Equal calls at a time have one run; its result tells whose."""
    body(gate)
    return [name, self.request.id]


@app.task(base=SingletonTask, singleton=JOINS)
def joined_failing(name: str, gate: str = "") -> None:
    body(gate)
    raise ZeroDivisionError(name)


@app.task(base=SingletonTask, bind=True, max_retries=1, singleton=JOINS)
def joined_retrying(self: Any, name: str, gate: str = "") -> list[Any]:
    """Retries itself once before it has a result."""
    body(gate)
    if self.request.retries == 0:
        raise self.retry(countdown=0.3)
    return [self.request.id, self.request.retries]


@app.task
def arrival(*values: Any) -> Any:
    """What follows: journals its arguments."""
    journal.write("arrival", values=list(values))
    return list(values)


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def beside(value: Any) -> Any:
    """No lock at all."""
    return value
