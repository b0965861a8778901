"""Every error that celery_setnx raises. All pickle, and all survive a JSON result backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery_setnx.wording import HELD_BACK, held, sentence, titled, unstopped


class SetnxError(Exception):
    """Root of all errors of celery_setnx: catch it to catch them all.

    Raised itself only by `clear()` of the test kit, which refuses to delete locks that another host holds.
    """

    def __str__(self) -> str:
        message = self._message()
        return super().__str__() if message is None else sentence(message)

    def _message(self) -> str | None:
        """What it says of its attributes, which may be anybody's words; None if it was given its message."""
        return None


class OptionError(SetnxError, ValueError):
    """An option or a setting is unknown, malformed, or does not go with another.

    Workers raise it at their start and do not start. Elsewhere each call of the task raises it, and so does
    `check(app)`. Options of a single call are checked by `apply_async`, `fan_out` and `send_task`. Fix the
    option that the message names. Also a `ValueError`. It has no attributes.
    """


class UnkeyableCall(SetnxError, TypeError):
    """The key of a call cannot be computed, so the call is neither published nor run.

    The arguments do not fit the task's signature, one of them has no canonical form, or the key function
    failed. Raised where the call is published; in the worker if the publisher does not know the task's code,
    or if the task has `typing=False` and the arguments do not fit. Fix the call. Also a `TypeError`.

    Attributes:
        task: Name of the task, or of the scope.
        reason: Which argument is wrong, and what to do.
    """

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(task, reason)
        self.task = task
        self.reason = reason

    def _message(self) -> str:
        return f"Cannot compute the lock key of a call of {self.task}: {self.reason}"


class AlreadyRunning(SetnxError):
    """The lock is held, or the rate or a pause allows no start yet, and you asked for an error.

    Raised in the worker with `on_conflict="raise"` and by `conflict.fail()`. A `SetnxLock` raises it in a
    `with` statement, after its `wait`. The task's state is FAILURE, logged as INFO without a traceback.
    `autoretry_for` of a `SingletonTask` does not retry it; retry it yourself if you like.

    Attributes:
        task: Name of the task; without a task, of the lock.
        key: The lock's Redis key.
        holder: Who holds the lock, as `Holder.as_dict` gives it: `task`, `about`, `task_id`, `worker`,
            `host`, `pid`, `state`, `fence`, `since`, `deadline`, `value`, `description`. Of several permits,
            the one held for longest. If only the rate delays the call, `state` is `paced` and no task is
            named; if a pause does, it is `paused`.
        remaining_s: Seconds until the deadline of the holder, which renews it; of several permits, until the
            first deadline. If only the rate or a pause delays the call, seconds until the next start. None
            if the lock has no deadline.
        limit: How many may hold the lock at a time. Defaults to 1.
    """

    def __init__(
        self,
        task: str,
        key: str,
        holder: Mapping[str, Any],
        remaining_s: float | None = None,
        limit: int = 1,
    ) -> None:
        super().__init__(task, key, dict(holder), remaining_s, *([] if limit == 1 else [limit]))
        self.task = task
        self.key = key
        self.holder = dict(holder)
        self.remaining_s = remaining_s
        self.limit = limit

    @property
    def about(self) -> str:
        """What the key was made of, such as `account_id=7`; empty if nobody has said it."""
        return str(self.holder.get("about") or "")

    def _message(self) -> str:
        cannot = "may not start yet" if self._is_held_back else "is already running"
        return f"{titled(self.task, self.about)} {cannot}: {self._held()}."

    @property
    def _is_held_back(self) -> bool:
        return self.holder.get("state") in HELD_BACK

    def _held(self) -> str:
        """By whom, and for how long."""
        holder = self.holder.get("description") or "an unknown holder"
        who = held(self.key, holder, self.limit, back=self._is_held_back)
        if self.remaining_s is None:
            return f"{who}, with no deadline"
        if self._is_held_back:
            return f"{who}, for {self.remaining_s:.1f} s more"
        if self.limit > 1:
            return f"{who}; the first of them ends in {self.remaining_s:.1f} s unless it renews its lease"
        return f"{who}, for {self.remaining_s:.1f} s more unless it renews its lease or releases it"


