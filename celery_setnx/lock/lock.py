"""The lock: acquire, take over, renew, release. Redis only; nothing here knows Celery.

The algorithm is the SETNX lock of the Redis documentation (https://redis.io/commands/setnx, "Design
pattern: Locking with SETNX"): the key holds the Unix second at which the lock stops being valid, and a
lock past that time is taken over with GETSET. Each verb is one Lua script in `lua/`, on the server's
clock, and every change of a held lock compares the holder's token first.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple

import redis

from celery_setnx.exceptions import (
    AlreadyRunning,
    LockLost,
    LockRefused,
    LockUnavailable,
    SetnxError,
)
from celery_setnx.lock.look import WAITERS, Sighting, look
from celery_setnx.lock.names import (
    done_name,
    line_names,
    mark_name,
    permit_names,
    permits_name,
    record_name,
    starts_name,
    ticket_name,
)
from celery_setnx.lock.process import is_surely_dead
from celery_setnx.lock.record import (
    ORIGINAL,
    PLAIN,
    US,
    Heir,
    Holder,
    Served,
    Terms,
    parse_holder,
    task_of,
)
from celery_setnx.lock.scripts import PermitScript, Script, reply_to
from celery_setnx.lock.wire import sent_again
from celery_setnx.log import Log, fields

logger = Log("celery_setnx")
DAY_S = 86_400.0
_JSON = json.JSONEncoder(separators=(",", ":"))
_REMEMBER_RELEASE_MS = 60_000

HAND_OVER_S = 10.0
"""Seconds for which a lock is kept at most for the task that is woken for it."""

AHEAD_S = 0.02
"""Seconds before its start at which a call may be handed a permit (lua/pace.lua): it asks again then."""

_HAND_OVER_US = round(HAND_OVER_S * US)
_NO_WAITER = (ORIGINAL, 0, 0, 0, 0, False, False)  # what acquire.lua is told of a call that has not waited
_TURN_S = 0.001  # in which another thread of the process gets the interpreter's lock
_FOREVER_S = 1e9  # beyond this a deadline in microseconds is no exact number in Lua
_ACQUIRE = PermitScript("acquire", asks_pace=True)
_SERVE = PermitScript("serve")
_FREE = PermitScript("free")
_RENEW, _RELEASE, _HOLD = Script("renew"), Script("release"), Script("hold")
MOST_PERMITS, MOST_STARTS = 100, 1000
LONGEST_PERIOD_S = 366 * DAY_S  # between two starts
Released = Literal["released", "resting", "repaired", "held_for_retry", "gone", "lost"]


class Outcome(NamedTuple):
    """What became of an attempt to acquire a lock: a value, never an error.

    Attributes:
        acquired: True if the caller now holds the lock.
        lock: The held lock, to be released once; None if another holds it.
        taken_over_from: The dead holder's record, if its lock was taken over.
        holder: The holder's record, if another holds the lock; of several, that of who has held it for
            longest.
        remaining_s: Seconds until the holder's deadline, of several the first one's; None if unknown.
        server_time: The server's clock (Unix seconds) when it decided.
        mark: Id of the task whose mark was found beside the lock. None if there was none, or if the lock
            is not used with marks; a mark of the task's own ends when it acquires.
        waiters: How many tasks wait in line.
        stale: True if another message has started this very call: it is not to be run again.
        ends_first: The holder whose deadline is the first; `holder`, where there is one permit only.
        paced: True if a permit is free, or held for this task's retry, and no call may start before
            `remaining_s` is over.
    """

    acquired: bool
    lock: HeldLock | None = None
    taken_over_from: Holder | None = None
    holder: Holder | None = None
    remaining_s: float | None = None
    server_time: float = 0.0
    mark: str | None = None
    waiters: int = 0
    stale: bool = False
    ends_first: Holder | None = None
    paced: bool = False


class HeldLock:
    """A lock that was acquired. Use it once: renew it, ask `ensure()`, release it.

    Attributes:
        key: The lock's Redis key.
        token: Proof of being the holder.
        fence: A number that only grows per lock, and with several permits per permit; hand it to the resource
            that you protect.
        permit: Which of the lock's permits it is; the first is 0.
        lease_s: Seconds by which each renewal moves the deadline.
        retention_s: Seconds for which what is known of a dead holder is kept.
        lost: Why the lock counts as lost, or None while it does not.
        is_watched: Whether a thread of this process renews it.
    """

    def __init__(
        self,
        setnx_lock: SetnxLock,
        token: str,
        *,
        fence: int,
        since_us: int,
        valid_until: float,
        ahead_s: float,
        permit: int = 0,
    ) -> None:
        self.key = setnx_lock.name
        self.permit = permit
        self.token = token
        self.fence = fence
        self.lease_s = setnx_lock.lease_s
        self.retention_s = setnx_lock.retention_s
        self.lost: str | None = None
        self.is_watched = False
        self.client = setnx_lock.client
        self._lock = setnx_lock
        self._since_us = since_us
        self._valid_until = valid_until
        self._ahead_s = ahead_s
        self._first_ended_at: float | None = None  # when its end was asked for, until a reply has come

    def server_time(self) -> float:
        """The server's clock (Unix seconds): its last reply's, and this process's monotonic clock since."""
        return self._lock.clock() + self._ahead_s

    def remaining_s(self) -> float:
        """Seconds for which this process may still rely on the lock, by its monotonic clock."""
        return 0.0 if self.lost else max(0.0, self._valid_until - self._lock.clock())

    def ensure(self) -> None:
        """Do nothing while the lock is surely ours; sleep for a millisecond if its renewal is late.

        A body that computes between brief system calls, and never waits, may keep the thread that renews from
        its turn for longer than a lease.

        Raises:
            LockLost: The server said so, or the lease may have ended.
        """
        if self.is_watched and self.remaining_s() < self.lease_s / 2:
            time.sleep(_TURN_S)
        if self.lost is None and self._lock.clock() >= self._valid_until:
            self.lost = f"its lease of {self.lease_s:g} s ended before it was renewed"
        if self.lost is not None:
            raise LockLost(self.key, self.lost)

    def renew(self) -> None:
        """Move the deadline to one lease from now.

        Raises:
            LockLost: The lock is another's, gone, or past its deadline.
            LockUnavailable: Redis did not answer; the lock stays ours until `remaining_s()` is 0.
            LockRefused: Redis refuses the command.
        """
        (error,) = renew_all([self])
        if error is not None:
            raise error
        self.ensure()

    def release(self, *, at_least_for: float = 0.0, mark_for: float = 0.0, done_for: float = 0.0) -> Released:
        """Give the lock back; a second call answers as the first.

        Args:
            at_least_for: Seconds since the acquisition until which the lock rests. Defaults to 0.
            mark_for: Seconds for which the key is marked as queued in the same step, because the task has
                sent its retry. Defaults to 0: it is not.
            done_for: Seconds for which it is remembered, in the same step, that the task has succeeded.
                Defaults to 0: it is not.

        Returns:
            `released`; `resting` until `at_least_for` is over; `repaired` if a classic client had
            overwritten the value of our unexpired lock; `gone` if the key had vanished; `lost` if the
            lock is another's, in which case nothing was changed.

        Raises:
            LockUnavailable: Redis did not answer; the lease ends the lock.
            LockRefused: Redis refuses the command.
        """
        rest_until = self._since_us + int(at_least_for * US) if at_least_for else 0
        release = partial(self._lock._release, self.token, self.permit, rest_until, mark_for, done_for)
        return self._end(release, "released")

    def take_start_back(self) -> None:
        """Have the acquisition count as no start, because nothing has begun under it."""
        if self._lock.terms.starts:
            start = f"{self._since_us}#{self.permit}#{self.fence}"
            reply_to(self.client, "ZREM", starts_name(self._lock.name), start)

    def hold(self, lease: float) -> Released:
        """Keep the lock for the holder's own retry instead of releasing it; nobody renews it meanwhile.

        Args:
            lease: Seconds from now after which it may be taken over all the same.

        Returns:
            `held_for_retry`, or `gone` or `lost`, as `release`.

        Raises:
            LockUnavailable: Redis did not answer; the running lease ends the lock.
            LockRefused: Redis refuses the command.
        """
        keys, retention_ms = self._lock._permit_keys(self.permit), self._lock._retention_ms
        hold = partial(_HOLD, self.client, keys, self.token, _us(lease), retention_ms)
        return self._end(hold, "held_for_retry")

    def _end(self, ask: Callable[[], Sequence[Any]], word: Released) -> Released:
        """Have the server end it; the word of its reply, or this one if only an earlier reply was lost."""
        asked_before = self._first_ended_at
        if asked_before is None:
            self._first_ended_at = self._lock.clock()
        told = self._lock._word_of(ask, asked_before, self._valid_until, word)
        self._first_ended_at = None
        return told

    def _renewed(self, before: float, reply: Sequence[str | None]) -> None:
        word, deadline_us, now_us = reply[0], int(reply[1] or 0), int(reply[2] or 0)
        if word == "repaired":
            logger.warning(
                "A classic client had overwritten %s by %r; repaired.",
                self.key,
                reply[3],
                extra=fields(task_id=task_of(self.token), key=self.key),
            )
        if word in ("renewed", "repaired"):
            self._valid_until = self._lock._valid_until(before, deadline_us - now_us)
            self._ahead_s = now_us / US - self._lock.clock()
        elif deadline_us and now_us >= deadline_us:
            self.lost = f"its lease of {self.lease_s:g} s ended before it was renewed"
        elif word == "gone":
            self.lost = "its key has vanished from Redis (deleted, evicted, or the data was lost)"
        else:
            self.lost = f"the server no longer knows it as ours (the lock's value is now {reply[3]!r})"


