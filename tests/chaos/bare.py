"""A process with bare locks: it acquires, holds, renews and releases, for as long as it is let."""

import os
import random
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from celery_setnx.exceptions import LockLost, LockUnavailable, SetnxError
from celery_setnx.lock import verbs
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.keeper import Keeper
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.outcome import Outcome
from tests.chaos import flaws
from tests.chaos.history import History, note_renewals

LEASES_S = (0.15, 0.15, 0.1, 0.25)  # each attempt chooses one
WAIT_S = 0.5
_RETENTION_S = 120.0
_STEP_S = 0.004


@dataclass(frozen=True)
class Duty:
    """What one process is to do."""

    scenario: str
    number: int  # never used twice
    port: int  # of the server, or of the proxy
    direct: bool  # whether nothing stands between it and the server
    locks: tuple[str, ...]
    history: Path
    flaw: str = ""
    limit: int = 1  # how many may hold a lock at a time
    rate: tuple[int, float] | None = None  # how many may start within how many seconds

    @property
    def name(self) -> str:
        """What the history calls the process; its attempts are named after it."""
        return f"{self.scenario}-{self.number}"


class Bare:
    """The process itself. To the history, each of its attempts is a call that may be skipped."""

    def __init__(self, duty: Duty) -> None:
        self._duty = duty
        self._note = History(duty.history).note
        self._random = random.Random(duty.name)
        self._client = redis.Redis(port=duty.port, socket_timeout=0.5, retry=Retry(ConstantBackoff(0.01), 2))
        self._keeper = Keeper(time.monotonic)
        self._attempts = 0
        self._replied_at = 0.0
        self._ending = False
        signal.signal(signal.SIGTERM, self._end)
        note_renewals(self._note)
        self._acquire, verbs.acquire = verbs.acquire, self._note_the_reply

    def run(self) -> None:
        """Work until told to end."""
        while not self._ending:
            self._attempts += 1
            name, tid = self._random.choice(self._duty.locks), f"{self._duty.name}-{self._attempts}"
            about = {"scenario": self._duty.scenario, "policy": "skip", "late": False}
            may, worker = "LockUnavailable", self._duty.name
            self._note("sent", tid=tid, name=name, worker=worker, may=may, **about)
            try:
                self._attempt(tid, name)
            except SetnxError as error:
                self._note("failed", tid=tid, error=type(error).__name__, text=str(error)[:200])
                time.sleep(_STEP_S)

    def _end(self, *_signal: object) -> None:
        self._ending = True

    def _note_the_reply(self, *arguments: Any, **options: Any) -> Any:
        reply = self._acquire(*arguments, **options)
        self._replied_at = time.monotonic()
        return reply

    def _attempt(self, tid: str, name: str) -> None:
        duty = self._duty
        lock = SetnxLock(
            self._client, name, lease=self._random.choice(LEASES_S), retention=_RETENTION_S,
            info={"pid": os.getpid(), "worker": duty.name, "task_id": tid}, limit=duty.limit, rate=duty.rate,
        )  # fmt: skip
        outcome = lock.acquire(WAIT_S, token=tid)
        if outcome.lock is None:
            self._note("done", tid=tid, skipped=True, paced=outcome.paced)
            return
        held, permit = outcome.lock, f"{name}#{outcome.lock.permit}"
        self._note_start(tid, permit, outcome, held)
        kept = self._random.random() < 0.5
        if kept:
            self._keeper.watch(held, self._lost)
        ensured, why = self._body(held, kept)
        if kept:
            self._keeper.forget(held)
        self._note("end", tid=tid, life=tid, name=permit, ensured=ensured, why=why)
        self._release(held)
        self._note("done", tid=tid, skipped=False, result=tid)

    def _note_start(self, tid: str, permit: str, outcome: Outcome, held: HeldLock) -> None:
        dead, duty = outcome.taken_over_from, self._duty
        if dead is not None:
            victim = {"pid": dead.pid, "worker": dead.worker, "fence": dead.fence, "tid": dead.token}
            self._note("taken_over", tid=tid, name=permit, fence=held.fence, victim=victim)
        self._note(
            "start", tid=tid, life=tid, name=permit, pid=os.getpid(), worker=duty.name, retries=0,
            fence=held.fence, lease=held.lease_s, until=held._valid_until, direct=duty.direct,
            replied_at=self._replied_at, since=held._since_us, limit=duty.limit, rate=duty.rate,
        )  # fmt: skip

    def _body(self, held: HeldLock, kept: bool) -> tuple[float | None, str]:
        """Hold the lock, and renew it by hand unless the keeper does: when it was sure last, and the end."""
        lease = held.lease_s
        length = self._random.choice([0.0, 0.02, self._random.uniform(0, lease), 2.5 * lease])
        now = time.monotonic()
        until, due, ensured = now + length, now + lease / 3, None
        try:
            while now < until:
                if not kept and now >= due:
                    due = now + (lease / 3 if self._renew(held) else lease / 20)
                held.ensure()
                ensured = now
                time.sleep(_STEP_S)
                now = time.monotonic()
        except LockLost as error:
            self._lost(held, error.reason)
            return ensured, "lost"
        return ensured, "done"

    def _renew(self, held: HeldLock) -> bool:
        """Whether the server has answered; for want of memory it refuses none."""
        try:
            held.renew()
        except LockUnavailable as error:
            if "OutOfMemory" in error.reason:
                self._note("failed", tid=held.token, error="OutOfMemory", text=error.reason[:200])
            return False
        return True

    def _lost(self, held: HeldLock, reason: str) -> None:
        self._note("lost", tid=held.token, fence=held.fence, reason=reason)

    def _release(self, held: HeldLock) -> None:
        word = held.release()
        if self._duty.direct:  # by way of the proxy it may have been given back before, unheard
            self._note("released", tid=held.token, fence=held.fence, reason=word)


def be_bare(duty: Duty) -> None:
    """Be such a process."""
    if duty.flaw:
        flaws.seed(duty.flaw)
    Bare(duty).run()
