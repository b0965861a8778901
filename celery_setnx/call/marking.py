"""The marks of calls that are being published, one or many: how they are taken, last longer, or are freed.

Or, of calls that replace those before them, their generations: how they are reserved, and count once they are
sent.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from celery import Celery

from celery_setnx.call.away import (
    Error,
    extend_unless_away,
    free_unless_away,
    mark_unless_away,
    replace_unless_away,
    reserve_unless_away,
)
from celery_setnx.call.back import remember_s, seconds_until, visibility_timeout_s
from celery_setnx.call.delay import waits_in_broker
from celery_setnx.call.guard import Guard
from celery_setnx.call.later import when_sent, will_not_be_sent
from celery_setnx.call.message import Call
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockRefused, LockUnavailable, OptionError
from celery_setnx.lock.marks import Mark, MarkReply, extend, grace_s
from celery_setnx.lock.newest import AT_ONCE, Debounce, Reservation, Wanted, replace
from celery_setnx.lock.record import US
from celery_setnx.log import say_loudly
from celery_setnx.options import Options

Found = MarkReply | Reservation


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
        self._taken: list[Any] = []  # marks, or what is reserved

    def take(self, calls: Sequence[Call], digests: Sequence[str]) -> list[tuple[Call, Found | None]]:
        """Mark the keys of calls: for each what its header says from now on, and what became of its mark.

        `digests` are those of all their arguments. None if Redis cannot be asked: it is sent so. A refusal is
        raised.
        """
        found = self._asked(calls, digests)
        for call, each in zip(calls, found):
            if isinstance(each, Found) and not each.is_duplicate:
                taken = self._kept(call, each)
                self._taken.append(taken)
                if not self._at_once:
                    when_sent(call.task_id, partial(self._extend, [taken]))
        return [self._told(call, each) for call, each in zip(calls, found)]

    def delayed(self, call: Call, found: Found | None) -> tuple[Call, dict[str, Any]]:
        """A call that is to be sent, and the options of `apply_async` that have it wait."""
        return call, {}

    def _asked(self, calls: Sequence[Call], digests: Sequence[str]) -> Sequence[Found | Error]:
        marks = [Mark(call.key, call.task_id) for call in calls]
        terms: dict[str, Any] = {"dedupe": self._options.asks, "lease": grace_s(self._lease)}
        return mark_unless_away(client_for(self._guard.app), marks, **terms)

    def _kept(self, call: Call, found: Any) -> Any:
        return Mark(call.key, call.task_id)

    def _told(self, call: Call, found: Found | Error) -> tuple[Call, Found | None]:
        if isinstance(found, LockUnavailable):  # also if it is refused until somebody mends that
            self._say(found, "")
            return self._untold(call), None
        if isinstance(found, LockRefused):
            raise found
        return call if found.is_duplicate else self._marked(call, found), found

    def _untold(self, call: Call) -> Call:
        return call._replace(unasked=bool(self._options.dedupe_for))

    def _marked(self, call: Call, found: Any) -> Call:
        return call._replace(marked=True)

    def __enter__(self) -> Marking:
        return self

    def __exit__(self, *_exc: object) -> None:
        sent = {call.task_id for call in self.sent}
        unsent = [mark for mark in self._taken if mark.task_id not in sent]
        if self._at_once:
            self._extend([mark for mark in self._taken if mark.task_id in sent])
        for mark in unsent:
            will_not_be_sent(mark.task_id)
        if unsent and (error := self._free(unsent)):
            self._say(error, "was not sent")

    def _extend(self, marks: Sequence[Any]) -> None:
        """Keep marks for the lease. Nobody waits for the reply about a single one."""
        if not marks:  # nor may there be a lock server
            return
        client, ask = client_for(self._guard.app), partial(self._ask_to_extend, marks)
        if len(marks) > 1 or not self._tell(client, marks[0], ask):
            ask()

    def _tell(self, client: Any, mark: Any, ask: Callable[[], None]) -> bool:
        return extend(client, mark, self._lease, failed=ask)

    def _ask_to_extend(self, marks: Sequence[Any]) -> None:
        if error := self._keep(marks):
            self._say(error, "was sent")

    def _keep(self, marks: Sequence[Any]) -> Error | None:
        return extend_unless_away(client_for(self._guard.app), marks, self._lease)

    def _free(self, marks: Sequence[Any]) -> Error | None:
        return free_unless_away(client_for(self._guard.app), marks)

    def _say(self, error: Error, what: str) -> None:
        say_loudly(error)
        self._complain(error, what)


class Replacing(Marking):
    """The generations of calls that replace those before them: each counts once its call is sent.

    Without Redis the publisher's clock gives the generation, and it counts when its call starts.
    """

    def __init__(self, guard: Guard, options: Options, lease: float, **told: Any) -> None:
        super().__init__(guard, options, remember_s(guard.app, options), **told)
        self._debounce = debounce_of(options)

    def delayed(self, call: Call, found: Found | None) -> tuple[Call, dict[str, Any]]:
        """By a countdown; on AMQP its worker has it wait in the broker, beside the queue that it came by."""
        if not self._debounce.quiet_s:
            return call, {}
        wait_s = found.wait_s if isinstance(found, Reservation) else self._debounce.quiet_s
        if not wait_s:
            return call, {}
        if waits_in_broker(self._guard.app):
            return call._replace(due=time.time() + wait_s), {}
        return call, {"countdown": wait_s}

    def _asked(self, calls: Sequence[Call], digests: Sequence[str]) -> Sequence[Found | Error]:
        wanted = [Wanted(call.key, call.task_id, digest) for call, digest in zip(calls, digests)]
        terms: dict[str, Any] = {"debounce": self._debounce, "remember": self._lease}
        terms["lease"] = self._options.queue_lease
        return reserve_unless_away(client_for(self._guard.app), wanted, **terms)

    def _kept(self, call: Call, found: Any) -> Any:
        return found

    def _untold(self, call: Call) -> Call:
        return call._replace(generation=round(time.time() * US))

    def _marked(self, call: Call, found: Any) -> Call:
        return call._replace(generation=found.generation, leads=found.leads)

    def _tell(self, client: Any, mark: Any, ask: Callable[[], None]) -> bool:
        return replace(client, mark, self._lease, failed=ask)

    def _keep(self, marks: Sequence[Any]) -> Error | None:
        return replace_unless_away(client_for(self._guard.app), marks, self._lease)

    def _free(self, marks: Sequence[Any]) -> Error | None:
        return None  # what is reserved, and not sent, replaces nothing


def debounce_of(options: Options) -> Debounce:
    """How long calls with these options wait for newer ones."""
    if options.debounce is None:
        return AT_ONCE
    return Debounce(options.debounce, options.debounce_max, options.debounce_leading)


def marking_of(options: Options) -> type[Marking]:
    """How calls with these options are marked."""
    return Replacing if options.replaces else Marking


def refuse_times(guard: Guard, given: Mapping[str, Any], expires: Any = None) -> None:
    """Refuse to put a call off, or to let it expire, that replaces those before it."""
    wrong = [name for name in ("countdown", "eta") if given.get(name)]
    wrong += ["expires"] if given.get("expires", expires) is not None else []
    for name in wrong:
        advice = "" if name == "expires" else ", or use debounce="
        raise OptionError(
            f"a call of {guard.task} has {name}, and on_duplicate='replace': it would replace older calls, "
            f"and not run for a while, or ever; leave out {name}{advice}"
        )


def refuse_long_debounce(app: Celery, task: str, options: Options) -> None:
    """Refuse calls that wait for so long that the broker might deliver them a second time meanwhile."""
    limit_s = visibility_timeout_s(app)
    if options.debounce is not None and limit_s is not None and options.debounce > limit_s / 4:
        raise OptionError(
            f"debounce of {task} is {options.debounce:g} s, and the broker delivers again after "
            f"{limit_s:g} s (visibility_timeout): make it {limit_s / 4:g} s or less, or raise that"
        )


def mark_lease_s(app: Celery, options: Options, given: Mapping[str, Any], expires: Any = None) -> float:
    """Seconds for which a sent call's mark lasts: the queue lease beyond its eta, but not past its expiry."""
    begins = seconds_until(app, given.get("countdown") or given.get("eta") or 0.0)
    lease = options.queue_lease + max(0.0, begins)
    ends = given.get("expires", expires)
    return lease if ends is None else min(lease, max(0.0, seconds_until(app, ends)))
