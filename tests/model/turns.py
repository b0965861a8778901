"""The contract of the scripts that give turns: who has the next one, who waits where, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from tests.model.layout import read_back
from tests.model.line import AWAY, Waiter, waiter, waiting
from tests.model.lock import Call
from tests.model.permits import at, limit_of, pace_of, terms_in
from tests.model.rules import is_anothers
from tests.model.store import (
    MS,
    NOT_A_STRING,
    NUMBER,
    SECOND,
    Calls,
    Known,
    Line,
    Record,
    Store,
    seconds,
    task_of,
    up,
)

if TYPE_CHECKING:
    from tests.model.contract import Clause, Played
    from tests.simulation.scripts import Script

AHEAD = 20_000
"""How long (us) before its start a call may be handed a permit."""
AWAY_AT_MOST = 3600 * SECOND
KEPT_AFTER_A_LINGERER = 50_000
LOOKED_AT = 10
"""How many in line one service looks at."""
NEVER = 10**17


# What a permit is, whatever the verb.


def numbers(call: Call) -> range:
    """The permits that a script is told of."""
    return range(1 + sum(name.startswith(b"lock#") for name in call.keys))


def told(found: Played) -> list[str | None]:
    """What a script says."""
    words = found.reply.split(b" ") if isinstance(found.reply, bytes) else found.reply
    return [None if word is None else word.decode() if isinstance(word, bytes) else str(word) for word in words]


def ends(permit: Store, now: int) -> int:
    """When a permit is anybody's: 0 if it is now, NEVER if it is another program's for good."""
    value, deadline = permit.value, permit.holder.deadline
    if value is None:
        return 0
    if not NUMBER.fullmatch(value):
        return NEVER
    until = int((min(float(value), 1e11) + 1) * SECOND)  # the recipe's
    if now < deadline or (deadline > 0 and value == seconds(deadline)):
        until = deadline
    return until if now < until else 0


def is_live(permit: Store, now: int) -> bool:
    """Whether somebody has a permit by its record."""
    return permit.value is not None and NUMBER.fullmatch(permit.value) is not None and now < permit.holder.deadline


def is_in_vain(permit: Store, now: int) -> bool:
    """Whether a permit was handed to a call that has not come in time."""
    return permit.holder.state == "handed" and ends(permit, now) == 0


def heir_of(permit: Store) -> str | None:
    """The task for which a permit is kept, or was until its deadline."""
    return permit.holder.info if permit.holder.state == "handed" else None


def best(call: Call, limit: int, rank_of: Callable[[Store], int]) -> int:
    """The permit that a verb is about: of the lowest rank; of those that which ends first; of those the first.

    4: a free one; 9: one that is held. Beyond the limit only what is better than a free one counts.
    """
    found = []
    for number in numbers(call):
        permit = at(call.store, number)
        rank = rank_of(permit)
        if number < limit or rank < 4:
            found.append((rank, ends(permit, call.now), number))
    return min(found)[2]


def terms_of(call: Call, place: int) -> str:
    """The terms that a call is told, or else those that are known."""
    return call.told[place] if call.told[place] != "0" else terms_in(call.store)


def known_after(call: Call, terms: str, ms: int) -> Known | None:
    """What is known of the permits once these terms are noted: for so long, at least a minute if it is new."""
    used = [n for n in numbers(call) if at(call.store, n).value not in (None, NOT_A_STRING)]
    highest = max(limit_of(terms), 1 + max(used, default=-1))
    if highest == 1 and terms == "1":
        return None
    text, known = f"{highest} {terms}", call.store.known
    lease = max(known.lease if known else 0, ms)
    return Known(text, lease if known and known.text == text else max(lease, 60_000))


def standing(places: dict[str, int], lease: int) -> Line:
    """A line of these, in order."""
    order = sorted((since, task) for task, since in places.items())
    return Line(tuple(order), lease) if order else Line()


def kept_calls(fields: dict[str, str], lease: int) -> Calls:
    """What these are woken with."""
    return Calls(tuple(sorted(fields.items())), lease) if fields else Calls()


def vain_of(call: Call, task: str) -> str:
    """How often a task was woken in vain: as its place says, or else the ticket of this attempt."""
    known, ticket = waiter(call.store, task), dict(call.store.tickets).get(task)
    if known is not None:
        return str(known.vain)
    return ticket.vain if ticket is not None and ticket.attempt == int(call.told[1]) else "0"


def has_tickets(after: Store, call: Call, task: str, text: str, ms: int) -> bool:
    """Whether a task's ticket says this for so long, and all others' are as they were."""
    tickets = dict(after.tickets)
    mine = tickets.pop(task)
    others = {other: ticket for other, ticket in call.store.tickets if other != task}
    return tuple(mine) == (text, ms) and tickets == others


def after_of(call: Call, found: Played) -> Store:
    """The keys after a call."""
    return read_back(found.keys, call.now // MS)


# park


def _kept_for(task: str, now: int) -> Callable[[Store], int]:
    """How well a permit fits a task that asks for its own."""

    def rank_of(permit: Store) -> int:
        until = ends(permit, now)
        known = until in (0, permit.holder.deadline)
        return 1 if known and heir_of(permit) == task else 9 if until else 4

    return rank_of


def parks_where_it_says(script: Script, call: Call, found: Played) -> bool:
    """A task that parks has its place, its call and its ticket; all other keys are as they were."""
    if call.name != "park" or found.error or found.word == "more":
        return True
    task, attempt, copy, since, _, remember, *_ = call.told
    after, store, ms = after_of(call, found), call.store, int(remember)
    expected = store
    if "#" in call.verb:
        expected = expected._replace(known=known_after(call, terms_of(call, 6), ms))
    if found.word == "stale":
        return after == expected._replace(tickets=_hurried(call))
    if found.word == "taken":
        return after == expected
    places, calls = {name: at_ for at_, name in store.line.places}, dict(store.calls.fields)
    known, ticket = waiter(store, task), dict(store.tickets).get(task)
    is_new = known is None or (ticket is not None and ticket.attempt < int(attempt))
    if found.word != "handed" and (copy != "" or is_new or task not in places):
        is_new, places[task] = True, int(since)
    if is_new:
        calls[task] = f"{vain_of(call, task)}|{since}|{call.told[4]}"
    expected = expected._replace(
        line=standing(places, max(store.line.lease, ms)),
        calls=kept_calls(calls, max(store.calls.lease, ms)),
        tickets=after.tickets,
    )
    text = f"{attempt}||{vain_of(call, task)}"
    return after == expected and has_tickets(after, call, task, text, ms)


def _hurried(call: Call) -> tuple[tuple[str, object], ...]:
    """The tickets when a courier finds that its call has begun: never woken in vain, it need not be known long."""
    task, attempt, copy, remember = call.told[0], int(call.told[1]), call.told[2], int(call.told[5])
    tickets = dict(call.store.tickets)
    ticket = tickets[task]
    if copy == "" and ticket.attempt == attempt and ticket.vain == "0":
        tickets[task] = ticket._replace(lease=min(ticket.lease, remember))
    return tuple(tickets.items())


def parks_unless_it_is_its_turn(script: Script, call: Call, found: Played) -> bool:
    """`handed` is said to whom a permit is kept for: also past its deadline, while nobody else has it.

    A courier, whatever the deadline; but not of a call that has left the line.
    """
    if call.name != "park" or found.error or found.word in ("more", "stale", "taken"):
        return True
    task, copy = call.told[0], call.told[2]
    limit = limit_of(terms_of(call, 6)) if "#" in call.verb else 1
    permit = at(call.store, best(call, limit, _kept_for(task, call.now)))
    deadline = permit.holder.deadline
    is_kept = permit.value is not None and heir_of(permit) == task
    if copy == "":
        is_kept = is_kept and task in dict(call.store.calls.fields)
    else:
        is_kept = is_kept and (call.now < deadline or permit.value == seconds(deadline))
    record = None if permit.record is None else str(permit.record)
    return (found.word == "handed") == is_kept and told(found)[2:4] == [permit.value, record]


# leave


def leaves_nothing_of_its_own(script: Script, call: Call, found: Played) -> bool:
    """A task that leaves has no place, and its ticket says by which message; all other keys are as they were."""
    if call.name != "leave" or found.error:
        return True
    task, attempt, copy, remember, shared = call.told
    after, store = after_of(call, found), call.store
    if found.word in ("more", "stale"):
        return after == store
    text, expected = f"{attempt}|{copy}|{vain_of(call, task)}", store._replace(tickets=after.tickets)
    if is_anothers(call, shared):
        ticket = dict(store.tickets).get(task)
        vain = ticket.vain if ticket is not None and ticket.attempt == int(attempt) else "0"
        text = f"{attempt}|{copy}|{vain}"
    else:
        places = {name: since for since, name in store.line.places if name != task}
        calls = {name: known for name, known in store.calls.fields if name != task}
        expected = expected._replace(
            line=standing(places, store.line.lease), calls=kept_calls(calls, store.calls.lease)
        )
    return after == expected and has_tickets(after, call, task, text, int(remember))


# forget


def forgets_this_run_alone(script: Script, call: Call, found: Played) -> bool:
    """A success is forgotten if it is this run's, or an earlier delivery's of its task; the run has failed."""
    if call.name != "forget" or found.error:
        return True
    token, store = call.told[0], call.store
    permits = range(sum(b"holder" in name for name in call.keys))
    began = {at(store, number).holder.token: at(store, number).holder.since for number in permits}
    done = store.done.task_id if store.done else None
    is_earlier = (
        done is not None
        and began.get(token, 0) > began.get(done, 0)
        and task_of(done)[0] == task_of(token)[0]
    )
    counts = done is not None and (done == token or is_earlier)
    expected = store._replace(done=None) if counts else store
    for number in permits:
        permit = at(expected, number)
        if (permit.holder.token, permit.holder.state) == (token, "running"):
            failed = permit.holder._replace(state="failed")
            expected = at(permit._replace(record=failed), number)
    return after_of(call, found) == expected and found.word == ("freed" if counts else "lost")


# serve


def served(call: Call) -> int:
    """The permit that serve.lua is about.

    That which this service has handed over, or whose heir cannot come; or whose heir has not come; or a free
    one; or a dead holder's; or, as it says until when, that which ends first.
    """
    token, dead, absent = call.told[0], call.told[4], call.told[5]

    def rank_of(permit: Store) -> int:
        record, live = permit.holder, is_live(permit, call.now)
        if live and record.state == "handed" and (record.token == token or record.info == absent):
            return 1
        if is_in_vain(permit, call.now):
            return 3
        if ends(permit, call.now) == 0:
            return 4
        return 5 if live and is_dead(permit, dead) else 9

    limit = limit_of(terms_of(call, 7)) if "#" in call.verb else 1
    return best(call, limit, rank_of)


def is_dead(permit: Store, dead: str) -> bool:
    """Whether the holder is the one that is proved dead."""
    return dead != "" and permit.holder.state == "running" and permit.holder.token == dead


def is_served_already(call: Call, permit: Store) -> bool:
    """Whether this very service has handed it over: it was sent again."""
    return is_live(permit, call.now) and permit.holder.state == "handed" and permit.holder.token == call.told[0]


def is_passed_on(call: Call, permit: Store) -> bool:
    """Whether a permit is nobody's, or that of one who cannot have it any more."""
    if is_served_already(call, permit):
        return False
    is_away = heir_of(permit) is not None and heir_of(permit) == call.told[5]
    lost = is_live(permit, call.now) and (is_dead(permit, call.told[4]) or is_away)
    return lost or ends(permit, call.now) == 0


