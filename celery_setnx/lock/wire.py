"""How commands reach a server: over connections of our own, past the layers of redis-py's client.

For one command the client takes a connection from its pool, under a lock, asks the operating system whether
something is left to be read from it, and sees the command through several layers: that costs more than all
else that a lock does. A `redis.Connection`, which dials, logs in, speaks TLS and asks Sentinels just the
same, has what is needed in public: to pack, send and read (benchmarks/lock_cycle.py shows both).

A client of another kind (of a cluster, of one fixed connection, with a cache, a class of one's own) is used
as it is.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import redis
from redis.exceptions import RedisError, ResponseError
from redis.sentinel import SentinelConnectionPool

try:
    from hiredis import pack_command
except ImportError:
    pack_command = None  # type: ignore[assignment]

Command = tuple[Any, ...]
"""Text: hiredis (3.5) crashes if a signal's handler raises while it makes text of a number."""

Failed = Callable[[], object]
"""What is done about a command whose reply nobody waits for, if that is an error, or lost."""

_POOLS = (redis.ConnectionPool, SentinelConnectionPool)
_WITH_COUNT = ("EVAL", "EVALSHA")
_DEAD = (redis.ConnectionError, redis.TimeoutError)


def ask(client: Any, command: Command) -> Any:
    """A command's reply."""
    wire = _wire_of(client)
    if wire is not None:
        return wire.ask(command)
    with _closed_if_struck(client):
        return client.execute_command(*_with_count(command))


def ask_many(client: Any, commands: Sequence[Command]) -> list[Any]:
    """The replies to many commands, sent in one go to one server; for what it refuses, a ResponseError."""
    wire = _wire_of(client)
    if wire is not None:
        return wire.ask_many(commands)
    with _closed_if_struck(client), client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*_with_count(command))
        return pipe.execute(raise_on_error=False)  # type: ignore[no-any-return]


def tell(client: Any, command: Command, failed: Failed) -> bool:
    """Send a command whose reply nobody waits for; False if it is not sent, and is to be asked.

    It is executed even if this process ends at once. The next exchange over its connection reads the reply
    before its own; if that one fails, or the connection is closed before, nobody hears of it.
    """
    wire = _wire_of(client)
    return wire is not None and wire.tell(command, failed)


def sent_again() -> int:
    """How often this thread has sent something once more, but for what other clients do themselves."""
    return _sent.again


def hang_up(client: Any) -> None:
    """Close the connections of a client that nobody uses now. Whoever asks it later dials again."""
    is_cluster = hasattr(type(client), "get_nodes")
    for each in [node.redis_connection for node in client.get_nodes()] if is_cluster else [client]:
        if each is None:  # of a node that was not asked yet
            continue
        wire = _wire_of(each)
        if wire is not None:
            wire.hang_up()
        _close_idle(each)


class _Sent(threading.local):
    again = 0


_sent = _Sent()


