"""What Redis holds of one lock, in Python. Units as in the scripts."""

import re
from functools import cache
from typing import Any, NamedTuple

SECOND = 1_000_000
MS = 1_000
NUMBER = re.compile(r"[0-9]+\.?[0-9]*")
NOT_A_STRING = "(not a string)"
_TASK_TOKEN = re.compile(r"(.*)\|([0-9]+)\|[0-9a-fA-F]+", re.DOTALL)


class Record(NamedTuple):
    """What the record says of a holder; times in microseconds."""

    token: str
    deadline: int
    fence: int
    state: str
    since: int
    info: str = ""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


NOBODY = Record("", 0, 0, "", 0)


class Mark(NamedTuple):
    """A queued call, one that has succeeded, what is known of the newest, or live terms: a task id, a token,
    or that text; and the millisecond at which the key expires (None: never).

    The task id is NOT_A_STRING if a foreign program made a list of the key.
    """

    task_id: str
    expiry: int | None


class Line(NamedTuple):
    """Who waits for the lock, since when, in order; behind them, from AWAY on, those that are passed over.

    `lease`: the milliseconds for which the key was to last; -1: it has no TTL. No test lets so much time pass
    that anything is forgotten of those who wait.
    """

    places: tuple[tuple[int, str], ...] = ()
    lease: int = -1


class Calls(NamedTuple):
    """What each waiter is woken with, in order of its id (`misses|since|call`, see Waiter).

    Or `@` and the time until which it asks by itself. Of live terms: each scope's text.
    """

    fields: tuple[tuple[str, str], ...] = ()
    lease: int = -1


class Ticket(NamedTuple):
    """`attempt|copy|misses`: the attempt that waits, the message that has begun it, its misses."""

    text: str
    lease: int

    @property
    def attempt(self) -> int:
        """Which attempt waits, or has begun."""
        return int(self.text.split("|")[0])

    @property
    def begun_by(self) -> str:
        """By which of its messages; empty if it waits."""
        return self.text.split("|")[1]

    @property
    def misses(self) -> str:
        """How often it was woken and did not come."""
        return self.text.split("|")[2]


class Permit(NamedTuple):
    """A permit beside the first: its value and record, as a lock has them."""

    value: str | None = None
    expiry: int | None = None
    record: Record | str | None = None
    record_expiry: int | None = None


class Known(NamedTuple):
    """What is known of a lock's permits, `highest terms`, and the milliseconds for which it lasts."""

    text: str
    lease: int


Start = tuple[int, int, int]
"""When (us) a call has started, under which permit and with which fence."""


class Starts(NamedTuple):
    """When (us) which permit has had a start under which fence, in order; and the expiry of all that."""

    times: tuple[Start, ...] = ()
    expiry: int | None = None


class Store(NamedTuple):
    """The keys of one lock. Expiries in milliseconds; None: the key has no TTL.

    `record` is text if a foreign program wrote it. `tickets` by task id, in order. `terms`: live terms of the
    key; `scopes`: those of tasks, which lie beside no lock.
    """

    value: str | None = None
    expiry: int | None = None
    record: Record | str | None = None
    record_expiry: int | None = None
    mark: Mark | None = None
    line: Line = Line()
    calls: Calls = Calls()
    tickets: tuple[tuple[str, Ticket], ...] = ()
    others: tuple[Permit, ...] = ()
    known: Known | None = None
    done: Mark | None = None
    starts: Starts = Starts()
    newest: Mark | None = None
    terms: Mark | None = None
    scopes: Calls = Calls()

    @property
    def holder(self) -> Record:
        """What the record says; NOBODY if there is none, or none of ours."""
        return self.record if isinstance(self.record, Record) else NOBODY


Answer = tuple[Store, tuple[Any, ...]]
"""What a verb gives back: the new keys and the reply."""


def purge(store: Store, now: int) -> Store:
    """What is left of the keys at a time."""
    value, expiry, record, record_expiry, mark = store[:5]
    now_ms = now // MS
    if expiry is not None and now_ms > expiry:
        value = expiry = None
    if record_expiry is not None and now_ms > record_expiry:
        record = record_expiry = None
    if mark is not None and mark.expiry is not None and now_ms > mark.expiry:
        mark = None
    left = Store(value, expiry, record, record_expiry, mark, *store[5:])
    if left.done is not None and left.done.expiry is not None and now_ms > left.done.expiry:
        left = left._replace(done=None)
    if left.newest is not None and left.newest.expiry is not None and now_ms > left.newest.expiry:
        left = left._replace(newest=None)
    if left.terms is not None and left.terms.expiry is not None and now_ms > left.terms.expiry:
        left = left._replace(terms=None)
    if left.starts.expiry is not None and now_ms > left.starts.expiry:
        left = left._replace(starts=Starts())
    if not store.others:
        return left
    others = [Permit(*purge(Store(*permit), now)[:4]) for permit in store.others]
    while others and others[-1] == Permit():
        others.pop()
    return left._replace(others=tuple(others))


def up(number: int, unit: int) -> int:
    """How many units cover a number."""
    return -(-number // unit)


def seconds(deadline: int) -> str:
    """A deadline as a value of the lock: the Unix second that is surely past it."""
    return str(up(deadline, SECOND))


@cache
def task_of(token: str) -> tuple[str | None, int]:
    """The task id and retry count in a token; (None, 0) if it is no task's."""
    match = _TASK_TOKEN.fullmatch(token)
    return (match[1], int(match[2])) if match else (None, 0)