class SetnxLock:
    """A lock by name: the SETNX recipe, made safe. Usable without Celery.

    Nothing renews the lease behind your back: finish within it, or call `held.renew()`. (Under
    `SingletonTask` a thread does that.)

    Args:
        client: A `redis.Redis` client. Give it short socket timeouts.
        name: The lock's Redis key, as any program in any language sees it. The record lives beside it,
            in the same cluster slot.
        lease: Seconds (or timedelta) after which a holder that stopped renewing may be taken over.
            Defaults to 30.
        wait: Seconds for which `with` waits for a held lock. Defaults to 0.
        info: What the record says of the holder: JSON values, or their JSON. Defaults to nothing.
        retention: Seconds that an unreleased record outlives its deadline. Defaults to a day.
        clock: Monotonic clock of this process, in seconds. Defaults to `time.monotonic`.
        mark: Redis key of the mark beside the lock: a task's own ends when it acquires. Defaults to none.
        line: Whether tasks may wait in line for it, as they do for a task's lock: a release hands it to the
            first. Defaults to False: with several permits their line is not passed, and workers see to it.
        limit: How many may hold it at a time, each with a permit of its own: 1 to 100. Defaults to 1.
        rate: How many may acquire it within any so many seconds, as a pair. Defaults to None: any number.

    Attributes:
        terms: Its limit and rate.
        heirs: To whom the lock was handed through this object; whoever wakes them takes them from here.
        leaves_line: Whether the last release may have left somebody in line whom it did not serve.
        token: The proof with which the lock was last acquired through this object; None if it never was.

    Raises:
        ValueError: A lease that is not positive, a negative retention, a limit or a rate out of range, or a
            name whose record would live in another slot.

    Example:
        >>> with SetnxLock(client, "nightly-report", lease=60) as held:   # doctest: +SKIP
        ...     write_report(fence=held.fence)
    """

    leaves_line = False

    def __init__(
        self,
        client: redis.Redis,
        name: str,
        *,
        lease: float | timedelta = 30.0,
        wait: float | timedelta = 0.0,
        info: Mapping[str, Any] | str | None = None,
        retention: float | timedelta = DAY_S,
        clock: Callable[[], float] = time.monotonic,
        mark: str | None = None,
        line: bool = False,
        limit: int = 1,
        rate: tuple[int, float] | None = None,
    ) -> None:
        self.client = client
        self.name = name = str(name)  # as an Enum's member may be one
        self.record = record_name(name)
        self.lease_s = _seconds(lease)
        self.wait_s = _seconds(wait)
        self.info = info or {}
        self.retention_s = _seconds(retention)
        self.clock = clock
        self.mark = mark
        self.limit = limit
        self.terms = _terms(name, limit, rate)
        self._wakes = line or mark is not None  # else nobody does to whom the lock would be handed
        self.line = line_names(name) if self._wakes or self.terms != PLAIN else ()
        self._permit = 0  # the one that was acquired last
        self._until = 0.0  # by the clock, for which that was acquired
        self.heirs: list[Heir] = []
        # Not the HeldLock, which knows this object: each would keep the other for the garbage collector.
        self.token: str | None = None
        self._entered: dict[int, list[HeldLock]] = {}
        if not 0 < self.lease_s < _FOREVER_S:
            raise ValueError(f"the lease of {name!r} must be more than 0 seconds, and finite, not {lease!r}")
        if not 0 <= self.retention_s < _FOREVER_S:
            raise ValueError(f"the retention of {name!r} must be 0 seconds or more, not {retention!r}")
        self._lease_us, self._retention_ms = _us(self.lease_s), _ms(self.retention_s)

    def acquire(
        self,
        wait: float | timedelta = 0.0,
        *,
        token: str | None = None,
        dead: str = "",
        copy: str = ORIGINAL,
        remember: float = 0.0,
        linger: float = 0.0,
        since: float = 0.0,
        attempt: int = 0,
        call_id: str = "",
        second: bool = False,
        shared: bool = False,
    ) -> Outcome:
        """Try to become the holder.

        Args:
            wait: Seconds for which a held lock is tried again, with jittered backoff. Defaults to 0.
            token: Proof of being the holder. Calling again with the same token is harmless: it answers
                acquired. Defaults to a new random token. A task's is `<task id>|<retries>|<nonce in hex>`:
                its own resting lock does not stand in its way, and a lock held for its retry is resumed.
            dead: The token of a holder whose process is proved dead; its lock is taken over before its
                deadline. Defaults to none.
            copy: Which of a call's messages this is; of several only one acquires. Defaults to its first.
            remember: Seconds for which it is remembered that this one has acquired. Defaults to 0: only if
                the call has waited in line.
            linger: Seconds for which, if another holds the lock, the task stands in line because it is going
                to ask again. Defaults to 0: it does not.
            since: Server time (Unix seconds) since which it does. Defaults to 0: since now.
            attempt: Number of the task's attempt; messages of an earlier one are stale. Defaults to 0.
            call_id: What tells the call from others that were given the same task id. Defaults to nothing.
            second: Whether another delivery of the task's attempt may have begun, and ended. Then the task's
                own mark stays, because it may be the retry's, and its own resting lock stands in the way.
                Defaults to False.
            shared: Whether other calls may have the task's id, and be told from it: a place in line under
                that id may be theirs. Defaults to False.

        Returns:
            The outcome. That another holds the lock is a value, not an error.

        Raises:
            LockUnavailable: Redis did not decide; a lock that was acquired unseen ends with its lease.
            LockRefused: Redis refuses a command.
        """
        token = token or os.urandom(16).hex()
        waiter: tuple[Any, ...] = ()
        if copy != ORIGINAL or attempt or remember or linger or second or shared:
            waiter = (copy, _ms(remember), _us(linger), _us(since), attempt, second, shared)
        give_up = self.clock() + _seconds(wait) if wait else 0.0
        pause = 0.01
        while True:
            try:
                outcome = self._acquire_once(token, dead, call_id, waiter)
            except SetnxError:
                raise
            except BaseException:
                # A signal or time limit in mid-call: the server may have given us the lock unseen.
                with suppress(SetnxError):
                    self._release_any(token)
                raise
            if outcome.acquired or outcome.stale or not wait:
                return outcome
            left = give_up - self.clock()
            if left <= 0:
                return outcome
            # Never much later than the holder's deadline, and apart from the other waiters.
            pause = min(pause * 2, 0.25, max(0.01, (outcome.remaining_s or self.lease_s) / 4))
            time.sleep(min(left, pause * random.uniform(0.5, 1.0)))

    def acquire_at_death(
        self, *, same_host: bool = True, token: str | None = None, **details: Any
    ) -> Outcome:
        """Try to become the holder; at once too if the holder's process, on this host, is surely dead.

        Args:
            same_host: Whether to look for such a proof. Defaults to True.
            token: As in `acquire`.
            details: As in `acquire`.

        Returns:
            The outcome, as `acquire`.

        Raises:
            LockUnavailable: Redis did not decide.
            LockRefused: Redis refuses a command.
        """
        token = token or os.urandom(16).hex()
        outcome = self.acquire(token=token, **details)
        holder = outcome.ends_first
        if holder is None or not same_host or holder.state != "running" or not is_surely_dead(holder.info):
            return outcome
        # The script compares the dead token, so that nobody else's lock is meant.
        return self.acquire(token=token, dead=holder.token, **details)

    def serve(self, *, dead: str = "", away: str = "", unsent: str = "", knows_terms: bool = False) -> Served:
        """Hand the lock to the first in line, if nobody living has it.

        Args:
            dead: As in `acquire`.
            away: Id of a task for which the lock is kept, and which cannot come: it is passed over.
            unsent: Id of a task for which the lock is kept, and which was not woken: it has its place again,
                and nobody the lock.
            knows_terms: Whether `limit` and `rate` are those of who waits. Defaults to False: those of the
                last call which has asked for the lock count.

        Raises:
            LockUnavailable: Redis did not decide.
            LockRefused: Redis refuses a command.
        """
        keys = (
            self.name,
            self.record,
            *line_names(self.name),
            permits_name(self.name),
            starts_name(self.name),
        )
        hand_over_us, token = min(_HAND_OVER_US, self._lease_us), os.urandom(16).hex()
        argv: tuple[Any, ...] = (token, hand_over_us, _REMEMBER_RELEASE_MS, self._lease_us)
        argv += (dead, away or unsent, "unsent" if unsent else "", self.terms if knows_terms else 0)
        reply = _SERVE.of(self.client, self.name, keys, self.terms, *argv)
        word, now_us, value, record, heir, call, next_us = reply
        found = parse_holder(record, value, int(now_us))
        look_in = max(0.0, (int(next_us) - int(now_us)) / US) if next_us != "0" else None
        if not heir:
            return Served(None, found if word == "held" else None, look_in)
        died = found if word == "taken_over" else None
        heir = Heir(heir, call, taken_over_from=died, server_time=int(now_us) / US if died else 0.0)
        return Served(heir, None, look_in)

    def release(self) -> Released:
        """Release what the last `acquire()` on this object acquired; see `HeldLock.release`.

        Raises:
            LockLost: Nothing was acquired through this object.
        """
        if self.token is None:
            raise LockLost(self.name, "it was never acquired through this object")
        release = partial(self._release, self.token, self._permit)
        return self._word_of(release, None, self._until, "released")

    def free_dead(self, token: str) -> Literal["freed", "ended", "lost"]:
        """Release the lock of a holder that is proved dead, on its behalf.

        Args:
            token: The dead holder's token.

        Returns:
            `freed` if it held the lock still; `ended` if it had given it back; `lost` if the record is not
            its own: it never had the lock, or another has had it since.

        Raises:
            LockUnavailable: Redis did not answer; the lease ends the lock.
            LockRefused: Redis refuses the command.
        """
        for holder in self._records(token):
            word = self._release(token, holder.permit)[0]
            if word != "lost":
                had_it = holder.state in ("running", "failed")
                return "freed" if had_it and word != "gone" else "ended"
        return "lost"

    def free_held(self, task_id: str) -> bool:
        """Free the lock if it is held for a retry of a task that will not come.

        Args:
            task_id: The task's id.

        Returns:
            True if it was held for it.

        Raises:
            LockUnavailable: Redis did not answer; the lease ends the lock.
            LockRefused: Redis refuses the command.
        """
        keys = (self.name, self.record, permits_name(self.name))
        reply = _FREE.of(self.client, self.name, keys, self.terms, task_id, _REMEMBER_RELEASE_MS)
        return reply[0] in ("released", "repaired")

    def holder(self) -> Holder | None:
        """Who holds the lock now, without touching it: None if it is free, or its deadline has passed.

        With several permits: who has held one for longest, or None while one of them is free.

        Raises:
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return self.look().longest

    def holders(self) -> list[Holder]:
        """Who holds the lock's permits now, in their order.

        Raises:
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return self.look().living

    def holder_and_waiters(self) -> Holder | None:
        """Who holds the lock now, as `holder()`, and who waits in line for it.

        Raises:
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        seen = self.look(waiters=WAITERS)
        return seen.longest and replace(seen.longest, waiters=seen.waiters, waiting=seen.waiting)

    def look(self, *, waiters: int = 0) -> Sighting:
        """What there is of the lock now, and of so many of those who wait in line for it. Defaults to 0.

        Raises:
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return look(self.client, self.name, terms=self.terms, waiters=waiters)

    def _records(self, token: str) -> list[Holder]:
        """What is known of a holder, be it that it has given its permit back."""
        seen = self.look()
        return [holder for holder in (*seen.holders, *seen.left) if holder.token == token]

    def __enter__(self) -> HeldLock:
        outcome = self.acquire(self.wait_s)
        if outcome.lock is None:
            holder = outcome.holder.as_dict() if outcome.holder else {}
            raise AlreadyRunning(self.name, self.name, holder, outcome.remaining_s, self.limit)
        # One object may be used by many threads, or greenlets: each gives back what it has taken itself.
        held = outcome.lock
        self._entered.setdefault(threading.get_ident(), []).append(held)
        return held

    def __exit__(self, *_exc: object) -> None:
        entered = self._entered.get(threading.get_ident())
        try:
            word = entered.pop().release() if entered else self.release()
        except SetnxError as error:
            logger.warning(
                "%s It was not released; its lease of %g s ends it.",
                error,
                self.lease_s,
                extra=fields(key=self.name),
            )
        else:
            if word in ("gone", "lost"):
                logger.warning(
                    "The lock %s was %s before it was released: its body may not have run alone.",
                    self.name,
                    word,
                    extra=fields("lost", key=self.name),
                )

    def _acquire_once(self, token: str, dead: str, call_id: str, waiter: tuple[Any, ...]) -> Outcome:
        before = self.clock()
        reply = _acquire(self, token, dead, call_id, waiter)
        for _ in range(MOST_PERMITS):  # of which each goes to the next in line, if nobody living has it
            if reply[0] != "line" or not self._wakes:
                break
            self._serve_once(dead)
            before = self.clock()
            reply = _acquire(self, token, "", call_id, waiter)
        else:
            raise LockUnavailable(self.name, f"its line was served {MOST_PERMITS} times, and there are more")
        if len(reply) < 5:  # it was free, and nobody waits
            word, now_us, fence, *permit = reply
            told = _Told(word, int(now_us) + self._lease_us, int(fence), int(now_us), permit=int(*permit))
        else:
            told = _Told(*reply)
        is_held = told.word in ("held", "stale", "line", "paced")
        return told.conflict(token, self.terms) if is_held else self._acquired(told, token, before)

    def _acquired(self, told: _Told, token: str, before: float) -> Outcome:
        """The outcome of a lock that was acquired though there was something to be told."""
        word = told.word
        held = self._now_held(told, token, before)
        if told.spare and told.waiters != "0" and self._wakes:  # the limit was raised, unheard by the line
            with suppress(SetnxError):
                while self._serve_once().look_in == 0:
                    pass
        return Outcome(
            True,
            lock=held,
            taken_over_from=told.found if word == "taken_over" else None,
            server_time=told.now_us / US,
            # Asked again, the mark is gone because we have it.
            mark=task_of(token) if word == "again" and self.mark else told.mark,
            waiters=int(told.waiters),
        )

    def _serve_once(self, dead: str = "") -> Served:
        """Hand one permit to the first in line, who is to be woken."""
        served = self.serve(dead=dead)
        if served.heir is not None:
            self.heirs.append(served.heir)
        return served

    def _now_held(self, told: _Told, token: str, before: float) -> HeldLock:
        """What was acquired by a command sent at a time, if this process may rely on it still."""
        after = self.clock()
        record = told.record or ""
        held = HeldLock(
            self,
            token,
            fence=told.fence,
            since_us=int(record.split("\n")[4]) if told.word == "again" else told.now_us,
            valid_until=self._valid_until(before, told.deadline_us - told.now_us),
            ahead_s=told.now_us / US - after,
            permit=told.permit,
        )
        if after >= held._valid_until:
            held.take_start_back()
            held.release()
            raise LockUnavailable(self.name, f"the reply took longer than the lease of {self.lease_s:g} s")
        self.token, self._permit, self._until = token, told.permit, held._valid_until
        return held

    def _valid_until(self, before: float, remaining_us: int) -> float:
        """Counted from before the send, so that the server's deadline is surely later."""
        return before + remaining_us / US - max(0.002, self.lease_s / 100)

    def _permit_keys(self, permit: int) -> tuple[str, ...]:
        """The keys of one permit."""
        if permit == 0:
            return (self.name, self.record)
        return (*permit_names(self.name, permit), permits_name(self.name))

    def _word_of(
        self,
        ask: Callable[[], Sequence[Any]],
        asked_before: float | None,
        valid_until: float,
        as_asked: Released,
    ) -> Released:
        """What became of a lock, by the reply to what ends it; it may have been asked at a time before.

        It was not lost if another has it only since it was first asked, and asked again: then it was given
        back, and the reply to that was lost. (A cluster's client asks again unseen: there it counts as lost.)
        """
        asked_at, before = self.clock() if asked_before is None else asked_before, sent_again()
        reply = ask()
        word: Released = reply[0]
        is_once = asked_before is None and before == sent_again()
        if is_once or word != "lost" or asked_at >= valid_until:
            return word
        since = reply[4] if len(reply) > 4 else None
        is_after = since is not None and int(since) > int(reply[1]) - (self.clock() - asked_at) * US
        return as_asked if is_after else word

    def _release_any(self, token: str) -> list[Any]:
        """Release whichever permit is the token's."""
        reply = self._release(token, 0)
        if reply[0] == "lost" and self.line:
            for holder in self._records(token):
                return self._release(token, holder.permit)
        return reply

    def _release(
        self,
        token: str,
        permit: int,
        rest_until_us: int = 0,
        mark_for: float = 0.0,
        done_for: float = 0.0,
    ) -> list[Any]:
        """What the script answers, its heir known from now on."""
        keys = self._permit_keys(permit)[:2]
        if self.line:
            keys += self.line
            if permit or done_for:  # a permit may rest for longer than what is known of permits would last
                keys += (self.mark or mark_name(self.name), permits_name(self.name))
                keys += (done_name(self.name),) if done_for else ()
            elif self.mark and mark_for:
                keys += (self.mark,)
        mark_ms = _ms(mark_for) if self.mark else 0
        # One beyond the limit, which was lowered, is handed to nobody; to whom when, where that is paced, is
        # known to `serve` only.
        hands_over = self._wakes and permit < self.limit and not self.terms.starts
        hand_over_us = min(_HAND_OVER_US, self._lease_us) if hands_over else ""
        argv = (token, rest_until_us, _REMEMBER_RELEASE_MS, mark_ms, hand_over_us, _ms(done_for))
        reply = _RELEASE(self.client, keys, *argv)
        self.leaves_line = len(reply) > 1
        if len(reply) > 3 and reply[3]:
            word, now_us, _value, heir, call = reply
            self.heirs.append(Heir(heir, call, (rest_until_us - now_us) / US if word == "resting" else 0.0))
        return reply


