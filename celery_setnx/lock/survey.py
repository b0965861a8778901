"""What locks, marks, lines and successes there are, found by SCAN and read many at a time; drops by hand."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import islice
from typing import Any, Literal, NamedTuple

import redis

from celery_setnx.lock.line import IN_LINE
from celery_setnx.lock.names import (
    done_name,
    line_names,
    mark_name,
    other_permits,
    permit_names,
    permits_name,
    record_name,
    scope_and_digest,
    starts_name,
)
from celery_setnx.lock.process import fate_of
from celery_setnx.lock.record import PLAIN, US, Holder, Terms, Waiter, parse_holder, parse_permits, task_of
from celery_setnx.lock.scripts import is_cluster, reply_of_each, reply_to
from celery_setnx.lock.verbs import IfSame, if_same

BATCH = 1000
"""Locks that are read in one round trip, and names that one SCAN looks at."""

COMMANDS = ("SCAN", "TIME", "GET", "MGET", "TYPE", "PTTL", "ZCOUNT", "ZRANGEBYSCORE")
"""What a user who looks at locks must be allowed to do."""

BEAT = "celery.beat:"
"""What the scope of a beat's lead begins with: a lock that is held for as long as the beat lives."""

NOT_TEXT = "(not a string)"
"""Stands for a lock's value that is no string: a foreign program's list, hash, or the like."""

_GLOB = re.compile(r"([\\*?\[\]^-])")
_PERMIT = re.compile(r"#([1-9]\d?)")
_SLACK_S = 1.0  # by which a cluster's clocks may differ: a start that seems to come later than now counts
_HANDED_S = 1.0  # in which a call is expected to start that was handed a permit


