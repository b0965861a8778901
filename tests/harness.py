"""Real workers as processes, and waiting for conditions: what the tests are made of."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import redis
from celery import Celery, Task
from celery.app.task import Context

from celery_setnx.call.delivery import DELIVERY, Delivery
from celery_setnx.call.message import Call
from celery_setnx.call.wake import lines_of
from celery_setnx.connection import client_for
from celery_setnx.lock.names import due_names
from celery_setnx.lock.wire import ask
from celery_setnx.request import SingletonRequest

Value = TypeVar("Value")

DEADLINE_S = 60.0
GATE_S = 300
"""How long a body waits at its gate: longer than a killed broker takes to boot on a busy machine."""
CONF = "SETNX_TEST_CONF"


class Patience:
    """Seconds to wait. A machine that stands still uses up five at most: nobody else goes on, either."""

    def __init__(self, seconds: float) -> None:
        self._left_s, self._asked_at = seconds, time.monotonic()

    def is_over(self) -> bool:
        """Whether they are over; asked after each look."""
        now = time.monotonic()
        self._left_s -= min(now - self._asked_at, 5.0)
        self._asked_at = now
        return self._left_s < 0


def wait_until(
    condition: Callable[[], Value], what: str | Callable[[], str], deadline_s: float = DEADLINE_S
) -> Value:
    """The condition's first true value; fails the test after the deadline, with `what` as it is then.

    Between two looks it waits for longer than one takes: else tests that wait keep a busy machine busy.
    """
    patience = Patience(deadline_s)
    while True:
        began = time.monotonic()
        value = condition()
        if value:
            return value
        ended = time.monotonic()
        if patience.is_over():
            missing = what if isinstance(what, str) else what()
            raise AssertionError(f"not within {deadline_s:g} s: {missing}; last seen: {value!r}")
        time.sleep(min(max(0.01, 4 * (ended - began)), 0.05))


def end_looks(step: Any) -> None:
    """End the timed looks of a sweep, whose thread would look at lines of the next test."""
    step._looks.stop()
    wait_until(lambda: not step._looks.runs, "its timed looks have ended")


def lock_keys(client: redis.Redis) -> set[str]:
    """All keys of a database but those that workers and couriers of other tests may write at any time."""
    of_others = re.compile(r".*:lines:|setnx:brokers$|.*:\{tests\..*:ticket:")
    return {name for name in map(str, client.scan_iter()) if not of_others.match(name)}


def due_set(app: Celery, task: str) -> str:
    """The name of the set that says when to look at the lines of a task, on a server that is no cluster."""
    return due_names(lines_of(app), task, in_cluster=False)[0]


class Journal:
    """What happened in the workers, in order: written by `tests.app`, read by tests.

    Messages of an earlier test may come late, and its databases have been emptied since, which say what has
    begun: what happens to its calls, by the ids that Celery gave them, is no part of this one's journal.
    """

    KEY = "journal"

    def __init__(self, client: redis.Redis, earlier: Collection[str] = ()) -> None:
        self._client, self._earlier = client, earlier

    def write(self, what: str, **details: Any) -> None:
        """Add an entry, with this process's id and times by the host's two clocks."""
        about = {"pid": os.getpid(), "at": time.monotonic(), "time": time.time()}
        self._client.rpush(self.KEY, json.dumps({"what": what, **about, **details}))

    def apart(self) -> Journal:
        """The same journal by a connection of its own, for a thread that must share none with greenlets."""
        pool = self._client.connection_pool
        own = redis.ConnectionPool(pool.connection_class, **pool.connection_kwargs)
        return Journal(redis.Redis(connection_pool=own))

    def entries(self, **wanted: Any) -> list[dict[str, Any]]:
        """All entries with these details."""
        entries = [json.loads(entry) for entry in self._client.lrange(self.KEY, 0, -1)]
        entries = [entry for entry in entries if entry.get("task_id") not in self._earlier]
        return [e for e in entries if all(e.get(name) == value for name, value in wanted.items())]

    def given_ids(self) -> set[str]:
        """Those of all its calls, but for ids that a test may choose again."""
        return {task_id for entry in self.entries() if len(task_id := str(entry.get("task_id"))) == 36}

    def unended(self) -> int:
        """How many bodies have started whose call has no end."""
        ended = {entry["task_id"] for entry in self.entries(what="end")}
        return sum(entry["task_id"] not in ended for entry in self.entries(what="start"))

    def words(self, task_id: str) -> list[str]:
        """What happened to one task, in order."""
        return [entry["what"] for entry in self.entries(task_id=task_id)]

    def wait_for(
        self, what: str, count: int = 1, deadline_s: float = DEADLINE_S, **wanted: Any
    ) -> list[dict[str, Any]]:
        """The entries, once there are that many."""

        def enough() -> list[dict[str, Any]]:
            found = self.entries(what=what, **wanted)
            return found if len(found) >= count else []

        try:
            return wait_until(enough, f"{count} x {what} {wanted}", deadline_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; the journal: {self.entries()}") from None

    def reached(self, what: str, result: Any, count: int = 1) -> Any:
        """The result of a call, once this has happened to it that often."""
        self.wait_for(what, count, task_id=result.id)
        return result


class Worker:
    """A `celery worker` process, started and ready; `conf` goes over the settings of its app.

    Without `queues` it reads those of its app.
    """

    popen: Callable[..., Any] = subprocess.Popen

    def __init__(
        self,
        directory: Path,
        app: str = "tests.workerapp",
        *,
        concurrency: int = 2,
        pool: str = "prefork",
        queues: str = "celery",
        conf: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        arguments: tuple[str, ...] = (),
    ) -> None:
        self.name = f"w{time.monotonic_ns()}"
        self.log = directory / f"{self.name}.log"
        command = [
            sys.executable, "-m", "celery", "-A", app, "worker", "-P", pool, "-c", str(concurrency),
            "-n", self.node, *(["-Q", queues] if queues else []), "-l", "INFO",
            "--without-gossip", "--without-mingle", "--without-heartbeat", *arguments,
        ]  # fmt: skip
        with self.log.open("wb") as log:
            self.process = self.popen(
                command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, CONF: json.dumps(conf or {}), **(environment or {})},
                start_new_session=True,
            )
        wait_until(self._is_ready, f"worker ready; its log: {self.log}", 180)

    @property
    def node(self) -> str:
        """Its name for remote control, and in records."""
        return f"{self.name}@test"

    def _is_ready(self) -> bool:
        if self.process.poll() is not None:
            raise AssertionError(f"the worker ended with {self.process.returncode}:\n{self.log_text()}")
        return " ready." in self.log_text()

    def log_text(self) -> str:
        """All the worker has logged so far."""
        return self.log.read_text(errors="replace")

    def wait_for_log(self, text: str) -> str:
        """The log, once it holds the text."""
        return wait_until(lambda: text in self.log_text() and self.log_text(), f"{text!r} in {self.log}")

    def take_from(self, app: Any, queue: str) -> None:
        """Have it take calls from one more queue."""
        node = [self.node]
        assert app.control.add_consumer(queue, destination=node, reply=True, timeout=DEADLINE_S)

    def take_no_more_from(self, app: Any, queue: str) -> None:
        """Have it take no more calls from a queue; a read that is under way may still take one."""
        node = [self.node]
        assert app.control.cancel_consumer(queue, destination=node, reply=True, timeout=DEADLINE_S)

    def has_read_all(self, app: Any) -> None:
        """Wait until it has read what came for it: what is on its way to a worker that is killed is lost."""
        for _ in range(2):  # what had come before the first is read before the second
            assert app.control.ping([self.node], timeout=DEADLINE_S, limit=1)

    def kill(self) -> None:
        """kill -9 of the worker and its pool, as a dying host would."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Warm shutdown; what does not end in time is killed.

        A process of the pool whose last result the worker has not read yet stays for 30 seconds (billiard).
        """
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.kill()


def redelivery(after_s: int) -> dict[str, int]:
    """Transport options: a Redis broker delivers again what a worker has not acknowledged for so long.

    Workers look every second, under a mutex. One that is killed as it looks leaves it behind: nobody looks
    for as long as it lasts, which is five minutes by default.
    """
    return {
        "visibility_timeout": after_s,
        "unacked_restore_interval": 1,
        "unacked_restore_throttle": 1,
        "unacked_mutex_expire": 2,
    }


def server_us(client: redis.Redis) -> int:
    """The server's clock in microseconds."""
    seconds, microseconds = client.time()  # type: ignore[misc]
    return int(seconds * 1_000_000 + microseconds)


