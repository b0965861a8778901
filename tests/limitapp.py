"""Tasks of which several calls of a key may run at a time, on an app and a broker of their own.

Each body says who runs beside it, by a set that knows nothing of locks.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery

from celery_setnx import Conflict, SingletonTask, current_lock
from celery_setnx.run import sweep
from tests.app import control, journal, make_app, wait_for_gate

BROKER_DB = 7
# A broker of its own, as the other workers of a test run do not know these tasks; nor do other apps.
app: Celery = make_app("limitapp", BROKER_DB, broker_transport_options={"polling_interval": 0.1})
sweep.SWEEP_S = float(app.conf.get("test_sweep_s") or sweep.SWEEP_S)
LIMIT = 5
RATE = (int(app.conf.get("test_starts") or 10), 1)
OPTIONS = {"key": "name", "limit": LIMIT, "lease": 600, "retry_delay": 0.05, "retry_delay_max": 0.3}
LATE = {"acks_late": True, "reject_on_worker_lost": True}


@contextmanager
def running(name: str, task_id: str) -> Iterator[dict[str, str]]:
    """Whose bodies of this name run now, this one among them: task ids by process id."""
    key, me = f"running:{name}", f"{os.getpid()}|{task_id}"
    with control.pipeline() as pipe:
        _added, _expires, members = pipe.sadd(key, me).expire(key, 600).smembers(key).execute()
    try:
        yield dict(member.decode().split("|") for member in members)
    finally:
        control.srem(key, me)


def body(request: Any, name: str, gate: str, seconds: float) -> int:
    """Journal the start, wait for the gate if one is named, take a while, journal the end: the permit."""
    lock = current_lock()
    assert lock is not None
    about = {"task_id": request.id, "key": name, "retries": request.retries, "permit": lock.permit}
    with running(name, request.id) as beside:
        journal.write("start", fence=lock.fence, beside=beside, **about)
        if gate:
            wait_for_gate(gate)
        time.sleep(seconds)  # the work
        journal.write("end", **about)
    return lock.permit


def run(self: Any, name: str, gate: str = "", seconds: float = 0.0) -> int:
    return body(self.request, name, gate, seconds)


def then(self: Any, before: list[int], name: str) -> list[int]:
    """A step of a chain: the permits of all steps so far."""
    return [*before, body(self.request, name, "", 0.01)]


def retry_once(self: Any, name: str, gate: str = "", seconds: float = 0.0) -> int:
    """Retries itself once, if it is gated; the permit of its last attempt."""
    permit = body(self.request, name, gate, seconds)
    if gate and self.request.retries == 0:
        raise self.retry(countdown=0)
    return permit


def circulate(self: Any, name: str, seconds: float = 0.0) -> int:
    """Sends its like before it ends, until the test has had enough."""
    permit = body(self.request, name, "", seconds)
    if control.exists(f"load:{name}"):
        sent = self.apply_async([name, seconds], queue=self.request.delivery_info["routing_key"])
        control.rpush(f"sent:{name}", sent.id)
    return permit


def told(conflict: Conflict) -> dict[str, Any]:
    """What a policy of one's own sees."""
    return {"holder": conflict.holder.task_id, "remaining_s": conflict.remaining_s, "policy": "told"}


def variant(name: str, function: Any = run, celery: Any = None, **options: Any) -> Any:
    """A task with this function and these options."""
    about = {"base": SingletonTask, "bind": True, "shared": False, **(celery or {})}
    return app.task(name=f"limit.{name}", singleton={**OPTIONS, **options}, **about)(function)


work = variant("work", on_conflict="wait")
auto = variant("auto")
raises = variant("raises", on_conflict="raise")
tells = variant("tells", on_conflict=told)
follows = variant("follows", limit=2, dedupe="until_started")
paced = variant("paced", limit=10, rate=(50, 2))
# Two at a time, and two in ten minutes: a test says that those have passed.
slow = {
    "auto": variant("slow", limit=2, rate=(2, 600)),
    "skip": variant("slow_skips", limit=2, rate=(2, 600), on_conflict="skip"),
    "raise": variant("slow_raises", limit=2, rate=(2, 600), on_conflict="raise"),
    "again": variant("slow_again", retry_once, limit=2, rate=(2, 600)),
}
quick = {
    "wait": variant("quick_waits", limit=5, rate=RATE, lease=4, celery=LATE),
    "load": variant("quick_load", circulate, limit=5, rate=RATE),
    "skip": variant("quick_skips", retry_once, limit=2, rate=(1, 2), on_conflict="skip"),
    "held": variant("quick_held", retry_once, limit=1, rate=(1, 2), hold_on_retry=True),
}
often = variant("often", limit=1, rate=(1, 0.1))
often_rests = variant("often_rests", limit=1, rate=(100, 10), at_least_for=0.2)
paced_step = variant("paced_step", then, limit=5, rate=RATE)
step = variant("step", then, on_conflict="wait")


@app.task(shared=False, name="limit.note")
def note() -> None:
    """Nothing."""


@app.task(bind=True, shared=False, name="limit.total")
def total(self: Any, permits: list[int]) -> int:
    """A chord's callback, without a lock: how many results it was given."""
    journal.write("total", task_id=self.request.id, count=len(permits))
    return len(permits)
