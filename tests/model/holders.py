"""What the holder of a lock may change, and the caller of a mark: clauses of their scripts' contracts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.model.edits import (
    before,
    given_back,
    kept,
    number_of,
    out_of_line,
    permits_in,
    permits_last,
    starts_last,
    without_calls,
)
from tests.model.layout import STARTS
from tests.model.line import LOOKED_AT, Next, next_of, waiting
from tests.model.lock import Call
from tests.model.permits import AHEAD, at, earliest_start, is_to_come, limit_of, said_of
from tests.model.store import MS, Mark, Store, task_of, up
from tests.model.terms import looked_at, terms_of
from tests.simulation.scripts import Script

if TYPE_CHECKING:
    from tests.model.contract import Played


NOBODY = Next(None, 0, ())


def _may_hand_over(call: Call) -> bool:
    """Whether a release may hand the lock to the first in line."""
    return len(call.keys) > 2 and call.told[4] != ""


def _is_within(call: Call) -> bool:
    """Whether the permit is one of those that there are to be: one beyond them is handed to nobody."""
    return int((*call.told, "0", "0")[7]) < limit_of(terms_of(call).counts)


def _put_off_till(call: Call) -> int:
    """Until when the pace, or a pause, lets nobody start; 0 if one may. Who was handed another is to come."""
    _, terms, paused = terms_of(call)
    if STARTS not in call.keys:
        return paused
    promised = sum(is_to_come(permit, call.now) for permit in permits_in(call))
    return max(earliest_start(call.store.starts, terms, call.now, promised, AHEAD), paused)


def _is_served_elsewhere(call: Call) -> bool:
    """Whether there is a rate, and this script is not told of the starts."""
    return STARTS not in call.keys and ":" in terms_of(call).counts


def heir_in_line(call: Call, word: str) -> Next:
    """Whom a release hands the lock to, unless it rests, or nobody may start, as far as it knows."""
    if not _may_hand_over(call) or word == "resting" or not _is_within(call):
        return NOBODY
    if _put_off_till(call) or _is_served_elsewhere(call):
        return NOBODY
    return next_of(waiting(call.store), dict(call.store.calls.fields), call.now, int(call.told[4]))


def _is_resent(call: Call) -> bool:
    """Whether a release has done nothing: its holder has released already, or it is another's."""
    record = at(call.store, number_of(call)).holder
    return record.token != call.told[0] or record.state not in ("running", "failed")


def _after_release(call: Call, found: Played) -> Store:
    """The lock rests, is handed to the first in line, or is nobody's; a retry is marked, a success noted."""
    store, number, now_ms = before(call), number_of(call), call.now // MS
    if _is_resent(call) or found.word == "lost":
        return store
    rest_until, remember = int(call.told[1]), int(call.told[2])
    record, heir = at(store, number).holder, heir_in_line(call, found.word)
    if found.word == "resting":
        store = kept(store, number, record._replace(deadline=rest_until, state="resting"), remember)
    elif heir.task is not None:
        record = record._replace(deadline=heir.until, state="handed", since=call.now, info=heir.task)
        store = out_of_line(kept(store, number, record, remember), heir.task)
    else:
        store = given_back(store, number, record._replace(state=found.word), now_ms + remember)
    if found.word != "resting" and _may_hand_over(call) and store.line.places and _put_off_till(call):
        store = starts_last(store, terms_of(call).counts, now_ms)
    if len(call.keys) > 6 and (deadline := at(store, number).holder.deadline):
        store = permits_last(store, up(deadline - call.now, MS) + remember)
    store = without_calls(out_of_line(store, *heir.gone), *heir.gone) if heir.gone else store
    return _marks_after_release(call, store, found)


def _marks_after_release(call: Call, store: Store, found: Played) -> Store:
    """A retry is queued, unless another call is; a run that had its lock to itself counts as a success."""
    again, done_for, now_ms = int(call.told[3]), int(call.told[5]), call.now // MS
    task = task_of(call.told[0])[0]
    if task is None:
        return store
    if again and store.mark is None:
        store = store._replace(mark=Mark(task, now_ms + again))
    was_running = at(call.store, number_of(call)).holder.state == "running"
    if len(call.keys) > 7 and done_for and was_running and found.word != "gone":
        store = store._replace(done=Mark(call.told[0], now_ms + done_for))
    return store


