"""How a line goes on: who is next is handed the lock, and its call is sent from the line to the broker.

Whoever gives a lock back hands it on in the same step, and wakes who has his turn. Everybody else notes when
somebody is to look at the line (see `sweep`), and that one lets it go on.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import redis
from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery

from celery_setnx.call.back import Message, call_and_broker
from celery_setnx.call.broker import broker_of
from celery_setnx.call.ended import free_ended
from celery_setnx.call.guard import Guard, guard_of
from celery_setnx.call.live import live_terms_at
from celery_setnx.call.message import Call
from celery_setnx.connection import client_for
from celery_setnx.exceptions import SetnxError
from celery_setnx.lock.line import (
    BEGUN_S,
    PASSED_OVER,
    DueReply,
    LineEntry,
    ParkReply,
    ask_others,
    call_in_line,
    leave,
    note_due,
    score_of,
)
from celery_setnx.lock.lock import MOST_PERMITS, SetnxLock
from celery_setnx.lock.marks import Mark
from celery_setnx.lock.names import end_name, line_names, lines_name
from celery_setnx.lock.process import is_surely_dead
from celery_setnx.lock.record import Heir, Holder, ServeReply, Turn
from celery_setnx.lock.scripts import reply_to
from celery_setnx.lock.takeover import TakeOver, note_take_over
from celery_setnx.lock.verbs import HAND_OVER_S, serve
from celery_setnx.log import Log, fields
from celery_setnx.options import settings_of
from celery_setnx.signals import lock_taken_over

logger = Log("celery_setnx")

Later = dict[tuple[str, str], Callable[[], object]]
"""What is left to be done elsewhere, by the lock's key and the id of a task that is to be woken."""

COURIER = "celery_setnx.courier"
"""Name of the task that looks after a parked call."""

_EARLIEST_S = 0.001  # after which a worker looks at a line again
_LOOK_S = 30.0  # after which a worker looks at a line again, at the latest
_UNSENT_S = 5.0  # after which a wake-up that could not be sent is tried again
_AT_ONCE = 10  # whom one wake-up passes over, at most


def wake(app: Celery, heir: Heir | None, key: str) -> None:
    """Send the call of the first in line, to which a lock was handed; of one that cannot be sent, the next.

    Nothing is raised but a time limit: what was handed in vain goes to the next one when its time is over.
    """
    for tried in range(_AT_ONCE):
        if heir is None:
            break
        if heir.taken_over_from is not None:
            _report_taken_over(app, heir, heir.taken_over_from, key)
        if heir.call is None:
            break
        try:
            call, broker = _from_line(heir.call, heir.task_id, key)
            if _is_sent_here(app, call, broker):
                _send(app, heir, *_of_its_line(app, heir.call))
            else:
                _leave_to_others(app, call, broker or broker_of(app))
            break
        except SoftTimeLimitExceeded:
            raise
        except Exception as error:  # noqa: BLE001 - whatever there is in the line's place of a call
            logger.warning(
                "%s is handed to task %s, which cannot be sent: %s",
                key,
                heir.task_id,
                error,
                extra=fields(task_id=heir.task_id, key=key),
            )
            heir = _next_after(app, heir, key) if tried + 1 < _AT_ONCE else None


def _send(app: Celery, heir: Heir, call: Call, message: Message) -> None:
    """Send a call to which a lock was handed."""
    try:
        message.send(app, call.as_copy())
    except Exception as error:
        text = "Task %s is next for %s, but could not be sent to the broker: %s It is tried again in %g s."
        logger.warning(text, heir.task_id, call.key, error, _UNSENT_S, extra=fields(of=call))
        _take_back(app, heir, call.task, call.key)
        if isinstance(error, SoftTimeLimitExceeded):
            raise


