"""How the Lua scripts in `lua/` are called, one or many in a round trip, and what a server's errors mean."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.exceptions import (
    AskError,
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    ConnectionError,
    NoPermissionError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
    TimeoutError,
    TryAgainError,
)

from celery_setnx.exceptions import LockForbidden, LockRefused, LockUnavailable, is_misled
from celery_setnx.lock.names import other_permits
from celery_setnx.lock.wire import Failed, ask, ask_many, tell

# Replies that a healthy server stops giving by itself: by redis-py's class, by code, and as Redis 6.2 quotes
# the code when a script meets it.
_TEMPORARY_ERRORS = (OutOfMemoryError, ReadOnlyError, ClusterDownError, TryAgainError)
_TEMPORARY = re.compile(
    r"(?:.*@user_script: ?\d+: -)?"
    r"(?:OOM|BUSY|LOADING|READONLY|MISCONF|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN) "
)

# What an administrator allows, or sets right.
_FORBIDDEN_ERRORS = (AuthenticationError, AuthorizationError, NoPermissionError)
_FORBIDDEN = re.compile(
    r"\bNOPERM |ACL failure in script|"
    r"can't (?:run this command|access at least one)"
)

# Redis 7.0 says where in a script the user was refused, but not which command.
_UNNAMED = re.compile(r"can't run this command(?:.*@user_script: ?(\d+))?", re.DOTALL)
_CALLED = re.compile(r"redis\.call\('(\w+)'")
_TRIED = re.compile(r"redis\.pcall\('(\w+)'")

_USE = re.compile(r"^-- use: (.+)\n", re.MULTILINE)

REDIS_ERRORS = (RedisError, RedisClusterException)
"""What redis-py raises: of a cluster that it cannot reach, an error that is none of its RedisErrors."""

_KNOWN = "_setnx_scripts"
"""The attribute of a client that says which scripts its server knows, as far as somebody tells it of them."""

Keys = tuple[str, ...]
Call = tuple[Keys, tuple[Any, ...]]
Settled = list[Any] | LockUnavailable | LockRefused


class Script:
    """One verb: its Lua file, and its digest. The first of its keys is the one that errors name.

    The file says which texts it uses, and where they stand in it: `-- use: lock store`. The words of a reply
    are text, unless they are wanted `raw`.
    """

    def __init__(self, verb: str, *, raw: bool = False) -> None:
        self._texts_of: Callable[[Any], list[Any]] = list if raw else texts_of
        self.text = assembled(verb, _lua)
        self.sha = sha1(self.text.encode()).hexdigest()

    def __call__(self, client: Any, keys: Keys, *arguments: Any) -> list[Any]:
        """Run it: the words of the reply."""
        try:
            try:
                reply = ask(client, ("EVALSHA", self.sha, str(len(keys)), *keys, *_in_text(arguments)))
            except NoScriptError:
                client.__dict__.pop(_KNOWN, None)
                reply = ask(client, ("EVAL", self.text, str(len(keys)), *keys, *_in_text(arguments)))
        except REDIS_ERRORS as error:
            raise self._translated(keys[0], error) from error
        return self._texts_of(reply)

    def tell(self, client: Any, keys: Keys, arguments: tuple[Any, ...], failed: Failed) -> bool:
        """Run it, and wait for no reply; False if it is to be asked: as the first time. See `wire.tell`."""
        known: set[str] = client.__dict__.setdefault(_KNOWN, set())
        if self.sha not in known:
            known.add(self.sha)
            return False
        try:
            return tell(client, ("EVALSHA", self.sha, str(len(keys)), *keys, *_in_text(arguments)), failed)
        except REDIS_ERRORS:
            return False

    def many(self, client: Any, calls: Sequence[Call]) -> list[Settled]:
        """Run it once per (keys, arguments) in one round trip: for each its reply, or its error."""
        if not calls:
            return []
        if not is_cluster(client):
            return self._in_one_go(client, client, calls)
        settled: dict[int, Any] = {}
        for node, places in _by_node(client, calls):
            settled.update(zip(places, self._of_node(client, node, [calls[place] for place in places])))
        return [settled[place] for place in range(len(calls))]

    def _of_node(self, client: Any, node: Any, calls: Sequence[Call]) -> list[Settled]:
        """The replies of one node of a cluster: a dead one must not fail what others have."""
        if node is None:  # not known, as the whole cluster may be
            return [self._once(client, *call) for call in calls]
        server = client.get_redis_connection(node)
        settled = self._in_one_go(client, server, calls)
        if all(isinstance(reply, LockUnavailable) for reply in settled):
            # The cluster's client asks again who serves the slot; if that helps, it helps all.
            (keys, arguments), *others = calls
            settled[0] = self._once(client, keys, arguments)
            if isinstance(settled[0], list):
                settled[1:] = [self._once(client, *call) for call in others]
        return settled

    def _in_one_go(self, client: Any, server: Any, calls: Sequence[Call]) -> list[Settled]:
        commands = [
            ("EVALSHA", self.sha, str(len(keys)), *keys, *_in_text(arguments)) for keys, arguments in calls
        ]
        try:
            replies = ask_many(server, commands)
            if isinstance(replies[0], NoScriptError):
                # Forgotten, as by a new master: EVAL makes it known again, and all others go in one go again.
                client.__dict__.pop(_KNOWN, None)
                first = ask_many(server, [("EVAL", self.text, *commands[0][2:])])
                replies = first + (ask_many(server, commands[1:]) if commands[1:] else [])
        except REDIS_ERRORS as error:
            replies = [error] * len(calls)
        return [self._settled(client, call, reply) for call, reply in zip(calls, replies)]

    def _settled(self, client: Any, call: Call, reply: Any) -> Settled:
        if not isinstance(reply, Exception):
            return self._texts_of(reply)
        # Its slot is another node's, or on its way there: the cluster's client follows it.
        moved = isinstance(reply, (AskError, TryAgainError)) and is_cluster(client)
        if moved or isinstance(reply, NoScriptError):
            return self._once(client, *call)
        return self._translated(call[0][0], reply)

    def _translated(self, name: str, error: Exception) -> LockUnavailable | LockRefused:
        refused = _UNNAMED.search(str(error))
        if refused is None:
            return translated(name, error)
        if refused[1]:
            commands = _CALLED.findall(self.text.splitlines()[int(refused[1]) - 1])
        else:  # an error that the script has caught, and handed back
            commands = _TRIED.findall(self.text)
        return LockForbidden(
            name, f"{type(error).__name__}: {error} ({' or '.join(dict.fromkeys(commands))})"
        )

    def _once(self, client: Any, keys: Keys, arguments: tuple[Any, ...]) -> Settled:
        try:
            return self(client, keys, *arguments)
        except (LockUnavailable, LockRefused) as error:
            return error


class PermitScript(Script):
    """A verb that may be about any of a lock's permits."""

    def of(self, client: Any, name: str, keys: Keys, limit: int, *arguments: Any) -> list[Any]:
        """Run it for the lock of a name, told of so many permits; of more, if more are in use."""
        reply: list[Any] = ["more", limit]
        while reply[0] == "more":
            reply = self(client, keys + other_permits(name, int(reply[1])), *arguments)
        return reply


