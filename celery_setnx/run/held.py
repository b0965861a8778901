"""Messages in a worker's timer; and couriers that it holds: it lets those go whose calls have begun.

Where the broker cannot keep a delayed message to itself, a worker's parent has the couriers of all calls that
wait, in its timer and beyond its prefetch, until their time has come. Nearly all calls begin long before.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple

import redis
from celery import Celery
from celery.worker import state

from celery_setnx.forks import between_forks
from celery_setnx.lock.line import LineEntry, TicketStart, have_begun, shorten_tickets
from celery_setnx.log import Log

logger = Log("celery_setnx")

_ASKS_S = 30.0
_MANY = 5000  # in a round trip
_YOUNG_S = 60.0  # until then most calls wait still, or have begun and ended: they are asked about once


class HeldCouriers:
    """Which of the couriers in a worker's parent it need not hold any longer."""

    def __init__(self) -> None:
        self._asks_at = time.monotonic() + _ASKS_S

    def let_go(self, worker: Any, client: redis.Redis, couriers: Sequence[Any]) -> None:
        """Every 30 s, let those go whose calls have begun, but for those in their first minute."""
        now = time.monotonic()
        if now < self._asks_at:
            return
        self._asks_at = now + _ASKS_S
        old = [courier for courier in couriers if now - courier.held_since >= _YOUNG_S]
        for start in range(0, len(old), _MANY):
            between_forks.give_way()
            _let_go(worker, client, old[start : start + _MANY])


def _let_go(worker: Any, client: redis.Redis, couriers: Sequence[Any]) -> None:
    """Let those go whose calls have begun, and note of these what a courier that comes would."""
    try:
        places = dict(_places(worker.app, couriers))
        begun = dict(zip(places, have_begun(client, list(places.values()))))
        gone = [courier for courier, has in begun.items() if has]
        if gone:
            worker.consumer.call_soon(partial(give_back, worker.consumer, gone))
        # What was woken once has no message left that comes late.
        once = [each for each in gone if begun[each] is TicketStart.ONCE and not each.parked.resent]
        shorten_tickets(client, [places[courier] for courier in once])
    except Exception as error:  # noqa: BLE001 - they have a time of their own
        logger.info("It is not known which couriers are needed no more: %s", error)


def _places(app: Celery, couriers: Sequence[Any]) -> Iterator[tuple[Any, LineEntry]]:
    for courier in couriers:
        with suppress(Exception):  # what is wrong with one is no other's business
            yield courier, courier.parked.place(app)


def give_back(consumer: Any, couriers: Sequence[Any]) -> None:
    """Drop couriers from a worker's timer, in its own loop: acknowledged, reserved and prefetched no more.

    One that is not in the timer was begun, or came by a connection that is lost: then its broker delivers it
    anew. Nothing is raised into the worker's loop.
    """
    wanted = {id(courier) for courier in couriers}
    try:
        for held in take_from(consumer.timer, lambda request: id(request) in wanted):
            consumer.qos.decrement_eventually()
            state.task_ready(held.request)
            held.request.acknowledge()
    except Exception:
        logger.exception("Couriers whose calls have begun are held until their time has come.")


class HeldRequest(NamedTuple):
    """A message that was in a worker's timer: its time (monotonic), and what was to be done then."""

    request: Any
    when: float
    do: Callable[..., Any]
    args: tuple[Any, ...]


def take_from(timer: Any, is_wanted: Callable[[Any], bool]) -> list[HeldRequest]:
    """Take what is to be done with some messages out of a timer.

    A timer's queue has entries, or greenlets; a timer with a thread of its own has a lock.
    """
    taken = []
    with getattr(timer, "mutex", nullcontext()):
        for waiting in list(timer.queue):
            entry = waiting.entry
            if not entry.args or entry.canceled:
                continue
            request = entry.args[0]
            if not is_wanted(request) or request in state.reserved_requests:
                continue
            taken.append(HeldRequest(request, waiting.eta, entry.fun, entry.args))
            timer.cancel(waiting if hasattr(waiting, "cancel") else entry)
            entry.args = ()  # it may stay where it is until its time has come
    return taken
