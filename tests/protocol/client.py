"""A full and a classic client of the lock, as docs/protocol.md and docs/keys.md describe them, and the names.

Nothing of celery_setnx is imported here, and no Redis library: what another language would have to write.
The Lua files are read as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any
from uuid import UUID

# Found, not imported: the tests may run against an installed wheel.
LUA = Path(str(find_spec("celery_setnx").origin)).parent / "lock" / "lua"  # type: ignore[union-attr]
OF_PERMITS = ("acquire", "free", "leave", "park", "serve")
"""The scripts that are sent behind permits.lua where several permits, or starts, are named."""
ASK_THE_PACE = ("acquire", "serve")
"""Those of them that are told of the starts, in front of the other permits."""
RETENTION_MS = 86_400_000
REMEMBER_MS = 60_000
LINES_MS = 691_200_000


class ServerError(Exception):
    """An error reply."""


class Server:
    """A connection to a Redis, in its own protocol."""

    def __init__(self, port: int, db: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=10)
        self._file = self._socket.makefile("rb")
        self.ask("SELECT", db)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._file.close()
        self._socket.close()

    def ask(self, *command: Any) -> Any:
        """The reply to a command; text as bytes.

        Raises:
            ServerError: The reply is an error.
        """
        self._socket.sendall(packed(*command))
        reply = reply_in(self._file)
        if isinstance(reply, ServerError):
            raise reply
        return reply

    def sent(self, commands: bytes, mark: bytes) -> bytes:
        """The replies to packed commands, up to the one that is the mark."""
        self._socket.sendall(commands)
        replies = bytearray()
        while not replies.endswith(mark):
            replies += self._file.read1(1 << 16)
        return bytes(replies)

    def time(self) -> int:
        """The server's clock, in microseconds."""
        second, microsecond = self.ask("TIME")
        return int(second) * 1_000_000 + int(microsecond)

    def run(self, verb: str, keys: tuple[str, ...], *arguments: Any, of_several: bool = False) -> list[Any]:
        """What a script answers; the parts of a short answer as an array.

        Raises:
            ServerError: As `ask`.
        """
        files = ("permits", verb) if of_several and verb in OF_PERMITS else (verb,)
        text = b"".join((LUA / f"{file}.lua").read_bytes() for file in files)
        try:
            reply = self.ask("EVALSHA", hashlib.sha1(text).hexdigest(), len(keys), *keys, *arguments)
        except ServerError as error:
            if not str(error).startswith("NOSCRIPT"):
                raise
            reply = self.ask("EVAL", text, len(keys), *keys, *arguments)
        items = reply if isinstance(reply, list) else reply.split(b" ")
        return [item.decode() if isinstance(item, bytes) else item for item in items]

    def run_of_permits(
        self,
        verb: str,
        lock: str,
        keys: tuple[str, ...],
        *arguments: Any,
        count: int = 1,
        paced: bool = False,
    ) -> list[Any]:
        """What a script answers that is told of as many permits as are in use, so many, or more; and of
        the starts.
        """
        several = count > 1 or paced
        starts = [beside(lock, "starts")] if several and verb in ASK_THE_PACE else []
        others = [name for number in range(1, count) for name in permit_names(lock, number)]
        reply = self.run(verb, (*keys, *starts, *others), *arguments, of_several=several)
        if reply[0] != "more":
            return reply
        return self.run_of_permits(verb, lock, keys, *arguments, count=int(reply[1]), paced=paced)


def packed(*command: Any) -> bytes:
    """A command as it is sent; text as UTF-8."""
    parts = [part if isinstance(part, bytes) else str(part).encode() for part in command]
    return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%b\r\n" % (len(part), part) for part in parts)


