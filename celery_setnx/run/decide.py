"""What a delivery of a call does next. `decide` is pure: it only looks at facts.

`Attempt` carries each step out and calls `decide` again with what it has learned. The first rule that applies
holds. docs/how-it-works.md lists the rules by which a delivery ends.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Literal, NamedTuple

Policy = Literal["skip", "raise", "retry", "wait", "join", "callable"]
Answer = Literal["acquired", "held", "stale", "superseded", "unguarded"]
Place = Literal["stale", "taken", "crowded", "turn", "waits"]


class Ask(Enum):
    """A question: what an attempt has to learn before its next step."""

    ASK_JOINED = "ask for the result of the call that it joined"
    ACQUIRE = "try to acquire the lock"
    RENAME = "take it for a new call that was given an old task id, and try again"
    FREE_HELD = "free the lock if that call has ended"
    ASK_ENDED = "ask whether this attempt has ended already"
    MARK = "mark its key, or find the queued call that it duplicates"
    ANNOUNCE = "send `lock_conflict`"
    ASK_LINE = "ask whether it may stand in line"
    PARK = "stand in line"
    ASK_DONE = "ask whether the same call has succeeded within `dedupe_for`"
    BEGIN = "start to renew the lease"


class End(Enum):
    """How a delivery ends."""

    RUN = "run the body"
    RUN_UNGUARDED = "run the body without a lock"
    END_AS_JOINED = "end with its result"
    END_AS_STORED = "end with the stored result, for its chord to count"
    SKIP = "skip"
    SKIP_DONE = "skip as done"
    SKIP_SUPERSEDED = "skip as superseded"
    CALL = "do as the callable says"
    FAIL = "raise `AlreadyRunning`"
    TIME_OUT = "raise `LockTimeout`"
    COME_BACK = "come back after `retry_delay`"
    COME_BACK_AS_COPY = "come back after `retry_delay`, outside the line"
    COME_BACK_FOR_OWN = "come back after `retry_delay`, even past `max_wait`"
    LOOK_AGAIN = "release, and come back once, in a second"
    WAIT = "park: a message wakes the call"
    DELAY = "wait in the broker"
    DROP = "drop the message"


class Facts:
    """What is known of a delivery; None of what nobody has asked yet."""

    policy: Policy  # what `on_conflict` says, with `auto` decided
    again: bool = False  # a body of this attempt may have begun
    has_begun: bool = False  # a body of the call may have begun, in this attempt or an earlier one
    may_be_new: bool = False  # its message has no header, and the broker does not flag it
    is_eager: bool = False  # called by `apply`
    is_early: bool = False  # it is to wait in the broker still
    joins: bool = False  # it ends with the result of another call that it has met
    asks_queued: bool = False  # no publisher has asked if it duplicates a queued call; nothing waits for it
    asks_done: bool = False  # it may duplicate a call that has succeeded
    looks_again: bool = False  # another delivery of it that had the lock may be about to end
    joined: bool | None = None  # whether the joined call has ended
    answer: Answer | None = None  # to the attempt to acquire the lock
    is_paced: bool = False  # a permit is free, but no call may start yet
    is_same: bool = False  # the holder has this call's task id
    is_own: bool = False  # the holder is another delivery or attempt of this very call
    runs: bool = False  # the holder's body runs
    is_held_back: bool = False  # the lock is held for the retry of another call
    may_have_ended: bool = False  # another delivery of this attempt may have ended
    is_over: bool = False  # it has waited for `max_wait`
    freed: bool | None = None  # whether the lock was held for a call that has ended, and is free now
    ended: Literal["no", "stored", "noted"] | None = None  # "stored": a chord may have to count it again
    announced: bool = False  # receivers of `lock_conflict` know
    is_queued: bool | None = None  # whether the same call is queued
    may_stand: bool | None = None  # whether it may stand in line
    place: Place | None = None  # what parking has found
    is_done: bool | None = None  # whether the same call has succeeded
    begun: bool = False  # its lease is renewed

    def __init__(self, policy: Policy) -> None:
        self.policy = policy

    @property
    def may_be_its_start(self) -> bool:
        """Whether the start that paces it may be its own: a later attempt is not refused for that."""
        return self.is_paced and self.has_begun

    @property
    def runs_itself(self) -> bool:
        """Whether the holder has its task id, and its body runs."""
        return self.is_same and self.runs

    @property
    def announced_policy(self) -> Policy:
        """What becomes of the call, for receivers of `lock_conflict`."""
        if self.is_own or self.is_queued:
            return "wait" if self.is_own else "skip"
        return "retry" if self.policy in ("skip", "raise") and self.may_be_its_start else self.policy


class Rule(NamedTuple):
    """When a rule applies, in words and as code, and the step that follows."""

    when: str
    applies: Callable[[Facts], object]
    then: Ask | End


def _otherwise(then: Ask | End) -> Rule:
    return Rule("otherwise", lambda _facts: True, then)


_JOINED = (
    Rule("it has joined a call", lambda f: f.joins and f.joined is None, Ask.ASK_JOINED),
    Rule("the joined call has ended", lambda f: f.joined, End.END_AS_JOINED),
)
_ENDED = (
    Rule("the attempt has succeeded, in a chord", lambda f: f.ended == "stored", End.END_AS_STORED),
    Rule("the attempt has ended", lambda f: f.ended == "noted", End.DROP),
)
_BEFORE = (
    Rule("its time has not come", lambda f: f.is_early, End.DELAY),
    *_JOINED,
    _otherwise(Ask.ACQUIRE),
)
_UNGUARDED = (_otherwise(End.RUN_UNGUARDED),)
_STALE = (
    Rule("it may be a new call with an old task id", lambda f: f.may_be_new, Ask.RENAME),
    _otherwise(End.DROP),
)
_HELD = (
    Rule("it is held for another's retry", lambda f: f.is_held_back and f.freed is None, Ask.FREE_HELD),
    Rule("that call has ended", lambda f: f.freed, Ask.ACQUIRE),
    Rule(
        "the attempt may have ended, and does not hold the lock",
        lambda f: f.ended is None and f.may_have_ended and (f.is_paced or (f.again and not f.runs_itself)),
        Ask.ASK_ENDED,
    ),
    *_ENDED,
    Rule(
        "`dedupe` is `until_started`, and no publisher has asked",
        lambda f: f.asks_queued and not f.is_same and f.is_queued is None,
        Ask.MARK,
    ),
    Rule("the conflict is not announced", lambda f: not f.announced, Ask.ANNOUNCE),
    Rule("the holder is this very call", lambda f: f.is_own, End.COME_BACK_FOR_OWN),
    Rule("an equal call is queued", lambda f: f.is_queued, End.SKIP),
    Rule("`on_conflict` is a callable", lambda f: f.policy == "callable", End.CALL),
    Rule(
        "`on_conflict` is `skip`, and it is no paced retry",
        lambda f: f.policy == "skip" and not f.may_be_its_start,
        End.SKIP,
    ),
    Rule(
        "`on_conflict` is `raise`, and it is no paced retry",
        lambda f: f.policy == "raise" and not f.may_be_its_start,
        End.FAIL,
    ),
    Rule("it has waited for `max_wait`", lambda f: f.is_over, End.TIME_OUT),
    Rule(
        "`on_conflict` is not `wait` or `join`, or the call is eager",
        lambda f: f.policy not in ("wait", "join") or f.is_eager,
        End.COME_BACK,
    ),
    Rule("it is not known whether it may stand in line", lambda f: f.may_stand is None, Ask.ASK_LINE),
    Rule("it may not wait in line", lambda f: not f.may_stand, End.COME_BACK),
    Rule("it does not stand in line", lambda f: f.place is None, Ask.PARK),
    Rule("another message has started it", lambda f: f.place == "stale", End.DROP),
    Rule("another call with its task id is in line", lambda f: f.place == "taken", End.COME_BACK_AS_COPY),
    Rule("another call of its key waits in the pause", lambda f: f.place == "crowded", End.SKIP),
    Rule("the lock came free meanwhile", lambda f: f.place == "turn", Ask.ACQUIRE),
    _otherwise(End.WAIT),
)
_SUPERSEDED = (
    Rule("the attempt may have ended", lambda f: f.may_have_ended and f.ended is None, Ask.ASK_ENDED),
    *_ENDED,
    Rule("another delivery of it may be about to end", lambda f: f.looks_again, End.LOOK_AGAIN),
    _otherwise(End.SKIP_SUPERSEDED),
)
_ACQUIRED = (
    Rule("the same call may have succeeded", lambda f: f.asks_done and f.is_done is None, Ask.ASK_DONE),
    Rule("an equal call has succeeded", lambda f: f.is_done, End.SKIP_DONE),
    *_JOINED,
    Rule("its lease is not renewed", lambda f: not f.begun, Ask.BEGIN),
    Rule("the attempt may have ended", lambda f: f.may_have_ended and f.ended is None, Ask.ASK_ENDED),
    *_ENDED,
    Rule("another delivery of it may be about to end", lambda f: f.looks_again, End.LOOK_AGAIN),
    Rule("it has waited longer than `max_wait`", lambda f: f.is_over and not f.again, End.TIME_OUT),
    _otherwise(End.RUN),
)

RULES: Mapping[Answer | None, tuple[Rule, ...]] = {
    None: _BEFORE,
    "unguarded": _UNGUARDED,
    "stale": _STALE,
    "held": _HELD,
    "superseded": _SUPERSEDED,
    "acquired": _ACQUIRED,
}
"""The rules, by the answer to the attempt to acquire the lock."""


def decide(facts: Facts) -> Ask | End:
    """The next step of a delivery."""
    rules, place = RULES[facts.answer], 0
    while not rules[place].applies(facts):
        place += 1
    return rules[place].then
