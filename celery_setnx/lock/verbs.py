"""The verbs of a lock: for each script in `lua/` that is about one, the function that runs it.

What a function takes and returns is its script's contract: here seconds become the scripts' microseconds and
milliseconds, and replies become values with names. `look.py`, `line.py` and `marks.py` have the verbs that
are about their values; those of a beat and of tests stand with their one caller.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal, NamedTuple

import redis

from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.lock.names import (
    done_name,
    line_names,
    mark_name,
    newest_name,
    permit_names,
    permits_name,
    starts_name,
    terms_name,
    ticket_name,
)
from celery_setnx.lock.record import (
    ORIGINAL,
    PLAIN,
    UNKNOWN,
    US,
    Heir,
    Holder,
    ServeReply,
    Terms,
    Turn,
    holder_of,
    task_of,
    turn_of,
)
from celery_setnx.lock.scripts import Call, PermitScript, Script
from celery_setnx.lock.wire import Failed

ACQUIRE, SERVE, FREE = PermitScript("acquire"), PermitScript("serve"), PermitScript("free")
RENEW, RELEASE, HOLD, IF_SAME = Script("renew"), Script("release"), Script("hold"), Script("if_same")

HAND_OVER_S = 10.0
"""Seconds for which a lock is kept at most for the task that is woken for it."""

_JSON = json.JSONEncoder(separators=(",", ":"))
_REMEMBER_RELEASE_MS = 60_000
HAND_OVER_US = round(HAND_OVER_S * US)

Error = LockUnavailable | LockRefused
Released = Literal["released", "resting", "repaired", "held_for_retry", "gone", "lost"]


class NamedLock:
    """A lock as its verbs and its holders know it: the names of its keys, its times and its terms.

    Attributes:
        record: Redis key of its record.
        line: Those of its line and of the calls there; none for a plain lock without a line.
        wakes: Whether the task that it is handed to will be woken.
        lease_us, retention_ms: Its times, as scripts take them.
    """

    client: redis.Redis
    clock: Callable[[], float]
    name: str
    record: str
    line: tuple[str, ...]
    mark: str | None
    wakes: bool
    info: Mapping[str, Any] | str
    lease_s: float
    retention_s: float
    lease_us: int
    retention_ms: int
    limit: int
    terms: Terms
    turns: list[Turn]

    def keys_of(self, permit: int) -> tuple[str, ...]:
        """The keys of one permit; of one beside the first also what is known of all."""
        if permit:
            return (*permit_names(self.name, permit), permits_name(self.name))
        return (self.name, self.record)


class Permit(NamedTuple):
    """One permit of a lock, and the token under which somebody has it."""

    lock: NamedLock
    number: int
    token: str


class Generation(NamedTuple):
    """The place of a call among those of its key that replace each other.

    Attributes:
        number: It is larger than that of each call before. Defaults to 0: it replaces none.
        bound_s: Seconds after which it may start though newer calls were sent, if none has started meanwhile.
        leads: Whether only a newer call that has started supersedes it. Defaults to False.
        remember_s: Seconds for which its start is known.
    """

    number: int = 0
    bound_s: float = 0.0
    leads: bool = False
    remember_s: float = 0.0


NO_GENERATION = Generation()


class Caller(NamedTuple):
    """The call that a lock is acquired for, if it may have waited, or may wait.

    Attributes:
        call_id: Tells it from other calls with the same task id. Defaults to nothing.
        attempt: Number of its attempt; messages of an earlier one are stale. Defaults to 0.
        copy: Which of its messages this is; of several only one acquires. Defaults to its first.
        remember_s: Seconds for which it is remembered that this one has acquired. Defaults to 0: only if it
            has waited in line.
        linger_s: Seconds for which, if another holds the lock, it stands in line because it is going to ask
            again. Defaults to 0: it does not.
        since: Server time (Unix seconds) since which it waits. Defaults to 0: since now.
        second: Whether another delivery of its attempt may have begun, and ended. Then its own mark stays,
            because it may be the retry's, and its own resting lock stands in its way. Defaults to False.
        shared: Whether other calls may have its task id, and be told from it: a place in line under that id
            may be theirs. Defaults to False.
        newest: Its place among those that replace each other. Defaults to none.
    """

    call_id: str = ""
    attempt: int = 0
    copy: str = ORIGINAL
    remember_s: float = 0.0
    linger_s: float = 0.0
    since: float = 0.0
    second: bool = False
    shared: bool = False
    newest: Generation = NO_GENERATION


ANYBODY = Caller()
"""A caller that neither waits nor has waited."""


class AcquireReply(NamedTuple):
    """What lua/acquire.lua found, which says more of each; times are the server's, in microseconds."""

    word: str
    deadline_us: int
    fence: int
    now_us: int
    value: str | None = None
    record: str | None = None
    mark: str | None = None
    waiters: int = 0
    permit: int = 0
    spare: int = 0
    longest_value: str | None = None
    longest_record: str | None = None
    longest_permit: int = 0
    limit: int = 1

    @property
    def holder(self) -> Holder | None:
        """Who has, or had, the permit that was chosen."""
        return holder_of(self.value, self.record, self.permit)

    @property
    def longest(self) -> Holder | None:
        """Who has held a permit for longest, of several."""
        return holder_of(self.longest_value, self.longest_record, self.longest_permit)


