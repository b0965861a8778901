"""Known holes in the Lua of servers, by version: whoever may EVAL can use them. No server is asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

Version = tuple[int, ...]


class Hole(NamedTuple):
    """A hole, or several that were closed at once.

    Attributes:
        names: Its names.
        why: What it allows.
        closed_in: By product, the release of each branch that closes it; the oldest one first.
        since: The first version that has it. Defaults to any.
    """

    names: str
    why: str
    closed_in: Mapping[str, tuple[Version, ...]]
    since: Version = ()


HOLES = (
    Hole(
        "CVE-2025-49844, CVE-2025-46817, CVE-2025-46818, CVE-2025-46819",
        "A user who may run EVAL there can crash it, act as another user, or run code on its host.",
        {
            "Redis": ((6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)),
            "Valkey": ((7, 2, 11), (8, 0, 6), (8, 1, 4)),
        },
    ),
    Hole(
        "CVE-2025-67733",
        "A user who may run EVAL there can forge replies to others on the same connection.",
        {"Valkey": ((7, 2, 12), (8, 0, 7), (8, 1, 6), (9, 0, 3))},
    ),
    Hole(
        "CVE-2026-23631",
        "A user who may run EVAL on a writable replica, or make a replica writable, can crash it or run code "
        "on its host.",
        {
            "Redis": ((7, 2, 14), (7, 4, 9), (8, 2, 6), (8, 4, 3), (8, 6, 3)),
            "Valkey": ((7, 2, 13), (8, 0, 9), (8, 1, 7), (9, 0, 4)),
        },
        since=(7, 0),
    ),
)
"""By the advisories of Redis and Valkey."""


def open_holes(product: str, version: Version) -> Iterator[Hole]:
    """The holes of a version."""
    for hole in HOLES:
        closed_in = hole.closed_in.get(product, ())
        if closed_in and version >= hole.since and not _is_closed(version, closed_in):
            yield hole


def _is_closed(version: Version, closed_in: tuple[Version, ...]) -> bool:
    """By the release of its branch; a branch without one never got it, unless it is newer than all others."""
    branch = next((release for release in closed_in if release[:2] == version[:2]), closed_in[-1])
    return version >= branch
