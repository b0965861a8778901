"""What the package finds in place of clock, threads, chance, process and network, for the length of a seed.

One door: `substituted()` puts these into the namespaces and the defaults of the modules named in `_ROOMS`,
and puts the real ones back. Per process there is a copy of what the package keeps in a module (`_STATE`).
"""

from __future__ import annotations

import gc
import inspect
import logging
import os
import queue
import random
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import partial
from hashlib import sha1
from importlib.resources import files
from types import FunctionType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet
from zlib import crc32

import redis
from celery.worker.request import Request
from kombu.asynchronous.timer import Entry
from redis._parsers import _RESP2Parser
from redis.backoff import ExponentialBackoff
from redis.retry import Retry

import celery_setnx.call.ended
import celery_setnx.call.later
import celery_setnx.connection
import celery_setnx.forks
import celery_setnx.lock.keeper
import celery_setnx.lock.process
import celery_setnx.log
import celery_setnx.run.cleanup
import celery_setnx.run.courier
import celery_setnx.run.events
import celery_setnx.run.held
import celery_setnx.run.run
import celery_setnx.run.sweep
from celery_setnx.lock.record import ORIGINAL
from celery_setnx.lock.scripts import Script
from tests.simulation.scheduler import US, Process, Thread, World
from tests.simulation.scripts import script
from tests.simulation.server import Reply, Server, ServerError, Status

_ROOMS = (
    *("celery_setnx", "redis.retry", "redis.utils", "kombu.asynchronous.timer", "kombu.utils.uuid"),
    *("celery.app.base",),
    *("celery.app.amqp", "celery.app.trace", "celery.utils.time", "celery.worker.request"),
)
_world = World(0)


class _Stand:
    """A module of the standard library, of which some names are ours."""

    def __init__(self, real: ModuleType, **ours: Any) -> None:
        self.__dict__.update(ours)
        self._real = real

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


def monotonic() -> float:
    return (_world.now_us - 1_600_000_000 * US) / US


def _read() -> float:
    """The clock; in every eighth seed other threads go on as it is read, as they may anywhere in Python."""
    if _world.seed % 8 == 6 and _world.current is not None:
        _world.sleep(_world.random.random() ** 4 * 0.02)
    return monotonic()


def _time() -> float:
    return (_world.now_us + _world.process.skew_us) / US


def sleep(seconds: float) -> None:
    step()
    _world.sleep(seconds)


def step() -> None:
    """Where a thread gives way, its process may die, or be frozen."""
    if _world.go_wrong("death", 0.002):
        _world.kill(_world.process)
    if _world.go_wrong("frost", 0.002):
        _world.freeze(_world.process, _world.random.choice((0.3, 2.0, 12.0)) * _world.random.random())


class Lock:
    """threading.Lock and RLock."""

    def __init__(self) -> None:
        self._owner: Thread | None = None
        self._depth = 0
        self._waiters: list[Thread] = []

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        while self._owner not in (None, _world.current):
            if not blocking or not _world.wait(self._waiters, None if timeout < 0 else timeout):
                return False
        self._owner, self._depth = _world.current, self._depth + 1
        return True

    def release(self) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            _world.notify(self._waiters, 1)

    def locked(self) -> bool:
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_exc: object) -> None:
        self.release()


class Condition(Lock):
    """threading.Condition with a lock of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._sleepers: list[Thread] = []

    def wait(self, timeout: float | None = None) -> bool:
        step()
        depth, self._depth = self._depth, 1
        self.release()
        told = _world.wait(self._sleepers, timeout)
        self.acquire()
        self._depth = depth
        return told

    def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
        until = None if timeout is None else monotonic() + timeout
        while not (result := predicate()):
            if until is not None and monotonic() >= until:
                break
            self.wait(None if until is None else until - monotonic())
        return result

    def notify(self, n: int = 1) -> None:
        _world.notify(self._sleepers, n)

    def notify_all(self) -> None:
        self.notify(len(self._sleepers))


class Event:
    """threading.Event."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiters: list[Thread] = []

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        _world.notify(self._waiters, len(self._waiters))

    def clear(self) -> None:
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        step()
        return self._is_set or _world.wait(self._waiters, timeout) or self._is_set


