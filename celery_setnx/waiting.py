"""Parked calls: how they wait for their lock without polling, and how they are woken.

A call that meets a held lock under `on_conflict="wait"` is in two places at once, and its delivery ends:

- in the line beside the lock, in Redis, with all that it takes to send it again. The script that releases
  the lock hands it to the first in line, and the process that released it sends that call: a wake-up is a
  message, not a poll.
- in the broker, with a courier: a small task of our own that is delivered when the holder's lease would end,
  and again and again until the call has started. It puts the call back into a line that Redis has lost, and
  lets the line go on when a holder, or whoever was to send a wake-up, has died.

The courier is sent first and looks after its call until that has the lock, so whoever dies, and whatever
Redis loses, the call is still with the broker. It is a message of its own, and not a delayed copy of the
call, because a copy that comes too late does harm before we are asked: Celery stores STARTED for it, or
REVOKED when it has expired, over the result of a call that ran long ago. A courier has no result.
"""

from __future__ import annotations

import logging
import random
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
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
    come_back,
    deliverable,
    is_pickled,
    not_taken_back,
    seconds_until,
    visibility_timeout_s,
)
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockRefused, SetnxError
from celery_setnx.keys import scope_and_digest
from celery_setnx.line import Found, Place, leave, park
from celery_setnx.lock import (
    HAND_OVER_S,
    ORIGINAL,
    Heir,
    HeldLock,
    Holder,
    Outcome,
    SetnxLock,
    task_token,
)
from celery_setnx.marks import Mark, extend_all
from celery_setnx.message import Call
from celery_setnx.options import UNSET, Options, settings
from celery_setnx.process import identity, is_surely_dead
from celery_setnx.signals import lock_taken_over, lock_waiting
from celery_setnx.survey import TakeOver, note_take_over

logger = logging.getLogger("celery_setnx")

COURIER = "celery_setnx.courier"
"""Name of the task that looks after a parked call."""

_LONGEST_PACE_S = 600.0
_VISIBILITY_S = 3600.0  # of a broker that has no such timeout
_NEAR = 4  # the first few in line send a courier that comes with the holder's deadline
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
        pace: Seconds after which the courier comes back at the latest.
        queue_lease: The option.
        remember: Seconds for which Redis remembers that the call waits, or has begun.
        marked: Whether the key is marked for it.
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
    pace: float
    queue_lease: float
    remember: float
    marked: bool

    @property
    def place(self) -> Place:
        """Its place in the line."""
        return Place(self.key, self.task_id, self.attempt, self.remember, self.call_id)

    def __str__(self) -> str:
        return f"{self.task}[{self.task_id}]"


def remember_s(app: Celery, options: Options) -> float:
    """Seconds for which it is remembered which message of a call has started it: no other can come later."""
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
    has_begun = call.redelivered or call.asked > 0
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
        pace=min(max(options.retry_delay, options.retry_delay_max), _LONGEST_PACE_S),
        queue_lease=options.queue_lease,
        remember=remember_s(app, options),
        marked=bool(call.marked),
    )

    def send_courier() -> None:
        try:
            message.send_new(app, COURIER, _as_kwargs(order), countdown)
        except Exception as error:  # noqa: BLE001 - whatever the transport raises
            not_taken_back(task, call, error, reason, countdown)

    reason = f"{call.key} is held by {holder}"
    if outcome.waiters < _NEAR:
        countdown = _pace(order, outcome.remaining_s, outcome.server_time)
    else:  # one of theirs watches the lock
        countdown = _pace(order, None, outcome.server_time, spread=2.0)
    countdown = deliverable(app, countdown)
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
        raise Parked(reason, countdown) from None
    if found.state == "stale":
        raise Ignore("another message has started this call")
    if is_parked_first:
        send_courier()
    if found.state == "handed" or (found.holder is None and found.place == 1):
        raise ItsTurn  # it came free meanwhile
    logger.info("%s waits in line, at place %d: %s.", call, found.place, reason)
    lock_waiting.send(sender=task, task_id=call.task_id, key=call.key, holder=holder, place=found.place)
    if found.holder is None:  # it came free meanwhile, for those before this one
        with suppress(SetnxError):  # their couriers see to it
            let_the_line_go_on(app, call.key, task, call.task_id)
    elif found.holder.state == "resting":  # since its release nobody is there to wake
        wake(app, Heir(call.task_id, order.call, _remaining_s(found) or 0.0), call.key)
    raise Parked(reason, countdown)


