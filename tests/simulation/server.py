"""A simulated Redis server: its keys and commands. What runs scripts on it is in scripts.py.

It holds what Redis 7.0 and Valkey 9 agree on, and refuses the rest: test_simulated_redis.py compares them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from inspect import CO_VARARGS
from typing import Any, NamedTuple

MS = 1_000

Reply = Any
"""Bytes, an integer, None, a Status, or a list of these. Errors are raised."""


class ServerError(Exception):
    """An error reply: its first word is the code."""


class Status(bytes):
    """A status reply, such as OK."""


OK = Status(b"OK")


class Entry(NamedTuple):
    """What a key holds: text, or sorted pairs (score, member) or (field, text), or items; and its last ms."""

    kind: str
    value: Any
    expiry: int | None = None


Keys = frozenset[tuple[bytes, Entry]]
Handler = Callable[..., Reply]

COMMANDS: dict[bytes, tuple[Handler, bool, bool, int, float]] = {}
"""What each command does, whether it writes, whether a full server refuses it, its fewest and most words."""


def command(*, writes: bool = False, grows: bool = False) -> Callable[[Handler], Handler]:
    """Name a command after its method."""

    def known(handler: Handler) -> Handler:
        code = handler.__code__
        least, any_more = code.co_argcount - 1, code.co_flags & CO_VARARGS
        limits = least, math.inf if any_more else least
        COMMANDS[handler.__name__.strip("_").upper().encode()] = handler, writes or grows, grows, *limits
        return handler

    return known


class Server:
    """One database. `now`: its clock in microseconds; `is_full`: its memory is, so it lets nothing grow."""

    def __init__(self, keys: Iterable[tuple[bytes, Entry]] = (), now: int = 0) -> None:
        self.keys = dict(keys)
        self.now = now
        self.is_full = False
        self.has_written = False
        self.declared: frozenset[bytes] | None = None

    @property
    def state(self) -> Keys:
        """What it holds that has not expired."""
        return frozenset((name, entry) for name, entry in self.keys.items() if self._lives(entry))

    def run(self, verb: bytes = b"", *words: bytes) -> Reply:
        """A command's reply; in a script `declared` are the only keys that it may name.

        Raises:
            ServerError: The reply is an error.
        """
        known = COMMANDS.get(verb)
        if known is None:
            raise ServerError(f"ERR unknown command {verb!r}")
        handler, writes, grows, least, most = known
        if not least <= len(words) <= most:
            raise ServerError(f"ERR wrong number of arguments for {verb!r}")
        if writes:
            if grows and self.is_full and not (self.declared is not None and self.has_written):
                raise ServerError("OOM command not allowed when used memory > 'maxmemory'.")
            self.has_written = True
        return handler(self, *words)

    def _lives(self, entry: Entry) -> bool:
        return entry.expiry is None or self.now // MS <= entry.expiry

    def _entry(self, name: bytes, kind: str) -> Entry | None:
        """What a key holds; None if it is not there."""
        if self.declared is not None and name not in self.declared:
            raise ServerError(f"ERR Script attempted to access a non local key: {name!r} is not declared")
        entry = self.keys.get(name)
        if entry is None:
            return None
        if entry.expiry is not None and self.now // MS > entry.expiry:
            del self.keys[name]
            return None
        if kind and entry.kind != kind:
            raise ServerError("WRONGTYPE Operation against a key holding the wrong kind of value")
        return entry

    def _stored(self, name: bytes, kind: str, value: Any, before: Entry | None) -> None:
        """Store what has changed; a collection without items is no key."""
        if value:
            self.keys[name] = Entry(kind, value, before.expiry if before else None)
        elif before:
            del self.keys[name]

    @command()
    def _time(self) -> Reply:
        return [b"%d" % (self.now // 1_000_000), b"%d" % (self.now % 1_000_000)]

    @command()
    def _type(self, name: bytes) -> Reply:
        entry = self._entry(name, "")
        return Status(entry.kind.encode() if entry else b"none")

    @command()
    def _exists(self, name: bytes, *names: bytes) -> Reply:
        return sum(self._entry(each, "") is not None for each in (name, *names))

    @command(writes=True)
    def _del(self, name: bytes, *names: bytes) -> Reply:
        found = [each for each in dict.fromkeys((name, *names)) if self._entry(each, "")]
        for each in found:
            del self.keys[each]
        return len(found)

    @command()
    def _pttl(self, name: bytes) -> Reply:
        entry = self._entry(name, "")
        if entry is None or entry.expiry is None:
            return -2 if entry is None else -1
        return entry.expiry - self.now // MS

    @command()
    def _pexpiretime(self, name: bytes) -> Reply:
        entry = self._entry(name, "")
        return -2 if entry is None else -1 if entry.expiry is None else entry.expiry

    @command(writes=True)
    def _pexpire(self, name: bytes, ms: bytes) -> Reply:
        return self._expire_at(name, self._moment(ms, is_left=True))

    @command(writes=True)
    def _pexpireat(self, name: bytes, ms: bytes) -> Reply:
        return self._expire_at(name, self._moment(ms, is_left=False))

    @command(writes=True)
    def _persist(self, name: bytes) -> Reply:
        entry = self._entry(name, "")
        if entry is None or entry.expiry is None:
            return 0
        self.keys[name] = entry._replace(expiry=None)
        return 1

    def _moment(self, ms: bytes, *, is_left: bool) -> int:
        moment = _integer(ms) + (self.now // MS if is_left else 0)
        if moment >= 2**63:
            raise ServerError("ERR invalid expire time")
        return moment

    def _expire_at(self, name: bytes, expiry: int) -> Reply:
        entry = self._entry(name, "")
        if entry is None:
            return 0
        if expiry <= self.now // MS:
            del self.keys[name]
        else:
            self.keys[name] = entry._replace(expiry=expiry)
        return 1

    @command()
    def _get(self, name: bytes) -> Reply:
        entry = self._entry(name, "string")
        return entry.value if entry else None

    @command()
    def _mget(self, name: bytes, *names: bytes) -> Reply:
        found = [self._entry(each, "") for each in (name, *names)]
        return [entry.value if entry and entry.kind == "string" else None for entry in found]

    @command(grows=True)
    def _set(self, name: bytes, text: bytes, *options: bytes) -> Reply:
        before, expiry, is_new, lasting = self._entry(name, ""), None, False, b""
        while options:
            word = options[0].upper()
            if word in (b"PX", b"PXAT") and len(options) > 1 and lasting in (b"", word):
                lasting, ms, options = word, options[1], options[2:]
            elif word == b"KEEPTTL" and lasting in (b"", word):
                lasting, options = word, options[1:]
            elif word == b"NX":
                is_new, options = True, options[1:]
            else:
                raise ServerError("ERR syntax error")
        if lasting == b"KEEPTTL":
            expiry = before.expiry if before else None
        elif lasting:
            expiry = self._moment(ms, is_left=lasting == b"PX")
            if _integer(ms) <= 0:
                raise ServerError("ERR invalid expire time in 'set' command")
        if is_new and before:
            return None
        self.keys[name] = Entry("string", text, expiry)
        return OK

    @command(grows=True)
    def _setnx(self, name: bytes, text: bytes) -> Reply:
        return int(self._set(name, text, b"NX") is OK)

    @command(grows=True)
    def _getset(self, name: bytes, text: bytes) -> Reply:
        before = self._get(name)
        self.keys[name] = Entry("string", text)
        return before

    @command(grows=True)
    def _rpush(self, name: bytes, item: bytes, *items: bytes) -> Reply:
        before = self._entry(name, "list")
        value = (*(before.value if before else ()), item, *items)
        self._stored(name, "list", value, before)
        return len(value)

    @command()
    def _hget(self, name: bytes, field: bytes) -> Reply:
        return self._fields(name).get(field)

    @command()
    def _hgetall(self, name: bytes) -> Reply:
        # A hash has no order: this one is none that a script could have counted on.
        return [word for pair in sorted(self._fields(name).items(), reverse=True) for word in pair]

    @command()
    def _hkeys(self, name: bytes) -> Reply:
        return sorted(self._fields(name), reverse=True)

    @command(grows=True)
    def _hset(self, name: bytes, field: bytes, text: bytes, *more: bytes) -> Reply:
        if len(more) % 2:
            raise ServerError("ERR wrong number of arguments for 'hset' command")
        before = self._fields(name)
        after = {**before, field: text, **dict(zip(more[::2], more[1::2]))}
        self._stored(name, "hash", tuple(sorted(after.items())), self.keys.get(name))
        return len(after) - len(before)

    @command(grows=True)
    def _hsetnx(self, name: bytes, field: bytes, text: bytes) -> Reply:
        return 0 if field in self._fields(name) else self._hset(name, field, text)

    @command(writes=True)
    def _hdel(self, name: bytes, field: bytes, *fields: bytes) -> Reply:
        before = self._fields(name)
        after = {known: text for known, text in before.items() if known not in (field, *fields)}
        self._stored(name, "hash", tuple(sorted(after.items())), self.keys.get(name))
        return len(before) - len(after)

    def _fields(self, name: bytes) -> dict[bytes, bytes]:
        entry = self._entry(name, "hash")
        return dict(entry.value) if entry else {}

    @command(grows=True)
    def _zadd(self, name: bytes, score: bytes, member: bytes, *more: bytes) -> Reply:
        if len(more) % 2:
            raise ServerError("ERR syntax error")
        pairs = (score, member, *more)
        scores = [_score(text) for text in pairs[::2]]
        before = {known: at for at, known in self._places(name)}
        after = {**before, **dict(zip(pairs[1::2], scores))}
        self._stored(name, "zset", _sorted(after), self.keys.get(name))
        return len(after) - len(before)

    @command(writes=True)
    def _zrem(self, name: bytes, member: bytes, *members: bytes) -> Reply:
        gone = {member, *members}
        return self._zremoved(name, lambda place: place[1] not in gone)

    @command(writes=True)
    def _zremrangebyscore(self, name: bytes, low: bytes, high: bytes) -> Reply:
        within = _between(low, high)
        return self._zremoved(name, lambda place: not within(place[0]))

    def _zremoved(self, name: bytes, stays: Callable[[tuple[float, bytes]], bool]) -> Reply:
        before = self._places(name)
        after = tuple(place for place in before if stays(place))
        self._stored(name, "zset", after, self.keys.get(name))
        return len(before) - len(after)

    @command()
    def _zcard(self, name: bytes) -> Reply:
        return len(self._places(name))

    @command()
    def _zscore(self, name: bytes, member: bytes) -> Reply:
        return next((_text(at) for at, known in self._places(name) if known == member), None)

    @command()
    def _zrank(self, name: bytes, member: bytes) -> Reply:
        members = [known for _, known in self._places(name)]
        return members.index(member) if member in members else None

    @command()
    def _zcount(self, name: bytes, low: bytes, high: bytes) -> Reply:
        within = _between(low, high)
        return sum(within(at) for at, _ in self._places(name))

    @command()
    def _zrange(self, name: bytes, first: bytes, last: bytes, *options: bytes) -> Reply:
        return self._sliced(name, first, last, options, 1)

    @command()
    def _zrevrange(self, name: bytes, first: bytes, last: bytes, *options: bytes) -> Reply:
        return self._sliced(name, first, last, options, -1)

    def _sliced(self, name: bytes, first: bytes, last: bytes, options: tuple[bytes, ...], step: int) -> Reply:
        start, end, (has_scores, limit) = _integer(first), _integer(last), _range_options(options)
        if limit:
            raise ServerError("ERR syntax error, LIMIT is only supported by score")
        places = self._places(name)[::step]
        start = max(start + len(places), 0) if start < 0 else start
        end = end + len(places) if end < 0 else end
        return _listed(places[start : end + 1] if end >= start else (), has_scores)

    @command()
    def _zrangebyscore(self, name: bytes, low: bytes, high: bytes, *options: bytes) -> Reply:
        return self._scored(name, low, high, options, 1)

    @command()
    def _zrevrangebyscore(self, name: bytes, high: bytes, low: bytes, *options: bytes) -> Reply:
        return self._scored(name, low, high, options, -1)

    def _scored(self, name: bytes, low: bytes, high: bytes, options: tuple[bytes, ...], step: int) -> Reply:
        (has_scores, limit), within = _range_options(options), _between(low, high)
        places = [place for place in self._places(name)[::step] if within(place[0])]
        if limit:
            first, count = limit
            places = [] if first < 0 else places[first:] if count < 0 else places[first : first + count]
        return _listed(places, has_scores)

    def _places(self, name: bytes) -> tuple[tuple[float, bytes], ...]:
        entry = self._entry(name, "zset")
        return entry.value if entry else ()


def _sorted(scores: dict[bytes, float]) -> tuple[tuple[float, bytes], ...]:
    return tuple(sorted((at, member) for member, at in scores.items()))


def _integer(text: bytes) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 2**63
    if not -(2**63) <= number < 2**63 or b"%d" % number != text:
        raise ServerError("ERR value is not an integer or out of range")
    return number


def _score(text: bytes) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if math.isnan(number) or b"_" in text or text != text.strip() or (number == 0 and text[:1] == b"-"):
        raise ServerError("ERR value is not a valid float")  # of -0 Redis and Valkey make different scores
    return number


def _text(score: float) -> bytes:
    """A score as both servers say it."""
    text = b"%.17g" % score
    if b"e" in text or (not score.is_integer() and text != str(score).encode()):
        raise ServerError(f"ERR Redis and Valkey write {score} differently")
    return text


def _between(low: bytes, high: bytes) -> Callable[[float], bool]:
    try:
        least, most = (_score(bound.removeprefix(b"(")) for bound in (low, high))
    except ServerError:
        raise ServerError("ERR min or max is not a float") from None
    above, below = low[:1] == b"(", high[:1] == b"("
    return lambda at: (at > least if above else at >= least) and (at < most if below else at <= most)


def _range_options(options: tuple[bytes, ...]) -> tuple[bool, tuple[int, int] | None]:
    """Whether scores are wanted, and which part of what is found: from where, and how many."""
    has_scores, limit = False, None
    while options:
        word = options[0].upper()
        if word == b"LIMIT" and len(options) > 2:
            limit, options = (_integer(options[1]), _integer(options[2])), options[3:]
        elif word == b"WITHSCORES":
            has_scores, options = True, options[1:]
        else:
            raise ServerError("ERR syntax error")
    return has_scores, limit


def _listed(places: Sequence[tuple[float, bytes]], has_scores: bool) -> Reply:
    if not has_scores:
        return [member for _, member in places]
    return [word for at, member in places for word in (member, _text(at))]