def paced_till(call: Call, number: int) -> int:
    """Until when the pace lets nobody start: 0 if it lets one.

    As many as may start within the period have, or are about to: those that are handed a permit.
    """
    if "#" not in call.verb:
        return 0
    (count, period), now = pace_of(terms_of(call, 7)), call.now
    if not count:
        return 0
    coming = sum(_is_to_come(call, other) for other in numbers(call) if not _is_redone(call, other, number))
    starts = [at_ for at_, *_ in call.store.starts.times if now - period + AHEAD < at_ <= now]
    if len(starts) + coming < count:
        return 0
    left = count - coming
    if left > 0:
        return starts[-left] + period - AHEAD
    room = starts[-1] + period - AHEAD if starts else 0
    return max(room, now + min(period, SECOND))


def _is_to_come(call: Call, number: int) -> bool:
    permit = at(call.store, number)
    known = permit.value not in (None, NOT_A_STRING) and permit.holder.state == "handed"
    return known and call.now < permit.holder.deadline


def _is_redone(call: Call, other: int, number: int) -> bool:
    """Whether a permit is the one that is handed over again, or to another."""
    permit = at(call.store, other)
    return other == number and (is_served_already(call, permit) or is_passed_on(call, permit))


def stands(call: Call, task: str, vain_heir: str | None) -> tuple[int | None, str | None]:
    """Where a task stands, and what of its call is known, before anybody is handed the permit.

    It stands where it stood if its time away is over. To whom the permit was handed in vain is passed over: for
    a lease, twice that the next time; or stands where it stood, if nobody has woken it.
    """
    known, text = waiter(call.store, task), dict(call.store.calls.fields).get(task)
    place = {name: since for since, name in call.store.line.places}.get(task)
    if place is not None and AWAY <= place <= AWAY + call.now:
        place = known.since if known else None
    if task != vain_heir:
        return place, text
    if known is None:
        return place, None
    if call.told[6]:
        return known.since, text
    away = min(int(call.told[3]) * 2**known.vain, AWAY_AT_MOST)
    return AWAY + call.now + away, str(Waiter(known.vain + 1, False, known.since, known.call))


