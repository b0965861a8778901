"""The app that the demo's workers run. Bodies and signals are recorded on one list, in the server's order."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import redis
from celery import Celery
from celery.signals import worker_ready

from celery_setnx import SingletonTask, current_lock, signals

URL = os.environ["DEMO_URL"]
PREFIX = os.environ["DEMO_PREFIX"]
HISTORY = f"{PREFIX}:history"
KEEP_S = 600
GATE_S = 30

app = Celery("examples.demo_app", broker=URL, backend=URL)
app.conf.update(
    setnx_prefix=PREFIX,
    # The two workers play two hosts. On one host a dead process is proved dead, and taken over at once.
    setnx_same_host=False,
    # Everything the demo leaves on a server that is not its own starts with its prefix.
    broker_transport_options={"global_keyprefix": f"{PREFIX}:"},
    result_backend_transport_options={"global_keyprefix": f"{PREFIX}:"},
    result_expires=KEEP_S,
    task_default_queue="any",
    worker_prefetch_multiplier=1,
    broker_connection_retry_on_startup=True,
)
client = redis.Redis.from_url(URL, socket_timeout=None)


@app.task(base=SingletonTask, singleton={"key": "account", "on_conflict": "wait"})
def charge(account: int) -> None:
    """One of many calls per account: those that find the lock held wait in line."""
    with recorded(account=account):
        time.sleep(0.15)


@app.task(base=SingletonTask, singleton={"key": "month", "retry_delay": 0.4})
def report(month: str) -> str:
    """Runs until its gate opens; its callers choose what becomes of a conflict."""
    with recorded():
        wait_for_gate("report")
    return f"report of {month}"


@app.task(base=SingletonTask, singleton={"dedupe": "until_done"})
def refresh(item: int) -> None:
    """Asked for many times, queued once. Runs until its gate opens."""
    with recorded(item=item):
        wait_for_gate("refresh")


@app.task(base=SingletonTask, singleton={"key": "page", "debounce": 1.5})
def save(page: int, text: str) -> str:
    """Called at each key that is pressed: the newest call of a page runs, once no more come."""
    with recorded(page=page, text=text):
        time.sleep(0.2)
    return text


@app.task(base=SingletonTask, singleton={"key": "tenant", "limit": 3, "on_conflict": "wait"})
def sync(tenant: str) -> None:
    """Three calls of a tenant run at a time, each under a permit; the others wait in line."""
    lock = current_lock()
    assert lock is not None
    with recorded(tenant=tenant, permit=lock.permit):
        wait_for_gate("sync")
        time.sleep(0.2)


@app.task(base=SingletonTask, singleton={"key": "partner", "limit": 3, "rate": (5, 1.5)})
def order(partner: str) -> None:
    """Five calls of a partner start in any second and a half; the others wait in line."""
    with recorded(partner=partner):
        time.sleep(0.05)


@app.task(
    base=SingletonTask,
    bind=True,
    singleton={
        "key": "account",
        "lease": 3,
        "on_conflict": "retry",
        "retry_delay": 0.2,
        "retry_delay_max": 0.4,
    },
)
def settle(self: SingletonTask, account: str) -> int:
    """Runs until its gate opens, or until its worker is killed."""
    with recorded():
        wait_for_gate("settle")
    assert self.lock is not None
    return self.lock.fence


def server_time() -> float:
    """The one clock of the demo: the server's, in Unix seconds."""
    seconds, microseconds = client.time()
    return float(seconds + microseconds / 1e6)


def record(what: str, **details: Any) -> None:
    entry = {"what": what, "at": server_time(), "pid": os.getpid(), **details}
    with client.pipeline() as pipe:
        pipe.rpush(HISTORY, json.dumps(entry))
        pipe.expire(HISTORY, KEEP_S)
        pipe.execute()


@contextmanager
def recorded(**details: Any) -> Iterator[None]:
    """Record the start and the end of a body."""
    task = app.current_task
    lock = current_lock()
    assert lock is not None
    about = {"task_id": task.request.id, "worker": task.request.hostname, "fence": lock.fence, **details}
    record("start", **about)
    yield
    record("end", **about)


def open_gate(name: str) -> None:
    """Let one body go on."""
    gate = f"{PREFIX}:gate:{name}"
    with client.pipeline() as pipe:
        pipe.rpush(gate, "open")
        pipe.expire(gate, KEEP_S)
        pipe.execute()


def wait_for_gate(name: str) -> None:
    if client.blpop([f"{PREFIX}:gate:{name}"], timeout=GATE_S) is None:
        raise TimeoutError(f"nobody opened the gate of {name} within {GATE_S} s")


def recorder(what: str) -> Any:
    def receiver(sender: Any, task_id: str, signal: Any, holder: Any = None, **details: Any) -> None:
        named = {} if holder is None else {"holder": holder.as_dict()}
        record(what, task_id=task_id, worker=sender.request.hostname, **named, **details)

    return receiver


for word in ("acquired", "conflict", "waiting", "woken", "taken_over", "released", "lost"):
    getattr(signals, f"lock_{word}").connect(recorder(word), weak=False)
signals.call_superseded.connect(recorder("superseded"), weak=False)


@worker_ready.connect
def record_ready(sender: Any, **_details: Any) -> None:
    record("ready", worker=sender.hostname)
