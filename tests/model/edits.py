"""The keys of one lock with one thing changed, for clauses that say what a script has changed."""

from __future__ import annotations

from tests.model.layout import LOCK, RECORD, laid_out, read_back
from tests.model.lock import Call
from tests.model.permits import at, highest_in, pace_of
from tests.model.store import MS, NOT_A_STRING, Calls, Line, Record, Store, seconds, up


def with_permit(
    store: Store, number: int, value: str | None, expiry: int | None, record: Record, lasts: int
) -> Store:
    """The keys with another value and record of a permit, and when each expires."""
    permit = at(store, number)._replace(value=value, expiry=expiry, record=record, record_expiry=lasts)
    return at(permit, number)


def kept(store: Store, number: int, record: Record, retention: int) -> Store:
    """A permit that somebody has: its value is the deadline's, and both keys last longer by the retention."""
    expiry = up(record.deadline, MS) + retention
    return with_permit(store, number, seconds(record.deadline), expiry, record, expiry)


def given_back(store: Store, number: int, record: Record, expiry: int) -> Store:
    """A permit that is nobody's: of whose it was the record alone says something, for a while."""
    return with_permit(store, number, None, None, record._replace(deadline=0), expiry)


def in_line(store: Store, task: str, place: int) -> Store:
    """The line with a task at this place."""
    places = [(since, other) for since, other in store.line.places if other != task]
    ordered = sorted([*places, (place, task)], key=lambda each: (each[0], each[1].encode()))
    return store._replace(line=store.line._replace(places=tuple(ordered)))


def out_of_line(store: Store, *tasks: str) -> Store:
    """The line without these tasks."""
    places = tuple(each for each in store.line.places if each[1] not in tasks)
    return store._replace(line=store.line._replace(places=places) if places else Line())


def with_call(store: Store, task: str, text: str) -> Store:
    """The calls with this text for a task."""
    fields = {**dict(store.calls.fields), task: text}
    ordered = tuple(sorted(fields.items(), key=lambda each: each[0].encode()))
    return store._replace(calls=store.calls._replace(fields=ordered))


def without_calls(store: Store, *tasks: str) -> Store:
    """The calls without those of these tasks."""
    fields = tuple(each for each in store.calls.fields if each[0] not in tasks)
    return store._replace(calls=store.calls._replace(fields=fields) if fields else Calls())


def line_lasts(store: Store, ms: int) -> Store:
    """The line lasts so long at least, if there is one."""
    line = store.line
    return store._replace(line=line._replace(lease=max(line.lease, ms))) if line.places else store


def permits_last(store: Store, ms: int) -> Store:
    """How many permits there are is known for so long at least, if it is known."""
    known = store.known
    return store._replace(known=known and known._replace(lease=max(known.lease, ms)))


def starts_last(store: Store, terms: str, now_ms: int) -> Store:
    """The starts are kept for another two periods, if they would not last for one."""
    starts, ms = store.starts, up(pace_of(terms)[1], MS)
    if not ms or not starts.times or (starts.expiry is not None and starts.expiry - now_ms >= ms):
        return store
    return store._replace(starts=starts._replace(expiry=now_ms + 2 * ms))


def before(call: Call) -> Store:
    """The keys as the call finds them."""
    return read_back(dict(laid_out(call.store, call.now // MS)), call.now // MS)


def number_of(call: Call) -> int:
    """Whose keys a script of one permit is told."""
    return int(call.keys[0].partition(b"#")[2] or 0)


def permits_in(call: Call) -> list[Store]:
    """The permits of which the call is told a key."""
    told = {int(name.partition(b"#")[2] or 0) for name in call.keys if name.startswith((LOCK, RECORD))}
    return [at(call.store, number) for number in sorted(told)]


def highest_used(call: Call, after: Store) -> int:
    """The last permit with a value, from 1. A list counts if it is noted: not each is looked at."""
    values = dict(enumerate((permit.value for permit in permits_in(call)), 1))
    noted = highest_in(after)[0]
    lists = {noted} if values.get(noted) == NOT_A_STRING else set()
    return max({n for n, value in values.items() if value not in (None, NOT_A_STRING)} | lists, default=1)
