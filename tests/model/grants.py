"""How a lock is granted, or a start is paced: clauses of the contract of acquire.lua."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.model.edits import (
    before,
    given_back,
    highest_used,
    in_line,
    kept,
    line_lasts,
    out_of_line,
    permits_in,
    starts_last,
    with_call,
    without_calls,
)
from tests.model.line import LOOKED_AT, next_of, passed_over, waiter, waiting
from tests.model.lock import Call
from tests.model.permits import (
    AHEAD,
    NEVER,
    at,
    earliest_start,
    ends,
    heir_of,
    is_to_come,
    limit_of,
    pace_of,
    permit_in,
    said_of,
    speaks_of_its_value,
)
from tests.model.rules import rule_of
from tests.model.store import (
    MS,
    NOT_A_STRING,
    NUMBER,
    SECOND,
    Known,
    Record,
    Start,
    Starts,
    Store,
    Ticket,
    task_of,
    up,
)
from tests.model.terms import PAUSE_KEEPS, terms_of
from tests.simulation.scripts import Script

if TYPE_CHECKING:
    from tests.model.contract import Played

GRANTED = ("acquired", "resumed", "taken_over")
PUT_OFF = ("paced", "paused")
HOUR = 3_600 * SECOND
STARTS_KEPT = 1_100


class Caller(NamedTuple):
    """Who asks for a lock, and how it stands to those who wait.

    `place`: as whom it stands in line; None if that place is another call's. `first`: who is first in line of
    those that still ask, or are to be woken; empty if too many before it are gone.
    """

    task: str | None
    ticket: Ticket | None
    woken: bool
    place: str | None
    first: str | None

    def is_first(self, heir: str | None) -> bool:
        """Whether it passes nobody."""
        return self.first is None or (
            self.place is not None and (self.woken or self.place in (heir, self.first))
        )


def caller_of(call: Call) -> Caller:
    """Who asks, by what an acquire is told."""
    task = task_of(call.told[0])[0]
    if len(call.keys) <= 2:
        return Caller(task, None, False, task, None)
    ticket = dict(call.store.tickets).get(call.keys[5][7:].decode())
    waits = ticket is not None and not ticket.begun_by
    is_anothers = call.told[12] == "1" and not waits and waiter(call.store, task) is not None
    calls = dict(call.store.calls.fields)
    first, _, gone = next_of(waiting(call.store), calls, call.now, 0)
    first = "" if first is None and len(gone) == LOOKED_AT else first
    return Caller(task, ticket, waits and call.told[5] != "-", None if is_anothers else task, first)


class Choice(NamedTuple):
    """How well a permit fits the caller: the lowest rank does best, then that which ends first."""

    rank: int
    till: int
    number: int


OWN, ITS, LAPSED, FREE, DEAD, ANOTHERS, HELD = 1, 2, 3, 4, 5, 6, 9
"""Ranks: the caller's own, that which is kept for it, its own that has ended or rests, a free one, that of a
holder that is dead, that which is kept for another while the caller was woken late, and any other."""


def rank_of(call: Call, caller: Caller, permit: Store) -> int:
    """How well a permit fits the caller. Its own that has ended does not fit it past a line."""
    record, is_free = permit.holder, not ends(permit, call.now)
    is_live = permit.value is not None and call.now < record.deadline
    other = FREE if is_free else HELD
    if (permit.value is not None and not NUMBER.fullmatch(permit.value)) or not (is_live or is_free):
        return HELD
    if record.state == "handed":
        if caller.place is not None and record.info == caller.place:
            return ITS
        return ANOTHERS if is_live and caller.woken else other
    if not speaks_of_its_value(permit, call.now):
        return other
    if record.token == call.told[0] or (caller.task is not None and task_of(record.token)[0] == caller.task):
        if is_live and record.state != "resting":
            return OWN
        return LAPSED if is_live or caller.is_first(None) else other
    is_dead = is_live and record.state == "running" and record.token == call.told[4] != ""
    return DEAD if is_dead else other


def choice_of(call: Call, caller: Caller) -> Choice:
    """The permit that fits best; beyond the limit only one that is the caller's."""
    limit = limit_of(terms_of(call).counts)
    ranked = (
        Choice(rank_of(call, caller, permit), ends(permit, call.now), number)
        for number, permit in enumerate(permits_in(call))
    )
    return min(each for each in ranked if each.number < limit or each.rank <= LAPSED)


