"""Calls beside more than the scenarios have: long lines, other tickets and terms, starts, successes."""

from __future__ import annotations

import random

from tests.model.layout import PERMITS, RECORD, STARTS
from tests.model.line import AWAY, LOOKED_AT, Waiter
from tests.model.lock import Call
from tests.model.permits import AHEAD, at, pace_of, terms_in
from tests.model.store import (
    MS,
    SECOND,
    Calls,
    Known,
    Line,
    Mark,
    Permit,
    Record,
    Starts,
    Store,
    Ticket,
    task_of,
)

TASKS = ("a", "b", "c", "d")


def crowded(call: Call, draw: random.Random) -> Call:
    """The call, with one or two things more about those who wait, for the scripts that give turns."""
    changes = {
        "serve": (
            _beside_waiters,
            _beside_waiters,
            _behind_lingerers,
            _on_other_terms,
            _paced,
            _served_before,
            _draining,
        ),
        "park": (
            _with_a_ticket,
            _with_a_ticket,
            _beside_waiters,
            _on_other_terms,
            _soon_forgotten,
            _kept_for_it,
        ),
        "leave": (_with_a_ticket, _with_a_ticket, _beside_waiters, _on_other_terms, _kept_for_it),
        "look": (_on_other_terms,),
        "forget": (_beside_a_success,),
    }
    for _ in range(draw.choice((1, 2))):
        call = draw.choice(changes[call.name])(call, draw)
    return call


def _beside_waiters(call: Call, draw: random.Random) -> Call:
    """Those who wait are woken with, or ask again by themselves; some are passed over, some have left."""
    store, now = call.store, call.now
    places = {task: since for since, task in store.line.places}
    calls = dict(store.calls.fields)
    tasks = {*places, *calls, *draw.sample(TASKS, 2), *[call.told[0]] * (call.name != "serve")}
    for task in sorted(tasks):
        kind, since, beside = (
            draw.random(),
            now - draw.randrange(1, 9) * SECOND,
            draw.choice((-1, 0, 1, SECOND)),
        )
        if kind < 0.3:
            continue
        for known in (places, calls):
            known.pop(task, None)
        wakes = Waiter(draw.choice((0, 1, 2, 11)), draw.random() < 0.3, since, "0")
        if kind < 0.6:
            places[task], calls[task] = draw.choice((since, AWAY + now + beside)), str(wakes)
        elif kind < 0.75:
            places[task], calls[task] = since, f"@{now + beside}"
        elif kind < 0.85:
            calls[task] = str(wakes)
    return call._replace(store=_in_line(store, places, calls))


def _in_line(store: Store, places: dict[str, int], calls: dict[str, str]) -> Store:
    order = tuple(sorted((since, task) for task, since in places.items()))
    lease = max(store.calls.lease, 60_000)
    return store._replace(
        line=Line(order, min(store.line.lease, lease) if store.line.places else lease) if order else Line(),
        calls=Calls(tuple(sorted(calls.items())), lease) if calls else Calls(),
    )


def _behind_lingerers(call: Call, draw: random.Random) -> Call:
    """Before the others stand about as many who ask no more as one service looks at."""
    many = draw.randrange(LOOKED_AT - 1, LOOKED_AT + 2)
    places = {task: since for since, task in call.store.line.places}
    calls = dict(call.store.calls.fields)
    for number in range(many):
        places[f"l{number:02}"], calls[f"l{number:02}"] = number + 1, f"@{call.now - number}"
    return call._replace(store=_in_line(call.store, places, calls))


def _with_a_ticket(call: Call, draw: random.Random) -> Call:
    """The task's attempt before, or another, has stood in line, or has begun; others may have its id."""
    task, attempt, copy, *_ = told = list(call.told)
    told[1] = str(int(attempt) + 1)
    if call.name == "park" and draw.random() < 0.3:
        told[2] = ""  # its courier
    begun_by, vain = draw.choice(("", "", copy, "x1")), draw.choice((0, 0, 1, 2))
    text = f"{int(told[1]) + draw.choice((-1, 0, 0, 1))}|{begun_by}|{vain}"
    lease = int(told[5] if call.name == "park" else told[3])
    tickets = dict(call.store.tickets)
    tickets[task] = Ticket(text, lease + draw.choice((-500, 500)))
    if draw.random() < 0.1:
        del tickets[task]
    told[7 if call.name == "park" else 4] = draw.choice(("0", "1"))
    return call._replace(told=tuple(told), store=call.store._replace(tickets=tuple(sorted(tickets.items()))))


