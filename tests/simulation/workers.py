"""Celery around the package's own code: a list of messages as a broker, workers of a parent and children.

Real are the app, the producer, the strategy that makes a request of a message, the request, the tracer, the
worker's timer and the result backend's code. Simulated are the broker, the pool and the parent's loop.
"""

from __future__ import annotations

import logging
import math
import pickle
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import Any

from billiard.einfo import ExceptionInfo
from billiard.exceptions import WorkerLostError
from celery import Celery
from celery.app.trace import trace_task_ret
from celery.backends import cache
from celery.exceptions import TaskRevokedError
from celery.states import FAILURE
from celery.worker import state
from kombu.asynchronous.timer import Timer
from kombu.exceptions import OperationalError
from kombu.transport import memory, virtual

import celery_setnx.request  # noqa: F401 - Celery imports it by name, too late for the door
from celery_setnx.call.live import _KNOWN, KnownTerms
from celery_setnx.run.park import Parked
from celery_setnx.run.sweep import Sweep
from tests.simulation import substitutes
from tests.simulation.scheduler import Process, World

logger = logging.getLogger(__name__)


class Broker:
    """Messages in order, and the workers that read them."""

    def __init__(self, world: World) -> None:
        self.world, self.messages = world, list[Any]()
        self.readers: list[Worker] = []
        self.taken: set[str] = set()  # ids of its messages, also of those that nobody knows it has taken
        self.discarded: set[str] = set()  # ids of calls that are revoked, or have an expiry
        # How a publish did, or a delivery, of which message, and when.
        self.failed: dict[tuple[str, str], int] = {}
        self.failed_in: dict[tuple[str, str], Process] = {}  # and which process has sent it
        # By call: when a publish failed in the child that ran it, such as its courier's, and in which child.
        self.failed_for: dict[str, tuple[int, Process]] = {}
        self.on_refused: Callable[[str], None] = lambda _task_id: None
        self.on_taken: Callable[[Any], None] = lambda _message: None
        self.has_operator = False  # who sets live terms: else no worker reads them, and no history has that
        self.travel_s = 0.0  # for which a message that it has taken is on its way
        # Processes that died unheard when their call had parked: in which epoch, and when.
        self.parked: dict[Process, tuple[int, int]] = {}
        self.is_failed: dict[str, bool] = {}  # whether a call was told as failed when its last delivery began
        # What else goes wrong is drawn apart: it changes the history of those seeds only in which it does.
        self._draw = random.Random(f"{world.seed} broker")
        self._doubles = self._draw.choice((0.0, 0.0, 0.2))
        self._unheard_ends = self._draw.choice((0, 0, 3))

    def put(self, message: Any) -> None:
        """Take a message, and say so, if nothing goes wrong: whoever sends it may die before, or after."""
        substitutes.step()
        self.world.sleep(self.world.random.random() ** 4 * 0.01)
        task_id = message["headers"]["id"]
        self._may_be("refused", task_id)
        if self.travel_s:
            self.taken.add(task_id)
            self.world.at(self.world.now_us + round(self.travel_s * 1e6), partial(self.add, message))
        else:
            self.add(message)
        self.on_taken(message)
        self._may_be("unconfirmed", task_id)
        substitutes.step()

    def _may_be(self, what: str, task_id: str) -> None:
        if self.world.go_wrong(what, 0.05):
            self.world.note("publish is", what, task_id)
            self.failed[what, task_id] = self.world.now_us
            self.failed_in[what, task_id] = process = self.world.process
            for reader in self.readers:
                if process in reader.running:
                    self.failed_for[reader.running[process][0]] = self.world.now_us, process
            if what == "refused":
                self.on_refused(task_id)
            raise OperationalError(what)

    def add(self, message: Any) -> None:
        """Have it read by any worker."""
        self.taken.add(message["headers"]["id"])
        if message["headers"].get("expires"):
            self.discarded.add(message["headers"]["id"])
        self.messages.append(message)
        for reader in self.readers:
            reader.inbox.put(None)

    def may_double(self, tag: int, unacked: dict[int, Any]) -> None:
        """Deliver a message again whose worker takes too long, as a broker with a visibility timeout does."""
        if self.world.is_calm or self._draw.random() >= self._doubles:
            return

        def add() -> None:
            if tag in unacked:
                task_id = unacked[tag]["headers"]["id"]
                self.world.note("is delivered again", task_id)
                self.failed["doubled", task_id] = self.world.now_us
                self.add_again([pickle.loads(pickle.dumps(unacked[tag]))], 0.0)

        self.world.at(self.world.now_us + self._draw.randrange(2_000_000), add)

    @property
    def _is_its_time(self) -> bool:
        return self.world.seed % 4 != 2 or self.world.is_calm

    def may_die_unheard(self, task_id: str, error: object) -> None:
        """A child may die when its call has ended, before its parent hears of it; in some seeds in calm."""
        if self._unheard_ends > 0 and self._is_its_time and self._draw.random() < 0.3:
            self._unheard_ends -= 1
            server, ticket = self.world.server, f":ticket:{task_id}".encode()
            # One whose parking Redis has not heard is told as failed: its courier does not have it run.
            if isinstance(error, Parked) and any(ticket in name for name in server.data.keys):
                self.parked[self.world.process] = server.epoch, self.world.now_us
            self.world.kill(self.world.process)

    def add_again(self, messages: list[Any], after_s: float) -> None:
        """Deliver again what was not acknowledged."""

        def add() -> None:
            for message in messages:
                message["properties"]["delivery_info"]["redelivered"] = True
                self.add(message)

        self.world.at(self.world.now_us + round(after_s * 1e6), add)