class LockTimeout(AlreadyRunning):
    """A call waited for its lock for longer than `max_wait`.

    Raised in the worker. It is an `AlreadyRunning`, with the same attributes and handled alike. `holder` is
    empty if the lock came free too late.

    Attributes:
        waited_s: Seconds since the first conflict of this attempt.
    """

    def __init__(
        self,
        task: str,
        key: str,
        holder: Mapping[str, Any],
        remaining_s: float | None = None,
        waited_s: float = 0.0,
        limit: int = 1,
    ) -> None:
        super().__init__(task, key, holder, remaining_s, limit)
        self.args = (*self.args[:4], waited_s, *self.args[4:])
        self.waited_s = waited_s

    def _message(self) -> str:
        why = self._held() if self.holder else f"{self.key} came free too late"
        return f"{self.task} gave up after waiting {self.waited_s:.1f} s (max_wait): {why}."


class DuplicateTask(SetnxError):
    """A call was not published, because it is a duplicate: the same call is queued already.

    Or it runs (with `until_done`), or has succeeded (with `dedupe_for`). Raised by `apply_async`, `delay` and
    `send_task` with `on_duplicate="raise"`, and by `duplicate.fail()`. Do not retry: wait for
    `AsyncResult(error.task_id)` instead.

    Attributes:
        task: Name of the task.
        key: The lock's Redis key.
        task_id: Id of the earlier call.
        state: What the earlier call is: `queued`, `running` or `done`.
        about: What the key was made of, such as `account_id=7`. Defaults to nothing.
    """

    def __init__(self, task: str, key: str, task_id: str, state: str, about: str = "") -> None:
        super().__init__(task, key, task_id, state, *([about] if about else []))
        self.task = task
        self.key = key
        self.task_id = task_id
        self.state = state
        self.about = about

    def _message(self) -> str:
        state = "has succeeded" if self.state == "done" else f"is {self.state}"
        return (
            f"A call of {titled(self.task, self.about)} was not published: the same call {state} already, as "
            f"{self.task_id} (key {self.key}). Its result is AsyncResult({self.task_id!r})."
        )


class FanOutFailed(SetnxError):
    """A fan-out stopped early: the broker, Redis, the iterable or a callback failed.

    Raised by `fan_out`; its `__cause__` is the error. Fan the same calls out again: only those that were
    surely sent are marked, and they count as duplicates.

    Attributes:
        task: Name of the task.
        accepted: Calls that the broker has taken.
        duplicates: Calls that were not sent: the same call is queued or running, or has succeeded.
        failed: Calls that cannot be sent at all, such as one without a key.
        uncertain: Calls that were on their way when the broker failed; it may have taken them.
        not_sent: Calls that were drawn from the iterable and not sent.
    """

    def __init__(
        self, task: str, accepted: int, duplicates: int, failed: int, uncertain: int, not_sent: int
    ) -> None:
        super().__init__(task, accepted, duplicates, failed, uncertain, not_sent)
        self.task = task
        self.accepted = accepted
        self.duplicates = duplicates
        self.failed = failed
        self.uncertain = uncertain
        self.not_sent = not_sent

    def _message(self) -> str:
        uncertain = f", {self.uncertain} were on their way and may have arrived" if self.uncertain else ""
        failed = f", {self.failed} failed with errors of their own" if self.failed else ""
        return (
            f"The fan-out of {self.task} ended early: {self.accepted} calls were sent, "
            f"{self.duplicates} were duplicates{failed}{uncertain}, {self.not_sent} were not sent. "
            "Fan the same calls out again: calls that are not known to be sent have no mark."
        )


