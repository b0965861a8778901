"""The same bodies under celery-once, celery-singleton, celery-heimdall, cache.add and our own lock."""

import os
from typing import Any

import django.conf
import redis
from celery import Celery, Task, current_task
from celery.exceptions import Ignore
from celery.signals import task_postrun
from celery_heimdall import HeimdallTask
from celery_once import QueueOnce
from celery_singleton import Singleton

from celery_setnx import SingletonTask
from tests.harness import Journal
from tests.migration import pages
from tests.migration.deploy import DB

URL = os.environ["SETNX_TEST_URL"]
LEASE_S = 3.0
BRIEF_S = 1

control = redis.Redis.from_url(f"{URL}/0", decode_responses=True, socket_timeout=None)
journal = Journal(control)

app = Celery("troubles", broker=f"{URL}/{DB}", backend=f"{URL}/{DB}", set_as_current=False)
app.conf.update(
    ONCE={"backend": "celery_once.backends.Redis", "settings": {"url": f"{URL}/{DB}"}},
    broker_connection_retry_on_startup=True,
    result_expires=600,
    setnx_defaults={"lease": LEASE_S, "retry_delay": 0.1},
    worker_prefetch_multiplier=1,
)

if not django.conf.settings.configured:
    cache = {"BACKEND": "django.core.cache.backends.redis.RedisCache", "LOCATION": f"{URL}/{DB}"}
    django.conf.settings.configure(CACHES={"default": cache})
_cookbook: dict[str, Any] = {}
exec(pages.code(pages.CACHE, "app"), _cookbook)


def body(name: Any) -> Any:
    """Journal the start, wait until the gate of this name opens, journal the end."""
    about = {"task_id": current_task.request.id, "task": current_task.name, "name": repr(name)}
    journal.write("start", **about)
    if str(name).startswith("gated"):
        control.blpop([f"gate:{name}"], timeout=60)
    journal.write("end", **about)
    return name


@task_postrun.connect
def journal_postrun(task_id: str, **_details: Any) -> None:
    """When all is said and done, hooks of the base class included."""
    journal.write("postrun", task_id=task_id)


def work(name: Any) -> Any:
    return body(name)


def ignored(name: Any) -> Any:
    body(name)
    raise Ignore


def retrying(self: Task, name: Any) -> Any:
    body(name)
    if not self.request.retries:
        raise self.retry(countdown=0)
    return name


def tidying(self: Task, name: Any) -> Any:
    """Retries itself as well, and has something to do after it has asked for that."""
    try:
        return retrying(self, name)
    finally:
        journal.write("tidying", task_id=self.request.id)
        if str(name).startswith("untidy"):
            control.blpop([f"gate:{name}"], timeout=60)
        journal.write("tidied", task_id=self.request.id)


def task(function: Any, kind: str, base: type[Task], **options: Any) -> Any:
    """A task of its own from a body that others share."""
    name = f"{kind}.{function.__name__}"
    if kind.endswith("early"):
        name = f"{kind}.work"
    return app.task(name=name, base=base, shared=False, bind=function in (retrying, tidying), **options)(
        function
    )


once = {f.__name__: task(f, "once", QueueOnce) for f in (work, ignored, retrying)}
once_early = task(work, "once_early", QueueOnce, once={"unlock_before_run": True})
lone = {f.__name__: task(f, "lone", Singleton) for f in (work, ignored, retrying)}
ours = {
    f.__name__: task(f, "ours", SingletonTask, singleton={"dedupe": "until_done"})
    for f in (work, ignored, retrying, tidying)
}
ours_early = task(work, "ours_early", SingletonTask, singleton={"dedupe": "until_started"})

# By default it would wait nearly a second in the worker for the lock that its call has taken already.
UNIQUE = {"unique": True, "unique_lock_blocking": False}
heimdall = {f.__name__: task(f, "heimdall", HeimdallTask, heimdall=UNIQUE) for f in (work, retrying)}
heimdall_brief = task(work, "heimdall_brief", HeimdallTask, heimdall={**UNIQUE, "unique_timeout": BRIEF_S})


def _cached(name: str, expire_s: int) -> Any:
    _cookbook["EXPIRE_S"] = expire_s
    with _cookbook["cache_lock"](f"cached-lock-{name}") as acquired:
        return body(name) if acquired else None


@app.task(name="cached.work", shared=False)
def cached(name: str, expire_s: int = 600) -> Any:
    return _cached(name, expire_s)


@app.task(name="cached.tidying", bind=True, shared=False)
def cached_tidying(self: Task, name: str) -> Any:
    _cookbook["EXPIRE_S"] = 600
    with _cookbook["cache_lock"](f"cached-lock-{name}") as acquired:
        return tidying(self, name) if acquired else None


@app.task(name="answers", shared=False)
def answers(results: list[Any]) -> list[Any]:
    return results


@app.task(name="total", shared=False)
def total(results: list[Any]) -> int:
    return len(results)


@app.task(name="marker", shared=False)
def marker() -> None:
    """When it has been received, all that was in its queue before has been."""