def acquire(lock: NamedLock, *, token: str, dead: str = "", caller: Caller = ANYBODY) -> AcquireReply:
    """lua/acquire.lua: try to have a lock; a holder with the token `dead` is proved dead."""
    if "\n" in token:
        raise ValueError(f"a token must not contain a line break: {token!r}")
    name, terms, told = lock.name, lock.terms, lock.info
    keys: tuple[str, ...] = (name, lock.record)
    if lock.line:
        task_id = task_of(token)
        ticket = ticket_name(name, token if task_id is None else task_id, caller.call_id)
        mark = newest_name(name) if caller.newest.number else lock.mark or mark_name(name)
        keys += (*lock.line, mark, ticket, permits_name(name), terms_name(name))
    info = told if isinstance(told, str) else _JSON.encode(told) if told else "{}"
    is_plain = terms == PLAIN
    argv: tuple[Any, ...] = (token, lock.lease_us, lock.retention_ms, info, dead)
    if caller[1:] != ANYBODY[1:] or not is_plain:  # else the script's defaults hold
        argv += (caller.copy, int(caller.remember_s * 1000), round(caller.linger_s * US))
        argv += (round(caller.since * US), caller.attempt, terms, int(caller.second), int(caller.shared))
    if newest := caller.newest.number:
        _, bound_s, leads, remember_s = caller.newest
        argv += (newest, round(bound_s * US), int(leads), int(remember_s * 1000))
    reply: list[Any] = ACQUIRE(lock.client, keys, *argv) if is_plain else ["more", lock.limit]
    if reply[0] == "more":
        keys += (starts_name(name),)
        reply = ACQUIRE.of(lock.client, name, keys, int(reply[1]), *argv)
    if len(reply) >= 5:
        reply[7] = int(reply[7])
        return AcquireReply(*reply)
    word, now, fence, *permit = reply  # it was free, and nobody waits
    now_us = int(now)
    return AcquireReply(word, now_us + lock.lease_us, int(fence), now_us, permit=int(*permit))


class RenewReply(NamedTuple):
    """Whether a permit is held still: `renewed`, `repaired`, `gone` or `lost`. Times in microseconds."""

    word: str
    deadline_us: int
    now_us: int
    value: str | None


def renew(client: Any, permits: Iterable[Permit]) -> list[RenewReply | Error]:
    """lua/renew.lua, many times in one round trip: for each what became of it, or why that is not known."""
    calls = [
        (lock.keys_of(number), (token, lock.lease_us, lock.retention_ms)) for lock, number, token in permits
    ]
    replies = RENEW.many(client, calls)
    return [RenewReply._make(reply) if isinstance(reply, list) else reply for reply in replies]


class EndReply(NamedTuple):
    """What became of a permit that was to end.

    Attributes:
        word: As `HeldLock.release` has it.
        now_us: The server's time, in microseconds; 0 if it says the word alone.
        since_us: If another has it, since when.
        turn: What is left to be done for its line; None if nothing is.
    """

    word: Released
    now_us: int = 0
    since_us: int | None = None
    turn: Turn | None = None


_RELEASED = EndReply("released")


def release(permit: Permit, *, rest_until_us: int, mark_for_s: float, done_for_s: float) -> EndReply:
    """lua/release.lua: give a permit back, mark the key again, note a success."""
    lock, number, token = permit
    name, keys, mark_ms, hand_over_us = lock.name, lock.keys_of(number)[:2], 0, ""
    is_paced = lock.wakes and bool(lock.terms.starts or lock.terms.live)
    if lock.line:
        keys += (*lock.line, terms_name(name))
        if number or done_for_s or is_paced:  # it may rest for longer than what is known of permits
            keys += (lock.mark or mark_name(name), permits_name(name))
            keys += (done_name(name),) if done_for_s or is_paced else ()
        elif lock.mark and mark_for_s:
            keys += (lock.mark,)
        if lock.mark:
            mark_ms = int(mark_for_s * 1000)
        if lock.wakes:
            hand_over_us = str(min(HAND_OVER_US, lock.lease_us))
    argv: tuple[Any, ...] = (token, rest_until_us, _REMEMBER_RELEASE_MS, mark_ms, hand_over_us)
    argv += (int(done_for_s * 1000),)
    if number or lock.terms != PLAIN:
        argv += (lock.terms, number)
    if is_paced:
        others = (permit_names(name, other) for other in range(lock.limit) if other != number)
        keys += (starts_name(name), *chain.from_iterable(others))
    reply = RELEASE(lock.client, keys, *argv)
    return _RELEASED if len(reply) == 1 else _ended(reply)


