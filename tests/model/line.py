"""The line: who waits, and what is known of each."""

import re
from typing import NamedTuple

from tests.model.store import Store

AWAY = 4_000_000_000_000_000
"""In a line, from here on, stand those that are passed over: by this and the time at which that ends."""

_WOKEN_WITH = re.compile(r"(\d+)(\+?)\|(\d+)\|(.*)", re.DOTALL)


class Waiter(NamedTuple):
    """What is known of a task that waits: how often it was handed the lock in vain, and `call` to wake it.

    `comes`: a wake-up is on its way all the same. `since`: its place.
    """

    vain: int
    comes: bool
    since: int
    call: str

    def __str__(self) -> str:
        return f"{self.vain}{'+' * self.comes}|{self.since}|{self.call}"


def waiter(store: Store, task: str | None) -> Waiter | None:
    """What is known of a task that waits; None if it asks by itself, or does not wait."""
    match = _WOKEN_WITH.fullmatch(dict(store.calls.fields).get(task or "", ""))
    return Waiter(int(match[1]), bool(match[2]), int(match[3]), match[4]) if match else None


def waiting(store: Store) -> list[str]:
    """The tasks that wait, in order, without those that are passed over."""
    return [task for since, task in store.line.places if since < AWAY]
