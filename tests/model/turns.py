"""The contract of the scripts that give turns: who has the next one, who waits where, and what stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from tests.model.edits import highest_used, permits_in
from tests.model.layout import PERMITS
from tests.model.line import AWAY, LOOKED_AT, next_of, passed_over, waiter, waiting
from tests.model.lock import Call
from tests.model.permits import (
    AHEAD,
    NEVER,
    at,
    earliest_start,
    ends,
    heir_of,
    in_use,
    is_to_come,
    limit_of,
    pace_of,
    said_of,
    terms_in,
)
from tests.model.rules import is_anothers
from tests.model.store import (
    MS,
    NOT_A_STRING,
    NUMBER,
    Known,
    Line,
    Permit,
    Record,
    Store,
    Ticket,
    seconds,
    task_of,
    up,
)
from tests.model.terms import looked_at, needs_starts, permits_needed, terms_of

if TYPE_CHECKING:
    from tests.model.contract import Clause, Played
    from tests.simulation.scripts import Script

REFUSED = ("more", "stale", "taken", "crowded")
TURNS = ("serve", "park", "look", "forget")


def _pair_of(permit: Store, now: int) -> list[str | None]:
    """A permit's value and record, as scripts tell them."""
    return [permit.value, said_of(permit, now)]


def _limit_of(call: Call) -> int:
    return limit_of(terms_of(call).counts)


def _is_live(permit: Store, now: int) -> bool:
    """Whether a permit is somebody's, as its record says."""
    return bool(permit.value and NUMBER.fullmatch(permit.value)) and now < permit.holder.deadline


def _has_missed(permit: Store, now: int) -> bool:
    """Whether a permit was handed to a task that has not come in time."""
    return heir_of(permit) is not None and ends(permit, now) == 0


def _best(call: Call, rank_of: Callable[[Store], int]) -> int:
    """The permit that fits best: rank 4 is a free one, 9 one that is held; of several that which ends first.

    Beyond the limit only one that fits better than a free one.
    """
    ranks = [(rank_of(permit), ends(permit, call.now)) for permit in permits_in(call)]
    return min((*rank, n) for n, rank in enumerate(ranks) if n < _limit_of(call) or rank[0] < 4)[2]


def _noted(call: Call, ms: int, after: Store) -> Known | None:
    """What is known of the permits once own terms are noted: for so long; if it is new, for a minute."""
    known, highest = call.store.known, max(_limit_of(call), highest_used(call, after))
    text, lease = f"{highest} {terms_of(call).own}", max(known.lease if known else 0, ms)
    if text == "1 1":
        return None
    return Known(text, lease if known and known.text == text else max(lease, 60_000))


def touches_nothing_else(script: Script, call: Call, found: Played) -> bool:
    """Each of these scripts changes a few keys, of which other clauses tell; all others stay as they are."""
    if call.name not in TURNS or found.error:
        return True
    may = {
        "park": ("line", "calls", "tickets", "known"),
        "serve": ("line", "calls", "known", "starts"),
        "forget": ("done",),
        "look": (),
    }
    before, after = call.store, found.after
    before = before._replace(**{name: getattr(after, name) for name in may[call.name]})
    if call.name == "serve" and found.word != "more":
        changed = Permit(*at(after, number := _served(call))[:4])
        before = at(at(before, number)._replace(**changed._asdict()), number)
    elif call.name == "forget":
        before = before._replace(**{name: getattr(after, name) for name in ("record", "others")})
    return before == after


def asks_for_all_permits(script: Script, call: Call, found: Played) -> bool:
    """A script that is told of fewer permits than are in use says `more`, and how many; else it does not."""
    needed = permits_needed(call)
    is_due = PERMITS in call.keys and (needed > len(permits_in(call)) or needs_starts(call))
    if call.name in (*TURNS, "acquire", "leave") and not found.error and is_due != (found.word == "more"):
        return False
    return found.word != "more" or found.words == ["more", str(needed)]


