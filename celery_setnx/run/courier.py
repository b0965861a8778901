"""The courier: a task of our own that stays with the broker for each call that waits.

It is for one thing only: that Redis has lost its data. It comes every ten minutes until its call has begun,
and puts that back into a line that has lost it. Until then an AMQP broker keeps it, for a minute the first
time; elsewhere a worker holds it (see `held`). It is a message of its own, and not a delayed copy of the
call, because a copy that comes too late does harm before we are asked: Celery stores REVOKED for it when it
has expired, over the result of a call that ran long ago. A courier has no result.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery, Task
from celery._state import connect_on_app_finalize
from celery.exceptions import Reject
from kombu.exceptions import ContentDisallowed, DecodeError

from celery_setnx.call.back import Message, deliverable, stamped
from celery_setnx.call.broker import broker_of
from celery_setnx.call.delay import declared, waits_in_broker
from celery_setnx.call.ended import stored_end
from celery_setnx.call.message import Call, is_time
from celery_setnx.call.queues import NoWayBack
from celery_setnx.call.wake import (
    COURIER,
    due_in_s,
    end_within,
    is_of_its_line,
    known_guard,
    leave_line,
    look_within,
    place_of,
    remaining_s,
)
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.forks import between_forks
from celery_setnx.lock.line import BEGUN_S, LineEntry, ParkReply, has_begun_s, park
from celery_setnx.lock.marks import extend_all
from celery_setnx.log import Log, fields, say_loudly
from celery_setnx.options import LONGEST_S

logger = Log("celery_setnx")

FIRST_S = 60.0
"""Seconds for which the first courier of a call waits in an AMQP broker."""

LATER_S = 600.0
"""Seconds for which those after it wait there."""

_PACE_S = 600.0
_STAMPS = "stamps"  # a copy that none of a call's messages is


@dataclass(frozen=True)
class ParkedCall:
    """What a courier knows of the call that it looks after."""

    call: Call
    message: str  # what it is woken with
    until: float | None  # server time after which it is woken to fail, for its max_wait or expiry
    lease: float  # the option
    queue_lease: float  # the option
    remember: float  # seconds for which Redis remembers that the call waits
    epoch: str  # of Redis' data, when the call was parked; empty if that is not known
    resent: bool = False  # whether a courier has sent the call

    def place(self, app: Celery) -> LineEntry:
        """The call's place in the line."""
        return place_of(app, self.call, BEGUN_S if self.resent else self.remember)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> ParkedCall:
        """The call that a courier is told of; a newer worker may have told more. ValueError if it is none.

        It came in a message: whatever it is, nothing else is raised.
        """
        try:
            known = {name: told[name] for name in cls.__dataclass_fields__ if name in told}
            wrong = [name for name, is_right in _TOLD.items() if name in known and not is_right(known[name])]
            if wrong:
                raise ValueError(f"its {wrong[0]!r} is wrong")
            return cls(**{**known, "call": Call.told(told["call"])})
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - no list of what such a thing may raise is complete
            raise ValueError(f"this is no parked call ({error!r})") from None

    def stamped(self, app: Celery) -> ParkedCall:
        """The same for a call that is to go back to the app's broker, which has delivered its courier."""
        message = stamped(self.message, broker_of(app))
        return self if message is self.message else replace(self, message=message)

    def as_kwargs(self) -> dict[str, Any]:
        """What its courier is told, in plain values."""
        return {"key": self.call.key, "parked": {**vars(self), "call": self.call.as_headers()}}

    def send(
        self, courier: Message, app: Celery, countdown: float, server_time: float, *, first: bool
    ) -> None:
        """Send the courier the way of a message that is here: to wait in its broker, or in a worker.

        In the broker all wait for equally long, so when its call is to fail is noted beside the line.
        """
        through = None
        if waits_in_broker(app) and courier.queue:
            is_soon = first or countdown <= FIRST_S
            through = declared(app, courier.queue, FIRST_S if is_soon else LATER_S)
        if through is None:
            courier.send_new(app, COURIER, self.as_kwargs(), countdown)
            return
        replace(courier, queue=through, is_fanout=False).send_new(app, COURIER, self.as_kwargs(), 0.0)
        self.note_end(app, server_time)

    def note_end(self, app: Celery, server_time: float) -> None:
        """Have a worker send the call when it is to fail, if its courier does not come by then."""
        if self.until is not None and self.until > server_time > 0:
            end_within(app, self.call, self.until - server_time)

    def pace(self, server_time: float) -> float:
        """Seconds until the courier comes: when its call is to be sent, and not all at once."""
        pace = _PACE_S * random.uniform(0.8, 1.0)
        left_s = None if self.until is None else self.until - server_time
        return min(pace, left_s) if left_s and left_s > 0 else pace

    def __str__(self) -> str:
        return str(self.call)


