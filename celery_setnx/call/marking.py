"""The marks of calls that are being published, one or many: how they are taken, last longer, or are freed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from celery import Celery

from celery_setnx.call.away import Error, extend_unless_away, free_unless_away, mark_unless_away
from celery_setnx.call.back import seconds_until
from celery_setnx.call.guard import Guard
from celery_setnx.call.later import when_sent, will_not_be_sent
from celery_setnx.call.message import Call
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.lock.marks import Mark, MarkReply, extend, grace_s
from celery_setnx.log import say_loudly
from celery_setnx.options import Options


class Marking:
    """The marks of calls that are published: they last for the lease if those are sent, and else are freed.

    Where calls are not sent at once, each mark waits for its message. `complain` hears what goes wrong, and
    of what: a call that is to be sent (""), "was sent" or "was not sent".
    """

    def __init__(
        self,
        guard: Guard,
        options: Options,
        lease: float,
        *,
        at_once: bool,
        complain: Callable[[Error, str], None],
    ) -> None:
        self.sent: list[Any] = []  # calls, or whatever has their `task_id`
        self._guard, self._options, self._lease = guard, options, lease
        self._at_once, self._complain = at_once, complain
        self._taken: list[Mark] = []

    def take(self, calls: Sequence[Call]) -> list[tuple[Call, MarkReply | None]]:
        """Mark the keys of calls: for each what its header says from now on, and what became of its mark.

        None if Redis cannot be asked: it is sent so. A refusal is raised.
        """
        options, lease = self._options, grace_s(self._lease)
        terms: dict[str, Any] = {"dedupe": options.asks, "lease": lease}
        marks = [Mark(call.key, call.task_id) for call in calls]
        found = mark_unless_away(client_for(self._guard.app), marks, **terms)
        for mark, each in zip(marks, found):
            if isinstance(each, MarkReply) and not each.is_duplicate:
                self._taken.append(mark)
                if not self._at_once:
                    when_sent(mark.task_id, partial(self._extend, [mark]))
        return [self._told(call, each) for call, each in zip(calls, found)]

    def _told(self, call: Call, found: MarkReply | Error) -> tuple[Call, MarkReply | None]:
        if isinstance(found, LockUnavailable):  # also if it is refused until somebody mends that
            self._say(found, "")
            return call._replace(unasked=bool(self._options.dedupe_for)), None
        if isinstance(found, LockRefused):
            raise found
        return call if found.is_duplicate else call._replace(marked=True), found

    def __enter__(self) -> Marking:
        return self

    def __exit__(self, *_exc: object) -> None:
        sent = {call.task_id for call in self.sent}
        unsent = [mark for mark in self._taken if mark.task_id not in sent]
        if self._at_once:
            self._extend([mark for mark in self._taken if mark.task_id in sent])
        for mark in unsent:
            will_not_be_sent(mark.task_id)
        if unsent and (error := free_unless_away(client_for(self._guard.app), unsent)):
            self._say(error, "was not sent")

    def _extend(self, marks: Sequence[Mark]) -> None:
        """Keep marks for the lease. Nobody waits for the reply about a single one."""
        if not marks:  # nor may there be a lock server
            return
        client, ask = client_for(self._guard.app), partial(self._ask_to_extend, marks)
        if len(marks) > 1 or not extend(client, marks[0], self._lease, failed=ask):
            ask()

    def _ask_to_extend(self, marks: Sequence[Mark]) -> None:
        if error := extend_unless_away(client_for(self._guard.app), marks, self._lease):
            self._say(error, "was sent")

    def _say(self, error: Error, what: str) -> None:
        say_loudly(error)
        self._complain(error, what)


def mark_lease_s(app: Celery, options: Options, given: Mapping[str, Any], expires: Any = None) -> float:
    """Seconds for which a sent call's mark lasts: the queue lease beyond its eta, but not past its expiry."""
    begins = seconds_until(app, given.get("countdown") or given.get("eta") or 0.0)
    lease = options.queue_lease + max(0.0, begins)
    ends = given.get("expires", expires)
    return lease if ends is None else min(lease, max(0.0, seconds_until(app, ends)))