class SimpleQueue:
    """queue.SimpleQueue."""

    def __init__(self) -> None:
        self._items: list[Any] = []
        self._waiters: list[Thread] = []

    def put(self, item: Any) -> None:
        self._items.append(item)
        _world.notify(self._waiters, 1)

    def get(self, timeout: float | None = None) -> Any:
        step()
        until = None if timeout is None else monotonic() + timeout
        while not self._items:
            if not _world.wait(self._waiters, None if until is None else until - monotonic()):
                raise queue.Empty
        return self._items.pop(0)

    def qsize(self) -> int:
        return len(self._items)


class ThreadOf:
    """threading.Thread, in the process that starts it."""

    def __init__(
        self, target: Callable[..., Any], name: str = "", daemon: bool = True, args: Any = ()
    ) -> None:
        self._run, self.name = (lambda: target(*args)), name.removeprefix("celery_setnx-")

    def start(self) -> None:
        _world.spawn(_world.process, self._run, self.name)


class Local:
    """threading.local."""

    def __getattribute__(self, name: str) -> Any:
        own = _own(self)
        return own[name] if name in own else object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        _own(self)[name] = value


def _own(local: Local) -> dict[str, Any]:
    assert _world.current is not None
    return _world.current.locals.setdefault(id(local), {})


def _made(kind: type) -> Any:
    """What a subclass of threading.local becomes."""
    own = {name: value for name, value in vars(kind).items() if not name.startswith("__")}
    return type(kind.__name__, (Local,), own)()


def _urandom(size: int) -> bytes:
    return _world.random.randbytes(size)


def _uuid4() -> uuid.UUID:
    return uuid.UUID(bytes=_urandom(16), version=4)


def _ident() -> int:
    return _world.current.ident if _world.current else 0


def _identity_of(pid: int) -> dict[str, Any]:
    return {"host": "simulated", "pid": pid, "boot": "b", "start": 1}


class _Real(type):
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, datetime)


class _Datetime(datetime, metaclass=_Real):
    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return datetime.fromtimestamp(_time(), tz)


def _single_client(_at: Any, _params: Any, timeout_s: float) -> redis.Redis:
    assert _world.server is not None
    return client_of(_world.server, timeout_s)


def _has_ended(pid: int, start: int | None = None) -> bool:
    return _world.has_died(pid)


class _Chance:
    def __getattr__(self, name: str) -> Any:
        return getattr(_world.random, name)


def _hurried(seconds: float) -> float:
    """A time of couriers: in every fourth seed they come while there is trouble still."""
    return seconds / 150 if _world.seed % 4 == 3 else seconds


_TIME = {"time": _time, "monotonic": monotonic, "perf_counter": monotonic, "sleep": sleep}
_THREADING = {
    "Lock": Lock,
    "RLock": Lock,
    "Condition": Condition,
    "Event": Event,
    "Thread": ThreadOf,
    "get_ident": _ident,
}
_FOR: list[tuple[Any, Any]] = [
    (time, _Stand(time, **{**_TIME, "monotonic": _read})),
    (threading, _Stand(threading, **_THREADING)),
    (os, _Stand(os, getpid=lambda: _world.process.pid, urandom=_urandom)),
    (uuid, _Stand(uuid, uuid4=_uuid4)),
    (random, _Chance()),
    *((getattr(time, name), ours) for name, ours in _TIME.items()),
    *((getattr(threading, name), ours) for name, ours in _THREADING.items()),
    (uuid.uuid4, _uuid4),
    (datetime, _Datetime),
    (celery_setnx.connection._single_client, _single_client),
    (celery_setnx.lock.keeper.SimpleQueue, SimpleQueue),
    (celery_setnx.lock.process._identity_of, _identity_of),
    (celery_setnx.lock.process.has_ended, _has_ended),
    (redis.utils.get_lib_version, lambda: "1"),  # each connection asks, and files are read for it
]
_STATE: list[tuple[Any, str, Callable[[], Any]]] = [
    *(
        (module, name, partial(_hurried, getattr(module, name)))
        for module, name in (
            (celery_setnx.run.courier, "_PACE_S"),
            (celery_setnx.run.held, "_ASKS_S"),
            (celery_setnx.run.held, "_YOUNG_S"),
        )
    ),
    (celery_setnx.lock.keeper, "_keepers", dict),
    (celery_setnx.log, "_say_again_at", dict),
    (celery_setnx.call.ended, "_asked_again_at", WeakKeyDictionary),
    (celery_setnx.call.later, "_unsent", dict),
    (celery_setnx.run.cleanup, "_of_process", dict),
    (celery_setnx.run.run, "RUNNING", dict),
    (celery_setnx.run.sweep, "_held", WeakSet),
    (celery_setnx.run.sweep, "_sweeping", list),
    (celery_setnx.run.events, "_hostnames", WeakKeyDictionary),
    (celery_setnx.forks.between_forks, "_changed", Condition),
    (celery_setnx.forks.between_forks, "_within", Counter),
]


