"""How a running call asks for its lock: patiently while Redis is away, again if another has just got it."""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, cast

from celery import Task
from celery.app.task import Context

from celery_setnx.arguments import Arguments
from celery_setnx.call.back import NONCE, come_back, tells_redelivery
from celery_setnx.call.ended import free_ended
from celery_setnx.call.guard import Guard
from celery_setnx.call.message import Call, retries_of
from celery_setnx.call.wake import leave_line, let_others_start, look_within
from celery_setnx.connection import client_for
from celery_setnx.exceptions import LockUnavailable, SetnxError
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.line import BEGUN_S
from celery_setnx.lock.lock import AHEAD_S
from celery_setnx.lock.marks import Mark, Marked, done_by, free_all, mark_all
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.process import identity
from celery_setnx.lock.record import ENDED, ORIGINAL, Holder, task_token
from celery_setnx.lock.verbs import HAND_OVER_S
from celery_setnx.log import Log, fields, say_loudly
from celery_setnx.run.conflict import Conflict, backoff, policy_of
from celery_setnx.run.join import holders_end, joined_by

logger = Log("celery_setnx")

_NONCE = re.compile("[0-9a-f]{1,64}")

# What a message has of a call that another call, or what follows, waits for.
_AWAITED = ("parent_id", "group", "chord", "chain", "callbacks", "errbacks")

# A call that meets a lock as young as this, behind as few others, stands in line in its pool slot before it
# is parked, as a mutex spins before it sleeps: between short bodies a message to and fro would take longer
# than they do.
_YOUNG_S = 0.02
_LINGER_BEHIND = 3
_LINGER_S = 0.1
_LINGER_POLL_S = 0.0005


def info_of(call: Call, worker: str | None) -> str:
    """What the record of a call's lock says of it, and of this process; the task's id is in the token."""
    said = _info_of_process(os.getpid(), call.task, worker)
    if call.is_one_of_several:
        said = f'{said[:-1]},"call":"{call.call_id}"}}'
    return f'{said[:-1]},"about":{json.dumps(call.about)}}}' if call.about else said


@lru_cache(maxsize=1000)
def _info_of_process(pid: int, task: str, worker: str | None) -> str:
    return json.dumps({**identity(), "task": task, "worker": worker}, separators=(",", ":"))


def _nonce_of(request: Context) -> str:
    """What makes the token of this delivery its own: said by the worker's parent, if it has a part in it."""
    known = (request.properties or {}).get(NONCE)
    return known if isinstance(known, str) and _NONCE.fullmatch(known) else os.urandom(6).hex()


