"""The app that most test workers run: a task per option and way to declare it; `name` is the key."""

import time
from typing import Any

from celery import Task, current_task, shared_task

from celery_setnx import Conflict, SingletonTask, current_lock, singleton
from tests.app import BROKER_DB, LOCK_DB, URL, body, control, journal, make_app, record  # for the apps beside

__all__ = ["BROKER_DB", "LOCK_DB", "URL", "app", "body", "control", "journal", "record"]

app = make_app("workerapp")
app.set_current()  # for its shared task

NAMED = {"key": "name", "lease": 6}
KEYED = {**NAMED, "retry_delay": 0.1}


@app.task(base=SingletonTask, bind=True, singleton=KEYED)
def work(self: Any, name: str, *_rest: Any) -> str:
    """The task of most tests; `name` is the key."""
    assert self.lock is current_lock()
    return body(name)


@app.task(base=SingletonTask)
def everything(a: int, b: int = 2, *, c: Any = None) -> Any:
    """All arguments are the key."""
    journal.write("body", task_id=current_task.request.id, key=current_lock().key)
    return [a, b, c]


@app.task(base=SingletonTask, singleton={"key": (), "lease": 6})
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


@app.task(base=SingletonTask, bind=True, max_retries=2, singleton=KEYED)
def flaky(self: Any, name: str, failures: int) -> Any:
    """Retries itself `failures` times."""
    body(name)
    if self.request.retries < failures:
        raise self.retry(countdown=0)
    return self.request.retries


@app.task(base=SingletonTask, bind=True, singleton={"key": "name", "hold_on_retry": True})
def patient(self: Any, name: str) -> Any:
    """Retries itself by way of a queue that nobody consumes, and keeps its lock until then."""
    body(name)
    raise self.retry(countdown=0, queue="parked")


@app.task(
    base=SingletonTask,
    autoretry_for=(Exception,),
    retry_kwargs={"max_retries": 1, "countdown": 0},
    singleton={**KEYED, "on_conflict": "raise"},
)
def autoretried(name: str) -> Any:
    body(name)
    raise ZeroDivisionError(name)


@app.task
@singleton(**KEYED)
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
@singleton(**KEYED, on_conflict="retry")
def choosy(name: str) -> str:
    return body(name)


@app.task(bind=True)
@singleton(**NAMED)
def moving(self: Any, name: str, then: str) -> str:
    """Comes back once, by another name."""
    if name != then:
        raise self.retry(kwargs={"name": then, "then": then}, args=(), countdown=0)
    return body(name)


@app.task(bind=True)
@singleton(**NAMED, on_conflict="raise")
def decorated_bound(self: Any, name: str) -> str:
    assert self.request.id
    return body(name)


@app.task(base=SingletonTask)
@singleton(**NAMED, on_conflict="raise")
def decorated_singleton(name: str) -> str:
    """The decorator supplies the options of a SingletonTask."""
    return body(name)


@shared_task(base=SingletonTask, singleton=NAMED)
def shared(name: str) -> str:
    return body(name)


class Classy(SingletonTask):
    """A class-based task."""

    name = "tests.classy"
    singleton = NAMED

    def run(self, name: str) -> str:
        return body(name)


classy = app.register_task(Classy())


@app.task(base=SingletonTask, bind=True, singleton=KEYED)
def inspected(self: Any, name: str) -> dict[str, Any]:
    """Returns what its message said."""
    body(name)
    request = self.request
    header = request.headers["singleton"]
    return {
        "headers": {"tenant": request.headers.get("tenant"), "options": header.get("options")},
        "priority": request.delivery_info.get("priority"),
        "expires": request.expires is not None,
        "timelimit": list(request.timelimit),
        "shadow": request.shadow,
        "retries": request.retries,
    }


@app.task
def arrival(*values: Any) -> Any:
    """What follows: journals its arguments."""
    journal.write("arrival", values=list(values))
    return list(values)


@app.task(base=SingletonTask, bind=True, singleton={"key": "depth", "on_conflict": "raise"})
def recursive(self: Any, depth: int) -> Any:
    """Calls itself as a plain function."""
    held = current_lock()
    nested = self(depth - 1) if depth else None
    assert current_lock() is held
    return [depth, nested]


@app.task(base=SingletonTask, bind=True, max_retries=1, singleton=KEYED)
def lingering(self: Any, name: str) -> Any:
    """Publishes its retry, and takes its time to end."""
    if self.request.retries:
        return self.request.retries
    try:
        raise self.retry(countdown=0)
    finally:
        body(name)


@app.task(base=SingletonTask, bind=True, singleton={**NAMED, "on_conflict": "raise"})
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


@app.task(base=SingletonTask, soft_time_limit=1, singleton=NAMED)
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


@app.task(base=SingletonTask, singleton={**NAMED, "at_least_for": 4})
def resting(name: str) -> str:
    return body(name)
