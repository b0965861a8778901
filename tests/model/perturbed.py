"""Calls that no exploration makes: at odd times, on boundaries, beside foreign values, of other tokens."""

from __future__ import annotations

import random

from tests.model.contract import Call
from tests.model.crowded import crowded
from tests.model.line import AWAY
from tests.model.permits import at
from tests.model.store import MS, NOT_A_STRING, NUMBER, SECOND, Record, Store, purge, seconds, task_of
from tests.model.turns import TURNS

GARBAGE = ("", "free", "-1", "1e9", " 7", "7 ", "1.2.3", ".5", "0x10", "\n", "1\n", "9" * 30, "9" * 400)
FOREIGN_RECORDS = ("", "nobody", "a\n1\n2", "a\n1\n2\nRUNNING\n")
PLACES_OF_TIMES = {"acquire": (8,), "release": (1,), "park": (3,)}
"""Where each script is told a time."""


def perturbed(call: Call, seed: int) -> Call:
    """The call, later by an odd time, and with one or two things changed in what it finds or is told."""
    draw = random.Random(seed)
    call = _later(call, draw.randrange(3_000_000_000_000_000, 3_000_000_100_000_000))
    for _ in range(draw.choice((1, 1, 2))):
        change = draw.choice((_at_a_boundary, _beside_foreigners, _of_another, _without_a_key, _told_other))
        call = change(call, draw)
    if call.name in TURNS and draw.random() < 0.7:
        call = crowded(call, draw)
    return call._replace(store=purge(call.store, call.now))