@dataclass(frozen=True)
class Sighting:
    """What was seen of one lock, at one moment.

    Attributes:
        key: The lock's Redis key.
        scope: The name the key lives under: the task's, unless tasks share one.
        digest: The digest of the call's key; empty for the lock of a whole task.
        server_time: The server's clock (Unix seconds), just before it was read; on a cluster, that of the
            server whose clock is behind the others'.
        holder: Who has the lock, or had it until its deadline: see `is_stale`. None if it is free. Of several
            who needs a look first: one that will not come back, one whose lock never ends, or else the one
            that has held for longest.
        mark: Id of the task that is queued with this key; None if none is.
        mark_ends_s: Seconds until the mark lapses; None if there is none.
        waiting: How many tasks wait in line.
        raw: Value and record as Redis has them, for `drop`; then those of each further permit, by number.
        terms: On which terms newcomers have it; one at a time, as often as you like, if no client that knows
            of others has used it lately.
        of_several: Who has the permits of a lock that has more than one, by number.
        starts: When calls have started (Unix seconds), if they are paced, the first one first: all that
            count, and perhaps older ones.
    """

    key: str
    scope: str
    digest: str
    server_time: float
    holder: Holder | None = None
    mark: str | None = None
    mark_ends_s: float | None = None
    waiting: int = 0
    raw: tuple[bytes | None, ...] = field(default=(None, None), repr=False)
    terms: Terms = PLAIN
    of_several: tuple[Holder, ...] = ()
    starts: tuple[float, ...] = ()

    @property
    def limit(self) -> int:
        """How many permits there are for newcomers."""
        return self.terms.limit

    @property
    def holders(self) -> tuple[Holder, ...]:
        """Who has its permits, or had them until their deadlines, by number."""
        return self.of_several or ((self.holder,) if self.holder else ())

    @property
    def has_several(self) -> bool:
        """True if it has more than one permit, or had until its limit was lowered."""
        return self.limit > 1 or len(self.raw) > 2

    @property
    def name(self) -> str:
        """What its holder has: the lock by its key, or one of several permits, as `KEY#3`."""
        return f"{self.key}#{self.holder.permit}" if self.holder and self.has_several else self.key

    @property
    def task(self) -> str:
        """The task that the record names; the scope, where none does."""
        return str((self.holder and self.holder.task) or self.scope)

    @property
    def about(self) -> str:
        """What the key was made of, as the record says it; empty where none does."""
        said = (holder.about for holder in (self.holder, *self.holders) if holder)
        return next(filter(None, said), "")

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
        """True if a deadline has passed and the lock is still there: the next call takes it over."""
        remaining_s = self.remaining_s
        return remaining_s is not None and remaining_s <= 0

    @cached_property
    def process(self) -> Literal["alive", "dead", "unknown"] | None:
        """What is known from here of the process that runs under the lock; None if nobody does."""
        return fate_of(self.holder.info) if self.holder and self.holder.state == "running" else None

    @property
    def is_abandoned(self) -> bool:
        """True if a holder will not come back: it is stale, or who runs under it is surely dead."""
        return self.is_stale or self.process == "dead"

    def count_held(self) -> int:
        """How many hold it who keep others out: those whose deadlines have not passed."""
        if not self.of_several:
            return 0 if self.holder is None or self.is_stale else 1
        return sum(not one.is_stale for one in self.of_each())

    def of_each(self) -> Iterator[Sighting]:
        """The same lock as each of its holders has it."""
        for holder in self.holders:
            yield replace(self, holder=holder, of_several=(holder,))

    def under(self, terms: Terms) -> Sighting:
        """What a call finds that has the lock on these terms: permits beyond their limit are none of its."""
        holders = tuple(holder for holder in self.holders if holder.permit < terms.limit)
        first = _first_to_look_at(holders, self.server_time)
        return replace(self, terms=terms, holder=first, of_several=holders)

    @property
    def started(self) -> int:
        """How many starts count now, those among them that are about to come: a permit is handed to them."""
        since = self.server_time - self.terms.period_s
        return sum(at > since for at in self._past_starts()) + self._count_handed()

    @property
    def next_start(self) -> float | None:
        """When the next call may start (server time); None if its pace allows it now, or it has none."""
        starts, now = self.terms.starts, self.server_time
        if not starts:
            return None
        left = starts - self._count_handed()
        last = self._past_starts()[-max(left, 1) :]
        at = last[0] + self.terms.period_s if len(last) == max(left, 1) else 0.0
        if left < 1:
            at = max(at, now + min(self.terms.period_s, _HANDED_S))
        return at if at > now else None

    @property
    def is_lock(self) -> bool:
        """True if somebody has it or waits for it, or its pace allows no start; else it is at most marked."""
        return self.holder is not None or self.waiting > 0 or self.is_paced

    @property
    def is_paced(self) -> bool:
        """True if a permit is free, and no call may start."""
        return self.count_held() < self.limit and self.next_start is not None

    def _past_starts(self) -> Sequence[float]:
        """The starts that scripts count: where the clock was set back, some are later than now."""
        latest = self.server_time + _SLACK_S
        return [at for at in self.starts if at <= latest] if self.terms.starts else ()

    def _count_handed(self) -> int:
        """How many calls are about to start, as a permit is kept for them."""
        each = ((one.holder, one.is_stale) for one in self.of_each())
        return sum(holder is not None and holder.state == "handed" and not stale for holder, stale in each)


@dataclass(frozen=True)
class Success:
    """A call that has succeeded, and counts for its `dedupe_for`: its like are duplicates.

    Attributes:
        key: The lock's Redis key.
        scope: The name the key lives under: the task's, unless tasks share one.
        token: That of the run that has succeeded.
        counts_for_s: Seconds for which it counts still.
    """

    key: str
    scope: str
    token: str
    counts_for_s: float

    @property
    def task_id(self) -> str:
        """Id of the task that has succeeded."""
        return task_of(self.token) or self.token


