"""Whether a call has ended, by its stored result, whatever the lock server says.

A lock server may come back with older data: those of a snapshot, or of a replica that lags. Then a mark, or a
lock that is held for a retry, may be that of a call which has run since.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from datetime import timezone
from typing import Any
from weakref import WeakKeyDictionary

import redis
from billiard.exceptions import Terminated, TimeLimitExceeded, WorkerLostError
from celery import Celery
from celery.states import READY_STATES
from celery.utils.time import maybe_iso8601

from celery_setnx.call.back import known_result
from celery_setnx.call.message import Call, has_random_id
from celery_setnx.connection import client_for
from celery_setnx.exceptions import SetnxError
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.marks import Mark, free_if_marked
from celery_setnx.log import Log, fields

logger = Log("celery_setnx")

_A_WAIT_S = 1.0  # a result backend that takes longer is left alone for a while: a publisher waits for it
_PAUSE_S = 60.0
_asked_again_at: WeakKeyDictionary[Celery, float] = WeakKeyDictionary()

# What ends a process, which may have sent its retry.
DEATHS = (WorkerLostError, Terminated, TimeLimitExceeded, SystemExit, KeyboardInterrupt, MemoryError)


def stored_end(
    app: Celery, name: str, task_id: str, *, its_own: bool = False, since: float | None = None
) -> Mapping[str, Any]:
    """What is stored of a call that has ended, as SUCCESS, FAILURE or REVOKED; nothing if that is not known.

    It is not known where the task ignores its results, where the id may be another call's as well, because
    its publisher has made it up, where no backend keeps results, or while the backend is left alone. An id
    that is made up is the call's own if it has ended `since` then (Unix seconds), as it was waiting already.

    `its_own`: a delivery asks about its own call, before it runs. Then the id is the call's, and the backend
    is asked whatever the task ignores, and however long it takes.
    """
    task = app._tasks.get(name)
    began = time.monotonic()
    is_made_up = not has_random_id(task_id)
    if not its_own and (
        (is_made_up and since is None)
        or getattr(task, "ignore_result", False)
        or began < _asked_again_at.get(app, 0.0)
    ):
        return {}
    stored = known_result((task or app).backend, task_id, Call(name, task_id))
    if time.monotonic() - began >= _A_WAIT_S:
        _asked_again_at[app] = time.monotonic() + _PAUSE_S
    if is_made_up and since is not None and _stored_at(stored) < since:
        return {}
    return stored if stored.get("status") in READY_STATES else {}


def _stored_at(stored: Mapping[str, Any]) -> float:
    """When a result was stored, in Unix seconds; 0 if its backend does not say."""
    at = stored.get("date_done")
    try:
        at = maybe_iso8601(at)
        return float(at.replace(tzinfo=at.tzinfo or timezone.utc).timestamp())
    except (AttributeError, TypeError, ValueError):
        return 0.0


def free_ended(app: Celery, task: str, mark: Mark, state: str, client: redis.Redis | None = None) -> bool:
    """Free the mark of a call that is `queued`, or the lock that is `held_for_retry` for it, if it has ended.

    True if it was there still, and is freed: nothing that names another call is touched.
    """
    if state not in ("queued", "held_for_retry"):
        return False
    key, task_id = mark.key, mark.task_id
    stored = stored_end(app, task, task_id)
    if not stored or isinstance(stored.get("result"), DEATHS):
        return False
    try:
        is_freed = _free(client or client_for(app), mark, state)
    except SetnxError as error:
        text = "%s stays %s by task %s, which has ended: %s"
        logger.info(text, key, state, task_id, error, extra=fields(task=task, task_id=task_id, key=key))
        return False
    if is_freed:
        text = "%s is freed: it was %s by task %s, which has ended. Redis may have come back with older data."
        logger.warning(text, key, state, task_id, extra=fields(task=task, task_id=task_id, key=key))
    return is_freed


def _free(client: redis.Redis, mark: Mark, state: str) -> bool:
    if state == "queued":
        return free_if_marked(client, mark)
    return SetnxLock(client, mark.key, line=True).free_held(mark.task_id)
