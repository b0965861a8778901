"""Tasks whose success counts, in workers that die at the worst moments; and who publishes them.

A body says whose success counted when it began: it has the lock, so nobody can have noted another since.
"""

import os
import random
import signal
import time
from typing import Any

from celery import Celery

from celery_setnx import SingletonTask, current_lock
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.marks import done_by
from celery_setnx.lock.verbs import Released
from tests.app import control, journal, make_app
from tests.doneapp import Unwritable

BROKER_DB = 14
QUEUES = ("lasting", "doomed")
# A broker of its own, as the other workers of a test run do not know these tasks.
app: Celery = make_app("windowapp", BROKER_DB, broker_transport_options={"polling_interval": 0.05})
OPTIONS = {"key": "name", "lease": 10, "dedupe": "until_done", "dedupe_for": 3600}
DEATHS = float(app.conf.get("test_deaths") or 0)
"""How many of the calls that succeed die before their release; and as many after it, before their result."""


def _dying(held: HeldLock, *, release: Any = HeldLock.release, **options: Any) -> Released:
    chance = random.random() if options.get("done_for") else 1.0
    if chance < DEATHS:
        _die(held, "before")
    word: Released = release(held, **options)
    if chance < 2 * DEATHS:
        _die(held, "after")
    return word


def _die(held: HeldLock, when: str) -> None:
    journal.write("dies", task_id=held.token.partition("|")[0], when=when)
    os.kill(os.getpid(), signal.SIGKILL)


HeldLock.release = _dying  # type: ignore[assignment,method-assign]


def body(self: Any, name: str, ends: str) -> Any:
    """Journal the start, work for a moment, and end as told."""
    lock = current_lock()
    assert lock is not None
    done = done_by(lock.client, lock.key)
    about = {"task_id": self.request.id, "key": lock.key, "ends": ends, "parent": os.getppid()}
    journal.write("start", done=done, **about)
    time.sleep(0.002)  # the work
    if ends == "failing":
        raise ValueError(name)
    journal.write("end", **about)
    return Unwritable() if ends == "unwritable" else name


def _task(name: str, **options: Any) -> Any:
    return app.task(base=SingletonTask, bind=True, name=name, singleton=OPTIONS, **options)(body)


TASKS = (_task("early"), _task("late", acks_late=True, reject_on_worker_lost=True))


def publish(seed: int, calls: int, keys: int) -> None:
    """Publish so many calls, in every way."""
    chosen = random.Random(seed)
    sent = 0
    while sent < calls:
        task, queue = chosen.choice(TASKS), chosen.choice(QUEUES)
        way = chosen.choice(["delay"] * 8 + ["bare"] * 8 + ["fan_out"])
        count = min(10, calls - sent) if way == "fan_out" else 1
        ends = chosen.choices(("well", "failing", "unwritable"), (50, 45, 5), k=count)
        several = [(f"{chosen.randrange(keys // len(TASKS))}", end) for end in ends]
        if way == "fan_out":
            duplicates = task.fan_out(several, queue=queue).duplicates
        elif way == "delay":
            duplicates = int(task.apply_async(several[0], queue=queue).deduplicated)
        else:
            duplicates = app.send_task(task.name, several[0], queue=queue) and 0
        sent += count
        control.hincrby("window", way, count)
        control.hincrby("window", "not published", duplicates)
        control.incrby("window:calls", count)