def _later(call: Call, us: int) -> Call:
    """Everything as much later: odd, so that what is cut or rounded shows."""
    store = call.store
    for number in range(1 + len(store.others)):
        permit = at(store, number)
        record = permit.record
        if isinstance(record, Record) and record.deadline:
            record = record._replace(deadline=record.deadline + us, since=record.since + us)
            value = permit.value
            if value is not None and NUMBER.fullmatch(value) and value == seconds(record.deadline - us):
                value = seconds(record.deadline)
            elif value is not None and NUMBER.fullmatch(value):
                value = str(int(float(value)) + us // SECOND)
            permit = permit._replace(record=record, value=value)
        elif permit.value is not None and NUMBER.fullmatch(permit.value):
            permit = permit._replace(value=str(int(float(permit.value)) + us // SECOND))
        store = at(permit, number)
    store = store._replace(
        mark=store.mark and store.mark._replace(expiry=_ms_later(store.mark.expiry, us)),
        done=store.done and store.done._replace(expiry=_ms_later(store.done.expiry, us)),
        starts=store.starts._replace(
            times=tuple((began + us, *rest) for began, *rest in store.starts.times),  # type: ignore[misc]
            expiry=_ms_later(store.starts.expiry, us),
        ),
        line=store.line._replace(places=tuple((since + us, task) for since, task in store.line.places)),
        calls=store.calls._replace(
            fields=tuple((task, _moved(text, us)) for task, text in store.calls.fields)
        ),
    )
    for number in range(1 + len(store.others)):
        permit = at(store, number)
        store = at(
            permit._replace(
                expiry=_ms_later(permit.expiry, us), record_expiry=_ms_later(permit.record_expiry, us)
            ),
            number,
        )
    told = list(call.told)
    for place in PLACES_OF_TIMES.get(call.name, ()):
        if told[place] not in ("", "0"):
            told[place] = str(int(told[place]) + us)
    return call._replace(store=store, now=call.now + us, told=tuple(told))


def _ms_later(expiry: int | None, us: int) -> int | None:
    return None if expiry is None else expiry + us // MS + 1


def _moved(text: str, us: int) -> str:
    if text.startswith("@"):
        return f"@{int(text[1:]) + us}"
    vain, since, call = text.split("|", 2)
    return f"{vain}|{int(since) + us}|{call}"


def _number(call: Call, draw: random.Random) -> int:
    return draw.randrange(1 + len(call.store.others))


def _at_a_boundary(call: Call, draw: random.Random) -> Call:
    """At the moment at which something ends, or a microsecond beside it."""
    permit = at(call.store, _number(call, draw))
    moments = [permit.holder.deadline] * 2
    if permit.value is not None and NUMBER.fullmatch(permit.value):
        second = int(min(float(permit.value), 1e11))
        moments += [second * SECOND, (second + 1) * SECOND]
    moments += [int(text[1:]) for _, text in call.store.calls.fields if text.startswith("@")] * 2
    moments += [since - AWAY for since, _ in call.store.line.places if since >= AWAY] * 2
    period = int(call.told[10].partition("/")[2] or 0) if call.name == "acquire" else SECOND
    moments += [began + period - ahead for began, *_ in call.store.starts.times for ahead in (0, 20_000)]
    rest_until = int(call.told[1]) if call.name == "release" else 0
    moments = [moment for moment in (*moments, rest_until) if abs(moment - call.now) < 3_600 * SECOND]
    return call._replace(now=draw.choice(moments) + draw.choice((-1, 0, 0, 1))) if moments else call


def _beside_foreigners(call: Call, draw: random.Random) -> Call:
    """A value or a record that another program has written."""
    number, second = _number(call, draw), call.now // SECOND + draw.choice((-3, -2, -1, 0, 1, 2, 3))
    permit = at(call.store, number)
    numbers = (str(second), f"{second}.5", f"{second}.", f"00{second}", "0")
    kind = draw.random()
    if kind < 0.55:
        permit = permit._replace(value=draw.choice(numbers), expiry=None)
    elif kind < 0.75:
        permit = permit._replace(value=draw.choice(GARBAGE), expiry=None)
    elif kind < 0.85:
        permit = permit._replace(value=NOT_A_STRING, expiry=None)
    elif call.name not in ("renew", "hold"):
        permit = permit._replace(record=draw.choice(FOREIGN_RECORDS), record_expiry=None)
    call = call._replace(store=at(permit, number))
    return _at_a_boundary(call, draw) if kind < 0.25 else call


def _of_another(call: Call, draw: random.Random) -> Call:
    """A record of another token, state, or task to which it is handed."""
    number = _number(call, draw)
    permit = at(call.store, number)
    if not isinstance(permit.record, Record):
        return call
    tokens = (*["a|0|0", "a|1|1", "b|0|1", "one", "b|b|0|4", "|0|5"], *call.told[:1], permit.record.token)
    states = ("running", "running", "resting", "held_for_retry", "handed", "failed", "released", "gone")
    record = permit.record._replace(token=draw.choice(tokens), state=draw.choice(states))
    if record.state == "handed":
        record = record._replace(info=draw.choice(("a", "b", "b|b")))
    return call._replace(store=at(permit._replace(record=record), number))


def _without_a_key(call: Call, draw: random.Random) -> Call:
    """Something is gone: the value, the record, the mark, the calls, the ticket."""
    number = _number(call, draw)
    permit, store = at(call.store, number), call.store
    what = draw.randrange(6)
    if what < 2:
        store = at(permit._replace(value=None, expiry=None), number)
    elif what == 2:
        store = at(permit._replace(record=None, record_expiry=None), number)
    elif what == 3:
        store = store._replace(mark=None, done=None)
    elif what == 4:
        store = store._replace(calls=Store().calls)
    else:
        store = store._replace(tickets=())
    return call._replace(store=store)


def _told_other(call: Call, draw: random.Random) -> Call:
    """Another lease, proof of death, or what else it may be told."""
    told = list(call.told)
    if call.name == "acquire":
        holder = at(call.store, _number(call, draw)).holder.token
        place, word = draw.choice(
            ((1, draw.choice(("1", "1500", "1234567"))), (4, holder), (5, draw.choice(("-", "x0", "y"))),
             (6, draw.choice(("0", "60001"))), (7, draw.choice(("0", "1000"))), (9, draw.choice(("0", "1"))),
             (11, "1"), (12, "1"), (0, draw.choice((holder or "one", "a|0|0", "b|1|3", "one"))))
        )  # fmt: skip
        if (place == 7 and len(call.keys) < 7) or (place == 0 and told[7] != "0"):
            return call  # only a task may stand in line
        told[place] = word
        if place == 7 and task_of(told[0])[0] is None:
            told[7] = "0"
    elif call.name in ("renew", "hold"):
        told[draw.choice((1, 2))] = draw.choice(("1", "1500", "1234567"))
    elif call.name == "release":
        told[2] = draw.choice(("1", "60000"))
    elif call.name in ("park", "leave"):
        copies = ("-", "x0", "y") if call.name == "leave" else ("", "-", "x0", "y")  # no courier leaves
        told[1], told[2] = draw.choice(("0", "1")), draw.choice(copies)
        told[7 if call.name == "park" else 4] = draw.choice(("0", "1"))
    elif call.name == "serve":
        holder = at(call.store, _number(call, draw)).holder
        told[4], told[5] = draw.choice(("", holder.token)), draw.choice(("", holder.info, "a"))
        told[6] = draw.choice(("", "", "unsent"))
    return call._replace(told=tuple(told))
