"""The moment for which a call asks for its lock again in its pool slot, before it parks.

A mutex spins before it sleeps, too: between bodies of some milliseconds a message to and fro would take
longer than they do.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from celery_setnx.lock.lock import AHEAD_S
from celery_setnx.lock.outcome import Outcome

YOUNG_S = 0.02
"""Seconds for which a lock is young: it is likely to be free in a moment."""

LINGER_S = 0.1
"""Seconds for which a call asks again, at most; and for which its place in line lasts if it stops."""

BEHIND = 3
"""Calls that wait in line, from which on another one parks at once."""

_POLL_S = 0.0005


def linger(
    outcome: Outcome,
    ask: Callable[[], Outcome | None],
    clock: Callable[[], float],
    task_id: str,
    *,
    stands: bool,
    is_woken: bool,
) -> Outcome | None:
    """Ask again for as long as that may do: what came of it at last.

    A call that does not stand in line asks no more. One that was woken may have been handed its permit a
    moment before its start: it asks again then.
    """
    give_up = clock() + LINGER_S
    last: Outcome | None = outcome
    while last is not None and (pause_s := _pause_s(last, task_id, stands=stands, is_woken=is_woken)):
        if clock() > give_up:
            break
        time.sleep(pause_s)
        last = ask()
    return last


def _pause_s(outcome: Outcome, task_id: str, *, stands: bool, is_woken: bool) -> float:
    """Seconds until the call asks again; 0 if it does not."""
    if outcome.paced and is_woken:
        remaining_s = outcome.remaining_s or 0.0
        return remaining_s if remaining_s <= AHEAD_S else 0.0
    holder = outcome.holder
    if not stands or outcome.is_due or holder is None or holder.since is None or holder.task_id == task_id:
        return 0.0
    is_young = holder.state in ("running", "handed") and outcome.server_time - holder.since < YOUNG_S
    return _POLL_S * max(1, outcome.waiters) if is_young else 0.0