@contextmanager
def substituted() -> Iterator[None]:
    """The door."""
    undo: list[tuple[Any, str, Any]] = [(holder, name, getattr(holder, name)) for holder, name, _ in _STATE]
    ours = {id(real): stand for real, stand in _FOR}
    for room in [m for name, m in sys.modules.items() if name.startswith(_ROOMS)]:
        for name, value in list(vars(room).items()):
            if type(value) is threading.local or isinstance(value, threading.local):
                ours.setdefault(id(value), _made(type(value)))
            if id(value) in ours:
                undo.append((room, name, value))
                setattr(room, name, ours[id(value)])
            elif (
                isinstance(value, (FunctionType, type)) and getattr(value, "__module__", "") == room.__name__
            ):
                members = [value] if isinstance(value, FunctionType) else vars(value).values()
                for function in filter(inspect.isfunction, members):
                    _give_defaults(function, ours, undo)
    loggers = [
        logging.getLogger(name) for name in ("celery_setnx", "celery.app.trace", "celery.worker.request")
    ]
    for logger in loggers:
        logger.disabled = True
    undo.append((Request, "__hash__", Request.__hash__))
    Request.__hash__ = lambda request: crc32(request.id.encode())  # else sets have the order of addresses
    undo.append((Entry, "__lt__", Entry.__lt__))
    Entry.__lt__ = lambda *_entries: False  # else what is due at one time comes in that order, too
    gc.freeze()
    gc.disable()  # garbage is collected between seeds
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()
        for logger in loggers:
            logger.disabled = False
        for holder, name, value in reversed(undo):
            setattr(holder, name, value)


def _give_defaults(function: Any, ours: dict[int, Any], undo: list[tuple[Any, str, Any]]) -> None:
    if any(id(value) in ours for value in function.__defaults__ or ()):
        undo.append((function, "__defaults__", function.__defaults__))
        function.__defaults__ = tuple(ours.get(id(value), value) for value in function.__defaults__)
    if any(id(value) in ours for value in (function.__kwdefaults__ or {}).values()):
        undo.append((function, "__kwdefaults__", function.__kwdefaults__))
        given = function.__kwdefaults__.items()
        function.__kwdefaults__ = {name: ours.get(id(value), value) for name, value in given}


def begin(world: World) -> None:
    """From now on this world is the one that the package sees."""
    global _world
    if world.seed % 16 == 0:
        gc.collect()
    _world = world
    loaded: list[Process | None] = [None]

    def on_switch(process: Process) -> None:
        before, loaded[0] = loaded[0], process
        if before is process:
            return
        if before is not None:
            before.state = [getattr(holder, name) for holder, name, _ in _STATE]
        if not process.state:
            process.state = [make() for _, _, make in _STATE]
        for (holder, name, _), value in zip(_STATE, process.state):
            setattr(holder, name, value)

    world.on_switch = on_switch


