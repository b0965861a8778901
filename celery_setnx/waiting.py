"""Parked calls: how they wait for their lock without polling, and how they are woken.

A call that meets a held lock under `on_conflict="wait"` is in two places at once, and its delivery ends:

- in the line beside the lock, in Redis, with all that it takes to send it again. The script that releases
  the lock hands it to the first in line, and the process that released it sends that call: a wake-up is a
  message, not a poll.
- in the broker, with a courier: a small task of our own that is delivered every ten minutes until the call
  has started, and puts it back into a line that Redis has lost.

When a holder dies, or whoever was to send a wake-up, a worker lets the line go on (see `sweep`).

The courier is sent first, so whatever Redis loses, the call is still with the broker. It is a message of its
own, and not a delayed copy of the call, because a copy that comes too late does harm before we are asked:
Celery stores STARTED for it, or REVOKED when it has expired, over the result of a call that ran long ago. A
courier has no result.
"""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, cast

import redis
from billiard.exceptions import WorkerLostError
from celery import Celery, Task
from celery._state import connect_on_app_finalize
from celery.exceptions import Ignore, Reject, Retry
from celery.states import FAILURE, READY_STATES, RETRY, REVOKED, SUCCESS

from celery_setnx.back import (
    Message,
    Waits,
    broker_url,
    come_back,
    deliverable,
    is_pickled,
    not_taken_back,
    seconds_until,
    visibility_timeout_s,
)
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockRefused, SetnxError
from celery_setnx.keys import lines_name, scope_and_digest
from celery_setnx.line import BEGUN_S, Found, Place, leave, note_due, park, runs_instead
from celery_setnx.lock import (
    HAND_OVER_S,
    ORIGINAL,
    Heir,
    Holder,
    Outcome,
    Served,
    SetnxLock,
)
from celery_setnx.marks import Mark, extend_all
from celery_setnx.message import Call
from celery_setnx.options import UNSET, Options, settings
from celery_setnx.process import is_surely_dead
from celery_setnx.signals import lock_taken_over, lock_waiting
from celery_setnx.survey import TakeOver, note_take_over

logger = logging.getLogger("celery_setnx")

COURIER = "celery_setnx.courier"
"""Name of the task that looks after a parked call."""

_LOOK_S = 30.0  # after which a worker looks at a line again, at the latest
_PACE_S = 600.0
_UNSENT_S = 5.0  # after which a wake-up that could not be sent is tried again
_AT_ONCE = 10  # whom one wake-up passes over, at most
_VISIBILITY_S = 3600.0  # of a broker that has no such timeout
_MARGIN_S = 0.05  # clocks differ, and an eta is a worker's
_ASK_AGAIN_S = 0.05
_ASKED_AT_MOST = 7  # 6.4 s in all


class Parked(Waits):
    """A call waits in line: its delivery has ended, and it is woken when its turn has come."""


class ItsTurn(Exception):
    """A call that was about to wait may have its lock: it is to acquire it."""


@dataclass(frozen=True)
class Order:
    """What a courier knows of the call that it looks after; plain values, because it travels.

    Attributes:
        key: The lock's Redis key.
        task: Name of the task.
        task_id: Its id.
        attempt: Number of its attempt.
        call_id: What tells the call from others that were given the same task id.
        since: Server time (Unix seconds) since which it waits.
        call: What it is woken with.
        until: Server time after which it is woken to fail, for its `max_wait` or expiry; None for never.
        lease: The option.
        queue_lease: The option.
        remember: Seconds for which Redis remembers that the call waits.
        marked: Whether the key is marked for it.
        epoch: Of Redis' data, when the call was parked; empty if that is not known.
        resent: Whether a courier has sent the call. Defaults to False.
    """

    key: str
    task: str
    task_id: str
    attempt: int
    call_id: str
    since: float
    call: str
    until: float | None
    lease: float
    queue_lease: float
    remember: float
    marked: bool
    epoch: str
    resent: bool = False

    @property
    def place(self) -> Place:
        """Its place in the line."""
        remember = BEGUN_S if self.resent else self.remember
        return Place(self.key, self.task_id, self.attempt, remember, self.call_id)

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> Order:
        """The order that a courier is told; a newer worker may have told more."""
        return cls(**{name: told[name] for name in cls.__dataclass_fields__ if name in told})

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


def remember_s(app: Celery, options: Options) -> float:
    """Seconds for which it is remembered that a call waits."""
    return options.queue_lease + (visibility_timeout_s(app) or _VISIBILITY_S)


