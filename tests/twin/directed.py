"""Cases that are written down: a state of the keys, and one call that random cases make in it too rarely."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from tests.model.injected import EPOCH, set_clock
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
from tests.twin.cases import (
    BARE,
    CALLS,
    DONE,
    HOUR,
    KEYS,
    LINE,
    LINES,
    LINES_EPOCH,
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
from tests.twin.lines import Lines
from tests.twin.pace import MOST_STARTS, Pace

NOW = EPOCH + 10 * SECOND
NO_PERMIT = Permit()


class Directed(NamedTuple):
    """A call of a script, and what it finds at NOW."""

    verb: str
    keys: tuple[str, ...]
    store: Store
    sent: dict[str, Any]
    lines: Lines = Lines()

    def steps(self, shas: dict[str, str]) -> Iterator[Step]:
        """The operations, as those of a random case."""
        case = Case(0, shas)
        case.now = NOW
        yield case.plain("start", [("DEL", *KEYS), *set_clock(NOW)])
        case.store, case.lines = self.store, self.lines
        due = [("ZADD", LINES[task], moment, entry) for task, moment, entry in self.lines.due]
        yield case.plain("found", [*_commands(self.store), *due])
        if due:
            yield case.swept(self.verb, self.keys, **self.sent)
            return
        count = 1 + sum(bool({*pair} & {*self.keys[2:]}) for pair in PAIRS[1:])
        several = {"count": count} if count > 1 or STARTS in self.keys else {}
        case.focus = PAIRS.index(self.keys[:2]) if self.keys[:2] in PAIRS else 0
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


# What a script is told by a call of the task `a`, or by another; with terms, of several permits.
def _acquire(store: Store, **asked: Any) -> Directed:
    keys = (*PAIR, *WAITING, MARK, TICKETS["a"], PERMITS, *(SEVERAL if "terms" in asked else ()))
    call = {"token": "a|0|1f", "lease": 1_500, "retention": 1_000, "info": "{}", "dead": "", **BARE}
    return Directed("acquire", keys, store, {**call, **asked})


def _serve(store: Store, **told: Any) -> Directed:
    keys = (*PAIR, *WAITING, PERMITS, *(SEVERAL if "terms" in told else ()))
    service = {"token": "served", "hand_over": SECOND, "remember": REMEMBER_MS, "lease": 1_500}
    rest = {"dead": "", "away": "", "unsent": "", "terms": "1"}
    return Directed("serve", keys, store, {**service, **rest, **told})


def _park(store: Store, **told: Any) -> Directed:
    call = {"task": "a", "attempt": 0, "copy": "x1", "since": NOW - 5, "call": "call"}
    rest = {"remember": REMEMBER_MS, "terms": "1", "shared": "0"}
    return Directed("park", TO_PARK, store, {**call, **rest, **told})


def _leave(store: Store, **told: Any) -> Directed:
    message = {"task": "a", "attempt": 0, "copy": "x1", "remember": REMEMBER_MS, "shared": "0"}
    return Directed("leave", TO_PARK, store, {**message, **told})


SEVERAL = (STARTS, *OTHERS)
TO_PARK = (*PAIR, *WAITING, TICKETS["a"], PERMITS)
TWO = Known("2 2", REMEMBER_MS)
ONE_START = Starts(((NOW - 1, 0, 7),), NOW // MS + REMEMBER_MS)
FREES_IT = {
    "token": "a|0|1f", "rest_until": 0, "remember": REMEMBER_MS, "again": 0, "hand_over": 1, "done_for": 0
}  # fmt: skip
QUEUES = {"task_id": "a", "lease": REMEMBER_MS, "dedupe": "until_started"}

DIRECTED = (
    # An earlier delivery of the same task has succeeded.
    Directed(
        "forget", (DONE, RECORD), _store(_permit("a|0|1f", SECOND), done=_mark("a|0|2F")), {"token": "a|0|1f"}
    ),
    # Nothing is noted of a run that has not succeeded.
    Directed(
        "release",
        (*PAIR, *WAITING, MARK, PERMITS, DONE),
        _store(_permit("a|0|1f", SECOND)),
        FREES_IT,
    ),
    # Kept for one that asks again by itself: until it has.
    Directed(
        "release",
        (*PAIR, *WAITING),
        _store(_permit("a|0|1f", SECOND), line=((5, "b|b"),), calls=(("b|b", f"@{NOW + 1_000}"),)),
        FREES_IT,
    ),
    # It hands nothing over, and others wait.
    Directed(
        "release",
        (*PAIR, *WAITING),
        _store(_permit("a|0|1f", SECOND), line=((5, "b|b"),), calls=(("b|b", "0|5|call"),)),
        {**FREES_IT, "hand_over": ""},
    ),
    # It starts, and was woken in vain before, though nothing is kept of its call.
    _acquire(_store(ticket="0||2"), copy="x1", remember=REMEMBER_MS),
    # The holder has died, and others wait.
    _acquire(_store(_permit("one", SECOND), line=((5, "b|b"),), calls=(("b|b", "0|5|call"),)), dead="one"),
    # Handed in vain: to one that was to ask by itself; to one for the fortieth time.
    _acquire(_store(_permit("c", 0, "handed", "b|b"), calls=(("b|b", f"@{NOW}"),))),
    _acquire(_store(_permit("c", 0, "handed", "b|b"), calls=(("b|b", "40|5|call"),))),
    # Another call with its id may wait: this one wants to ask again; that one waits.
    _leave(_store(line=((5, "a"),), calls=(("a", f"@{NOW + 5}"),)), shared="1"),
    _leave(_store(line=((5, "a"),), calls=(("a", "2|5|call"),)), shared="1"),
    # It was woken in vain before: this attempt; the one before.
    _leave(_store(ticket="0||2")),
    _leave(_store(ticket="0||2"), attempt=1),
    _park(_store(ticket="0||2")),
    _park(_store(ticket="0||2"), attempt=1),
    # A call that has begun was woken in vain before: a message of it may come late.
    _park(_store(ticket="0|x1|2"), copy=""),
    # The lock that was kept for it is gone.
    _park(_store(_permit("c", SECOND, "handed", "a", value=None), calls=(("a", "0|5|call"),))),
    # The lock is kept for it, and nothing of its call: its courier puts it back.
    _park(_store(_permit("c", SECOND, "handed", "a")), copy=""),
    # It was kept for it, and another program has changed the value: its courier asks, or its message does.
    _park(
        _store(_permit("c", 0, "handed", "a", value=seconds(NOW + SECOND)), calls=(("a", "0|5|call"),)),
        copy="",
    ),
    _park(_store(_permit("c", 0, "handed", "a", value=seconds(NOW + SECOND)), calls=(("a", "0|5|call"),))),
    # It stands in line, and nothing is kept of its call; and the other way around.
    _park(_store(line=((5, "a"),)), copy=""),
    _park(_store(calls=(("a", "0|5|call"),)), copy=""),
    # Queued, and others wait for a lock that is nobody's: its value is gone; its deadline is now.
    Directed(
        "mark",
        (*PAIR, MARK, LINE, DONE),
        _store(_permit("one", SECOND, value=None), line=((5, "b|b"),), mark=_mark("b|b")),
        QUEUES,
    ),
    Directed(
        "mark",
        (*PAIR, MARK, LINE, DONE),
        _store(_permit("one", 0), line=((5, "b|b"),), mark=_mark("b|b")),
        QUEUES,
    ),
    # The wake-up of the first in line is on its way all the same.
    _serve(_store(line=((5, "a"),), calls=(("a", "0+|5|call"),))),
    # What is handed to it ends now: its start is kept for it no more, and another's is.
    _acquire(
        _store(
            _permit("c", 0, "handed", "a"),
            others=(_permit("d", SECOND, "handed", "b|b"),),
            known=Known("2 2:1/3000000", REMEMBER_MS),
        ),
        terms="2:1/3000000",
    ),
    # Classic: its second is over just now.
    _serve(_store(Permit(seconds(NOW - SECOND)), ((5, "a"),), (("a", "0|5|call"),))),
    # Handed in vain: to one that was to ask by itself; to one for the fortieth time.
    _serve(_store(_permit("c", 0, "handed", "b|b"), calls=(("b|b", f"@{NOW}"),))),
    _serve(_store(_permit("c", 0, "handed", "b|b"), calls=(("b|b", "40|5|call"),))),
    # Another permit is free beside that which was handed over in vain, and is gone.
    _serve(
        _store(calls=(("a", "0|5|call"),), others=(_permit("c", 0, "handed", "a", None),), known=TWO),
        terms="2",
    ),
    # Another program has made a list of that.
    _serve(
        _store(calls=(("a", "0|5|call"),), others=(_permit("c", 0, "handed", "a", NOT_A_STRING),), known=TWO),
        terms="2",
    ),
    # That is beyond the limit: nobody has it, and the one that is free is one of those that there are.
    _serve(
        _store(
            line=((5, "b|b"),),
            calls=(("a", "0|5|call"), ("b|b", "0|5|call")),
            others=(_permit("c", 0, "handed", "a"),),
            known=Known("2 1", REMEMBER_MS),
        ),
        terms="1",
    ),
    # What is handed to another: to one that was woken late; to one that was not.
    *(
        _acquire(
            _store(
                _permit("one", 5), ticket=ticket, others=(_permit("c", SECOND, "handed", "b|b"),), known=TWO
            ),
            copy="x1",
            terms="2",
        )
        for ticket in ("0||0", "")
    ),
    # Its own has lapsed, beside one that is free: another call waits; it does itself.
    *(
        _acquire(_store(line=line, others=(_permit("a|0|2F", 0),), known=TWO), terms="2")
        for line in (((5, "b|b"),), ((5, "a"),))
    ),
    # One whose holder has died: it is held; it has lapsed, and so has another.
    *(
        _acquire(
            _store(_permit("one", left), others=(_permit("c", left // 2),), known=TWO), dead="one", terms="2"
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
        _acquire(_store(known=TWO, starts=Starts(((NOW - 1, 0, 7),), expiry)), terms=f"2:1/{period}")
        for period, expiry in ((3 * SECOND, NOW // MS + 4_500), (1_234, None))
    ),
    # A start is just now; another counts no more just now, ahead of when it really does not.
    *(
        _serve(
            _store(
                _permit("one", 5 * SECOND),
                line=((5, "a"),),
                calls=(("a", "0|5|call"),),
                others=(_permit("c", 5 * SECOND),),
                known=TWO,
                starts=Starts(((at, 0, 7),), NOW // MS + REMEMBER_MS),
            ),
            terms="2:2/3000000",
        )
        for at in (NOW, NOW - 3 * SECOND + Pace.ahead)
    ),
    # Held for its retry, which may not start yet: a little longer; no more than an hour past the start.
    *(
        _acquire(
            _store(_permit("a|0|1f", left, "held_for_retry"), known=TWO, starts=ONE_START),
            token="a|1|1f",
            terms="2:1/3000000",
        )
        for left in (SECOND, HOUR + SECOND)
    ),
    # More starts than are kept.
    _acquire(
        _store(
            known=TWO, starts=Starts(tuple((NOW - 5_000 + at, 0, 7) for at in range(MOST_STARTS + 5)), None)
        ),
        terms="2:2000/3000000",
    ),
    # No start is left for its own, which was held for its retry and has lapsed; nor for one woken late.
    *(
        _acquire(
            _store(permit, ticket=ticket, known=TWO, starts=ONE_START),
            token="a|1|1f",
            copy="x1",
            terms="2:1/3000000",
        )
        for permit, ticket in ((_permit("a|0|1f", 0, "held_for_retry"), ""), (NO_PERMIT, "0||0"))
    ),
    # One is, for what is handed to it: its value is gone.
    _acquire(
        _store(_permit("c", SECOND, "handed", "a", value=None), known=TWO, starts=ONE_START),
        terms="2:1/3000000",
    ),
    # What is handed to it may start soon, so that it keeps it; or a microsecond later, and gives it back.
    *(
        _acquire(
            _store(
                _permit("c", SECOND, "handed", "a"),
                calls=(("a", "0|5|call"),),
                known=TWO,
                starts=Starts(((NOW - 3 * SECOND + ahead, 0, 7),), NOW // MS + REMEMBER_MS),
            ),
            terms="2:1/3000000",
        )
        for ahead in (Pace.ahead, Pace.ahead + 1)
    ),
    # Held for a retry: another delivery of that attempt comes; a token of no task, when that has lapsed.
    _acquire(
        _store(_permit("a|0|1f", SECOND, "held_for_retry"), known=TWO, starts=ONE_START),
        dead="a|0|1f",
        terms="2:1/3000000",
    ),
    _acquire(_store(_permit("a|0|1f", 0, "held_for_retry")), token="one", terms="2:1/3000000"),
    # What is handed to another ends now: no start is kept for that.
    _acquire(_store(others=(_permit("c", 0, "handed", "b|b"),), known=TWO), terms="2:1/3000000"),
    # Woken late, it takes the start of another, to which a permit is handed.
    _acquire(
        _store(ticket="0||0", others=(_permit("c", SECOND, "handed", "b|b"),), known=TWO),
        copy="x1",
        terms="2:1/3000000",
    ),
    # A start is left: that of a call that cannot come; not that of one which may come; one that is soon.
    *(
        _serve(
            _store(
                permit, line=((5, "a"),), calls=(("a", "0|5|call"),), others=others, known=TWO, starts=starts
            ),
            away="b|b" if permit.value else "",
            terms="2:1/3000000",
        )
        for permit, others, starts in (
            (_permit("c", SECOND, "handed", "b|b"), (), Starts()),
            (NO_PERMIT, (_permit("c", 2 * SECOND, "handed", "b|b"),), Starts()),
            (NO_PERMIT, (), Starts(((NOW - 3 * SECOND + Pace.ahead, 0, 7),), NOW // MS + REMEMBER_MS)),
        )
    ),
    # Of two sets of paced tasks the first has what is due next.
    Directed(
        "sweep",
        (LINES_EPOCH, LINES[""], LINES["a"]),
        Store(),
        {"interval": SECOND, "remember": REMEMBER_MS, "epoch": 7, "paced": (1, 2), "tasks": ("", "a")},
        Lines((("", NOW + 5, "lock.foo"), ("a", NOW + 6, "lock.foo"))),
    ),
)
