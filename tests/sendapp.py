"""The app of the tests of `send_task`: a worker has it; their producer knows its tasks by name only."""

from typing import Any

from celery import Task

from celery_setnx import SingletonTask, singleton
from tests.app import body, make_app

# Not the current app, and its tasks are not shared: other apps in a test's process must not know them.
app = make_app("sendapp")


class Queued(SingletonTask):
    """All tasks of this app recognise duplicates."""

    abstract = True
    singleton = {"lease": 600, "retry_delay": 0.1, "dedupe": "until_done"}


def plainly(
    name: str, reason: str = "", day: int = 0, user: Any = None, args: Any = (), kwargs: Any = None
) -> str:
    """The last parameters have the names that Python programmers give to catch-alls."""
    return body(name)


def variant(task: str, base: Any = Queued, function: Any = plainly, **options: Any) -> Any:
    """One of the tasks that differ in their options only."""
    return app.task(shared=False, base=base, name=f"tests.sendapp.{task}", **options)(function)


SKIPS = {"key": "name", "lease": 600, "on_conflict": "skip"}  # not to be combined with until_started
work = variant("work", singleton={"key": "name"})
listed = variant("listed", singleton={"key": ["day", "name"]})
templated = variant("templated", singleton={"key": "user:{user.id}"})
command = variant("command", singleton={"key": "args"})
whole = variant("whole", singleton={"key": ()})
scoped = variant("scoped", singleton={"key": "name", "scope": "shared-scope"})
skipping = variant("skipping", SingletonTask, singleton=SKIPS)
decorated = variant("decorated", Task, singleton(key="name")(plainly))  # under Celery's own base class
unguarded = variant("unguarded", Task)


@app.task(shared=False, base=SingletonTask, bind=True, singleton={"lease": 600})
def retrying(self: Any, name: str, reason: str = "") -> int:
    """Retries itself once. All arguments are its key, unless the call says otherwise."""
    body(name)
    if not self.request.retries:
        raise self.retry(countdown=0)
    return int(self.request.retries)


@app.task(shared=False, base=SingletonTask, bind=True, singleton={"key": "name", "lease": 600})
def telling(self: Any, name: str) -> Any:
    """Returns the options that came with its message."""
    return self.request.headers["singleton"].get("options")
