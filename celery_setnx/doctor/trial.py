"""What a lock needs of its server, tried: when a worker starts, and when the doctor examines."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import redis
from celery import bootsteps

from celery_setnx.call.switches import DISABLED, runs_plainly
from celery_setnx.connection import client_for
from celery_setnx.doctor.app import findings_at_start
from celery_setnx.exceptions import LockLost, LockRefused, LockUnavailable
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.line import (
    LineEntry,
    claim,
    leave,
    note_due,
    park,
    settle,
    successor_of,
)
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.marks import Mark, extend_all, free_all, mark_all
from celery_setnx.lock.names import (
    due_names,
    line_names,
    mark_name,
    newest_name,
    permit_names,
    permits_name,
    receipt_name,
    record_name,
    starts_name,
    successor_name,
    ticket_name,
)
from celery_setnx.lock.newest import AT_ONCE, Reservation, Wanted, replace_all, reserve_all
from celery_setnx.lock.receipt import has_receipt, write_receipt
from celery_setnx.lock.record import ORIGINAL, task_token
from celery_setnx.lock.scripts import REDIS_ERRORS, is_cluster, reply_of_each, reply_to
from celery_setnx.lock.verbs import serve
from celery_setnx.lock.wire import hang_up
from celery_setnx.log import Log
from celery_setnx.options import settings_of
from celery_setnx.task import refuse

logger = Log("celery_setnx")

TRIAL = "celery_setnx.check"
"""The scope of the locks that are only tried."""


class LockServerCheck(bootsteps.StartStopStep):  # type: ignore[misc]
    """Tries every verb, a take-over included, when a worker starts: before the first task needs them. And the
    result backend, if a task joins another's result.
    """

    def __init__(self, worker: Any, **options: Any) -> None:
        """Refuse a wrong option. Before the pool forks: its processes have what is settled here."""
        super().__init__(worker, **options)
        refuse(worker.app)

    def start(self, worker: Any) -> None:
        """Warn of an unreachable or evicting server; refuse to start on one that forbids a command."""
        app = worker.app
        if DISABLED.is_on(app):
            return
        for task in app.tasks.values():
            guard = getattr(task, "_guard", None)
            if guard is not None:
                guard.check_backend(guard.options)
        for found in findings_at_start(app):
            logger.warning("%s", " ".join(filter(None, (found.what, found.why, found.do))))
        if runs_plainly(app):
            return
        client = client_for(app)
        try:
            try_lock(client, trial_name(settings_of(app).prefix))
            memories = reply_of_each(client, "INFO", "memory")
        except LockRefused as error:
            logger.critical("This worker cannot lock. %s", error)
            raise
        except LockUnavailable as error:
            logger.warning("%s Until it answers, tasks do as their on_redis_error says.", error)
        except LockLost as error:
            logger.warning(
                "%s This is only the lock of the worker's check, but the server forgets locks.", error
            )
        except REDIS_ERRORS:
            return  # INFO is not among what the lock needs
        else:
            for memory in memories:
                _warn_of_eviction(memory)
        finally:
            hang_up(client)  # it dials again if a mark, or a success, is to be freed


def trial_name(prefix: str) -> str:
    """The name of a lock that nobody else uses."""
    return f"{prefix}:{{{TRIAL}:{uuid.uuid4().hex}}}"


def try_lock(client: redis.Redis, name: str) -> None:
    """Try what a task does with its lock: a take-over, a renewal, a line, permits, a pace, a mark. Nothing
    stays.
    """
    lines = f"{name.partition(':{')[0]}:lines:check"
    try:
        _try_verbs(client, name)
        _try_sweep(client, lines, name)
    except Exception as error:
        # A server that does not answer would delete nothing: what there is lapses.
        if isinstance(error, LockRefused) or not isinstance(error, LockUnavailable):
            _clean_up(client, name, lines)
        raise
    _clean_up(client, name, lines)


def _try_verbs(client: redis.Redis, name: str) -> None:
    # To be taken over. Nobody relies on it, so no time passes here: its reply may be later than its lease.
    SetnxLock(client, name, lease=0.1, clock=lambda: 0.0).acquire()
    lock = SetnxLock(client, name, line=True)
    outcome = lock.acquire(wait=5.0)
    if outcome.lock is not None:
        outcome.lock.renew()
        _try_line(client, lock, outcome.lock)
    _try_permits(client, name)
    _try_marks(client, name)


def _try_line(client: redis.Redis, lock: SetnxLock, held: HeldLock) -> None:
    """Hand a lock over; acquire and release do without what only the line needs."""
    first = LineEntry(held.key, "check", 0, remember=5.0)
    park(client, first, copy=ORIGINAL, since=0.0, call="")
    park(client, first, since=0.0, call="")  # as its courier does
    reply_to(client, "ZRANGE", line_names(held.key)[0], "0", "0")  # as a sweep does
    another = SetnxLock(client, held.key, line=True)
    if not another.acquire().waiters:
        raise LockRefused(held.key, "its line cannot be read: ZCOUNT is forbidden")
    held.release()
    if not lock.turns:
        raise LockRefused(held.key, "a release cannot hand it over: ZRANGEBYSCORE is forbidden")
    serve(another)
    if another.acquire(token=task_token(first.task_id, 0, "0")).acquired:
        another.release()
    leave(client, first, copy=ORIGINAL)


def _try_permits(client: redis.Redis, name: str) -> None:
    """Hold both permits of a lock that has two and a pace, renew them and give them back."""
    lock = SetnxLock(client, name, limit=2, rate=(2, 5.0))
    held = [outcome.lock for outcome in (lock.acquire(), lock.acquire()) if outcome.lock is not None]
    for one in held:
        one.renew()
    lock.look()
    for one in held:
        one.take_start_back()
        one.release()


def _try_sweep(client: redis.Redis, lines: str, key: str) -> None:
    """Note a line, and look at it."""
    note_due(client, lines, "check", key, within=0.0)
    claimed = claim(client, lines, ["check"])
    settle(client, lines, "check", key, claimed, within=None)
    successor_of(client, LineEntry(key, "check", 0, remember=5.0), of="check")


def _try_marks(client: redis.Redis, key: str) -> None:
    """Mark, extend and free; and note that a call has ended."""
    mark = Mark(key, "check")
    (marked,) = mark_all(client, [mark], dedupe="until_done", lease=5.0)
    for error in (marked, extend_all(client, [mark], [5.0]), free_all(client, [mark])):
        if isinstance(error, (LockUnavailable, LockRefused)):
            raise error
    (reserved,) = reserve_all(client, [Wanted(key, "check", "")], debounce=AT_ONCE, lease=5.0, remember=5.0)
    if isinstance(reserved, Reservation):
        newest = Mark(key, "check", reserved.generation)
        for settled in (*replace_all(client, [reserved], 5.0), free_all(client, [newest])):
            if settled is not None:
                raise settled
    write_receipt(client, _receipt_of(key), keep_s=5.0)
    has_receipt(client, _receipt_of(key))


def _receipt_of(key: str) -> str:
    return receipt_name(key.partition(":{")[0], TRIAL, key[-33:-1], "", 0)


def _clean_up(client: redis.Redis, key: str, lines: str) -> None:
    """Delete what a trial has left, or let it lapse at once where that is forbidden."""
    beside = (record_name(key), mark_name(key), newest_name(key))
    calls = (ticket_name(key, "check"), successor_name(key, "check"))
    permits = (*permit_names(key, 1), permits_name(key), starts_name(key), _receipt_of(key))
    due = due_names(lines, "check", in_cluster=is_cluster(client))
    with suppress(*REDIS_ERRORS):
        for name in (key, *beside, *calls, *line_names(key), *permits, *due):
            try:
                client.delete(name)
            except redis.ResponseError:
                client.pexpire(name, 1)


def _warn_of_eviction(memory: Mapping[str, Any]) -> None:
    policy = memory.get("maxmemory_policy", "noeviction")
    if memory.get("maxmemory") and policy != "noeviction":
        logger.warning(
            "The lock server evicts keys when its memory is full (maxmemory-policy %s), so a running task "
            "may lose its lock. Set maxmemory-policy noeviction, or point setnx_url at another Redis.",
            policy,
        )
