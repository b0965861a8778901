"""Every error that celery_setnx raises. All pickle, and all survive a JSON result backend."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from celery_setnx.wording import held, sentence, titled, unstopped


class SetnxError(Exception):
    """Root of all errors raised by celery_setnx."""

    def __str__(self) -> str:
        message = self._message()
        return super().__str__() if message is None else sentence(message)

    def _message(self) -> str | None:
        """What it says of its attributes, which may be anybody's words; None if it was given its message."""
        return None


class OptionError(SetnxError, ValueError):
    """An option is unknown, malformed, not available yet, or cannot be combined with another."""


class UnkeyableCall(SetnxError, TypeError):
    """The key of a call cannot be computed, so the call is neither published nor run unlocked.

    Attributes:
        task: Name of the task (or scope) that was called.
        reason: Which argument is at fault, and what to do.
    """

    def __init__(self, task: str, reason: str) -> None:
        super().__init__(task, reason)
        self.task = task
        self.reason = reason

    def _message(self) -> str:
        return f"Cannot compute the lock key of a call of {self.task}: {self.reason}"


class AlreadyRunning(SetnxError):
    """The lock is held by another, or its pace allows no start, and the caller asked to be told by an error.

    Attributes:
        task: Name of the task, or of the lock when no task is involved.
        key: The lock's Redis key.
        holder: The holder's record as plain JSON values; see `Holder.as_dict`. Of several holders that of the
            one who has held for longest. Where only the pace allows no start its state is `paced`.
        remaining_s: Seconds until the holder's deadline, of several the first one's, which a living holder
            keeps moving forward, or until the next start may be; None when the lock has no readable deadline.
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
        cannot = "may not start yet" if self._is_paced else "is already running"
        return f"{titled(self.task, self.about)} {cannot}: {self._held()}."

    @property
    def _is_paced(self) -> bool:
        return self.holder.get("state") == "paced"

    def _held(self) -> str:
        """By whom, and for how long."""
        holder = self.holder.get("description") or "an unknown holder"
        who = held(self.key, holder, self.limit, paced=self._is_paced)
        if self.remaining_s is None:
            return f"{who}, with no deadline"
        if self._is_paced:
            return f"{who}, for {self.remaining_s:.1f} s more"
        if self.limit > 1:
            return f"{who}; the first of them ends in {self.remaining_s:.1f} s unless it renews its lease"
        return f"{who}, for {self.remaining_s:.1f} s more unless it renews its lease or releases it"


class LockTimeout(AlreadyRunning):
    """A task waited for its lock for longer than `max_wait`. If that came free, too late, `holder` is empty.

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
    """A call was not published: the same call is queued, runs (with `until_done`), or has succeeded (with
    `dedupe_for`).

    Attributes:
        task: Name of the task.
        key: The lock's Redis key.
        task_id: Id of the task that is queued or running, or has succeeded.
        state: `queued`, `running` or `done`.
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
    """A fan-out ended early: the broker took no more, or the iterable raised. Its cause is the error itself.

    What was not sent has no mark, so the same calls may be fanned out again.

    Attributes:
        task: Name of the task.
        accepted: Calls that the broker has taken.
        duplicates: Calls that were not sent, because the same call is queued or running.
        failed: Calls that could not be sent for their own sake, before the fan-out ended.
        uncertain: Calls of the message, or the batch of messages, that was on its way when the broker failed:
            whether it has taken them is not known.
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
        failed = f", {self.failed} failed by themselves" if self.failed else ""
        return (
            f"The fan-out of {self.task} ended early: {self.accepted} calls were sent, "
            f"{self.duplicates} were duplicates{failed}{uncertain}, {self.not_sent} were not sent. "
            "The other calls have no mark, so you may send them again."
        )


class LockLost(SetnxError):
    """A living holder found that its lock is gone, another's, or past its deadline.

    Attributes:
        key: The lock's Redis key.
        reason: What was found.
    """

    def __init__(self, key: str, reason: str) -> None:
        super().__init__(key, reason)
        self.key = key
        self.reason = reason

    def _message(self) -> str:
        return (
            f"The lock {self.key} is lost: {unstopped(self.reason)}. Stop what it protects; "
            "a new holder may be at work, and has a larger fence."
        )