def survey(client: Any, prefix: str) -> Iterator[Sighting]:
    """Every lock, mark and line under a prefix, and every key whose starts are noted, by key.

    The names are collected first, so one that comes meanwhile may be missing, and one that goes is left out.
    What a release leaves behind for a minute is no lock. Locks that the user has named (`SetnxLock`) are
    elsewhere.
    """
    named = _names(client, prefix)
    keys = iter(sorted(named.has_line))
    while batch := list(islice(keys, BATCH)):
        lines = [key for key in batch if named.has_line[key]]
        permits = {key: named.permits[key] for key in batch if key in named.permits} if named.permits else {}
        paced = [key for key in batch if key in named.paced] if named.paced else []
        for sighting in _look(client, batch, lines, permits, paced):
            is_there = sighting.holder is not None or sighting.mark is not None
            if is_there or sighting.waiting or sighting.starts:
                yield sighting


def look(client: Any, key: str) -> Sighting:
    """What there is of one lock now; a free one has no holder."""
    return _look(client, [key], [key], {key: None}, [key])[0]


def successes(client: Any, prefix: str) -> Iterator[Success]:
    """Every call under a prefix whose success counts, by key; as `survey` finds locks."""
    pattern = f"{_escaped(prefix)}:{{*}}:done"
    names = {_text(name) for name in client.scan_iter(match=pattern, count=BATCH)}
    keys = iter(sorted(name.removesuffix(":done") for name in names))
    while batch := list(islice(keys, BATCH)):
        yield from _successes(client, batch)


