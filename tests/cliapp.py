"""The app that the command line is asked about: a task for each answer. No worker runs it."""

import os
from typing import Any

from celery import Celery

from celery_setnx import SingletonTask, singleton

URL = os.environ["SETNX_TEST_URL"]

app = Celery("cliapp", broker=f"{URL}/0", backend=f"{URL}/0")
app.conf.update(setnx_url=os.environ.get("SETNX_TEST_LOCK_URL") or f"{URL}/1", setnx_prefix="t")


@app.task(shared=False, base=SingletonTask)
def sync(customer: Any, since: Any = None, *, deep: bool = False) -> None:
    """Skips: the default."""


@app.task(shared=False, base=SingletonTask, singleton={"on_conflict": "retry", "max_wait": 60})
def retrying(customer: Any) -> None: ...


@app.task(shared=False, base=SingletonTask, singleton={"on_conflict": "wait"})
def waiting(customer: Any) -> None: ...


@app.task(shared=False, base=SingletonTask, singleton={"on_conflict": "raise"})
def raising(customer: Any) -> None: ...


@app.task(shared=False, base=SingletonTask, singleton={"on_conflict": "join"})
def joining(customer: Any) -> None: ...


def decide(conflict: Any) -> Any:
    """Whatever it decides."""
    return conflict.skip()


@app.task(shared=False, base=SingletonTask, singleton={"on_conflict": decide})
def deciding(customer: Any) -> None: ...


@app.task(shared=False, base=SingletonTask, singleton={"dedupe": "until_started"})
def pending(customer: Any) -> None: ...


@app.task(shared=False, base=SingletonTask, singleton={"dedupe": "until_done", "on_duplicate": "raise"})
def unique(customer: Any) -> None: ...


@app.task(shared=False, base=SingletonTask, singleton={"dedupe": "until_done", "scope": "throng"})
def crowd_one(customer: Any) -> None: ...


@app.task(shared=False, base=SingletonTask, singleton={"dedupe": "until_done", "scope": "throng"})
def crowd_two(customer: Any) -> None: ...


@app.task(shared=False)
@singleton(key="customer")
def decorated(customer: Any) -> None: ...


@app.task(shared=False)
def plain(customer: Any) -> None:
    """No lock."""
