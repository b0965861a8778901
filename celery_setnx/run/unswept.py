"""Lines that no worker sweeps, because those that come now name their broker or their prefix otherwise."""

from __future__ import annotations

import time
from typing import Any

from celery import Celery

from celery_setnx.call.broker import broker_of
from celery_setnx.exceptions import LockRefused, SetnxError
from celery_setnx.lock.line import DueLines, known_lines, note_lines, unswept
from celery_setnx.lock.names import lines_name
from celery_setnx.log import Log, say_loudly
from celery_setnx.options import settings_of

logger = Log("celery_setnx")

_EVERY_S = 10.0
_REFUSED_S = 60.0
_OTHER_PREFIX = (
    "Calls wait for %s, and no worker looks at their line: their setnx_prefix is %r, and this "
    "worker has %r. Give all workers and publishers the same one; until then these calls wait for their "
    "couriers."
)
_OTHER_BROKER = (
    "Calls wait for %s, and no worker of their broker, %r, looks at their line. If that is this worker's "
    "broker, %r, by another name, set setnx_broker to the same text for all its workers; until then these "
    "calls wait for their couriers. If it is another broker, start its workers."
)


class Unswept:
    """Warns, once for each, of lines that are like a worker's own but for a name, if nobody looks at them."""

    def __init__(self) -> None:
        self._next = 0.0
        self._told: set[tuple[str, str]] = set()

    def look(self, app: Celery, client: Any, claimed: DueLines) -> None:
        """Note the worker's own lines, and look at others. Nothing is raised: the sweep does not need it."""
        if time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _EVERY_S
        try:
            self._look(app, client, claimed)
        except (SetnxError, ValueError) as error:
            say_loudly(error)
            logger.info("It is not known whether there are lines that no worker sweeps: %s", error)
            if isinstance(error, LockRefused):  # by an ACL: until somebody mends that
                self._next = time.monotonic() + _REFUSED_S

    def _look(self, app: Celery, client: Any, claimed: DueLines) -> None:
        own = settings_of(app).prefix, broker_of(app)
        note_lines(client, *own)
        for prefix, broker in known_lines(client):
            is_like = (prefix == own[0]) != (broker == own[1])  # with neither alike they are another app's
            if not is_like or (prefix, broker) in self._told:
                continue
            keys = unswept(client, lines_name(prefix, broker), claimed)
            if keys:
                self._told.add((prefix, broker))
                if broker == own[1]:
                    logger.warning(_OTHER_PREFIX, keys[0], prefix, own[0])
                else:
                    logger.warning(_OTHER_BROKER, keys[0], broker, own[1])
