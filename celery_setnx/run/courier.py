"""The courier: a task of our own that stays with the broker for each call that waits.

It is for one thing only: that Redis has lost its data. It comes every ten minutes until its call has begun,
and puts that back into a line that has lost it. It is a message of its own, and not a delayed copy of the
call, because a copy that comes too late does harm before we are asked: Celery stores STARTED for it, or
REVOKED when it has expired, over the result of a call that ran long ago. A courier has no result.
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
from celery.states import READY_STATES

from celery_setnx.call.back import Message, deliverable, known_result
from celery_setnx.call.message import Call
from celery_setnx.call.wake import (
    COURIER,
    is_of_its_scope,
    let_the_line_go_on,
    look_in,
    look_within,
    place_of,
    remaining_s,
)
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.lock.line import BEGUN_S, Found, Place, leave, park
from celery_setnx.lock.marks import Mark, extend_all
from celery_setnx.log import Log, say_loudly
from celery_setnx.options import LONGEST_S

logger = Log("celery_setnx")

_PACE_S = 600.0


@dataclass(frozen=True)
class Order:
    """What a courier knows of the call that it looks after."""

    call: Call
    message: str  # what it is woken with
    until: float | None  # server time after which it is woken to fail, for its max_wait or expiry
    lease: float  # the option
    queue_lease: float  # the option
    remember: float  # seconds for which Redis remembers that the call waits
    epoch: str  # of Redis' data, when the call was parked; empty if that is not known
    resent: bool = False  # whether a courier has sent the call

    def place(self, app: Celery) -> Place:
        """The call's place in the line."""
        return place_of(app, self.call, BEGUN_S if self.resent else self.remember)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Order:
        """The order that a courier is told; a newer worker may have told more. ValueError if it is none.

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
            raise ValueError(f"this is no order for a courier ({error!r})") from None

    def as_kwargs(self) -> dict[str, Any]:
        """What its courier is told, in plain values."""
        return {"key": self.call.key, "order": {**vars(self), "call": self.call.as_headers()}}

    def send(self, courier: Message, app: Celery, countdown: float) -> None:
        """Send the courier the way of a message that is here."""
        courier.send_new(app, COURIER, self.as_kwargs(), countdown)

    def pace(self, server_time: float) -> float:
        """Seconds until the courier comes: when its call is to be sent, and not all at once."""
        pace = _PACE_S * random.uniform(0.8, 1.0)
        left_s = None if self.until is None else self.until - server_time
        return min(pace, left_s) if left_s and left_s > 0 else pace

    def __str__(self) -> str:
        return str(self.call)


def _is_time(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value <= 1e11


def _is_duration(value: Any) -> bool:
    return _is_time(value) and 0 < value <= 3 * LONGEST_S


_TOLD: Mapping[str, Callable[[Any], bool]] = {
    "message": lambda value: isinstance(value, str),
    "until": lambda value: value is None or _is_time(value),
    **dict.fromkeys(("lease", "queue_lease", "remember"), _is_duration),
    "epoch": lambda value: isinstance(value, str),
    "resent": lambda value: isinstance(value, bool),
}


class Courier(Task):  # type: ignore[misc]
    """Looks after a call that waits for a lock, or only sees to the lock."""

    name = COURIER
    ignore_result = True
    acks_late = True
    reject_on_worker_lost = True
    autoretry_for = ()  # whatever the app has for its tasks: what a courier rejects is to come again
    Request = "celery_setnx.run.sweep:CourierRequest"

    def run(self, key: str, task: str = "", order: Mapping[str, Any] | None = None) -> None:
        """Look after the call that it is told of; without one, let the line of the task's key go on."""
        if order is None:
            let_the_line_go_on(self.app, task, key)
        else:
            _visit(self, Order.of(order))


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


def put_back(app: Celery, order: Order, wait_s: float) -> tuple[Found, str] | None:
    """See to it that a call is in its line: what it finds, and the epoch; None if it waits no more.

    If Redis has lost its data, a holder may say for `wait_s` that it is there still: it is told before it is
    overtaken. A call that may not be woken here is sent, and waits no more: its worker throws it away, or
    runs it by the key that it has.
    """
    client, call = client_for(app), order.call
    found = park(client, order.place(app), since=call.since, call=order.message)
    if found.state == "stale":
        return None
    if found.state == "new" and _has_ended(app, call):  # before Redis forgot it
        leave(client, replace(order.place(app), remember=BEGUN_S), copy=COURIER)
        return None
    waits = found.state == "new" and wait_s > 0
    within = wait_s if waits else look_in(remaining_s(found), order.lease)
    epoch = look_within(app, call.task, call.key, within)
    if found.holder is None and not waits:
        let_the_line_go_on(app, call.task, call.key)
    if not may_be_woken(app, call):
        send_again(app, order)
        return None
    return found, epoch


def _has_ended(app: Celery, call: Call) -> bool:
    return known_result(app.backend, call.task_id, call).get("status") in READY_STATES


def may_be_woken(app: Celery, call: Call) -> bool:
    """True if a call belongs into the line that it waits in; a deploy may have changed that."""
    return call.task in app.tasks and is_of_its_scope(app, call)


def send_again(app: Celery, order: Order) -> None:
    """Send a call once more, as a copy of its own: its courier had it from its broker, not from its line."""
    call, message = Message.unpacked(app, order.message)
    message.send(app, call.as_copy())


def _visit(courier: Task, order: Order) -> None:
    """See to it that a parked call is in its line, and come back as long as it waits."""
    try:
        left = _look_after(courier.app, order)
    except Exception as error:  # noqa: BLE001 - whatever it is, the call must not be lost
        logger.warning("The courier of %s comes back later: %s", order, error)
        left = order, random.uniform(5.0, 30.0)
    if left is None:
        return
    order, countdown = left
    countdown = deliverable(courier.app, countdown)
    try:
        order.send(Message.of(courier), courier.app, countdown)
    except Exception as error:
        time.sleep(min(countdown, 1.0))  # it is delivered again at once
        raise Reject(f"the broker does not take the courier of {order}: {error}", requeue=True) from error


def _look_after(app: Celery, order: Order) -> tuple[Order, float] | None:
    """Put a call into its line; what the courier is told next, and in how many seconds; None: no more."""
    try:
        back = put_back(app, order, wait_s=order.lease / 2)
    except LockUnavailable as error:  # one of them is a refusal, too
        say_loudly(error)
        raise
    except LockRefused as error:
        logger.error("%s can wait no longer, and is sent to say so itself: %s", order, error)
        send_again(app, order)
        return None
    if back is None:
        return None
    found, epoch = back
    order = replace(order, epoch=epoch)
    if order.until is not None and found.server_time >= order.until:
        send_again(app, order)
        order = replace(order, resent=True)
    countdown = order.pace(found.server_time)
    if order.call.marked:
        mark = Mark(order.call.key, order.call.task_id)
        extend_all(client_for(app), [mark], [countdown + order.queue_lease])
    return order, countdown