class Wire:
    """The connections that belong to a client: each is one exchange's alone for as long as that lasts.

    Taking and giving back are one operation of a list, so no lock is there for a thread to die with, and for
    a fork to inherit. What a connection is interrupted in, by whatever exception, ends with it: a reply that
    was not read would be the next one's.
    """

    def __init__(self, client: Any) -> None:
        self._pool = client.connection_pool
        self._pid = os.getpid()
        self._idle: list[Any] = []
        self._looks = False

    def ask(self, command: Command) -> Any:
        """Send a command, read its reply."""
        connection, idle = self._take()
        try:
            packed = _packed(connection, command)
            try:
                connection.send_packed_command(packed)
                if connection.setnx_failed is not None:
                    _read_unread(connection)
                reply = connection.read_response()
            except _DEAD as error:
                reply = self._again(connection, error, idle, packed, connection.read_response)
        except ResponseError:
            self._idle.append(connection)  # read in full: nothing is left in it
            raise
        except BaseException:
            connection.disconnect()
            raise
        self._idle.append(connection)
        return reply

    def ask_many(self, commands: Sequence[Command]) -> list[Any]:
        """Send all commands, then read all replies; what the server refuses is an error in its place."""
        connection, idle = self._take()

        def read() -> list[Any]:
            return [_reply(connection) for _ in commands]

        try:
            packed = [b"".join(part for command in commands for part in _packed(connection, command))]
            try:
                connection.send_packed_command(packed)
                if connection.setnx_failed is not None:
                    _read_unread(connection)
                replies = read()
            except _DEAD as error:
                replies = self._again(connection, error, idle, packed, read)
        except BaseException:
            connection.disconnect()
            raise
        self._idle.append(connection)
        return replies

    def tell(self, command: Command, failed: Failed) -> bool:
        """Send a command, and leave its reply in the connection: one at most, as they are not counted."""
        connection, _idle = self._take()
        tells = connection.setnx_failed is None and not self._looks
        try:
            if tells:
                connection.send_packed_command(_packed(connection, command))
                connection.setnx_failed = failed
        except BaseException:
            connection.disconnect()
            raise
        self._idle.append(connection)
        return tells

    def hang_up(self) -> None:
        """Close the connections that lie idle; a parent's are left alone."""
        with suppress(IndexError):
            while self._pid == os.getpid():  # each is taken first: another thread may take one, too
                self._idle.pop().disconnect()

    def _again(
        self, connection: Any, error: Exception, idle: bool, packed: Any, read: Callable[[], Any]
    ) -> Any:
        """Send and read again, as often as the client would: every script knows its own token."""
        _sent.again += 1
        lost, connection.setnx_failed = connection.setnx_failed, None
        failures = [error]
        if idle and isinstance(error, redis.ConnectionError):
            failures.clear()  # the server has closed it since it was used: that was no attempt
            self._hang_up(connection)

        def once_more() -> Any:
            if failures:
                raise failures.pop()  # what has just failed counts
            connection.connect()
            connection.send_packed_command(packed)
            return read()

        reply = connection.retry.call_with_retry(once_more, lambda _error: self._hang_up(connection))
        if lost is not None:
            lost()
        return reply

    def _take(self) -> tuple[Any, bool]:
        """A connection, and whether it lay idle and was not looked at."""
        if self._pid != os.getpid():
            self._idle, self._pid = [], os.getpid()  # a forked child leaves its parent's sockets alone
        try:
            connection = self._idle.pop()
        except IndexError:
            connection = self._pool.connection_class(**self._pool.connection_kwargs)
            connection.setnx_failed = None  # a `Failed`, where `tell` has left a reply unread
            connection.connect()  # to send would connect as well, but not ask the Sentinels where
            self._looks = _sends_once(connection)
            return connection, False
        if self._looks and _is_dead(connection):
            self._hang_up(connection)
            connection.connect()
        return connection, not self._looks

    def _hang_up(self, connection: Any) -> None:
        """Close a connection that failed, and the idle ones: they led to the same server."""
        connection.disconnect()
        self.hang_up()


@contextmanager
def _closed_if_struck(client: Any) -> Iterator[None]:
    """Closes the connections of a client whose exchange is interrupted, as by a time limit.

    Where that strikes between send and read, redis-py keeps the connection for the next command, which then
    reads the reply that was not its own. (A cluster's client closes it.)
    """
    try:
        yield
    except RedisError:
        raise  # redis-py's own: it has read the reply, or closed the connection
    except BaseException:
        if isinstance(client, redis.Redis):
            _close_idle(client)
        raise


def _close_idle(client: Any) -> None:
    """Close a client's fixed connection, and those that lie idle in its pool."""
    if client.connection is not None:
        client.connection.disconnect()
    try:
        client.connection_pool.disconnect(inuse_connections=False)
    except TypeError:  # before redis-py 7 a BlockingConnectionPool closes all or none
        client.connection_pool.disconnect()


def _sends_once(connection: Any) -> bool:
    """True if the client sends nothing again. Elsewhere an attempt that fails tells as much, for less."""
    return not getattr(connection.retry, "_retries", 0)  # redis-py 5 has no get_retries()


def _is_dead(connection: Any) -> bool:
    """True if the server has closed a connection that nobody used meanwhile."""
    try:
        return bool(connection.can_read())
    except _DEAD:
        return True


def _with_count(command: Command) -> Command:
    """With a number for a script's number of keys: by it redis-py 5.0 finds the node of a cluster."""
    return (*command[:2], int(command[2]), *command[3:]) if command[0] in _WITH_COUNT else command


def _packed(connection: Any, command: Command) -> list[bytes]:
    return connection.pack_command(*command) if pack_command is None else [pack_command(command)]


def _reply(connection: Any) -> Any:
    try:
        return connection.read_response()
    except ResponseError as error:
        return error


def _read_unread(connection: Any) -> None:
    """Read the reply that `tell` has left in a connection."""
    is_refused = isinstance(_reply(connection), ResponseError)
    failed, connection.setnx_failed = connection.setnx_failed, None
    if is_refused:
        failed()


def _wire_of(client: Any) -> Wire | None:
    try:
        return client.__dict__["_setnx_wire"]  # type: ignore[no-any-return]
    except KeyError:
        made = Wire(client) if _is_plain(client) else None
        return client.__dict__.setdefault("_setnx_wire", made)  # type: ignore[no-any-return]


def _is_plain(client: Any) -> bool:
    if type(client) is not redis.Redis or client.connection is not None:
        return False
    pool = client.connection_pool
    encoding = str(pool.connection_kwargs.get("encoding", "utf-8")).lower()
    return type(pool) in _POOLS and getattr(pool, "cache", None) is None and encoding == "utf-8"