def has_its_ticket(script: Script, call: Call, found: Played) -> bool:
    """A task's ticket says which attempt waits, and how often it was woken and did not come.

    A courier may find that its call has begun, and was never woken in vain. Then the ticket is kept for a
    shorter time. Who does not wait, as another call does, has begun. Other tickets stay.
    """
    if call.name != "park" or found.error:
        return True
    task, attempt, copy = call.told[:3]
    ms, tickets = int(call.told[5]), dict(call.store.tickets)
    if found.word not in REFUSED:
        text = f"{attempt}||{_misses_of(call)}"
        tickets[task] = Ticket(text, ms)
    elif found.word == "crowded":
        tickets[task] = Ticket(f"{attempt}|{copy}|0", ms)
    elif (found.word, copy) == ("stale", ""):
        ticket = tickets[task]
        if (ticket.attempt, ticket.misses) == (int(attempt), "0"):
            tickets[task] = ticket._replace(lease=min(ticket.lease, ms))
    return dict(found.after.tickets) == tickets


def _misses_of(call: Call) -> str:
    """A task's misses: as its own place says, or else the ticket of this attempt."""
    task, attempt, shared = call.told[0], call.told[1], call.told[7]
    known, ticket = waiter(call.store, task), dict(call.store.tickets).get(task)
    if known is not None and not is_anothers(call, shared):
        return str(known.misses)
    return ticket.misses if ticket is not None and ticket.attempt == int(attempt) else "0"


def has_its_place(script: Script, call: Call, found: Played) -> bool:
    """A task that parks stands in line, and its call is known. Others stay.

    What its courier finds of its place and its call stays as it is, unless an earlier attempt has left it. A
    task that is told `handed` gets no place.
    """
    if call.name != "park" or found.error:
        return True
    task, attempt, copy, since, wakes = call.told[:5]
    places, calls, lasts = _places(call.store), dict(call.store.calls.fields), 0
    if found.word not in REFUSED:
        ticket, lasts = dict(call.store.tickets).get(task), int(call.told[5])
        is_known = waiter(call.store, task) and not (ticket and ticket.attempt < int(attempt))
        is_handed = found.word == "handed"
        if not is_known or not (is_handed or (copy == "" and task in places)):
            calls[task] = f"{_misses_of(call)}|{since}|{wakes}"
            places.update({} if is_handed else {task: int(since)})
    return _has_line(call, found, places, calls, lasts)


def _places(store: Store) -> dict[str, int]:
    return {task: since for since, task in store.line.places}


def _has_line(
    call: Call, found: Played, places: dict[str, int], calls: dict[str, str], lasts: int = 0, since: int = 0
) -> bool:
    """Whether these stand in line, and are woken with this; and both last for so long (ms) at least."""
    before, after = call.store, found.after
    lasts_line = max(before.line.lease, lasts, since)
    return (
        after.line.places == tuple(sorted((since, task) for task, since in places.items()))
        and dict(after.calls.fields) == calls
        and (not places or after.line.lease == lasts_line)
        and (not calls or after.calls.lease == max(before.calls.lease, lasts))
    )


def has_its_turn(script: Script, call: Call, found: Played) -> bool:
    """A task is told `handed` if a permit is kept for it, be it past its deadline, while nobody else has it.

    Its courier is told so whoever has it, unless the call has left the line. The reply tells of this permit;
    or else of a free one; or else of the one that ends first. It says the time, and the task's place.
    """
    if call.name != "park" or found.error or found.word == "more":
        return True
    task, _, copy, *_ = call.told

    def rank_of(permit: Store) -> int:
        until = ends(permit, call.now)
        is_its_own = heir_of(permit) == task and until in (0, permit.holder.deadline)
        return 1 if is_its_own else 9 if until else 4

    permit = at(call.store, _best(call, rank_of))
    deadline = permit.holder.deadline
    is_number = bool(NUMBER.fullmatch(permit.value or ""))
    is_nobody_elses = is_number and (call.now < deadline or permit.value == seconds(deadline))
    comes = task in dict(call.store.calls.fields) if copy == "" else is_nobody_elses
    is_handed = permit.value is not None and heir_of(permit) == task and comes
    is_right = found.word in REFUSED or (found.word == "handed") == is_handed
    line = [name for _, name in found.after.line.places]
    place = 1 + line.index(task) if task in line else 0
    return is_right and found.words[1:] == [str(call.now), *_pair_of(permit, call.now), str(place), None]


