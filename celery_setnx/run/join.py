"""What a call with `on_conflict="join"` ends with, when its turn has come: the result it has waited for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from billiard.exceptions import WorkerLostError
from celery import Task
from celery.exceptions import Retry
from celery.states import FAILURE, RETRY, REVOKED, SUCCESS

from celery_setnx.call.back import Dropped, come_back, remember_s
from celery_setnx.call.message import Call
from celery_setnx.call.wake import leave_line
from celery_setnx.connection import client_for
from celery_setnx.lock.line import successor_of
from celery_setnx.lock.record import Holder
from celery_setnx.log import Log, fields
from celery_setnx.options import UNSET, Options

logger = Log("celery_setnx")

_ASK_AGAIN_S = 0.05
_ASKED_AT_MOST = 7  # 6.4 s in all


def joined_by(task: Task, holder: Holder, call: Call) -> str | None:
    """Id of the call whose result this one ends with: the first holder of the same task that it meets.

    A call never changes that, and a call that may have run before joins nobody. A holder may have the lock
    only to ask for the result of a third call: without these rules two could wait for each other for ever.
    """
    if call.join is not None or call.attempt or call.again:
        return call.join
    is_other = holder.task_id != call.task_id and holder.task == task.name
    return holder.task_id if is_other and holder.state in ("running", "held_for_retry") else None


def holders_end(
    task: Task, call: Call, options: Options, holder: Holder | None, server_time: float
) -> tuple[Call, Any]:
    """What a woken call with `on_conflict="join"` ends with: the stored end of the call that it waited for.

    A result is stored after the lock is released, so it is asked for again a few times; one that does not
    come is that of a call which died. So is that of a call that was revoked, or whose process was lost:
    Celery would take that error for the loss of this one's. Then the first who asks runs in its stead, and
    the others wait for that one's result. `UNSET` if this call is to run; and the call, with whom it joins
    now.
    """
    known_dead = {call.task_id}
    while True:
        joined, asked = call.join, call.asked
        if joined is None or joined in known_dead or (holder is not None and holder.task_id == joined):
            return call, UNSET
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
        call = call._replace(join=successor_of(client_for(task.app), place, of=joined), asked=0)
    if not ended:  # it keeps its place and its courier: whoever dies while it asks, it comes again
        leave_line(task.app, call, stays=asked + 1)
        countdown = min(_ASK_AGAIN_S * 2.0 ** min(asked, 30), options.retry_delay_max)
        reason = f"the result of {joined}, which it has waited for, is not stored"
        come_back(task, call._replace(asked=asked + 1), countdown, reason)
    if leave_line(task.app, call)[0] == "stale":
        raise Dropped("another message has started this call")
    logger.info(
        "%s ends with the result of %s, which it has waited for.", call, joined, extra=fields("joined", call)
    )
    return call, meta


def result_of(end: Mapping[str, Any]) -> Any:
    """The result, or the error, that a call shares with the one that it has joined."""
    if end["status"] == FAILURE:
        raise end["result"]
    return end["result"]
