"""How a call comes to wait in line: its delivery ends, and it is woken when its turn has come.

A call that meets a held lock under `on_conflict="wait"` is in two places at once:

- in the line beside the lock, in Redis, with all that it takes to send it again. The script that releases
  the lock hands it to the first in line, and the process that released it sends that call: a wake-up is a
  message, not a poll (see `wake`).
- in the broker, with a courier (see `courier`). That is sent first: whatever Redis loses, the call is there.
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

_VISIBILITY_S = 3600.0  # of a broker that has no such timeout


class Parked(Waits):
    """A call waits in line: its delivery has ended, and it is woken when its turn has come."""


def remember_s(app: Celery, options: Options) -> float:
    """Seconds for which it is remembered that a call waits."""
    return options.queue_lease + (visibility_timeout_s(app) or _VISIBILITY_S)


def may_stand_in_line(task: Task, call: Call) -> bool:
    """True if whoever serves the line can tell that the call belongs there, and sends it without a pickle.

    A queue that a fanout exchange fills is often one worker's own, and unknown to who serves the line.
    """
    message = Message.of(task)
    if message.content_type == PICKLE or message.is_fanout:
        return False
    return is_of_its_line(task.app, call, message.body)


def park(
    task: Task, call: Call, options: Options, outcome: Outcome
) -> tuple[Literal["stale", "taken", "turn", "waits"], Parked | None]:
    """Stand the running call in line: what came of it, and what is to be raised if it waits.

    If the broker takes no courier, it ends as `not_taken_back`.
    """
    parking = _Parking(task, call, options, outcome)
    if not parking.message.queue:
        parking.send_courier()  # which says why it cannot, before the call has a place
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
    # One that was woken had its lock, or Redis has lost the ticket that tells of it: its courier may be gone.
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
        # A call that was woken has a courier, until it has begun. The ticket of one that has begun sends a
        # courier away until it is parked; if the broker has the message still, that may be done first.
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
        """Send it, or have the call not taken back."""
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
        """Redis does not say whether the call is in line."""
        if self.has_begun:  # its ticket sends a courier away
            pause = min(self.countdown, self.options.retry_delay_max)
            reason = f"its place in line is not known ({error})"
            come_back(self.task, self.met, pause, reason, own=self.met.again)
        logger.warning(
            "%s waits, and only its courier knows: %s", self.call, error, extra=fields(of=self.call)
        )
        say_loudly(error)
        if self.has_courier and isinstance(error, LockRefused) and not isinstance(error, LockUnavailable):
            raise error  # which is what its courier has sent it for
        if self.has_courier or self.order.epoch:  # with none, a worker that has its courier puts it back
            self.order = replace(self.order, epoch="")
            self.send_courier()
        return Parked(self.reason, self.countdown)

    def note_holder(self, found: Found) -> None:
        """Have a worker look again, unless the lock is whose it was: a sweep may have seen nobody wait."""
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
        if not self.outcome.paced:  # else the first start that may be is a sweep's
            self._see_to_lock(found)
        return Parked(self.reason, self.countdown)

    def _see_to_lock(self, found: Found) -> None:
        """See to a lock that nobody is going to release."""
        call = self.call
        if found.holder is None:  # it came free meanwhile, for those before this one
            with suppress(SetnxError):  # a sweep sees to it
                let_the_line_go_on(self.app, call.task, call.key)
        elif found.holder.state == "resting":  # since its release nobody is there to wake
            wake(self.app, Heir(call.task_id, self.order.message, remaining_s(found) or 0.0), call.key)


def _until(app: Celery, options: Options, since: float, server_time: float, expires: Any) -> float | None:
    """Server time at which a call has waited for its `max_wait`, or expires; None if never."""
    ends = [] if options.max_wait is None else [since + options.max_wait]
    if expires:
        ends.append(server_time + seconds_until(app, expires))
    until = min(ends, default=LATEST)
    return None if until >= LATEST else max(until, 0.0)