def _leave_to_others(app: Celery, call: Call, broker: str) -> None:
    """Have a worker send a call that it alone can send; ValueError if none has come when its line was due.

    The lock is kept for it meanwhile, as for one that was sent.
    """
    lines = lines_name(settings_of(app).prefix, broker)
    try:
        if not ask_others(client_for(app), lines, call.task, call.key, call.task_id):
            raise ValueError(f"no worker that has {call.task} looks at its line, with the broker {broker}")
    except SetnxError as error:
        logger.info(
            "No worker with the task and the broker %s was told to send %s: %s",
            broker,
            call,
            error,
            extra=fields(of=call),
        )


def send_from_line(app: Celery, key: str, task_id: str, client: redis.Redis) -> float | None:
    """Send a call that another worker could not; seconds until one is to try again, None if there is no need.

    The lock may be handed to it still; if it has been passed over, it comes late, and stands where it stood.
    """
    line, calls = line_names(key)
    kept, place = reply_to(client, "HGET", calls, task_id), score_of(client, line, task_id)
    found = re.fullmatch(rb"\d+(\+?)\|\d+\|(.*)", kept or b"", re.DOTALL)
    if found is None or (place is not None and place < PASSED_OVER and not found[1]):
        return None  # nobody takes it for one that was sent
    try:
        text = found[2].decode()
        call, broker = _from_line(text, task_id, key)
        if not _is_sent_here(app, call, broker):
            is_plain = guard_of(app.tasks.get(call.task)) is None  # elsewhere it may be guarded
            return random.uniform(0.5, 1.5) if is_plain else None
        call, message = _of_its_line(app, text)
        message.send(app, call.as_copy())
    except Exception as error:  # noqa: BLE001 - whatever the line has, or the transport raises
        logger.warning(
            "Task %s is next for %s, but could not be sent to the broker: %s",
            task_id,
            key,
            error,
            extra=fields(task_id=task_id, key=key),
        )
    return None


def give_turn(app: Celery, task: str, key: str, turn: Turn | None) -> float | None:
    """Wake the one to whom a lock was handed when it was given back; or note when to look at its line.

    Seconds after which somebody should look; None if a worker is to, or there is no need.
    """
    if turn is not None and turn.look_in_s is not None:
        return look_within(app, task, key, turn.look_in_s).look_in_s
    wake(app, turn and turn.heir, key)
    return None


def give_turns(app: Celery, task: str, lock: SetnxLock) -> float | None:
    """As `give_turn`, of all that releases through this object have left to be done."""
    look_in_s = None
    while lock.turns:
        look_in_s = give_turn(app, task, lock.name, lock.turns.pop(0))
    return look_in_s


def leave_line(
    app: Celery, call: Call, remember: float = BEGUN_S, *, stays: int = 0
) -> tuple[str, float | None]:
    """Let a call leave the line that need not run; or give back what was handed to it, if it `stays`.

    The word, and as `give_turn`.
    """
    left = leave(client_for(app), place_of(app, call, remember), copy=call.copy, stays=stays)
    return left.word, give_turn(app, call.task, call.key, left.turn)


def let_the_line_go_on(
    app: Celery, task: str, key: str, client: redis.Redis, later: Later | None = None
) -> ServeReply:
    """Hand a lock that nobody living has to the first in line, and wake that one: a sweep does, and a look.

    `task` is the name of one whose calls wait for it. With `later`, what may be slow is left there: to ask a
    result backend, and to wake after a take-over, as receivers of its signal hear of it first.
    """
    guard = known_guard(app, task)
    serve = _service_of(app, guard, key, client)
    for _ in range(MOST_PERMITS):
        served = serve()
        holder = served.holder
        if holder is not None and _is_dead(app, holder):
            served = serve(dead=holder.token)
        elif holder is not None and later is not None:
            if holder.state == "held_for_retry":
                later[key, ""] = partial(let_the_line_go_on, app, task, key, client)
        elif holder is not None and free_ended(
            app, task, Mark(key, holder.task_id or ""), holder.state, client
        ):
            served = serve()
        heir = served.heir
        if heir is not None and heir.taken_over_from is not None and later is not None:
            later[key, heir.task_id] = partial(wake, app, heir, key)
        else:
            wake(app, heir, key)
        if served.look_in_s != 0:  # else another permit may be free, and somebody waits
            break
    return served


