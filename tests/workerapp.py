"""The app that test workers run. Bodies and signals write to the journal; gates hold bodies open."""

import os
import time
from typing import Any

import redis
from celery import Celery, Task, current_task, shared_task
from celery.signals import task_postrun, task_retry

from celery_setnx import Conflict, SingletonTask, current_lock, signals, singleton
from celery_setnx.waiting import COURIER
from tests.harness import Journal

BROKER_DB, LOCK_DB = 0, 1
URL = os.environ["SETNX_TEST_URL"]

app = Celery("workerapp", broker=f"{URL}/{BROKER_DB}", backend=f"{URL}/{BROKER_DB}")
app.conf.update(
    setnx_url=os.environ.get("SETNX_TEST_LOCK_URL") or f"{URL}/{LOCK_DB}",
    setnx_prefix="t",
    setnx_same_host=os.environ.get("SETNX_TEST_SAME_HOST") != "no",
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": 3600},
    worker_prefetch_multiplier=1,
    result_expires=600,
)

control = redis.Redis.from_url(f"{URL}/{BROKER_DB}", socket_timeout=None)
journal = Journal(control)


def body(name: str) -> str:
    """Journal the start, wait until the gate of this name opens, journal the end."""
    task = current_task
    lock = current_lock()
    about = {"task_id": task.request.id, "name": name, "key": lock and lock.key, "fence": lock and lock.fence}
    journal.write("start", at=time.monotonic(), **about)
    if name.startswith("gated"):
        control.blpop([f"gate:{name}"], timeout=60)
    journal.write("end", at=time.monotonic(), **about)
    return name


def record(word: str) -> Any:
    def receiver(sender: Any, task_id: str, **details: Any) -> None:
        shown = {k: v for k, v in details.items() if isinstance(v, (str, int, float))}
        holder = details.get("holder")
        if holder is not None:
            shown["holder"] = holder.as_dict()
        writes_to = journal.apart() if word == "lost" else journal  # a loss is told by the keeper's thread
        writes_to.write(word, task_id=task_id, **shown)

    return receiver


for signal in ("acquired", "conflict", "taken_over", "released", "lost"):
    getattr(signals, f"lock_{signal}").connect(record(signal), weak=False)


@task_retry.connect
def journal_retry(request: Any, **_details: Any) -> None:
    journal.write("retry", task_id=request.id, retries=request.retries)


@task_postrun.connect
def journal_postrun(sender: Any, task_id: str, state: str, **_details: Any) -> None:
    if sender.name != COURIER:
        journal.write("postrun", task_id=task_id, state=state)


@app.task(base=SingletonTask, bind=True, singleton={"lease": 2, "retry_delay": 0.1, "key": "name"})
def work(self: Any, name: str, *_rest: Any) -> str:
    """The task of most tests; `name` is the key."""
    assert self.lock is current_lock()
    return body(name)


@app.task(base=SingletonTask)
def everything(a: int, b: int = 2, *, c: Any = None) -> Any:
    """All arguments are the key."""
    journal.write("body", task_id=current_task.request.id, key=current_lock().key)
    return [a, b, c]


@app.task(base=SingletonTask, singleton={"key": (), "lease": 2})
def whole(name: str) -> str:
    """One lock for the whole task."""
    return body(name)


@app.task(
    base=SingletonTask, singleton={"key": "name", "on_conflict": lambda conflict: {"busy": conflict.key}}
)
def own_policy(name: str) -> Any:
    return body(name)


def retry_or_fail(conflict: Conflict) -> Any:
    """The first conflict waits, the second fails."""
    return conflict.retry(countdown=1) if conflict.waits == 0 else conflict.fail()


@app.task(base=SingletonTask, singleton={"key": "name", "on_conflict": retry_or_fail})
def stubborn(name: str) -> Any:
    return body(name)


@app.task(
    base=SingletonTask, bind=True, max_retries=2, singleton={"key": "name", "lease": 2, "retry_delay": 0.1}
)
def flaky(self: Any, name: str, failures: int) -> Any:
    """Retries itself `failures` times."""
    body(name)
    if self.request.retries < failures:
        raise self.retry(countdown=0)
    return self.request.retries


@app.task(base=SingletonTask, bind=True, singleton={"key": "name", "hold_on_retry": True})
def patient(self: Any, name: str) -> Any:
    """Retries itself in a few seconds, and keeps its lock until then."""
    body(name)
    raise self.retry(countdown=5)


@app.task(
    base=SingletonTask,
    autoretry_for=(Exception,),
    retry_kwargs={"max_retries": 1, "countdown": 0},
    singleton={"key": "name", "lease": 2, "retry_delay": 0.1, "on_conflict": "raise"},
)
def autoretried(name: str) -> Any:
    body(name)
    raise ZeroDivisionError(name)


@app.task
@singleton(key="name", lease=2, retry_delay=0.1)
def decorated(name: str) -> str:
    """Guarded by the decorator under Celery's own base class."""
    return body(name)