def may_stand_in_line(task: Task, call: Call) -> bool:
    """True if whoever serves the line can tell that the call belongs there, and sends it without a pickle."""
    return not is_pickled(task) and _is_of_its_scope(task.app, call)


def wait_in_line(task: Task, call: Call, options: Options, outcome: Outcome) -> NoReturn:
    """Park the running call: it is woken when its turn has come.

    Ends with `Parked`; with `ItsTurn` if the lock came free meanwhile; with Ignore if another message has
    started the call; or, if the broker takes no courier, as `not_taken_back`.
    """
    app = task.app
    holder = cast("Holder", outcome.holder)
    # A call that was woken has a courier, until it has begun. The ticket of one that has begun sends a
    # courier away until it is parked; if the broker has the message still, that may be done first.
    has_begun = call.redelivered
    has_courier = call.copy != ORIGINAL and not has_begun
    is_parked_first = has_begun and task.acks_late
    told = call
    call = call._replace(waits=call.waits + 1, asked=0)
    if options.on_conflict == "join":
        call = call._replace(join=_joined(task, holder, call))
    message = Message.of(task)
    order = Order(
        key=call.key,
        task=call.task,
        task_id=call.task_id,
        attempt=call.attempt,
        call_id=call.call_id,
        since=call.since,
        call=message.packed(call),
        until=_until(app, options, call.since, outcome.server_time, task.request.expires),
        lease=options.lease,
        queue_lease=options.queue_lease,
        remember=remember_s(app, options),
        marked=bool(call.marked),
        epoch=look_within(app, call.task, call.key, _look_in(outcome.remaining_s, options.lease)),
    )

    def send_courier() -> None:
        try:
            message.send_new(app, COURIER, _as_kwargs(order), countdown)
        except Exception as error:  # noqa: BLE001 - whatever the transport raises
            not_taken_back(task, call, error, reason, countdown)

    reason = f"{call.key} is held by {holder}"
    countdown = deliverable(app, _pace(order, outcome.server_time))
    if not has_courier and not is_parked_first:
        send_courier()
    try:
        found = park(client_for(app), order.place, copy=told.copy, since=order.since, call=order.call)
    except SetnxError as error:
        if has_begun:  # its ticket sends a courier away
            pause = min(countdown, options.retry_delay_max)
            come_back(task, told, pause, f"its place in line is not known ({error})", own=told.redelivered)
        logger.warning("%s waits, and only its courier knows: %s", call, error)
        if has_courier and isinstance(error, LockRefused):
            raise  # which is what its courier has sent it for
        if has_courier or order.epoch:  # with none, a worker that has its courier puts it back
            order = replace(order, epoch="")
            send_courier()
        raise Parked(reason, countdown) from None
    if found.state == "stale":
        raise Ignore("another message has started this call")
    if found.holder is None or found.holder.token != holder.token:  # a sweep may have seen that nobody waits
        look_within(app, call.task, call.key, _look_in(_remaining_s(found), options.lease))
    if is_parked_first:
        send_courier()
    if found.state == "handed" or (found.holder is None and found.place == 1):
        raise ItsTurn  # it came free meanwhile
    logger.info("%s waits in line, at place %d: %s.", call, found.place, reason)
    lock_waiting.send(sender=task, task_id=call.task_id, key=call.key, holder=holder, place=found.place)
    if found.holder is None:  # it came free meanwhile, for those before this one
        with suppress(SetnxError):  # a sweep sees to it
            let_the_line_go_on(app, call.task, call.key)
    elif found.holder.state == "resting":  # since its release nobody is there to wake
        wake(app, Heir(call.task_id, order.call, _remaining_s(found) or 0.0), call.key)
    raise Parked(reason, countdown)