def renew_all(locks: Sequence[HeldLock], client: Any = None) -> list[LockUnavailable | LockRefused | None]:
    """Renew many locks of one client in one round trip.

    Each lock learns what the server said of it (`HeldLock.lost`). No answer is not a loss: the lock stays
    ours until its own deadline. For each the error that kept it from being renewed, or None.
    """
    if not locks:
        return []
    before = [held._lock.clock() for held in locks]
    errors: list[LockUnavailable | LockRefused | None] = []
    for held, sent_at, reply in zip(locks, before, _renew(client or locks[0].client, locks=locks)):
        if isinstance(reply, list):
            held._renewed(sent_at, reply)
            errors.append(None)
        else:
            errors.append(reply)
    return errors


class _Told(NamedTuple):
    """What lua/acquire.lua answers, if it is not the short text."""

    word: str
    deadline_us: int
    fence: int
    now_us: int
    value: str | None = None
    record: str | None = None
    mark: str | None = None
    waiters: str = "0"
    permit: int = 0
    spare: int = 0
    longest_value: str | None = None
    longest_record: str | None = None
    longest_permit: int = 0

    @property
    def found(self) -> Holder | None:
        """Who has, or had, the permit that was chosen."""
        return _of_permit(parse_holder(self.record, self.value, self.now_us), self.permit)

    def conflict(self, token: str, terms: Terms) -> Outcome:
        """The outcome where another holds the lock, or its pace allows no start, or another message has
        started the call.
        """
        server_time, found = self.now_us / US, self.found
        if self.word == "stale":
            return Outcome(False, server_time=server_time, mark=self.mark, stale=True)
        longest = parse_holder(self.longest_record, self.longest_value, self.now_us)
        longest = _of_permit(longest, self.longest_permit)
        if self.word == "line":  # it is free for those who wait, and a worker will wake the first
            return Outcome(False, holder=longest, server_time=server_time, waiters=int(self.waiters))
        if self.word == "paced" and found is None:
            pace = {"pace": terms.pace}
            longest = found = Holder("", self.deadline_us / US, 0, "paced", None, pace)
        is_own = found is not None and found.task_id is not None and found.task_id == task_of(token)
        return Outcome(
            False,
            holder=found if is_own else longest or found,
            ends_first=found,
            paced=self.word == "paced",
            remaining_s=(self.deadline_us - self.now_us) / US if self.deadline_us else None,
            server_time=server_time,
            mark=self.mark,
            waiters=int(self.waiters),
        )