def hold(permit: Permit, *, lease_s: float) -> EndReply:
    """lua/hold.lua: keep a permit for its holder's retry."""
    lock, number, token = permit
    reply = HOLD(lock.client, lock.keys_of(number), token, round(lease_s * US), lock.retention_ms)
    return _ended(reply)


def _ended(reply: Sequence[Any]) -> EndReply:
    word, now, _value, *rest = reply
    now_us, (heir, detail, look_us) = int(now), (*rest, None, None, "")[:3]
    if word == "lost":  # since when another has it
        return EndReply(word, now_us, int(detail) if detail else None)
    return EndReply(word, now_us, turn=turn_of(heir, detail, look_us, now_us))


def free(lock: NamedLock, *, task_id: str) -> str:
    """lua/free.lua: free a permit that is held for a task's retry: `released`, `repaired`, `gone`, `lost`."""
    keys = (lock.name, lock.record, permits_name(lock.name))
    return str(FREE.of(lock.client, lock.name, keys, lock.limit, task_id, _REMEMBER_RELEASE_MS)[0])


def serve(
    lock: NamedLock, *, dead: str = "", away: str = "", unsent: str = "", knows_terms: bool = False
) -> ServeReply:
    """lua/serve.lua: hand the lock to the first in line, if nobody living has it.

    `dead` as in `acquire`. `away` is a task for which the lock is kept, and which cannot come: it is passed
    over. `unsent` was not woken: it has its place again, and nobody the lock. Unless the lock `knows_terms`,
    those of the last call count that has asked for it.
    """
    name = lock.name
    keys = (name, lock.record, *line_names(name), permits_name(name), starts_name(name), terms_name(name))
    hand_over_us = min(HAND_OVER_US, lock.lease_us)
    argv: tuple[Any, ...] = (os.urandom(16).hex(), hand_over_us, _REMEMBER_RELEASE_MS, lock.lease_us)
    terms = lock.terms if knows_terms else UNKNOWN._replace(live=lock.terms.live)
    argv += (dead, away or unsent, "unsent" if unsent else "", terms)
    reply = SERVE.of(lock.client, name, keys, lock.limit, *argv)
    word, now, value, record, heir, call, next_us = reply
    now_us = int(now)
    found = holder_of(value, record)
    look_in_s = max(0.0, (int(next_us) - now_us) / US) if next_us != "0" else None
    if not heir:
        return ServeReply(None, found if word == "held" else None, look_in_s)
    died = found if word == "taken_over" else None
    heir = Heir(heir, call, taken_over_from=died, server_time=now_us / US if died else 0.0)
    return ServeReply(heir, None, look_in_s)


class IfSame(NamedTuple):
    """Keys that are to change if they have these values still.

    Attributes:
        values: Of each key; empty = it is not there.
        last_s: Seconds from now for which they are to last at least. Defaults to None: they are deleted.
    """

    keys: tuple[str, ...]
    values: tuple[str | bytes, ...]
    last_s: float | None = None

    def as_call(self) -> Call:
        """Keys and arguments, as the script takes them."""
        return self.keys, (*self.values, "" if self.last_s is None else int(self.last_s * 1000))


def if_same(client: Any, cases: Sequence[IfSame]) -> list[bool | Error]:
    """lua/if_same.lua, many times in one round trip: for each whether the keys had these values still."""
    replies = IF_SAME.many(client, [case.as_call() for case in cases])
    return [reply[0] == "done" if isinstance(reply, list) else reply for reply in replies]


def tell_if_same(client: Any, case: IfSame, failed: Failed) -> bool:
    """lua/if_same.lua, whose reply nobody waits for; False if nothing is sent. See `wire.tell`."""
    return IF_SAME.tell(client, *case.as_call(), failed)


def if_this_is_same(client: Any, case: IfSame) -> bool:
    """As `if_same`, of one case; an error is raised."""
    (is_done,) = if_same(client, [case])
    if not isinstance(is_done, bool):
        raise is_done
    return is_done