def _is_duration(value: Any) -> bool:
    return is_time(value) and 0 < value <= 3 * LONGEST_S


_TOLD: Mapping[str, Callable[[Any], bool]] = {
    "message": lambda value: isinstance(value, str),
    "until": lambda value: value is None or is_time(value),
    **dict.fromkeys(("lease", "queue_lease", "remember"), _is_duration),
    "epoch": lambda value: isinstance(value, str),
    "resent": lambda value: isinstance(value, bool),
}


class Courier(Task):  # type: ignore[misc]
    """Looks after a call that waits for a lock."""

    name = COURIER
    ignore_result = True
    acks_late = True
    reject_on_worker_lost = True
    autoretry_for = ()  # whatever the app has for its tasks: what a courier rejects is to come again
    Request = "celery_setnx.run.sweep:CourierRequest"

    def run(self, key: str, parked: Mapping[str, Any]) -> None:
        """Look after the call that it is told of."""
        try:
            _visit(self, key, parked)
        except (SoftTimeLimitExceeded, NoWayBack) as error:  # a limit of the app's for all its tasks
            time.sleep(1.0)  # it is delivered again at once
            raise Reject(f"the courier of {key} has not done its work: {error}", requeue=True) from error


@connect_on_app_finalize  # type: ignore[untyped-decorator]
def add_courier(app: Celery) -> None:
    """Have an app know the courier, and its workers sweep its lines: also those of tasks guarded no more.

    It is called when the app is finalized, or later, when it gets its first guarded task.
    """
    app.steps["worker"].add("celery_setnx.run.sweep:Sweep")  # by name: who only sends does not import it
    if COURIER not in app._tasks:
        courier = type("Courier", (Courier,), {"__module__": __name__})
        app._tasks.register(courier)  # a registry of an app's own may want it to be of its own kind
        app._tasks[COURIER].bind(app)


def declare_queues(app: Celery) -> None:
    """Have the broker have the queues in which couriers wait, of all queues that the app's worker reads.

    But not of those that end with their worker: a courier that needs them declares them.
    """
    guards = [guard for name in app.tasks if (guard := known_guard(app, name))]
    if not waits_in_broker(app) or not any(guard.options.may_wait for guard in guards):
        return
    for queue in list(app.amqp.queues.consume_from.values()):
        for wait_s in () if queue.exclusive or queue.auto_delete else (FIRST_S, LATER_S):
            between_forks.give_way()
            declared(app, str(queue.name), wait_s)


def put_back(app: Celery, parked: ParkedCall, wait_s: float) -> tuple[ParkReply, str] | None:
    """See to it that a call is in its line: what it finds, and the epoch; None if it waits no more.

    If Redis has lost its data, a holder may say for `wait_s` that it is there still: it is told before it is
    overtaken. A call that may not be woken here is sent, and waits no more: its worker throws it away, or
    runs it by the key that it has.
    """
    client, call, before = client_for(app), parked.call, parked
    parked = parked.stamped(app)
    place = parked.place(app)
    if parked.until is not None:
        place = replace(place, remember=BEGUN_S)
    copy = "" if parked is before else _STAMPS  # it is to stand there with the new stamp
    found = park(client, place, copy=copy, since=call.since, call=parked.message)
    if found.state == "stale":
        if parked.until is not None and not parked.resent and _began_before(parked, place, found, client):
            park(client, parked.place(app), since=call.since, call=parked.message)
        return None
    if found.state == "handed" and copy:  # perhaps by one who has left it to workers that are no more
        send_again(app, parked)
    waits = found.state == "new" and wait_s > 0
    within = wait_s if waits else due_in_s(remaining_s(found), parked.lease)
    epoch = look_within(app, call.task, call.key, within).epoch
    # It may have ended before Redis forgot it; if Redis has forgotten nothing, another call with its id has.
    since = call.since if epoch != parked.epoch else 0.0
    if found.state == "new" and stored_end(app, call.task, call.task_id, since=since or None):
        leave_line(app, call._replace(copy=COURIER))
        return None
    if not may_be_woken(app, parked):
        send_again(app, parked)
        return None
    return found, epoch


