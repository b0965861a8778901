"""What becomes of an attempt to acquire a lock."""

from __future__ import annotations

from typing import NamedTuple

from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.live import paused
from celery_setnx.lock.record import US, Holder, Terms, parse_terms, task_of
from celery_setnx.lock.verbs import AcquireReply


class Outcome(NamedTuple):
    """The result of trying to acquire a lock: a value, never an error.

    Attributes:
        acquired: True if the caller now holds the lock.
        lock: The held lock, to be released once; None if another holds it.
        taken_over_from: The dead holder's record, if its lock was taken over.
        holder: The holder's record, if another holds the lock; of several, the one that has held it longest.
        remaining_s: Seconds until the holder's deadline, of several the first one's; None if unknown.
        server_time: The server's clock (Unix seconds) when it decided.
        mark: Id of the task that the lock's mark names. None without a mark. A task's own mark ends when it
            acquires.
        waiters: How many tasks wait in line.
        stale: True if another message has started this very call: do not run it again.
        ends_first: The holder with the first deadline; `holder`, if there is one permit only.
        limit: How many may hold it at a time, if others do. A live limit counts above the caller's own.
            Defaults to 1.
        paced: True if a permit is free, or held for this task's retry, and no call may start before
            `remaining_s` is over.
        paused: True if it is paced because of a pause.
        superseded_by: Id of the newer call that runs instead; None if there is none.
        is_due: True if calls wait in line for a permit that is free: serve the line now.
    """

    acquired: bool
    lock: HeldLock | None = None
    taken_over_from: Holder | None = None
    holder: Holder | None = None
    remaining_s: float | None = None
    server_time: float = 0.0
    mark: str | None = None
    waiters: int = 0
    stale: bool = False
    ends_first: Holder | None = None
    limit: int = 1
    paced: bool = False
    paused: bool = False
    is_due: bool = False
    superseded_by: str | None = None


def conflict(reply: AcquireReply, token: str, key: str, terms: Terms) -> Outcome:
    """That another holds the lock, or its pace allows no start, or another message has started the call."""
    server_time, ends_first, longest = reply.now_us / US, reply.holder, reply.longest
    if reply.word == "superseded":
        return Outcome(False, server_time=server_time, superseded_by=reply.mark)
    if reply.word == "stale":
        return Outcome(False, server_time=server_time, mark=reply.mark, stale=True)
    is_paused, is_paced = reply.word == "paused", reply.word in ("paced", "paused")
    if is_paced and ends_first is None:  # in the mark's place is what it is for
        longest = ends_first = _held_back(reply, key, terms)
    task_id = ends_first and ends_first.task_id
    is_own = task_id is not None and task_id == task_of(token)
    remaining_s = (reply.deadline_us - reply.now_us) / US if reply.deadline_us else None
    is_due = reply.word == "line"  # it is free for those who wait, and a worker will wake the first
    return Outcome(
        False,
        holder=ends_first if is_own else longest or ends_first,
        ends_first=ends_first,
        limit=reply.limit,
        paced=is_paced,
        paused=is_paused,
        remaining_s=0.0 if is_due else remaining_s,
        server_time=server_time,
        mark=None if is_paced else reply.mark,
        waiters=reply.waiters,
        is_due=is_due,
    )


def _held_back(reply: AcquireReply, key: str, terms: Terms) -> Holder:
    """What stands in the place of a holder while no call may start."""
    told, until = reply.mark or "", reply.deadline_us / US
    if reply.word == "paced":
        return Holder("", until, 0, "paced", None, {"pace": parse_terms(told).pace})
    return paused(key, told, terms.live, until, reply.now_us / US)
