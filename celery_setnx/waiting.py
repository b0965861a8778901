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

import base64
import logging
import random
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, NoReturn

import redis
from billiard.exceptions import WorkerLostError
from celery import Celery, Signature, Task
from celery._state import connect_on_app_finalize
from celery.exceptions import Ignore, Reject, Retry
from celery.states import FAILURE, READY_STATES, RETRY, REVOKED, SUCCESS
from celery.utils.time import maybe_iso8601, maybe_make_aware
from kombu.serialization import dumps, loads, prepare_accept_content

from celery_setnx.connection import client_for
from celery_setnx.delivery import (
    HEADER,
    Waits,
    attempt_of,
    call_of,
    come_back,
    copy_of,
    deliverable,
    is_redelivered,
    not_taken_back,
    same_call,
    serializer_of,
    topic_queue,
    visibility_s,
    wait_of,
    waited,
)
from celery_setnx.exceptions import LockRefused, SetnxError
from celery_setnx.line import Found, Place, leave, park
from celery_setnx.lock import HAND_OVER_S, ORIGINAL, Heir, HeldLock, Holder, SetnxLock, task_token
from celery_setnx.marks import Mark, extend_all
from celery_setnx.options import UNSET, Options, settings
from celery_setnx.process import identity, is_surely_dead
from celery_setnx.signals import lock_taken_over, lock_waiting
from celery_setnx.survey import TakeOver, note_take_over

logger = logging.getLogger("celery_setnx")

COURIER = "celery_setnx.courier"
"""Name of the task that looks after a parked call."""

_LONGEST_PACE_S = 600.0
_NEAR = 4  # the first few in line send a courier that comes with the holder's deadline
_MARGIN_S = 0.05  # clocks differ, and an eta is a worker's
_ASK_AGAIN_S = 0.05
_ASKED_AT_MOST = 7  # 6.4 s in all
_ROUTE = ("queue", "exchange", "routing_key", "priority")


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
    return options.queue_lease + visibility_s(app)


def wait_in_line(
    task: Task,
    key: str,
    options: Options,
    *,
    holder: Holder,
    remaining_s: float | None,
    waits: int,
    since: float,
    server_time: float,
    waiting: int,
) -> NoReturn:
    """Park the running call: it is woken when its turn has come.

    Args:
        task: The task; its request is the call.
        key: The lock's Redis key.
        options: The options of the call.
        holder: Who holds the lock.
        remaining_s: Seconds until the holder's deadline; None if it has none.
        waits: How often the call has come back already.
        since: Server time (Unix seconds) of its first conflict.
        server_time: The same clock now.
        waiting: How many calls wait already.

    Raises:
        Parked: The call waits.
        ItsTurn: It need not.
        celery.exceptions.Ignore: Another message has started it.
        celery.exceptions.Reject: The broker takes no courier, and has the message still (acks_late).
        LockUnavailable: The broker takes no courier.
    """
    request = task.request
    app = task.app
    wait, header = wait_of(request), (request.headers or {}).get(HEADER) or {}
    joins = {"join": _joined(task, holder, wait)} if options.on_conflict == "join" else {}
    call = same_call(task, {"count": waits + 1, "since": since, "asked": 0, **joins})
    serializer = serializer_of(task)
    order = Order(
        key=key,
        task=task.name,
        task_id=request.id,
        attempt=attempt_of(request.retries, request.replaced_task_nesting),
        call_id=header.get("call_id", ""),
        since=since,
        call=_packed(call, serializer),
        until=_until(app, options, since, request.expires),
        lease=options.lease,
        pace=min(max(options.retry_delay, options.retry_delay_max), _LONGEST_PACE_S),
        queue_lease=options.queue_lease,
        remember=remember_s(app, options),
        marked=bool(header.get("marked")),
    )
    copy = copy_of(request)
    # A call that was woken has a courier, until it has begun. The ticket of one that has begun sends a
    # courier away until it is parked; if the broker has the message still, that may be done first.
    has_begun = is_redelivered(request) or bool(wait.get("asked"))
    has_courier = copy != ORIGINAL and not has_begun
    is_parked_first = has_begun and task.acks_late

    def send_courier() -> None:
        try:
            _send_courier(app, order, countdown, _route_of(call.options), serializer)
        except Exception as error:  # noqa: BLE001 - whatever the transport raises
            not_taken_back(task, error, reason, countdown)

    reason = f"{key} is held by {holder}"
    if waiting < _NEAR:
        countdown = _pace(order, remaining_s, server_time)
    else:  # one of theirs watches the lock
        countdown = _pace(order, None, server_time, spread=2.0)
    countdown = deliverable(task, countdown)
    if not has_courier and not is_parked_first:
        send_courier()
    try:
        found = park(client_for(app), order.place, copy=copy, since=since, call=order.call)
    except SetnxError as error:
        logger.warning("%s waits, and only its courier knows: %s", call_of(task), error)
        if has_courier and isinstance(error, LockRefused):
            raise  # which is what its courier has sent it for
        if is_parked_first:
            send_courier()
        raise Parked(reason, countdown) from None
    if found.state == "stale":
        raise Ignore("another message has started this call")
    if is_parked_first:
        send_courier()
    if found.state == "handed" or (found.holder is None and found.place == 1):
        raise ItsTurn  # it came free meanwhile
    logger.info("%s waits in line, at place %d: %s.", call_of(task), found.place, reason)
    lock_waiting.send(sender=task, task_id=request.id, key=key, holder=holder, place=found.place)
    if found.holder is None:  # it came free meanwhile, for those before this one
        with suppress(SetnxError):  # their couriers see to it
            let_the_line_go_on(app, key, task, request.id)
    elif found.holder.state == "resting":  # since its release nobody is there to wake
        wake(app, Heir(request.id, order.call, _remaining_s(found) or 0.0), key)
    raise Parked(reason, countdown)


