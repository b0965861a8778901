"""Tasks that are not to run again for a while once they have succeeded, on an app of their own."""

import os
import signal
from collections import Counter
from contextlib import nullcontext
from typing import Any, cast

from celery.exceptions import Ignore
from celery.signals import task_received

from celery_setnx import SingletonTask
from celery_setnx.exceptions import LockUnavailable
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.verbs import Released
from celery_setnx.testing import locks_on
from tests.app import body, control, journal, make_app

__all__ = ["app", "control", "journal"]

BROKER_DB = 12
# A broker of its own, as the other workers of a test run do not know these tasks; nor do other apps.
app = make_app("doneapp", BROKER_DB, broker_transport_options={"polling_interval": 0.1})
OPTIONS = {"key": "name", "lease": 5, "retry_delay": 0.1, "dedupe": "until_done", "dedupe_for": 3600}


kept: list[Any] = []


@task_received.connect
def keep(request: Any, **_details: Any) -> None:
    """Have the worker's parent know every delivery for ever (the setting `keeps_requests`)."""
    if app.conf.get("keeps_requests"):
        kept.append(request)


if app.conf.get("late_releases"):
    tried: Counter[str] = Counter()

    def _late(held: HeldLock, *, release: Any = HeldLock.release, **options: Any) -> Released:
        """Give a lock back at the third try, about a second after the first two."""
        tried[held.token] += 1
        if tried[held.token] < 3:
            raise LockUnavailable(held.key, "a test's")
        return cast("Released", release(held, **options))

    HeldLock.release = _late  # type: ignore[assignment,method-assign]


class Unwritable:
    """What no serializer takes."""


class Deadly:
    """What kills the process that is about to store it."""

    def __json__(self) -> str:
        os.kill(os.getpid(), signal.SIGKILL)
        return ""


def run(self: Any, name: str, ends: str = "well") -> Any:
    """Run, and end as it is told."""
    body(name)
    if ends == "failing":
        raise ValueError(name)
    if ends == "ignored":
        raise Ignore
    if ends == "retried" and not self.request.retries:
        raise self.retry(countdown=0, queue="parked")
    return {"unwritable": Unwritable(), "deadly": Deadly()}.get(ends, name)


class Hooked(SingletonTask):
    """Dies once its result is stored, if its call is told so."""

    def on_success(self, retval: Any, task_id: str, args: Any, kwargs: Any) -> None:
        """Die, if told."""
        if args[1:] == ["dies later"]:
            os.kill(os.getpid(), signal.SIGKILL)


def variant(name: str, base: type[SingletonTask] = SingletonTask, **options: Any) -> Any:
    """A task with this function and these options."""
    return app.task(base=base, bind=True, name=name, singleton={**OPTIONS, **options})(run)


daily = variant("daily")
hooked = variant("hooked", Hooked)
strict = variant("strict", on_duplicate="raise")
retrying = variant("retrying", on_conflict="retry")
waiting = variant("waiting", on_conflict="wait")
plain_until_done = variant("plain_until_done", dedupe_for=None)


@app.task(name="after")
def after(*_args: Any) -> str:
    """What follows."""
    return "after"


@app.task(name="starts")
def starts(name: str, url: str = "") -> str:
    """Publish a call from within a task; if told, while the locks are elsewhere."""
    with locks_on(app, url) if url else nullcontext():
        return str(daily.delay(name).id)
