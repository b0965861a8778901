"""A lock that is held: renewed, given back, or kept for a retry. Redis only; nothing here knows Celery."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

from celery_setnx.exceptions import LockLost, LockRefused, LockUnavailable
from celery_setnx.lock.live import hold_back
from celery_setnx.lock.names import starts_name
from celery_setnx.lock.record import US, task_of
from celery_setnx.lock.scripts import reply_to
from celery_setnx.lock.verbs import EndReply, NamedLock, Permit, Released, RenewReply, hold, release, renew
from celery_setnx.lock.wire import sent_again
from celery_setnx.log import Log, fields

logger = Log("celery_setnx")
_permit_of = attrgetter("_permit")
_DAY_S = 86_400.0
_TURN_S = 0.001  # in which another thread of the process gets the interpreter's lock


class HeldLock:
    """A lock that was acquired. Use it once: renew it, ask `ensure()`, release it.

    Attributes:
        key: The lock's Redis key.
        token: Proof of being the holder.
        fence: A number that only grows, per lock or per permit; pass it to the resource that you protect.
        permit: Which of the lock's permits it is; the first is 0.
        lease_s: Seconds by which each renewal moves the deadline.
        retention_s: Seconds for which the record of a dead holder is kept.
        lost: Why the lock is lost; None while it is not.
        is_watched: Whether a thread of this process renews it.
    """

    def __init__(
        self, permit: Permit, *, fence: int, since_us: int, valid_until: float, ahead_s: float
    ) -> None:
        lock, self.permit, self.token = permit
        self.key = lock.name
        self.fence = fence
        self.lease_s = lock.lease_s
        self.retention_s = lock.retention_s
        self.lost: str | None = None
        self.is_watched = False
        self.client = lock.client
        self._lock = lock
        self._permit = permit
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

        A body that computes without ever waiting may block the thread that renews for longer than a lease.

        Raises:
            LockLost: Redis says that the lock is lost, or the lease may have ended.
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
        """Release the lock; a second call returns the same as the first.

        Args:
            at_least_for: Seconds since the acquisition until which the lock rests. Defaults to 0.
            mark_for: Seconds for which the key is marked as queued in the same step, for a retry that was
                sent. Defaults to 0: no mark.
            done_for: Seconds for which the success of the call is remembered, in the same step. Defaults to
                0: not at all.

        Returns:
            `released`; `resting` until `at_least_for` is over; `repaired` if a classic client had
            overwritten the value of our unexpired lock; `gone` if the key had vanished; `lost` if the
            lock is another's, in which case nothing was changed.

        Raises:
            LockUnavailable: Redis did not answer; the lease ends the lock.
            LockRefused: Redis refuses the command.
        """
        rest_until = self._since_us + int(at_least_for * US) if at_least_for else 0
        return self._end(partial(give_back, self._permit, rest_until, mark_for, done_for), "released")

    def take_start_back(self) -> None:
        """Have the acquisition count as no start, because nothing has begun under it."""
        if self._lock.terms.starts or self._lock.terms.live:
            start = f"{self._since_us}#{self.permit}#{self.fence}"
            reply_to(self.client, "ZREM", starts_name(self.key), start)

    def hold(self, lease: float) -> Released:
        """Keep the lock for the holder's own retry instead of releasing it; it is not renewed.

        Args:
            lease: Seconds from now after which it may be taken over all the same.

        Returns:
            `held_for_retry`, or `gone` or `lost`, as `release`.

        Raises:
            LockUnavailable: Redis did not answer; the running lease ends the lock.
            LockRefused: Redis refuses the command.
        """
        return self._end(partial(hold, self._permit, lease_s=lease), "held_for_retry")

    def hold_back(self, seconds: float, because: str = "") -> float:
        """Let no call of this key start for a while: the resource says "not now", as with a 429.

        The running body goes on. Calls do what their `on_conflict` says. A pause that ends later stays as it
        is; `celery setnx resume` ends either.

        Args:
            seconds: Seconds from now; a day at most.
            because: Why, in 300 characters at most, for whoever asks what is in the way. Defaults to nothing.

        Returns:
            Seconds for which no call of the key starts.

        Raises:
            ValueError: The seconds are not positive, or more than a day; or it is a `SetnxLock` that knows no
                pause, as it has neither `line`, `limit` nor `rate`.
            LockLost: The lock is no longer ours, and nothing was changed.
            LockUnavailable: Redis did not answer.
            LockRefused: Redis refuses the command.
        """
        if not 0 < seconds <= _DAY_S:
            raise ValueError(f"hold_back takes more than 0 seconds and at most a day, not {seconds!r}")
        if not self._lock.line:  # the next to acquire it would not ask
            raise ValueError(
                f"hold_back needs a lock of a task, or one with a line, a limit or a rate: {self.key}"
            )
        told = {"because": because, "by": self._name(), "since": round(self.server_time(), 3)}
        word, lasts_s = hold_back(self._permit, for_s=seconds, told=told)
        if word == "lost":
            raise LockLost(self.key, "it is another's, or its lease has ended: it can hold nobody back")
        return lasts_s

    def _name(self) -> str:
        task_id = task_of(self.token)
        return f"task {task_id}" if task_id else ""

    def _end(self, ask: Callable[[], EndReply], word: Released) -> Released:
        """Have the server end it; the word of its reply, or this one if only an earlier reply was lost."""
        asked_before = self._first_ended_at
        if asked_before is None:
            self._first_ended_at = self._lock.clock()
        told = word_of(self._lock, ask, asked_before, self._valid_until, word)
        self._first_ended_at = None
        return told

    def _renewed(self, before: float, reply: RenewReply) -> None:
        word, deadline_us, now_us, value = reply
        if word == "repaired":
            logger.warning(
                "A classic client had overwritten %s by %r; repaired.",
                self.key,
                value,
                extra=fields(task_id=task_of(self.token), key=self.key),
            )
        if word in ("renewed", "repaired"):
            self._valid_until = local_deadline(before, deadline_us - now_us, self.lease_s)
            self._ahead_s = now_us / US - self._lock.clock()
        elif deadline_us and now_us >= deadline_us:
            self.lost = f"its lease of {self.lease_s:g} s ended before it was renewed"
        elif word == "gone" or value is None:
            self.lost = "its key has vanished from Redis (deleted, evicted, or the data was lost)"
        else:
            self.lost = f"it is no longer ours in Redis (the lock's value is now {value!r})"


def renew_all(locks: Sequence[HeldLock], client: Any = None) -> list[LockUnavailable | LockRefused | None]:
    """Renew many locks of one client in one round trip.

    Each lock learns what the server said of it (`HeldLock.lost`). No answer is not a loss: the lock stays
    ours until its own deadline. For each the error that kept it from being renewed, or None.
    """
    if not locks:
        return []
    before = [held._lock.clock() for held in locks]
    errors: list[LockUnavailable | LockRefused | None] = []
    replies = renew(client or locks[0].client, map(_permit_of, locks))
    for held, sent_at, reply in zip(locks, before, replies):
        if isinstance(reply, RenewReply):
            held._renewed(sent_at, reply)
            errors.append(None)
        else:
            errors.append(reply)
    return errors


def local_deadline(before: float, remaining_us: int, lease_s: float) -> float:
    """When a lease ends by our own clock, from before the send: the server's deadline is surely later."""
    return before + remaining_us / US - max(0.002, lease_s / 100)


