"""How the Lua scripts in `lua/` are called, one or many in a round trip, and what a server's errors mean."""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.cluster import RedisCluster
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    ClusterDownError,
    NoScriptError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from celery_setnx.exceptions import LockRefused, LockUnavailable

# Replies that a healthy server stops giving by itself: by redis-py's class, by code, and as Redis 6.2 quotes
# the code when a script meets it.
_TEMPORARY_ERRORS = (OutOfMemoryError, ReadOnlyError, ClusterDownError, TryAgainError)
_TEMPORARY = re.compile(
    r"(?:.*@user_script: ?\d+: -)?"
    r"(?:OOM|BUSY|LOADING|READONLY|MISCONF|NOREPLICAS|MASTERDOWN|CLUSTERDOWN|TRYAGAIN) "
)

Keys = tuple[str, ...]


class Script:
    """One verb: a Lua file and its digest. The first of its keys is the one that errors name."""

    def __init__(self, verb: str) -> None:
        self.text = (files("celery_setnx") / "lua" / f"{verb}.lua").read_text("utf-8")
        self.sha = sha1(self.text.encode()).hexdigest()

    def __call__(self, client: Any, keys: Keys, *arguments: Any) -> list[Any]:
        """Run it: the reply's words as text.

        Raises:
            LockUnavailable: Redis did not answer, or cannot decide now.
            LockRefused: Redis refuses a command.
        """
        try:
            try:
                reply = client.evalsha(self.sha, len(keys), *keys, *arguments)
            except NoScriptError:
                reply = client.eval(self.text, len(keys), *keys, *arguments)
        except RedisError as error:
            raise _translated(keys[0], error) from error
        return [_text(item) for item in reply]

    def many(
        self, client: Any, calls: Sequence[tuple[Keys, tuple[Any, ...]]]
    ) -> list[list[Any] | LockUnavailable | LockRefused]:
        """Run it once per (keys, arguments) in one round trip: for each its reply, or its error."""
        if not calls:
            return []
        # redis-py's cluster pipelines refuse EVALSHA: a digest may be known to one node only.
        in_cluster = isinstance(client, RedisCluster)
        command, script = ("EVAL", self.text) if in_cluster else ("EVALSHA", self.sha)
        try:
            with client.pipeline(transaction=False) as pipe:
                for keys, arguments in calls:
                    pipe.execute_command(command, script, len(keys), *keys, *arguments)
                replies = pipe.execute(raise_on_error=False)
        except RedisError as error:
            replies = [error] * len(calls)
        return [self._settled(client, call, reply) for call, reply in zip(calls, replies)]

    def _settled(
        self, client: Any, call: tuple[Keys, tuple[Any, ...]], reply: Any
    ) -> list[Any] | LockUnavailable | LockRefused:
        keys, arguments = call
        if isinstance(reply, NoScriptError):
            try:
                return self(client, keys, *arguments)
            except (LockUnavailable, LockRefused) as error:
                return error
        if isinstance(reply, RedisError):
            return _translated(keys[0], reply)
        return [_text(item) for item in reply]


def _translated(name: str, error: RedisError) -> LockUnavailable | LockRefused:
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (AuthenticationError, AuthorizationError)):
        return LockRefused(name, text)
    temporary = not isinstance(error, ResponseError) or isinstance(error, _TEMPORARY_ERRORS)
    return (
        LockUnavailable(name, text) if temporary or _TEMPORARY.match(str(error)) else LockRefused(name, text)
    )


def _text(item: Any) -> Any:
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else item
