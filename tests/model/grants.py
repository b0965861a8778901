"""What the verbs of a holder may change, and how a lock is granted: clauses of their contract."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from tests.model.layout import laid_out, read_back
from tests.model.line import AWAY, Waiter, waiter, waiting
from tests.model.lock import Call
from tests.model.permits import at, limit_of, pace_of
from tests.model.rules import rule_of
from tests.model.store import (
    MS,
    NOT_A_STRING,
    NUMBER,
    SECOND,
    Calls,
    Known,
    Line,
    Mark,
    Record,
    Start,
    Starts,
    Store,
    Ticket,
    seconds,
    task_of,
    up,
)
from tests.simulation.scripts import Script

if TYPE_CHECKING:
    from tests.model.contract import Played

GRANTED = ("acquired", "resumed", "taken_over")
HOUR = 3_600 * SECOND
AHEAD = 20_000
"""How long (us) before its start a call may be handed a permit."""
NEVER = 10**17
"""When a value ends that says no time."""
STARTS_KEPT = 1_100
LINGERS_MORE = 50_000
"""How long (us) a lock is kept for one that asks by itself, after it was to ask."""


# What is written


def with_permit(
    store: Store, number: int, value: str | None, expiry: int | None, record: Record, lasts: int
) -> Store:
    """The keys with another value and record of a permit, and when each expires."""
    permit = at(store, number)._replace(value=value, expiry=expiry, record=record, record_expiry=lasts)
    return at(permit, number)


def kept(store: Store, number: int, record: Record, retention: int) -> Store:
    """A permit that somebody has: its value is the deadline's, and both keys last longer by the retention."""
    expiry = up(record.deadline, MS) + retention
    return with_permit(store, number, seconds(record.deadline), expiry, record, expiry)


def given_back(store: Store, number: int, record: Record, expiry: int) -> Store:
    """A permit that is nobody's: of whose it was the record alone says something, for a while."""
    return with_permit(store, number, None, None, record._replace(deadline=0), expiry)


def in_line(store: Store, task: str, place: int) -> Store:
    """The line with a task at this place."""
    places = [(since, other) for since, other in store.line.places if other != task]
    ordered = sorted([*places, (place, task)], key=lambda each: (each[0], each[1].encode()))
    return store._replace(line=store.line._replace(places=tuple(ordered)))


def out_of_line(store: Store, *tasks: str) -> Store:
    """The line without these tasks."""
    places = tuple(each for each in store.line.places if each[1] not in tasks)
    return store._replace(line=store.line._replace(places=places) if places else Line())


def with_call(store: Store, task: str, text: str) -> Store:
    """The calls with this text for a task."""
    fields = {**dict(store.calls.fields), task: text}
    ordered = tuple(sorted(fields.items(), key=lambda each: each[0].encode()))
    return store._replace(calls=store.calls._replace(fields=ordered))


def without_calls(store: Store, *tasks: str) -> Store:
    """The calls without those of these tasks."""
    fields = tuple(each for each in store.calls.fields if each[0] not in tasks)
    return store._replace(calls=store.calls._replace(fields=fields) if fields else Calls())


def line_lasts(store: Store, ms: int) -> Store:
    """The line lasts so long at least, if there is one."""
    line = store.line
    return store._replace(line=line._replace(lease=max(line.lease, ms))) if line.places else store


def permits_last(store: Store, ms: int) -> Store:
    """How many permits there are is known for so long at least, if it is known."""
    known = store.known
    return store._replace(known=known and known._replace(lease=max(known.lease, ms)))


