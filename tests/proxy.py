"""A TCP proxy in front of a Redis server whose connections fail on demand. Standard library only."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import BufferedReader
from typing import Literal

Action = Literal[
    "cut_before", "cut_after", "drop_reply", "answer", "delay", "delay_reply", "stall", "stall_reply"
]
_AT_REPLY = ("drop_reply", "delay_reply", "stall_reply")
_AGGREGATES = {b"*": 1, b"~": 1, b">": 1, b"%": 2, b"|": 2}
_UNPAIRED = (b"SUBSCRIBE", b"PSUBSCRIBE", b"SSUBSCRIBE", b"MONITOR", b"SYNC", b"PSYNC")
_RESET = struct.pack("ii", 1, 0)


@dataclass
class Fault:
    """What is to happen to which commands.

    Attributes:
        action: `cut_before` closes the connection instead of sending the command; `cut_after` sends it
            and closes at once; `drop_reply` waits for the reply and closes instead of passing it on, so
            the command was surely executed; `answer` replies with `reply` and sends nothing; `delay` and
            `delay_reply` hold the command or its reply back for `seconds`, and for as long as `meanwhile`
            takes; `stall` and `stall_reply` leave the connection open, but nothing passes any more.
        containing: Bytes that the command must contain. Defaults to any command, including those with
            which a client sets up its connection.
        answered: Bytes that the reply must contain; for the three actions that wait for the reply.
        skip: Number of matching commands that pass unharmed first. Defaults to 0.
        times: Number of commands that are struck. Defaults to 1.
        seconds: Length of a delay.
        meanwhile: What is done during a delay.
        reply: The raw reply of `answer`, such as `b"-LOADING not yet\\r\\n"`.
        struck: How many commands it has struck so far.
    """

    action: Action
    containing: bytes = b""
    answered: bytes = b""
    skip: int = 0
    times: int = 1
    seconds: float = 0.0
    meanwhile: Callable[[], object] = bool
    reply: bytes = b""
    struck: int = 0

    def strikes(self, command: bytes, reply: bytes | None) -> bool:
        """Whether it strikes this command, or its reply, now; counted when it does."""
        if (reply is not None) != (self.action in _AT_REPLY) or self.struck >= self.times:
            return False
        if self.containing not in command or self.answered not in (reply or b""):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.struck += 1
        return True

    def delay(self) -> None:
        self.meanwhile()
        time.sleep(self.seconds)


class Proxy:
    """Listens on a free port of the loopback address and passes everything on, but for its faults.

    Example:
        >>> with Proxy(server.port) as proxy:   # doctest: +SKIP
        ...     with proxy.fault("drop_reply", containing=b"EVALSHA"):
        ...         lock.acquire()
    """

    def __init__(self, port: int) -> None:
        self._server = ("127.0.0.1", port)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self._lock = threading.Lock()
        self._faults: list[Fault] = []
        self._links: set[_Link] = set()
        self._passes = threading.Event()
        self._passes.set()
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, name="proxy", daemon=True).start()

    def url(self, db: int = 0) -> str:
        """The URL of one of the server's databases, by way of the proxy."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def arm(self, action: Action, **details: object) -> Fault:
        """Set a fault; it strikes until it has struck `times` commands, or is disarmed."""
        fault = Fault(action, **details)  # type: ignore[arg-type]
        if fault.answered and action not in _AT_REPLY:
            raise ValueError(f"{action} strikes before there is a reply to look at")
        with self._lock:
            self._faults.append(fault)
        return fault

    def disarm(self, fault: Fault) -> None:
        """Take a fault away."""
        with self._lock, suppress(ValueError):
            self._faults.remove(fault)

    @contextmanager
    def fault(self, action: Action, **details: object) -> Iterator[Fault]:
        """A fault for the length of a block, which must have struck by its end."""
        fault = self.arm(action, **details)
        try:
            yield fault
        finally:
            self.disarm(fault)
        assert fault.struck, f"no command was struck by {fault}"

    def cut(self) -> int:
        """Close every connection now, and say how many; new ones are accepted."""
        with self._lock:
            links = list(self._links)
        for link in links:
            link.cut()
        return len(links)

    @contextmanager
    def black_hole(self) -> Iterator[None]:
        """For the length of a block connections stay open and are accepted, but nothing passes."""
        self._passes.clear()
        try:
            yield
        finally:
            self._passes.set()

    def close(self) -> None:
        """Refuse new connections and close the old ones."""
        _close(self._listener)
        self._passes.set()
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # until it is closed
            while True:
                client, _address = self._listener.accept()
                try:
                    link = _Link(self, client, socket.create_connection(self._server, timeout=5))
                except OSError:
                    _reset(client)
                else:
                    link.start()

    def _struck_by(self, command: bytes, reply: bytes | None = None) -> Fault | None:
        """The first fault that strikes this command now."""
        with self._lock:
            return next((fault for fault in self._faults if fault.strikes(command, reply)), None)


