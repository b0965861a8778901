"""The same bodies under celery-once, celery-singleton, celery-heimdall, cache.add and our own lock."""

from types import SimpleNamespace
from typing import Any

from celery import Task
from celery.exceptions import Ignore
from celery_heimdall import HeimdallTask
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_setnx import SingletonTask
from tests import app as tests_app
from tests.app import journal, wait_for_gate
from tests.migration import pages
from tests.migration.deploy import DB, shop_url, use_django_cache

LEASE_S = 600

use_django_cache()
app = tests_app.make_app(
    "troubles",
    DB,
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": shop_url()}},
    setnx_url=shop_url(),
    setnx_defaults={"lease": LEASE_S, "retry_delay": 0.1},
)
_cookbook: dict[str, Any] = {}
exec(pages.code(pages.CACHE, "app"), _cookbook)


class Recipe(Task):
    """The page's recipe around a body: it is skipped while another of its name runs."""

    abstract = True

    def __call__(self, name: str) -> Any:
        with _cookbook["cache_lock"](f"cached-lock-{name}") as acquired:
            return self.run(name) if acquired else None


def work(name: Any) -> Any:
    tests_app.body(str(name))
    return name


def ignored(name: Any) -> Any:
    work(name)
    raise Ignore


def retrying(self: Task, name: Any) -> Any:
    work(name)
    if not self.request.retries:
        raise self.retry(countdown=0)
    return name


def tidying(self: Task, name: Any) -> Any:
    """Retries itself as well, and has something to do after it has asked for that."""
    try:
        return retrying(self, name)
    finally:
        journal.write("tidying", task_id=self.request.id)
        if name.startswith("untidy"):
            wait_for_gate(name)
        journal.write("tidied", task_id=self.request.id)


def tasks_of(kind: str, base: type[Task], **options: Any) -> SimpleNamespace:
    """A task of each body under one kind of lock."""
    tasks = SimpleNamespace()
    for function in (work, ignored, retrying, tidying):
        name, bound = function.__name__, function in (retrying, tidying)
        task = app.task(function, name=f"{kind}.{name}", base=base, bind=bound, shared=False, **options)
        setattr(tasks, name, task)
    return tasks


once = tasks_of("once", QueueOnce)
once_early = tasks_of("once_early", QueueOnce, once={"unlock_before_run": True})
lone = tasks_of("lone", Singleton)
# By default it would wait nearly a second in the worker for the lock that its call has taken already.
heimdall = tasks_of("heimdall", HeimdallTask, heimdall={"unique": True, "unique_lock_blocking": False})
cached = tasks_of("cached", Recipe)
ours = tasks_of("ours", SingletonTask, singleton={"dedupe": "until_done"})
ours_early = tasks_of("ours_early", SingletonTask, singleton={"dedupe": "until_started"})


@app.task(name="answers", shared=False)
def answers(results: list[Any]) -> list[Any]:
    return results


@app.task(name="marker", shared=False)
def marker() -> None:
    """When it has been received, all that was in its queue before has been."""
