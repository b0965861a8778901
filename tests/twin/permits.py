"""Several permits, and their terms: which of them a verb is about. From there on it is as for one lock."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.model.permits import pace_of, permits_of
from tests.model.store import (
    MS,
    NOT_A_STRING,
    NUMBER,
    SECOND,
    Known,
    Permit,
    Record,
    Store,
    seconds,
    up,
)

FOREVER = 10**17
KNOWN_MS = 60_000  # for which it is known at least

Fits = Callable[[Record, bool], int | None]
"""How well a permit fits a caller, by its record and whether that is unexpired: 1 the best, 4 a free one."""


class Choice(NamedTuple):
    """The permit that a verb is about; how many others are free; how many are in use; when another ends; the
    one that is held for longest; and how many are handed to calls that have yet to come.
    """

    number: int
    rank: int
    spare: int
    top: int
    next: int
    longest: Permit | None
    oldest: int  # its number
    handed: int


def next_room(store: Store, terms: str, now: int, ahead: int) -> int:
    """When to look, ahead of when the first of the starts that count now will not; 0 if there is none."""
    period = pace_of(terms)[1] - ahead
    return next((at + period for at, *_ in store.starts.times if now - period < at <= now), 0)


def noted(store: Store, highest: int, terms: str, ms: int) -> Store:
    """The keys when it is known how many permits there are; for so long, or for as long as it was."""
    if highest <= 1 and terms == "1":
        return store._replace(known=None)
    text, left = f"{highest} {terms}", store.known.lease if store.known else 0
    if store.known and store.known.text == text and left >= ms:
        return store
    return store._replace(known=Known(text, max(left, ms, KNOWN_MS)))


def lasting(store: Store, us: int, more_ms: int) -> Store:
    """The keys when what is known of the permits is to last as long as one of them: so long, and more."""
    if store.known is None:
        return store
    ms = up(us, MS) + more_ms
    return store._replace(known=store.known._replace(lease=max(store.known.lease, ms)))


def choose(store: Store, now: int, count: int, limit: int, fits: Fits) -> Choice:
    """The permit that a verb is about."""
    best: tuple[int, int, int] | None = None  # rank, until, number
    spare = top = handed = 0
    held: dict[int, int] = {}
    oldest, longest, is_free, first = FOREVER, None, False, 0
    for number, permit in enumerate(permits_of(store, count)):
        value, record = permit.value, permit.record
        value = None if value == NOT_A_STRING else value
        known = record if isinstance(record, Record) and record.state else None
        deadline = known.deadline if known else 0
        until, rank = 0, None
        if value is not None and not NUMBER.fullmatch(value):
            until = FOREVER
        elif value is not None and (now < deadline or (deadline > 0 and value == seconds(deadline))):
            until, rank = deadline, fits(known, now < deadline) if known else None
        elif value is not None:
            until = int((min(float(value), 1e11) + 1) * SECOND)
        within, free = number < limit, now >= until
        is_handed = known is not None and known.state == "handed"
        handed += is_handed and value is not None and now < deadline
        if permit.value == NOT_A_STRING and free and (is_handed or best is None or best[0] > 4):
            free, until = False, FOREVER
        if free and not rank and known is not None and is_handed:
            rank = fits(known, False)
        rank = rank or (4 if free else 9)
        until = 0 if free else until
        top = number + 1 if value is not None else top
        spare += within and free
        if not free:
            held[number] = until
        if not free and known is not None and known.since < oldest:
            oldest, longest, first = known.since, permit._replace(value=value), number
        if (within or rank < 4) and (best is None or (rank, until) < best[:2]):
            best, is_free = (rank, until, number), free
    assert best is not None
    number = best[2]
    others = [until for other, until in held.items() if other != number and until < FOREVER]
    return Choice(
        number,
        best[0],
        spare - (is_free and number < limit),
        top,
        min(others, default=0),
        longest,
        first,
        handed,
    )


def extras(choice: Choice) -> tuple[Any, ...]:
    """What a reply has at its end, if there are several permits."""
    longest = choice.longest
    told = (None, None) if longest is None else (longest.value, str(longest.record))
    return str(choice.number), str(choice.spare), *told, str(choice.oldest)
