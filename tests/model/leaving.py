"""What becomes of a line, and of a permit that is kept for a call, when that leaves: of leave.lua."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.model.edits import (
    before,
    given_back,
    in_line,
    kept,
    line_lasts,
    out_of_line,
    permits_in,
    permits_last,
    starts_last,
    with_call,
    without_calls,
)
from tests.model.line import LOOKED_AT, next_of, passed_over, waiter, waiting
from tests.model.lock import Call
from tests.model.permits import (
    AHEAD,
    at,
    earliest_start,
    ends,
    heir_of,
    is_to_come,
    limit_of,
    speaks_of_its_value,
)
from tests.model.rules import is_anothers
from tests.model.store import MS, NOT_A_STRING, Store, Ticket, up
from tests.model.terms import looked_at, terms_of
from tests.simulation.scripts import Script

if TYPE_CHECKING:
    from tests.model.contract import Played

REMEMBER_MS = 60_000


class LeaveReply(NamedTuple):
    """What is there once a call has left; who is next, and when to look at the line."""

    store: Store
    heir: str | None = None
    look: str = ""


def leaves_the_line_and_hands_on(script: Script, call: Call, found: Played) -> bool:
    """Nothing changes but the call's place and ticket. A permit that is kept for it goes to the next."""
    if call.name != "leave" or found.error or found.word != "left":
        return call.name != "leave" or found.error or found.after == before(call)
    left = _left(call)
    known = waiter(left.store, left.heir)
    wakes = known.call if known is not None and not known.comes else None
    return found.after == left.store and found.words[1:] == [str(call.now), left.heir, wakes, left.look]


def _left(call: Call) -> LeaveReply:
    task, attempt, copy, remember, shared, token, _, _, lease = call.told
    store, own = before(call), None if is_anothers(call, shared) else task
    number = next((n for n, permit in enumerate(permits_in(call)) if _is_its(call, permit, own)), None)
    is_again = number is not None and at(call.store, number).holder.token == token
    if lease == "":
        known, ticket = waiter(store, own), dict(store.tickets).get(task)
        misses = ticket.misses if ticket is not None and ticket.attempt == int(attempt) else "0"
        misses = str(known.misses) if known is not None else misses
        store = without_calls(out_of_line(store, own), own) if own is not None else store
        tickets = {**dict(store.tickets), task: Ticket(f"{attempt}|{copy}|{misses}", int(remember))}
        store = store._replace(tickets=tuple(sorted(tickets.items(), key=lambda each: each[0].encode())))
    if number is None:
        return LeaveReply(store)
    if is_again:
        heir = heir_of(at(call.store, number))
        return LeaveReply(store, heir, str(call.now) if heir is None else "")
    return _handed_on(call, store if lease == "" else _stays(call, store, task), number)


def _is_its(call: Call, permit: Store, own: str | None) -> bool:
    """Whether a permit is kept for the call, or was until its deadline; or it has given it back before."""
    is_there = permit.value not in (None, NOT_A_STRING)
    is_nobodys = speaks_of_its_value(permit, call.now) or ends(permit, call.now) == 0
    is_given_back = is_to_come(permit, call.now) or permit.holder.state == "released"
    is_given_back = is_given_back and permit.holder.token == call.told[5]
    return is_given_back or (own is not None and heir_of(permit) == own and is_there and is_nobodys)


def _stays(call: Call, store: Store, task: str) -> Store:
    """It is passed over for a while; one that asks by itself is forgotten."""
    known = waiter(store, task)
    if known is None:
        return without_calls(store, task)
    place, known = passed_over(known, call.now, int(call.told[8]))
    return line_lasts(in_line(with_call(store, task, str(known)), task, place), store.calls.lease)


def _handed_on(call: Call, store: Store, number: int) -> LeaveReply:
    """The permit is the next one's, if it is within the limit and one more may start; or else nobody's."""
    _, terms, paused = terms_of(call)
    promised = sum(is_to_come(permit, call.now) for n, permit in enumerate(permits_in(call)) if n != number)
    start = max(earliest_start(call.store.starts, terms, call.now, promised, AHEAD), paused)
    record, now_ms, look = at(store, number).holder._replace(token=call.told[5]), call.now // MS, ""
    if start:
        store, look = starts_last(store, terms, now_ms), str(looked_at(start, paused, call.now))
    elif number < limit_of(terms):
        heir = next_of(waiting(store), dict(store.calls.fields), call.now, int(call.told[6]))
        store = without_calls(out_of_line(store, *heir.gone), *heir.gone) if heir.gone else store
        if heir.task is not None:
            record = record._replace(deadline=heir.until, since=call.now, info=heir.task)
            store = out_of_line(kept(store, number, record, REMEMBER_MS), heir.task)
            return LeaveReply(permits_last(store, up(heir.until - call.now, MS) + REMEMBER_MS), heir.task)
        look = str(call.now) if len(heir.gone) == LOOKED_AT else ""
    return LeaveReply(
        given_back(store, number, record._replace(state="released"), now_ms + REMEMBER_MS), None, look
    )


CLAUSES = (leaves_the_line_and_hands_on,)