def _soon_forgotten(call: Call, draw: random.Random) -> Call:
    """The line and the calls are remembered for a shorter time than this one asks for, or a longer one."""
    ms = int(call.told[5]) + draw.choice((-500, 500))
    store, known = call.store, call.store.known
    return call._replace(
        store=store._replace(
            line=store.line._replace(lease=ms) if store.line.places else Line(),
            calls=store.calls._replace(lease=ms) if store.calls.fields else Calls(),
            known=known and known._replace(lease=ms),
        )
    )


def _on_other_terms(call: Call, draw: random.Random) -> Call:
    """Other terms are known than the call is told, or more permits are in use than it knows of."""
    count = sum(name.startswith(RECORD) for name in call.keys)
    limit = draw.randrange(1, count + 1)
    highest = draw.choice((limit, count, count, count + 1))
    terms = draw.choice((str(limit), f"{limit}:1/2000000"))
    store, told = call.store, list(call.told)
    if PERMITS in call.keys:
        store = store._replace(known=Known(f"{max(limit, highest)} {terms}", 60_500))
    place = {"park": 6, "serve": 7}.get(call.name)
    if place is not None:
        told[place] = draw.choice(("0", "0", terms, "1", "2", "1:1/2000000"))
    return call._replace(store=store, told=tuple(told))


def _paced(call: Call, draw: random.Random) -> Call:
    """Calls have started: a period ago, to the moment; or the clock was set back since."""
    terms = call.told[7] if call.told[7] != "0" else terms_in(call.store)
    if STARTS not in call.keys:
        return call
    if not pace_of(terms)[1]:
        terms += f":{draw.choice((1, 2, 3))}/{draw.choice((2_000_000, 2_000_500))}"
        call = call._replace(told=(*call.told[:7], terms))
    period, now = pace_of(terms)[1], call.now
    moments = [now - period + AHEAD + beside for beside in (-1, 0, 1)] + [
        now - period,
        now - SECOND,
        now,
        now + 1,
    ]
    times = sorted((moment, 0, moment) for moment in draw.sample(moments, draw.randrange(1, 4)))
    expiry = now // MS + draw.choice((100, 2_000, 1_999, 9_000))
    return call._replace(store=call.store._replace(starts=Starts(tuple(times), expiry)))


def _served_before(call: Call, draw: random.Random) -> Call:
    """A permit is handed to a task already, by this service or an earlier one; the task comes, or cannot."""
    heir, told = draw.choice(TASKS), list(call.told)
    told[5], told[6] = draw.choice(("", heir)), draw.choice(("", "", "unsent"))
    return _handed(call._replace(told=tuple(told)), draw, draw.choice((told[0], "h")), heir)


def _draining(call: Call, draw: random.Random) -> Call:
    """The limit was lowered since, and a permit beyond it is handed to a task."""
    call = _served_before(call, draw)
    return call._replace(told=(*call.told[:7], "1"))


def _kept_for_it(call: Call, draw: random.Random) -> Call:
    """A permit is handed to the task."""
    return _handed(call, draw, "h", call.told[0])


def _handed(call: Call, draw: random.Random, token: str, heir: str) -> Call:
    """A permit is handed to a task, and to no other permit's; its value is gone, or another program's."""
    store, now = call.store, call.now
    for number in range(1 + len(store.others)):
        permit = at(store, number)
        if permit.holder.state == "handed" and permit.holder.info == heir:
            store = at(permit._replace(record=permit.holder._replace(state="released")), number)
    until = now + draw.choice((-SECOND, -1, 0, 1, SECOND, SECOND))
    number, expiry, second = draw.randrange(1 + len(store.others)), until // MS + 10_000, -(-until // SECOND)
    value = draw.choice((str(second), str(second), str(second), str(now // SECOND - 3), None))
    record = Record(token, until, draw.choice((0, 7)), "handed", now - 9 * SECOND, heir)
    kept = Permit(value, None if value is None else expiry, record, expiry)
    return call._replace(store=at(at(store, number)._replace(**kept._asdict()), number))


def _beside_a_success(call: Call, draw: random.Random) -> Call:
    """A run has succeeded: this one, one of the same task that began before or after it, or another's."""
    token, now, store = call.told[0], call.now, call.store
    task, retries = task_of(token)
    succeeded = draw.choice((token, f"{task}|{retries}|5", f"{task}|{retries + 1}|6", "z|0|7"))
    store = store._replace(done=Mark(succeeded, now // MS + 5_000))
    numbers = range(1 + len(store.others))
    for number, of in zip(numbers, draw.sample((token, succeeded), 2), strict=False):
        state = draw.choice(("running", "released", "failed", "held_for_retry"))
        record = Record(of, now + SECOND, 7, state, now - draw.choice((1, 2, 3)) * SECOND, "")
        store = at(at(store, number)._replace(record=record, record_expiry=now // MS + 9_000), number)
    return call._replace(store=store)