def serves_the_first_in_line(script: Script, call: Call, found: Played) -> bool:
    """A permit that is nobody's is handed to the first in line who is there; all else is as it was."""
    if call.name != "serve" or found.word == "more":
        return True
    number = served(call)
    permit, after = at(call.store, number), after_of(call, found)
    if isinstance(permit.record, str):
        return found.word == "FOREIGNRECORD"
    passed = is_passed_on(call, permit)
    vain_heir = heir_of(permit) if passed else None
    tasks = {task for _, task in call.store.line.places} | dict(call.store.calls.fields).keys()
    found_at = {task: stands(call, task, vain_heir) for task in tasks}
    places = {task: place for task, (place, _) in found_at.items() if place is not None}
    calls = {task: text for task, (_, text) in found_at.items() if text is not None}
    lease = call.store.line.lease
    if places != {task: since for since, task in call.store.line.places} or vain_heir in places:
        lease = max(lease, call.store.calls.lease)
    heir, gone = None, []
    stays = number >= _limit(call) or paced_till(call, number) or call.told[6]
    if passed and not stays:
        heir, gone = first_there(call, standing(places, 0), calls)
    for task in gone:
        del places[task]
        calls.pop(task, None)
    until = call.now + int(call.told[1])
    if heir is not None:
        del places[heir]
        if calls.get(heir, "").startswith("@"):
            until = int(calls[heir][1:]) + KEPT_AFTER_A_LINGERER
    expected = call.store._replace(
        line=standing(places, lease), calls=kept_calls(calls, call.store.calls.lease), known=after.known,
        starts=after.starts,
    )  # fmt: skip
    expected = at(_handed(call, at(expected, number), heir, vain_heir, until, at(after, number)), number)
    return (
        after == expected
        and after.known == _known_after_serve(call, heir, until)
        and after.starts == _starts_after_serve(call, number)
        and found.word == _word_of_serve(call, permit, heir)
        and _tells_of_serve(call, found, permit, heir, after)
        and int(told(found)[6] or 0) == min(looks_again(call, found, number, after, until, gone), default=0)
    )