def holders_result(task: Task, place: Place, options: Options, holder: Holder | None) -> Any:
    """What a woken call with `on_conflict="join"` ends with: the result of the call that it has waited for.

    A result is stored after the lock is released, so it is asked for again a few times; one that does not
    come is that of a call which died, and this one runs itself. So it does if the other was revoked, or if
    its process was lost: Celery would take that error for the loss of this one's.

    Args:
        task: The task; its request is the call.
        place: The call's place in the line.
        options: The options of the call.
        holder: Who has the lock now; None if it is free.

    Returns:
        The result; `UNSET` if the call is to acquire its lock as any other.

    Raises:
        Exception: The other call's own error.
        celery.exceptions.Retry: The call comes back, to ask again.
        celery.exceptions.Ignore: Another message has started this call.
    """
    request = task.request
    wait = wait_of(request)
    joined, asked = wait.get("join"), wait.get("asked", 0)
    if joined is None or (holder is not None and holder.task_id == joined):
        return UNSET
    meta = task.backend.get_task_meta(joined)
    state, copy = meta["status"], copy_of(request)
    died = isinstance(meta["result"], (WorkerLostError, MemoryError))
    ended = state == SUCCESS or (state == FAILURE and not died)
    waits, waited_s = waited(request, time.time())
    cancelled = isinstance(meta["result"], Retry)  # by a cold shutdown; nobody sends it again
    comes_again = state == RETRY and not cancelled and waited_s < options.queue_lease
    if not ended and (died or state == REVOKED or (asked >= _ASKED_AT_MOST and not comes_again)):
        return UNSET
    if leave_line(task.app, place, copy) == "stale":
        raise Ignore("another message has started this call")
    if not ended:
        countdown = min(_ASK_AGAIN_S * 2.0 ** min(asked, 30), options.retry_delay_max)
        reason = f"the result of {joined}, which it has waited for, is not stored"
        come_back(task, countdown, waits, wait["since"], reason, join=joined, asked=asked + 1)
    logger.info("%s ends with the result of %s, which it has waited for.", call_of(task), joined)
    if state == FAILURE:
        raise meta["result"]
    return meta["result"]


def wake(app: Celery, heir: Heir | None, key: str) -> None:
    """Send the call of the first in line, to which a lock was handed.

    Nothing is raised: its courier sends it too, when the lock was kept for it in vain.

    Args:
        app: The app.
        heir: To whom the lock was handed; None if nobody waits.
        key: The lock's Redis key.
    """
    if heir is None:
        return
    if heir.call is None:
        logger.warning("%s is kept for task %s, which its courier wakes.", key, heir.task_id)
        return
    try:
        call = _unpacked(app, heir.call)
        if heir.rest_s > 0:
            _as_from_no_task(lambda: _send_nudge(app, key, heir.rest_s, _route_of(call.options)))
        else:
            _as_from_no_task(lambda: _send_again(call))
    except Exception as error:  # noqa: BLE001 - whatever the transport or the serializer raises
        logger.warning(
            "%s is handed to task %s, and it could not be woken: %s. Its courier wakes it.",
            key,
            heir.task_id,
            error,
        )


def leave_line(app: Celery, place: Place, copy: str) -> str:
    """Let a call leave the line that need not run, and the next one have its turn.

    Args:
        app: The app.
        place: The call's place.
        copy: The message of it that is here.

    Returns:
        What `celery_setnx.line.leave` does.

    Raises:
        LockUnavailable: Redis did not answer.
        LockRefused: Redis refuses a command.
    """
    word = leave(client_for(app), place, copy=copy)
    if word == "handed":
        pass_on(app, place, copy)
    return word


def pass_on(app: Celery, place: Place, copy: str) -> None:
    """Hand a lock that is kept for a call which has left the line to the next one, and wake it.

    Args:
        app: The app.
        place: The place that the call had.
        copy: The message of it that has left.

    Raises:
        LockUnavailable: Redis did not answer.
        LockRefused: Redis refuses a command.
    """
    lock = _lock(app, place.key)
    token = task_token(place.task_id, 0, uuid.uuid4().hex)
    outcome = lock.acquire(token=token, copy=copy, attempt=place.attempt, call_id=place.call_id)
    if outcome.lock is not None:
        outcome.lock.release()
        wake(app, lock.heir, lock.name)


