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
from typing import Any, cast

import redis
from celery import Celery, Task

from celery_setnx.call.back import (
    PICKLE,
    Message,
    Waits,
    come_back,
    deliverable,
    not_taken_back,
    remember_s,
    seconds_until,
)
from celery_setnx.call.delay import waits_in_broker
from celery_setnx.call.message import LATEST, Call
from celery_setnx.call.wake import (
    due_in_s,
    end_wait,
    is_of_its_line,
    look_within,
    remaining_s,
)
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockRefused, LockUnavailable, SetnxError
from celery_setnx.lock import line
from celery_setnx.lock.line import SOON_S, DueReply, ParkReply
from celery_setnx.lock.names import end_name
from celery_setnx.lock.record import Holder
from celery_setnx.log import Log, fields, say_loudly
from celery_setnx.options import Options
from celery_setnx.run.conflict import Conflict
from celery_setnx.run.courier import ParkedCall
from celery_setnx.run.decide import Place
from celery_setnx.signals import lock_waiting

logger = Log("celery_setnx")
_RESUMED_S = 2.0  # then a paused call's line is looked at once: its pause may have ended meanwhile
# One that is superseded asks for the lock once more, and hears of the newer call.
_NOT_PARKED: dict[str, Place] = {
    "stale": "stale",
    "taken": "taken",
    "crowded": "crowded",
    "superseded": "turn",
}


class Parked(Waits):
    """A call waits in line: its delivery has ended, and it is woken when its turn has come.

    Attributes:
        look_in_s: Seconds after which this worker is to look at the line; None if it need not. It travels to
            the worker's parent.
    """

    look_in_s: float | None = None


def may_stand_in_line(task: Task, call: Call) -> bool:
    """True if every worker can tell that the call belongs in this line, and can send it.

    A pickled message is sent by nobody. The queue of a fanout exchange is often known to one worker only.
    """
    message = Message.of(task)
    if message.content_type == PICKLE or message.is_fanout:
        return False
    return is_of_its_line(task.app, call, message.body)


def park(conflict: Conflict, *, alone: bool = False) -> tuple[Place, Parked | None]:
    """Put the running call in line; if `alone`, unless another call waits there.

    What parking found, and the exception that ends its delivery if it waits. If the broker takes no courier,
    the call ends as `not_taken_back` says.
    """
    task, met = conflict.task, conflict.call
    app, message = task.app, Message.of(task)
    noted = _look_within(conflict, conflict.remaining_s)
    parked = _parked_call(conflict, message, noted.epoch)
    wait = Parked(conflict.reason, deliverable(app, parked.pace(conflict.server_time)))
    # A woken call has a courier until it begins. The ticket of a call that has begun sends couriers away
    # until the call is parked again. If the broker still has its message, it may park first.
    has_courier = met.is_woken and not met.again
    parks_first = met.again and task.acks_late
    if not message.queue or not (has_courier or parks_first):  # without a queue this fails, and says why
        _send_courier(conflict, parked, message, wait)
    try:
        client, since = client_for(app), parked.call.since
        place = replace(parked.place(app), generation=0 if met.leads else met.generation, alone=alone)
        found = line.park(client, place, copy=met.copy, since=since, call=parked.message)
    except SetnxError as error:
        if _asks_courier(conflict, parked, wait, error, has_courier=has_courier):
            _send_courier(conflict, replace(parked, epoch=""), message, wait)
        return "waits", wait
    if found.state in _NOT_PARKED:
        return _NOT_PARKED[found.state], None
    if found.older is not None:
        _wake_older(app, met, found.older, client)
    wait.look_in_s = _look_in_s(conflict, found, noted)
    # A woken call had its lock, or Redis has lost its ticket: its courier may be gone.
    if parks_first or (has_courier and found.state == "new"):
        _send_courier(conflict, parked, message, wait)
    elif has_courier and waits_in_broker(app):
        parked.note_end(app, found.server_time)
    if found.state == "handed" or (found.holder is None and found.place == 1 and not conflict.outcome.paced):
        return "turn", None  # it came free meanwhile
    _announce(conflict, parked.call, found.place)
    return "waits", wait