def reply_in(stream: IO[bytes]) -> Any:
    """The next reply in a stream; an error as a value."""
    line = stream.readline()
    if not line.endswith(b"\r\n"):
        raise ConnectionError("the server has hung up")
    kind, rest = line[:1], line[1:-2]
    if kind == b"+":
        return rest
    if kind == b"-":
        return ServerError(rest.decode())
    if kind == b":":
        return int(rest)
    if kind == b"$":
        return None if rest == b"-1" else stream.read(int(rest) + 2)[:-2]
    if kind == b"*":
        return None if rest == b"-1" else [reply_in(stream) for _ in range(int(rest))]
    raise ConnectionError(f"not a reply: {line!r}")


# docs/keys.md


def canonical(value: Any) -> bytes:
    """The canonical form of a value.

    Raises:
        ValueError: There is none.
    """
    if value is None:
        return b"n;"
    if value is True or value is False:
        return b"t;" if value else b"f;"
    if isinstance(value, float):
        if value == value and abs(value) != float("inf") and value % 1 == 0:
            return canonical(int(value))
        return _with_length("d", repr(value).encode())
    for kind, encode in _ENCODERS:
        if isinstance(value, kind):
            return encode(value)
    raise ValueError(f"no canonical form: {value!r}")


def digest(form: bytes) -> str:
    """The digest of a canonical form."""
    return hashlib.blake2b(form, digest_size=16, person=b"celery_setnx:1").hexdigest()


def lock_name(prefix: str, scope: str, form: bytes | None) -> str:
    """The name of a lock; without a canonical form that of the whole task's."""
    inner = scope if form is None else f"{scope}:{digest(form)}"
    return prefix + ":{" + inner + "}"


def record_name(lock: str) -> str:
    """The name of the record beside a lock."""
    _before, _, after = lock.partition("{")
    has_tag = after.find("}") > 0
    return f"{lock}:holder" if has_tag else "{" + lock + "}:holder"


def permit_names(lock: str, number: int) -> tuple[str, str]:
    """The names of a permit and of its record; the lock itself is number 0."""
    if number == 0:
        return lock, record_name(lock)
    name = record_name(lock).removesuffix(":holder") + f"#{number}"
    return name, f"{name}:holder"


def beside(lock: str, what: str) -> str:
    """The name of something else beside a lock."""
    return f"{record_name(lock).removesuffix(':holder')}:{what}"


def lines_name(prefix: str, broker: str) -> str:
    """What the names of the sets of the lines of a broker begin with, by its name."""
    return f"{prefix}:lines:{hashlib.blake2b(broker.encode(), digest_size=8).hexdigest()}"


def due_names(lines: str, task: str, *, in_cluster: bool = False) -> tuple[str, str]:
    """The names of the set of a task's lines, and of the epoch of its slot."""
    slot = hashlib.blake2b(task.encode(), digest_size=1).digest()[0] % 16 if in_cluster else 0
    return f"{lines}:{{{slot}}}:{task}", f"{lines}:{{{slot}}}"


def _with_length(letter: str, content: bytes) -> bytes:
    return f"{letter}{len(content)}:".encode() + content


def _with_count(letter: str, items: list[bytes]) -> bytes:
    return f"{letter}{len(items)}:".encode() + b"".join(items)


def _text(value: str) -> bytes:
    return _with_length("s", value.encode("utf-8", "surrogatepass"))


def _mapping(value: Mapping[Any, Any]) -> bytes:
    entries = [(_text(_json_key(key)), canonical(item)) for key, item in value.items()]
    if len({key for key, _item in entries}) < len(entries):
        raise ValueError(f"two keys are one: {value!r}")
    return _with_count("m", [key + item for key, item in sorted(entries)])


def _json_key(key: Any) -> str:
    """The text that JSON makes of a key, read from JSON itself."""
    if isinstance(key, str):
        return key
    (text,) = json.loads(json.dumps({key: 0}))
    return str(text)


