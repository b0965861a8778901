"""What a message says of a guarded call: read in one place, and written in one place."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, NamedTuple
from uuid import UUID

from billiard.exceptions import SoftTimeLimitExceeded

from celery_setnx.lock.line import LineEntry
from celery_setnx.lock.marks import Mark
from celery_setnx.lock.names import record_name
from celery_setnx.lock.newest import MOST
from celery_setnx.lock.record import ORIGINAL
from celery_setnx.log import Log, fields
from celery_setnx.options import is_sendable
from celery_setnx.wording import about, shortened, titled

logger = Log("celery_setnx")

HEADER = "singleton"
"""The message header in which a call travels."""

REPLACED = 1_000_000
"""By how much the number of an attempt grows with a `replace()`."""

LATEST = 1e11
"""The last time (Unix seconds, in the year 5138) at which anything is to be done."""

_NOTHING: Mapping[str, Any] = {}


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
    again: bool = False  # whether a body of this attempt may have begun: a message of it was redelivered
    join: str | None = None  # id of the task with whose result it ends
    asked: int = 0  # how often it has asked for that result
    about: str = ""  # what its key was made of, for people; empty if that is not to be shown
    generation: int = 0  # it replaces calls with a lower one; 0: it replaces none, and is not replaced
    leads: bool = False  # whether only a newer call that has started supersedes it
    due: float = 0.0  # Unix seconds until which it waits in the broker; 0: it does not
    route: Sequence[str] | None = None  # exchange and routing key for its body, if it came by others
    has_header: bool = False  # whether its message says this of it

    @classmethod
    def of(cls, task: str, message: Mapping[str, Any]) -> Call:
        """The call of a message, by its headers, or by all that the running request has.

        Nothing is raised, whatever a message says: a header that cannot be read, or is another call's, counts
        as none.
        """
        attempt = attempt_of(message.get("retries"), message.get("replaced_task_nesting"))
        again = _is_redelivered(message.get("delivery_info"))
        plain = cls(task, id_of(message.get("id")), attempt, again=again)
        try:
            said = _header_in(message)
            if said is None:
                return plain
            of, told = _told(said, task, plain.task_id)
        except SoftTimeLimitExceeded:  # of the task that is running: it says nothing of its header
            raise
        except Exception as error:  # noqa: BLE001 - numbers, nesting, sizes, types: no list of them is complete
            text = "The header %r of %s is ignored: %s Its key is computed from its arguments."
            logger.warning(text, HEADER, plain, error, extra=fields(of=plain))
            return plain
        if of != attempt:  # Celery hands a retry the headers of the attempt before
            told = {name: told[name] for name in ("call_id", "options") if name in told}
        if again:
            told["again"] = True
        return cls(task, plain.task_id, attempt, **told, has_header=True)

    @classmethod
    def before(cls, task: str, options: Mapping[str, Any]) -> Call | None:
        """The attempt that publishes a call with these options of `apply_async`; None if none does."""
        said = (options.get("headers") or _NOTHING).get(HEADER)
        task_id = options.get("task_id")
        if said is None or not task_id:
            return None
        try:
            attempt, told = _told(said, task, id_of(task_id))
        except SoftTimeLimitExceeded:
            raise
        except Exception:  # noqa: BLE001 - another call's, if the headers of a request were handed on
            return None
        return cls(task, id_of(task_id), attempt, **told, has_header=True)

    @classmethod
    def told(cls, headers: Mapping[str, Any]) -> Call:
        """The call that its header alone tells of, to its courier; ValueError if it tells of none."""
        said = headers[HEADER]
        attempt, told = _told(said, said["task"], said["id"])
        if not told.get("key"):
            raise ValueError(f"the call of {said['task']} has no key")
        return cls(said["task"], said["id"], attempt, **told, has_header=True)

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

    def place(self, remember: float) -> LineEntry:
        """Its place in the line, which is remembered for so many seconds."""
        return LineEntry(self.key, self.task_id, self.attempt, remember, self.call_id, self.is_one_of_several)

    @property
    def mark(self) -> Mark | None:
        """Its mark, if it has one: it may be another's by now."""
        has_one = bool(self.key and (self.marked or self.generation))
        return Mark(self.key, self.task_id, self.generation) if has_one else None

    @property
    def is_woken(self) -> bool:
        """Whether this is not the first message of its attempt: another may start the call, too."""
        return self.copy != ORIGINAL

    @property
    def may_have_twin(self) -> bool:
        """Whether another message, or another delivery, of its attempt may start it or have started it."""
        return self.is_woken or self.again

    @property
    def shares_id(self) -> bool:
        """Whether other calls may be given its task id, because its publisher has made that up."""
        return not has_random_id(self.task_id)

    @property
    def is_one_of_several(self) -> bool:
        """Whether other calls may be given its task id, and are told from it."""
        return self.shares_id and self.call_id != ""

    @property
    def title(self) -> str:
        """Its task and what its key was made of."""
        return titled(self.task, self.about)

    def __str__(self) -> str:
        return f"{self.title}[{self.task_id}]"