class LockLost(SetnxError):
    """The lock of a running task is gone, has another holder, or has expired.

    Raised by `lock.ensure()` and `held.renew()`, never by itself: the body goes on until it asks. Stop what
    the lock protects, because another holder may be running.

    Attributes:
        key: The lock's Redis key.
        reason: What was found in Redis.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def _message(self) -> str:
        return (
            f"The lock {self.key} is lost: {unstopped(self.reason)}. Stop what it protects: "
            "another holder may be running, with a larger fence."
        )


class LockUnavailable(SetnxError):
    """Redis cannot answer now: unreachable, loading, read-only, full or busy. Try again later.

    Raised by every method of a lock. In the worker `on_redis_error` decides what becomes of the call. When a
    call is published, it is sent without a mark instead, with a warning. If the outage does not end by itself
    (a full memory, a replica for the primary, an unknown host), the message says what to do, and each process
    logs it as ERROR, once a minute.

    A call fails with this error, too, if the broker did not take it back when it was to wait or retry. The
    message names the cause. Fix that, then send the call again.

    Attributes:
        key: The lock's Redis key.
        reason: The error, in words.
        unsent: The call that the broker did not take, as `task[id]`. Defaults to nothing: Redis is the cause.
    """

    def __init__(self, key: str, reason: str, unsent: str = "") -> None:
        super().__init__(key, reason, *([unsent] if unsent else []))
        self.key = key
        self.reason = reason
        self.unsent = unsent

    @property
    def remedy(self) -> str:
        """What somebody must do to end it; empty if it ends by itself."""
        if self.unsent:
            return "Fix that, then send the call again."
        return next((do for words, do in _MENDED if words.search(self.reason)), "")

    @property
    def brief(self) -> str:
        """The message without what to do, for a line of many."""
        if self.unsent:
            return sentence(
                f"The call {self.unsent} of {self.key} could not be sent back to the broker: {self.reason}"
            )
        return sentence(f"Redis does not serve the lock {self.key} now: {self.reason}")

    def _message(self) -> str:
        return f"{self.brief} {self.remedy}".rstrip()


class LockRefused(SetnxError):
    """Redis refuses a command for good: no such database, an unknown command, a key of another type.

    The call fails at once. A worker or beat that meets this at its start does not start. The message says
    what to do; trying again does not help. If somebody can allow the command, it is a `LockForbidden`.

    Attributes:
        key: The lock's Redis key.
        reason: The server's own words.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    @property
    def remedy(self) -> str:
        """What to do about it."""
        return remedy(self.reason)

    @property
    def brief(self) -> str:
        """The message without what to do, for a line of many."""
        refuses = "is not trusted with" if "CERTIFICATE_VERIFY_FAILED" in self.reason else "refuses to serve"
        return sentence(f"Redis {refuses} the lock {self.key}: {unstopped(self.reason)}")

    def _message(self) -> str:
        return f"{self.brief} {self.remedy}"


class LockForbidden(LockRefused, LockUnavailable):
    """Redis refuses a command until somebody allows it: wrong password, URL or certificate, no permission.

    It is a `LockRefused` and a `LockUnavailable`; `except` for either catches it. A worker or beat that meets
    this at its start does not start. Later it counts as an outage: `on_redis_error` decides, a held lock
    stays held for its lease, and calls are published without a mark. The message says what to do, and each
    process logs it as ERROR, once a minute.

    Attributes:
        key: The lock's Redis key.
        reason: The server's own words.
        unsent: Always empty.
    """


def remedy(reason: str) -> str:
    """What to do about a server that refuses, by its own words."""
    return next(do for words, do in _REMEDIES if words.search(reason))


def is_misled(reason: str) -> bool:
    """Whether the URL or the credentials are wrong: waiting does not help."""
    return any(words.search(reason) for words, _ in _REMEDIES[: len(_DO_FIRST)])


_URL = "the URL in setnx_url (or, without one, that of the result backend or broker)"
COMMANDS = (
    *("EVAL", "EVALSHA", "TIME", "GET", "MGET", "EXISTS", "SET", "GETSET", "DEL", "PTTL", "PEXPIRE"),
    *("PEXPIREAT", "ZADD", "ZREM", "ZREMRANGEBYSCORE", "ZRANGE", "ZRANGEBYSCORE", "ZREVRANGE"),
    *("ZREVRANGEBYSCORE", "ZCOUNT", "ZRANK", "ZSCORE", "HSET", "HGET", "HDEL", "HGETALL"),
)
"""What workers and publishers ask of a lock server; all but the first two inside of scripts."""

