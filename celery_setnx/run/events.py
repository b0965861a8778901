"""Celery events of what happens to locks, for Flower and `celery events`; sent only where events are on.

Whether they are on, a worker's parent process knows (`worker -E`, `worker_send_task_events`, or
`celery control enable_events`). It says so in every delivery, and from the first one that says yes the
signals are relayed. Nothing is connected before, so events that are off cost nothing.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery
from celery.app.task import Task
from celery.utils.dispatch import Signal

from celery_setnx.call.guard import is_singleton
from celery_setnx.forks import between_forks
from celery_setnx.lock.keeper import start_real_thread
from celery_setnx.lock.record import Holder
from celery_setnx.signals import (
    lock_conflict,
    lock_lost,
    lock_released,
    lock_taken_over,
    lock_waiting,
    lock_woken,
    uniqueness_lapsed,
)

logger = logging.getLogger("celery_setnx")

_SILENCE_S = 30.0
_ACQUIRE_S = 1.0
# Celery's own default is to try until the broker is back, which the task would feel.
_ONCE_MORE = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}

_hostnames: WeakKeyDictionary[Celery, str] = WeakKeyDictionary()
_silent_until = 0.0


def are_wanted(eventer: Any) -> bool:
    """True if a worker sends task events: its dispatcher is at work for its heartbeat in any case."""
    return bool(eventer and eventer.enabled and (not eventer.groups or "task" in eventer.groups))


def follow(app: Celery, hostname: str, *, wanted: bool) -> None:
    """Send events of an app's locks from this process from now on, or no longer."""
    if not wanted:
        if _hostnames:
            _hostnames.pop(app, None)
        return
    if not _hostnames:
        _connect()
    _hostnames[app] = hostname


def _connect() -> None:
    """Connect the relays; again is harmless."""
    for signal, (type_, is_apart) in _RELAYED.items():
        signal.connect(_relay(type_, is_apart), weak=False, dispatch_uid=f"celery_setnx.{type_}")


def _relay(type_: str, is_apart: bool) -> Callable[..., None]:
    send = _send_apart if is_apart else _send

    def relay(sender: Any, task_id: str, signal: Any = None, **details: Any) -> None:
        hostname = _hostname_of(sender)
        if hostname is None or details.get("outcome", "freed") != "freed":
            return
        fields = {name: _plain(value) for name, value in details.items()}
        send(sender.app, hostname, type_, {"uuid": task_id, "name": sender.name, **fields})

    return relay


# Those that are sent apart come from the keeper's thread or the parent's watch, which must not wait.
_RELAYED: Mapping[Signal, tuple[str, bool]] = {
    lock_conflict: ("task-lock-conflict", False),
    lock_waiting: ("task-lock-waiting", False),
    lock_woken: ("task-lock-woken", False),
    lock_taken_over: ("task-lock-taken-over", False),
    uniqueness_lapsed: ("task-lock-lapsed", False),
    lock_lost: ("task-lock-lost", True),
    lock_released: ("task-lock-freed", True),
}


def _hostname_of(sender: Any) -> str | None:
    """The worker's name, if events of this task are to be sent.

    Not those of a function under another base class: its deliveries do not say whether events are on.
    """
    if not isinstance(sender, Task) or not is_singleton(sender) or not sender.send_events:
        return None
    return _hostnames.get(sender.app)


def _plain(value: Any) -> Any:
    return value.as_dict() if isinstance(value, Holder) else value


def _send(app: Celery, hostname: str, type_: str, fields: dict[str, Any]) -> None:
    """Send from within a task, as Celery sends: by a connection of the app's pool."""

    def send() -> None:
        with app.amqp.producer_pool.acquire(block=True, timeout=_ACQUIRE_S) as producer:
            _publish(app, hostname, type_, fields, producer.connection, producer)

    _survive(send, type_, fields)


def _send_apart(app: Celery, hostname: str, type_: str, fields: dict[str, Any]) -> None:
    """Send in a thread of its own, by a connection that it shares with nobody."""

    def send() -> None:
        with app.connection_for_write() as connection, connection.Producer() as producer:
            _publish(app, hostname, type_, fields, connection, producer)

    def send_between_forks() -> None:
        with between_forks:
            _survive(send, type_, fields)

    start_real_thread(send_between_forks)


def _publish(
    app: Celery, hostname: str, type_: str, fields: dict[str, Any], connection: Any, producer: Any
) -> None:
    connection.ensure_connection(**_ONCE_MORE)
    dispatcher = app.events.Dispatcher(
        connection, hostname=hostname, enabled=False, buffer_while_offline=False
    )
    dispatcher.publish(type_, fields, producer, retry=True, retry_policy=_ONCE_MORE)


def _survive(send: Callable[[], None], type_: str, fields: Mapping[str, Any]) -> None:
    """Send unless the broker has just failed: a task must not wait for its every event."""
    global _silent_until
    if time.monotonic() < _silent_until:
        return
    try:
        send()
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        _silent_until = time.monotonic() + _SILENCE_S
        logger.warning(
            "The event %s of %s[%s] (%s) was not sent, nor is any other for %g s. Its task goes on: %r",
            type_,
            fields["name"],
            fields["uuid"],
            fields["key"],
            _SILENCE_S,
            error,
        )