def before(call: Call) -> Store:
    """The keys as the call finds them."""
    return read_back(dict(laid_out(call.store, call.now // MS)), call.now // MS)


# Who asks for a lock


class Caller(NamedTuple):
    """Who asks for a lock, and how it stands to those who wait.

    `place`: as whom it stands in line; None if that place is another call's. `first`: who is first in line.
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
    first = next(iter(waiting(call.store)), None)
    return Caller(task, ticket, waits and call.told[5] != "-", None if is_anothers else task, first)


def heir_of(permit: Store) -> str | None:
    """Whom a permit is handed to."""
    return permit.holder.info if permit.holder.state == "handed" else None


# Which permit


def ends(call: Call, permit: Store) -> int:
    """When a permit comes free by itself; 0 if it has."""
    value, deadline = permit.value, permit.holder.deadline
    if value is None:
        return 0
    if not NUMBER.fullmatch(value):
        return NEVER
    is_ours = call.now < deadline or value == seconds(deadline)
    till = deadline if is_ours and deadline else int((min(float(value), 1e11) + 1) * SECOND)
    return till if call.now < till else 0


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
    record, is_free = permit.holder, not ends(call, permit)
    is_live = permit.value is not None and call.now < record.deadline
    other = FREE if is_free else HELD
    if (permit.value is not None and not NUMBER.fullmatch(permit.value)) or not (is_live or is_free):
        return HELD
    if record.state == "handed":
        if caller.place is not None and record.info == caller.place:
            return ITS
        return ANOTHERS if is_live and caller.woken else other
    if permit.value is None or not (is_live or permit.value == seconds(record.deadline)):
        return other
    if record.token == call.told[0] or (caller.task is not None and task_of(record.token)[0] == caller.task):
        if is_live and record.state != "resting":
            return OWN
        return LAPSED if is_live or caller.is_first(None) else other
    is_dead = is_live and record.state == "running" and record.token == call.told[4] != ""
    return DEAD if is_dead else other


def permits_in(call: Call) -> list[Store]:
    """The permits whose keys the call is told."""
    return [
        at(call.store, number) for number in range(1 + sum(key.startswith(b"lock#") for key in call.keys))
    ]


def choice_of(call: Call, caller: Caller) -> Choice:
    """The permit that fits best; beyond the limit only one that is the caller's."""
    limit = limit_of(call.told[10])
    ranked = (
        Choice(rank_of(call, caller, permit), ends(call, permit), number)
        for number, permit in enumerate(permits_in(call))
    )
    return min(each for each in ranked if each.number < limit or each.rank <= LAPSED)


def words(found: Played) -> list[Any]:
    """The reply, as text."""
    reply = found.reply.split(b" ") if isinstance(found.reply, bytes) else found.reply
    return [word.decode() if isinstance(word, bytes) else word for word in reply]


def is_about_a_permit(call: Call, found: Played) -> bool:
    """Whether an acquire has chosen among several permits."""
    return call.verb == "acquire#" and not found.error and found.word not in ("stale", "more")


def chooses_the_best_permit(script: Script, call: Call, found: Played) -> bool:
    """Its own, or that which is kept for it, then the first that is free, or else the one that ends first.

    The reply says how many others are free, and which is held for longest.
    """
    if not is_about_a_permit(call, found):
        return True
    choice, reply = choice_of(call, caller_of(call)), words(found)
    if len(reply) < 5:
        return int(reply[3]) == choice.number
    if int(reply[8]) != choice.number:
        return False
    permits = permits_in(call)
    free = {n for n, permit in enumerate(permits) if not ends(call, permit)}
    held = [n for n, permit in enumerate(permits) if n not in free and isinstance(permit.record, Record)]
    if any(permit.value == NOT_A_STRING for permit in permits):
        return True  # whether that is free is not asked of all
    longest = min(held, key=lambda n: permits[n].holder.since, default=None)
    spare = sum(n < limit_of(call.told[10]) and n != choice.number for n in free)
    if longest is None:
        return (int(reply[9]), reply[10:]) == (spare, [None, None, 0])
    told = [permits[longest].value, str(permits[longest].record), longest]
    return (int(reply[9]), reply[10:]) == (spare, told)


# The pace


def earliest_start(call: Call, promised: int, ahead: int = 0) -> int:
    """When one more may start, at the earliest, if so many others are about to; 0 if it may now.

    Of the starts so far as many must be a period ago as leave room for it.
    """
    count, period = pace_of(call.told[10])
    if not count:
        return 0
    room = max(count - promised, 1)
    past = [began for began, *_ in call.store.starts.times if began <= call.now]
    till = past[-room] + period - ahead if len(past) >= room else 0
    if promised >= count:
        till = max(till, call.now + min(period, SECOND))
    return till if till > call.now else 0


class Turn(NamedTuple):
    """When the caller may start: 0 if now; and whether it has come too early even for one that is handed its
    permit.
    """

    till: int
    is_early: bool


def turn_of(call: Call, caller: Caller, choice: Choice) -> Turn:
    """When a caller may start under the permit that fits best. One that may not have it is not paced."""
    permit = at(call.store, choice.number)
    record = permit.holder
    is_later = (
        record.state == "held_for_retry"
        and caller.task is not None
        and task_of(call.told[0])[1] > task_of(record.token)[1]
    )
    is_dead = record.state == "running" and record.token == call.told[4]
    if choice.rank == HELD or (choice.rank == OWN and not is_later and not is_dead):
        return Turn(0, False)
    promised = sum(_is_promised(call, each) for each in permits_in(call))
    if record.state == "handed" and call.now < record.deadline:
        promised -= 1
    elif caller.woken:
        promised = max(promised - 1, 0)
    is_early = choice.rank == ITS and earliest_start(call, promised, AHEAD) > 0
    return Turn(earliest_start(call, promised), is_early)


def _is_promised(call: Call, permit: Store) -> bool:
    is_live = permit.value not in (None, NOT_A_STRING) and call.now < permit.holder.deadline
    return is_live and permit.holder.state == "handed"


def starts_at_its_time(script: Script, call: Call, found: Played) -> bool:
    """`paced` is said if, and only if, it is too early to start; and until when, and of which own lock."""
    if not is_about_a_permit(call, found):
        return True
    caller = caller_of(call)
    choice = choice_of(call, caller)
    till = turn_of(call, caller, choice).till
    if not till or found.word != "paced":
        return (found.word == "paced") == bool(till)
    reply = words(found)
    old, new = at(call.store, choice.number), at(read_back(found.keys, call.now // MS), choice.number)
    is_own = choice.rank <= LAPSED and caller.task in (task_of(old.holder.token)[0], "")
    is_own = is_own and caller.task is not None
    is_held = is_own and choice.rank == OWN and old.holder.state == "held_for_retry"
    record = new.record if is_held else old.record
    told = (till, new.value if is_own else None, None if record is None else str(record))
    return told == (int(reply[1]), reply[4], reply[5])


def nobody_passes_the_line(script: Script, call: Call, found: Played) -> bool:
    """`line` is said to who would pass others that wait: for a lock that nobody living has."""
    if call.name != "acquire" or found.error or found.word in ("stale", "more", "paced"):
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
    reply = words(found)
    permit = at(call.store, int(reply[8]) if "#" in call.verb else 0)
    till = ends(call, permit)
    return int(reply[1]) == (0 if till == NEVER else till)


# What an acquire changes


def _after_acquire(call: Call, found: Played) -> Store:
    """How many permits are known, and what comes of a grant, a pace, or a place in line to ask again."""
    store, caller, number = before(call), caller_of(call), 0
    if found.word in ("stale", "more"):
        return store
    choice = Choice(FREE, 0, 0)
    if call.verb == "acquire#":
        choice = choice_of(call, caller)
        store, number = _permits_known(call, store, choice), choice.number
    if found.word == "paced":
        return _after_pace(call, store, caller, choice)
    if found.word == "held" and call.told[7] != "0":
        return _after_lingering(call, store, caller)
    return _after_grant(call, store, caller, number, found.word) if found.word in GRANTED else store


def _permits_known(call: Call, store: Store, choice: Choice) -> Store:
    """How many permits are in use, and the terms: for as long as the caller's, and a minute at least."""
    lease, retention, terms = int(call.told[1]), int(call.told[2]), call.told[10]
    used = [n for n, permit in enumerate(permits_in(call)) if permit.value not in (None, NOT_A_STRING)]
    highest = max(limit_of(terms), choice.number + 1, *(n + 1 for n in used))
    if highest <= 1 and terms == "1":
        return store._replace(known=None)
    ms = 0 if choice.rank == HELD else up(lease, MS) + retention
    text, old = f"{highest} {terms}", store.known
    if old is not None and old.text == text and old.lease >= ms:
        return store
    return store._replace(known=Known(text, max(old.lease if old else 0, ms, 60_000)))


def _after_pace(call: Call, store: Store, caller: Caller, choice: Choice) -> Store:
    """It is held for its retry for longer, or gives back what it was handed; the starts last for who asks."""
    turn, retention = turn_of(call, caller, choice), int(call.told[2])
    permit = at(store, choice.number)
    record = permit.holder
    if turn.is_early:
        store = _handed_back(call, store, choice.number)
    elif choice.rank == OWN and record.state == "held_for_retry":
        longer = min(record.deadline + turn.till - call.now, turn.till + HOUR)
        moved = record._replace(deadline=max(record.deadline, longer))
        store = kept(store, choice.number, moved, retention)
    starts, now_ms, ms = store.starts, call.now // MS, up(pace_of(call.told[10])[1], MS)
    if starts.times and (starts.expiry is None or starts.expiry - now_ms < ms):
        store = store._replace(starts=starts._replace(expiry=now_ms + 2 * ms))
    return store


def _handed_back(call: Call, store: Store, number: int) -> Store:
    """A permit that was handed to who may not start yet is nobody's, and that one has its place again."""
    record = at(store, number).holder
    store = given_back(store, number, record._replace(state="released"), call.now // MS + 60_000)
    place = waiter(store, record.info)
    store = store if place is None else in_line(store, record.info, place.since)
    return line_lasts(store, store.calls.lease)


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
    vain = _vain_before(call, caller)
    if place is not None and (caller.ticket or caller.first or place == heir):
        known = waiter(store, place)
        vain = str(known.vain) if known else vain
        store = without_calls(out_of_line(store, place), place)
    return _begun(call, store, caller, vain)


def _starts_after(call: Call, start: Start) -> Starts:
    """The starts with this one, without later ones, as far as the longest period asks for that is known."""
    starts, period = call.store.starts, pace_of(call.told[10])[1]
    if not period:
        return starts
    now_ms = call.now // MS
    keep = max(period, (starts.expiry - now_ms) * MS if starts.times and starts.expiry else 0)
    times = {each for each in starts.times if each[0] <= call.now} | {start}
    ordered = sorted(times, key=lambda each: (each[0], b"%d#%d#%d" % each))[-STARTS_KEPT:]
    oldest = max(call.now - keep, ordered[0][0] if len(ordered) == STARTS_KEPT else 0)
    left = tuple(each for each in sorted(times, key=lambda e: (e[0], b"%d#%d#%d" % e)) if each[0] >= oldest)
    return Starts(left, now_ms + up(max(keep, 2 * period), MS))


def _after_overtaking(call: Call, store: Store, caller: Caller, old: Store) -> Store:
    """Who was to have the lock has its place again, or is passed over for a while if it has let it lapse."""
    heir = heir_of(old)
    if heir is None or heir == caller.place:
        return store
    known = waiter(store, heir)
    if known is None:
        store = without_calls(store, heir)
    elif call.now < old.holder.deadline:
        store = with_call(store, heir, str(known._replace(comes=True)))
        store = in_line(store, heir, known.since)
    else:
        store = with_call(store, heir, str(Waiter(known.vain + 1, False, known.since, known.call)))
        store = in_line(store, heir, AWAY + call.now + min(int(call.told[1]) * 2**known.vain, HOUR))
    return line_lasts(store, store.calls.lease)


def _vain_before(call: Call, caller: Caller) -> str:
    """How often this attempt was woken in vain, by its ticket."""
    is_same = caller.ticket is not None and caller.ticket.attempt == int(call.told[9])
    return caller.ticket.vain if is_same and caller.ticket else "0"


def _begun(call: Call, store: Store, caller: Caller, vain: str) -> Store:
    """Which of its messages has begun the attempt, if that is to be known."""
    copy, remember, attempt = call.told[5], int(call.told[6]), int(call.told[9])
    if caller.ticket is None and not remember:
        return store
    lease = remember or (caller.ticket.lease if caller.ticket else 0)
    task = call.keys[5][7:].decode()
    tickets = {**dict(store.tickets), task: Ticket(f"{attempt}|{copy}|{vain}", lease)}
    return store._replace(tickets=tuple(sorted(tickets.items(), key=lambda each: each[0].encode())))


# What a release changes


class Heir(NamedTuple):
    """Whom a lock is handed to, for how long (us); and who has not asked again in time."""

    task: str | None
    keep: int
    gone: list[str]


def heir_in_line(call: Call) -> Heir:
    """The first in line that is to be woken, or may still ask again; nobody behind ten that are gone."""
    gone: list[str] = []
    if len(call.keys) <= 2 or call.told[4] == "":
        return Heir(None, 0, gone)
    known = dict(call.store.calls.fields)
    for task in waiting(call.store)[:10]:
        text = known.get(task, "")
        if not text.startswith("@"):
            return Heir(task, int(call.told[4]), gone)
        if call.now < int(text[1:]):
            return Heir(task, int(text[1:]) - call.now + LINGERS_MORE, gone)
        gone.append(task)
    return Heir(None, 0, gone)


def _is_resent(call: Call) -> bool:
    """Whether a release has done nothing: its holder has released already, or it is another's."""
    record = at(call.store, number_of(call)).holder
    return record.token != call.told[0] or record.state not in ("running", "failed")


def number_of(call: Call) -> int:
    """Whose keys a script of one permit is told."""
    return int(call.keys[0].partition(b"#")[2] or 0)


def _after_release(call: Call, found: Played) -> Store:
    """The lock rests, is handed to the first in line, or is nobody's; a retry is marked, a success noted."""
    store, number, now_ms = before(call), number_of(call), call.now // MS
    if _is_resent(call) or found.word == "lost":
        return store
    rest_until, remember = int(call.told[1]), int(call.told[2])
    record, heir = at(store, number).holder, heir_in_line(call)
    if found.word == "resting":
        store = kept(store, number, record._replace(deadline=rest_until, state="resting"), remember)
    elif heir.task is not None:
        record = record._replace(
            deadline=call.now + heir.keep, state="handed", since=call.now, info=heir.task
        )
        store = out_of_line(kept(store, number, record, remember), heir.task)
    else:
        store = given_back(store, number, record._replace(state=found.word), now_ms + remember)
    if len(call.keys) > 5 and (deadline := at(store, number).holder.deadline):
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
    if len(call.keys) > 6 and done_for and was_running and found.word != "gone":
        store = store._replace(done=Mark(call.told[0], now_ms + done_for))
    return store


def says_more_only_if_there_is(script: Script, call: Call, found: Played) -> bool:
    """A release says one word alone if nobody waits: there is nothing to tell."""
    if call.name != "release" or found.error or found.word != "released":
        return True
    waits = heir_in_line(call).task is not None
    leaves_line = len(call.keys) > 2 and call.told[4] == "" and bool(before(call).line.places)
    return (len(words(found)) == 1) == (not _is_resent(call) and not waits and not leaves_line)


# What the others change


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


def _after_free(call: Call, found: Played) -> list[Store]:
    """A permit that is held for the task's retry is nobody's: which of several is not said."""
    store, expiry = before(call), call.now // MS + int(call.told[1])
    if found.word in ("lost", "more"):
        return [store]
    permits = permits_in(call)
    owned = [number for number, permit in enumerate(permits) if _waits_for_retry(permit, call.told[0])]
    return [
        given_back(store, number, permits[number].holder._replace(state=found.word), expiry)
        for number in owned
    ]


def _waits_for_retry(permit: Store, task: str) -> bool:
    return permit.holder.state == "held_for_retry" and task_of(permit.holder.token)[0] == task


def _after_mark(call: Call, found: Played) -> Store:
    """The mark is the task's, and lasts for its lease at least."""
    store, due = before(call), call.now // MS + int(call.told[1])
    if found.word not in ("marked", "extended"):
        return store
    old = store.mark and store.mark.expiry
    return store._replace(mark=Mark(call.told[0], max(old or 0, due)))


def _after_unmark(call: Call, found: Played) -> Store:
    """The mark is gone."""
    return before(call)._replace(mark=None) if found.word == "freed" else before(call)


_AFTER: dict[str, Callable[[Call, Any], Store | list[Store]]] = {
    "acquire": _after_acquire,
    "release": _after_release,
    "renew": _after_renew,
    "hold": _after_hold,
    "free": _after_free,
    "mark": _after_mark,
    "extend": _after_mark,
    "unmark": _after_unmark,
}


def changes_that_alone(script: Script, call: Call, found: Played) -> bool:
    """Nothing changes but what the answer stands for: other keys, places and expiries are as they were."""
    expected = _AFTER.get(call.name)
    if expected is None or (found.error and call.name == "acquire"):
        return True
    after = read_back(found.keys, call.now // MS)
    if found.error:
        return after == before(call)
    wanted = expected(call, found)
    return after in wanted if isinstance(wanted, list) else after == wanted


def stalls_only_a_line(script: Script, call: Call, found: Played) -> bool:
    """`stalled` is said if calls wait for a lock that nobody living has, by any of its permits."""
    if call.name != "mark" or found.word not in ("queued", "stalled"):
        return True
    first, *rest = permits_in(call)
    is_idle = first.value is None or call.now >= first.holder.deadline or any(_is_past(call, p) for p in rest)
    return (found.word == "stalled") == (bool(before(call).line.places) and is_idle)


def _is_past(call: Call, permit: Store) -> bool:
    value = permit.value
    return value is None or (bool(NUMBER.fullmatch(value)) and call.now >= float(value) * SECOND)


def tells_whose_it_is(script: Script, call: Call, found: Played) -> bool:
    """A mark that is not made says whose run or success is in the way; of a run also value and record."""
    if call.name != "mark" or found.error:
        return True
    reply, holder = words(found), call.store.holder
    if found.word == "running":
        return reply[1:] == [task_of(holder.token)[0], str(call.now), call.store.value, str(holder)]
    if found.word == "done":
        token = call.store.done.task_id if call.store.done else ""
        task = task_of(token)[0]
        return reply[1:] == [token if task is None else task, str(call.now), None, None]
    return reply[3:] == [None, None]


CLAUSES = (
    chooses_the_best_permit,
    starts_at_its_time,
    nobody_passes_the_line,
    says_when_it_ends,
    says_more_only_if_there_is,
    stalls_only_a_line,
    tells_whose_it_is,
    changes_that_alone,
)