class Redis:
    """The server of a world, and the network before it."""

    def __init__(self, world: World) -> None:
        self.world, self.data = world, Server(now=world.now_us)
        world.server = self
        self.scripts: dict[bytes, str] = {}
        self.away_until = 0
        self.lost_at: list[int] = []
        self.came_back_older = False
        self.after: Callable[[], None] = lambda: None
        self.on_script: Callable[[str, Sequence[bytes], Reply], None] = lambda *_told: None
        self._draw = random.Random(world.seed)  # apart: the history of other seeds stays
        self._loses_parked = self._draw.choice((False, False, True))

    @property
    def epoch(self) -> int:
        """How often it has lost data."""
        return len(self.lost_at)

    @property
    def is_away(self) -> bool:
        return self.world.now_us < self.away_until

    def lose(self, keys: Any = ()) -> None:
        """A restart: all data are lost, or older ones come back."""
        if not self.world.is_calm:
            self.world.note("redis restarts", f"{len(tuple(keys))} keys")
            self.data.keys, self.scripts = dict(keys), {}
            self.lost_at.append(self.world.now_us)
            self.came_back_older = self.came_back_older or bool(keys)

    def trouble(self) -> None:
        """From now and then it is away, full, or restarted with no data, or with older data."""
        world, older = self.world, tuple(self.data.keys.items())
        if world.is_calm:
            self.data.is_full, self.away_until = False, 0
            for process in world.processes:
                process.frozen_until = 0
            return
        if world.go_wrong("away", 0.3):
            away_s = world.random.choice((0.2, 2.0, 9.0)) * world.random.random()
            self.away_until = world.now_us + round(away_s * US)
            world.note("redis is away", round(away_s, 3))
        if world.go_wrong("loss", 0.1):
            world.at(world.now_us + 1, self.lose)
        if world.go_wrong("older", 0.1):
            # A replica that lags, or what was saved last: not what there was before all was lost.
            epoch = self.epoch
            world.at(
                world.now_us + world.random.randrange(5 * US),
                lambda: self.lose(older) if self.epoch == epoch else None,
            )
        if self.data.is_full != world.go_wrong("full", 0.2):
            self.data.is_full = not self.data.is_full
            world.note("redis is full" if self.data.is_full else "redis has room")
        world.at(world.now_us + US, self.trouble)

    def ask(self, words: Sequence[bytes]) -> Reply | ServerError:
        """The reply to one command."""
        self.data.now = self.world.now_us
        try:
            reply = self._reply(*words)
        except ServerError as error:
            reply = error
        self.after()
        return reply

    def _reply(self, command: bytes, *words: bytes) -> Reply:
        if command not in (b"EVAL", b"EVALSHA"):
            return self.data.run(command, *words)
        first, count = words[0], int(words[1])
        if command == b"EVALSHA" and first not in self.scripts:
            raise ServerError("NOSCRIPT No matching script. Please use EVAL.")
        text = self.scripts[first] if command == b"EVALSHA" else first.decode()
        known = script(text)
        self.scripts[known.sha.encode()] = text
        reply = known.run(self.data, words[2 : 2 + count], words[2 + count :])
        key = words[2].decode().removesuffix(":line").removesuffix(":holder")
        name = _NAMES.get(known.sha, "a script")
        self.world.note("has", name, "say", _briefly(reply), key=key)
        self.on_script(name, words[2 + count :], reply)
        if name == "park" and self._loses_parked and words[2 + count + 2] not in (b"", ORIGINAL.encode()):
            self.world.at(self.world.now_us + self._draw.randrange(US), self.lose)  # of a call that was woken
        return reply


def _briefly(reply: Reply) -> str:
    words = reply if isinstance(reply, list) else [reply]
    texts = [str(word.decode() if isinstance(word, bytes) else word)[:60] for word in words[:8]]
    return " ".join(text.replace("\n", "/") for text in texts)


def _names() -> dict[str, str]:
    """Of all scripts, by their digests."""
    lua = files("celery_setnx.lock") / "lua"
    verbs = [path.name.removesuffix(".lua") for path in lua.iterdir()]
    return {Script(verb).sha: verb for verb in verbs}


_NAMES = _names()


def _puts_in_doubt(words: Sequence[bytes]) -> bool:
    """Whether a command would do harm that comes when its sender is two steps ahead, which no server knows.

    After its call has run, one that parks it has it run again. After that has parked again, one that acquires
    for a message that has woken it starts it, and nobody hears of that. After its call has begun, one that
    marks its key makes the next call a duplicate of it, until the grace lease has ended.
    """
    digest = words[1].decode() if words[0] == b"EVALSHA" else sha1(words[1]).hexdigest() if words[1:] else ""
    verb = _NAMES.get(digest, "")
    asked = words[3 + int(words[2]) :] if verb == "acquire" else ()
    return verb in ("park", "mark") or (len(asked) > 5 and asked[5] != b"-")


