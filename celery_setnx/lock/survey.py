"""What locks, marks and lines there are: found by SCAN, read many at a time, and dropped by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any, Literal

import redis

from celery_setnx.lock.line import IN_LINE
from celery_setnx.lock.names import line_names, mark_name, record_name, scope_and_digest
from celery_setnx.lock.process import fate_of
from celery_setnx.lock.record import Holder, Waiter, parse_holder
from celery_setnx.lock.scripts import Script, is_cluster

BATCH = 1000
"""Locks that are read in one round trip, and names that one SCAN looks at."""

COMMANDS = ("SCAN", "TIME", "GET", "MGET", "TYPE", "PTTL", "ZCOUNT", "ZRANGEBYSCORE")
"""What a user who looks at locks must be allowed to do."""

NOT_TEXT = "(not a string)"
"""Stands for a lock's value that is no string: a foreign program's list, hash, or the like."""

_GLOB = re.compile(r"([\\*?\[\]^-])")
_DROP = Script("drop")


@dataclass(frozen=True)
class Sighting:
    """What was seen of one lock, at one moment.

    Attributes:
        key: The lock's Redis key.
        scope: The name the key lives under: the task's, unless tasks share one.
        digest: The digest of the call's key; empty for the lock of a whole task.
        server_time: The server's clock (Unix seconds), just before it was read; on a cluster, that of the
            server whose clock is behind the others'.
        holder: Who has the lock, or had it until its deadline: see `is_stale`. None if it is free.
        mark: Id of the task that is queued with this key; None if none is.
        mark_ends_s: Seconds until the mark lapses; None if there is none.
        waiting: How many tasks wait in line.
        raw: The lock's value and its record as Redis has them, for `drop`.
    """

    key: str
    scope: str
    digest: str
    server_time: float
    holder: Holder | None = None
    mark: str | None = None
    mark_ends_s: float | None = None
    waiting: int = 0
    raw: tuple[bytes | None, bytes | None] = field(default=(None, None), repr=False)

    @property
    def task(self) -> str:
        """The task that the record names; the scope, where none does."""
        return str((self.holder and self.holder.info.get("task")) or self.scope)

    @property
    def remaining_s(self) -> float | None:
        """Seconds until the holder's deadline, negative once it has passed; None if there is none."""
        deadline = self.holder.deadline if self.holder else None
        return None if deadline is None else deadline - self.server_time

    @property
    def age_s(self) -> float | None:
        """Seconds since the holder acquired the lock; None if that is not known."""
        since = self.holder.since if self.holder else None
        return None if since is None else max(0.0, self.server_time - since)

    @property
    def is_stale(self) -> bool:
        """True if the deadline has passed and the lock is still there: the next call takes it over."""
        remaining_s = self.remaining_s
        return remaining_s is not None and remaining_s <= 0

    @cached_property
    def process(self) -> Literal["alive", "dead", "unknown"] | None:
        """What is known from here of the process that runs under the lock; None if nobody does."""
        return fate_of(self.holder.info) if self.holder and self.holder.state == "running" else None

    @property
    def is_abandoned(self) -> bool:
        """True if its holder will not come back: it is stale, or who runs under it is surely dead."""
        return self.is_stale or self.process == "dead"


def survey(client: Any, prefix: str) -> Iterator[Sighting]:
    """Every lock, mark and line under a prefix, by key.

    The names are collected first, so one that comes meanwhile may be missing, and one that goes is left out.
    What a release leaves behind for a minute is no lock. Locks that the user has named (`SetnxLock`) are
    elsewhere.
    """
    has_line = _keys(client, prefix)
    keys = iter(sorted(has_line))
    while batch := list(islice(keys, BATCH)):
        for sighting in _look(client, batch, [key for key in batch if has_line[key]]):
            if sighting.holder is not None or sighting.mark is not None or sighting.waiting:
                yield sighting


def look(client: Any, key: str) -> Sighting:
    """What there is of one lock now; a free one has no holder."""
    return _look(client, [key], [key])[0]


def waiters(client: Any, key: str, server_time: float) -> list[Waiter]:
    """Who waits in line for a lock, the first hundred."""
    line = client.zrangebyscore(line_names(key)[0], *IN_LINE, start=0, num=100, withscores=True)
    places = enumerate(((_text(task_id), since_us / 1e6) for task_id, since_us in line), 1)
    return [
        Waiter(task_id, place, since_s, max(0.0, server_time - since_s))
        for place, (task_id, since_s) in places
    ]