def _limit(call: Call) -> int:
    return limit_of(terms_of(call, 7)) if "#" in call.verb else 1


def first_there(call: Call, line: Line, calls: dict[str, str]) -> tuple[str | None, list[str]]:
    """Who is first in line, and the ones before that have not asked again in time."""
    gone: list[str] = []
    for task in waiting(Store(line=line))[:LOOKED_AT]:
        text = calls.get(task, "")
        if not text.startswith("@") or call.now < int(text[1:]):
            return task, gone
        gone.append(task)
    return None, gone


def _handed(call: Call, permit: Store, heir: str | None, vain_heir: str | None, until: int, after: Store) -> Store:
    """What becomes of the permit: kept for the heir, or nobody's if it was kept for another; or as it was.

    How long it lasts is for the other clauses to say.
    """
    record = permit.holder
    if heir is not None:
        record = Record(call.told[0], until, record.fence, "handed", call.now, heir)
        kept = permit._replace(value=seconds(until), record=record)
    elif vain_heir is not None:
        kept = permit._replace(value=None, record=record._replace(deadline=0, state="released"))
    else:
        return permit
    return kept._replace(expiry=after.expiry, record_expiry=after.record_expiry)


def _known_after_serve(call: Call, heir: str | None, until: int) -> Known | None:
    """New terms are noted with who is handed a permit on them."""
    terms = terms_of(call, 7)
    if heir is None or "#" not in call.verb or terms == terms_in(call.store):
        return call.store.known
    return known_after(call, terms, up(until - call.now, MS) + int(call.told[2]))


