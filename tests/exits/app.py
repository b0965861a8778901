"""The app that the workers of these tests run: a task per way out."""

import ctypes
import os
import signal
import time
from typing import Any

from celery.exceptions import Ignore, Reject

from celery_setnx import SetnxLock, SingletonTask
from celery_setnx.lock.keeper import keeper_for_process
from tests.app import body, control, journal, make_app

LEASE_S = 2.0
# Tens of milliseconds. A body that lets the GIL go for a moment every 4 ms takes it back before another
# thread has woken, and CPython, which forces a switch after 5 ms in which nobody let it go, never does.
_STEPS = 1_000_000

app = make_app("exits")


class Keyed(SingletonTask):
    """All tasks of this app share one scope: calls with one name exclude each other, whatever the task."""

    abstract = True
    singleton = {
        "scope": "exits", "key": "name", "lease": LEASE_S, "retry_delay": 0.1, "retry_delay_max": 0.2,
        "queue_lease": 20,
    }  # fmt: skip


def leave(way: str) -> str:
    """End the body in one of the ways that an exception can end it."""
    if way == "raise":
        raise ZeroDivisionError(way)
    if way == "ignore":
        raise Ignore(way)
    if way in ("reject", "requeue"):
        raise Reject(way, requeue=way == "requeue")
    return way


@app.task(base=Keyed)
def work(name: str, way: str = "return") -> str:
    body(name)
    return leave(way)


@app.task(base=Keyed, bind=True, acks_late=True)
def late(self: Any, name: str, way: str = "return") -> str:
    """Acknowledged at its end; the second delivery returns whatever the first did."""
    body(name)
    return leave("return" if self.request.delivery_info["redelivered"] else way)


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
def retrying(self: Any, name: str, queue: str | None = None, attempts: int = 2, **options: Any) -> int:
    """Retries itself until it has made that many attempts; its retries go to the queue, if one is named."""
    body(name)
    if self.request.retries + 1 < attempts:
        raise self.retry(
            exc=ZeroDivisionError(name), queue=queue, **{"countdown": 0, "max_retries": 5, **options}
        )
    return self.request.retries  # type: ignore[no-any-return]


class Elsewhere(Keyed):
    """Its retries go to the queue that the call names."""

    abstract = True

    def retry(self, *args: Any, **options: Any) -> Any:
        return super().retry(*args, queue=self.request.args[1], **options)


@app.task(base=Elsewhere, bind=True, autoretry_for=(ZeroDivisionError,), retry_kwargs={"countdown": 0})
def autoretried(self: Any, name: str, _queue: str) -> int:
    """Fails once."""
    body(name)
    if not self.request.retries:
        raise ZeroDivisionError(name)
    return self.request.retries  # type: ignore[no-any-return]


@app.task(base=Keyed, bind=True)
def lingering(self: Any, name: str, _queue: str) -> Any:
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
def careful(self: Any, name: str, gate: str = "") -> str:
    """Asks at its end whether the lock is still its own."""
    body(gate or name)
    self.lock.ensure()
    return name


@app.task(base=Keyed)
def stubborn(name: str) -> str:
    """Does not go when it is told to: only SIGKILL ends it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    return body(name)


@app.task(base=Keyed, bind=True)
def computing(self: Any, name: str, told: str) -> str:
    """Pure Python that never yields until a file is there: other threads get their turn, greenlets do not."""
    body(name)
    while not os.path.exists(told):
        for _ in range(_STEPS):
            pass
    self.lock.ensure()
    return name


@app.task(base=Keyed, bind=True)
def hogging(self: Any, name: str, pipe: str) -> str:
    """C code that keeps the GIL until somebody writes to the pipe: no other thread of the process runs."""
    told = os.open(pipe, os.O_RDWR)
    journal.write("hogging", task_id=self.request.id, key=self.lock.key, fence=self.lock.fence)
    ctypes.PyDLL(None).read(told, ctypes.create_string_buffer(1), 1)
    journal.write("hogged", task_id=self.request.id)
    os.close(told)
    self.lock.ensure()
    return name


@app.task(base=Keyed, bind=True)
def forking(self: Any, name: str, told: str) -> str:
    """Forks a process that holds a lock of its own until a file is there."""
    body(name)
    pid = os.fork()
    if pid == 0:
        os._exit(hold_own_lock(f"t:{{forked}}:{name}", told))
    status = os.waitpid(pid, 0)[1]
    self.lock.ensure()
    return name if status == 0 else f"the fork ended with {os.waitstatus_to_exitcode(status)}"


def hold_own_lock(key: str, told: str) -> int:
    """0 if the keeper of this process keeps a lock until the file is there."""
    try:
        client = type(control).from_url(app.conf.setnx_url)  # of this process alone
        lock = SetnxLock(client, key, lease=LEASE_S).acquire().lock
        assert lock is not None
        keeper = keeper_for_process(time.monotonic)
        keeper.watch(lock, lambda *_lost: None)
        while not os.path.exists(told):
            time.sleep(0.05)
        lock.ensure()
        keeper.forget(lock)
        lock.release()
    except BaseException:
        return 1
    return 0