_NEEDED = (
    f"celery_setnx needs EVAL, EVALSHA and, inside scripts, {', '.join(COMMANDS[2:-1])} and {COMMANDS[-1]} "
    "on this key, its :holder, :queued, "
    ":line, :calls, :permits, :starts, :done, :newest, :terms, :taken_over, :ticket:* and :successor:*, on "
    "its #1 to #99 and their :holder, on <prefix>:lines:*, <prefix>:receipt:* and <prefix>:terms, and on "
    "setnx:brokers; SELECT for a database "
    "other than 0; in a cluster, CLUSTER SLOTS and COMMAND"
)
_NO_TLS = "write redis:// for rediss:// (redis+cluster:// for rediss+cluster://)"
_DO_FIRST = {
    "certificate is not valid for": (
        f"The certificate is for another host: use the name in the certificate as the host of {_URL}"
    ),
    "CERTIFICATE_VERIFY_FAILED": (
        f"Set ssl_ca_certs in {_URL} to the CA that signed the server's certificate; if the certificate has "
        "expired, renew it"
    ),
    "certificate[ _]required|alert (unknown ca|bad certificate)": (
        f"The server requires a client certificate: give ssl_certfile and ssl_keyfile in {_URL}"
    ),
    "WRONG_VERSION_NUMBER|wrong version number|RECORD_LAYER_FAILURE": (
        f"The port does not use TLS: in {_URL} {_NO_TLS}, or give the port that does"
    ),
    r"Protocol error.*\\x15": (
        f"The port uses TLS: in {_URL} write rediss:// for redis:// (rediss+cluster:// for redis+cluster://)"
    ),
    (
        r"(?-i:\bAuthenticationError|\bWRONGPASS |\bNOAUTH )|invalid (username-)?password|Client sent AUTH|"
        "HELLO must be called|Authentication required"
    ): f"Check the user and the password of {_URL}",
    (
        "DB index|invalid database|(?-i:MOVED )|MovedError|Cluster mode is not enabled|"
        "cluster support disabled|SELECT is not allowed in cluster"
    ): (
        f"Check {_URL}: the server must have the database, and the scheme must be redis+cluster:// for a "
        "cluster, and only for a cluster"
    ),
}
_DO = {
    "permission|NOPERM|ACL failure|can't (run this command|access at least one)|is forbidden": (
        f"{_NEEDED}. Grant its user what is missing (`celery setnx doctor --acl` prints the line to copy), "
        "or point setnx_url at a server that has it"
    ),
    "unknown (redis )?(sub)?command|syntax error": (
        "The server is too old, is not Redis, or has renamed commands. Use Redis 6.2, Valkey 7.2 or later, "
        "without renamed commands"
    ),
    "WRONGTYPE|wrong kind of value": (
        "Another program uses this key, or one next to it: delete it if nobody needs it, and give each "
        "program and each environment a prefix of its own (setnx_prefix)"
    ),
    "": "The server's log may say more, and so may `celery setnx doctor`",
}
_REMEDIES = [(re.compile(words, re.IGNORECASE), f"{do}.") for words, do in {**_DO_FIRST, **_DO}.items()]

# What a server says that decides nothing until somebody mends it.
_WAITS_FOR = {
    "ReadOnlyError|READONLY": (f"If no failover is under way: point {_URL} at the primary, not at a replica"),
    "OutOfMemoryError|OOM": "Give the server memory: raise its maxmemory, or delete what nobody needs",
    "MISCONF": "The server cannot save to its disk: see its log, and free disk space",
    "NOREPLICAS": "Too few replicas are connected (min-replicas-to-write): start them",
    # A name that a name server does not know; where none can be asked, the name may be fine.
    (
        "Name or service not known|nodename nor servname|No address associated|does not resolve|"
        "getaddrinfo failed"
    ): (f"Unless the server is just starting, check the host of {_URL}, whose name does not resolve"),
    "handshake operation timed out": (
        f"If the server is not overloaded: its port may not use TLS; in {_URL} {_NO_TLS}, or give the port "
        "that does"
    ),
}
_MENDED = [(re.compile(rf"\b(?:{words})\b"), f"{do}.") for words, do in _WAITS_FOR.items()]