def _moment(value: datetime) -> bytes:
    if value.tzinfo is None:
        return b"N%d;" % ((value - datetime(1, 1, 1)) // timedelta(microseconds=1))
    since = value - datetime(1, 1, 1, tzinfo=timezone.utc)
    return b"A%d;" % (since // timedelta(microseconds=1))


def _decimal(value: Decimal) -> bytes:
    if value.is_nan():
        text = "NaN"
    elif value.is_infinite():
        text = "-Infinity" if value < 0 else "Infinity"
    elif value == 0:
        text = "0"
    else:
        sign, digits, exponent = value.as_tuple()
        number = int("".join(map(str, digits)))
        assert isinstance(exponent, int)
        while number % 10 == 0:
            number, exponent = number // 10, exponent + 1
        text = f"{'-' if sign else ''}{number}e{exponent}"
    return _with_length("c", text.encode())


_ENCODERS: list[tuple[Any, Callable[[Any], bytes]]] = [
    (int, lambda value: b"i%d;" % value),
    (str, _text),
    (bytes, lambda value: _with_length("b", value)),
    ((list, tuple), lambda value: _with_count("l", [canonical(item) for item in value])),
    (Mapping, _mapping),
    ((set, frozenset), lambda value: _with_count("S", sorted(canonical(item) for item in value))),
    (UUID, lambda value: _with_length("u", value.bytes)),
    (datetime, _moment),
    (date, lambda value: b"D%d;" % ((value - date(1, 1, 1)).days + 1)),
    (time_of_day, lambda value: _with_length("T", value.isoformat().encode())),
    (timedelta, lambda value: b"P%d;" % (value // timedelta(microseconds=1))),
    (Decimal, _decimal),
]


# docs/protocol.md


@dataclass
class Record:
    """The six lines of a record."""

    token: str
    deadline_us: int
    fence: int
    state: str
    since_us: int
    info: str

    @classmethod
    def parsed(cls, text: str) -> Record:
        """The record that a text is."""
        token, deadline, fence, state, since, info = text.split("\n", 5)
        return cls(token, int(deadline), int(fence), state, int(since), info)


@dataclass
class FullClient:
    """A client that runs the scripts: the steps of "A full client"."""

    server: Server
    lock: str
    lease_us: int = 30_000_000
    info: Mapping[str, Any] = field(default_factory=dict)  # what the record says of this client
    is_task_lock: bool = False  # with a line and a mark beside it
    limit: int = 1  # how many permits the lock has
    rate: tuple[int, int] | None = None  # how many may start, and within how many us
    permit: int = 0  # which of them this client has, or had last
    clock: Callable[[], float] = time.monotonic
    token: str = ""  # the proof of being the holder, once it tried
    fence: int = 0
    relies_until: float = 0.0  # when it must stop relying on the lock, by its clock
    dead: Record | None = None  # of the holder from whom the lock was taken over
    deadline_us: int = 0  # that was read last; with `paced` the time of the next start
    start: str = ""  # how its last acquisition is noted

    @property
    def keys(self) -> tuple[str, ...]:
        """Lock and record of the permit that it has."""
        return permit_names(self.lock, self.permit)

    @property
    def keys_to_keep(self) -> tuple[str, ...]:
        """The same, and what is to last as long."""
        return (*self.keys, self._beside("permits")) if self.permit else self.keys

    @property
    def terms(self) -> str:
        """How many permits the lock has, and how many may start."""
        return str(self.limit) if self.rate is None else f"{self.limit}:{self.rate[0]}/{self.rate[1]}"

    def acquire(self, token: str = "") -> str:
        """The word; whoever holds the lock by it has a fence."""
        self.token = token or os.urandom(16).hex()
        names = map(self._beside, ("line", "calls", "queued", f"ticket:{self.token}", "permits"))
        is_plain = self.terms == "1"
        keys = permit_names(self.lock, 0) + (() if is_plain and not self.is_task_lock else tuple(names))
        before = self.clock()
        arguments = [self.token, self.lease_us, RETENTION_MS, json.dumps(dict(self.info)), ""]
        if not is_plain:
            arguments += ["-", 0, 0, 0, 0, self.terms]
        named: dict[str, Any] = {"count": self.limit, "paced": self.rate is not None}
        word, *rest = self.server.run_of_permits("acquire", self.lock, keys, *arguments, **named)
        if len(rest) < 4:
            now, self.fence, self.permit = (int(each) for each in (*rest, 0)[:3])
            self.deadline_us = now + self.lease_us
        else:
            self.deadline_us, fence, now, _value, record, _mark, _waiters, *of_several = rest
            if word in ("held", "stale", "line", "paced"):
                return str(word)
            self.fence, self.permit = fence, of_several[0] if of_several else 0
            self.dead = Record.parsed(record) if word == "taken_over" and record else None
        self._relies_until(before, self.deadline_us - now)
        self.start = f"{now}#{self.permit}#{self.fence}"
        if self.clock() >= self.relies_until:
            self.take_start_back()
            self.release()
            return "held"
        return str(word)

    def take_start_back(self) -> int:
        """Nothing begins under the lock that was acquired: how many starts fewer count."""
        return int(self.server.ask("ZREM", self._beside("starts"), self.start))

    def renew(self) -> str:
        """The word."""
        before = self.clock()
        arguments = (self.token, self.lease_us, RETENTION_MS)
        word, deadline, now, _value = self.server.run("renew", self.keys_to_keep, *arguments)
        if word in ("renewed", "repaired"):
            self.deadline_us = int(deadline)
            self._relies_until(before, int(deadline) - int(now))
        else:
            self.relies_until = 0.0
        return str(word)

    def release(self, done_for_ms: int = 0) -> str:
        """The word; whoever has succeeded says for how long that counts."""
        keys: list[str] = [*self.keys]
        arguments: list[Any] = [self.token, 0, REMEMBER_MS, 0, 0]
        if done_for_ms:
            keys += map(self._beside, ("line", "calls", "queued", "permits", "done"))
            arguments[4:] = ["", done_for_ms]  # handed to nobody: it cannot wake a task
        word, *_found = self.server.run("release", tuple(keys), *arguments)
        return str(word)

    def holds(self) -> bool:
        """Whether the lock may be relied on still."""
        return self.clock() < self.relies_until

    def seen(self) -> tuple[str | None, Record | None]:
        """The lock's value, and its record; of several permits, of the first one."""
        _now, _waiting, _permits, value, record, *_rest = self.server.run("look", permit_names(self.lock, 0))
        return value, Record.parsed(record) if record else None

    def _beside(self, what: str) -> str:
        return beside(self.lock, what)

    def _relies_until(self, before: float, remaining_us: int) -> None:
        margin_s = max(self.lease_us / 1e6 / 100, 0.002)
        self.relies_until = before + remaining_us / 1e6 - margin_s


@dataclass
class Served:
    """What serve answers."""

    word: str
    now_us: int
    value: str | None
    record: str | None
    heir: str | None
    call: str | None
    next_us: int


@dataclass
class Sweeper:
    """Who lets lines go on, and can send the calls of these tasks: serve, due, sweep and settle."""

    server: Server
    lines: str  # what the names of the sets of the broker's lines begin with
    tasks: tuple[str, ...]
    lease_us: int = 30_000_000
    paced: tuple[int, ...] = ()  # the numbers, from 1, of those tasks that have a rate
    claimed: str = ""  # until when its lines are claimed, as the last sweep has answered
    next_us: int | None = None  # and when the next that cannot wait is due

    def note(self, task: str, lock: str, within_us: int) -> str:
        """The epoch."""
        arguments = (lock, within_us, LINES_MS, 5)
        return str(self.server.run("due", due_names(self.lines, task), *arguments)[0])

    def claim(self) -> tuple[str, list[tuple[str, str]]]:
        """The epoch, and the lines that are due: task and lock of each."""
        _, epoch_name = due_names(self.lines, "")
        keys = (epoch_name, *(due_names(self.lines, task)[0] for task in self.tasks))
        reply = self.server.run("sweep", keys, 2_000_000, LINES_MS, 7, *self.paced)
        epoch, self.claimed, next_us, *entries = reply
        self.next_us = int(next_us) if next_us else None
        return epoch, [(self.tasks[int(n) - 1], lock) for n, lock in zip(entries[::2], entries[1::2])]

    def serve(self, lock: str, *, token: str = "", dead: str = "", away: str = "") -> Served:
        """Hand the lock to the first in line."""
        keys = (lock, record_name(lock), f"{lock}:line", f"{lock}:calls", f"{lock}:permits")
        hand_over_us = min(10_000_000, self.lease_us)
        arguments = (token or os.urandom(16).hex(), hand_over_us, REMEMBER_MS, self.lease_us, dead, away)
        reply = self.server.run_of_permits("serve", lock, keys, *arguments)
        word, now, value, record, heir, call, when = reply
        return Served(word, int(now), value, record, heir, call, int(when))

    def settle(self, task: str, lock: str, within_us: int | None) -> str:
        """The word."""
        within = "" if within_us is None else within_us
        keys = (due_names(self.lines, task)[0],)
        return str(self.server.run("settle", keys, lock, self.claimed, within)[0])


@dataclass
class ClassicClient:
    """A client of the recipe: the steps of "A classic client"."""

    server: Server
    lock: str
    timeout_s: int = 10  # the page's T
    until: int = 0  # the second that it wrote
    clock: Callable[[], float] | None = None  # in seconds; None: the server's

    def acquire(self) -> bool:
        """Steps 1 to 3, once."""
        now = self._now()
        self.until = now + self.timeout_s + 1
        if self.server.ask("SETNX", self.lock, self.until) == 1:
            return True
        value = self.server.ask("GET", self.lock)
        if value is None or int(value) >= now:
            return False
        old = self.server.ask("GETSET", self.lock, self.until)
        return old is None or int(old) < now

    def release(self) -> None:
        """Step 4."""
        if self._now() < self.until - 1:
            self.server.ask("DEL", self.lock)

    def _now(self) -> int:
        return int(self.clock() if self.clock else self.server.time() // 1_000_000)


class Producer:
    """A program that marks keys before it sends calls: the steps of "Messages"."""

    def __init__(self, server: Server, lock: str) -> None:
        self._server, self._lock = server, lock
        self._mark = beside(lock, "queued")

    def mark(self, task_id: str, dedupe: str, queue_lease_s: float = 3600) -> tuple[str, str]:
        """The word, and whose mark or lock it is."""
        others = (beside(self._lock, what) for what in ("queued", "line", "done"))
        keys = (self._lock, record_name(self._lock), *others)
        grace_ms = int(min(10, queue_lease_s) * 1000)
        word, other, *_found = self._server.run("mark", keys, task_id, grace_ms, dedupe)
        return word, other

    def failed_after_all(self, token: str) -> str:
        """The word: a call whose success was noted has failed, and counts no more."""
        (word,) = self._server.run("forget", (beside(self._lock, "done"), record_name(self._lock)), token)
        return str(word)

    def header(self, task: str, task_id: str) -> dict[str, Any]:
        """The header of the call that was marked."""
        return {"task": task, "id": task_id, "attempt": 0, "key": self._lock, "marked": True}

    def sent(self, task_id: str, queue_lease_s: float = 3600) -> str:
        """The word."""
        return str(self._server.run("extend", (self._mark,), task_id, int(queue_lease_s * 1000))[0])

    def not_sent(self, task_id: str) -> str:
        """The word."""
        return str(self._server.run("unmark", (self._mark,), task_id)[0])