def _acquire(lock: SetnxLock, token: str, dead: str, call_id: str, waiter: tuple[Any, ...]) -> list[Any]:
    """Run lua/acquire.lua: what `_Told` has; if nothing is to be told "acquired", now us, fence, permit."""
    if "\n" in token:
        raise ValueError(f"a token must not contain a line break: {token!r}")
    name = lock.name
    keys: tuple[str, ...] = (name, lock.record)
    if lock.line:
        task_id = task_of(token)
        ticket = ticket_name(name, token if task_id is None else task_id, call_id)
        keys += (*lock.line, lock.mark or mark_name(name), ticket, permits_name(name))
    argv: tuple[Any, ...] = (token, lock._lease_us, lock._retention_ms, _encoded(lock.info), dead)
    if waiter or lock.terms != PLAIN:
        *said, second, shared = waiter or _NO_WAITER
        argv += (*said, lock.terms, int(second), int(shared))
    return _ACQUIRE.of(lock.client, name, keys, lock.terms, *argv)


def _renew(
    client: redis.Redis, *, locks: Sequence[HeldLock]
) -> list[list[Any] | LockUnavailable | LockRefused]:
    """Run lua/renew.lua for each: [word, deadline us, now us, lock value]."""
    calls = [
        (
            held._lock._permit_keys(held.permit),
            (held.token, held._lock._lease_us, held._lock._retention_ms),
        )
        for held in locks
    ]
    return _RENEW.many(client, calls)


def _terms(name: str, limit: int, rate: tuple[int, float] | None) -> Terms:
    if isinstance(limit, bool) or not isinstance(limit, int) or not 1 <= limit <= MOST_PERMITS:
        raise ValueError(f"the limit of {name!r} must be a whole number from 1 to 100, not {limit!r}")
    starts, period_s = rate or (0, 0.0)
    is_number = isinstance(starts, int) and not isinstance(starts, bool)  # else scripts would read no rate
    if rate is not None and not (
        is_number and 1 <= starts <= MOST_STARTS and 0.001 <= period_s <= LONGEST_PERIOD_S
    ):
        raise ValueError(f"the rate of {name!r} must be 1 to 1000 in 1 ms to 366 days, not {rate!r}")
    return Terms(limit, starts, period_s)


def _of_permit(holder: Holder | None, permit: int) -> Holder | None:
    return replace(holder, permit=permit) if holder and permit else holder


def _encoded(info: Mapping[str, Any] | str) -> str:
    return info if isinstance(info, str) else _JSON.encode(info) if info else "{}"


def _seconds(duration: float | timedelta) -> float:
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)


def _us(seconds: float) -> int:
    return round(seconds * US)


def _ms(seconds: float) -> int:
    return int(seconds * 1000)