class Choosy(Task):
    """Sends no call that it has an id of: as the base classes do that keep duplicates out of the queue."""

    abstract = True

    def apply_async(self, *args: Any, task_id: str | None = None, **options: Any) -> Any:
        if task_id is None:
            return super().apply_async(*args, **options)
        return self.AsyncResult(task_id)


@app.task(base=Choosy)
@singleton(key="name", on_conflict="retry", lease=2, retry_delay=0.1)
def choosy(name: str) -> str:
    return body(name)


@app.task(bind=True)
@singleton(key="name", lease=2)
def moving(self: Any, name: str, then: str) -> str:
    """Comes back once, by another name."""
    if name != then:
        raise self.retry(kwargs={"name": then, "then": then}, args=(), countdown=0)
    return body(name)


@app.task(bind=True)
@singleton(key="name", on_conflict="raise", lease=2)
def decorated_bound(self: Any, name: str) -> str:
    assert self.request.id
    return body(name)


@app.task(base=SingletonTask)
@singleton(key="name", on_conflict="raise", lease=2)
def decorated_singleton(name: str) -> str:
    """The decorator supplies the options of a SingletonTask."""
    return body(name)


@shared_task(base=SingletonTask, singleton={"key": "name", "lease": 2})
def shared(name: str) -> str:
    return body(name)


class Classy(SingletonTask):
    """A class-based task."""

    name = "tests.classy"
    singleton = {"key": "name", "lease": 2}

    def run(self, name: str) -> str:
        return body(name)


classy = app.register_task(Classy())


@app.task(base=SingletonTask, bind=True, singleton={"key": "name", "lease": 2, "retry_delay": 0.1})
def inspected(self: Any, name: str) -> dict[str, Any]:
    """Returns what its message said."""
    body(name)
    request = self.request
    header = request.headers["singleton"]
    return {
        "headers": {"tenant": request.headers.get("tenant"), "options": header.get("options")},
        "priority": request.delivery_info.get("priority"),
        "expires": request.expires,
        "timelimit": request.timelimit,
        "shadow": request.shadow,
        "retries": request.retries,
    }


@app.task
def journal_arrival(name: str) -> None:
    journal.write("arrival", name=name)


@app.task(base=SingletonTask, bind=True, singleton={"key": "depth", "on_conflict": "raise"})
def recursive(self: Any, depth: int) -> Any:
    """Calls itself as a plain function."""
    held = current_lock()
    nested = self(depth - 1) if depth else None
    assert current_lock() is held
    return [depth, nested]


@app.task(
    base=SingletonTask, bind=True, max_retries=1, singleton={"key": "name", "lease": 2, "retry_delay": 0.1}
)
def lingering(self: Any, name: str) -> Any:
    """Publishes its retry, and takes its time to end."""
    if self.request.retries:
        return self.request.retries
    try:
        raise self.retry(countdown=0)
    finally:
        body(name)


@app.task(base=SingletonTask, bind=True, singleton={"key": "name", "lease": 2, "on_conflict": "raise"})
def replacing(self: Any, name: str, times: int) -> Any:
    body(name)
    return self.replace(replacing.si(name, times - 1)) if times else name


@app.task(base=SingletonTask)
def add(x: Any, y: Any = 0) -> Any:
    """A step of workflows: equal members have equal keys."""
    journal.write("start", at=time.monotonic(), task_id=current_task.request.id)
    journal.write("end", at=time.monotonic(), task_id=current_task.request.id)
    return (x if isinstance(x, int) else -1) + y


@app.task(
    base=SingletonTask, singleton={"retry_delay": 0.05, "on_conflict": "auto", "key": (), "scope": "crowd"}
)
def crowded(x: Any = 0) -> Any:
    """All calls of it exclude each other, whatever their arguments."""
    journal.write("start", at=time.monotonic(), task_id=current_task.request.id, name="crowded")
    time.sleep(0.05)  # a body must take time to be in the way
    journal.write("end", at=time.monotonic(), task_id=current_task.request.id, name="crowded")
    return x


@app.task
def total(numbers: list[int]) -> int:
    return sum(numbers)


@app.task
def plain(value: Any) -> Any:
    """No lock at all."""
    return value


@app.task(base=SingletonTask, soft_time_limit=1, singleton={"key": "name", "lease": 2})
def limited(name: str) -> str:
    return body(name)


@app.task(base=SingletonTask, bind=True, singleton={"key": "name", "lease": 1})
def careful(self: Any, name: str) -> Any:
    """Asks before it relies on its lock."""
    body(name)
    self.lock.ensure()


@app.task(base=SingletonTask, bind=True, singleton={"key": "name", "lease": 1, "at_most_for": 0.2})
def overlong(self: Any, name: str) -> Any:
    """Outlives its at_most_for; learns it from ensure()."""
    body(name)
    self.lock.ensure()


@app.task(base=SingletonTask, singleton={"key": "name", "lease": 2, "at_least_for": 4})
def resting(name: str) -> str:
    return body(name)