def is_about_a_permit(call: Call, found: Played) -> bool:
    """Whether an acquire has chosen a permit."""
    return call.name == "acquire" and not found.error and found.word not in ("stale", "more")


def chooses_the_best_permit(script: Script, call: Call, found: Played) -> bool:
    """Its own, or that which is kept for it, then the first that is free, or else the one that ends first.

    The reply says how many others may be had now, which is held for longest, and the limit that counts.
    """
    if not is_about_a_permit(call, found):
        return True
    choice, reply, terms = choice_of(call, caller_of(call)), found.words, terms_of(call).counts
    permits = permits_in(call)
    if permit_in(reply) != choice.number or (len(reply) > 8) != (len(reply) > 4 and len(permits) > 1):
        return False
    if len(reply) < 9:
        return True
    free = {n for n, permit in enumerate(permits) if not ends(permit, call.now)}
    held = [n for n, permit in enumerate(permits) if n not in free and isinstance(permit.record, Record)]
    if any(permit.value == NOT_A_STRING for permit in permits):
        return True  # whether that is free is not asked of all
    longest = min(held, key=lambda n: permits[n].holder.since, default=None)
    spare = sum(n < limit_of(terms) and n != choice.number for n in free)
    promised = sum(is_to_come(permit, call.now) for n, permit in enumerate(permits) if n != choice.number)
    if earliest_start(found.after.starts, terms, call.now, promised, AHEAD):
        spare = 0
    told = [None, None, "0"]
    if longest is not None:
        told = [permits[longest].value, said_of(permits[longest], call.now), str(longest)]
    return (int(reply[9]), reply[10:]) == (spare, [*told, str(limit_of(terms))])


class Turn(NamedTuple):
    """When the caller may start: 0 if now; what it is told until then; and whether it has come too early even
    for one that is handed its permit.
    """

    till: int = 0
    word: str = ""
    is_early: bool = False


def turn_of(call: Call, caller: Caller, choice: Choice) -> Turn:
    """When a caller may start under the permit that fits best. One that may not have it is not put off."""
    permit = at(call.store, choice.number)
    if choice.rank == HELD or rule_of(call, permit) in ("held", "again"):
        return Turn()
    promised = sum(is_to_come(each, call.now) for each in permits_in(call))
    if is_to_come(permit, call.now):
        promised -= 1
    elif caller.woken:
        promised = max(promised - 1, 0)
    _, terms, paused = terms_of(call)
    till = max(earliest_start(call.store.starts, terms, call.now, promised), paused)
    word = "paused" if paused else "paced" if till else ""
    return Turn(till, word, choice.rank == ITS and till - AHEAD > call.now)


def starts_at_its_time(script: Script, call: Call, found: Played) -> bool:
    """`paced` or `paused` is said if, and only if, it is too early; and until when, and of which own lock."""
    if not is_about_a_permit(call, found):
        return True
    caller = caller_of(call)
    choice = choice_of(call, caller)
    turn, reply = turn_of(call, caller, choice), found.words
    if not turn.word or found.word != turn.word:
        return not turn.word and found.word not in PUT_OFF
    old, new = at(call.store, choice.number), at(found.after, choice.number)
    is_own = choice.rank in (OWN, LAPSED)
    is_held = is_own and choice.rank == OWN and old.holder.state == "held_for_retry"
    record = said_of(new if is_held else old, call.now) if is_own else None
    return (turn.till, new.value if is_own else None, record) == (int(reply[1]), reply[4], reply[5])


