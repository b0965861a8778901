"""Where the keys of a `Store` lie in Redis: laid out for a script, and read back after it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

from tests.model.permits import trimmed
from tests.model.store import (
    NOT_A_STRING,
    Calls,
    Known,
    Line,
    Mark,
    Permit,
    Record,
    Starts,
    Store,
    Ticket,
)
from tests.simulation.server import Entry

LOCK, RECORD, LINE, CALLS, MARK = b"lock", b"holder", b"line", b"calls", b"queued"
PERMITS, STARTS, DONE, NEWEST, TERMS = b"permits", b"starts", b"done", b"newest", b"terms"
SCOPES = b"prefix:terms"
_RECORD = re.compile(r"([^\n]*)\n(\d{1,17})\n(\d{1,17})\n([a-z_]+)\n(\d+)\n(.*)", re.DOTALL)


def pair(number: int) -> tuple[bytes, bytes]:
    """The lock and the record of a permit."""
    return (b"lock#%d" % number, b"holder#%d" % number) if number else (LOCK, RECORD)


def others(count: int) -> tuple[bytes, ...]:
    """The locks and records of the permits beside the first, if there are so many."""
    return tuple(name for number in range(1, count) for name in pair(number))


def ticket_name(task: str) -> bytes:
    """The ticket of a task."""
    return b"ticket:" + task.encode()


@lru_cache(200_000)
def laid_out(store: Store, now_ms: int) -> tuple[tuple[bytes, Entry], ...]:
    """The keys as a server has them; how long those last that no test outlives is counted from now."""
    return tuple(_entries(store, now_ms))


def _entries(store: Store, now_ms: int) -> Iterator[tuple[bytes, Entry]]:
    for number, permit in enumerate((Permit(*store[:4]), *store.others)):
        lock, record = pair(number)
        if permit.value is not None:
            yield lock, _text(permit.value, permit.expiry)
        if permit.record is not None:
            yield record, _text(str(permit.record), permit.record_expiry)
    for name, mark in ((MARK, store.mark), (DONE, store.done), (NEWEST, store.newest), (TERMS, store.terms)):
        if mark is not None:
            yield name, _text(mark.task_id, mark.expiry)
    if store.line.places:
        places = tuple((float(since), task.encode()) for since, task in store.line.places)
        yield LINE, Entry("zset", places, _lasting(store.line.lease, now_ms))
    for name, texts in ((CALLS, store.calls), (SCOPES, store.scopes)):
        if texts.fields:
            fields = tuple((field.encode(), text.encode()) for field, text in texts.fields)
            yield name, Entry("hash", fields, _lasting(texts.lease, now_ms))
    for task, ticket in store.tickets:
        yield ticket_name(task), _text(ticket.text, now_ms + ticket.lease)
    if store.known is not None:
        yield PERMITS, _text(store.known.text, now_ms + store.known.lease)
    if store.starts.times:
        starts = tuple((float(at), b"%d#%d#%d" % (at, *rest)) for at, *rest in store.starts.times)
        yield STARTS, Entry("zset", starts, store.starts.expiry)


def _text(text: str, expiry: int | None) -> Entry:
    return Entry("list", (b"x",), expiry) if text == NOT_A_STRING else Entry("string", text.encode(), expiry)


def _lasting(lease: int, now_ms: int) -> int | None:
    return None if lease < 0 else now_ms + lease


def read_back(keys: Mapping[bytes, Entry], now_ms: int) -> Store:
    """What a script has left; each key is one that a Store has."""
    rest = dict(keys)
    for name in [name for name, entry in rest.items() if entry.expiry is not None and entry.expiry < now_ms]:
        del rest[name]  # nobody has asked for it since it expired
    first, *others = [_permit(rest, number) for number in range(_highest(rest) + 1)]
    mark, done, newest, terms = (_mark(rest.pop(name, None)) for name in (MARK, DONE, NEWEST, TERMS))
    line, starts = Line(), Starts()
    if entry := rest.pop(LINE, None):
        line = Line(tuple((int(at), task.decode()) for at, task in entry.value), _lease(entry, now_ms))
    calls, scopes = (_texts(rest.pop(name, None), now_ms) for name in (CALLS, SCOPES))
    if entry := rest.pop(STARTS, None):
        times = [tuple(map(int, start.split(b"#"))) for _, start in entry.value]
        starts = Starts(tuple((at, number, fence) for at, number, fence in times), entry.expiry)
    known = None
    if entry := rest.pop(PERMITS, None):
        known = Known(entry.value.decode(), _lease(entry, now_ms))
    tickets = []
    for name in sorted(rest):
        assert name.startswith(b"ticket:"), name
        entry = rest[name]
        tickets.append((name[7:].decode(), Ticket(entry.value.decode(), _lease(entry, now_ms))))
    about = mark, line, calls, tuple(tickets), trimmed(others), known, done, starts, newest, terms, scopes
    return Store(*first, *about)


def _highest(keys: Mapping[bytes, Entry]) -> int:
    return max((int(name.rpartition(b"#")[2]) for name in keys if b"#" in name), default=0)


def _permit(keys: dict[bytes, Entry], number: int) -> Permit:
    value, record = (keys.pop(name, None) for name in pair(number))
    return Permit(
        _said(value),
        value and value.expiry,
        record and _record(_said(record) or ""),
        record and record.expiry,
    )


def _mark(entry: Entry | None) -> Mark | None:
    return None if entry is None else Mark(_said(entry) or "", entry.expiry)


def _texts(entry: Entry | None, now_ms: int) -> Calls:
    if entry is None:
        return Calls()
    fields = tuple((field.decode(), text.decode()) for field, text in entry.value)
    return Calls(fields, _lease(entry, now_ms))


def _said(entry: Entry | None) -> str | None:
    if entry is None:
        return None
    return entry.value.decode() if entry.kind == "string" else NOT_A_STRING


@lru_cache(100_000)
def _record(text: str) -> Record | str:
    match = _RECORD.fullmatch(text)
    if match is None:
        return text
    token, deadline, fence, state, since, info = match.groups()
    return Record(token, int(deadline), int(fence), state, int(since), info)


def _lease(entry: Entry, now_ms: int) -> int:
    return -1 if entry.expiry is None else entry.expiry - now_ms