def last_holder(sighting: Sighting) -> Holder | None:
    """Who had a lock that is free now: known for a minute after a release, and if somebody has deleted the
    lock itself, for as long as its record lasts.
    """
    value, record = (_text(item) for item in sighting.raw)
    if value is not None or record is None:
        return None
    deadline_us = record.split("\n")[1] if record.count("\n") >= 5 else ""
    if not deadline_us.isdecimal():
        return None
    return _holder(str(-(-int(deadline_us) // 1_000_000)), record, sighting.server_time)


def drop(client: redis.Redis, sighting: Sighting) -> bool:
    """Delete a lock and its record, whoever holds it, if they are still what was seen."""
    value, record = sighting.raw
    if value is None:
        return False
    (word,) = _DROP(client, (sighting.key, record_name(sighting.key)), value, record or b"")
    return bool(word == "dropped")


def _keys(client: Any, prefix: str) -> dict[str, bool]:
    """The keys that have a lock, a mark or a line, and whether it is a line. SCAN may name one twice."""
    has_line: dict[str, bool] = {}
    pattern = _GLOB.sub(r"\\\1", prefix) + ":{*"
    for name in client.scan_iter(match=pattern, count=BATCH):
        base, brace, what = _text(name).rpartition("}")
        if brace and what in ("", ":queued"):
            has_line.setdefault(base + brace, False)
        elif brace and what == ":line":
            has_line[base + brace] = True
    return has_line


def _look(client: Any, keys: Sequence[str], lines: Sequence[str]) -> list[Sighting]:
    """What there is of each lock, in two round trips: the second for what few locks have."""
    server_time, found = _read(client, [(key, record_name(key), mark_name(key)) for key in keys])
    unread = [key for key, (value, _, _) in zip(keys, found) if value is None]
    marked = [key for key, (_, _, mark) in zip(keys, found) if mark is not None]
    asked: list[tuple[str, ...]] = [("TYPE", key) for key in unread]
    asked += [("PTTL", mark_name(key)) for key in marked]
    asked += [("ZCOUNT", line_names(key)[0], *IN_LINE) for key in lines]
    answers = iter(_ask(client, asked))
    foreign = {key for key, kind in zip(unread, answers) if _text(kind) not in ("none", "string")}
    mark_ends_s = {key: max(0, _int(ttl_ms)) / 1000 for key, ttl_ms in zip(marked, answers)}
    waiting = {key: _int(count) for key, count in zip(lines, answers)}
    sightings = []
    for key, (value, record, mark) in zip(keys, found):
        sightings.append(
            Sighting(
                key,
                *scope_and_digest(key),
                server_time,
                _holder(NOT_TEXT if key in foreign else _text(value), _text(record), server_time),
                _text(mark),
                mark_ends_s.get(key),
                waiting.get(key, 0),
                (value, record),
            )
        )
    return sightings


def _read(client: Any, names: list[tuple[str, str, str]]) -> tuple[float, list[Any]]:
    """The server's clock, and then lock, record and mark of each lock.

    The clock comes first, so that no lock counts as stale whose holder has renewed it meanwhile.
    """
    if is_cluster(client):
        clocks = client.time(target_nodes="primaries")
        found = [_checked(reply) for reply in _ask(client, [("MGET", *triple) for triple in names])]
        return min(map(_seconds, clocks.values())), found
    flat = [name for triple in names for name in triple]
    clock, values = map(_checked, _ask(client, [("TIME",), ("MGET", *flat)]))
    return _seconds(clock), list(zip(values[::3], values[1::3], values[2::3]))


def _ask(client: Any, commands: Sequence[tuple[str, ...]]) -> list[Any]:
    """The replies to many commands, errors among them, in one round trip per server."""
    with client.pipeline(transaction=False) as pipe:
        for command in commands:
            pipe.execute_command(*command)
        return list(pipe.execute(raise_on_error=False))


def _checked(reply: Any) -> Any:
    if isinstance(reply, Exception):
        raise reply
    return reply


def _holder(value: str | None, record: str | None, server_time: float) -> Holder | None:
    now_us = round(server_time * 1e6)
    try:
        return parse_holder(record, value, now_us)
    except ValueError:  # another program's words, where a record would be
        return parse_holder(None, value, now_us)


def _seconds(clock: tuple[int, int]) -> float:
    return clock[0] + clock[1] / 1e6


def _int(reply: Any) -> int:
    return reply if isinstance(reply, int) else 0  # an error: the key is not of our kind


def _text(item: Any) -> Any:
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else item
