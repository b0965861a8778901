"""The sweep: workers let lines go on whose holder has died, or whose wake-up was lost.

Each worker's parent asks Redis every two seconds which lines it is time to look at, claims them, serves them,
and wakes who has his turn. So a line goes on within a lease and a sweep after a death, whatever the broker
keeps to itself. It also puts back, when Redis has lost its data, the calls whose couriers it holds. What is
due before the next sweep is looked at to the moment, too (see `looks`); for a result backend, or a receiver
of a take-over's signal, no look waits, but the next sweep does.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cached_property, partial
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import redis
from celery import Celery, bootsteps
from celery.utils.functional import maybe_list
from celery.worker.request import Request
from celery.worker.state import revoked as revoked_tasks
from celery.worker.state import revoked_stamps

from celery_setnx.call.back import stamps_in
from celery_setnx.call.delivery import Delivery
from celery_setnx.call.live import known_live_terms, read_live_terms
from celery_setnx.call.message import Call, id_of
from celery_setnx.call.switches import DISABLED
from celery_setnx.call.wake import (
    Later,
    end_wait,
    known_guard,
    let_the_line_go_on,
    lines_of,
    next_look,
    send_from_line,
)
from celery_setnx.configured import configured
from celery_setnx.connection import new_client
from celery_setnx.exceptions import LockRefused, LockUnavailable, OptionError, SetnxError
from celery_setnx.forks import between_forks
from celery_setnx.lock.line import DueLines, Slot, claim, rouse, settle, who_waits
from celery_setnx.lock.names import END, lock_and_task_id
from celery_setnx.log import Log, fields, say_loudly
from celery_setnx.options import settings_of
from celery_setnx.run import control as control  # its commands are known once it is imported
from celery_setnx.run.courier import ParkedCall, declare_queues, may_be_woken, put_back, send_again
from celery_setnx.run.held import HeldCouriers
from celery_setnx.run.looks import EARLIEST_S, SweepReport, TimedLooks
from celery_setnx.run.revoked import RevokedLately
from celery_setnx.run.unswept import Unswept
from celery_setnx.threads import Lasting

logger = Log("celery_setnx")

SWEEP_S = 2.0
"""Seconds between two sweeps of a worker."""

_AGAIN_S = 30.0  # after which a line that could not be served is looked at again
_TIMED_AGAIN_S = 2.0  # if its task is timed: it may have been served, and the reply lost
_TIMEOUT_S = 0.9  # a fork of the pool waits for a sweep; doubled while replies take longer


class CourierRequest(Request):  # type: ignore[misc]
    """A courier in the worker's parent, which holds it until its time has come."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # Its header is not read: one that it has was copied from another call's message.
        Delivery.receive(self, Call(self.name, id_of(self.id)), takes_lock=False)
        told = self.kwargs.get("parked") if isinstance(self.kwargs, Mapping) else None
        with suppress(ValueError):  # it says nothing that is understood here
            self.parked = ParkedCall.of(told or {})
            self.held_since = time.monotonic()
            _held.add(self)

    @cached_property
    def may_be_woken(self) -> bool:
        """Whether its call belongs into the line that it waits in, as far as its app knows."""
        return may_be_woken(self.app, self.parked)

    @cached_property
    def is_stamped(self) -> bool:
        """Whether its call stands in line as one of the broker that has delivered this courier."""
        return self.parked.stamped(self.app) is self.parked

    @cached_property
    def stamps_of_call(self) -> Mapping[str, Any]:
        """The stamps of its call, by which that may be revoked."""
        return stamps_in(self.parked.message)


_held: WeakSet[CourierRequest] = WeakSet()


