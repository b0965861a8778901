"""Whether another call has ended, by its stored result, although the lock server lists it as pending.

A lock server may come back with older data: those of a snapshot, or of a replica that lags. Then a mark, or a
lock that is held for a retry, may be that of a call which has run since.
"""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

import redis
from billiard.exceptions import TimeLimitExceeded, WorkerLostError
from celery import Celery
from celery.states import READY_STATES

from celery_setnx.call.back import known_result
from celery_setnx.call.message import has_random_id
from celery_setnx.connection import client_for
from celery_setnx.exceptions import SetnxError
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.marks import Mark, free_if_marked
from celery_setnx.log import Log, fields

logger = Log("celery_setnx")

_A_WAIT_S = 1.0  # a result backend that takes longer is left alone for a while: a publisher waits for it
_PAUSE_S = 60.0
_asked_again_at: WeakKeyDictionary[Celery, float] = WeakKeyDictionary()

_DEATHS = (WorkerLostError, MemoryError, TimeLimitExceeded)  # of a process that may have sent its retry


def free_ended(
    app: Celery, task: str, key: str, task_id: str | None, state: str, client: redis.Redis | None = None
) -> bool:
    """Free the mark of a call that is `queued`, or the lock that is `held_for_retry` for it, if it has ended.

    True if it was there still, and is freed: nothing that names another call is touched.
    """
    if state not in ("queued", "held_for_retry") or not _has_ended(app, task, task_id or ""):
        return False
    try:
        is_freed = _free(client or client_for(app), key, str(task_id), state)
    except SetnxError as error:
        text = "%s stays %s by task %s, which has ended: %s"
        logger.info(text, key, state, task_id, error, extra=fields(task=task, task_id=task_id, key=key))
        return False
    if is_freed:
        text = "%s was %s by task %s, which has ended. The lock server may have come back with older data."
        logger.warning(text, key, state, task_id, extra=fields(task=task, task_id=task_id, key=key))
    return is_freed


def _free(client: redis.Redis, key: str, task_id: str, state: str) -> bool:
    if state == "queued":
        return free_if_marked(client, Mark(key, task_id))
    return SetnxLock(client, key, line=True).free_held(task_id)


def _has_ended(app: Celery, name: str, task_id: str) -> bool:
    """Whether a call's result says so; not of an id that may be a later call's as well."""
    task = app._tasks.get(name)
    if not has_random_id(task_id) or getattr(task, "ignore_result", False):
        return False
    backend = (task or app).backend
    began = time.monotonic()
    if began < _asked_again_at.get(app, 0.0):
        return False
    stored = known_result(backend, task_id, f"Task {task_id}")
    if time.monotonic() - began >= _A_WAIT_S:
        _asked_again_at[app] = time.monotonic() + _PAUSE_S
    return stored.get("status") in READY_STATES and not isinstance(stored.get("result"), _DEATHS)