def _service_of(app: Celery, guard: Guard | None, key: str, client: redis.Redis) -> Callable[..., ServeReply]:
    """What serves the line of a lock, on the terms of its task if that is known here."""
    live = live_terms_at(app, key)
    if guard is None:
        return partial(serve, SetnxLock(client, key, lease=HAND_OVER_S, line=True, live=live))
    of = guard.options
    lock = SetnxLock(client, key, lease=of.lease, line=True, limit=of.limit, rate=of.rate, live=live)
    return partial(serve, lock, knows_terms=True)


def place_of(app: Celery, call: Call, remember: float) -> LineEntry:
    """A call's place in the line; if its task is known here, with its terms and lease."""
    guard = known_guard(app, call.task)
    place = call.place(remember)
    if guard is None:
        return place
    terms = guard.options.terms._replace(live=live_terms_at(app, call.key))
    return replace(place, terms=terms, lease=guard.options.lease)


def lines_of(app: Celery) -> str:
    """What the names of all sets of lines begin with whose calls come from the app's broker."""
    return lines_name(settings_of(app).prefix, broker_of(app))


def look_within(app: Celery, task: str, key: str, within: float) -> DueReply:
    """Have a worker look at a line within so many seconds.

    Nothing is raised: a call waits all the same, and its courier says it again. Then the epoch is empty.
    """
    try:
        return note_due(client_for(app), lines_of(app), task, key, within=within)
    except SetnxError as error:
        logger.info(
            "No worker was told to look at the line of %s: %s", key, error, extra=fields(task=task, key=key)
        )
        return DueReply("")


def end_within(app: Celery, call: Call, within: float) -> None:
    """Have a worker send a call that will have waited for long enough in so many seconds, for it to fail."""
    look_within(app, call.task, end_name(call.key, call.task_id), max(within, 0.0))


def end_wait(
    app: Celery,
    key: str,
    task_id: str,
    client: redis.Redis,
    why: str = "has reached its max_wait or expiry",
) -> float | None:
    """Send a call whose waiting has ended: its worker has it fail, or skips it, and it leaves its line.

    It keeps its place until then, for its message may be lost. Seconds until that is to be tried again.
    """
    text = call_in_line(client, key, task_id)
    if text is None:  # it has begun, or has its turn
        return None
    try:
        call, broker = _from_line(text, task_id, key)
        if not _is_sent_here(app, call, broker):
            return None
        call, message = _of_its_line(app, text)
    except Exception as error:  # noqa: BLE001 - whatever there is in the line's place of a call
        logger.warning(
            "Task %s %s, and is left to its courier: %s",
            task_id,
            why,
            error,
            extra=fields(task_id=task_id, key=key),
        )
        return None
    try:
        message.send(app, call.as_copy())
    except Exception as error:  # noqa: BLE001 - whatever the transport or the serializer raises
        text = "%s %s, but could not be sent to the broker: %s It is tried again in %g s."
        logger.warning(text, call, why, error, _UNSENT_S, extra=fields(of=call))
        return _UNSENT_S
    return None


def next_look(served: ServeReply) -> float | None:
    """Seconds until somebody is to look at a line again; None if nobody waits there."""
    if not served.waits:
        return None
    return _LOOK_S if served.look_in_s is None else min(max(served.look_in_s, _EARLIEST_S), _LOOK_S)