def assembled(verb: str, file: Callable[[str], str]) -> str:
    """A verb's text, with those that it uses in their places."""
    return _USE.sub(lambda use: "".join(map(file, use[1].split())), file(verb))


@cache
def _lua(name: str) -> str:
    return (files("celery_setnx.lock") / "lua" / f"{name}.lua").read_text("utf-8")


def value_of(client: Any, name: str) -> str | None:
    """The text that a key has; None if it has none."""
    found = reply_to(client, "GET", name)
    return found.decode("utf-8", "replace") if isinstance(found, bytes) else found


def reply_to(client: Any, command: str, name: str, *arguments: str) -> Any:
    """What a server says to a command about a key."""
    try:
        return ask(client, (command, name, *arguments))
    except REDIS_ERRORS as error:
        raise translated(name, error) from error


def replies_to(client: Any, commands: Sequence[tuple[str, ...]]) -> list[Any]:
    """What servers say to commands about one key each, in a round trip a node; an error is a reply."""
    try:
        return ask_many(client, commands) if commands else []
    except REDIS_ERRORS as error:
        raise translated(commands[0][1], error) from error


def is_cluster(client: Any) -> bool:
    """True if the client is that of a cluster."""
    return hasattr(type(client), "keyslot")


def reply_of_each(client: Any, *command: str) -> list[Any]:
    """What each server that has locks says to a command: of a cluster, each primary.

    Each is asked by itself: the reply of a cluster that has one primary is not the one of several.
    """
    if not is_cluster(client):
        return [client.execute_command(*command)]

    def ask_each() -> list[Any]:
        return [client.execute_command(*command, target_nodes=node) for node in client.get_primaries()]

    try:
        return ask_each()
    except (ConnectionError, TimeoutError, ClusterDownError):
        return ask_each()  # the client has asked meanwhile which primaries there are now


