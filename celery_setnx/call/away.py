"""Keeps publishers from waiting twice for a lock server that has just timed out.

A call that runs asks on: it may not run before its server answers. A call that is published can be sent
without asking, and whoever publishes it, such as a web request, must not wait for seconds each time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import redis

from celery_setnx.exceptions import LockRefused, LockUnavailable
from celery_setnx.lock.marks import Mark, MarkReply, extend_all, free_all, mark_all
from celery_setnx.lock.newest import Reservation, Wanted, replace_all, reserve_all
from celery_setnx.lock.scripts import node_of
from celery_setnx.wording import unstopped

PAUSE_S = 5.0
"""Seconds for which publishers do not ask a server, or a cluster's node, that has timed out."""

_A_WAIT_S = 1.0  # a faster failure, such as a refused connection, is tried each time

Error = LockUnavailable | LockRefused
_Keyed = TypeVar("_Keyed", Mark, Wanted, Reservation)


class _Outage(NamedTuple):
    """That a server has not answered: the error, and when it is asked again (by `time.monotonic`)."""

    error: LockUnavailable
    asked_again_at: float


def mark_unless_away(client: Any, marks: Sequence[Mark], **terms: Any) -> list[MarkReply | Error]:
    """As `mark_all`; where the server has just not answered, an error at once."""
    return _unless_away(client, marks, lambda asked: mark_all(client, asked, **terms))


def reserve_unless_away(client: Any, calls: Sequence[Wanted], **terms: Any) -> list[Reservation | Error]:
    """As `reserve_all`."""
    return _unless_away(client, calls, lambda asked: reserve_all(client, asked, **terms))


def replace_unless_away(client: Any, sent: Sequence[Reservation], remember: float) -> Error | None:
    """As `replace_all`: the first error."""
    return _first_error(_unless_away(client, sent, lambda asked: replace_all(client, asked, remember)))


def extend_unless_away(client: Any, marks: Sequence[Mark], lease: float) -> Error | None:
    """As `extend_all`, all for the same lease."""

    def extend(asked: list[Mark]) -> list[Error | None]:
        return [extend_all(client, asked, [lease] * len(asked))] * len(asked)

    return _first_error(_unless_away(client, marks, extend))


def free_unless_away(client: Any, marks: Sequence[Mark]) -> Error | None:
    """As `free_all`."""

    def free(asked: list[Mark]) -> list[Error | None]:
        return [free_all(client, asked)] * len(asked)

    return _first_error(_unless_away(client, marks, free))


def _first_error(found: list[Error | None]) -> Error | None:
    return next((error for error in found if error is not None), None)


def _unless_away(client: Any, marks: Sequence[_Keyed], ask: Callable[[list[_Keyed]], list[Any]]) -> list[Any]:
    """For each mark, or whatever has the key of a lock, the server's reply, or the error of one that has just
    not answered.

    What is known is kept with the client: each process has its own. It needs no lock: if two threads write
    at a time, either may win.
    """
    outages: dict[str, _Outage] = client.__dict__.setdefault("_setnx_outages", {})
    nodes = [node_of(client, mark.key) for mark in marks]
    away = {node: error for node in set(nodes) if (error := _still_away(outages, node))}
    asked = [mark for mark, node in zip(marks, nodes) if node not in away]
    began = time.monotonic()
    replies = iter(ask(asked) if asked else ())
    ended = time.monotonic()
    found: list[Any] = []
    for mark, node in zip(marks, nodes):
        if error := away.get(node):
            found.append(type(error)(mark.key, error.reason))
            continue
        reply = next(replies)
        found.append(reply)
        if isinstance(reply, LockRefused) or not isinstance(reply, LockUnavailable):  # an answer
            outages.pop(node, None)
        elif _is_timeout(reply) or ended - began >= _A_WAIT_S:
            outages[node] = _Outage(reply, ended + PAUSE_S)
    return found


def _is_timeout(error: BaseException | None) -> bool:
    """Whether it comes of a timeout, which redis-py may have put into another error of its own."""
    while error is not None and not isinstance(error, (redis.TimeoutError, TimeoutError)):
        error = error.__cause__ or error.__context__
    return error is not None


def _still_away(outages: dict[str, _Outage], node: str) -> LockUnavailable | None:
    """The error that a server has just had; None for everybody else, and for the one who asks it again."""
    outage, now = outages.get(node), time.monotonic()
    if outage is None:
        return None
    if now >= outage.asked_again_at:
        outages[node] = outage._replace(
            asked_again_at=now + PAUSE_S
        )  # the others do not wait beside this one
        return None
    reason = f"{unstopped(outage.error.reason)}; it is asked again within {PAUSE_S:g} s"
    return type(outage.error)(outage.error.key, reason)