class Sweep(bootsteps.StartStopStep):  # type: ignore[misc]
    """Looks after the lines of a worker's tasks, in a thread of the worker's parent."""

    def __init__(self, worker: Any, **options: Any) -> None:
        super().__init__(worker, **options)
        self._stopped, self._roused = threading.Event(), threading.Event()
        self._client: redis.Redis
        self._state: list[Any] = []  # of the settings that it is made from
        self._terms: Mapping[str, str] = {}  # of which its lines know
        self._is_deaf = False  # that these may not be read was said
        self._thread: Lasting | None = None
        self._wait_s = SWEEP_S
        self._usual_at = 0.0
        self._fails = False
        self._timeout_s = _TIMEOUT_S
        self._worker = worker
        self._has_declared = False  # the queues of couriers
        self._revoked = RevokedLately()
        self._held = HeldCouriers()
        self._left: WeakSet[CourierRequest] = WeakSet()
        self._stamped: WeakSet[CourierRequest] = WeakSet()
        self._unswept = Unswept()
        self._looks = TimedLooks(partial(self._look, worker.app))
        self._left_by_looks: Later = {}
        self.rested: set[str] = set()  # tasks of which a call has said `at_least_for` itself
        self._anew: WeakKeyDictionary[CourierRequest, tuple[str, float]] = WeakKeyDictionary()

    def start(self, worker: Any) -> None:
        """Begin to sweep."""
        if DISABLED.is_on(worker.app):
            return
        try:
            self._see_to_client(worker.app)
        except OptionError:  # its calls say that
            return
        self._read_terms(worker.app, changes=False)
        self._usual_at = time.monotonic()
        self._thread = Lasting("celery_setnx-sweep", partial(self._turn, worker.app), in_parent=True)
        self.ensure()
        _sweeping.append(self)

    def _see_to_client(self, app: Celery) -> None:
        """A client of its own, which gives up soon; another if the settings have changed, or its timeout."""
        state = configured(app)
        if state is not self._state:
            self._client, self._state = new_client(app, self._timeout_s), state

    def _read_terms(self, app: Celery, *, changes: bool = True) -> None:
        """Read what an operator has said of tasks; lines wait no longer for what has ended since."""
        try:
            found = read_live_terms(app, self._client)
            before = self._terms if changes else found
            changed = [scope for scope in {**before, **found} if found.get(scope) != before.get(scope)]
            tasks = [name for name in app.tasks if not name.startswith("celery.")] if changed else []
            for scope in changed:
                rouse(self._client, lines_of(app), tasks, settings_of(app).prefix, scope)
            self._terms, self._is_deaf = found, False
        except SetnxError as error:
            is_refused = isinstance(error, LockRefused)  # else the sweep says it
            if is_refused and not self._is_deaf:
                logger.warning("A pause of a task is not heeded here, nor its limit or rate: %s", error)
            self._is_deaf = is_refused

    def _set_timeout(self, timeout_s: float) -> None:
        if timeout_s != self._timeout_s:
            self._timeout_s, self._state = timeout_s, []

    def _wait_longer_after(self, error: BaseException) -> None:
        """Wait longer for replies from the next sweep on, if one took longer than a fork should wait."""
        if isinstance(error.__cause__, redis.TimeoutError):
            most_s = max(settings_of(self._worker.app).timeout, _TIMEOUT_S)
            self._set_timeout(min(2 * self._timeout_s, most_s))

    def ensure(self) -> None:
        """See to it that it sweeps; where no thread can be started, it is tried at the next delivery."""
        if self._thread is None or self._thread.runs or self._stopped.is_set():
            return
        try:
            self._thread.ensure()
        except RuntimeError as error:
            logger.warning("No line is swept until a thread can be started: %s", error)

    def stop(self, _worker: Any) -> None:
        """Sweep no more."""
        with suppress(ValueError):  # it has not begun, or is told twice
            _sweeping.remove(self)
        self._stopped.set()
        self._roused.set()
        self._looks.stop()
        give_up = time.monotonic() + _TIMEOUT_S
        threads = (self._looks, self._thread)  # one may be about to send a call to which it has handed a lock
        while (still_run := any(thread and thread.runs for thread in threads)) and time.monotonic() < give_up:
            time.sleep(EARLIEST_S)
        if not still_run:
            self._do_what_looks_left()

    terminate = stop

    def _turn(self, app: Celery) -> bool:
        if not self._has_declared:
            self._has_declared = True
            _declare_queues(app)
        between_forks.wait(self._roused, self._wait_s)
        self._roused.clear()
        if self._stopped.is_set():
            return False
        self._do_what_looks_left()
        began, has_more = time.monotonic(), False
        is_early = began < self._usual_at
        try:
            self._see_to_client(app)
            if not is_early:
                self._read_terms(app)
            swept = self.sweep(app, is_early=is_early)
            has_more = swept.are_more
            self._looks.within(swept.next_s)
            if swept.error is not None:  # the lines of the other nodes were looked at
                raise swept.error
            self._fails = False
            if time.monotonic() - began < _TIMEOUT_S:
                self._set_timeout(_TIMEOUT_S)
        except SetnxError as error:
            say_loudly(error)
            self._wait_longer_after(error)
            if not self._fails:  # it is said once
                logger.warning(
                    "Lines are not swept, so waiting calls may be late. Tried again every %g s: %s",
                    SWEEP_S,
                    error,
                )
            self._fails = True
        except Exception:
            logger.exception("The lines were not swept, and are in %g s.", SWEEP_S)
        now = time.monotonic()
        if not is_early:
            self._usual_at = now + SWEEP_S * random.uniform(0.8, 1.0)
        self._wait_s = EARLIEST_S if has_more else max(0.0, self._usual_at - now)
        return True

    def _look(self, app: Celery) -> SweepReport:
        """Look at the lines that are due, in another thread than the sweep's: others may hold that up."""
        swept = self.sweep(app, is_early=True, later=self._left_by_looks)
        if any(task_id for _key, task_id in list(self._left_by_looks)):  # a call is to be woken
            self._roused.set()
        return swept

    def _do_what_looks_left(self) -> None:
        """Ask the result backends, and tell of the take-overs, for which no look waits."""
        while self._left_by_looks:
            (key, _task_id), do = self._left_by_looks.popitem()
            between_forks.give_way()
            try:
                do()
            except Exception as error:  # noqa: BLE001 - another line may be on another node, or in order
                say_loudly(error)
                text = "The line of %s was not served after a look, and is when it is due again: %s"
                logger.info(text, key, error, extra=fields(key=key))

    def looks_of(self, app: Celery) -> list[TimedLooks]:
        """Its timed looks, if it is a worker of this app and sweeps."""
        return [self._looks] if app is self._worker.app and self._thread is not None else []

    def _is_timed(self, task: str) -> bool:
        return task in self.rested or _is_timed(self._worker.app, task)

    def sweep(self, app: Celery, *, is_early: bool = False, later: Later | None = None) -> SweepReport:
        """Look at every line that is due; unless it comes early, after the couriers here too."""
        lines = lines_of(app)
        tasks = [name for name in app.tasks if not name.startswith("celery.")]
        claimed = claim(self._client, lines, tasks, [name for name in tasks if self._is_timed(name)])
        due = [claimed.next_s]
        for task, entry in claimed.lines:
            between_forks.give_way()
            due.append(self._serve(app, lines, task, entry, claimed, later))
        couriers = [] if is_early else _couriers_here(app)
        for request in couriers:
            if request not in self._left:
                self._look_after(app, request, claimed.slots.get(request.parked.call.task))
        if couriers:
            self._held.let_go(self._worker, self._client, couriers)
        if not is_early:
            between_forks.give_way()
            self._unswept.look(app, self._client, claimed)
        next_s = min((next_s for next_s in due if next_s is not None), default=None)
        return SweepReport(len(claimed.lines), next_s, claimed.are_more, claimed.error)

    def _serve(
        self, app: Celery, lines: str, task: str, entry: str, claimed: DueLines, later: Later | None
    ) -> float | None:
        """Let a line go on, or send one call: seconds until it is time to look at the line again."""
        key, task_id = lock_and_task_id(entry)
        try:
            if task_id.startswith(END):
                within = end_wait(app, key, task_id.removeprefix(END), self._client)
            elif task_id:  # another worker could not
                within = send_from_line(app, key, task_id, self._client)
            else:
                for waiting_id in who_waits(self._client, key, self._revoked.to_ask(key)):
                    end_wait(app, key, waiting_id, self._client)
                within = next_look(let_the_line_go_on(app, task, key, self._client, later))
        except Exception as error:  # noqa: BLE001 - another line may be on another node, or in order
            say_loudly(error)
            self._wait_longer_after(error)
            within = _TIMED_AGAIN_S if self._is_timed(task) else _AGAIN_S
            text = "The line of %s was not served, and is in %g s: %s"
            logger.info(text, key, within, error, extra=fields(task=task, key=key))
        due_in = settle(self._client, lines, task, entry, claimed, within=within)
        return None if task_id else due_in  # of one call, it is left to a worker that can send it

    def _look_after(self, app: Celery, request: CourierRequest, slot: Slot | None) -> None:
        """Send a call that will not run, to be thrown away; put one back that Redis has lost."""
        parked = request.parked
        try:
            is_revoked = parked.call.task_id in revoked_tasks or parked.call.task_id in self._revoked
            is_revoked = is_revoked or (revoked_stamps and _is_revoked_as(request.stamps_of_call))
            if is_revoked or not request.may_be_woken:
                if _put_back(app, parked):
                    send_again(app, parked)
                self._left.add(request)
            elif not request.is_stamped and request not in self._stamped:
                _put_back(app, parked)
                self._stamped.add(request)
            elif slot and parked.epoch != slot.epoch and self._is_time_to_put_back(request, slot.epoch):
                _put_back(app, parked)
                self._anew[request] = slot.epoch, float("inf")
        except LockUnavailable:
            raise
        except Exception as error:  # noqa: BLE001 - what is wrong with one call is no other's business
            self._left.add(request)
            logger.warning("%s is left to its courier: %s", parked, error, extra=fields(of=parked.call))

    def _is_time_to_put_back(self, request: CourierRequest, epoch: str) -> bool:
        """Once, half a lease after a loss: a holder may say first that it is there still."""
        known, when = self._anew.get(request, ("", 0.0))
        if known != epoch:
            self._anew[request] = epoch, time.monotonic() + request.parked.lease / 2
            return False
        return time.monotonic() >= when