def holders_result(
    task: Task, call: Call, options: Options, holder: Holder | None, server_time: float
) -> Any:
    """What a woken call with `on_conflict="join"` ends with: the result of the call that it has waited for.

    A result is stored after the lock is released, so it is asked for again a few times; one that does not
    come is that of a call which died, and this one runs itself. So it does if the other was revoked, or if
    its process was lost: Celery would take that error for the loss of this one's. `UNSET` if it is to run.
    """
    joined, asked = call.join, call.asked
    if joined is None or (holder is not None and holder.task_id == joined):
        return UNSET
    meta = task.backend.get_task_meta(joined)
    state = meta["status"]
    died = isinstance(meta["result"], (WorkerLostError, MemoryError))
    ended = state == SUCCESS or (state == FAILURE and not died)
    cancelled = isinstance(meta["result"], Retry)  # by a cold shutdown; nobody sends it again
    comes_again = state == RETRY and not cancelled and call.waited_s(server_time) < options.queue_lease
    if not ended and (died or state == REVOKED or (asked >= _ASKED_AT_MOST and not comes_again)):
        return UNSET
    if leave_line(task.app, call.place(remember_s(task.app, options)), call.copy) == "stale":
        raise Ignore("another message has started this call")
    if not ended:
        countdown = min(_ASK_AGAIN_S * 2.0 ** min(asked, 30), options.retry_delay_max)
        reason = f"the result of {joined}, which it has waited for, is not stored"
        come_back(task, call._replace(asked=asked + 1), countdown, reason)
    logger.info("%s ends with the result of %s, which it has waited for.", call, joined)
    if state == FAILURE:
        raise meta["result"]
    return meta["result"]


def wake(app: Celery, heir: Heir | None, key: str) -> None:
    """Send the call of the first in line, to which a lock was handed.

    Nothing is raised: its courier sends it too, when the lock was kept for it in vain.
    """
    if heir is None:
        return
    if heir.call is None:
        logger.warning("%s is kept for task %s, which its courier wakes.", key, heir.task_id)
        return
    try:
        call, message = _from_line(app, heir, key)
        if heir.rest_s > 0:
            message.send_new(app, COURIER, {"key": key}, deliverable(app, heir.rest_s + _MARGIN_S))
        else:
            message.send(app, call.as_copy())
    except Exception as error:  # noqa: BLE001 - whatever the transport or the serializer raises
        logger.warning(
            "%s is handed to task %s, and it could not be woken: %s. Its courier wakes it.",
            key,
            heir.task_id,
            error,
        )


def leave_line(app: Celery, place: Place, copy: str) -> str:
    """Let a call leave the line that need not run, and the next one have its turn."""
    word = leave(client_for(app), place, copy=copy)
    if word == "handed":
        pass_on(app, place, copy)
    return word


def pass_on(app: Celery, place: Place, copy: str) -> None:
    """Hand a lock that is kept for a call which has left the line to the next one, and wake it."""
    lock = _lock(app, place.key)
    token = task_token(place.task_id, 0, uuid.uuid4().hex)
    outcome = lock.acquire(token=token, copy=copy, attempt=place.attempt, call_id=place.call_id)
    if outcome.lock is not None:
        outcome.lock.release()
        wake(app, lock.heir, lock.name)


def let_the_line_go_on(app: Celery, key: str, task: Task, task_id: str, own: Order | None = None) -> None:
    """Hand a lock that nobody living holds to the first in line, and wake it."""
    lock = _lock(app, key)
    outcome = lock.acquire_at_death(same_host=settings(app.conf).same_host)
    held, dead = outcome.lock, outcome.taken_over_from
    if held is None:
        return
    held.release()
    if own is not None and lock.heir is not None and lock.heir.task_id == own.task_id:
        _send_again(app, own)
    else:
        wake(app, lock.heir, key)
    if dead is not None:
        report_take_over(f"The courier of {task.name}[{task_id}]", held, dead, outcome.server_time)
        lock_taken_over.send(sender=task, task_id=task_id, key=key, fence=held.fence, holder=dead)


def report_take_over(call: object, held: HeldLock, dead: Holder, server_time: float) -> None:
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
    logger.warning("%s took over %s from %s: %s", call, held.key, dead, why)
    note = TakeOver(server_time, str(call), dead.as_dict())
    try:
        note_take_over(held.client, held.key, note, held.retention_s)
    except redis.RedisError as error:
        logger.info("`celery setnx show` will not know of this take-over of %s: %s", held.key, error)