def _wake_older(app: Celery, call: Call, older: str, client: redis.Redis) -> None:
    """Wake a call that is superseded, for it to end; else it ends at its turn, behind the newer one."""
    with suppress(SetnxError):
        again_s = end_wait(app, call.key, older, client, "is superseded")
        if again_s is not None:
            look_within(app, call.task, end_name(call.key, older), again_s)


def _parked_call(conflict: Conflict, message: Message, epoch: str) -> ParkedCall:
    """What the courier of the call is told."""
    task, options = conflict.task, conflict.options
    app, call = task.app, conflict.call._replace(waits=conflict.call.waits + 1, asked=0)
    return ParkedCall(
        call=call,
        message=message.packed(app, call),
        until=_until(app, options, call.since, conflict.server_time, task.request.expires),
        lease=options.lease,
        queue_lease=options.queue_lease,
        remember=remember_s(app, options),
        epoch=epoch,
    )


def _look_within(conflict: Conflict, holds_s: float | None) -> DueReply:
    call, lease = conflict.call, conflict.options.lease
    return look_within(conflict.task.app, call.task, call.key, due_in_s(holds_s, lease))


def _send_courier(conflict: Conflict, parked: ParkedCall, message: Message, wait: Parked) -> None:
    """Send the courier; if the broker does not take it, end as `not_taken_back` says."""
    try:
        parked.send(message, conflict.task.app, wait.when, conflict.server_time, first=True)
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        not_taken_back(conflict.task, parked.call, error, conflict.reason)


def _asks_courier(
    conflict: Conflict, parked: ParkedCall, wait: Parked, error: SetnxError, *, has_courier: bool
) -> bool:
    """Whether a courier is to be sent for a call of which nobody knows whether it is in line."""
    met, call = conflict.call, parked.call
    if met.again:  # its ticket would send a courier away
        pause = min(wait.when, conflict.options.retry_delay_max)
        come_back(conflict.task, met, pause, f"its place in line is not known ({error})", own=True)
    logger.warning("%s waits, and only its courier knows: %s", call, error, extra=fields(of=call))
    say_loudly(error)
    if has_courier and isinstance(error, LockRefused) and not isinstance(error, LockUnavailable):
        raise error  # its courier has sent it to say so
    return has_courier or bool(parked.epoch)  # without an epoch a worker puts the call back in line


def _look_in_s(conflict: Conflict, found: ParkReply, noted: DueReply) -> float | None:
    """In how many seconds this worker is to look at the line; None if it need not."""
    look_in_s = _note_holder(conflict, found)
    if look_in_s is None:  # it was noted before: by this call, perhaps
        look_in_s = 0.0 if conflict.outcome.is_due else noted.look_in_s
    return look_in_s


def _note_holder(conflict: Conflict, found: ParkReply) -> float | None:
    """Note when to look at the line, unless the holder is the same: a sweep may have seen it empty.

    In how many seconds this worker is to look; None if that was noted before.
    """
    is_paced, holder = conflict.outcome.paced, found.holder
    holds_s = conflict.remaining_s if is_paced else remaining_s(found)
    if conflict.outcome.paused and holds_s is not None:
        holds_s = min(holds_s, _RESUMED_S)
    ends_first = cast("Holder", conflict.outcome.ends_first)
    # One that rests by now began to before anybody waited.
    is_same = holder is not None and (holder.token, holder.state) == (ends_first.token, ends_first.state)
    is_soon = due_in_s(holds_s, conflict.options.lease) < SOON_S
    return _look_within(conflict, holds_s).look_in_s if is_soon or is_paced or not is_same else None


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


def _until(app: Celery, options: Options, since: float, server_time: float, expires: Any) -> float | None:
    """Server time at which `max_wait` is over, or the call expires; None: never."""
    ends = [] if options.max_wait is None else [since + options.max_wait]
    if expires:
        ends.append(server_time + seconds_until(app, expires))
    until = min(ends, default=LATEST)
    return None if until >= LATEST else max(until, 0.0)
