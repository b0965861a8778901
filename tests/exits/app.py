"""The app that the workers of these tests run: a task per way out. Journal and gates are workerapp's."""

import ctypes
import os
import signal
import time
from typing import Any

from celery import Celery
from celery.exceptions import Ignore, Reject

from celery_setnx import SetnxLock, SingletonTask
from celery_setnx.keeper import keeper_for_process
from tests.workerapp import LOCK_DB, URL, body, control, journal

LEASE_S = 2.0

app = Celery("exits", broker=f"{URL}/{os.environ.get('EXITS_BROKER_DB', '0')}", backend=f"{URL}/0")
app.conf.update(
    setnx_url=f"{URL}/{LOCK_DB}",
    setnx_prefix="t",
    setnx_same_host=os.environ.get("SETNX_TEST_SAME_HOST") != "no",
    broker_connection_retry_on_startup=True,
    broker_transport_options={
        "visibility_timeout": int(os.environ.get("EXITS_VISIBILITY_S", "3600")),
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
    },
    worker_prefetch_multiplier=1,
    worker_soft_shutdown_timeout=float(os.environ.get("EXITS_SOFT_SHUTDOWN_S", "0")),
    result_expires=600,
)


class Keyed(SingletonTask):
    """All tasks of this app share one scope: calls with one name exclude each other, whatever the task."""

    abstract = True
    singleton = {
        "scope": "exits",
        "key": "name",
        "lease": LEASE_S,
        "retry_delay": 0.1,
        "retry_delay_max": 0.2,
        "queue_lease": 20,
    }


def leave(way: str) -> str:
    """End the body in one of the ways that an exception can end it."""
    if way == "raise":
        raise ZeroDivisionError(way)
    if way == "ignore":
        raise Ignore(way)
    if way in ("reject", "requeue"):
        raise Reject(way, requeue=way == "requeue")
    return way


@app.task(base=Keyed, bind=True)
def work(self: Any, name: str, way: str = "return") -> str:
    body(name)
    return leave(way)


@app.task(base=Keyed, bind=True, acks_late=True)
def late(self: Any, name: str, way: str = "return") -> str:
    """Acknowledged at its end; the second delivery returns whatever the first did."""
    body(name)
    return leave("return" if self.request.delivery_info["redelivered"] else way)


@app.task(base=Keyed, acks_late=True)
def late_failure(name: str) -> str:
    """Acknowledged at its end, which is an error each time."""
    body(name)
    return leave("raise")


@app.task(base=Keyed, acks_late=True, ignore_result=True)
def resultless(name: str) -> str:
    return body(name)


@app.task(base=Keyed, acks_late=True, reject_on_worker_lost=True)
def requeued_if_lost(name: str) -> str:
    return body(name)


@app.task(base=Keyed, bind=True, acks_late=True, retry_on_worker_lost=True, default_retry_delay=0)
def retried_if_lost(self: Any, name: str) -> int:
    body(name)
    return self.request.retries  # type: ignore[no-any-return]


@app.task(base=Keyed, bind=True)
def retrying(self: Any, name: str, attempts: int = 2, countdown: float = 0, max_retries: int = 5) -> int:
    """Retries itself until it has made that many attempts."""
    body(name)
    if self.request.retries + 1 < attempts:
        raise self.retry(countdown=countdown, max_retries=max_retries, exc=ZeroDivisionError(name))
    return self.request.retries  # type: ignore[no-any-return]


@app.task(
    base=Keyed,
    bind=True,
    autoretry_for=(ZeroDivisionError,),
    retry_kwargs={"countdown": 2},
    retry_jitter=False,
)
def autoretried(self: Any, name: str) -> int:
    """Fails once."""
    body(name)
    if not self.request.retries:
        raise ZeroDivisionError(name)
    return self.request.retries  # type: ignore[no-any-return]


@app.task(base=Keyed, bind=True)
def lingering(self: Any, name: str) -> Any:
    """Publishes its retry first, and only then waits at its gate."""
    if self.request.retries:
        return self.request.retries
    try:
        raise self.retry(countdown=0)
    finally:
        body(name)


@app.task(base=Keyed, bind=True)
def replaced(self: Any, name: str, queue: str) -> Any:
    body(name)
    return self.replace(work.si(name).set(queue=queue))


@app.task(base=Keyed, bind=True)
def replaced_early(self: Any, name: str, queue: str) -> Any:
    """Publishes its replacement first, and only then waits at its gate."""
    options = {"on_conflict": "raise", "max_wait": 0}
    try:
        return self.replace(work.si(name).set(queue=queue, singleton=options))
    finally:
        body(name)


@app.task(base=Keyed, bind=True)
def careful(self: Any, name: str) -> str:
    """Asks at its end whether the lock is still its own."""
    body(name)
    self.lock.ensure()
    return name


@app.task(base=Keyed, bind=True)
def patient(self: Any, name: str) -> str:
    """Waits at a gate of its own."""
    body(f"{name} patient")
    self.lock.ensure()
    return name


@app.task(base=Keyed)
def stubborn(name: str) -> str:
    """Does not go when it is told to: only SIGKILL ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return body(name)


@app.task(base=Keyed, bind=True)
def computing(self: Any, name: str, seconds: float) -> str:
    """Pure Python that never yields: other threads get their turn, greenlets do not."""
    body(name)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pass
    self.lock.ensure()
    journal.write("computed", task_id=self.request.id)
    return name


@app.task(base=Keyed, bind=True)
def hogging(self: Any, name: str, seconds: float) -> str:
    """C code that keeps the GIL: no other thread of the process runs."""
    journal.write("hogging", task_id=self.request.id, key=self.lock.key, fence=self.lock.fence)
    ctypes.PyDLL(None).usleep(int(seconds * 1_000_000))
    journal.write("hogged", task_id=self.request.id)
    self.lock.ensure()
    return name


@app.task(base=Keyed, bind=True)
def forking(self: Any, name: str) -> int:
    """Forks a process that holds a lock of its own for longer than a lease; returns its exit status."""
    body(name)
    pid = os.fork()
    if pid == 0:
        os._exit(hold_own_lock(f"t:{{forked}}:{self.request.id}"))
    status = os.waitpid(pid, 0)[1]
    self.lock.ensure()
    journal.write("forked", task_id=self.request.id, status=status)
    return os.waitstatus_to_exitcode(status)


def hold_own_lock(key: str) -> int:
    """0 if the keeper of this process keeps a lock for longer than a lease."""
    try:
        lock = SetnxLock(control_of_locks(), key, lease=LEASE_S).acquire().lock
        assert lock is not None
        keeper = keeper_for_process(time.monotonic)
        keeper.watch(lock, lambda *_lost: None)
        time.sleep(1.5 * LEASE_S)  # the lock is to be held for so long
        lock.ensure()
        keeper.forget(lock)
        lock.release()
    except BaseException:
        return 1
    return 0


def control_of_locks() -> Any:
    """A client of the lock database that this process has for itself."""
    return type(control).from_url(app.conf.setnx_url)
