"""A TCP proxy in front of a Redis server whose connections fail on demand. Standard library only."""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
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
            `delay_reply` hold the command or its reply back for `seconds`; `stall` and `stall_reply`
            leave the connection open, but nothing passes any more (half-open).
        containing: Bytes that the command must contain. Defaults to any command, including those with
            which a client sets up its connection.
        answered: Bytes that the reply must contain; for the three actions that wait for the reply.
        skip: Number of matching commands that pass unharmed first. Defaults to 0.
        times: Number of commands that are struck. Defaults to 1.
        seconds: Length of a delay.
        reply: The raw reply of `answer`, such as `b"-LOADING not yet\\r\\n"`.
        struck: How many commands it has struck so far.
    """

    action: Action
    containing: bytes = b""
    answered: bytes = b""
    skip: int = 0
    times: int = 1
    seconds: float = 0.0
    reply: bytes = b""
    struck: int = 0


class Proxy:
    """Listens on a free port of the loopback address and passes everything on, but for its faults.

    Args:
        port: The server's port on the loopback address.

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
        self._closed = False
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
        """Close every connection now; new ones are accepted.

        Returns:
            The number of connections closed.
        """
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
        self._closed = True
        # Wakes the accepting thread, which a mere close would leave asleep.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._passes.set()
        self.cut()

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _address = self._listener.accept()
            except OSError:
                return
            try:
                server = socket.create_connection(self._server, timeout=5)
            except OSError:
                _reset(client)
                continue
            link = _Link(self, client, server)
            with self._lock:
                self._links.add(link)
            link.start()

    def _forget(self, link: _Link) -> None:
        with self._lock:
            self._links.discard(link)

    def _struck_by(self, command: bytes, reply: bytes | None) -> Fault | None:
        """The first fault that strikes this command now; counted when it does."""
        with self._lock:
            for fault in self._faults:
                if (reply is not None) != (fault.action in _AT_REPLY) or fault.struck >= fault.times:
                    continue
                if fault.containing not in command or fault.answered not in (reply or b""):
                    continue
                if fault.skip > 0:
                    fault.skip -= 1
                    continue
                fault.struck += 1
                return fault
        return None


class _Link:
    """One client's connection: a thread per direction, replies paired with commands in order."""

    def __init__(self, proxy: Proxy, client: socket.socket, server: socket.socket) -> None:
        self._proxy = proxy
        self._client = client
        self._server = server
        self._pending: deque[bytes] = deque()
        self._stalled = False
        self._draining = False
        self._paired = True
        for end in (client, server):
            end.settimeout(None)
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def start(self) -> None:
        for pump in (self._send, self._answer):
            threading.Thread(target=self._run, args=(pump,), name="proxy-link", daemon=True).start()

    def cut(self) -> None:
        """Close both ends; the client sees a reset."""
        _reset(self._client)
        _reset(self._server)
        self._proxy._forget(self)

    def _run(self, pump: object) -> None:
        with suppress(OSError):
            pump()  # type: ignore[operator]
        # After `cut_after` the other thread still reads what the server says, so that nothing is reset early.
        if not (self._draining and pump == self._send):
            self.cut()

    def _send(self) -> None:
        buffer = b""
        while data := self._client.recv(65536):
            self._proxy._passes.wait()
            if self._stalled:
                continue
            buffer += data
            while (end := _frame_end(buffer, 0)) >= 0:
                command, buffer = buffer[:end], buffer[end:]
                if not self._pass(command):
                    return

    def _pass(self, command: bytes) -> bool:
        fault = self._proxy._struck_by(command, None)
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
            time.sleep(fault.seconds)
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

    def _answer(self) -> None:
        buffer = b""
        while data := self._server.recv(65536):
            self._proxy._passes.wait()
            if self._stalled or self._draining:
                continue
            buffer += data
            while (end := len(buffer) if not self._paired else _frame_end(buffer, 0)) > 0:
                reply, buffer = buffer[:end], buffer[end:]
                if self._paired and reply[:1] != b">" and not self._judge(reply):
                    return
                if self._stalled:
                    break
                self._client.sendall(reply)

    def _judge(self, reply: bytes) -> bool:
        command = self._pending.popleft() if self._pending else b""
        fault = self._proxy._struck_by(command, reply)
        if fault is None:
            return True
        if fault.action == "delay_reply":
            time.sleep(fault.seconds)
        elif fault.action == "stall_reply":
            self._stalled = True
        return fault.action != "drop_reply"


def _frame_end(data: bytes, start: int) -> int:
    """Where the RESP value at `start` ends; -1 if it has not come in full."""
    stop = data.find(b"\r\n", start)
    if stop < 0:
        return -1
    kind, after = data[start : start + 1], stop + 2
    if kind in (b"$", b"!", b"="):
        length = int(data[start + 1 : stop])
        end = after if length < 0 else after + length + 2
        return end if end <= len(data) else -1
    if kind in _AGGREGATES:
        parts = max(0, int(data[start + 1 : stop])) * _AGGREGATES[kind] + (kind == b"|")
        for _part in range(parts):
            after = _frame_end(data, after)
            if after < 0:
                return -1
    return after


def _reset(end: socket.socket) -> None:
    with suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        # A thread that waits in recv() is woken by the shutdown, not by the close.
        end.shutdown(socket.SHUT_RDWR)
    with suppress(OSError):
        end.close()