class LockUnavailable(SetnxError):
    """Redis cannot decide now: unreachable, loading, read-only, full or busy. Trying again may help.

    Where that does not end by itself, the message says what to do. A call fails with it, too, that was to
    come back or to wait, and that the broker did not take.

    Attributes:
        key: The lock's Redis key.
        reason: The error, in words.
        unsent: The call that the broker did not take, as `task[id]`. Defaults to nothing.
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
            return "Fix that, and send the call again."
        return next((do for words, do in _MENDED if words.search(self.reason)), "")

    @property
    def brief(self) -> str:
        """The message without what to do, for a line of many."""
        if self.unsent:
            return sentence(f"The call {self.unsent} of {self.key} could not be sent back: {self.reason}")
        return sentence(f"Redis does not serve the lock {self.key} now: {self.reason}")

    def _message(self) -> str:
        return f"{self.brief} {self.remedy}".rstrip()


class LockRefused(SetnxError):
    """Redis refuses a lock command: for good, or until somebody allows it (see `LockForbidden`).

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
    """Redis refuses a lock command until somebody allows it: a wrong password, a missing permission.

    Or its URL is wrong: an untrusted certificate, a wrong scheme, a missing database.

    Waited out like an outage: a lock that is held stays held while its lease lasts.

    Attributes:
        key: The lock's Redis key.
        reason: The server's own words.
        unsent: Nothing: the error is Redis'.
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
    *("ZREVRANGEBYSCORE", "ZCOUNT", "ZRANK", "ZSCORE", "HSET", "HGET", "HDEL"),
)
"""What workers and publishers ask of a lock server; all but the first two inside of scripts."""

_NEEDED = (
    f"celery_setnx needs EVAL, EVALSHA and, inside scripts, {', '.join(COMMANDS[2:-1])} and {COMMANDS[-1]} "
    "on this key, its :holder, :queued, "
    ":line, :calls, :permits, :starts, :done, :taken_over, :ticket:* and :successor:*, on its #1 to #99 and "
    "their :holder, on <prefix>:lines:* and <prefix>:receipt:*, and on setnx:brokers; SELECT for a database "
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
        f"The server wants a client certificate: set ssl_certfile and ssl_keyfile in {_URL}"
    ),
    "WRONG_VERSION_NUMBER|wrong version number|RECORD_LAYER_FAILURE": (
        f"The port has no TLS: in {_URL} {_NO_TLS}, or use the port with TLS"
    ),
    r"Protocol error.*\\x15": (
        f"The port has TLS: in {_URL} write rediss:// for redis:// (rediss+cluster:// for redis+cluster://)"
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
        "Another program has written this key, or one next to it: delete it if nobody needs it, and give "
        "each program and each environment its own prefix (setnx_prefix)"
    ),
    "": "The server's log may say more, and so may `celery setnx doctor`",
}
_REMEDIES = [(re.compile(words, re.IGNORECASE), f"{do}.") for words, do in {**_DO_FIRST, **_DO}.items()]

# What a server says that decides nothing until somebody mends it.
_WAITS_FOR = {
    "ReadOnlyError|READONLY": (f"If no failover is under way: point {_URL} at the primary, not at a replica"),
    "OutOfMemoryError|OOM": "Give the server memory: raise maxmemory, or delete keys that nobody needs",
    "MISCONF": "The server cannot save to its disk: see its log, and free some space",
    "NOREPLICAS": "The server has too few replicas (min-replicas-to-write): start them",
    # A name that a name server does not know; where none can be asked, the name may be fine.
    (
        "Name or service not known|nodename nor servname|No address associated|does not resolve|"
        "getaddrinfo failed"
    ): (f"Unless the server is just starting, check the host of {_URL}, whose name does not resolve"),
    "handshake operation timed out": (
        f"If the server is not overloaded: its port may have no TLS; in {_URL} {_NO_TLS}, or use the port "
        "with TLS"
    ),
}
_MENDED = [(re.compile(rf"\b(?:{words})\b"), f"{do}.") for words, do in _WAITS_FOR.items()]
