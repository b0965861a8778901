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
from celery_setnx.lock.record import Heir, Holder
from celery_setnx.log import Log, fields, say_loudly
from celery_setnx.options import Options
from celery_setnx.run.conflict import Conflict
from celery_setnx.run.courier import Order
from celery_setnx.signals import lock_waiting

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


def park(conflict: Conflict) -> tuple[Literal["stale", "taken", "turn", "waits"], Parked | None]:
    """Put the running call in line: what parking found, and the exception that ends its delivery if it waits.

    If the broker takes no courier, the call ends as `not_taken_back` says.
    """
    task, met = conflict.task, conflict.call
    app, message = task.app, Message.of(task)
    order = _order(conflict, message)
    parked = Parked(conflict.reason, deliverable(app, order.pace(conflict.server_time)))
    # A woken call has a courier until it begins. The ticket of a call that has begun sends couriers away
    # until the call is parked again. If the broker still has its message, it may park first.
    has_courier = met.is_woken and not met.again
    parks_first = met.again and task.acks_late
    if not message.queue or not (has_courier or parks_first):  # without a queue this fails, and says why
        _send_courier(conflict, order, message, parked)
    try:
        client, since = client_for(app), order.call.since
        found = line.park(client, order.place(app), copy=met.copy, since=since, call=order.message)
    except SetnxError as error:
        if _asks_courier(conflict, order, parked, error, has_courier=has_courier):
            _send_courier(conflict, replace(order, epoch=""), message, parked)
        return "waits", parked
    if found.state == "stale":
        return "stale", None
    if found.state == "taken":
        return "taken", None
    _note_holder(conflict, found)
    # A woken call had its lock, or Redis has lost its ticket: its courier may be gone.
    if parks_first or (has_courier and found.state == "new"):
        _send_courier(conflict, order, message, parked)
    elif has_courier and waits_in_broker(app):
        order.note_end(app, found.server_time)
    if found.state == "handed" or (found.holder is None and found.place == 1 and not conflict.outcome.paced):
        return "turn", None  # it came free meanwhile
    _announce(conflict, order.call, found.place)
    if not conflict.outcome.paced:  # a sweep sees to the next start
        _see_to_lock(app, order, found)
    return "waits", parked


def _order(conflict: Conflict, message: Message) -> Order:
    """What the courier of the call is told. The line is noted as due at the holder's deadline."""
    task, options = conflict.task, conflict.options
    app, call = task.app, conflict.call._replace(waits=conflict.call.waits + 1, asked=0)
    return Order(
        call=call,
        message=message.packed(app, call),
        until=_until(app, options, call.since, conflict.server_time, task.request.expires),
        lease=options.lease,
        queue_lease=options.queue_lease,
        remember=remember_s(app, options),
        epoch=_look_within(conflict, conflict.remaining_s),
    )


def _look_within(conflict: Conflict, holds_s: float | None) -> str:
    call, lease = conflict.call, conflict.options.lease
    return look_within(conflict.task.app, call.task, call.key, look_in(holds_s, lease))


def _send_courier(conflict: Conflict, order: Order, message: Message, parked: Parked) -> None:
    """Send the courier; if the broker does not take it, end as `not_taken_back` says."""
    try:
        order.send(message, conflict.task.app, parked.when, conflict.server_time, first=True)
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        not_taken_back(conflict.task, order.call, error, conflict.reason)


def _asks_courier(
    conflict: Conflict, order: Order, parked: Parked, error: SetnxError, *, has_courier: bool
) -> bool:
    """Whether a courier is to be sent for a call of which nobody knows whether it is in line."""
    met, call = conflict.call, order.call
    if met.again:  # its ticket would send a courier away
        pause = min(parked.when, conflict.options.retry_delay_max)
        come_back(conflict.task, met, pause, f"its place in line is not known ({error})", own=True)
    logger.warning("%s waits, and only its courier knows: %s", call, error, extra=fields(of=call))
    say_loudly(error)
    if has_courier and isinstance(error, LockRefused) and not isinstance(error, LockUnavailable):
        raise error  # its courier has sent it to say so
    return has_courier or bool(order.epoch)  # without an epoch a worker puts the call back in line


def _note_holder(conflict: Conflict, found: Found) -> None:
    """Note when to look at the line, unless the holder is the same: a sweep may have seen it empty."""
    ends_first = cast("Holder", conflict.outcome.ends_first)
    if conflict.outcome.paced:
        _look_within(conflict, conflict.remaining_s)
    elif found.holder is None or found.holder.token != ends_first.token:
        _look_within(conflict, remaining_s(found))


def _announce(conflict: Conflict, call: Call, place: int) -> None:
    text = "%s waits in line, at place %d: %s."
    logger.info(text, call, place, conflict.reason, extra=fields("waits", call))
    lock_waiting.send(
        sender=conflict.task,
        task_id=call.task_id,
        key=call.key,
        about=call.about,
        holder=conflict.holder,
        place=place,
    )


def _see_to_lock(app: Celery, order: Order, found: Found) -> None:
    """See to a lock that nobody is going to release."""
    call = order.call
    if found.holder is None:  # it came free meanwhile, and others stand before this call
        with suppress(SetnxError):  # a sweep sees to it
            let_the_line_go_on(app, call.task, call.key)
    elif found.holder.state == "resting":  # its release has woken nobody
        wake(app, Heir(call.task_id, order.message, remaining_s(found) or 0.0), call.key)


def _until(app: Celery, options: Options, since: float, server_time: float, expires: Any) -> float | None:
    """Server time at which `max_wait` is over, or the call expires; None: never."""
    ends = [] if options.max_wait is None else [since + options.max_wait]
    if expires:
        ends.append(server_time + seconds_until(app, expires))
    until = min(ends, default=LATEST)
    return None if until >= LATEST else max(until, 0.0)