_sweeping: list[Sweep] = []


def workers_here(app: Celery) -> list[Any]:
    """The workers of an app in this process."""
    return [sweep._worker for sweep in list(_sweeping) if sweep._worker.app is app]


def see_to_sweeps() -> None:
    """See to it that the workers of this process sweep."""
    for sweep in list(_sweeping):
        sweep.ensure()


def look_soon(app: Celery, call: Call) -> None:
    """Have the workers of an app in this process ask which lines are due soon, if the call is timed.

    A delivery of it has ended, or what it had was freed.
    """
    has_rested = bool(call.options.get("at_least_for"))
    for sweep in list(_sweeping) if has_rested or _is_timed(app, call.task) else ():
        for looks in sweep.looks_of(app):
            if has_rested:
                sweep.rested.add(call.task)
            looks.soon()


def look_again_in(app: Celery, seconds: float | None) -> None:
    """Have an app's workers in this process look at a line in so many seconds; None: there is no need."""
    for sweep in list(_sweeping) if seconds is not None else ():
        for looks in sweep.looks_of(app):
            looks.within(seconds)


def _put_back(app: Celery, parked: ParkedCall) -> bool:
    """Put a call back into its line, which may be due soon: whether it waits still."""
    between_forks.give_way()
    waits = put_back(app, parked, wait_s=0.0) is not None
    look_soon(app, parked.call)
    return waits