def nobody_passes_the_line(script: Script, call: Call, found: Played) -> bool:
    """`line` is said to who would pass others that wait: for a lock that nobody living has."""
    if call.name != "acquire" or found.error or found.word in ("stale", "more", *PUT_OFF):
        return True
    caller = caller_of(call)
    number = choice_of(call, caller).number if call.verb == "acquire#" else 0
    permit = at(call.store, number)
    is_nobodys = rule_of(call, permit) in ("free", "expired", "dead")
    return (found.word == "line") == (is_nobodys and not caller.is_first(heir_of(permit)))


def says_when_it_ends(script: Script, call: Call, found: Played) -> bool:
    """Of a lock that is held it is said when it ends: 0 if its value says no time."""
    if call.name != "acquire" or found.error or found.word != "held":
        return True
    reply = found.words
    permit = at(call.store, permit_in(reply))
    till = ends(permit, call.now)
    return int(reply[1]) == (0 if till == NEVER else till)


def _after_acquire(call: Call, found: Played) -> Store:
    """How many permits are known, and what comes of a grant, a pace, or a place in line to ask again."""
    store, caller = before(call), caller_of(call)
    if found.word in ("stale", "more"):
        return store
    choice = choice_of(call, caller)
    if call.verb == "acquire#":
        store = _permits_known(call, store, choice, found.after)
    if found.word in PUT_OFF:
        return _after_pace(call, store, caller, choice)
    if found.word == "held" and call.told[7] != "0":
        return _after_lingering(call, store, caller)
    return _after_grant(call, store, caller, choice.number, found.word) if found.word in GRANTED else store


def _permits_known(call: Call, store: Store, choice: Choice, after: Store) -> Store:
    """How many permits are in use, and the own terms: for as long as the caller's, and a minute at least."""
    lease, retention, (own, terms, _) = int(call.told[1]), int(call.told[2]), terms_of(call)
    highest = max(limit_of(terms), choice.number + 1, highest_used(call, after))
    if highest <= 1 and own == "1":
        return store._replace(known=None)
    ms = 0 if choice.rank == HELD else up(lease, MS) + retention
    text, old = f"{highest} {own}", store.known
    if old is not None and old.text == text and old.lease >= ms:
        return store
    return store._replace(known=Known(text, max(old.lease if old else 0, ms, 60_000)))