def holders_result(
    task: Task, call: Call, options: Options, holder: Holder | None, server_time: float
) -> Any:
    """What a woken call with `on_conflict="join"` ends with: the result of the call that it has waited for.

    A result is stored after the lock is released, so it is asked for again a few times; one that does not
    come is that of a call which died. So is that of a call that was revoked, or whose process was lost:
    Celery would take that error for the loss of this one's. Then the first who asks runs in its stead, and
    the others wait for that one's result. `UNSET` if this call is to run.
    """
    known_dead = {call.task_id}
    while True:
        joined, asked = call.join, call.asked
        if joined is None or joined in known_dead or (holder is not None and holder.task_id == joined):
            return UNSET
        meta = task.backend.get_task_meta(joined)
        state = meta["status"]
        died = isinstance(meta["result"], (WorkerLostError, MemoryError))
        ended = state == SUCCESS or (state == FAILURE and not died)
        cancelled = isinstance(meta["result"], Retry)  # by a cold shutdown; nobody sends it again
        comes_again = state == RETRY and not cancelled and call.waited_s(server_time) < options.queue_lease
        if ended or not (died or state == REVOKED or (asked >= _ASKED_AT_MOST and not comes_again)):
            break
        known_dead.add(joined)
        place = call.place(remember_s(task.app, options))
        call = call._replace(join=runs_instead(client_for(task.app), place, of=joined), asked=0)
    if not ended:  # it keeps its place and its courier: whoever dies while it asks, it comes again
        let_the_line_go_on(task.app, call.task, call.key, away=call.task_id)
        countdown = min(_ASK_AGAIN_S * 2.0 ** min(asked, 30), options.retry_delay_max)
        reason = f"the result of {joined}, which it has waited for, is not stored"
        come_back(task, call._replace(asked=asked + 1), countdown, reason)
    if leave_line(task.app, call) == "stale":
        raise Ignore("another message has started this call")
    logger.info("%s ends with the result of %s, which it has waited for.", call, joined)
    if state == FAILURE:
        raise meta["result"]
    return meta["result"]


def wake(app: Celery, heir: Heir | None, key: str) -> None:
    """Send the call of the first in line, to which a lock was handed; of one that cannot be sent, the next.

    Nothing is raised: what was handed in vain goes to the next one when its time is over.
    """
    for tried in range(_AT_ONCE):
        if heir is None:
            break
        if heir.taken_over_from is not None:
            _report_taken_over(app, heir, heir.taken_over_from, key)
        if heir.call is None:
            break
        task_id = heir.task_id
        try:
            call, message = _from_line(app, heir, key)
        except Exception as error:  # noqa: BLE001 - whatever there is in the line's place of a call
            logger.warning("%s is handed to task %s, which cannot be sent: %s.", key, heir.task_id, error)
            heir = _next_after(app, heir, key) if tried + 1 < _AT_ONCE else None
            continue
        try:
            if heir.rest_s > 0:
                about = {"key": key, "task": call.task}
                message.send_new(app, COURIER, about, deliverable(app, heir.rest_s + _MARGIN_S))
            else:
                message.send(app, call.as_copy())
        except Exception as error:  # noqa: BLE001 - whatever the transport or the serializer raises
            logger.warning(
                "Task %s has its turn for %s, and could not be sent: %s. It is tried again in about %g s.",
                task_id,
                key,
                error,
                _UNSENT_S,
            )
            _take_back(app, heir, call.task, key)
        break


def leave_line(app: Celery, call: Call, remember: float = BEGUN_S) -> str:
    """Let a call leave the line that need not run, and the next one have its turn."""
    word = leave(client_for(app), call.place(remember), copy=call.copy)
    if word == "handed":
        let_the_line_go_on(app, call.task, call.key, away=call.task_id)
    return word


def let_the_line_go_on(
    app: Celery, task: str, key: str, away: str = "", client: redis.Redis | None = None
) -> Served:
    """Hand a lock that nobody living has to the first in line, and wake that one.

    `task` is the name of one whose calls wait for it; `away` is the id of a call that cannot come, though the
    lock is kept for it.
    """
    guard = getattr(app.tasks.get(task), "_guard", None)
    lease = HAND_OVER_S if guard is None else guard.options.lease
    lock = SetnxLock(client or client_for(app), key, lease=lease, line=True)
    served = lock.serve(away=away)
    if served.holder is not None and _is_dead(app, served.holder):
        served = lock.serve(dead=served.holder.token)
    wake(app, served.heir, key)
    return served


def lines_of(app: Celery) -> str:
    """The Redis key of the set of all lines whose calls come from the app's broker."""
    return lines_name(settings(app.conf).prefix, re.sub(r"//[^@/]*@", "//", broker_url(app)))


def look_within(app: Celery, task: str, key: str, within: float) -> str:
    """Have a worker look at a line within so many seconds: the epoch of Redis' data, if that is known.

    Nothing is raised: a call waits all the same, and its courier says it again.
    """
    try:
        return note_due(client_for(app), lines_of(app), task, key, within=within)
    except SetnxError as error:
        logger.info("No worker was told to look at the line of %s: %s", key, error)
        return ""


def next_look(served: Served) -> float | None:
    """Seconds until somebody is to look at a line again; None if nobody waits there."""
    if not served.waits:
        return None
    return _LOOK_S if served.look_in is None else min(max(served.look_in, _MARGIN_S), _LOOK_S)


