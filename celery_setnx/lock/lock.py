"""A lock by its name: acquire it, take it over, look at it. Redis only; nothing here knows Celery.

The algorithm is the SETNX lock of the Redis documentation (https://redis.io/commands/setnx, "Design
pattern: Locking with SETNX"): the key holds the Unix second at which the lock stops being valid, and a
lock past that time is taken over with GETSET. Each verb is one Lua script in `lua/`, on the server's
clock, and every change of a held lock compares the holder's token first.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import redis

from celery_setnx.exceptions import AlreadyRunning, LockLost, LockUnavailable, SetnxError
from celery_setnx.lock import verbs
from celery_setnx.lock.held import HeldLock, give_back, local_deadline, word_of
from celery_setnx.lock.look import WAITERS, Sighting, look
from celery_setnx.lock.names import line_names, record_name
from celery_setnx.lock.outcome import Outcome, conflict
from celery_setnx.lock.process import is_surely_dead
from celery_setnx.lock.record import (
    PLAIN,
    US,
    Holder,
    Terms,
    Turn,
    task_of,
)
from celery_setnx.lock.verbs import ANYBODY, Caller, NamedLock, Permit, Released
from celery_setnx.log import Log, fields

logger = Log("celery_setnx")
DAY_S = 86_400.0

AHEAD_S = 0.02
"""Seconds before its start at which a call may be handed a permit (lua/pace.lua): it asks again then."""

_FOREVER_S = 1e9  # beyond this a deadline in microseconds is no exact number in Lua
MOST_PERMITS, MOST_STARTS = 100, 1000
LONGEST_PERIOD_S = 366 * DAY_S  # between two starts


class SetnxLock(NamedLock):
    """A lock by name: the SETNX recipe, made safe. Usable without Celery.

    Nothing renews the lease for you: finish within it, or call `held.renew()`. (Under `SingletonTask` a
    thread renews it.)

    Args:
        client: A `redis.Redis` client. Give it short socket timeouts.
        name: The lock's Redis key, for programs in any language. The record lies next to it, in the same
            cluster slot.
        lease: Seconds (or timedelta) after which a holder that stopped renewing may be taken over.
            Defaults to 30.
        wait: Seconds for which `with` waits for a held lock. Defaults to 0.
        info: What the record says of the holder: JSON values, or their JSON. Defaults to nothing.
        retention: Seconds that an unreleased record outlives its deadline. Defaults to a day.
        clock: Monotonic clock of this process, in seconds. Defaults to `time.monotonic`.
        mark: Redis key of the lock's mark; a task's own mark ends when it acquires. Defaults to none.
        line: Whether tasks may wait in line for it: a release then hands it to the first. Defaults to False:
            workers serve the line, and with several permits nobody overtakes it.
        limit: How many may hold it at a time, each with a permit of its own: 1 to 100. Defaults to 1.
        rate: How many may acquire it within how many seconds, as a pair. Defaults to None: any number.
        live: Live terms that count above limit and rate, as lua/terms.lua has them. Defaults to none.

    Attributes:
        terms: Its limit and rate.
        turns: Work that releases through this object have left for the line; take it from here and do it.
        token: The proof of the last acquisition through this object; None without one.

    Raises:
        ValueError: A lease that is not positive, a negative retention, a limit or a rate out of range, or a
            name whose record would live in another slot.

    Example:
        >>> with SetnxLock(client, "nightly-report", lease=60) as held:   # doctest: +SKIP
        ...     write_report(fence=held.fence)
    """

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
        live: str = "",
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
        self.terms = _terms(name, limit, rate)._replace(live=live)
        self.wakes = line or mark is not None  # else nobody does to whom the lock would be handed
        self.line = line_names(name) if self.wakes or self.terms != PLAIN else ()
        self._permit = 0  # the one that was acquired last
        self._until = 0.0  # by the clock, for which that was acquired
        self.turns: list[Turn] = []
        # Not the HeldLock, which knows this object: each would keep the other for the garbage collector.
        self.token: str | None = None
        self._entered: dict[int, list[HeldLock]] = {}
        if not 0 < self.lease_s < _FOREVER_S:
            raise ValueError(f"the lease of {name!r} must be more than 0 seconds, and finite, not {lease!r}")
        if not 0 <= self.retention_s < _FOREVER_S:
            raise ValueError(f"the retention of {name!r} must be 0 seconds or more, not {retention!r}")
        self.lease_us, self.retention_ms = round(self.lease_s * US), int(self.retention_s * 1000)

    def acquire(
        self,
        wait: float | timedelta = 0.0,
        *,
        token: str | None = None,
        dead: str = "",
        caller: Caller = ANYBODY,
    ) -> Outcome:
        """Try to become the holder.

        Args:
            wait: Seconds for which to try a held lock again, with jittered backoff. Defaults to 0.
            token: Proof of being the holder. Calling again with the same token is harmless: the outcome is
                acquired. Defaults to a new random token. A task's is `<task id>|<retries>|<nonce in hex>`:
                its own resting lock does not stand in its way, and a lock held for its retry is resumed.
            dead: The token of a holder whose process is proved dead; its lock is taken over before its
                deadline. Defaults to none.
            caller: The call that it is for. Defaults to one that does not wait.

        Returns:
            The outcome. A held lock is a value, not an error.

        Raises:
            LockUnavailable: Redis did not answer; if the lock was acquired nevertheless, it ends with its
                lease.
            LockRefused: Redis refuses a command.
        """
        token = token or os.urandom(16).hex()
        give_up = self.clock() + _seconds(wait) if wait else 0.0
        pause = 0.01
        while True:
            before = self.clock()
            try:
                reply = verbs.acquire(self, token=token, dead=dead, caller=caller)
                if reply.word in ("held", "stale", "line", "paced", "paused", "superseded"):
                    outcome = conflict(reply, token, self.name, self.terms)
                else:
                    outcome = self._acquired(reply, token, before)
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
        self, *, same_host: bool = True, token: str | None = None, caller: Caller = ANYBODY
    ) -> Outcome:
        """Try to become the holder, also when the holder's process on this host is proved dead.

        Args:
            same_host: Whether to look for such a proof. Defaults to True.
            token: As in `acquire`.
            caller: As in `acquire`.

        Returns:
            The outcome, as `acquire`.

        Raises:
            LockUnavailable: Redis did not decide.
            LockRefused: Redis refuses a command.
        """
        token = token or os.urandom(16).hex()
        outcome = self.acquire(token=token, caller=caller)
        holder = outcome.ends_first
        if holder is None or not same_host or holder.state != "running" or not is_surely_dead(holder.info):
            return outcome
        # The script compares the dead token, so that nobody else's lock is meant.
        return self.acquire(token=token, dead=holder.token, caller=caller)

    def release(self) -> Released:
        """Release what the last `acquire()` on this object acquired; see `HeldLock.release`.

        Raises:
            LockLost: Nothing was acquired through this object.
        """
        if self.token is None:
            raise LockLost(self.name, "it was never acquired through this object")
        ask = partial(give_back, Permit(self, self._permit, self.token))
        return word_of(self, ask, None, self._until, "released")

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
            word = give_back(Permit(self, holder.permit, token)).word
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
        return verbs.free(self, task_id=task_id) in ("released", "repaired")

    def holder(self) -> Holder | None:
        """The holder of the lock now; None if the lock is free, or its deadline has passed.

        With several permits: the one that has held longest, or None while a permit is free.

        Raises:
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return self.look().longest

    def holders(self) -> list[Holder]:
        """The holders of the lock's permits now, in their order.

        Raises:
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return self.look().living

    def holder_and_waiters(self) -> Holder | None:
        """The holder of the lock now, as with `holder()`, and who waits in line for it.

        Raises:
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        seen = self.look(waiters=WAITERS)
        return seen.longest and replace(seen.longest, waiters=seen.waiters, waiting=seen.waiting)

    def look(self, *, waiters: int = 0) -> Sighting:
        """The state of the lock now, with the first `waiters` of its line. Defaults to 0.

        Raises:
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses a command.
        """
        return look(self.client, self.name, terms=self.terms, waiters=waiters)

    def __enter__(self) -> HeldLock:
        outcome = self.acquire(self.wait_s)
        if outcome.lock is None:
            holder = outcome.holder.as_dict() if outcome.holder else {}
            raise AlreadyRunning(self.name, self.name, holder, outcome.remaining_s, outcome.limit)
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
                    "The lock %s was %s before it was released: another may have run at the same time.",
                    self.name,
                    word,
                    extra=fields("lost", key=self.name),
                )

    def _acquired(self, reply: verbs.AcquireReply, token: str, before: float) -> Outcome:
        """The outcome of a command sent at a time that has acquired the lock."""
        word = reply.word
        return Outcome(
            True,
            lock=self._now_held(reply, token, before),
            taken_over_from=reply.holder if word == "taken_over" else None,
            server_time=reply.now_us / US,
            # Asked again, the mark is gone because we have it.
            mark=task_of(token) if word == "again" and self.mark else reply.mark,
            waiters=reply.waiters,
            is_due=bool(reply.spare and reply.waiters),  # the limit was raised, unheard by the line
        )

    def _now_held(self, reply: verbs.AcquireReply, token: str, before: float) -> HeldLock:
        """What was acquired by a command sent at a time, if this process may rely on it still."""
        after = self.clock()
        until = local_deadline(before, reply.deadline_us - reply.now_us, self.lease_s)
        record = reply.record or ""
        held = HeldLock(
            Permit(self, reply.permit, token),
            fence=reply.fence,
            since_us=int(record.split("\n")[4]) if reply.word == "again" else reply.now_us,
            valid_until=until,
            ahead_s=reply.now_us / US - after,
        )
        if after >= until:
            held.take_start_back()
            held.release()
            raise LockUnavailable(self.name, f"the reply took longer than the lease of {self.lease_s:g} s")
        self.token, self._permit, self._until = token, reply.permit, until
        return held

    def _release_any(self, token: str) -> None:
        """Release whichever permit is the token's."""
        ended = give_back(Permit(self, 0, token))
        for holder in self._records(token) if ended.word == "lost" and self.line else ():
            give_back(Permit(self, holder.permit, token))

    def _records(self, token: str) -> list[Holder]:
        """What is known of a holder, be it that it has given its permit back."""
        seen = self.look()
        return [holder for holder in (*seen.holders, *seen.left) if holder.token == token]


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


def _seconds(duration: float | timedelta) -> float:
    return duration.total_seconds() if isinstance(duration, timedelta) else float(duration)
