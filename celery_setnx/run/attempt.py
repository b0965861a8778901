"""One delivery of one call: what is known of it, and what carries out the steps that `decide` names."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NoReturn, cast

from celery import Task
from celery.app.task import Context
from celery.result import result_from_tuple
from celery.states import SUCCESS
from celery.utils.dispatch import Signal

from celery_setnx.arguments import Arguments
from celery_setnx.call.arrived import let_go
from celery_setnx.call.back import (
    Dropped,
    come_back,
    counts_once,
    remember_s,
    tells_redelivery,
    wait_in_broker,
)
from celery_setnx.call.delivery import Delivery
from celery_setnx.call.ended import free_ended, stored_end
from celery_setnx.call.guard import Guard, is_singleton
from celery_setnx.call.live import learn, live_terms_at
from celery_setnx.call.message import Call, RunningCall, retries_of
from celery_setnx.call.wake import give_turn, give_turns, look_within, report_take_over
from celery_setnx.connection import client_for, new_client
from celery_setnx.exceptions import LockTimeout, LockUnavailable, SetnxError
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.keeper import keeper_for_process
from celery_setnx.lock.line import BEGUN_S, leave
from celery_setnx.lock.marks import Mark, MarkReply, done_by, free_all, mark_all
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.process import identity
from celery_setnx.lock.receipt import has_receipt
from celery_setnx.lock.record import Holder, task_token
from celery_setnx.lock.verbs import NO_GENERATION, Caller, Generation
from celery_setnx.log import Log, fields, say_loudly
from celery_setnx.options import UNSET
from celery_setnx.run.conflict import (
    Conflict,
    WaitInLine,
    backoff,
    is_own,
    policy_of,
    skip_done,
    skip_superseded,
)
from celery_setnx.run.decide import Ask, Facts, Policy, decide
from celery_setnx.run.events import follow
from celery_setnx.run.join import holders_end, joined_by, result_of
from celery_setnx.run.linger import BEHIND, YOUNG_S, linger
from celery_setnx.run.park import Parked, may_stand_in_line, park
from celery_setnx.run.receipt import receipt_of
from celery_setnx.run.started import store_started
from celery_setnx.signals import lock_acquired, lock_lost, lock_taken_over, lock_woken, uniqueness_lapsed

logger = Log("celery_setnx")

_LOOK_AGAIN_S = 1.0
_LATE_S = 1.0  # a call that comes back may make its last try this long after its max_wait
_CLOCKS_S = 60.0  # by which a publisher's clock may be ahead of a worker's
_STARTED = "another message has started this call, or has failed"

# Fields of a message whose call something else waits for.
_AWAITED = ("parent_id", "group", "chord", "chain", "callbacks", "errbacks")


class Attempt:
    """One delivery of one call.

    `decide` names the next step. A question notes its answer in `facts`, and an end is the last step. Each
    step is a method with the name that it has in `Ask` or `End`.
    """

    conflict: Conflict
    held: HeldLock | None = None
    outcome = Outcome(False)
    acquired_at = 0.0
    has_begun = has_succeeded = False  # its body
    keeps_mark = False  # the mark that it has found under its lock may be that of its retry
    is_told = False  # that another thread has asked for its lock
    lingers_since = 0.0  # server time at which it began to stand in line in its pool slot; 0: it did not
    has_parked = False  # its turn came while it parked
    _waits: Parked | None = None
    _stored: Mapping[str, Any] | None = None
    _why_dropped = _STARTED
    _queued_as: str | None = None
    _done: str | None = None

    def __init__(
        self, task: Task, guard: Guard, request: Context, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.task, self.guard, self.request = task, guard, request
        self._delivery = delivery = Delivery.of(request)
        self.call = guard.fitting(delivery.call if delivery else Call.of(task.name, vars(request)))
        self.pid = os.getpid()
        if delivery is not None:
            follow(task.app, request.hostname, wanted=delivery.has_events)
        try:
            self.options = guard.options_of(self.call.options)
            if self.options.on_conflict == "join" and not request.is_eager:  # an eager result is not stored
                guard.check_backend(self.options)
            given = Arguments.given_to(task, args, kwargs) if request.is_eager else Arguments(args, kwargs)
            self._learn_terms()
            self.lock = guard.lock(self.call, given, info_of(self.call, request.hostname))
        except SetnxError:
            if mark := self.call.mark:  # its publisher did not know that it is refused here
                free_all(client_for(guard.app), [mark])
            raise
        if not self.call.key:
            self.call = self.call._replace(key=self.lock.name)
        # Whether no publisher has asked if it duplicates another call, and nothing waits for it.
        is_unasked = not (self.call.has_header or any(getattr(request, name, None) for name in _AWAITED))
        if is_unasked and self.options.dedupe_for:
            self.call = self.call._replace(unasked=True)  # its message says so if it comes back
        nonce = delivery.nonce if delivery else os.urandom(6).hex()
        self.token = task_token(self.call.task_id, retries_of(request.retries), nonce)
        self.keeper = keeper_for_process(self.lock.clock)
        self.running = RunningCall(self.call)
        self.running.stand_on(request)
        self.facts = self._known(is_unasked=is_unasked)

    def __str__(self) -> str:
        return str(self.call)

    def decided(self, body: Callable[[], Any]) -> Any:
        """The body's result, or what the call ends with instead."""
        self.body = body
        while isinstance(step := decide(self.facts), Ask):
            getattr(self, f"_{step.name.lower()}")()
        return getattr(self, f"_{step.name.lower()}")()

    def send(self, signal: Signal, **details: Any) -> None:
        """Send one of our signals about this call."""
        if signal.receivers:
            details |= {"key": self.lock.name, "about": self.call.about}
            signal.send(sender=self.task, task_id=self.request.id, **details)

    def patiently(self, ask: Callable[[], Any], unguarded: Any) -> Any:
        """The reply of Redis, asked again for up to a lease; `unguarded` if the body runs without a lock."""
        give_up = None
        pause = 0.05
        while True:
            try:
                return ask()
            except LockUnavailable as error:
                if error.unsent:  # the broker is in trouble, not Redis
                    raise
                say_loudly(error)
                if self.options.on_redis_error == "run":
                    logger.warning(
                        "%s runs without its lock (on_redis_error='run'). %s",
                        self,
                        error.brief,
                        extra=fields("unguarded", self.call),
                    )
                    return unguarded
                if self.options.on_redis_error == "raise":
                    raise
                give_up = give_up or self.lock.clock() + self.lock.lease_s
                if self.lock.clock() >= give_up:
                    self._come_back_later(error.brief)
                time.sleep(pause * random.uniform(0.5, 1.0))
                pause = min(pause * 2, 1.0, self.lock.lease_s / 4)

    def lost(self, held: HeldLock, reason: str) -> None:
        """Say that it has lost its lock; its body runs on."""
        call = self.call
        logger.warning(
            "%s lost its lock %s: %s. The body runs on, and another call may run at the same time. To stop "
            "the body, call lock.ensure() in it.",
            self,
            held.key,
            reason,
            extra=fields("lost", call),
        )
        if call.is_woken:
            # Redis may have lost its data: without a ticket the courier would wake the call beside itself.
            with suppress(SetnxError):  # a client of its own, because this may be the keeper's thread
                left = leave(new_client(self.task.app), call.place(BEGUN_S), copy=call.copy)
                give_turn(self.task.app, self.task.name, held.key, left.turn)
        self.send(lock_lost, fence=held.fence, reason=reason)

    def _learn_terms(self) -> None:
        """Know the live terms of its task: those that its delivery has brought, or newer ones."""
        if (delivery := self._delivery) is not None:
            scope = self.guard.scope_at(self.call)
            learn(self.task.app, scope, delivery.live, delivery.live_read_at)

    def heed_terms(self) -> None:
        """Have the release heed the live terms of its task that were set while its body ran."""
        self._learn_terms()
        live = live_terms_at(self.task.app, self.lock.name)
        self.lock.terms = self.lock.terms._replace(live=live)

    def give_turns(self) -> None:
        """Wake the call that the lock was handed to by its release, or note when to look at its line."""
        give_turns(self.task.app, self.task.name, self.lock)

    @property
    def is_woken(self) -> bool:
        """Whether another message may start the call, too: its turn has come before, or while it parked."""
        return self.call.is_woken or self.has_parked

    def waited_s(self) -> float:
        """Seconds since this attempt first met a held lock; 0 if it has not."""
        since = self.lingers_since or self.call.since
        return max(0.0, self.outcome.server_time - since) if since else 0.0

    # Facts that need no question.

    def _known(self, *, is_unasked: bool) -> Facts:
        call, options, request, task = self.call, self.options, self.request, self.task
        self._policy = policy_of(options, request)
        is_again = call.again or (task.acks_late and not tells_redelivery(task.app))
        has_waited = call.again and call.waits and not call.is_woken
        is_done_asked = call.unasked or call.marked is True  # else something waits for it, and it runs
        is_linked = request.callbacks or request.errbacks or request.retries
        facts, is_eager = Facts(_named(self._policy)), bool(request.is_eager)
        facts.is_eager, facts.again = is_eager, bool(is_again and not is_eager)
        facts.has_begun = bool(call.again or request.retries)
        facts.may_be_new = not call.has_header and not call.again
        facts.joins = options.on_conflict == "join" and call.join is not None
        left_s = call.due - time.time()
        facts.is_early = 0 < left_s < (options.debounce or 0.0) + _CLOCKS_S
        if options.dedupe == "until_started" and not options.replaces:
            facts.asks_queued = is_unasked and not is_eager
        if options.dedupe_for:
            facts.asks_done = is_done_asked and not (is_linked or is_eager)
        # A message that is acknowledged early has no twin: it has waited for the attempt before it. And a
        # lock that was held for it stays: given back here, it would be free for all.
        facts.looks_again = bool(
            has_waited and not call.asked and task.acks_late and not options.hold_on_retry
        )
        return facts

    # Questions: each notes its answer in the facts.

    def _ask_joined(self) -> None:
        """The stored end of the joined call."""

        def ask() -> Any:
            if self.held is not None:  # the joined call may have given the lock back meanwhile
                holder, now = None, self.held.server_time()
            else:
                seen = self.lock.look()
                holder, now = seen.longest, seen.server_time
            self.call, end = holders_end(self.task, self.call, self.options, holder, now)
            return end

        self.joined_end = self.patiently(ask, UNSET) if self.held is None else ask()
        self.facts.joined = self.joined_end is not UNSET

    def _acquire(self) -> None:
        outcome, facts = self._ask_until_parked(), self.facts
        facts.policy, facts.announced = _named(self._policy), False
        facts.freed = facts.ended = facts.is_queued = facts.place = None
        if outcome is None:
            facts.answer = "unguarded"
            return
        self.outcome, self.held = outcome, outcome.lock
        facts.answer = "stale" if outcome.stale else "held" if self.held is None else "acquired"
        if outcome.superseded_by is not None:
            facts.answer = "superseded"
        facts.may_have_ended = facts.again or self._may_have_twin()
        facts.is_over = self._is_over(0.0 if self.held is None else _LATE_S)
        self._waits_alone = outcome.paused and self._may_wait_alone()
        if self._waits_alone:
            facts.policy = "wait"
        if facts.answer == "acquired":
            self.acquired_at = self.lock.clock()
            self.keeps_mark = facts.again and outcome.mark == self.call.task_id
            facts.looks_again &= outcome.taken_over_from is None
            facts.joined = None
        elif facts.answer == "held":
            holder = cast("Holder", outcome.holder)
            facts.is_paced, facts.runs = outcome.paced, holder.state == "running"
            facts.is_same = holder.task_id == self.call.task_id
            facts.is_own = is_own(self.call, holder)
            facts.is_held_back = "held_for_retry" in self._others().values()

    def _may_wait_alone(self) -> bool:
        """Whether it may be the one of its key that waits in a pause, where `auto` would skip all."""
        would_skip = self.options.on_conflict == "auto" and self.facts.policy == "skip"
        may_wait = is_singleton(self.task) and not (self.facts.is_eager or self.facts.is_over)
        return would_skip and may_wait

    def _rename(self) -> None:
        """The call with this task id has begun long ago. This is a new one, which has no ticket yet."""
        self.call = self.call._replace(call_id=os.urandom(6).hex(), has_header=True)
        self.facts.answer = None
        self.facts.may_be_new = self.facts.asks_queued = False

    def _free_held(self) -> None:
        others = self._others()
        self.facts.freed = any(self._frees(others[other], other) for other in others)

    def _ask_ended(self) -> None:
        """Whether the attempt has ended before. That its lock was released does not tell."""
        stored = self._success_before()
        if stored is not None:
            is_counted_once = self.request.chord and counts_once(self.task.backend)
            self._stored, self._why_dropped = stored, "it has succeeded before"
            self.facts.ended = "stored" if is_counted_once else "noted"
            return
        receipt = receipt_of(self.guard, self.call) if self.facts.again else None
        # A chord counts its member before the receipt is written.
        has_ended = receipt and self.patiently(partial(has_receipt, self.lock.client, receipt), False)
        if has_ended:
            self._why_dropped = "it has ended before"
        self.facts.ended = "noted" if has_ended else "no"

    def _mark(self) -> None:
        """Mark the key as a publisher does, or find the queued call that it duplicates.

        Beat publishes a task that it has not imported without asking: else every tick would wait, and run.
        """
        options, mark = self.options, Mark(self.lock.name, self.call.task_id)
        found: Any = None
        while True:
            (found,) = mark_all(self.lock.client, [mark], dedupe="until_started", lease=options.queue_lease)
            if not (isinstance(found, MarkReply) and self._frees(found.state, found.task_id)):
                break
        is_queued = isinstance(found, MarkReply) and found.is_duplicate
        self._queued_as = found.task_id if is_queued else None
        if isinstance(found, MarkReply) and not is_queued:  # without an answer it waits all the same
            self.call = self.call._replace(marked=True)
        self.facts.is_queued = is_queued

    def _announce(self) -> None:
        """Send `lock_conflict`; a call that joins chooses whose result it ends with."""
        call, outcome, facts = self.call, self.outcome, self.facts
        if self.options.on_conflict == "join" and not facts.is_eager:
            joined = joined_by(self.task, cast("Holder", outcome.holder), call)
            self.call = call = call._replace(join=joined, asked=0)
        since = self.lingers_since or call.since or outcome.server_time
        queued_as = self._queued_as if facts.is_queued else None
        conflict = Conflict(self.task, call._replace(since=since), self.options, outcome, queued_as)
        conflict.tell(policy=facts.announced_policy)
        self.conflict = conflict
        facts.announced, facts.joins = True, self.options.on_conflict == "join" and call.join is not None

    def _ask_line(self) -> None:
        self.conflict.check_base()
        self.facts.may_stand = may_stand_in_line(self.task, self.conflict.call)

    def _park(self) -> None:
        alone = self._waits_alone and not self.facts.has_begun  # one that has begun is skipped for no other
        self.facts.place, self._waits = park(self.conflict, alone=alone)
        self.has_parked = self.has_parked or self.facts.place == "turn"

    def _ask_done(self) -> None:
        """Whether the same call has succeeded within `dedupe_for`.

        Asked under the lock, because the release notes the success.
        """
        held = cast("HeldLock", self.held)
        done: str | None = self.patiently(partial(done_by, self.lock.client, self.lock.name), None)
        if held.remaining_s() < self.lock.lease_s / 2:  # Redis was away, and the lease is not renewed yet
            self._come_back_later(
                f"{self.lock.name} had been held for too long when Redis said that the call is to run"
            )
        self._done = done
        self.facts.is_done = done not in (None, self.call.task_id)

    def _begin(self) -> None:
        held, outcome, call = cast("HeldLock", self.held), self.outcome, self.call
        self.request.setnx_lock = held
        waited_s = self.waited_s()
        self.keeper.watch(held, self.lost, self.options.at_most_for)
        if outcome.taken_over_from is not None:
            dead, told = outcome.taken_over_from, fields("taken_over", call)
            report_take_over(self.task.app, self, held.key, dead, outcome.server_time, told)
            self.send(lock_taken_over, fence=held.fence, holder=dead)
        if call.is_woken:
            text = "%s has its lock %s after waiting %.1f s."
            logger.info(text, self, held.key, waited_s, extra=fields("woken", call))
            self.send(lock_woken, waited_s=waited_s)
        self.send(lock_acquired, fence=held.fence, waited_s=waited_s)
        self.facts.begun = True

    # Ends: each returns the call's result, or raises.

    def _run(self) -> Any:
        # If it was redelivered, its first start has ended the mark.
        has_begun = self.call.again and self.outcome.mark is None
        if self.call.marked is True and self.outcome.mark != self.call.task_id and not has_begun:
            self._report_lapse(self.outcome.mark)
        store_started(self.task, self.request)
        if self.keeps_mark:
            self.patiently(self._free_mark, None)
            self.keeps_mark = False
        self.has_begun = True
        let_go(self.request)
        result = self.body()
        self.has_succeeded = not self.request.is_eager  # an eager result is not stored
        return result

    def _run_unguarded(self) -> Any:
        store_started(self.task, self.request)
        self.has_begun = True
        return self.body()

    def _end_as_joined(self) -> Any:
        return result_of(self.joined_end)

    def _end_as_stored(self) -> Any:
        """The stored result of a chord's member: the worker may have died before the chord counted it.

        Callbacks and the next task of a chain were sent before the result was stored, so they are left out.
        """
        text = "%s has succeeded before, and is counted again for its chord."
        logger.info(text, self, extra=fields("dropped", self.call))
        self.request.chain = self.request.callbacks = None
        stored = self._stored or {}
        children = stored.get("children") or ()
        self.request._children = [result_from_tuple(child, self.task.app) for child in children]
        return stored.get("result")

    def _skip(self) -> Any:
        return self.conflict.skip()

    def _skip_done(self) -> Any:
        return skip_done(self.task, self.call, self.options, cast("str", self._done))

    def _skip_superseded(self) -> Any:
        """Give back what is kept for it; its place in line, and what was handed to it, go with that."""
        task, key = self.task, self.lock.name
        may_hold = self.options.hold_on_retry and self.request.retries
        if may_hold and self.patiently(partial(self.lock.free_held, self.call.task_id), False):
            look_within(task.app, task.name, key, 0.0)
        return skip_superseded(task, self.call, self.options, cast("str", self.outcome.superseded_by))

    def _delay(self) -> NoReturn:
        wait_in_broker(self.task, self.call)

    def _call(self) -> Any:
        try:
            return self._policy(self.conflict)
        except WaitInLine:
            self.facts.policy = "wait"
            return self.decided(self.body)

    def _fail(self) -> NoReturn:
        self.conflict.fail()

    def _time_out(self) -> NoReturn:
        if self.held is None:
            self.conflict.time_out()
        raise LockTimeout(self.task.name, self.lock.name, {}, None, self.waited_s())

    def _come_back(self) -> NoReturn:
        self.conflict.retry()

    def _come_back_as_copy(self) -> NoReturn:
        self.conflict.come_back_as_copy()

    def _come_back_for_own(self) -> NoReturn:
        self.conflict.wait_for_own()

    def _look_again(self) -> NoReturn:
        """The other delivery may have released the lock a moment ago: Celery stores its result after that."""
        reason = "another delivery of it has had the lock, and may be about to end"
        come_back(self.task, self.call._replace(asked=1), _LOOK_AGAIN_S, reason, own=True)

    def _wait(self) -> NoReturn:
        raise cast("Parked", self._waits)

    def _drop(self) -> NoReturn:
        reason = self._why_dropped
        logger.info("%s: this message is dropped: %s.", self, reason, extra=fields("dropped", self.call))
        raise Dropped(reason)

    # Parts of steps.

    def _ask_until_parked(self) -> Outcome | None:
        """Ask for the lock, and again for some milliseconds if it is young; None: run without it."""
        call, options = self.call, self.options
        stands = self.facts.policy == "wait" and options.may_wait
        stands = stands and not call.shares_id  # else its place in line may be that of another call
        linger_s = YOUNG_S if stands else 0.0
        outcome = self._ask_for_lock(linger_s)
        if outcome is None or outcome.holder is None:
            return outcome
        since = None
        if stands:
            self.lingers_since = since = call.since or outcome.server_time
            stands = outcome.waiters < BEHIND and options.max_wait != 0
        ask = partial(self._ask_for_lock, linger_s, since)
        return linger(outcome, ask, self.lock.clock, call.task_id, stands=stands, is_woken=self.is_woken)

    def _ask_for_lock(self, linger_s: float, since: float | None = None) -> Outcome | None:
        call, again = self.call, self.facts.again
        # 0 seconds mark the first command of a first delivery: it may arrive late, when its call waits.
        begun_s = BEGUN_S if self.is_woken or (again and self.options.may_wait) else 0.0
        if since is None:
            since = call.since if call.is_woken else 0.0
        several = call.is_one_of_several
        told = (call.call_id, call.attempt, call.copy, begun_s, linger_s, since, again, several)
        caller = Caller(*told, self._generation())
        same_host = self.guard.settings.same_host
        ask = partial(self.lock.acquire_at_death, same_host=same_host, token=self.token, caller=caller)
        outcome: Outcome | None = self.patiently(ask, None)
        if outcome is not None and outcome.is_due:
            look_within(self.task.app, self.task.name, self.lock.name, 0.0)
        if outcome is not None and outcome.holder is not None and self.facts.is_eager:
            # An eager replace() runs inside the body that it replaces, under its lock.
            return None if outcome.holder.task_id == call.task_id else outcome
        return outcome

    def _generation(self) -> Generation:
        call, options = self.call, self.options
        if not call.generation:
            return NO_GENERATION
        bound_s = options.debounce_max + (options.debounce or 0.0)
        return Generation(call.generation, bound_s, call.leads, remember_s(self.task.app, options))

    def _come_back_later(self, reason: str) -> NoReturn:
        come_back(self.task, self.call, backoff(self.options, self.call.waits), reason)

    def _is_over(self, late_s: float = 0.0) -> bool:
        """Whether it has waited for `max_wait` and `late_s` more."""
        max_wait = self.options.max_wait
        return max_wait is not None and self.waited_s() >= max_wait + late_s

    def _others(self) -> dict[str | None, str]:
        """The other calls that hold the lock, by task id, with its state."""
        holders = (self.outcome.holder, self.outcome.ends_first)
        return {each.task_id: each.state for each in holders if each and each.task_id != self.call.task_id}

    def _frees(self, state: str, task_id: str | None) -> bool:
        """Whether that call has ended, though Redis expects it, and its lock or mark is free now."""
        mark = Mark(self.lock.name, task_id or "")
        return free_ended(self.task.app, self.task.name, mark, state)

    def _may_have_twin(self) -> bool:
        """Whether another message or delivery of this attempt may have stored its result."""
        call = self.call
        if call.again:
            return True
        if self.task.acks_late:  # the delivery that sent this message may come again
            return bool(self.is_woken or call.waits or self.lingers_since)
        # Redis may have come back with older data, in which the call waits.
        return self.is_woken and not call.shares_id

    def _success_before(self) -> Mapping[str, Any] | None:
        """The stored success of this attempt, if another delivery of it may have one."""
        if not self._may_have_twin():
            return None
        stored = stored_end(self.task.app, self.task.name, self.request.id, its_own=True)
        return stored if stored.get("status") == SUCCESS else None

    def _report_lapse(self, marked_by: str | None) -> None:
        logger.warning(
            "%s started after its mark %s: a duplicate may be queued (key %s). Each runs under its lock. If "
            "calls wait in the queue for longer than queue_lease, make that longer.",
            self,
            f"had passed to task {marked_by}" if marked_by else "was gone",
            self.lock.name,
            extra=fields("lapsed", self.call),
        )
        self.send(uniqueness_lapsed, marked_by=marked_by)

    @property
    def mark(self) -> Mark:
        """The mark of its call, whether it has one or not."""
        return Mark(self.lock.name, self.call.task_id, self.call.generation)

    def _free_mark(self) -> None:
        """End the mark: for other deliveries acquiring does so."""
        error = free_all(self.lock.client, [self.mark])
        if error is not None:
            raise error


def _named(policy: Any) -> Policy:
    return "callable" if callable(policy) else policy


def info_of(call: Call, worker: str | None) -> str:
    """The part of a lock's record about this call and this process. The task id is in the token."""
    said = _info_of_process(os.getpid(), call.task, worker)
    if call.is_one_of_several:
        said = f'{said[:-1]},"call":"{call.call_id}"}}'
    return f'{said[:-1]},"about":{json.dumps(call.about)}}}' if call.about else said


@lru_cache(maxsize=1000)
def _info_of_process(pid: int, task: str, worker: str | None) -> str:
    return json.dumps({**identity(), "task": task, "worker": worker}, separators=(",", ":"))