class _Link:
    """One client's connection: a thread per direction, replies paired with commands in order."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy, self._client, self._server = proxy, client, server
        self._pending: deque[bytes] = deque()
        self._stalled = self._draining = False
        self._paired = True
        for end in (client, server):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        with self._proxy._lock:
            self._proxy._links.add(self)
        for source, pump in ((self._client, self._send), (self._server, self._answer)):
            threading.Thread(target=self._run, args=(source, pump), name="proxy-link", daemon=True).start()

    def cut(self) -> None:
        """Close both ends; the client sees a reset."""
        _reset(self._client)
        _reset(self._server)
        with self._proxy._lock:
            self._proxy._links.discard(self)

    def _run(self, source: socket.socket, pump: Callable[[bytes], bool]) -> None:
        with suppress(OSError), source.makefile("rb") as stream:
            while frame := self._next(source, stream):
                self._proxy._passes.wait()
                if not self._stalled and not pump(frame):
                    break
        # After `cut_after` the other thread still reads what the server says, so that nothing is reset early.
        if not (self._draining and source is self._client):
            self.cut()

    def _next(self, source: socket.socket, stream: BufferedReader) -> bytes:
        whole = self._paired or source is self._client
        return _frame(stream) if whole else stream.read1(65536)

    def _send(self, command: bytes) -> bool:
        """Pass a command on; False ends the connection."""
        fault = self._proxy._struck_by(command)
        action = fault.action if fault else ""
        if action == "cut_before":
            return False
        if action == "stall":
            self._stalled = True
            return True
        if fault and action == "answer":
            self._client.sendall(fault.reply)
            return True
        if fault and action == "delay":
            fault.delay()
        if any(word in command[:40].upper() for word in _UNPAIRED):
            self._paired = False
        self._pending.append(command)
        if action == "cut_after":
            self._draining = True
            _reset(self._client)
            self._server.sendall(command)
            # The server reads what was sent before it sees the end.
            self._server.shutdown(socket.SHUT_WR)
            return False
        self._server.sendall(command)
        return True

    def _answer(self, reply: bytes) -> bool:
        """Pass a reply on; False ends the connection."""
        if self._draining:
            return True
        if self._paired and reply[:1] != b">":
            command = self._pending.popleft() if self._pending else b""
            fault = self._proxy._struck_by(command, reply)
            if fault and fault.action == "drop_reply":
                return False
            if fault and fault.action == "stall_reply":
                self._stalled = True
                return True
            if fault:
                fault.delay()
        self._client.sendall(reply)
        return True


def _frame(stream: BufferedReader) -> bytes:
    """The next RESP value as it has come; nothing at the end."""
    line = stream.readline()
    kind, size = line[:1], line[1:-2]
    if kind in (b"$", b"!", b"=") and int(size) >= 0:
        return line + stream.read(int(size) + 2)
    if kind in _AGGREGATES:
        parts = int(size) * _AGGREGATES[kind] + (kind == b"|")
        return line + b"".join(_frame(stream) for _ in range(parts))
    return line


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    _close(end)


def _close(end: socket.socket) -> None:
    with suppress(OSError):  # a thread that waits for it is woken by the shutdown, not by the close
        end.shutdown(socket.SHUT_RDWR)
    end.close()