class Channel(memory.Channel):
    """kombu's, which hands messages to the world's broker."""

    broker: Broker

    def _put(self, queue: str, message: Any, **_kwargs: Any) -> None:
        Channel.broker.put(pickle.loads(pickle.dumps(message)))


class Transport(memory.Transport):
    """kombu's, which says that it is a Redis, as far as the package asks."""

    Channel = Channel
    driver_type = "redis"


def begin(world: World) -> Broker:
    """A broker without messages, and no results."""
    Channel.broker = Broker(world)
    cache._DUMMY_CLIENT_CACHE.clear()
    state.reserved_requests.clear(), state.active_requests.clear(), state.revoked.clear()
    state.requests.clear(), state.successful_requests.clear()
    return Channel.broker


class _Consumer(SimpleNamespace):
    __hash__ = object.__hash__


class _Sweep(Sweep):
    def _read_terms(self, app: Celery, *, changes: bool = True) -> None:
        if Channel.broker.has_operator:
            super()._read_terms(app, changes=changes)
        else:  # nobody need ask
            app.__dict__[_KNOWN] = KnownTerms(read_at=math.inf)


class Worker:
    """A parent and its children, each a process with an app of its own."""

    def __init__(self, world: World, name: str, take_app: Callable[[], Celery], children: int) -> None:
        self.world, self.name, self.take_app = world, name, take_app
        self.broker = Channel.broker
        self.process = world.process_of(name)
        self.inbox = substitutes.SimpleQueue()
        self.jobs = substitutes.SimpleQueue()
        self.unacked: dict[int, Any] = {}
        self.running: dict[Process, tuple[Any, Any]] = {}  # by child: id of its call, error callback
        self.accepted: list[tuple[str, Process]] = []
        self.unreturned: list[tuple[str, Process]] = []  # of these
        self.garbage: list[Any] = []  # requests that are over, in seeds that collect none
        self.count = children
        world.spawn(self.process, self.parent, "parent")

    def parent(self) -> None:
        """The parent's loop: timer, pool, broker."""
        self.app = self.take_app()
        self.world.note("starts")
        self.timer = Timer()
        self.consumer = self._consumer()
        self.handlers: dict[str, Any] = {}
        self.tag = 0
        sweep = _Sweep(SimpleNamespace(app=self.app, consumer=self.consumer))
        sweep.start(sweep._worker)
        for _ in range(self.count):
            self.fork()
        self.broker.readers.append(self)
        schedule = iter(self.timer)
        while True:
            self.read()
            delay, entry = next(schedule)
            if entry is not None:
                self.timer.apply_entry(entry)
                continue
            try:
                do = self.inbox.get(timeout=1.0 if delay is None else delay)
            except substitutes.queue.Empty:
                continue
            if do is not None:
                do()

    def read(self) -> None:
        """Take in messages: one more than run."""
        while self.broker.messages and len(self.running) + self.jobs.qsize() <= self.count:
            raw = self.broker.messages.pop(0)
            self.tag += 1
            self.unacked[self.tag] = raw
            self.broker.may_double(self.tag, self.unacked)
            self.world.note("receives", raw["headers"]["id"], raw["headers"]["task"])
            received = pickle.loads(pickle.dumps(raw))
            received["properties"]["received"] = self.name, self.world.now_us  # by whom, and when
            message = virtual.Message(received, channel=self.channel)
            name = message.headers["task"]
            if name not in self.handlers:
                self.handlers[name] = self.app.tasks[name].start_strategy(self.app, self.consumer)
            ack, reject = partial(self.acknowledge, self.tag), partial(self.reject, self.tag)
            self.handlers[name](message, None, ack, reject, [])

    def acknowledge(self, tag: int, *_log: Any) -> None:
        """The broker forgets a message."""
        if (message := self.unacked.pop(tag, None)) is not None:
            self.world.note("acknowledges", message["headers"]["id"])

    def reject(self, tag: int, _log: Any, _errors: Any, requeue: bool = False) -> None:
        """The broker delivers it again, or forgets it."""
        message = self.unacked.pop(tag, None)
        self.world.note("rejects", message["headers"]["id"] if message else None, requeue)
        if requeue and message is not None:
            self.broker.add_again([message], 0.0)

    def _consumer(self) -> Any:
        self.channel = self.app.connection_for_write().channel()
        return _Consumer(
            hostname=self.name,
            connection_errors=(),
            event_dispatcher=None,
            timer=self.timer,
            apply_eta_task=self.apply_eta_task,
            disable_rate_limits=True,
            task_buckets={},
            on_task_request=self.on_task_request,
            _limit_task=None,
            _limit_post_eta=None,
            pool=SimpleNamespace(apply_async=self.apply_async),
            controller=SimpleNamespace(state=state),
            qos=SimpleNamespace(increment_eventually=int, decrement_eventually=int),
            call_soon=self.inbox.put,
        )

    def apply_eta_task(self, request: Any) -> None:
        """As Celery's consumer."""
        state.task_reserved(request)
        self.on_task_request(request)

    def on_task_request(self, request: Any) -> None:
        """As Celery's worker."""
        with suppress(TaskRevokedError):
            request.execute_using_pool(None)

    def apply_async(self, _trace: Any, args: Any, **callbacks: Any) -> Any:
        """Have a child run it."""
        if self.world.seed % 4 == 1:
            self.garbage.append(callbacks)
        self.jobs.put((pickle.dumps(args), callbacks))

    def fork(self) -> None:
        """A new child."""
        child = self.world.process_of(f"{self.name}-child-{len(self.world.processes)}")
        child.skew_us = self.process.skew_us  # one host, one clock
        self.world.spawn(child, partial(self.child, child), "child", after_us=20_000)

    def child(self, process: Process) -> None:
        """A child's loop."""
        app = self.take_app()
        while True:
            packed, callbacks = self.jobs.get()
            name, task_id, *rest = pickle.loads(packed)
            self.running[process] = task_id, callbacks["error_callback"]
            self.inbox.put(partial(self.on_accepted, process, task_id, callbacks["accept_callback"]))
            self.world.note("runs", task_id)
            self.broker.is_failed[task_id] = app.AsyncResult(task_id).state == FAILURE
            result = trace_task_ret(name, task_id, *rest, app=app)
            error = getattr(result[1], "exception", result[1])
            self.broker.may_die_unheard(task_id, getattr(error, "exc", error))
            self.running.pop(process, None)
            self.world.note("has run", task_id, repr(error))
            returned = pickle.loads(pickle.dumps(result))
            self.inbox.put(partial(self.on_returned, process, task_id, callbacks["callback"], returned))

    def on_accepted(self, process: Process, task_id: str, accept: Callable[..., Any]) -> None:
        """The parent hears that a child has it."""
        self.accepted.append((task_id, process))
        self.unreturned.append((task_id, process))
        accept(process.pid, substitutes.monotonic())

    def on_returned(self, process: Process, task_id: str, callback: Callable[..., Any], result: Any) -> None:
        """The parent hears that a child has run it: from now on the child's death is not this run's."""
        callback(result)
        self.unreturned.remove((task_id, process))

    def on_death(self, process: Process) -> None:
        """Of one of its processes."""
        if process is self.process:
            self.broker.readers.remove(self) if self in self.broker.readers else None
            self.broker.add_again(list(self.unacked.values()), 1.0 + self.world.random.random())
            for child in [each for each in self.world.processes if each.name.startswith(f"{self.name}-")]:
                self.world.kill(child)
        elif process.name.startswith(f"{self.name}-") and not self.process.is_dead:
            task_id, error_callback = self.running.pop(process, ("", None))

            def notice() -> None:
                if error_callback is not None:
                    self.tell_of_death(task_id, error_callback, process)
                self.fork()

            delay_us = self.world.random.randrange(2_000_000)
            self.world.at(self.world.now_us + delay_us, lambda: self.inbox.put(notice))

    def tell_of_death(self, task_id: str, error_callback: Callable[..., Any], process: Process) -> None:
        """Tell a call's request that its child has died: a call that waits in line has not failed."""
        epoch, died_us = self.broker.parked.pop(process, (None, self.world.now_us))
        had_failed = self.app.AsyncResult(task_id).state == FAILURE
        error_callback(_info_of(WorkerLostError(f"child {process.pid} died")))
        has_failed = not had_failed and self.app.AsyncResult(task_id).state == FAILURE
        if self.process.was_hindered(died_us):  # what has become of it could not be asked
            self.broker.failed["unasked", task_id] = self.world.now_us
        elif has_failed and epoch == self.world.server.epoch:
            self.world.broken(f"{task_id} waits in line, and is told as failed")


def _info_of(error: BaseException) -> ExceptionInfo:
    try:
        raise error
    except BaseException:
        return ExceptionInfo()
