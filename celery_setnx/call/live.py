"""The live terms of tasks that this process knows: a worker's parent reads them, a delivery brings them."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import NamedTuple

import redis
from celery import Celery

from celery_setnx.connection import client_for
from celery_setnx.exceptions import SetnxError
from celery_setnx.lock.live import live_terms_of_tasks
from celery_setnx.lock.names import live_terms_name, scope_and_digest
from celery_setnx.lock.scripts import REDIS_ERRORS, translated
from celery_setnx.log import Log
from celery_setnx.options import settings_of

logger = Log("celery_setnx")

_KNOWN = "_setnx_live_terms"
FRESH_S = 2.0  # for which a process goes by what it knows; a worker's parent reads as often


class KnownTerms(NamedTuple):
    """What a process knows of the live terms of tasks.

    Attributes:
        texts: The live terms, by scope. Defaults to none.
        read_at: When they were read, by the machine's monotonic clock. Defaults to never.
    """

    texts: Mapping[str, str] = {}
    read_at: float = -math.inf


def known_live_terms(app: Celery) -> KnownTerms:
    """The live terms of all tasks that are known here."""
    known: KnownTerms = app.__dict__.get(_KNOWN) or KnownTerms()
    return known


def live_terms_at(app: Celery, key: str) -> str:
    """The live terms of the task whose lock has this Redis key; nothing if none are known here."""
    texts = known_live_terms(app).texts
    return texts.get(scope_and_digest(key)[0], "") if texts else ""


def learn(app: Celery, scope: str, text: str, read_at: float) -> None:
    """Note the live terms of one scope, as a delivery has brought them; what was read later stays.

    They are read anew if the delivery has waited in its worker: for a process of the pool, or for its time.
    """
    known, now = known_live_terms(app), time.monotonic()
    if read_at > known.read_at:
        app.__dict__[_KNOWN] = known = known._replace(texts={**known.texts, scope: text})
    if max(known.read_at, read_at) < now - FRESH_S:
        try:
            read_live_terms(app, client_for(app))
        except SetnxError as error:  # nor asked for again at once
            logger.debug("The live terms of %s are not known anew: %s", scope, error)
            app.__dict__[_KNOWN] = known._replace(read_at=now)


def read_live_terms(app: Celery, client: redis.Redis) -> Mapping[str, str]:
    """Read the live terms of all tasks, by scope."""
    now, prefix = time.monotonic(), settings_of(app).prefix
    try:
        known = KnownTerms(live_terms_of_tasks(client, prefix), now)
    except REDIS_ERRORS as error:
        raise translated(live_terms_name(prefix), error) from error
    app.__dict__[_KNOWN] = known
    return known.texts
