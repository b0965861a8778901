"""The live terms of tasks that this process knows: a worker's parent reads them, a delivery brings them."""

from __future__ import annotations

from collections.abc import Mapping

import redis
from celery import Celery

from celery_setnx.lock.live import live_terms_of_tasks
from celery_setnx.lock.names import scope_and_digest
from celery_setnx.options import settings_of

_KNOWN = "_setnx_live_terms"


def live_terms_at(app: Celery, key: str) -> str:
    """The live terms of the task whose lock has this Redis key; nothing if none are known here."""
    known = app.__dict__.get(_KNOWN)
    return known.get(scope_and_digest(key)[0], "") if known else ""


def learn(app: Celery, scope: str, text: str) -> None:
    """Note the live terms of one scope, as a delivery has brought them."""
    if text or _KNOWN in app.__dict__:
        app.__dict__[_KNOWN] = {**app.__dict__.get(_KNOWN, {}), scope: text}


def read_live_terms(app: Celery, client: redis.Redis) -> list[str]:
    """Read the live terms of all tasks: the scopes of which they have changed."""
    found, before = live_terms_of_tasks(client, settings_of(app).prefix), app.__dict__.get(_KNOWN, {})
    app.__dict__[_KNOWN] = found
    return [scope for scope in {**before, **found} if before.get(scope, "") != found.get(scope, "")]


def known_live_terms(app: Celery) -> Mapping[str, str]:
    """The live terms of all tasks that are known here, by scope."""
    known: Mapping[str, str] = app.__dict__.get(_KNOWN, {})
    return known
