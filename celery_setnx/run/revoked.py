"""Which calls a worker was told to revoke lately: one that waits is to end when its line is looked at."""

from __future__ import annotations

import time
from collections.abc import Collection
from contextlib import suppress

from celery.worker.state import revoked as revoked_tasks

from celery_setnx.call.message import id_of

_LATELY_S = 60.0  # every line that somebody waits in is looked at every half a minute
_ROUND_S = 2.0


class RevokedLately:
    """Ids of tasks that a worker was told to revoke since every line was looked at.

    There may be 50,000 of them, and ten looks at a line in a second: in a round of two seconds they are
    gathered once, and each line is asked about them once. What was asked is forgotten with its round.
    """

    def __init__(self) -> None:
        self._seen: dict[str, float] = {}
        self._next_round_at = 0.0
        self._lately: Collection[str] = frozenset()
        self._asked: set[str] = set()

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._seen

    def to_ask(self, key: str) -> Collection[str]:
        """Those that the line of a lock is to be asked about: none if it was, in this round."""
        now = time.monotonic()
        if now >= self._next_round_at:
            self._next_round_at, self._asked = now + _ROUND_S, set()
            self._gather(now)
        if not self._lately or key in self._asked:
            return ()
        self._asked.add(key)
        return self._lately

    def _gather(self, now: float) -> None:
        with suppress(RuntimeError):  # changed by the main thread meanwhile
            given = [id_of(task_id) for task_id in revoked_tasks]  # any: who may revoke may name anything
            self._seen = {task_id: self._seen.get(task_id, now) for task_id in given if task_id}
        self._lately = frozenset(task_id for task_id, seen in self._seen.items() if now - seen < _LATELY_S)