class Asking:
    """A running call that asks for its lock."""

    def __init__(
        self, task: Task, guard: Guard, request: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.task, self.guard, self.request = task, guard, request
        self.call = guard.fitting(Call.of(task.name, vars(request)))
        self.lingers_since = 0.0  # server time since which it stands in line in its pool slot; 0: never
        self.has_parked = False  # whether it was about to be parked when its turn came
        try:
            self.options = guard.options_of(self.call.options)
            if self.options.on_conflict == "join" and not request.is_eager:  # whose result is stored nowhere
                guard.check_backend(self.options)
            given = Arguments.given_to(task, args, kwargs) if request.is_eager else Arguments(args, kwargs)
            self.lock = guard.lock(self.call, given, info_of(self.call, request.hostname))
        except SetnxError:
            if self.call.marked:  # refused here, whatever its producer could know
                free_all(client_for(guard.app), [Mark(self.call.key, self.call.task_id)])
            raise
        if not self.call.key:
            self.call = self.call._replace(key=self.lock.name)
        if self.call.bare and self.options.dedupe_for and not self._is_awaited():
            self.call = self.call._replace(unasked=True)  # which its message says, should it come back
        self.token = task_token(self.call.task_id, retries_of(request.retries), _nonce_of(request))
        # Whether another delivery of this message may have begun its attempt.
        is_told = self.call.redelivered or (task.acks_late and not tells_redelivery(task.app))
        self.may_be_second = is_told and not request.is_eager

    def ask(self) -> Outcome | None:
        """The outcome; None if Redis cannot be asked, and the body is to run all the same.

        A call that is going to wait asks again for a few milliseconds, if that may do.
        """
        while True:
            outcome = self._linger()
            if outcome is None or not (outcome.stale and self.call.bare and not self.call.redelivered):
                return outcome
            # The call that had this task id has begun long ago: this is another, which has no ticket.
            self.call = self.call._replace(call_id=os.urandom(6).hex(), bare=False)

    def conflict(self, outcome: Outcome) -> Conflict:
        """What it has met. A call that joins ends with that one's result, however it waits for it."""
        queued_as = self._queued_as(outcome.holder)  # which may mark the call
        if self.options.on_conflict == "join" and not self.request.is_eager:
            joined = joined_by(self.task, cast("Holder", outcome.holder), self.call)
            self.call = self.call._replace(join=joined, asked=0)
        since = self.lingers_since or self.call.since or outcome.server_time
        return Conflict(self.task, self.call._replace(since=since), self.options, outcome, queued_as)

    def frees_held(self, outcome: Outcome) -> bool:
        """Whether what stands in its way is held for a retry of a call that has ended, and is free by now."""
        found = {holder.task_id: holder.state for holder in (outcome.holder, outcome.ends_first) if holder}
        return any(self._frees(found[other], other) for other in found if other != self.call.task_id)

    def _frees(self, state: str, task_id: str | None) -> bool:
        """Whether a call has ended which the lock server takes for one that is to come, and is freed."""
        return free_ended(self.task.app, self.task.name, self.lock.name, task_id, state)

    def patiently(self, ask: Callable[[], Any], unguarded: Any) -> Any:
        """What Redis says, asked again for up to a lease; `unguarded` if the body is to run all the same."""
        give_up = None
        pause = 0.05
        while True:
            try:
                return ask()
            except LockUnavailable as error:
                if error.unsent:  # the broker's trouble, which no patience with Redis ends
                    raise
                say_loudly(error)
                if self.options.on_redis_error == "run":
                    logger.warning(
                        "%s runs unguarded (on_redis_error='run'). %s",
                        self.call,
                        error.brief,
                        extra=fields("unguarded", self.call),
                    )
                    return unguarded
                if self.options.on_redis_error == "raise":
                    raise
                give_up = give_up or self.lock.clock() + self.lock.lease_s
                if self.lock.clock() >= give_up:
                    come_back(self.task, self.call, backoff(self.options, self.call.waits), error.brief)
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 1.0, self.lock.lease_s / 4)

    def done_by(self, held: HeldLock) -> str | None:
        """Id of the task that has succeeded in this call's stead; None if the call is to run.

        Asked under the lock, because a success is noted in the step that gives it back. For a call that
        nobody asked when it was published, or whose mark may have lapsed since; not where something waits
        for it.
        """
        call, request = self.call, self.request
        may_be_duplicate = call.unasked or call.marked is True
        has_callbacks = request.callbacks or request.errbacks
        if not (self.options.dedupe_for and may_be_duplicate) or has_callbacks:
            return None
        if request.retries or request.is_eager:
            return None
        done: str | None = self.patiently(partial(done_by, self.lock.client, self.lock.name), None)
        if held.remaining_s() < self.lock.lease_s / 2:  # Redis was away, and nobody has renewed it yet
            reason = f"{self.lock.name} had been held for too long when Redis said that the call is to run"
            come_back(self.task, call, backoff(self.options, call.waits), reason)
        return None if done == call.task_id else done

    def joined_end(self, held: HeldLock | None = None) -> Any:
        """What is stored of the call with whose result this one ends; `UNSET` if it is to run."""
        if held is not None:
            holder, now = None, held.server_time()
        else:
            seen = self.lock.look()
            holder, now = seen.longest, seen.server_time
        self.call, end = holders_end(self.task, self.call, self.options, holder, now)
        return end

    def wake_heirs(self) -> None:
        """Wake those to whom the lock was handed: by a release, or because nobody living had it."""
        let_others_start(self.task.app, self.task.name, self.lock)

    def leave(self) -> None:
        """Leave the line, if it stands there and ends without the lock."""
        self._leave(self.call, BEGUN_S if self._is_woken else _LINGER_S)

    def end(self) -> None:
        """Have no message start this attempt any more, which has failed before its body.

        Nor the one that it may have sent of itself. That one is known by the name that this message has: so
        what is said to have begun is the next attempt. There is none, unless a twin of this delivery has sent
        its retry.
        """
        attempt = self.call.attempt + (not self.may_be_second)
        self._leave(self.call._replace(attempt=attempt, copy=ENDED), BEGUN_S)

    def _leave(self, call: Call, remember_s: float) -> None:
        try:
            leave_line(self.task.app, call, remember_s)
        except SetnxError as unheard:
            logger.warning(
                "%s has ended, and has not left the line: %s", self.call, unheard, extra=fields(of=self.call)
            )

    def waited_s(self, outcome: Outcome) -> float:
        """Seconds since this attempt met its lock held, whether it has come back since or lingers."""
        since = self.lingers_since or self.call.since
        return max(0.0, outcome.server_time - since) if since else 0.0

    def _acquire(self, linger: float = 0.0, since: float | None = None) -> Outcome | None:
        call = self.call
        details: dict[str, Any] = {"token": self.token, "call_id": call.call_id}
        if linger or call.attempt or self.may_be_second or self._is_woken:
            details |= {"copy": call.copy, "attempt": call.attempt, "remember": self._remember_s()}
            details |= {"linger": linger, "since": self._since_s() if since is None else since}
        if self.may_be_second:
            details["second"] = True
        if call.is_one_of_several:
            details["shared"] = True
        same_host = self.guard.settings.same_host
        outcome: Outcome | None = self.patiently(
            partial(self.lock.acquire_at_death, same_host=same_host, **details), None
        )
        if self.lock.heirs:  # it has served the line
            look_within(self.task.app, self.task.name, self.lock.name, HAND_OVER_S)
            self.wake_heirs()
        if outcome is not None and outcome.holder is not None and self.request.is_eager:
            # An eager replace() runs within the body, and under the lock, that it replaces.
            return None if outcome.holder.task_id == call.task_id else outcome
        return outcome

    def _linger(self) -> Outcome | None:
        waits = self.options.may_wait and policy_of(self.options, self.request) == "wait"
        stands = waits and not self.call.shares_id  # else its place in the line may be another call's
        linger_s = _YOUNG_S if stands else 0.0
        outcome = self._acquire(linger=linger_s)
        if outcome is None or outcome.holder is None:
            return outcome
        since = None
        if stands:
            self.lingers_since = since = self.call.since or outcome.server_time
        give_up = self.lock.clock() + _LINGER_S
        parks_now = not stands or outcome.waiters >= _LINGER_BEHIND or self.options.max_wait == 0
        while outcome is not None and (pause_s := self._asks_again_in(outcome, parks_now=parks_now)):
            if self.lock.clock() > give_up:
                break
            time.sleep(pause_s)
            outcome = self._acquire(linger=linger_s, since=since)
        return outcome

    def _asks_again_in(self, outcome: Outcome, *, parks_now: bool) -> float:
        """Seconds after which the call asks again in its pool slot; 0 if it does not."""
        if outcome.paced and self._is_woken:  # it may have been handed its permit ahead of its start
            remaining_s = outcome.remaining_s or 0.0
            return remaining_s if remaining_s <= AHEAD_S else 0.0
        if parks_now or not self._is_young(outcome.holder, outcome.server_time):
            return 0.0
        return _LINGER_POLL_S * max(1, outcome.waiters)

    def _is_young(self, holder: Holder | None, server_time: float) -> bool:
        """True if another call has had the lock, or was woken for it, since a moment ago."""
        if holder is None or holder.since is None or holder.task_id == self.call.task_id:
            return False
        return holder.state in ("running", "handed") and server_time - holder.since < _YOUNG_S

    def _since_s(self) -> float:
        """Server time since which this attempt waits; 0 if it does not."""
        return self.call.since if self.call.copy != ORIGINAL else 0.0

    def _remember_s(self) -> float:
        """Seconds for which it is remembered that this message starts the call; 0 if there is no other.

        By 0 the first command of a first delivery is known, which may come late: when its call waits in line.
        """
        return BEGUN_S if self._is_woken or (self.may_be_second and self.options.may_wait) else 0.0

    @property
    def _is_woken(self) -> bool:
        """Whether its turn has come once, so that other messages may start the call, too."""
        return self.call.copy != ORIGINAL or self.has_parked

    def _is_awaited(self) -> bool:
        return any(getattr(self.request, name, None) for name in _AWAITED)

    def _queued_as(self, holder: Holder | None) -> str | None:
        """Id of the queued task of which this call is a duplicate; None if this one is queued from now on.

        For a call that nobody has asked when it was published, as beat publishes a task that it has not
        imported: without this every tick would wait in line, and run.
        """
        request, awaited = self.request, self._is_awaited()
        # Another delivery of the call that runs is not queued: what is published now must run after it.
        is_own = holder is not None and holder.task_id == self.call.task_id
        if self.options.dedupe != "until_started" or awaited or not self.call.bare or is_own:
            return None
        if request.is_eager:
            return None
        options, mark = self.options, Mark(self.lock.name, self.call.task_id)
        dedupe, client = "until_started", self.lock.client
        (found,) = mark_all(client, [mark], dedupe=dedupe, lease=options.queue_lease, limit=options.limit)
        if isinstance(found, Marked) and self._frees(found.state, found.task_id):
            return self._queued_as(holder)
        if isinstance(found, Marked) and found.is_duplicate:
            return found.task_id
        if isinstance(found, Marked):  # else it is not known, and it waits all the same
            self.call = self.call._replace(marked=True)
        return None
