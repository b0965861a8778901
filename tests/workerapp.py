"""The app that most test workers run: a task per option and way to declare it; `name` is the key."""

from typing import Any

from celery import Task, current_task, shared_task
from celery.signals import task_prerun

from celery_setnx import Conflict, SingletonTask, current_lock, singleton
from celery_setnx.request import SingletonRequest
from tests.app import body, control, journal, make_app  # for the app beside

__all__ = ["app", "body", "control", "journal"]

app = make_app("workerapp")
app.set_current()  # for its shared task

NAMED = {"key": "name", "lease": 6}
KEYED = {**NAMED, "retry_delay": 0.1}
RAISE = {**NAMED, "on_conflict": "raise"}
AGAIN = {"max_retries": 1, "countdown": 0, "queue": "parked"}
DONE = {"key": "name", "lease": 600, "retry_delay": 0.1, "dedupe": "until_done"}
STARTED = {**DONE, "dedupe": "until_started"}


@task_prerun.connect
def stand_still(task_id: str, kwargs: Any, **_details: Any) -> None:
    """A call with `stands=` has been accepted, and has not started."""
    if kwargs.get("stands"):
        journal.write("prerun", task_id=task_id)
        control.blpop([f"gate:{task_id}"], timeout=30)


def variant(function: Any, name: str, **options: Any) -> Any:
    """A SingletonTask with a function that others have too: they differ in their options."""
    options = {"base": SingletonTask, "name": f"{function.__module__}.{name}", **options}
    return app.task(**options)(function)


def plainly(name: str, stands: bool = False) -> str:
    return body(name)


def busy(conflict: Conflict) -> dict[str, Any]:
    return {"busy": conflict.key, "holder": conflict.holder.task_id}


def retry_or_fail(conflict: Conflict) -> Any:
    """The first conflict waits, the second fails."""
    return conflict.retry(countdown=1) if conflict.waits == 0 else conflict.fail()


class Choosy(Task):
    """Sends no call that it has an id of: as the base classes do that keep duplicates out of the queue."""

    abstract = True

    def apply_async(self, *args: Any, task_id: str | None = None, **options: Any) -> Any:
        if task_id is None:
            return super().apply_async(*args, **options)
        return self.AsyncResult(task_id)


class Noting(SingletonRequest):
    """A Request of one's own, with ours."""

    def revoked(self) -> bool:
        revoked = super().revoked()
        if revoked:
            journal.write("discarded", task_id=self.id)
        return revoked


class Classy(SingletonTask):
    """A class-based task."""

    name = "tests.classy"
    singleton = NAMED

    def run(self, name: str) -> str:
        return body(name)


whole = variant(plainly, "whole", singleton={"key": (), "lease": 6})  # one lock for the whole task
own_policy = variant(plainly, "own_policy", singleton={"key": "name", "on_conflict": busy})
stubborn = variant(plainly, "stubborn", singleton={"key": "name", "on_conflict": retry_or_fail})
shared = shared_task(base=SingletonTask, name="tests.workerapp.shared", singleton=NAMED)(plainly)
classy = app.register_task(Classy())
decorated = variant(singleton(**KEYED)(plainly), "decorated", base=Task, track_started=True)  # Celery's base
choosy = variant(singleton(**KEYED, on_conflict="retry")(plainly), "choosy", base=Choosy)
decorated_singleton = variant(singleton(**RAISE)(plainly), "decorated_singleton")  # ours
started = variant(plainly, "started", singleton=STARTED)
own_request = variant(plainly, "own_request", Request=Noting, singleton=STARTED)
late = variant(plainly, "late", acks_late=True, singleton=STARTED)
tardy = variant(plainly, "tardy", acks_late=True, reject_on_worker_lost=True, singleton=STARTED)
done = variant(plainly, "done", singleton=DONE)
# Celery publishes their calls whatever the arguments are.
LONG = {"key": "name", "lease": 600, "retry_delay": 0.1}
untyped = variant(plainly, "untyped", typing=False, singleton=LONG)
untyped_all = variant(plainly, "untyped_all", typing=False, singleton=DONE | {"key": None})
untyped_whole = variant(plainly, "untyped_whole", typing=False, singleton=LONG | {"key": ()})
untyped_decorated = variant(singleton(**LONG)(plainly), "untyped_decorated", typing=False, base=Task)


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


@app.task(base=SingletonTask, bind=True, max_retries=2, singleton=KEYED)
def flaky(self: Any, name: str, failures: int) -> Any:
    """Retries itself `failures` times."""
    body(name)
    if self.request.retries < failures:
        raise self.retry(countdown=0)
    return self.request.retries


@app.task(base=SingletonTask, bind=True, singleton=DONE)
def done_twice(self: Any, name: str, countdown: int = 0) -> str:
    """Retries itself once, by way of a queue that nobody consumes."""
    body(name)
    if not self.request.retries:
        raise self.retry(countdown=countdown, queue="parked")
    return name


@app.task(base=SingletonTask, autoretry_for=(Exception,), retry_kwargs=AGAIN, singleton=RAISE)
def autoretried(name: str) -> Any:
    """Fails once, and comes back by way of that queue."""
    body(name)
    if not current_task.request.retries:
        raise ZeroDivisionError(name)
    return name


@app.task(base=SingletonTask, bind=True, singleton=DONE)
def done_page(self: Any, name: str) -> str:
    """Retries itself with another argument, and so with another key."""
    body(name)
    if not self.request.retries:
        raise self.retry(args=["next"], countdown=0)
    return name


@app.task(base=SingletonTask, bind=True, max_retries=1, singleton=KEYED)
def lingering(self: Any, name: str) -> Any:
    """Publishes its retry, and takes its time to end."""
    if self.request.retries:
        return self.request.retries
    try:
        raise self.retry(countdown=0)
    finally:
        body(name)


@app.task(bind=True)
@singleton(**NAMED)
def moving(self: Any, name: str, then: str) -> str:
    """Comes back once, by another name."""
    if name != then:
        raise self.retry(kwargs={"name": then, "then": then}, args=(), countdown=0)
    return body(name)


@app.task(bind=True)
@singleton(**RAISE)
def decorated_bound(self: Any, name: str) -> str:
    assert self.request.id
    return body(name)


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


@app.task
def plain(value: Any) -> Any:
    """No lock at all."""
    return value


@app.task(base=SingletonTask, bind=True, singleton={"key": "name", "lease": 1})
def careful(self: Any, name: str) -> None:
    """Asks before it relies on its lock."""
    body(name)
    self.lock.ensure()