def _is_timed(app: Celery, task: str) -> bool:
    """Whether a release of the task's lock may note when its line is due, as starts are paced or it rests."""
    guard = known_guard(app, task)
    if guard is None:
        return False
    live = known_live_terms(app).texts
    is_live = bool(live) and guard.scope_of({}) in live
    return is_live or bool(guard.options.rate or guard.options.at_least_for)


def _is_revoked_as(stamps: Mapping[str, Any]) -> bool:
    """Whether a call with these stamps is revoked, as its worker will find."""
    return any(
        value in (maybe_list(revoked_stamps.get(name)) or ())
        for name, values in stamps.items()
        for value in maybe_list(values) or ()
    )


def _declare_queues(app: Celery) -> None:
    """It is done at each send of a courier, too: here a refusal is said when the worker starts."""
    try:
        declare_queues(app)
    except Exception as error:  # noqa: BLE001 - whatever it is, lines are swept
        logger.warning("It is not known whether the broker keeps couriers: %s", error)


def _couriers_here(app: Celery) -> list[CourierRequest]:
    """Those that this process holds until their time has come, and which came from the app's own broker."""
    while True:
        try:
            return [request for request in _held if request.app is app]  # it may have workers of several apps
        except RuntimeError:  # changed by the main thread meanwhile
            continue
