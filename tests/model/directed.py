"""Cases that are written down: a state of the keys, and one call that random cases make in it too rarely."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.model.cases import (
    BARE,
    CALLS,
    DONE,
    KEYS,
    LINE,
    MARK,
    OTHERS,
    PAIR,
    PAIRS,
    PERMITS,
    RECORD,
    REMEMBER_MS,
    STARTS,
    TICKETS,
    WAITING,
    Case,
    Step,
)
from tests.model.injected import EPOCH, set_clock
from tests.model.pace import Pace
from tests.model.store import (
    MS,
    NOT_A_STRING,
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
    seconds,
)

NOW = EPOCH + 10 * SECOND
NO_PERMIT = Permit()


class Directed(NamedTuple):
    """A call of a script, and what it finds at NOW."""

    verb: str
    keys: tuple[str, ...]
    store: Store
    sent: dict[str, Any]

    def steps(self, shas: dict[str, str]) -> Iterator[Step]:
        """The operations, as those of a random case."""
        case = Case(0, shas)
        case.now = NOW
        yield case.plain("start", [("DEL", *KEYS), *set_clock(NOW)])
        case.store = self.store
        yield case.plain("found", list(_commands(self.store)))
        count = 1 + sum(bool({*pair} & {*self.keys[2:]}) for pair in PAIRS[1:])
        several = {"count": count} if count > 1 or STARTS in self.keys else {}
        case.focus = [*PAIRS, self.keys[:2]].index(self.keys[:2]) % len(PAIRS)
        yield case.script(self.verb, self.keys, **self.sent, **several)


def _commands(store: Store) -> Iterator[tuple[Any, ...]]:
    """What makes the keys what they are."""
    for names, permit in zip(PAIRS, (store[:4], *store.others)):
        for name, text, expiry in zip(names, permit[::2], permit[1::2]):
            if text is not None:
                yield ("RPUSH", name, "x") if text == NOT_A_STRING else ("SET", name, text)
            if expiry is not None:
                yield ("PEXPIREAT", name, expiry)
    for name, mark in ((MARK, store.mark), (DONE, store.done)):
        if mark is not None:
            yield ("SET", name, mark.task_id, "PX", (mark.expiry or 0) - NOW // MS)
    for task, ticket in store.tickets:
        yield ("SET", TICKETS[task], ticket.text, "PX", ticket.lease)
    if store.known is not None:
        yield ("SET", PERMITS, store.known.text, "PX", store.known.lease)
    for since, task in store.line.places:
        yield ("ZADD", LINE, since, task)
    for task, call in store.calls.fields:
        yield ("HSET", CALLS, task, call)
    for at, *rest in store.starts.times:
        yield ("ZADD", STARTS, at, "#".join(map(str, (at, *rest))))
    for name, lease in ((LINE, store.line.lease), (CALLS, store.calls.lease)):
        if lease >= 0:
            yield ("PEXPIRE", name, lease)
    if store.starts.expiry is not None:
        yield ("PEXPIRE", STARTS, store.starts.expiry - NOW // MS)


def _permit(
    token: str, left: int, state: str = "running", info: str = "{}", value: str | None = ""
) -> Permit:
    """A permit whose record has so many microseconds left; its value says so too, or something else."""
    deadline, expiry = NOW + left, NOW // MS + 100_000
    value = seconds(deadline) if value == "" else value
    record = Record(token, deadline, 7, state, NOW - SECOND, info)
    return Permit(value, value and expiry, record, expiry)


def _store(
    permit: Permit = NO_PERMIT,
    line: tuple[tuple[int, str], ...] = (),
    calls: tuple[tuple[str, str], ...] = (),
    ticket: str = "",
    **more: Any,
) -> Store:
    """What is found of one permit, of the line, of the task `a`, and of the rest."""
    tickets = (("a", Ticket(ticket, 2 * REMEMBER_MS)),) if ticket else ()
    waiting = {
        "line": Line(line, REMEMBER_MS if line else -1),
        "calls": Calls(calls, REMEMBER_MS if calls else -1),
    }
    return Store(*permit, **waiting, tickets=tickets, **more)


def _mark(task_id: str) -> Mark:
    return Mark(task_id, NOW // MS + REMEMBER_MS)


def _call(**asked: Any) -> dict[str, Any]:
    """What an acquire is told by a call of the task `a`, or by another."""
    return {"token": "a|0|1f", "lease": 1_500, "retention": 1_000, "info": "{}", "dead": "", **BARE, **asked}


def _leaves(**told: Any) -> dict[str, Any]:
    return {"task": "a", "attempt": 0, "copy": "x1", "remember": REMEMBER_MS, "shared": "0", **told}


def _parks(**told: Any) -> dict[str, Any]:
    call = {
        "task": "a",
        "attempt": 0,
        "copy": "x1",
        "since": NOW - 5,
        "call": "call",
        "remember": REMEMBER_MS,
    }
    return {**call, "terms": "1", "shared": "0", **told}


def _serves(**told: Any) -> dict[str, Any]:
    told = {"lease": 1_500, "dead": "", "away": "", "unsent": "", "terms": "1", **told}
    return {"token": "served", "hand_over": SECOND, "remember": REMEMBER_MS, **told}


LOCK_OF_TASK = (*PAIR, *WAITING, MARK, TICKETS["a"], PERMITS)
TWO = Known("2 2", REMEMBER_MS)
SEVERAL = (STARTS, *OTHERS)
TO_SERVE = (*PAIR, *WAITING, PERMITS)
TO_PARK = (*PAIR, *WAITING, TICKETS["a"], PERMITS)

DIRECTED = (
    # A success and a run that are both no task's are not of the same task.
    Directed("forget", (DONE, RECORD), _store(_permit("one", SECOND), done=_mark("two")), {"token": "one"}),
    # An earlier delivery of the same task has succeeded.
    Directed(
        "forget", (DONE, RECORD), _store(_permit("a|0|1f", SECOND), done=_mark("a|0|2F")), {"token": "a|0|1f"}
    ),
    # Nothing is noted of a run that has not succeeded.
    Directed(
        "release",
        (*PAIR, *WAITING, MARK, PERMITS, DONE),
        _store(_permit("a|0|1f", SECOND)),
        {
            "token": "a|0|1f",
            "rest_until": 0,
            "remember": REMEMBER_MS,
            "again": 0,
            "hand_over": 1,
            "done_for": 0,
        },
    ),
    # Kept for one that asks again by itself: until it has.
    Directed(
        "release",
        (*PAIR, *WAITING),
        _store(_permit("a|0|1f", SECOND), line=((5, "b|b"),), calls=(("b|b", f"@{NOW + 1_000}"),)),
        {
            "token": "a|0|1f",
            "rest_until": 0,
            "remember": REMEMBER_MS,
            "again": 0,
            "hand_over": 1,
            "done_for": 0,
        },
    ),
    # It starts, and was woken in vain before, though nothing is kept of its call.
    Directed("acquire", LOCK_OF_TASK, _store(ticket="0||2"), _call(copy="x1", remember=REMEMBER_MS)),
    # The holder has died, and others wait.
    Directed(
        "acquire",
        LOCK_OF_TASK,
        _store(_permit("one", SECOND), line=((5, "b|b"),), calls=(("b|b", "0|5|call"),)),
        _call(dead="one"),
    ),
    # Handed in vain: to one that was to ask by itself; to one for the fortieth time.
    Directed(
        "acquire",
        LOCK_OF_TASK,
        _store(_permit("c", 0, "handed", "b|b"), calls=(("b|b", f"@{NOW}"),)),
        _call(),
    ),
    Directed(
        "acquire",
        LOCK_OF_TASK,
        _store(_permit("c", 0, "handed", "b|b"), calls=(("b|b", "40|5|call"),)),
        _call(),
    ),
    # Another call with its id may wait: this one wants to ask again; that one waits.
    Directed("leave", TO_PARK, _store(line=((5, "a"),), calls=(("a", f"@{NOW + 5}"),)), _leaves(shared="1")),
    Directed("leave", TO_PARK, _store(line=((5, "a"),), calls=(("a", "2|5|call"),)), _leaves(shared="1")),
    # It was woken in vain before: this attempt; the one before.
    Directed("leave", TO_PARK, _store(ticket="0||2"), _leaves()),
    Directed("leave", TO_PARK, _store(ticket="0||2"), _leaves(attempt=1)),
    Directed("park", TO_PARK, _store(ticket="0||2"), _parks()),
    Directed("park", TO_PARK, _store(ticket="0||2"), _parks(attempt=1)),
    # A call that has begun was woken in vain before: a message of it may come late.
    Directed("park", TO_PARK, _store(ticket="0|x1|2"), _parks(copy="")),
    # The lock that was kept for it is gone.
    Directed(
        "park",
        TO_PARK,
        _store(_permit("c", SECOND, "handed", "a", value=None), calls=(("a", "0|5|call"),)),
        _parks(),
    ),
    # The lock is kept for it, and nothing of its call: its courier puts it back.
    Directed("park", TO_PARK, _store(_permit("c", SECOND, "handed", "a")), _parks(copy="")),
    # It was kept for it, and another program has changed the value: its courier asks, or its message does.
    Directed(
        "park",
        TO_PARK,
        _store(_permit("c", 0, "handed", "a", value=seconds(NOW + SECOND)), calls=(("a", "0|5|call"),)),
        _parks(copy=""),
    ),
    Directed(
        "park",
        TO_PARK,
        _store(_permit("c", 0, "handed", "a", value=seconds(NOW + SECOND)), calls=(("a", "0|5|call"),)),
        _parks(),
    ),
    # It stands in line, and nothing is kept of its call; and the other way around.
    Directed("park", TO_PARK, _store(line=((5, "a"),)), _parks(copy="")),
    Directed("park", TO_PARK, _store(calls=(("a", "0|5|call"),)), _parks(copy="")),
    # Queued, and others wait for a lock that is nobody's: its value is gone; its deadline is now.
    Directed(
        "mark",
        (*PAIR, MARK, LINE, DONE),
        _store(_permit("one", SECOND, value=None), line=((5, "b|b"),), mark=_mark("b|b")),
        {"task_id": "a", "lease": REMEMBER_MS, "dedupe": "until_started"},
    ),
    Directed(
        "mark",
        (*PAIR, MARK, LINE, DONE),
        _store(_permit("one", 0), line=((5, "b|b"),), mark=_mark("b|b")),
        {"task_id": "a", "lease": REMEMBER_MS, "dedupe": "until_started"},
    ),
    # The wake-up of the first in line is on its way all the same.
    Directed("serve", TO_SERVE, _store(line=((5, "a"),), calls=(("a", "0+|5|call"),)), _serves()),
    # What is handed to it ends now: its start is kept for it no more, and another's is.
    Directed(
        "acquire",
        (*LOCK_OF_TASK, *SEVERAL),
        _store(
            _permit("c", 0, "handed", "a"),
            others=(_permit("d", SECOND, "handed", "b|b"),),
            known=Known("2 2:1/3000000", REMEMBER_MS),
        ),
        _call(terms="2:1/3000000"),
    ),
    # Classic: its second is over just now.
    Directed(
        "serve", TO_SERVE, _store(Permit(seconds(NOW - SECOND)), ((5, "a"),), (("a", "0|5|call"),)), _serves()
    ),
    # Handed in vain: to one that was to ask by itself; to one for the fortieth time.
    Directed(
        "serve", TO_SERVE, _store(_permit("c", 0, "handed", "b|b"), calls=(("b|b", f"@{NOW}"),)), _serves()
    ),
    Directed(
        "serve", TO_SERVE, _store(_permit("c", 0, "handed", "b|b"), calls=(("b|b", "40|5|call"),)), _serves()
    ),
    # Another permit is free beside that which was handed over in vain, and is gone.
    Directed(
        "serve",
        (*TO_SERVE, *SEVERAL),
        _store(calls=(("a", "0|5|call"),), others=(_permit("c", 0, "handed", "a", None),), known=TWO),
        _serves(terms="2"),
    ),
    # Another program has made a list of that.
    Directed(
        "serve",
        (*TO_SERVE, *SEVERAL),
        _store(calls=(("a", "0|5|call"),), others=(_permit("c", 0, "handed", "a", NOT_A_STRING),), known=TWO),
        _serves(terms="2"),
    ),
    # That is beyond the limit: nobody has it, and the one that is free is one of those that there are.
    Directed(
        "serve",
        (*TO_SERVE, *SEVERAL),
        _store(
            line=((5, "b|b"),),
            calls=(("a", "0|5|call"), ("b|b", "0|5|call")),
            others=(_permit("c", 0, "handed", "a"),),
            known=Known("2 1", REMEMBER_MS),
        ),
        _serves(),
    ),
    # What is handed to another: to one that was woken late; to one that was not.
    *(
        Directed(
            "acquire",
            (*LOCK_OF_TASK, *SEVERAL),
            _store(
                _permit("one", 5), ticket=ticket, others=(_permit("c", SECOND, "handed", "b|b"),), known=TWO
            ),
            _call(copy="x1", terms="2"),
        )
        for ticket in ("0||0", "")
    ),
    # Its own has lapsed, beside one that is free: another call waits; it does itself.
    *(
        Directed(
            "acquire",
            (*LOCK_OF_TASK, *SEVERAL),
            _store(line=line, others=(_permit("a|0|2F", 0),), known=TWO),
            _call(terms="2"),
        )
        for line in (((5, "b|b"),), ((5, "a"),))
    ),
    # One whose holder has died: it is held; it has lapsed, and so has another.
    *(
        Directed(
            "acquire",
            (*LOCK_OF_TASK, *SEVERAL),
            _store(_permit("one", left), others=(_permit("c", left // 2),), known=TWO),
            _call(dead="one", terms="2"),
        )
        for left in (SECOND, 0)
    ),
    # What is known of the permits lasts as long as one that is kept.
    *(
        Directed(
            verb,
            (*PAIRS[1], PERMITS),
            _store(others=(_permit("a|0|1f", SECOND),), known=TWO),
            {"token": "a|0|1f", "lease": SECOND, "retention": 2 * REMEMBER_MS},
        )
        for verb in ("renew", "hold")
    ),
    # It may not start yet: what is known of the starts lasts long enough; it would last for ever.
    *(
        Directed(
            "acquire",
            (*LOCK_OF_TASK, *SEVERAL),
            _store(known=TWO, starts=Starts(((NOW - 1, 0, 7),), expiry)),
            _call(terms=f"2:1/{period}"),
        )
        for period, expiry in ((3 * SECOND, NOW // MS + 4_500), (1_234, None))
    ),
    # A start is just now; another counts no more just now, ahead of when it really does not.
    *(
        Directed(
            "serve",
            (*TO_SERVE, *SEVERAL),
            _store(
                _permit("one", 5 * SECOND),
                line=((5, "a"),),
                calls=(("a", "0|5|call"),),
                others=(_permit("c", 5 * SECOND),),
                known=TWO,
                starts=Starts(((at, 0, 7),), NOW // MS + REMEMBER_MS),
            ),
            _serves(terms="2:2/3000000"),
        )
        for at in (NOW, NOW - 3 * SECOND + Pace.ahead)
    ),
)