def notes_the_terms(script: Script, call: Call, found: Played) -> bool:
    """A task that parks notes its terms. A service notes new ones, or a new permit, if it hands that over."""
    if call.name not in ("park", "serve") or found.error:
        return True
    known = call.store.known
    if found.word != "more":
        service = _service_of(call) if call.name == "serve" else None
        if service is None:
            known = _noted(call, int(call.told[5]), found.after)
        elif service.heir is not None and (
            terms_of(call).own != terms_in(call.store) or service.number >= in_use(call.store)
        ):
            known = _noted(call, up(service.until - call.now, MS) + int(call.told[2]), found.after)
    return found.after.known == known


def forgets_this_run_alone(script: Script, call: Call, found: Played) -> bool:
    """This run's success is forgotten, or that of an earlier run of its task. The run has failed."""
    if call.name != "forget" or found.error:
        return True
    token, done, after = call.told[0], call.store.done, found.after
    began = {permit.holder.token: permit.holder.since for permit in permits_in(call)}
    counts = done is not None and (
        done.task_id == token
        or (
            task_of(done.task_id)[0] == task_of(token)[0] and began.get(done.task_id, 0) < began.get(token, 0)
        )
    )
    right = all(
        at(after, number).record == (_failed(permit) if permit.holder.token == token else permit.record)
        and at(after, number).record_expiry == permit.record_expiry
        and at(after, number).value == permit.value
        for number, permit in enumerate(permits_in(call))
    )
    return (
        right and after.done == (None if counts else done) and found.word == ("freed" if counts else "lost")
    )


def _failed(permit: Store) -> Record:
    record = permit.holder
    return record._replace(state="failed") if record.state == "running" else record


class Service(NamedTuple):
    """Where a permit goes: to the heir, who is the next in line, and for whom it is kept until then.

    `is_due`: whether nobody has it. `in_vain`: the task for which it was kept. `gone`: tasks before the heir
    that have not asked again in time.
    """

    number: int
    permit: Store
    is_due: bool
    in_vain: str | None
    heir: str | None
    until: int
    gone: tuple[str, ...]


def _served(call: Call) -> int:
    """The permit that a service is about, as a number.

    First comes one that it has handed over before, or whose heir cannot come. Then one whose heir has not
    come in time; then a free one; then a dead holder's; then the one that ends first.
    """

    def rank_of(permit: Store) -> int:
        if _is_kept(call, permit) or _is_given_up(call, permit):
            return 1
        if _has_missed(permit, call.now):
            return 3
        return 4 if ends(permit, call.now) == 0 else 5 if _has_died(call, permit) else 9

    return _best(call, rank_of)


def _is_kept(call: Call, permit: Store) -> bool:
    """Whether this very service has handed the permit over: it is sent again."""
    return _is_live(permit, call.now) and heir_of(permit) is not None and permit.holder.token == call.told[0]


def _is_given_up(call: Call, permit: Store) -> bool:
    """Whether a permit is kept for a task that cannot come."""
    return _is_live(permit, call.now) and heir_of(permit) == call.told[5]


def _has_died(call: Call, permit: Store) -> bool:
    """Whether the holder's process is proved dead."""
    record, dead = permit.holder, call.told[4]
    return _is_live(permit, call.now) and dead != "" and (record.state, record.token) == ("running", dead)