def report_take_over(app: Celery, call: object, key: str, dead: Holder, server_time: float) -> None:
    """Log that a call has taken a lock over, from whom, and why; and leave a note of it."""
    ended_s = server_time - (dead.deadline or server_time)
    if dead.state == "foreign":
        why = f"it ended {ended_s:.1f} s ago, and was not released."
    elif ended_s >= 0:
        why = (
            f"its lease ended {ended_s:.1f} s ago and was not renewed. "
            "That process died, or stood still for longer than its lease."
        )
    else:
        why = "its process on this host is dead."
    logger.warning("%s took over %s from %s: %s", call, key, dead, why)
    note = TakeOver(server_time, str(call), dead.as_dict())
    try:
        note_take_over(client_for(app), key, note, settings(app.conf).retention)
    except redis.RedisError as error:
        logger.info("`celery setnx show` will not know of this take-over of %s: %s", key, error)


def _report_taken_over(app: Celery, heir: Heir, dead: Holder, key: str) -> None:
    """Say that a lock was handed to the first in line because its holder has died."""
    task = app.tasks.get(str(dead.info.get("task"))) or app.tasks[COURIER]
    report_take_over(app, f"Task {heir.task_id} (first in line)", key, dead, heir.server_time)
    lock_taken_over.send(sender=task, task_id=heir.task_id, key=key, fence=None, holder=dead)


def _take_back(app: Celery, heir: Heir, task: str, key: str) -> None:
    """Free a lock again that was handed to one whose call was not sent: it has its place again."""
    with suppress(SetnxError):  # else that is over when the hand-over is
        SetnxLock(client_for(app), key, lease=HAND_OVER_S, line=True).serve(unsent=heir.task_id)
    look_within(app, task, key, _UNSENT_S)


def _next_after(app: Celery, heir: Heir, key: str) -> Heir | None:
    """Who is to be woken in the place of one that cannot be sent."""
    lock = SetnxLock(client_for(app), key, lease=HAND_OVER_S, line=True)
    try:
        return lock.serve(away=heir.task_id).heir
    except SetnxError as error:
        logger.warning("%s is handed on when its time is over: %s", key, error)
        return None


class Courier(Task):  # type: ignore[misc]
    """Looks after a call that waits for a lock, or only sees to the lock."""

    name = COURIER
    ignore_result = True
    acks_late = True
    reject_on_worker_lost = True
    Request = "celery_setnx.sweep:CourierRequest"

    def run(self, key: str, task: str = "", order: Mapping[str, Any] | None = None) -> None:
        """Look after the call that it is told of; without one, let the line of the task's key go on."""
        if order is None:
            let_the_line_go_on(self.app, task, key)
        else:
            _visit(self, Order.of(order))


@connect_on_app_finalize  # type: ignore[untyped-decorator]
def add_courier(app: Celery) -> None:
    """Have an app know the courier: when it is finalized, or later, when it gets its first guarded task."""
    if COURIER not in app._tasks:
        courier = type("Courier", (Courier,), {"__module__": __name__})()
        app._tasks[COURIER] = courier
        courier.bind(app)


def _visit(courier: Task, order: Order) -> None:
    """See to it that a parked call is in its line, and come back as long as it waits."""
    try:
        left = _look_after(courier, order)
    except Exception as error:  # noqa: BLE001 - whatever it is, the call must not be lost
        logger.warning("The courier of %s comes back later: %s", order, error)
        left = order, random.uniform(5.0, 30.0)
    if left is None:
        return
    order, countdown = left
    countdown = deliverable(courier.app, countdown)
    try:
        Message.of(courier).send_new(courier.app, COURIER, _as_kwargs(order), countdown)
    except Exception as error:
        time.sleep(min(countdown, 1.0))  # it is delivered again at once
        raise Reject(f"the broker does not take the courier of {order}: {error}", requeue=True) from error


def put_back(app: Celery, order: Order, wait_s: float) -> tuple[Found, str] | None:
    """See to it that a call is in its line: what it finds, and the epoch; None if it waits no more.

    If Redis has lost its data, a holder may say for `wait_s` that it is there still: it is told before it is
    overtaken.
    """
    found = park(client_for(app), order.place, since=order.since, call=order.call)
    if found.state == "stale":
        return None
    if found.state == "new" and _has_ended(app, order):  # before Redis forgot it
        leave(client_for(app), replace(order.place, remember=BEGUN_S), copy=COURIER)
        return None
    waits = found.state == "new" and wait_s > 0
    within = wait_s if waits else _look_in(_remaining_s(found), order.lease)
    epoch = look_within(app, order.task, order.key, within)
    if found.holder is None and not waits:
        let_the_line_go_on(app, order.task, order.key)
    return found, epoch


