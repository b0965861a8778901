"""One process of the soak: acquire, critical section, renew, release, for as long as it is let."""

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from celery_setnx.exceptions import LockLost, LockRefused, LockUnavailable
from celery_setnx.lock import keeper as keeper_module
from celery_setnx.lock import lock as lock_module
from celery_setnx.lock.keeper import Keeper
from celery_setnx.lock.lock import HeldLock
from celery_setnx.lock.scripts import PermitScript
from tests.soak import flaws
from tests.soak.history import History, note_renewals, now_us

RETENTION_S = 120.0
WAIT_S = 0.5
STEP_S = 0.004
# Exit status of a process whose mutation could not be made.
UNMUTATED = 77


@dataclass(frozen=True)
class Duty:
    """What one process is to do."""

    uid: int  # never used twice
    port: int  # of the server, or of the proxy
    direct: bool  # whether nothing stands between it and the server
    locks: Sequence[str]
    leases: Sequence[float]
    history: Path
    flaw: str = "none"
    once: bool = False  # whether it acquires each lock exactly once and ends, to close a soak
    limit: int = 1  # how many may hold a lock at a time
    rate: tuple[int, float] | None = None  # how many may start within how many seconds


def permit_of(name: str, number: str = "0") -> str:
    """By what name the history knows a permit: each is a lock of its own."""
    return f"{name}#{number}" if int(number) else name


class _Witness:
    """A script that also writes down what the server decided, before the client can think about it."""

    def __init__(self, script: Any, write: Callable[[Sequence[Any], list[Any], int, float], None]) -> None:
        self._script = script
        self._write = write

    def __call__(self, client: Any, *arguments: Any) -> list[Any]:
        began_us = now_us()
        reply: list[Any] = self._script(client, *arguments)
        if isinstance(self._script, PermitScript):  # which is told the lock's name, and of how many permits
            _name, keys, _count, *rest = arguments
            arguments = keys, *rest
        self._write(arguments, reply, began_us, time.monotonic())
        return reply


