"""Celery events of what happens to locks, for Flower and `celery events`; sent only where events are on.

That is known to a worker's parent, which says so in every delivery. Nothing is connected before the first
one that says yes, so events that are off cost nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from billiard.exceptions import SoftTimeLimitExceeded
from celery import Celery
from celery.app.task import Task
from celery.utils.dispatch import Signal

from celery_setnx import signals
from celery_setnx.call.guard import is_singleton
from celery_setnx.forks import between_forks
from celery_setnx.lock.record import Holder
from celery_setnx.log import Log
from celery_setnx.threads import start_real_thread

logger = Log("celery_setnx")

_SILENCE_S = 30.0
_ACQUIRE_S = 1.0
# Celery's own default is to try until the broker is back, which the task would feel.
_ONCE_MORE = {"max_retries": 1, "interval_start": 0, "interval_step": 0, "interval_max": 0}

_Send = Callable[[Celery, str, str, dict[str, Any]], None]
_hostnames: WeakKeyDictionary[Celery, str] = WeakKeyDictionary()
_silent_until = 0.0


def follow(app: Celery, hostname: str, *, wanted: bool) -> None:
    """Send events of an app's locks from this process from now on, or no longer."""
    if not wanted:
        if _hostnames:
            _hostnames.pop(app, None)
        return
    if not _hostnames:
        for of, (type_, send) in _RELAYED.items():  # again is harmless
            of.connect(partial(_relay, type_, send), weak=False, dispatch_uid=f"celery_setnx.{type_}")
    _hostnames[app] = hostname


def _relay(type_: str, send: _Send, sender: Any, task_id: str, signal: Any, **details: Any) -> None:
    hostname = _hostname_of(sender)
    if hostname is not None and details.get("outcome", "freed") == "freed":
        fields = {name: v.as_dict() if isinstance(v, Holder) else v for name, v in details.items()}
        send(sender.app, hostname, type_, {"uuid": task_id, "name": sender.name, **fields})


def _hostname_of(sender: Any) -> str | None:
    """The worker's name, if events of this task are to be sent.

    Not those of a function under another base class: its deliveries do not say whether events are on.
    """
    if not isinstance(sender, Task) or not is_singleton(sender) or not sender.send_events:
        return None
    return _hostnames.get(sender.app)


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

    start_real_thread(send_between_forks, "celery_setnx-event")


def _publish(
    app: Celery, hostname: str, type_: str, fields: dict[str, Any], connection: Any, producer: Any
) -> None:
    connection.ensure_connection(**_ONCE_MORE)
    offline = {"enabled": False, "buffer_while_offline": False}
    dispatcher = app.events.Dispatcher(connection, hostname=hostname, **offline)
    dispatcher.publish(type_, fields, producer, retry=True, retry_policy=_ONCE_MORE)


def _survive(send: Callable[[], None], type_: str, fields: Mapping[str, Any]) -> None:
    """Send unless the broker has just failed: a task must not wait for its every event."""
    global _silent_until
    if time.monotonic() < _silent_until:
        return
    try:
        send()
    except SoftTimeLimitExceeded:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the transport raises
        _silent_until = time.monotonic() + _SILENCE_S
        what = f"{type_} of {fields['name']}[{fields['uuid']}] ({fields['key']})"
        text = "The event %s was not sent, and no event is tried for %g s. The task is not affected: %s"
        logger.warning(text, what, _SILENCE_S, repr(error))


# Those that are sent apart come from the keeper's thread or the parent's watch, which must not wait.
_RELAYED: Mapping[Signal, tuple[str, _Send]] = {
    signals.lock_conflict: ("task-lock-conflict", _send),
    signals.lock_waiting: ("task-lock-waiting", _send),
    signals.lock_woken: ("task-lock-woken", _send),
    signals.lock_taken_over: ("task-lock-taken-over", _send),
    signals.call_superseded: ("task-lock-superseded", _send),
    signals.uniqueness_lapsed: ("task-lock-lapsed", _send),
    signals.lock_lost: ("task-lock-lost", _send_apart),
    signals.lock_released: ("task-lock-freed", _send_apart),
}
