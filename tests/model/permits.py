"""Several permits, and their terms: how a `Store` has them."""

from typing import Any

from tests.model.store import Permit, Store


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


def highest_in(store: Store) -> tuple[int, int]:
    """How many permits are in use, and how many there are for newcomers, as far as the server knows."""
    if store.known is None:
        return 1, 1
    highest, terms = store.known.text.split()
    return int(highest), limit_of(terms)


def terms_in(store: Store) -> str:
    """On what terms newcomers have a permit, as far as the server knows."""
    return store.known.text.split()[1] if store.known else "1"


def limit_of(terms: str) -> int:
    """How many permits there are: `5`, or `5:50/2000000`."""
    return int(terms.partition(":")[0])


def pace_of(terms: str) -> tuple[int, int]:
    """How many may start within how many microseconds; 0: any number."""
    count, _, period = terms.partition(":")[2].partition("/")
    return int(count or 0), int(period or 0)


def permit_in(reply: tuple[Any, ...]) -> int:
    """Which permit the reply of an acquire is about."""
    return int(reply[8]) if len(reply) > 8 else 0