def _after_pace(call: Call, store: Store, caller: Caller, choice: Choice) -> Store:
    """It is held for its retry for longer, or gives back what it was handed; the starts last for who asks."""
    turn, retention, (_, terms, paused) = turn_of(call, caller, choice), int(call.told[2]), terms_of(call)
    permit = at(store, choice.number)
    record = permit.holder
    if turn.is_early:
        store = _handed_back(call, store, choice.number)
    elif choice.rank == OWN and record.state == "held_for_retry":
        to_its_start = min(record.deadline + turn.till - call.now, turn.till + HOUR)
        longer = call.now + PAUSE_KEEPS if paused else to_its_start
        moved = record._replace(deadline=max(record.deadline, longer))
        store = kept(store, choice.number, moved, retention)
    return starts_last(store, terms, call.now // MS)


def _handed_back(call: Call, store: Store, number: int) -> Store:
    """A permit that was handed to who may not start yet is nobody's, and that one has its place again."""
    record = at(store, number).holder
    store = given_back(store, number, record._replace(state="released"), call.now // MS + 60_000)
    place = waiter(store, record.info)
    if place is None:
        return without_calls(store, record.info)
    return line_lasts(in_line(store, record.info, place.since), store.calls.lease)


def _after_lingering(call: Call, store: Store, caller: Caller) -> Store:
    """It stands in line to ask again; one that is to be woken has its place."""
    task = caller.task or ""
    if waiter(store, task) is not None:
        return store
    store = with_call(store, task, f"@{call.now + int(call.told[7])}")
    store = store._replace(calls=store.calls._replace(lease=max(store.calls.lease, 60_000)))
    return line_lasts(in_line(store, task, int(call.told[8]) or call.now), 60_000)


def _after_grant(call: Call, store: Store, caller: Caller, number: int, word: str) -> Store:
    """The permit is the caller's; its mark and its place end, its message is known, its start is noted."""
    token, lease, retention = call.told[0], int(call.told[1]), int(call.told[2])
    old = at(store, number)
    fence = old.holder.fence if word == "resumed" else max(old.holder.fence + 1, call.now)
    mine = Record(token, call.now + lease, fence, "running", call.now, call.told[3])
    store = kept(store, number, mine, retention)
    if call.verb == "acquire#":
        store = store._replace(starts=_starts_after(call, (call.now, number, fence)))
    if len(call.keys) <= 2:
        return store
    if store.mark is not None and store.mark.task_id == caller.task and call.told[11] != "1":
        store = store._replace(mark=None)
    store = _after_overtaking(call, store, caller, old)
    heir, place = heir_of(old), caller.place
    misses = _misses_before(call, caller)
    if place is not None and (caller.ticket or waiting(call.store) or place == heir):
        known = waiter(store, place)
        misses = str(known.misses) if known else misses
        store = without_calls(out_of_line(store, place), place)
    return _begun(call, store, caller, misses)


def _starts_after(call: Call, start: Start) -> Starts:
    """The starts with this one, without later ones, as far as the longest period asks for that is known."""
    starts, period = call.store.starts, pace_of(terms_of(call).counts)[1]
    if not period:
        return starts
    now_ms = call.now // MS
    keep = max(period, (starts.expiry - now_ms) * MS if starts.times and starts.expiry else 0)
    times = {each for each in starts.times if each[0] <= call.now} | {start}
    ordered = sorted(times, key=lambda each: (each[0], b"%d#%d#%d" % each))
    first = ordered[-STARTS_KEPT][0] if len(ordered) >= STARTS_KEPT else 0
    left = tuple(each for each in ordered if each[0] >= max(call.now - keep, first))
    return Starts(left, now_ms + up(max(keep, 2 * period), MS))


def _after_overtaking(call: Call, store: Store, caller: Caller, old: Store) -> Store:
    """Who was to have the lock has its place again, or is passed over for a while if it has let it lapse."""
    heir = heir_of(old)
    if heir is None or heir == caller.place:
        return store
    known = waiter(store, heir)
    if known is None:
        return without_calls(store, heir)
    if call.now < old.holder.deadline:
        store = with_call(store, heir, str(known._replace(comes=True)))
        store = in_line(store, heir, known.since)
    else:
        place, known = passed_over(known, call.now, int(call.told[1]))
        store = in_line(with_call(store, heir, str(known)), heir, place)
    return line_lasts(store, store.calls.lease)


def _misses_before(call: Call, caller: Caller) -> str:
    """How often this attempt was woken and did not come, by its ticket."""
    is_same = caller.ticket is not None and caller.ticket.attempt == int(call.told[9])
    return caller.ticket.misses if is_same and caller.ticket else "0"


def _begun(call: Call, store: Store, caller: Caller, misses: str) -> Store:
    """Which of its messages has begun the attempt, if that is to be known."""
    copy, remember, attempt = call.told[5], int(call.told[6]), int(call.told[9])
    if caller.ticket is None and not remember:
        return store
    lease = remember or (caller.ticket.lease if caller.ticket else 0)
    task = call.keys[5][7:].decode()
    tickets = {**dict(store.tickets), task: Ticket(f"{attempt}|{copy}|{misses}", lease)}
    return store._replace(tickets=tuple(sorted(tickets.items(), key=lambda each: each[0].encode())))


def grants_that_alone(script: Script, call: Call, found: Played) -> bool:
    """Nothing changes but what a grant, or a refusal, stands for: all other keys are as they were."""
    if call.name != "acquire" or found.error:
        return True
    return found.after == _after_acquire(call, found)


CLAUSES = (
    chooses_the_best_permit,
    starts_at_its_time,
    nobody_passes_the_line,
    says_when_it_ends,
    grants_that_alone,
)
