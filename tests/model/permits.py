"""Several permits, and their terms: how a `Store` has them."""

from typing import Any

from tests.model.store import NUMBER, SECOND, Permit, Starts, Store, seconds

AHEAD = 20_000
"""How long (us) before its start a call may be handed a permit."""
NEVER = 10**18
"""A time (us) that nobody lives to see: when a value ends that is no number."""


def permits_of(store: Store, count: int) -> list[Permit]:
    """The first so many permits."""
    others = list(store.others[: count - 1])
    return [Permit(*store[:4]), *others, *[Permit()] * (count - 1 - len(others))]


def at(store: Store, number: int) -> Store:
    """The keys as those of a lock whose only permit this is; done twice, they are as before."""
    if number == 0:
        return store
    permits = permits_of(store, max(number, len(store.others)) + 1)
    first, other = permits[0], permits[number]
    permits[number] = first
    return store._replace(**other._asdict(), others=trimmed(permits[1:]))


def trimmed(others: list[Permit]) -> tuple[Permit, ...]:
    """The permits beside the first, without those at the end of which there is nothing."""
    while others and others[-1] == Permit():
        others = others[:-1]
    return tuple(others)


def heir_of(permit: Store) -> str | None:
    """The task for which a permit is kept, or was until its deadline."""
    return permit.holder.info if permit.holder.state == "handed" else None


def speaks_of_its_value(permit: Store, now: int) -> bool:
    """Whether a permit's record, not another program, says whose it is."""
    deadline = permit.holder.deadline
    is_number = permit.value is not None and bool(NUMBER.fullmatch(permit.value))
    return is_number and deadline > 0 and (now < deadline or permit.value == seconds(deadline))


def said_of(permit: Store, now: int) -> str | None:
    """The record by which scripts tell of a permit: of another program's value, one that says so."""
    if permit.value is None or speaks_of_its_value(permit, now):
        return None if permit.value is None else str(permit.record)
    is_number = NUMBER.fullmatch(permit.value)
    until = int((min(float(permit.value), 1e11) + 1) * SECOND) if is_number else 0
    return f"\n{until}\n0\nforeign\n0\n"


def ends(permit: Store, now: int) -> int:
    """When a permit comes free by itself; 0 if it has."""
    value = permit.value
    if value is None:
        return 0
    if not NUMBER.fullmatch(value):
        return NEVER
    is_recorded = speaks_of_its_value(permit, now)
    till = permit.holder.deadline if is_recorded else int((min(float(value), 1e11) + 1) * SECOND)
    return till if now < till else 0


def is_to_come(permit: Store, now: int) -> bool:
    """Whether a permit is kept for a task still."""
    is_kept = heir_of(permit) is not None and bool(NUMBER.fullmatch(permit.value or ""))
    return is_kept and now < permit.holder.deadline


def earliest_start(starts: Starts, terms: str, now: int, promised: int, ahead: int = 0) -> int:
    """When one more may start, at the earliest, if so many others are about to; 0 if it may now.

    Of the starts so far as many must be a period ago as leave room for it.
    """
    count, period = pace_of(terms)
    if not count:
        return 0
    room = max(count - promised, 1)
    past = [began for began, *_ in starts.times if began <= now]
    till = past[-room] + period - ahead if len(past) >= room else 0
    if promised >= count:
        till = max(till, now + min(period, SECOND))
    return till if till > now else 0


def highest_in(store: Store) -> tuple[int, int]:
    """How many permits are in use, and how many there are for newcomers, as far as the server knows."""
    if store.known is None:
        return 1, 1
    highest, terms = store.known.text.split()
    return int(highest), limit_of(terms)


def terms_in(store: Store) -> str:
    """On what terms newcomers have a permit, as far as the server knows."""
    return store.known.text.split()[1] if store.known else "1"


def in_use(store: Store) -> int:
    """How many permits may have keys, as far as the server knows."""
    return int(store.known.text.split()[0]) if store.known else 1


def limit_of(terms: str) -> int:
    """How many permits there are: `5`, or `5:50/2000000`."""
    return int(terms.partition(":")[0])


def pace_of(terms: str) -> tuple[int, int]:
    """How many may start within how many microseconds; 0: any number."""
    count, _, period = terms.partition(":")[2].partition("/")
    return int(count or 0), int(period or 0)


def permit_in(reply: tuple[Any, ...]) -> int:
    """Which permit the reply of an acquire is about."""
    if len(reply) < 5:  # nothing was found
        return int(reply[3]) if len(reply) > 3 else 0
    return int(reply[8]) if len(reply) > 8 else 0
