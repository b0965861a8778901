"""What a message says of a guarded call: read in one place, and written in one place."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from celery_setnx.lock.line import Place
from celery_setnx.lock.names import record_name
from celery_setnx.lock.record import ORIGINAL
from celery_setnx.log import Log
from celery_setnx.wording import about, titled

logger = Log("celery_setnx")

HEADER = "singleton"
"""The message header in which a call travels."""

REPLACED = 1_000_000
"""By how much the number of an attempt grows with a `replace()`."""

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Call(NamedTuple):
    """A guarded call: all that its message says of it."""

    task: str
    task_id: str
    attempt: int = 0  # see `attempt_of`
    key: str = ""  # the lock's Redis key; empty: it is computed from the arguments
    call_id: str = ""  # what tells it from others that were given the same task id
    options: Mapping[str, Any] = _NOTHING  # of this call alone
    marked: bool | str | None = None  # whether its key is marked for it; "again": a retry's may be
    unasked: bool = False  # whether nobody could be asked, when it was published, if it is a duplicate
    copy: str = ORIGINAL  # which of the messages of this attempt this is
    waits: int = 0  # how often this attempt has come back
    since: float = 0.0  # server time (Unix seconds) of its first conflict; 0: no server has told
    redelivered: bool = False  # whether the broker may have delivered one of its messages before
    join: str | None = None  # id of the task with whose result it ends
    asked: int = 0  # how often it has asked for that result
    about: str = ""  # what its key was made of, for people; empty if that is not to be shown
    bare: bool = True  # whether its message said nothing of it

    @classmethod
    def of(cls, task: str, message: Mapping[str, Any]) -> Call:
        """The call of a message, by its headers, or by all that the running request has.

        A header that is malformed, or another call's, counts as none.
        """
        task_id = str(message.get("id") or "")
        attempt = attempt_of(message.get("retries"), message.get("replaced_task_nesting"))
        redelivered = bool((message.get("delivery_info") or _NOTHING).get("redelivered"))
        said = _header_in(message)
        wrong = "" if said is None else _what_is_wrong(said, task, task_id)
        if said is None or wrong:
            plain = cls(task, task_id, attempt, redelivered=redelivered)
            if wrong:
                text = "The header %r of %s is ignored: %s. Its key is computed from its arguments."
                logger.warning(text, HEADER, plain, wrong)
            return plain
        told = _told(said)
        if said["attempt"] != attempt:  # Celery hands a retry the headers of the attempt before
            told = {name: told[name] for name in ("call_id", "options") if name in told}
        if redelivered:
            told["redelivered"] = True
        return cls(task, task_id, attempt, **told, bare=False)

    @classmethod
    def before(cls, task: str, options: Mapping[str, Any]) -> Call | None:
        """The attempt that publishes a call with these options of `apply_async`; None if none does."""
        said = (options.get("headers") or _NOTHING).get(HEADER)
        task_id = options.get("task_id")
        if said is None or not task_id or _what_is_wrong(said, task, task_id):
            return None  # another call's, if the headers of a request were handed on
        return cls(task, task_id, said["attempt"], **_told(said), bare=False)

    @classmethod
    def told(cls, headers: Mapping[str, Any]) -> Call:
        """The call that its header alone tells of, to its courier; ValueError if it tells of none."""
        said = headers[HEADER]
        call = cls.of(said["task"], {HEADER: said, "id": said["id"], "retries": said["attempt"]})
        if not call.key:
            raise ValueError(f"{call} has no key")
        return call

    def as_headers(self) -> dict[str, Any]:
        """The header that says all this."""
        told = {name: v for (name, default), v in zip(_OPTIONAL.items(), self[3:]) if v != default}
        return {HEADER: {"task": self.task, "id": self.task_id, "attempt": self.attempt, **told}}

    def as_copy(self) -> Call:
        """The same call for one more message: only one of them may start it."""
        return self._replace(copy=os.urandom(6).hex())

    def waited_s(self, server_time: float) -> float:
        """Seconds since its first conflict; 0 if it has met none, or no server has told when."""
        return max(0.0, server_time - self.since) if self.since else 0.0

    def place(self, remember: float) -> Place:
        """Its place in the line, which is remembered for so many seconds."""
        return Place(self.key, self.task_id, self.attempt, remember, self.call_id)

    @property
    def title(self) -> str:
        """Its task and what its key was made of."""
        return titled(self.task, self.about)

    def __str__(self) -> str:
        return f"{self.title}[{self.task_id}]"


def attempt_of(retries: Any, replaced: Any) -> int:
    """Number of a task's attempt: it grows with every retry, and with every `replace()` by one of its id."""
    nested = replaced if isinstance(replaced, int) else 0
    return nested * REPLACED + (retries if isinstance(retries, int) else 0)


# Of what kind each of its words is, and for numbers how large at most: exact numbers for Lua.
_SHAPE: Mapping[str, tuple[Any, float | None]] = {
    **dict.fromkeys(("task", "id", "key", "call_id", "copy", "join"), (str, None)),
    **dict.fromkeys(("waits", "asked"), (int, 10**9)),
    "attempt": (int, 10**15),
    "since": ((int, float), 1e11),
    "options": (dict, None),
    "marked": ((bool, str), None),
    **dict.fromkeys(("redelivered", "unasked"), (bool, None)),
}
_UNKNOWN = (object, None)
_OPTIONAL = {name: Call._field_defaults[name] for name in Call._fields[3:-1]}


def _told(said: Mapping[str, Any]) -> dict[str, Any]:
    """What a header says beyond what it must."""
    told = {name: said[name] for name in said if name in _OPTIONAL}
    return {**told, "about": about(told["about"])} if "about" in told else told


def _header_in(message: Mapping[str, Any]) -> Any:
    """At the message's own top level: what a tracer puts below it may be another call's."""
    if message.get("is_eager"):  # it has no message, and keeps its headers apart
        message = message.get("headers") or _NOTHING
    return message.get(HEADER)


def _what_is_wrong(said: Any, task: str, task_id: str) -> str:
    """Why a header is not that of a call, in words; nothing if it is."""
    if not isinstance(said, dict):
        return "it is no mapping"
    for name, value in said.items():
        kind, most = _SHAPE.get(name, _UNKNOWN)
        if not isinstance(value, kind) or (most is not None and not 0 <= value <= most):
            return f"its {name!r} is {value!r}"
    if said.get("task") != task:
        return f"its 'task' is {said.get('task')!r}"
    if said.get("id") != task_id:
        return f"its 'id' is {said.get('id')!r}"
    if "attempt" not in said:
        return "it names no 'attempt'"
    if "key" not in said:
        return "it names no 'key'" if "marked" in said or "copy" in said else ""
    if said.get("copy") == "":
        return "its 'copy' is empty"
    try:
        record_name(said["key"])
    except ValueError as error:
        return str(error)
    return ""
