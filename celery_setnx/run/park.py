"""How a call comes to wait in line: its delivery ends, and it is woken when its turn has come.

A call that meets a held lock under `on_conflict="wait"` is in two places at once:

- In the line beside the lock, in Redis, with its whole message. The script that releases the lock hands it
  to the first in line, and the process that released it sends that call (see `wake`). Nobody polls.
- In the broker, with its courier (see `courier`). The courier is sent first, so the call survives a Redis
  that loses its data.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import Any, Literal, cast

from celery import Celery, Task

from celery_setnx.call.back import (
    PICKLE,
    Message,
    Waits,
    come_back,
    deliverable,
    not_taken_back,
    seconds_until,
    visibility_timeout_s,
)
from celery_setnx.call.delay import waits_in_broker
from celery_setnx.call.message import LATEST, Call
from celery_setnx.call.wake import (
    is_of_its_line,
    let_the_line_go_on,
    look_in,
    look_within,
    remaining_s,
    wake,
)
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockRefused, LockUnavailable, SetnxError
from celery_setnx.lock import line
from celery_setnx.lock.line import Found
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import Heir, Holder
from celery_setnx.log import Log, fields, say_loudly
from celery_setnx.options import Options
from celery_setnx.run.courier import Order
from celery_setnx.signals import lock_waiting
from celery_setnx.wording import held

logger = Log("celery_setnx")

_VISIBILITY_S = 3600.0  # in place of the timeout of a broker that has none


class Parked(Waits):
    """A call waits in line: its delivery has ended, and it is woken when its turn has come."""


def remember_s(app: Celery, options: Options) -> float:
    """Seconds for which Redis remembers that a call waits."""
    return options.queue_lease + (visibility_timeout_s(app) or _VISIBILITY_S)


def may_stand_in_line(task: Task, call: Call) -> bool:
    """True if every worker can tell that the call belongs in this line, and can send it.

    A pickled message is sent by nobody. The queue of a fanout exchange is often known to one worker only.
    """
    message = Message.of(task)
    if message.content_type == PICKLE or message.is_fanout:
        return False
    return is_of_its_line(task.app, call, message.body)


def park(
    task: Task, call: Call, options: Options, outcome: Outcome
) -> tuple[Literal["stale", "taken", "turn", "waits"], Parked | None]:
    """Put the running call in line: what parking found, and the exception that ends its delivery if it waits.

    If the broker takes no courier, the call ends as `not_taken_back` says.
    """
    parking = _Parking(task, call, options, outcome)
    if not parking.message.queue:
        parking.send_courier()  # it fails, and says why, before the call has a place
    if not parking.has_courier and not parking.is_parked_first:
        parking.send_courier()
    try:
        found = parking.ask()
    except SetnxError as error:
        return "waits", parking.go_without_place(error)
    if found.state == "stale":
        return "stale", None
    if found.state == "taken":
        return "taken", None
    parking.note_holder(found)
    # A woken call had its lock, or Redis has lost its ticket: its courier may be gone.
    if parking.is_parked_first or (parking.has_courier and found.state == "new"):
        parking.send_courier()
    elif parking.has_courier and waits_in_broker(task.app):
        parking.order.note_end(task.app, found.server_time)
    if found.state == "handed" or (found.holder is None and found.place == 1 and not outcome.paced):
        return "turn", None  # it came free meanwhile
    return "waits", parking.wait(found)


class _Parking:
    """A running call on its way into the line."""

    def __init__(self, task: Task, call: Call, options: Options, outcome: Outcome) -> None:
        self.task, self.app, self.options, self.met, self.outcome = task, task.app, options, call, outcome
        self.holder, self.ends_first = cast("Holder", outcome.holder), cast("Holder", outcome.ends_first)
        # A woken call has a courier until it begins. The ticket of a call that has begun sends couriers away
        # until the call is parked again. If the broker still has its message, it may park first.
        self.has_begun = call.again
        self.has_courier = call.is_woken and not self.has_begun
        self.is_parked_first = self.has_begun and task.acks_late
        self.call = call._replace(waits=call.waits + 1, asked=0)
        self.message = Message.of(task)
        self.order = Order(
            call=self.call,
            message=self.message.packed(self.app, self.call),
            until=_until(self.app, options, call.since, outcome.server_time, task.request.expires),
            lease=options.lease,
            queue_lease=options.queue_lease,
            remember=remember_s(self.app, options),
            epoch=self.look_within(outcome.remaining_s),
        )
        self.reason = held(call.key, self.holder, options.limit, paced=self.holder.state == "paced")
        self.countdown = deliverable(self.app, self.order.pace(outcome.server_time))

    def look_within(self, holds_s: float | None) -> str:
        """Have a worker look at the line when the holder's deadline has passed."""
        return look_within(self.app, self.call.task, self.call.key, look_in(holds_s, self.options.lease))

    def send_courier(self) -> None:
        """Send the courier; if the broker does not take it, end as `not_taken_back` says."""
        try:
            server_time = self.outcome.server_time
            self.order.send(self.message, self.app, self.countdown, server_time, first=True)
        except Exception as error:  # noqa: BLE001 - whatever the transport raises
            not_taken_back(self.task, self.call, error, self.reason)

    def ask(self) -> Found:
        """Ask for a place in the line."""
        order = self.order
        place, copy = order.place(self.app), self.met.copy
        return line.park(client_for(self.app), place, copy=copy, since=order.call.since, call=order.message)

    def go_without_place(self, error: SetnxError) -> Parked:
        """Go on without knowing whether the call is in line."""
        if self.has_begun:  # its ticket would send a courier away
            pause = min(self.countdown, self.options.retry_delay_max)
            reason = f"its place in line is not known ({error})"
            come_back(self.task, self.met, pause, reason, own=self.met.again)
        logger.warning(
            "%s waits, and only its courier knows: %s", self.call, error, extra=fields(of=self.call)
        )
        say_loudly(error)
        if self.has_courier and isinstance(error, LockRefused) and not isinstance(error, LockUnavailable):
            raise error  # its courier has sent it to say so
        if self.has_courier or self.order.epoch:  # without an epoch a worker puts the call back in line
            self.order = replace(self.order, epoch="")
            self.send_courier()
        return Parked(self.reason, self.countdown)

    def note_holder(self, found: Found) -> None:
        """Note when to look at the line, unless the holder is the same: a sweep may have seen it empty."""
        if self.outcome.paced:
            self.look_within(self.outcome.remaining_s)
        elif found.holder is None or found.holder.token != self.ends_first.token:
            self.look_within(remaining_s(found))

    def wait(self, found: Found) -> Parked:
        """End the delivery, and see to a lock that nobody is going to release."""
        call = self.call
        logger.info(
            "%s waits in line, at place %d: %s.", call, found.place, self.reason, extra=fields("waits", call)
        )
        lock_waiting.send(
            sender=self.task,
            task_id=call.task_id,
            key=call.key,
            about=call.about,
            holder=self.holder,
            place=found.place,
        )
        if not self.outcome.paced:  # a sweep sees to the next start
            self._see_to_lock(found)
        return Parked(self.reason, self.countdown)

    def _see_to_lock(self, found: Found) -> None:
        """See to a lock that nobody is going to release."""
        call = self.call
        if found.holder is None:  # it came free meanwhile, and others stand before this call
            with suppress(SetnxError):  # a sweep sees to it
                let_the_line_go_on(self.app, call.task, call.key)
        elif found.holder.state == "resting":  # its release has woken nobody
            wake(self.app, Heir(call.task_id, self.order.message, remaining_s(found) or 0.0), call.key)


def _until(app: Celery, options: Options, since: float, server_time: float, expires: Any) -> float | None:
    """Server time at which `max_wait` is over, or the call expires; None: never."""
    ends = [] if options.max_wait is None else [since + options.max_wait]
    if expires:
        ends.append(server_time + seconds_until(app, expires))
    until = min(ends, default=LATEST)
    return None if until >= LATEST else max(until, 0.0)