@lru_cache(1)
def _service_of(call: Call) -> Service:
    number = _served(call)
    permit = at(call.store, number)
    is_free = ends(permit, call.now) == 0 or _has_died(call, permit) or _is_given_up(call, permit)
    service = Service(number, permit, is_free and not _is_kept(call, permit), None, None, 0, ())
    if not service.is_due:
        return service
    service = service._replace(in_vain=heir_of(permit))
    if call.told[6] or number >= _limit_of(call) or _put_off_till(call):
        return service  # nobody has it now
    places, calls = _stand(call, service.in_vain)
    heir, until, gone = next_of(_in_order(places), calls, call.now, int(call.told[1]))
    return service._replace(heir=heir, until=until, gone=gone)


def _in_order(places: dict[str, int]) -> list[str]:
    """Who waits, in order, and is not passed over."""
    return waiting(Store(line=Line(tuple(sorted((since, task) for task, since in places.items())))))


def _stand(call: Call, in_vain: str | None) -> tuple[dict[str, int], dict[str, str]]:
    """Where the tasks stand, and with what each is woken, once one was handed a permit in vain.

    That one is passed over. If nobody has woken it, it stands where it stood. So does a task that was passed
    over for long enough. If it asks again by itself, it is forgotten.
    """
    places, calls = _places(call.store), dict(call.store.calls.fields)
    for task, place in tuple(places.items()):
        known = waiter(call.store, task)
        if AWAY <= place <= AWAY + call.now:
            places.pop(task)
            places.update({task: known.since} if known else {})
    known = waiter(call.store, in_vain)
    if in_vain is None or known is None:
        calls.pop(in_vain or "", None)
    elif call.told[6]:
        places[in_vain] = known.since
    else:
        places[in_vain], known = passed_over(known, call.now, int(call.told[3]))
        calls[in_vain] = str(known)
    return places, calls


def _put_off_till(call: Call) -> int:
    """Until when the pace, or a pause, lets nobody start; 0 if one may.

    A start counts for a period. A permit that is kept for a task counts as a start, but for the one that this
    service takes back or has handed over.
    """
    number, permits = _served(call), permits_in(call)
    is_again = _is_kept(call, permits[number]) or _is_given_up(call, permits[number])
    promised = sum(is_to_come(permit, call.now) for permit in permits) - is_again
    _, terms, paused = terms_of(call)
    return max(earliest_start(call.store.starts, terms, call.now, promised, AHEAD), paused)


def _starts_that_count(call: Call, period: int) -> list[int]:
    """When each start that counts now will count no more, in order; so much ahead as a call is on its way."""
    ends = [began + period - AHEAD for began, *_ in call.store.starts.times if began <= call.now]
    return [end for end in ends if call.now < end]


def _is_served(call: Call, found: Played) -> bool:
    return call.name == "serve" and not found.error and found.word != "more"


def serves_the_permit_that_is_due(script: Script, call: Call, found: Played) -> bool:
    """A permit that nobody has is kept for the heir. If there is none, it is kept for nobody."""
    if call.name != "serve" or found.word == "more":
        return True
    service = _service_of(call)
    if isinstance(service.permit.record, str):
        return found.word == "FOREIGNRECORD"
    before, after = service.permit, at(found.after, service.number)
    record = before.holder
    if service.heir is not None:
        kept = Record(call.told[0], service.until, record.fence, "handed", call.now, service.heir)
        return (after.value, after.record) == (seconds(service.until), kept)
    if service.in_vain is not None:
        return (after.value, after.record) == (None, record._replace(deadline=0, state="released"))
    return before[:4] == after[:4]


def serves_the_first_in_line(script: Script, call: Call, found: Played) -> bool:
    """The heir leaves the line, and so do those before it that are gone. Others stay, or come back."""
    if not _is_served(call, found):
        return True
    service = _service_of(call)
    places, calls = _stand(call, service.in_vain)
    due = [task for task, place in _places(call.store).items() if AWAY <= place <= AWAY + call.now]
    is_moved = any(waiter(call.store, task) for task in (*due, service.in_vain))
    for task in service.gone:
        del places[task]
        calls.pop(task, None)
    places.pop(service.heir or "", None)
    return _has_line(call, found, places, calls, since=call.store.calls.lease if is_moved else 0)


