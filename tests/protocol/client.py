"""A classic client of the lock, and a producer of a task's calls, as docs/protocol.md says.

Nothing of celery_setnx is imported here, and no Redis library: another language has to write no more.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta, timezone
from datetime import time as time_of_day
from decimal import Decimal
from typing import IO, Any
from uuid import UUID


class ServerError(Exception):
    """An error reply."""


class Server:
    """A connection to a Redis, in its own protocol."""

    def __init__(self, port: int, db: int) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), timeout=60)
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


# What a key is made of


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


def beside(lock: str, what: str) -> str:
    """The name of another key of a lock, such as `:holder` or `#1`."""
    _before, _, after = lock.partition("{")
    has_tag = after.find("}") > 0
    return lock + what if has_tag else "{" + lock + "}" + what


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


# A classic client, and a producer


@dataclass
class ClassicClient:
    """A program that runs the recipe."""

    server: Server
    lock: str
    timeout_s: int = 10
    until: int = 0  # the second that it wrote
    clock: Callable[[], float] | None = None  # in seconds; None: the server's

    def acquire(self) -> bool:
        """Ask once."""
        now = self._now()
        self.until = now + self.timeout_s + 1
        if self.server.ask("SETNX", self.lock, self.until) == 1:
            return True
        value = self.server.ask("GET", self.lock)
        if value is None or not value.isdigit() or int(value) >= now:
            return False
        old = self.server.ask("GETSET", self.lock, self.until)
        return old is None or int(old) < now

    def release(self) -> None:
        """Free the lock, if that is surely this program's still."""
        if self._now() < self.until - 1:
            self.server.ask("DEL", self.lock)

    def _now(self) -> int:
        return int(self.clock() if self.clock else self.server.time() // 1_000_000)


class Producer:
    """A program that marks keys before it sends calls: the steps of "Publish from another language"."""

    def __init__(self, server: Server, lock: str) -> None:
        self._server, self._lock = server, lock
        self._mark = beside(lock, ":queued")

    def mark(self, task_id: str, queue_lease_s: int = 3600) -> bool:
        """Whether the call is to be sent: no other is queued."""
        return self._server.ask("SET", self._mark, task_id, "NX", "PX", queue_lease_s * 1000) == b"OK"

    def header(self, task: str, task_id: str) -> dict[str, Any]:
        """The header of the call that was marked."""
        return {"task": task, "id": task_id, "attempt": 0, "key": self._lock, "marked": True}

    def not_sent(self, task_id: str) -> None:
        """Free the mark of a call that could not be sent."""
        if self._server.ask("GET", self._mark) == task_id.encode():
            self._server.ask("DEL", self._mark)