class Socket:
    """One connection to the server: what can go wrong with an exchange goes wrong here."""

    def __init__(self, server: Redis, timeout_s: float) -> None:
        self._server, self._world, self._timeout_s = server, server.world, timeout_s
        self._inbox, self._outbox, self._late_s = b"", b"", 0.0
        self._fails: Exception | None = None

    def sendall(self, data: Any) -> None:
        world, server = self._world, self._server
        self._outbox += bytes(data)  # a long command comes in several pieces
        commands, self._outbox = _parsed(self._outbox)
        if not commands:
            return
        if commands[0][0] == b"CLIENT":  # what redis-py says of itself as it connects
            self._inbox += b"+OK\r\n" * len(commands)
            return
        step()
        if world.go_wrong("lost", 0.02):  # it never arrives
            self._lose("lost")
            return
        travels_s = world.random.random() ** 4 * 0.004
        if world.go_wrong("late", 0.02):  # it arrives, when nobody may wait for it any more
            late_s = self._timeout_s * world.random.choice((0.5, 1.5, 6.0)) * world.random.random()
            world.note("late", commands[0][0].decode(), round(late_s, 3))
            world.process.hindered_at.append(world.now_us)
            if late_s >= self._timeout_s:
                if not any(map(_puts_in_doubt, commands)):
                    world.at(world.now_us + round(late_s * US), lambda: self._arrive(commands))
                self._lose("unheard", reset=False)
                return
            travels_s = late_s
        world.sleep(travels_s)
        if server.is_away:
            self._lose("away")
            return
        replies = self._arrive(commands)
        if world.go_wrong("unheard", 0.02):
            self._lose("reply lost")
            return
        self._inbox += replies

    def _lose(self, what: str, *, reset: bool | None = None) -> None:
        """Nothing comes: the connection is reset, or silent until the client gives up."""
        is_reset = self._world.random.random() < 0.5 if reset is None else reset
        self._world.process.hindered_at.append(self._world.now_us)
        self._world.note("connection", what, "reset" if is_reset else "silent")
        self._late_s = 0.0 if is_reset else self._timeout_s
        self._fails = ConnectionResetError(104, what) if is_reset else TimeoutError(what)

    def _arrive(self, commands: list[list[bytes]]) -> bytes:
        if self._server.is_away:
            return b""
        return b"".join(_encoded(self._server.ask(words)) for words in commands)

    def recv(self, size: int) -> bytes:
        step()
        if self._fails is not None:
            self._world.sleep(self._late_s)
            raise self._fails
        if len(self._inbox) <= size:
            self._world.sleep(self._world.random.random() ** 4 * 0.004)
        found, self._inbox = self._inbox[:size], self._inbox[size:]
        return found

    def recv_into(self, buffer: Any) -> int:
        found = self.recv(len(buffer))
        buffer[: len(found)] = found
        return len(found)

    def settimeout(self, timeout: float | None) -> None:
        pass

    def close(self) -> None:
        pass

    shutdown = setblocking = settimeout


class Connection(redis.Connection):
    """redis-py's own, but for the socket."""

    server: Redis

    def _connect(self) -> Any:
        _world.sleep(0.0)
        if self.server.is_away:
            _world.process.hindered_at += [_world.now_us] * 9
            raise ConnectionRefusedError(111, "Connection refused")
        return Socket(self.server, self.socket_timeout)


def client_of(server: Redis, timeout_s: float = 0.5, retries: int = 1) -> redis.Redis:
    """A client as celery_setnx.connection makes them."""
    kind = type("Connection", (Connection,), {"server": server})
    pool = redis.ConnectionPool(
        kind,
        parser_class=_RESP2Parser,  # the same pieces are read whether hiredis is installed or not
        host="redis",
        protocol=2,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        retry=Retry(ExponentialBackoff(cap=0.1, base=0.01), retries),
        retry_on_error=[redis.ConnectionError, redis.TimeoutError],
    )
    return redis.Redis(connection_pool=pool)


def _parsed(data: bytes) -> tuple[list[list[bytes]], bytes]:
    """The commands that a client sends, if the last one is whole; else none, and what there is."""
    commands, at = [], 0
    while at < len(data):
        words: list[bytes] = []
        count, at = _number(data, at)
        while len(words) < count:
            size, at = _number(data, at)
            words.append(data[at : at + size])
            at += size + 2
        commands.append(words)
    return (commands, b"") if at == len(data) else ([], data)


def _number(data: bytes, at: int) -> tuple[int, int]:
    """What a line says behind its first letter, and where the next begins; 0 past the end."""
    end = data.find(b"\r\n", at)
    return (int(data[at + 1 : end]), end + 2) if end >= 0 else (0, max(at, len(data)) + 1)


def _encoded(reply: Reply | ServerError) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, ServerError):
        return b"-%s\r\n" % str(reply).replace("\n", " ").encode()
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, Status):
        return b"+%s\r\n" % bytes(reply)
    if isinstance(reply, list):
        return b"*%d\r\n%s" % (len(reply), b"".join(map(_encoded, reply)))
    return b"$%d\r\n%s\r\n" % (len(reply), reply)