def properties_of(
    *, content_type: str = "application/json", queue: str = "", is_fanout: bool = False
) -> dict[str, Delivery]:
    """The properties of a message, as a task of a worker has them: how it was received."""
    return {DELIVERY: Delivery(Call("t", "id-1"), "ab", content_type, queue, is_fanout, has_events=False)}


@contextmanager
def delivered(task: Task, message: Any) -> Iterator[dict[str, Any]]:
    """What a delivery of this message has the task's request say, while it runs."""
    request = SingletonRequest(message, app=task.app, task=task, hostname="here")
    args, kwargs, embedded = message.payload
    told = {**request.request_dict, **embedded, "args": args, "kwargs": kwargs, "called_directly": False}
    task.request_stack.push(Context(told))
    try:
        yield told
    finally:
        task.request_stack.pop()


def settle_marks(app: Celery) -> None:
    """Wait until the mark of the call that was published last is extended: no publisher waits for that."""
    ask(client_for(app), ("PING",))


def age(client: redis.Redis, key: str, seconds: float, living: Collection[str] = ()) -> None:
    """Let time pass for one lock, with its line and its mark, as `celery_setnx.testing.pass_time` does.

    For all its permits, but those of the tokens that renew meanwhile.
    """
    from celery_setnx import testing  # not in every worker

    testing._age(client, lock=key, by_s=seconds, living=living)


def is_parked(locks: redis.Redis, key: str, task_id: str) -> bool:
    """Whether a call waits in line and has left its pool slot; one that lingers there has a mark "@"."""
    call = locks.hget(f"{key}:calls", task_id)
    return bool(call) and not str(call).startswith("@")


def exit_code_of_fork(child: Callable[[], int]) -> int:
    """What a forked child ends with: what the function in it returns."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(int(DEADLINE_S))  # a child that hangs ends with -SIGALRM
        try:
            os._exit(int(child()))
        finally:
            os._exit(97)  # it raised: it must not go on as a second run of the tests
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def raising(error: BaseException | type[BaseException]) -> Callable[..., Any]:
    """A function that raises whatever it is given."""

    def fail(*_args: Any, **_options: Any) -> Any:
        raise error

    return fail