class Holder:
    """The process itself, with `SetnxLock` or what a flaw has made of it."""

    def __init__(self, duty: Duty, make_lock: Callable[..., Any]) -> None:
        self._duty = duty
        self._make_lock = make_lock
        self._history = History(duty.history, duty.uid)
        self._random = random.Random(duty.uid)
        self._client = redis.Redis(port=duty.port, socket_timeout=0.5, retry=Retry(ConstantBackoff(0.01), 2))
        self._keeper = Keeper(time.monotonic)
        self._ending = False
        self._attempts = 0
        self._replied_at = 0.0
        signal.signal(signal.SIGTERM, self._end)
        self._watch_the_scripts()

    def run(self) -> None:
        """Work until told to end."""
        if self._duty.once:
            close = self._have_all if self._duty.limit > 1 else self._one_round
            for name in self._duty.locks:
                close(name, wait=max(self._duty.leases) + 1.0)
            return
        while not self._ending:
            self._one_round(self._random.choice(self._duty.locks), wait=WAIT_S)

    def _have_all(self, name: str, wait: float) -> None:
        """Have all permits of a lock at a time: none is lost."""
        held = [self._acquired(name, wait, lease=10.0) for _ in range(self._duty.limit)]
        for lock, token in filter(None, held):
            self._history.note("end", token=token)
            lock.release()

    def _end(self, *_signal: object) -> None:
        self._ending = True

    def _one_round(self, name: str, wait: float) -> None:
        acquired = self._acquired(name, wait)
        if acquired is not None:
            self._section(*acquired)

    def _acquired(self, name: str, wait: float, lease: float = 0.0) -> tuple[Any, str] | None:
        self._attempts += 1
        lease = lease or self._random.choice(self._duty.leases)
        token = f"{self._duty.uid}-{self._attempts}"
        pid, note = os.getpid(), self._history.note
        about: dict[str, Any] = {"info": {"pid": pid}, "retention": RETENTION_S}
        about |= {"limit": self._duty.limit} if self._duty.limit > 1 else {}
        about |= {"rate": self._duty.rate} if self._duty.rate else {}
        lock = self._make_lock(self._client, name, lease=lease, **about)
        note("try", lock=name, token=token, lease=lease, pid=pid, direct=self._duty.direct)
        try:
            outcome = lock.acquire(wait, token=token)
        except LockUnavailable as error:
            note("unavailable", token=token, error=error.reason)
            time.sleep(STEP_S)
            return None
        except LockRefused as error:
            note("crash", token=token, error=str(error))
            return None
        if outcome.lock is None:
            if self._duty.once:
                note("stuck", lock=name, holder=str(outcome.holder))
            return None
        victim = outcome.taken_over_from
        note(
            "start", lock=name, token=token, until=outcome.lock._valid_until, replied_at=self._replied_at,
            reported=victim and victim.token, reported_pid=victim and victim.info.get("pid"),
        )  # fmt: skip
        return outcome.lock, token

    def _section(self, held: Any, token: str) -> None:
        kept = self._random.random() < 0.5 and isinstance(held, HeldLock)
        if kept:
            self._keeper.watch(held, self._lost)
        try:
            self._work(held, kept)
        except LockLost as error:
            self._history.note("lost", token=token, reason=error.reason)
        if kept:
            self._keeper.forget(held)
        self._history.note("end", token=token)
        try:
            held.release()
        except (LockUnavailable, LockRefused) as error:
            self._history.note("release_failed", token=token, error=error.reason)

    def _work(self, held: Any, kept: bool) -> None:
        """Hold the lock for a while; renew by hand every third of the lease, unless the keeper does."""
        lease = held.lease_s
        length = self._random.choice([0.0, 0.02, self._random.uniform(0, lease), 2.5 * lease])
        now = time.monotonic()
        until, due = now + length, now + lease / 3
        while now < until:
            if not kept and now >= due:
                try:
                    held.renew()
                except LockUnavailable:
                    due = now + lease / 20
                else:
                    due = now + lease / 3
            held.ensure()
            time.sleep(STEP_S)
            now = time.monotonic()

    def _lost(self, held: HeldLock, reason: str) -> None:
        self._history.note("lost", token=held.token, reason=reason)

    def _watch_the_scripts(self) -> None:
        lock_module._ACQUIRE = _Witness(lock_module._ACQUIRE, self._granted)
        lock_module._RELEASE = _Witness(lock_module._RELEASE, self._released)
        note_renewals(self._history.note)
        renew_all = lock_module.renew_all

        def noting_errors(locks: Sequence[HeldLock], client: Any = None) -> list[Any]:
            errors = renew_all(locks, client)
            for held, error in zip(locks, errors):
                if error is not None:
                    self._history.note("renew_failed", token=held.token, error=error.reason)
            return errors

        lock_module.renew_all = noting_errors
        keeper_module.renew_all = noting_errors

    def _granted(self, asked: Sequence[Any], reply: list[Any], began_us: int, at: float) -> None:
        self._replied_at = at
        if reply[0] == "paced":
            self._history.note("paced", token=asked[1], lock=asked[0][0])
        if reply[0] in ("held", "more", "paced"):
            return
        if len(reply) < 5:  # it was free, and nobody waits
            word, now, fence, *permits = reply
            deadline, record = int(now) + asked[2], None
        else:
            word, deadline, fence, now, _value, record, _mark, _waiters, *permits = reply
        since = int(record.split("\n")[4]) if word == "again" else int(now)
        victim = None
        if word == "taken_over" and record:
            dead = record.split("\n")
            victim = {"token": dead[0], "info": dead[5]}
            victim |= {"deadline": int(dead[1]), "fence": int(dead[2]), "since": int(dead[4])}
        self._history.note(
            "granted", t=at, lock=permit_of(asked[0][0], *permits[:1]), token=asked[1], word=word,
            since=since, now=int(now), deadline=int(deadline), fence=int(fence), began_us=began_us,
            victim=victim,
        )  # fmt: skip

    def _released(self, asked: Sequence[Any], reply: list[Any], began_us: int, at: float) -> None:
        word, *found = reply
        # Where the server does not say when, a bound: it was not before the one, not after the other.
        now = int(found[0]) if found and found[0] else now_us() if word == "lost" else began_us
        self._history.note("release", t=at, token=asked[1], lock=asked[0][0], word=word, now=now)


def hold(duty: Duty) -> None:
    """Be a process of the soak."""
    try:
        make_lock = flaws.seed(duty.flaw)
    except BaseException as error:
        raise SystemExit(UNMUTATED) from error
    try:
        Holder(duty, make_lock).run()
    except BaseException as error:
        History(duty.history, duty.uid).note("crash", error=repr(error)[:2000])
        raise
