"""What becomes of a delivery of a call: decided by what is known of it, without asking or doing anything.

`Attempt` does what `decide` says, and comes again with what it has learned, until a step ends the delivery.
The rules are read from above, and the first that applies holds; docs/how-it-works.md has them as a table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Literal, NamedTuple

Policy = Literal["skip", "raise", "retry", "wait", "join", "callable"]
Told = Literal["acquired", "held", "stale", "unguarded"]


class Ask(Enum):
    """What an attempt has to learn next."""

    ASK_JOINED = "ask for the result of the call that it has joined"
    ACQUIRE = "try to acquire the lock"
    RENAME = "take it for another call with that task id, and try again"
    FREE_HELD = "free the lock if that call has ended"
    ASK_ENDED = "ask whether this attempt has ended before"
    MARK = "mark its key, or learn which queued call it duplicates"
    MEET = "send `lock_conflict`"
    ASK_LINE = "ask whether it may stand in line"
    PARK = "stand in line"
    ASK_DONE = "ask whether the same call has succeeded within `dedupe_for`"
    BEGIN = "renew the lease from now on"


class End(Enum):
    """What ends a delivery."""

    RUN = "run the body"
    RUN_UNGUARDED = "run the body without a lock"
    END_AS_JOINED = "end with that result"
    END_AS_STORED = "end with the stored result once more, for its chord to count it"
    SKIP = "skip"
    SKIP_DONE = "skip, as the same call has succeeded"
    CALL = "end as the callable says"
    FAIL = "raise `AlreadyRunning`"
    TIME_OUT = "raise `LockTimeout`"
    COME_BACK = "come back after `retry_delay`"
    COME_BACK_AS_COPY = "come back after `retry_delay`, beside the message that stands in line"
    COME_BACK_FOR_OWN = "come back after `retry_delay`, however often"
    LOOK_AGAIN = "come back once, after a second"
    WAIT = "end the delivery; the call is woken when its turn has come"
    DROP = "drop the message"


class Facts(NamedTuple):
    """What is known of a delivery. Of what was not asked yet, None.

    Attributes:
        policy: What `on_conflict` says, with `auto` decided; "callable" for any callable.
        again: A body of this attempt may have begun before.
        has_begun: A body of the call may have, if only in an attempt before.
        may_be_new: Its message says nothing of the call, and its broker not that it is delivered again: a
            call that has the task id before this one may be another.
        is_eager: It was called by `apply`.
        joins: It has met a call with whose result it is to end.
        asks_queued: Nobody has asked whether it is a duplicate of a queued call, and nothing waits for it.
        asks_done: It may be a duplicate of a call that has succeeded.
        looks_again: Another delivery of it that has had the lock may be about to end.
        joined: Whether the joined call has ended.
        told: What acquiring has found.
        is_paced: A permit is free, but no call may start yet.
        is_same: The holder has this call's task id.
        is_own: The holder is this very call: another delivery or attempt.
        runs: The holder's body runs.
        is_held_back: The lock is held for the retry of another call.
        may_have_ended: Another delivery of this attempt may have ended.
        is_over: It has waited for `max_wait`.
        freed: Whether the lock was held for a call that has ended, and is free by now.
        ended: What is known of the end of this attempt: "no", "stored" if a chord may count that again,
            "told" if not.
        met: Whether the conflict is told.
        is_queued: Whether the same call is queued.
        may_stand: Whether it may stand in line.
        place: What came of parking.
        is_done: Whether the same call has succeeded.
        begun: Whether its lease is renewed.
    """

    policy: Policy
    again: bool = False
    has_begun: bool = False
    may_be_new: bool = False
    is_eager: bool = False
    joins: bool = False
    asks_queued: bool = False
    asks_done: bool = False
    looks_again: bool = False
    joined: bool | None = None
    told: Told | None = None
    is_paced: bool = False
    is_same: bool = False
    is_own: bool = False
    runs: bool = False
    is_held_back: bool = False
    may_have_ended: bool = False
    is_over: bool = False
    freed: bool | None = None
    ended: Literal["no", "stored", "told"] | None = None
    met: bool = False
    is_queued: bool | None = None
    may_stand: bool | None = None
    place: Literal["stale", "taken", "turn", "waits"] | None = None
    is_done: bool | None = None
    begun: bool = False

    @property
    def told_policy(self) -> Policy:
        """What receivers of `lock_conflict` are told that becomes of the call."""
        if self.is_own or self.is_queued:
            return "wait" if self.is_own else "skip"
        return "retry" if self.policy in ("skip", "raise") and _may_be_its_start(self) else self.policy


class Rule(NamedTuple):
    """When it applies, in words and as code, and what follows."""

    when: str
    applies: Callable[[Facts], object]
    then: Ask | End


_BEFORE = (
    Rule("it has joined a call", lambda f: f.joins and f.joined is None, Ask.ASK_JOINED),
    Rule("the call that it has joined has ended", lambda f: f.joined, End.END_AS_JOINED),
    Rule("otherwise", lambda f: True, Ask.ACQUIRE),
)
_UNGUARDED = (Rule("`on_redis_error` is `run`", lambda f: True, End.RUN_UNGUARDED),)
_STALE = (
    Rule("nothing tells it from an earlier call with its task id", lambda f: f.may_be_new, Ask.RENAME),
    Rule("otherwise", lambda f: True, End.DROP),
)
_HELD = (
    Rule(
        "it is held for a retry of another call", lambda f: f.is_held_back and f.freed is None, Ask.FREE_HELD
    ),
    Rule("that call has ended", lambda f: f.freed, Ask.ACQUIRE),
    Rule(
        "the attempt may have ended, and does not run",
        lambda f: (
            f.ended is None and f.may_have_ended and (f.is_paced or (f.again and not (f.is_same and f.runs)))
        ),
        Ask.ASK_ENDED,
    ),
    Rule(
        "the attempt has succeeded, and a chord may not have counted it",
        lambda f: f.ended == "stored",
        End.END_AS_STORED,
    ),
    Rule("the attempt has ended", lambda f: f.ended == "told", End.DROP),
    Rule(
        "`dedupe` is `until_started`, and nobody has asked for it",
        lambda f: f.asks_queued and not f.is_same and f.is_queued is None,
        Ask.MARK,
    ),
    Rule("nobody is told of the conflict", lambda f: not f.met, Ask.MEET),
    Rule("the holder is the call itself", lambda f: f.is_own, End.COME_BACK_FOR_OWN),
    Rule("the same call is queued", lambda f: f.is_queued, End.SKIP),
    Rule("`on_conflict` is a callable", lambda f: f.policy == "callable", End.CALL),
    Rule("`on_conflict` is `skip`", lambda f: f.policy == "skip" and not _may_be_its_start(f), End.SKIP),
    Rule("`on_conflict` is `raise`", lambda f: f.policy == "raise" and not _may_be_its_start(f), End.FAIL),
    Rule("it has waited for `max_wait`", lambda f: f.is_over, End.TIME_OUT),
    Rule(
        "`on_conflict` is `retry`, or the call is eager, or the start that paces it may be its own",
        lambda f: f.policy not in ("wait", "join") or f.is_eager,
        End.COME_BACK,
    ),
    Rule("it is not known whether it may stand in line", lambda f: f.may_stand is None, Ask.ASK_LINE),
    Rule("it may not stand in line", lambda f: not f.may_stand, End.COME_BACK),
    Rule("it does not stand in line", lambda f: f.place is None, Ask.PARK),
    Rule("another message has started it", lambda f: f.place == "stale", End.DROP),
    Rule("another call with its task id stands there", lambda f: f.place == "taken", End.COME_BACK_AS_COPY),
    Rule("the lock came free meanwhile", lambda f: f.place == "turn", Ask.ACQUIRE),
    Rule("otherwise", lambda f: True, End.WAIT),
)
_ACQUIRED = (
    Rule("the same call may have succeeded", lambda f: f.asks_done and f.is_done is None, Ask.ASK_DONE),
    Rule("the same call has succeeded", lambda f: f.is_done, End.SKIP_DONE),
    Rule("it has joined a call", lambda f: f.joins and f.joined is None, Ask.ASK_JOINED),
    Rule("the call that it has joined has ended", lambda f: f.joined, End.END_AS_JOINED),
    Rule("its lease is not renewed yet", lambda f: not f.begun, Ask.BEGIN),
    Rule("the attempt may have ended", lambda f: f.may_have_ended and f.ended is None, Ask.ASK_ENDED),
    Rule(
        "the attempt has succeeded, and a chord may not have counted it",
        lambda f: f.ended == "stored",
        End.END_AS_STORED,
    ),
    Rule("the attempt has ended", lambda f: f.ended == "told", End.DROP),
    Rule("another delivery of it may be about to end", lambda f: f.looks_again, End.LOOK_AGAIN),
    Rule("it has waited for longer than `max_wait`", lambda f: f.is_over and not f.again, End.TIME_OUT),
    Rule("otherwise", lambda f: True, End.RUN),
)

RULES: Mapping[Told | None, tuple[Rule, ...]] = {
    None: _BEFORE,
    "unguarded": _UNGUARDED,
    "stale": _STALE,
    "held": _HELD,
    "acquired": _ACQUIRED,
}
"""The rules, by what acquiring the lock has found."""


def decide(facts: Facts) -> Ask | End:
    """What an attempt does next of which this much is known."""
    return next(rule.then for rule in RULES[facts.told] if rule.applies(facts))


def _may_be_its_start(facts: Facts) -> bool:
    """Whether the call is refused for a start that may be its own: then it is not refused for good."""
    return facts.is_paced and facts.has_begun