def node_of(client: Any, key: str) -> str:
    """The node of a cluster that has a key; nothing if it is not known, or there is none. Asks nobody."""
    if not is_cluster(client) or getattr(client, "is_unused", False):
        return ""
    try:
        return str(client.get_node_from_key(key).name)
    except (AttributeError, *REDIS_ERRORS):
        return ""


def _by_node(client: Any, calls: Sequence[Call]) -> list[tuple[Any, list[int]]]:
    """The nodes of a cluster, each with the places of the calls that it is to answer."""
    nodes: dict[str, tuple[Any, list[int]]] = {}
    for place, (keys, _arguments) in enumerate(calls):
        try:
            node = client.get_node_from_key(keys[0])
        except REDIS_ERRORS:
            node = None
        nodes.setdefault(node.name if node else "", (node, []))[1].append(place)
    return list(nodes.values())


def translated(name: str, error: Exception) -> LockUnavailable | LockRefused:
    """A server's error about a key as an error of ours, with its cause."""
    ours = _ours_of(name, error)
    ours.__cause__ = error
    return ours


def _ours_of(name: str, error: Exception) -> LockUnavailable | LockRefused:
    text = f"{type(error).__name__}: {error}"
    if str(error).startswith("FOREIGNRECORD"):  # whose key may be called anything
        return LockRefused(name, text)
    if "Cluster mode is not enabled" in text and (reply := _reply_behind(error)):
        return _ours_of(name, reply)
    if handshake := _handshake_of(error):
        text += f" ({handshake})"
    if isinstance(error, _FORBIDDEN_ERRORS) or _FORBIDDEN.search(str(error)) or is_misled(text):
        return LockForbidden(name, text)
    temporary = not isinstance(error, ResponseError) or isinstance(error, _TEMPORARY_ERRORS)
    return (
        LockUnavailable(name, text) if temporary or _TEMPORARY.match(str(error)) else LockRefused(name, text)
    )


def is_without_right(error: LockForbidden) -> bool:
    """Whether the server's user lacks a right, and not the right password or URL."""
    return error.reason.startswith(NoPermissionError.__name__) or bool(_FORBIDDEN.search(error.reason))


def _reply_behind(error: BaseException | None) -> ResponseError | None:
    """What the server says to CLUSTER SLOTS: redis-py takes each refusal for a server without a cluster."""
    while error is not None and not isinstance(error, ResponseError):
        error = error.__cause__ or error.__context__
    return error


def _handshake_of(error: BaseException | None) -> str:
    """That it was TLS that got no answer, which redis-py says no more; else nothing."""
    while error is not None:
        if isinstance(error, OSError) and "handshake" in str(error):
            return str(error)
        error = error.__cause__ or error.__context__
    return ""


def _in_text(arguments: tuple[Any, ...]) -> list[str | bytes]:
    """A call's arguments without numbers, of which its keys have none; see `wire.Command`."""
    return [each if type(each) is str or type(each) is bytes else str(each) for each in arguments]


def texts_of(reply: Any) -> list[Any]:
    """A reply's words: those of a table, or of one text."""
    if isinstance(reply, list):
        return [item.decode("utf-8", "replace") if isinstance(item, bytes) else item for item in reply]
    return (reply.decode() if isinstance(reply, bytes) else reply).split(" ")