def success_of(client: Any, key: str) -> Success | None:
    """The call of a key whose success counts; None if none does."""
    return next(_successes(client, [key]), None)


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
    lock itself, for as long as its record lasts. Of several who acquired it last.
    """
    if sighting.holders:
        return None
    found = [_last_of(_text(record), sighting.server_time) for record in sighting.raw[1::2]]
    return max(filter(None, found), key=lambda holder: holder.since or 0.0, default=None)


def drop(client: redis.Redis, sighting: Sighting) -> bool:
    """Delete the lock of the holder that was seen, and its record, if they are still what was seen."""
    permit = sighting.holder.permit if sighting.holder else 0
    value, record = sighting.raw[2 * permit : 2 * permit + 2]
    if value is None:
        return False
    (is_dropped,) = if_same(client, [IfSame(permit_names(sighting.key, permit), (value, record or b""))])
    if not isinstance(is_dropped, bool):
        raise is_dropped
    return is_dropped


def forget_starts(client: redis.Redis, sighting: Sighting) -> int:
    """Forget the starts that were seen, so that they count no more: how many. Later ones count."""
    if not sighting.starts:
        return 0
    last_us = str(round(sighting.starts[-1] * US))
    return int(reply_to(client, "ZREMRANGEBYSCORE", starts_name(sighting.key), "-inf", last_us))


class _Names(NamedTuple):
    """What SCAN has named.

    Attributes:
        has_line: The keys that have a lock, a mark or a line, and whether it is a line.
        permits: The keys that have, or had, more than one permit, or a pace; and the numbers of those permits
            that are there.
        paced: The keys whose starts are noted.
    """

    has_line: dict[str, bool]
    permits: dict[str, set[int]]
    paced: set[str]


def _names(client: Any, prefix: str) -> _Names:
    """What there is under a prefix, by name. SCAN may name one twice."""
    has_line: dict[str, bool] = {}
    permits: dict[str, set[int]] = {}
    paced: set[str] = set()
    pattern = f"{_escaped(prefix)}:{{*"
    for name in client.scan_iter(match=pattern, count=BATCH):
        base, brace, what = _text(name).rpartition("}")
        if brace and what in ("", ":queued"):
            has_line.setdefault(base + brace, False)
        elif brace and what == ":line":
            has_line[base + brace] = True
        elif brace and what == ":permits":
            permits.setdefault(base + brace, set())
        elif brace and what == ":starts":
            has_line.setdefault(base + brace, False)
            paced.add(base + brace)
        elif what[:1] == "#" and (permit := _PERMIT.fullmatch(what)):
            has_line.setdefault(base + brace, False)
            permits.setdefault(base + brace, set()).add(int(permit[1]))
    return _Names(has_line, permits, paced)


def _successes(client: Any, keys: Sequence[str]) -> Iterator[Success]:
    """The successes that count, of these keys."""
    names = [done_name(key) for key in keys]
    answers = _ask(client, [(verb, name) for name in names for verb in ("MGET", "PTTL")])
    for key, values, ttl_ms in zip(keys, answers[::2], answers[1::2]):
        (token,) = _checked(values)
        if token is not None:
            yield Success(key, scope_and_digest(key)[0], _text(token), max(0, _int(ttl_ms)) / 1000)


class _Beside(NamedTuple):
    """What the second look has found of those locks that have it, by key; and what is no string, by name."""

    foreign: set[str]
    mark_ends_s: dict[str, float]
    waiting: dict[str, int]
    starts: dict[str, tuple[float, ...]]
    raws: dict[str, tuple[bytes | None, ...]]


def _look(
    client: Any,
    keys: Sequence[str],
    lines: Sequence[str],
    permits: Mapping[str, set[int] | None],
    paced: Sequence[str],
) -> list[Sighting]:
    """What there is of each lock, in two round trips: the second for what few locks have.

    `permits`: the locks that may have several, and the numbers of those that are there, if that is known;
    `paced`: those that may have starts.
    """
    server_time, found, texts = _read(client, keys, list(permits))
    in_use = {key: _permits_of(texts[key], there) for key, there in permits.items()}
    several = {key: count for key, (count, _) in in_use.items() if count > 1}
    marked = [key for key, (_, _, mark) in zip(keys, found) if mark is not None]
    unread = [key for key, (value, _, _) in zip(keys, found) if value is None]
    beside = _look_beside(client, unread, marked, lines, paced, several)
    foreign = beside.foreign | _foreign_permits(client, beside.raws, permits)
    sightings = []
    for key, (value, record, mark) in zip(keys, found):
        raw: tuple[bytes | None, ...] = (value, record)
        holders: tuple[Holder, ...] = ()
        if key not in several:
            holder = _holder(NOT_TEXT if key in foreign else _text(value), _text(record), server_time)
        else:
            raw = beside.raws[key]
            holders = _holders(key, raw, foreign, server_time)
            holder = _first_to_look_at(holders, server_time)
        scope, digest = scope_and_digest(key)
        queued = (_text(mark), beside.mark_ends_s.get(key), beside.waiting.get(key, 0))
        seen = Sighting(key, scope, digest, server_time, holder, *queued, raw, of_several=holders)
        if key in in_use or key in beside.starts:
            terms = in_use[key][1] if key in in_use else PLAIN
            seen = replace(seen, terms=terms, starts=beside.starts.get(key, ()))
        sightings.append(seen)
    return sightings


def _look_beside(
    client: Any,
    unread: Sequence[str],
    marked: Sequence[str],
    lines: Sequence[str],
    paced: Sequence[str],
    several: Mapping[str, int],
) -> _Beside:
    """What there is beside the locks that may have it; `several`: how many permits those may have."""
    asked: list[tuple[str, ...]] = [("TYPE", key) for key in unread]
    asked += [("PTTL", mark_name(key)) for key in marked]
    asked += [("ZCOUNT", line_names(key)[0], *IN_LINE) for key in lines]
    asked += [("ZRANGEBYSCORE", starts_name(key), "-inf", "+inf", "WITHSCORES") for key in paced]
    asked += [("MGET", *_names_of(key, count)) for key, count in several.items()]
    answers = iter(_ask(client, asked))
    return _Beside(
        {key for key, kind in zip(unread, answers) if _text(kind) not in ("none", "string")},
        {key: max(0, _int(ttl_ms)) / 1000 for key, ttl_ms in zip(marked, answers)},
        {key: _int(count) for key, count in zip(lines, answers)},
        {key: _times(found) for key, found in zip(paced, answers)},
        {key: tuple(_checked(values)) for key, values in zip(several, answers)},
    )


def _read(
    client: Any, keys: Sequence[str], several: Sequence[str]
) -> tuple[float, list[Any], dict[str, str | None]]:
    """The server's clock, and then lock, record and mark of each lock, and of some what permits they have.

    The clock comes first, so that no lock counts as stale whose holder has renewed it meanwhile.
    """
    names = [(key, record_name(key), mark_name(key)) for key in keys]
    if is_cluster(client):
        clocks = reply_of_each(client, "TIME")
        asked = [("MGET", *triple) for triple in names] + [("MGET", permits_name(key)) for key in several]
        replies = [_checked(reply) for reply in _ask(client, asked)]
        found, texts = replies[: len(names)], [text for (text,) in replies[len(names) :]]
        return min(map(_seconds, clocks)), found, dict(zip(several, map(_text, texts)))
    flat = [name for triple in names for name in triple]
    clock, values = map(_checked, _ask(client, [("TIME",), ("MGET", *flat, *map(permits_name, several))]))
    texts = values[len(flat) :]
    values = values[: len(flat)]
    found = list(zip(values[::3], values[1::3], values[2::3]))
    return _seconds(clock), found, dict(zip(several, map(_text, texts)))


def _permits_of(text: str | None, there: set[int] | None) -> tuple[int, Terms]:
    """How many permits of a lock may be there, and the terms for newcomers."""
    highest, terms = parse_permits(text)
    return max(highest, terms.limit, 1 + max(there or (), default=0)), terms


def _names_of(key: str, count: int) -> tuple[str, ...]:
    """The names of so many permits of a lock, and of their records."""
    return (*permit_names(key, 0), *other_permits(key, count))


def _foreign_permits(
    client: Any, raws: Mapping[str, Any], permits: Mapping[str, set[int] | None]
) -> set[str]:
    """The names of permits that are there, though they could not be read: they are no strings."""
    unread = []
    for key, raw in raws.items():
        there = permits[key]
        for number in range(1, len(raw) // 2) if there is None else there:
            if raw[2 * number] is None:
                unread.append(permit_names(key, number)[0])
    kinds = _ask(client, [("TYPE", name) for name in unread]) if unread else []
    return {name for name, kind in zip(unread, kinds) if _text(kind) not in ("none", "string")}


def _holders(key: str, raw: Sequence[Any], foreign: set[str], server_time: float) -> tuple[Holder, ...]:
    """Who has the permits of a lock that has several, by number."""
    found = []
    for number, (value, record) in enumerate(zip(raw[::2], raw[1::2])):
        is_foreign = bool(foreign) and permit_names(key, number)[0] in foreign
        holder = _holder(NOT_TEXT if is_foreign else _text(value), _text(record), server_time)
        if holder is not None:
            found.append(replace(holder, permit=number))
    return tuple(found)


def _last_of(record: str | None, server_time: float) -> Holder | None:
    """Whose a record is, though the lock beside it is gone."""
    deadline_us = record.split("\n")[1] if record is not None and record.count("\n") >= 5 else ""
    if not deadline_us.isdecimal():
        return None
    return _holder(str(-(-int(deadline_us) // 1_000_000)), record, server_time)


def _first_to_look_at(holders: Sequence[Holder], server_time: float) -> Holder | None:
    """Which of a lock's holders needs a look first."""

    def order(holder: Holder) -> tuple[int, float]:
        ended = holder.deadline is not None and holder.deadline <= server_time
        died = holder.state == "running" and fate_of(holder.info) == "dead"
        return 0 if ended else 1 if died else 2 if holder.deadline is None else 3, holder.since or 0.0

    return min(holders, key=order, default=None)


def _escaped(prefix: str) -> str:
    """A prefix that SCAN takes as it stands."""
    return _GLOB.sub(r"\\\1", prefix)


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


def _times(reply: Any) -> tuple[float, ...]:
    """The times in a sorted set; none of an error: the key is not of our kind."""
    if not isinstance(reply, list):
        return ()
    pairs = reply if reply and isinstance(reply[0], (list, tuple)) else zip(reply[::2], reply[1::2])
    return tuple(float(at_us) / US for _, at_us in pairs)


def _text(item: Any) -> Any:
    return item.decode("utf-8", "replace") if isinstance(item, bytes) else item