def let_the_line_go_on(app: Celery, key: str, task: Task, task_id: str) -> None:
    """Hand a lock that nobody living holds to the first in line, and wake it.

    Args:
        app: The app.
        key: The lock's Redis key.
        task: The task on whose behalf this is done, for the report of a take-over.
        task_id: Its id.

    Raises:
        LockUnavailable: Redis did not answer.
        LockRefused: Redis refuses a command.
    """
    lock = _lock(app, key)
    outcome = lock.acquire_at_death(same_host=settings(app.conf).same_host)
    held, dead = outcome.lock, outcome.taken_over_from
    if held is None:
        return
    held.release()
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


@connect_on_app_finalize  # type: ignore[untyped-decorator]
def _add_courier(app: Celery) -> None:
    @app.task(  # type: ignore[untyped-decorator]
        name=COURIER,
        base=Task,
        bind=True,
        shared=False,
        lazy=False,
        ignore_result=True,
        acks_late=True,
        reject_on_worker_lost=True,
    )
    def courier(self: Task, key: str, order: Mapping[str, Any] | None = None, visits: int = 1) -> None:
        """Look after a call that waits for a lock, or only see to the lock."""
        if order is None:
            let_the_line_go_on(self.app, key, self, self.request.id)
        else:
            known = {name: value for name, value in order.items() if name in Order.__dataclass_fields__}
            _visit(self, Order(**known), visits)  # a newer worker may have sent more


def _visit(courier: Task, order: Order, visits: int) -> None:
    """See to it that a parked call has its turn, and come back as long as it waits."""
    try:
        countdown = _look_after(courier, order, visits)
    except Exception as error:  # noqa: BLE001 - whatever it is, the call must not be lost
        logger.warning("The courier of %s comes back later: %s", order, error)
        countdown = order.pace * random.uniform(0.1, 0.5)
    if countdown is None:
        return
    countdown = deliverable(courier, countdown)
    try:
        courier.signature_from_request(
            kwargs={"key": order.key, "order": asdict(order), "visits": visits + 1},
            queue=topic_queue(courier),
            countdown=countdown,
            headers={},
        ).apply_async()
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
        _as_from_no_task(lambda: _send_again(_unpacked(app, order.call)))
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
        let_the_line_go_on(app, order.key, app.tasks.get(order.task, courier), order.task_id)
        countdown = min(order.pace, HAND_OVER_S)
    elif found.state != "stale" and order.until is not None and found.server_time >= order.until:
        _as_from_no_task(lambda: _send_again(_unpacked(app, order.call)))
    if order.marked and found.state != "stale":
        extend_all(client, [Mark(order.key, order.task_id)], [countdown + order.queue_lease])
    return countdown


def _joined(task: Task, holder: Holder, wait: Mapping[str, Any]) -> str | None:
    """Id of the call whose result this one ends with: the one that has the lock, if of the same task."""
    if holder.state in ("running", "held_for_retry") and holder.info.get("task") == task.name:
        return holder.task_id
    return wait.get("join")


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


def _until(app: Celery, options: Options, since: float, expires: Any) -> float | None:
    ends = [] if options.max_wait is None else [since + options.max_wait]
    if expires:
        moment = maybe_make_aware(maybe_iso8601(expires), app.timezone)
        ends.append(moment.timestamp())
    return min(ends, default=None)


def _packed(call: Signature, serializer: str) -> str:
    content_type, encoding, data = dumps(dict(call), serializer)  # type: ignore[no-untyped-call]
    text = data if isinstance(data, str) else base64.b64encode(data).decode()
    return f"{content_type} {encoding} {text}"


def _unpacked(app: Celery, packed: str) -> Signature:
    content_type, encoding, text = packed.split(" ", 2)
    data = base64.b64decode(text) if encoding == "binary" else text
    accept = prepare_accept_content(app.conf.accept_content)  # type: ignore[no-untyped-call]
    call = loads(data, content_type, encoding, accept=accept)  # type: ignore[no-untyped-call]
    return Signature.from_dict(call, app=app)


def _route_of(options: Mapping[str, Any]) -> dict[str, Any]:
    return {name: options[name] for name in _ROUTE if options.get(name) is not None}


def _send_again(call: Signature) -> None:
    """Send a call once more, as a copy of its own."""
    call.options["headers"][HEADER]["wait"]["copy"] = uuid.uuid4().hex[:12]
    call.apply_async()


def _send_courier(
    app: Celery, order: Order, countdown: float, route: Mapping[str, Any], serializer: str
) -> None:
    app.tasks[COURIER].apply_async(
        kwargs={"key": order.key, "order": asdict(order)},
        countdown=countdown,
        serializer=serializer,
        add_to_parent=False,
        **route,
    )


def _send_nudge(app: Celery, key: str, countdown: float, route: Mapping[str, Any]) -> None:
    courier = app.tasks[COURIER]
    courier.apply_async(kwargs={"key": key}, countdown=deliverable(courier, countdown + _MARGIN_S), **route)


def _as_from_no_task(send: Any) -> None:
    """Send in a thread of its own: from within a task Celery would make the message that task's child."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            send()
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            errors.append(error)

    thread = threading.Thread(target=run, name="celery_setnx-wake", daemon=True)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