@dataclass
class RunningCall:
    """A call whose body runs, with its key; and its retry, once that is published.

    It stands on the call's request, where publishing finds it: see `of`.
    """

    call: Call
    retry: Call | None = None

    def __str__(self) -> str:
        return str(self.call)

    def stand_on(self, request: Any) -> None:
        """Be found by what the body publishes."""
        request._setnx_running = self

    @classmethod
    def on(cls, request: Any) -> RunningCall | None:
        """The call that stands on a request; None if none does, whatever came in its message."""
        running = getattr(request, "_setnx_running", None)
        return running if isinstance(running, cls) else None

    @classmethod
    def of(cls, task: Any, new: Call) -> RunningCall | None:
        """The call of which another that is to be published is the retry; None if it is none's."""
        running = cls.on(task.request_stack.top) if task else None
        if running is None or running.call.task_id != new.task_id:
            return None
        return running if new.attempt == running.call.attempt + 1 else None


def has_random_id(task_id: str) -> bool:
    """Whether a task's id is no other call's, as those that Celery makes: a user's own may be given again."""
    return _RANDOM_ID.fullmatch(task_id) is not None


def id_of(given: Any) -> str:
    """A task's id as keys and records can have it: a digest of a text that they cannot have.

    A client of another make may send any; to Celery the task has the id that it came with. What is no text,
    number or UUID counts as none: how deep a list can be written depends on the stack, and a worker's parent
    and its child would disagree.
    """
    if not isinstance(given, (str, int, float, UUID)) or not given:
        return ""
    try:
        text = str(given)
    except ValueError:  # a number of thousands of digits
        return ""
    if _is_text(text, _ID_AT_MOST) and "\n" not in text:
        return text
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def retries_of(given: Any) -> int:
    """How often a task has been retried, as its message says it; 0 if that is no such number."""
    if isinstance(given, float) and given.is_integer():
        given = int(given)
    return int(given) if isinstance(given, int) and 0 <= given <= _COUNT_AT_MOST else 0


def attempt_of(retries: Any, replaced: Any) -> int:
    """Number of a task's attempt: it grows with every retry, and with every `replace()` by one of its id."""
    return retries_of(replaced) * REPLACED + retries_of(retries)


_RANDOM_ID = re.compile(r"[0-9a-f]{8}-?[0-9a-f]{4}-?4[0-9a-f]{3}-?[89ab][0-9a-f]{3}-?[0-9a-f]{12}")
_ID_AT_MOST = 1000
_TEXT_AT_MOST = 100_000
_COUNT_AT_MOST = 10**9
_NAME = re.compile(r"[\w-]{0,64}", re.ASCII)


def _is_text(value: Any, most: int = _TEXT_AT_MOST) -> bool:
    """True of a text that a server can be sent."""
    return isinstance(value, str) and len(value) <= most and is_sendable(value)


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None


def _is_count(value: Any, most: int = _COUNT_AT_MOST) -> bool:
    return type(value) is int and 0 <= value <= most


def is_time(value: Any) -> bool:
    """True of Unix seconds at which something may be."""
    return type(value) in (int, float) and 0 <= value <= LATEST


# What each of its words may be. Numbers must be exact in Lua, and finite.
_SHAPE: Mapping[str, Callable[[Any], bool]] = {
    "task": _is_text,
    "id": _is_text,
    "key": _is_text,
    "join": _is_text,
    "call_id": _is_name,
    "copy": lambda value: _is_name(value) and value != "",
    "waits": _is_count,
    "asked": _is_count,
    "attempt": lambda value: _is_count(value, 2 * 10**15),
    "since": is_time,
    "options": lambda value: isinstance(value, dict),
    "marked": lambda value: isinstance(value, bool) or value == "again",
    "again": lambda value: isinstance(value, bool),
    "unasked": lambda value: isinstance(value, bool),
    "generation": lambda value: _is_count(value, MOST),
    "leads": lambda value: isinstance(value, bool),
    "due": is_time,
    "route": lambda value: isinstance(value, (list, tuple)) and [type(name) for name in value] == [str, str],
}
_OPTIONAL = {name: Call._field_defaults[name] for name in Call._fields[3:-1]}


def _told(said: Any, task: str, task_id: str) -> tuple[int, dict[str, Any]]:
    """A header's attempt, and what it says beyond what it must; ValueError if it is not that of the call."""
    if not isinstance(said, Mapping):
        raise ValueError("it is no mapping")
    for name, value in said.items():
        if name in _SHAPE and not _SHAPE[name](value):
            raise ValueError(f"its {name!r} is {shortened(repr(value), 80)}")
    for name, own in (("task", task), ("id", task_id)):
        if said.get(name) != own:
            raise ValueError(f"its {name!r} is {shortened(repr(said.get(name)), 80)}")
    if "attempt" not in said:
        raise ValueError("it names no 'attempt'")
    if "key" in said:
        record_name(said["key"])
    elif not said.keys().isdisjoint(("marked", "copy", "generation")):
        raise ValueError("it names no 'key'")
    told = {name: said[name] for name in said if name in _OPTIONAL}
    return said["attempt"], {**told, "about": about(told["about"])} if "about" in told else told


def _is_redelivered(delivery_info: Any) -> bool:
    """What the broker says of a delivery, or a message in its name."""
    return isinstance(delivery_info, Mapping) and bool(delivery_info.get("redelivered"))


def _header_in(message: Mapping[str, Any]) -> Any:
    """At the message's own top level: what a tracer puts below it may be another call's."""
    if message.get("is_eager"):  # it has no message, and keeps its headers apart
        message = message.get("headers") or _NOTHING
    return message.get(HEADER)
