"""Lua 5.1 on the simulated server, as Redis runs a script: its globals, numbers, errors and tables."""

from __future__ import annotations

from functools import lru_cache
from hashlib import sha1
from typing import Any

from lupa import lua51

from tests.simulation.server import Reply, Server, ServerError, Status

_LUA = lua51.LuaRuntime(unpack_returned_tuples=False, encoding=None)
_GLOBALS = (
    b"assert error ipairs math next pairs pcall rawequal rawget rawset select string table tonumber tostring "
    b"type unpack"
).split()
_LARGEST = 2**53
_STRICT = _LUA.execute(b"""
return function(env)
  local function unknown(_, name) error('no global variable ' .. name, 2) end
  local function creates(_, name) error('no global variable may be made: ' .. name, 2) end
  return setmetatable(env, {__index = unknown, __newindex = creates})
end
""")


class Script:
    """A script's text, compiled once; one at a time runs, on one server."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.sha = sha1(text.encode()).hexdigest()
        self._env = _LUA.table()
        for name in _GLOBALS:
            self._env[name] = _LUA.globals()[name]
        self._env[b"redis"] = _LUA.table_from(
            {b"call": self._call, b"pcall": self._pcall, b"error_reply": _error_reply, b"sha1hex": None}
        )
        self._env[b"KEYS"] = self._env[b"ARGV"] = False
        _STRICT(self._env)
        body = _LUA.eval(
            b"function(text, env) return setfenv(assert(loadstring(text, '@user_script')), env) end"
        )
        self._body = body(text.encode(), self._env)
        self._server = Server()

    def run(self, server: Server, keys: tuple[bytes, ...], arguments: tuple[bytes, ...]) -> Reply:
        """Its reply, as Redis makes one of what a script returns.

        Raises:
            ServerError: It returned an error, or ended by one.
        """
        self._server = server
        self._env[b"KEYS"], self._env[b"ARGV"] = _LUA.table_from(keys), _LUA.table_from(arguments)
        server.declared, server.has_written = frozenset(keys), False
        try:
            return _reply(self._body())
        except lua51.LuaError as error:
            raise ServerError(f"ERR {error}") from error
        finally:
            server.declared = None

    def _call(self, *words: Any) -> Any:
        reply = self._server.run(*[word if type(word) is bytes else _word(word) for word in words])
        return reply if type(reply) is bytes else _in_lua(reply)

    def _pcall(self, *words: Any) -> Any:
        try:
            return self._call(*words)
        except ServerError as error:
            return _LUA.table_from({b"err": str(error).encode()})


@lru_cache(4_000)
def script(text: str) -> Script:
    """A script of this text."""
    return Script(text)


def _error_reply(text: bytes) -> Any:
    return _LUA.table_from({b"err": text})


def _word(word: Any) -> bytes:
    """An argument of redis.call as the server gets it."""
    if type(word) in (int, float) and int(word) == word and abs(word) <= _LARGEST:
        return b"%d" % word
    # Others are written differently by Redis and Valkey, or are no arguments.
    raise ServerError(f"ERR Lua redis lib command arguments must be strings or integers, not {word!r}")


def _in_lua(reply: Reply) -> Any:
    """A command's reply as a script sees it."""
    if reply is None:
        return False
    if type(reply) is Status:
        return _LUA.table_from({b"ok": bytes(reply)})
    return _LUA.table_from(map(_in_lua, reply)) if type(reply) is list else reply


def _reply(value: Any) -> Reply:
    """What a script returns as the client gets it."""
    if value is None or value is False:
        return None
    if value is True:
        return 1
    if type(value) is bytes:
        return value
    if isinstance(value, (int, float)):
        return int(value)
    if error := value[b"err"]:
        raise ServerError(error.decode())
    if status := value[b"ok"]:
        return Status(status)
    items: list[Reply] = []
    while (item := value[len(items) + 1]) is not None:  # a table ends at its first nil
        items.append(_reply(item))
    return items