class Courier(Task):  # type: ignore[misc]
    """Looks after a call that waits for a lock, or only sees to the lock."""

    name = COURIER
    ignore_result = True
    acks_late = True
    reject_on_worker_lost = True

    def run(self, key: str, order: Mapping[str, Any] | None = None, visits: int = 1) -> None:
        """Look after the call that it is told of; without one, let the line of the key go on."""
        if order is None:
            let_the_line_go_on(self.app, key, self, self.request.id)
        else:
            known = {name: value for name, value in order.items() if name in Order.__dataclass_fields__}
            _visit(self, Order(**known), visits)  # a newer worker may have sent more


@connect_on_app_finalize  # type: ignore[untyped-decorator]
def add_courier(app: Celery) -> None:
    """Have an app know the courier: when it is finalized, or later, when it gets its first guarded task."""
    if COURIER not in app._tasks:
        courier = type("Courier", (Courier,), {"__module__": __name__})()
        app._tasks[COURIER] = courier
        courier.bind(app)


def _visit(courier: Task, order: Order, visits: int) -> None:
    """See to it that a parked call has its turn, and come back as long as it waits."""
    try:
        countdown = _look_after(courier, order, visits)
    except Exception as error:  # noqa: BLE001 - whatever it is, the call must not be lost
        logger.warning("The courier of %s comes back later: %s", order, error)
        countdown = order.pace * random.uniform(0.1, 0.5)
    if countdown is None:
        return
    countdown = deliverable(courier.app, countdown)
    try:
        Message.of(courier).send_new(courier.app, COURIER, _as_kwargs(order, visits=visits + 1), countdown)
    except Exception as error:
        time.sleep(min(countdown, 1.0))  # it is delivered again at once
        raise Reject(f"the broker does not take the courier of {order}: {error}", requeue=True) from error


def _look_after(courier: Task, order: Order, visits: int) -> float | None:
    """Do for a parked call what is to be done; seconds until the courier comes again, None if it need not.

    One courier per lock watches it for the whole line, and comes at every deadline, even when its own call
    has begun; the others come after twice the time whenever they came in vain.
    """
    app = courier.app
    client = client_for(app)
    try:
        found = park(client, order.place, since=order.since, call=order.call, watch=1.5 * order.pace)
    except LockRefused as error:
        logger.error("%s can wait no longer, and is sent to say so itself: %s", order, error)
        _send_again(app, order)
        return None
    if found.state == "stale" and not found.watches:
        return None
    if found.state == "new" and _has_ended(app, order):  # before Redis forgot it
        leave_line(app, order.place, COURIER)
        return None
    in_vain = visits if found.state == "parked" and not found.watches else 0
    countdown = _pace(order, _remaining_s(found), found.server_time, in_vain=in_vain)
    if found.state == "new":  # Redis has lost its data: a holder is told so before it is overtaken
        countdown = min(order.pace, order.lease / 2)
    elif found.state != "handed" and (found.holder is None or _is_dead(app, found.holder)):
        let_the_line_go_on(app, order.key, app.tasks.get(order.task, courier), order.task_id, order)
        countdown = min(order.pace, HAND_OVER_S)
    elif found.state != "stale" and order.until is not None and found.server_time >= order.until:
        _send_again(app, order)
    if order.marked and found.state != "stale":
        extend_all(client, [Mark(order.key, order.task_id)], [countdown + order.queue_lease])
    return countdown


def _joined(task: Task, holder: Holder, call: Call) -> str | None:
    """Id of the call whose result this one ends with: the one that has the lock, if of the same task."""
    if holder.state in ("running", "held_for_retry") and holder.info.get("task") == task.name:
        return holder.task_id
    return call.join


def _lock(app: Celery, key: str) -> SetnxLock:
    return SetnxLock(client_for(app), key, lease=HAND_OVER_S, line=True, info={**identity(), "task": COURIER})


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


def _pace(
    order: Order, remaining_s: float | None, server_time: float, *, in_vain: int = 0, spread: float = 1.2
) -> float:
    """Seconds until the courier comes: when the holder's lease would end, and not all at once."""
    pace = order.pace if remaining_s is None else min(max(remaining_s, 0.05), order.pace)
    pace = min(pace * 2.0 ** min(in_vain, 30), _LONGEST_PACE_S) * random.uniform(1.0, spread)
    left_s = None if order.until is None else order.until - server_time
    return min(pace, left_s) if left_s and left_s > 0 else pace


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


def _send_again(app: Celery, order: Order) -> None:
    """Send a call once more, as a copy of its own: its courier had it from its broker, not from its line."""
    call, message = Message.unpacked(app, order.call)
    message.send(app, call.as_copy())


def _as_kwargs(order: Order, **more: Any) -> dict[str, Any]:
    """What a courier is told."""
    return {"key": order.key, "order": asdict(order), **more}
