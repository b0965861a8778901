"""The line: who waits, and what is known of each."""

import re
from collections.abc import Mapping
from typing import NamedTuple

from tests.model.store import SECOND, Store

AWAY = 4_000_000_000_000_000
"""In a line, from here on, stand those that are passed over: by this and the time at which that ends."""

AWAY_AT_MOST = 3_600 * SECOND
LOOKED_AT = 10
"""How many in line are looked at before it is said that nobody comes."""
MAY_COME_LATE = 50_000
"""How much longer (us) a permit is kept for a call than that one asks again by itself."""

_WOKEN_WITH = re.compile(r"(\d+)(\+?)\|(\d+)\|(.*)", re.DOTALL)


class Waiter(NamedTuple):
    """What is known of a task that waits: its misses when it was handed the lock, and `call` to wake it.

    `comes`: a wake-up is on its way all the same. `since`: its place.
    """

    misses: int
    comes: bool
    since: int
    call: str

    def __str__(self) -> str:
        return f"{self.misses}{'+' * self.comes}|{self.since}|{self.call}"


def waiter(store: Store, task: str | None) -> Waiter | None:
    """What is known of a task that waits; None if it asks by itself, or does not wait."""
    match = _WOKEN_WITH.fullmatch(dict(store.calls.fields).get(task or "", ""))
    return Waiter(int(match[1]), bool(match[2]), int(match[3]), match[4]) if match else None


def waiting(store: Store) -> list[str]:
    """The tasks that wait, in order, without those that are passed over."""
    return [task for since, task in store.line.places if since < AWAY]


class Next(NamedTuple):
    """The next in line, until when (us) a permit is kept for it, and those before it that ask no more."""

    task: str | None
    until: int
    gone: tuple[str, ...]


def next_of(order: list[str], calls: Mapping[str, str], now: int, hand_over: int) -> Next:
    """The first that is to be woken, or may still ask by itself; nobody behind too many that are gone."""
    gone: tuple[str, ...] = ()
    for task in order[:LOOKED_AT]:
        text = calls.get(task, "")
        if not text.startswith("@"):
            return Next(task, now + hand_over, gone)
        if now < int(text[1:]):
            return Next(task, int(text[1:]) + MAY_COME_LATE, gone)
        gone += (task,)
    return Next(None, 0, gone)


def passed_over(known: Waiter, now: int, lease: int) -> tuple[int, Waiter]:
    """The place of one that has not come in time, and what is known of it.

    It is passed over for a lease, for twice as long each time, for an hour at most.
    """
    away = min(lease * 2**known.misses, AWAY_AT_MOST)
    return AWAY + now + away, Waiter(known.misses + 1, False, known.since, known.call)