def says_more_only_if_there_is(script: Script, call: Call, found: Played) -> bool:
    """A release says one word alone if there is nothing to tell; else also when to look at the line.

    That is when it has rested, or one more may start; at once, if all that it has looked at are gone, or it
    does not know how many have started.
    """
    if call.name != "release" or found.error or found.word == "lost":
        return True
    waits, record = (
        _may_hand_over(call) and bool(before(call).line.places),
        at(call.store, number_of(call)).holder,
    )
    heir, look = heir_in_line(call, found.word), ""
    if record.state == "handed" or not (_is_resent(call) or _is_within(call)):
        waits = False
    elif _is_resent(call):
        look = "" if record.state == "held_for_retry" or STARTS not in call.keys else str(call.now)
        look = str(record.deadline) if record.state == "resting" else look
    elif found.word == "resting":
        look = call.told[1]
    elif till := _put_off_till(call):
        look = str(looked_at(till, terms_of(call).paused, call.now))
    elif _is_served_elsewhere(call) or (heir.task is None and len(heir.gone) == LOOKED_AT):
        look = str(call.now)
    look = look if waits else ""
    if len(found.words) == 1:
        return found.word == "released" and not _is_resent(call) and heir.task is None and not look
    return found.words[5] == look and (
        found.word != "released" or _is_resent(call) or bool(heir.task or look)
    )


def _after_renew(call: Call, found: Played) -> Store:
    """The deadline is moved, and all that lasts as long."""
    return _longer(call, "running") if found.word in ("renewed", "repaired") else before(call)


def _after_hold(call: Call, found: Played) -> Store:
    """The lock is held for a retry, from now on for a lease."""
    is_held = at(call.store, number_of(call)).holder.state == "running" and found.word == "held_for_retry"
    return _longer(call, "held_for_retry") if is_held else before(call)


def _longer(call: Call, state: str) -> Store:
    store, number = before(call), number_of(call)
    lease, retention = int(call.told[1]), int(call.told[2])
    record = at(store, number).holder._replace(deadline=call.now + lease, state=state)
    store = kept(store, number, record, retention)
    return permits_last(store, up(lease, MS) + retention) if len(call.keys) > 2 else store


def frees_one_that_waits(script: Script, call: Call, found: Played) -> bool:
    """A permit that is held for the task's retry is nobody's, whichever of several; all else stays."""
    if call.name != "free":
        return True
    store, after = before(call), found.after
    if found.word in ("lost", "more"):
        return after == store
    expiry = call.now // MS + int(call.told[1])
    return any(
        after == given_back(store, number, permit.holder._replace(state=found.word), expiry)
        for number, permit in enumerate(permits_in(call))
        if _waits_for_retry(permit, call.told[0])
    )


def _waits_for_retry(permit: Store, task: str) -> bool:
    return permit.holder.state == "held_for_retry" and task_of(permit.holder.token)[0] == task


def _after_mark(call: Call, found: Played) -> Store:
    """The mark is the task's, and lasts for its lease at least."""
    store, due = before(call), call.now // MS + int(call.told[1])
    if found.word != ("marked" if call.name == "mark" else "done"):
        return store
    old = store.mark and store.mark.expiry
    return store._replace(mark=Mark(call.told[0], max(old or 0, due)))


def _after_if_same(call: Call, found: Played) -> Store:
    """The mark lasts, or is gone."""
    if call.told[1]:
        return _after_mark(call, found)
    return before(call)._replace(mark=None) if found.word == "done" else before(call)


_AFTER: dict[str, Callable[[Call, Played], Store]] = {
    "release": _after_release,
    "renew": _after_renew,
    "hold": _after_hold,
    "mark": _after_mark,
    "if_same": _after_if_same,
}


def changes_that_alone(script: Script, call: Call, found: Played) -> bool:
    """Nothing changes but what the answer stands for: other keys, places and expiries are as they were."""
    if call.name not in _AFTER:
        return True
    wanted = before(call) if found.error else _AFTER[call.name](call, found)
    return found.after == wanted


def tells_whose_it_is(script: Script, call: Call, found: Played) -> bool:
    """A mark that is not made says whose run or success is in the way; of a run also value and record."""
    if call.name != "mark" or found.error:
        return True
    reply, holder = found.words, call.store.holder
    if found.word == "running":
        told = call.store.value, said_of(call.store, call.now)
        return reply[1:] == [task_of(holder.token)[0], str(call.now), *told]
    if found.word == "done":
        token = call.store.done.task_id if call.store.done else ""
        task = task_of(token)[0]
        return reply[1:] == [token if task is None else task, str(call.now), None, None]
    return reply[3:] == [None, None]


CLAUSES = (
    says_more_only_if_there_is,
    tells_whose_it_is,
    frees_one_that_waits,
    changes_that_alone,
)