def give_back(
    permit: Permit, rest_until_us: int = 0, mark_for_s: float = 0.0, done_for_s: float = 0.0
) -> EndReply:
    """Release a permit; its lock knows from now on what is left to be done for its line."""
    ended = release(permit, rest_until_us=rest_until_us, mark_for_s=mark_for_s, done_for_s=done_for_s)
    if ended.turn is not None:
        permit.lock.turns.append(ended.turn)
    return ended


def word_of(
    lock: NamedLock,
    ask: Callable[[], EndReply],
    asked_before: float | None,
    valid_until: float,
    as_asked: Released,
) -> Released:
    """What became of a lock, by the reply to what ends it; it may have been asked at a time before.

    It was not lost if another has it only since it was first asked, and asked again: then it was given back,
    and the reply to that was lost. (A cluster's client asks again unseen: there it counts as lost.) It was
    surely held for a retry only if another has it since before its lease would have ended.
    """
    asked_at, before = lock.clock() if asked_before is None else asked_before, sent_again()
    ended = ask()
    word = ended.word
    if word != "lost" or (asked_before is None and before == sent_again()) or asked_at >= valid_until:
        return word
    if ended.since_us is None:
        return "lost"
    taken_at = lock.clock() - (ended.now_us - ended.since_us) / US
    until = valid_until if as_asked == "held_for_retry" else math.inf
    return as_asked if asked_at < taken_at < until else "lost"