def keeps_the_starts_that_are_asked_for(script: Script, call: Call, found: Played) -> bool:
    """The starts stay. If nobody may start, they are kept for another two periods."""
    if not _is_served(call, found):
        return True
    starts, now_ms = call.store.starts, call.now // MS
    ms = up(pace_of(terms_of(call).counts)[1], MS)
    if ms and starts.expiry is not None and _put_off_till(call) and starts.expiry < now_ms + ms:
        starts = starts._replace(expiry=now_ms + 2 * ms)
    return found.after.starts == starts


def says_whom_it_serves(script: Script, call: Call, found: Played) -> bool:
    """The reply says who the heir is, what it is woken with if it must be woken, and what the permit was."""
    if not _is_served(call, found):
        return True
    service, permit = _service_of(call), _service_of(call).permit
    heir, word = service.heir, "held"
    if _is_kept(call, permit):
        heir, word = heir_of(permit), "handed"
    elif service.is_due:
        word = "empty" if heir is None else "taken_over" if _is_taken_over(call, permit) else "handed"
    known = waiter(found.after, heir)
    wakes = known.call if known is not None and not known.comes else None
    told = [str(call.now), *_pair_of(permit, call.now), heir, wakes]
    return found.word == word and found.words[1:6] == told


def _is_taken_over(call: Call, permit: Store) -> bool:
    """Whether the holder has died: that is proved, or its deadline has passed without a release."""
    record = permit.holder
    if permit.value is None or _is_live(permit, call.now):
        return _has_died(call, permit)
    is_recorded = record.deadline > 0 and permit.value == seconds(record.deadline)
    return not is_recorded or record.state not in ("resting", "handed")


def says_when_to_look_again(script: Script, call: Call, found: Played) -> bool:
    """The reply says the earliest time at which there is a reason to look at the line again; or 0."""
    if not _is_served(call, found):
        return True
    told = int(found.words[6] or 0)
    is_list = any(permit.value == NOT_A_STRING for permit in permits_in(call))  # not asked of all: looks free
    return told == min(_looks(call, found.after), default=0) or (is_list and told == call.now)


def _looks(call: Call, after: Store) -> Iterator[int]:
    """The reasons to look again: a permit ends, a task is no longer passed over, one more may start.

    And at once: another permit was handed over in vain; or is free, and somebody waits; or all that this
    service has looked at are gone.
    """
    now, service = call.now, _service_of(call)
    others = [(n, permit) for n, permit in enumerate(permits_in(call)) if n != service.number]
    yield from (end for _, permit in others if 0 < (end := ends(permit, now)) < NEVER)
    until = service.until if service.is_due else ends(service.permit, now)
    yield from [until] * (until not in (0, NEVER))
    yield from (place - AWAY for place in _places(after).values() if place >= AWAY)
    if len(service.gone) == LOOKED_AT or any(_has_missed(permit, now) for _, permit in others):
        yield now
    if not waiting(after):
        return
    _, terms, paused = terms_of(call)
    till = _put_off_till(call)
    yield from [looked_at(till, paused, now)] if till else _starts_that_count(call, pace_of(terms)[1])
    if not till and any(ends(permit, now) == 0 for n, permit in others if n < _limit_of(call)):
        yield now


CLAUSES: tuple[Clause, ...] = (
    touches_nothing_else,
    asks_for_all_permits,
    has_its_ticket,
    has_its_place,
    has_its_turn,
    notes_the_terms,
    forgets_this_run_alone,
    serves_the_permit_that_is_due,
    serves_the_first_in_line,
    keeps_the_starts_that_are_asked_for,
    says_whom_it_serves,
    says_when_to_look_again,
)