def _look_after(courier: Task, order: Order) -> tuple[Order, float] | None:
    """Put a call into its line; what the courier is told next, and in how many seconds; None: no more."""
    app = courier.app
    try:
        back = put_back(app, order, wait_s=order.lease / 2)
    except LockRefused as error:
        logger.error("%s can wait no longer, and is sent to say so itself: %s", order, error)
        send_again(app, order)
        return None
    if back is None:
        return None
    if not may_be_woken(app, order):
        send_again(app, order)  # its worker throws it away, or runs it by the key that it has
        return None
    found, epoch = back
    order = replace(order, epoch=epoch)
    if order.until is not None and found.server_time >= order.until:
        send_again(app, order)
        order = replace(order, resent=True)
    countdown = _pace(order, found.server_time)
    if order.marked:
        extend_all(client_for(app), [Mark(order.key, order.task_id)], [countdown + order.queue_lease])
    return order, countdown


def _joined(task: Task, holder: Holder, call: Call) -> str | None:
    """Id of the call whose result this one ends with: the one that has the lock, if of the same task."""
    if holder.state in ("running", "held_for_retry") and holder.info.get("task") == task.name:
        return holder.task_id
    return call.join


def _is_dead(app: Celery, holder: Holder) -> bool:
    return settings(app.conf).same_host and holder.state == "running" and is_surely_dead(holder.info)


def _has_ended(app: Celery, order: Order) -> bool:
    if not app.backend.persistent:
        return False
    try:
        return app.backend.get_task_meta(order.task_id)["status"] in READY_STATES
    except Exception as error:  # noqa: BLE001 - whatever a backend raises, it does not know
        logger.warning("%s waits for %s again: its result is not known (%s).", order, order.key, error)
        return False


def _pace(order: Order, server_time: float) -> float:
    """Seconds until the courier comes: when its call is to be sent, and not all at once."""
    pace = _PACE_S * random.uniform(0.8, 1.0)
    left_s = None if order.until is None else order.until - server_time
    return min(pace, left_s) if left_s and left_s > 0 else pace


def _look_in(remaining_s: float | None, lease: float) -> float:
    """Seconds after which to look at a lock again: at its holder's deadline, or to prove its death."""
    return min(_LOOK_S, lease if remaining_s is None else max(remaining_s, 0.0))


def _remaining_s(found: Found) -> float | None:
    holder = found.holder
    return None if holder is None or holder.deadline is None else holder.deadline - found.server_time


def _until(app: Celery, options: Options, since: float, server_time: float, expires: Any) -> float | None:
    """Server time at which a call has waited for its `max_wait`, or expires."""
    ends = [] if options.max_wait is None else [since + options.max_wait]
    if expires:
        ends.append(server_time + seconds_until(app, expires))
    return min(ends, default=None)


def _from_line(app: Celery, heir: Heir, key: str) -> tuple[Call, Message]:
    """What a line has to wake a call with, if it belongs there."""
    call, message = Message.unpacked(app, heir.call or "")
    if (call.key, call.task_id) != (key, heir.task_id) or not _is_of_its_scope(app, call):
        raise ValueError(f"the line has {call} with key {call.key or None} in its place")
    return call, message


def _is_of_its_scope(app: Celery, call: Call) -> bool:
    """True if the call's key is of a scope that its task has."""
    scope = scope_and_digest(call.key)[0]
    guard = getattr(app.tasks.get(call.task), "_guard", None)
    return scope == call.task or (guard is not None and scope == guard.scope_of(guard.fitting(call).options))


def may_be_woken(app: Celery, order: Order) -> bool:
    """True if the call belongs into the line that it waits in; a deploy may have changed that."""
    if order.task not in app.tasks:
        return False
    is_its_own = scope_and_digest(order.key)[0] == order.task
    return is_its_own or _is_of_its_scope(app, Message.unpacked(app, order.call)[0])


def send_again(app: Celery, order: Order) -> None:
    """Send a call once more, as a copy of its own: its courier had it from its broker, not from its line."""
    call, message = Message.unpacked(app, order.call)
    message.send(app, call.as_copy())


def _as_kwargs(order: Order) -> dict[str, Any]:
    """What a courier is told."""
    return {"key": order.key, "order": asdict(order)}
