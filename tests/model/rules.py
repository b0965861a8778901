"""By which word each script must answer: the rules of docs/protocol.md, each as one function."""

from __future__ import annotations

from collections.abc import Callable

from tests.model.line import waiter, waiting
from tests.model.lock import Call
from tests.model.permits import at
from tests.model.store import NUMBER, SECOND, Store, seconds, task_of
from tests.model.terms import needs_starts, permits_needed


def word_of(call: Call, number: int) -> str | None:
    """What a script must say of a permit; None where that is for the explorations to say."""
    count = _count_of(call)
    if count is not None and (permits_needed(call) > count or needs_starts(call)):
        return "more"
    rule = _RULES.get(call.name)
    return rule(call, at(call.store, number)) if rule else None


def _count_of(call: Call) -> int | None:
    """Of how many permits a script is told; None if it does not ask how many there are."""
    if b"permits" not in call.keys or call.name in ("renew", "hold", "release"):
        return None
    return 1 + sum(name.startswith(b"lock#") for name in call.keys)


def is_stale(call: Call, attempt: str, copy: str, remember: str = "") -> bool:
    """Whether another message has started this attempt, or is to (the first delivery's asks late), or a later
    one exists.
    """
    name = next((name for name in call.keys if name.startswith(b"ticket:")), b"")
    ticket = dict(call.store.tickets).get(name[7:].decode()) if name else None
    if ticket is None:
        return False
    later = ticket.attempt - int(attempt)
    if later == 0 and not ticket.begun_by:
        return (copy, remember) == ("-", "0")
    return later > 0 or (later == 0 and ticket.begun_by != copy)


def _is_ours(store: Store) -> bool:
    return store.value == seconds(store.holder.deadline)


def _is_repaired(call: Call, store: Store) -> bool:
    """A foreign program has overwritten the value of a lock that is not past its deadline."""
    number = store.value is not None and bool(NUMBER.fullmatch(store.value))
    return not _is_ours(store) and call.now < store.holder.deadline and number


def _of_renew(call: Call, store: Store) -> str:
    record = store.holder
    if record.token != call.told[0] or record.state != "running":
        return "lost"
    if store.value is None:
        return "gone"
    if call.now >= record.deadline or not NUMBER.fullmatch(store.value):
        return "lost"
    return "renewed" if _is_ours(store) else "repaired"


def _of_release(call: Call, store: Store) -> str:
    record = store.holder
    if record.token != call.told[0] or record.state == "":
        return "lost"
    if record.state == "handed":
        return "released"
    if record.state not in ("running", "failed"):
        return record.state
    if store.value is None:
        return "gone"
    if not _is_ours(store) and not _is_repaired(call, store):
        return "lost"
    if call.now < int(call.told[1]):
        return "resting"
    return "released" if _is_ours(store) else "repaired"


def _of_hold(call: Call, store: Store) -> str:
    record = store.holder
    if record.token != call.told[0] or record.state == "":
        return "lost"
    if record.state != "running":
        return record.state
    if store.value is None:
        return "gone"
    return "held_for_retry" if _is_ours(store) or _is_repaired(call, store) else "lost"


def _of_free(call: Call, store: Store) -> str:
    record = store.holder
    if record.state != "held_for_retry" or task_of(record.token)[0] != call.told[0]:
        return "lost"
    if store.value is None:
        return "gone"
    return "released" if _is_ours(store) else "repaired" if _is_repaired(call, store) else "lost"


def _of_mark(call: Call, store: Store) -> str:
    mark, record, done, (task, _, dedupe) = store.mark, store.holder, store.done, call.told
    if mark is not None and mark.task_id != task:
        return "queued"
    live = store.value is not None and call.now < record.deadline
    holder = task_of(record.token)[0]
    if (
        dedupe != "until_started"
        and live
        and holder is not None
        and record.state in ("running", "held_for_retry")
    ):
        return "running"
    succeeded = done and (task_of(done.task_id)[0] or done.task_id)
    return "done" if dedupe == "dedupe_for" and succeeded not in (None, task) else "marked"


def _of_if_same(call: Call, store: Store) -> str:
    return "done" if store.mark is not None and store.mark.task_id == call.told[0] else "changed"


def is_anothers(call: Call, shared: str) -> bool:
    """Whether a place in line is that of another call with this task id."""
    ticket = dict(call.store.tickets).get(call.told[0])
    waits = ticket is not None and ticket.begun_by == ""
    return shared == "1" and not waits and waiter(call.store, call.told[0]) is not None


def is_heir(call: Call, task: str) -> bool:
    """Whether a permit is kept for a task, or was until its deadline."""
    permits = [at(call.store, number) for number in range(_count_of(call) or 1)]
    handed = [permit for permit in permits if permit.value is not None and permit.holder.state == "handed"]
    return any(permit.holder.info == task for permit in handed)


def _of_leave(call: Call, store: Store) -> str:
    return "stale" if is_stale(call, *call.told[1:3]) else "left"


def _of_park(call: Call, store: Store) -> str | None:
    (task, attempt, copy), (shared, _, alone) = call.told[:3], call.told[7:]
    if is_stale(call, attempt, copy):
        return "stale"
    if is_anothers(call, shared):
        return "taken"
    if alone == "1" and waiting(call.store) and all(who != task for _, who in call.store.line.places):
        return "crowded"
    if is_heir(call, task):
        return None  # `handed`, if it is its turn
    ticket = dict(call.store.tickets).get(task)
    has_begun = ticket is not None and ticket.attempt == int(attempt) and ticket.begun_by != ""
    return "new" if ticket is None or has_begun else "parked"


def rule_of(call: Call, store: Store) -> str:
    """By which rule acquire.lua lets a caller have a lock."""
    record, value, token, dead = store.holder, store.value, call.told[0], call.told[4]
    if value is None:
        return "free"
    if not NUMBER.fullmatch(value):
        return "held"
    if call.now >= record.deadline:
        recorded = record.deadline > 0 and _is_ours(store)
        until = (min(float(value), 1e11) + 1) * SECOND
        return "expired" if recorded or call.now >= until else "held"
    (task, attempt), (other, before) = task_of(token), task_of(record.token)
    if record.state == "running":
        return "again" if record.token == token else "dead" if dead and record.token == dead else "held"
    if record.state == "handed":
        ticket = len(call.keys) > 5 and dict(call.store.tickets).get(call.keys[5][7:].decode())
        woken = bool(ticket) and not ticket.begun_by and call.told[5] != "-"
        waits = bool(ticket) and not ticket.begun_by
        anothers = call.told[12] == "1" and not waits and len(call.keys) > 5 and waiter(call.store, task)
        return "handed" if woken or (record.info == task and not anothers) else "held"
    if task is None or task != other:
        return "held"
    if record.state == "resting" and (attempt > before or call.told[11] != "1"):
        return "rested"
    return "resumed" if record.state == "held_for_retry" and attempt > before else "held"


_RULES: dict[str, Callable[[Call, Store], str | None]] = {
    "renew": _of_renew,
    "release": _of_release,
    "hold": _of_hold,
    "free": _of_free,
    "mark": _of_mark,
    "if_same": _of_if_same,
    "leave": _of_leave,
    "park": _of_park,
}