def _began_before(parked: ParkedCall, place: LineEntry, found: ParkReply, client: Any) -> bool:
    """Whether a call that has begun did so before it was to fail, and so was sent for that by nobody.

    Then it has no message left that comes late, and Redis need not remember for a week that it has begun.
    """
    return found.server_time - has_begun_s(client, place) < (parked.until or 0.0)


def may_be_woken(app: Celery, parked: ParkedCall) -> bool:
    """True if a call belongs into the line that it waits in; a deploy may have changed that."""
    _, message = Message.unpacked(app, parked.message)
    return is_of_its_line(app, parked.call, message.body)


def send_again(app: Celery, parked: ParkedCall) -> None:
    """Send a call once more, as a copy of its own: its courier had it from its broker, not from its line."""
    call, message = Message.unpacked(app, parked.message)
    message.send(app, call.as_copy())


def _visit(courier: Task, key: str, told: Mapping[str, Any]) -> None:
    """See to it that a parked call is in its line, and come back as long as it waits."""
    try:
        parked = ParkedCall.of(told).stamped(courier.app)
        Message.unpacked(courier.app, parked.message)
    except (ValueError, DecodeError) as error:  # it would be the same the next time
        _end(courier, key, told, error)
        return
    except ContentDisallowed as error:  # a deploy may allow it
        logger.warning("The courier of %s comes back later: %s", parked, error, extra=fields(of=parked.call))
        left: tuple[ParkedCall, float, float] | None = (parked, _PACE_S, 0.0)
    except NoWayBack as error:  # another may mend it
        left = _later(parked, error)
    else:
        left = _left(courier.app, parked)
    if left is None:
        return
    parked, countdown, server_time = left
    countdown = deliverable(courier.app, countdown)
    try:
        parked.send(Message.of(courier), courier.app, countdown, server_time, first=False)
    except Exception as error:
        time.sleep(min(countdown, 1.0))  # it is delivered again at once
        raise Reject(f"the broker does not take the courier of {parked}: {error}", requeue=True) from error


def _left(app: Celery, parked: ParkedCall) -> tuple[ParkedCall, float, float] | None:
    """What a courier is told next, in how many seconds it comes, and when that was said; None: no more."""
    try:
        return _look_after(app, parked)
    except Exception as error:  # noqa: BLE001 - whatever it is, the call must not be lost
        return _later(parked, error)


def _later(parked: ParkedCall, error: Exception) -> tuple[ParkedCall, float, float]:
    logger.warning("The courier of %s comes back later: %s", parked, error, extra=fields(of=parked.call))
    return parked, random.uniform(5.0, 30.0), 0.0


def _end(courier: Task, key: str, told: Any, error: Exception) -> None:
    """Come no more, because its call cannot be understood; the call is sent, if that can be."""
    text = told.get("message") if isinstance(told, Mapping) else None
    try:
        call, message = Message.unpacked(courier.app, text if isinstance(text, str) else "")
    except (ValueError, DecodeError, ContentDisallowed):  # whatever there is in the place of a call
        said = "A courier of %s is dropped as malformed; if it carried a call, that call is lost: %s"
        logger.error(said, key, error, extra=fields(key=key))
        return
    logger.error(
        "The courier of %s (key %s) is dropped as malformed, and the call is sent: %s",
        call,
        key,
        error,
        extra=fields(of=call),
    )
    try:
        message.send(courier.app, call.as_copy())
    except Exception as refusal:
        time.sleep(1.0)  # it is delivered again at once
        raise Reject(f"the broker does not take {call}: {refusal}", requeue=True) from refusal


def _look_after(app: Celery, parked: ParkedCall) -> tuple[ParkedCall, float, float] | None:
    """Put a call into its line; see `_left`."""
    try:
        back = put_back(app, parked, wait_s=parked.lease / 2)
    except LockUnavailable as error:  # one of them is a refusal, too
        say_loudly(error)
        raise
    except LockRefused as error:
        logger.error(
            "%s can no longer wait in line; it is sent, and fails with this error: %s",
            parked,
            error,
            extra=fields(of=parked.call),
        )
        send_again(app, parked)
        return None
    if back is None:
        return None
    found, epoch = back
    parked = replace(parked, epoch=epoch)
    if parked.until is not None and found.server_time >= parked.until:
        send_again(app, parked)
        parked = replace(parked, resent=True)
    countdown = parked.pace(found.server_time)
    if (mark := parked.call.mark) is not None:
        lasts_s = parked.remember if mark.generation else parked.queue_lease
        extend_all(client_for(app), [mark], [countdown + lasts_s])
    return parked, countdown, found.server_time