def _starts_after_serve(call: Call, number: int) -> object:
    """The starts last for as long as those who wait for one of them to count no more."""
    starts, ms = call.store.starts, up(pace_of(terms_of(call, 7))[1], MS)
    short = starts.expiry is not None and starts.expiry - call.now // MS < ms
    is_asked = paced_till(call, number) > 0
    return starts._replace(expiry=call.now // MS + 2 * ms) if is_asked and short else starts


def _word_of_serve(call: Call, permit: Store, heir: str | None) -> str:
    if is_served_already(call, permit):
        return "handed"
    if not is_passed_on(call, permit):
        return "held"
    if heir is None:
        return "empty"
    recorded = permit.holder.deadline > 0 and permit.value == seconds(permit.holder.deadline)
    if permit.value is None:
        return "handed"
    if is_live(permit, call.now):
        return "taken_over" if is_dead(permit, call.told[4]) else "handed"
    died = not recorded or permit.holder.state not in ("resting", "handed")
    return "taken_over" if died else "handed"


def _tells_of_serve(call: Call, found: Played, permit: Store, heir: str | None, after: Store) -> bool:
    """The reply has what was found of the permit, whom it is kept for, and what that one is woken with."""
    if is_served_already(call, permit):
        heir = heir_of(permit)
    known = waiter(after, heir)
    wakes = known.call if known is not None and not known.comes else None
    record = None if permit.record is None else str(permit.record)
    return told(found)[2:6] == [permit.value, record, heir, wakes]


def looks_again(
    call: Call, found: Played, number: int, after: Store, until: int, gone: list[str]
) -> Iterator[int]:
    """All for which it is time to look at the line again, and when.

    When the permit ends, or another; when somebody's time away ends; if anybody waits, when one more may start.
    At once if another permit is free, or was handed over in vain; or if only those were looked at who are gone.
    """
    now, permit = call.now, at(call.store, number)
    if found.word in ("handed", "taken_over"):
        yield permit.holder.deadline if is_served_already(call, permit) else until
    elif found.word == "held" and ends(permit, now) != NEVER:
        yield ends(permit, now)
    elif len(gone) == LOOKED_AT:
        yield now
    yield from (place - AWAY for place, _ in after.line.places if place >= AWAY)
    if "#" not in call.verb:
        return
    others = {other: at(call.store, other) for other in numbers(call) if other != number}
    yield from (until for other in others.values() if 0 < (until := ends(other, now)) < NEVER)
    if any(is_in_vain(other, now) for other in others.values()):
        yield now
    if not waiting(after):
        return
    paced, period = paced_till(call, number), pace_of(terms_of(call, 7))[1]
    if paced:
        yield paced
        return
    yield from (at_ + period - AHEAD for at_, *_ in call.store.starts.times if now - period + AHEAD < at_ <= now)
    if any(ends(other, now) == 0 for place, other in others.items() if place < _limit(call)):
        yield now


CLAUSES: tuple[Clause, ...] = (
    parks_where_it_says,
    parks_unless_it_is_its_turn,
    leaves_nothing_of_its_own,
    forgets_this_run_alone,
    serves_the_first_in_line,
)