def report_take_over(
    app: Celery, call: object, key: str, dead: Holder, server_time: float, extra: Mapping[str, Any]
) -> None:
    """Log that a call has taken a lock over, from whom, and why; and leave a note of it."""
    ended_s = server_time - (dead.deadline or server_time)
    if dead.state == "foreign":
        why = f"it ended {ended_s:.1f} s ago without a release."
    elif ended_s >= 0:
        is_dead = settings_of(app).same_host and is_surely_dead(dead.info)
        fate = "on this host is dead" if is_dead else "died, hung, or could not reach Redis"
        why = f"its lease ended {ended_s:.1f} s ago without a renewal or a release. The process {fate}."
    else:
        why = "its process on this host is dead."
    logger.warning("%s took over %s from %s: %s", call, key, dead, why, extra=extra)
    note = TakeOver(server_time, str(call), dead.as_dict())
    try:
        note_take_over(client_for(app), key, note, settings_of(app).retention)
    except SetnxError as error:
        logger.info(
            "`celery setnx show` will not know of this take-over of %s: %s", key, error, extra=fields(key=key)
        )


def _report_taken_over(app: Celery, heir: Heir, dead: Holder, key: str) -> None:
    """Say that a lock was handed to the first in line because its holder has died."""
    task = app.tasks.get(str(dead.task)) or app.tasks[COURIER]
    told = fields("taken_over", dead, task_id=heir.task_id, key=key)
    report_take_over(app, f"Task {heir.task_id} (first in line)", key, dead, heir.server_time, told)
    lock_taken_over.send(
        sender=task, task_id=heir.task_id, key=key, about=dead.about, fence=None, holder=dead
    )


def _take_back(app: Celery, heir: Heir, task: str, key: str) -> None:
    """Free a lock again that was handed to one whose call was not sent: it has its place again."""
    with suppress(SetnxError):  # else that is over when the hand-over is
        _service_of(app, known_guard(app, task), key, client_for(app))(unsent=heir.task_id)
    look_within(app, task, key, _UNSENT_S)


def _next_after(app: Celery, heir: Heir, key: str) -> Heir | None:
    """Who is to be woken in the place of one that cannot be sent."""
    try:
        return _service_of(app, None, key, client_for(app))(away=heir.task_id).heir
    except SetnxError as error:
        logger.warning("%s is handed on when its time is over: %s", key, error, extra=fields(key=key))
        return None


def _is_dead(app: Celery, holder: Holder) -> bool:
    return settings_of(app).same_host and holder.state == "running" and is_surely_dead(holder.info)


def due_in_s(remaining_s: float | None, lease: float) -> float:
    """Seconds after which to look at a lock again: at its holder's deadline, or to prove its death."""
    return min(_LOOK_S, lease if remaining_s is None else max(remaining_s, 0.0))


def remaining_s(found: ParkReply) -> float | None:
    """Seconds until the holder's deadline, None if there is none; 0 if nobody has the lock."""
    holder = found.holder
    if holder is None:
        return 0.0
    return None if holder.deadline is None else holder.deadline - found.server_time


def _from_line(text: str, task_id: str, key: str) -> tuple[Call, str]:
    """A call that a line has, and the broker that it came from; ValueError if it is no call of this line."""
    call, broker = call_and_broker(text)
    if (call.key, call.task_id) != (key, task_id):
        raise ValueError(f"the line has {call} with key {call.key or None} in its place")
    return call, broker


def _is_sent_here(app: Celery, call: Call, broker: str) -> bool:
    """True if it is this app that sends a call."""
    return broker in ("", broker_of(app)) and guard_of(app.tasks.get(call.task)) is not None


def _of_its_line(app: Celery, text: str) -> tuple[Call, Message]:
    """What a call is woken with; ValueError if only its courier may send it, for which its broker vouches."""
    call, message = Message.unpacked(app, text)
    if not is_of_its_line(app, call, message.body):
        raise ValueError(f"the key of {call} is not the one that its arguments have; its courier sends it")
    return call, message


def known_guard(app: Celery, task: str) -> Guard | None:
    """The guard of a `SingletonTask` by its name; None if there is none here."""
    return getattr(app.tasks.get(task), "_guard", None)


def is_of_its_line(app: Celery, call: Call, body: Any) -> bool:
    """True if the call's task is guarded here, and its key that of its arguments, as far as can be told."""
    guard = guard_of(app.tasks.get(call.task))
    return guard is not None and guard.may_have(call, body[0], body[1])
