"""Calls that scripts are asked: those that the scenarios make, and odd ones, which no scenario makes."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from itertools import chain, cycle, islice
from typing import Any

from tests.bounds import bound
from tests.model.edits import number_of
from tests.model.explorer import explore
from tests.model.layout import (
    CALLS,
    DONE,
    LINE,
    LOCK,
    MARK,
    PERMITS,
    RECORD,
    SCOPES,
    STARTS,
    TERMS,
    others,
    pair,
    ticket_name,
)
from tests.model.line import AWAY, Waiter
from tests.model.lock import TEXTS, Call
from tests.model.looks import KEYS as LOOK
from tests.model.permits import AHEAD, at, pace_of
from tests.model.scenarios import SCENARIOS
from tests.model.store import (
    MS,
    NOT_A_STRING,
    NUMBER,
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
    purge,
    seconds,
    task_of,
)
from tests.model.terms import PAUSE_KEEPS, PAUSE_LOOKED_AT, PLACES, terms_of

STATES = bound(400, full=1_500)  # of each scenario, whose calls are looked at
PLACE_OF_A_TIME = {"acquire": 8, "release": 1, "park": 3}
HOUR = 3_600 * SECOND
TASKS = ("a", "b", "c", "b|b")
TOKENS = ("a|0|0", "a|1|1", "b|0|1", "b|b|0|4", "|0|5", "one")
STATES_OF_A_LOCK = ("running", "running", "resting", "failed", "released", *["held_for_retry", "handed"] * 2)
GARBAGE = ("", "free", "-1", "1e9", " 7", "7 ", "1.2.3", ".5", "0x10", "\n", "1\n", "9" * 30, "9" * 400)
NOT_OURS = ("", "nobody", "a\n1\n2", "a\n1\n2\nRUNNING\n")
TOO_LARGE = (f"a\n{10**17}\n2\nrunning\n3\n", f"a\n1\n{10**17}\nrunning\n3\n")
LEASES = (500, 60_000, 1_000_000, 3_000_000)  # ms
PERIODS = (1, 1_500, 1_500_001, 2_000_500, 100_000_000, 7_200_000_001)
BESIDE = (-5 * SECOND, -SECOND, -1, 0, 0, 1, 400, SECOND, 3 * SECOND)  # us from now
OF_A_PAUSE = (*[us + beside for us in (PAUSE_LOOKED_AT, PAUSE_KEEPS) for beside in (-1, 0, 1)], 2 * HOUR)
NO_TERMS = ("", "free", "\n", "Pause {} -", "pause soon -", " pause {} -", "pause -{} -", "pause {}",
            "pause {}00 -", "limit {} 0", "limit {} 101", "limit {} 2/7", "rate {} 7", "rate {} 0/7",
            "rate {} 12345/7", "rate {} 1/9" + 20 * "9")  # fmt: skip
LONG = (3_000 * SECOND, 8_000 * SECOND)  # us: less than an hour, and more


@cache
def explored_calls() -> dict[str, list[Call]]:
    """By verb, calls that the scenarios make first."""
    found: dict[str, dict[Call, None]] = {verb: {} for verb in TEXTS}
    for name, scenario in SCENARIOS.items():
        if name.startswith("newest"):  # it runs its scripts itself
            continue
        world = scenario.make()
        with suppress(RuntimeError):  # there are more states
            explore(world, (), STATES)
        for call in world.lock.calls:
            found[call.verb][call] = None
    for verb, more in (("acquire", others(1)), ("acquire#", others(3))):  # for those who ask by hand
        for call in found[verb]:
            told = call.told[10], "", call.told[4], "9"
            found["look"][call._replace(verb="look", keys=(*LOOK, *more), told=told)] = None
    for call in found["renew"]:
        told = call.told[0], str(SECOND), "{}"
        found["hold_back"][call._replace(verb="hold_back", keys=(*call.keys[:2], TERMS), told=told)] = None
    for call in found["mark"]:
        told = "", "pause", str(SECOND), "- {}"
        found["change_terms"][call._replace(verb="change_terms", keys=(TERMS,), told=told)] = None
    for call in [call for call in found["acquire"] if call.store.holder.state == "handed"]:
        deleted = call.store._replace(value=None, expiry=None, line=Line(), mark=None, tickets=(), known=None)
        found["acquire"][call._replace(store=deleted)] = None  # by hand, before its heir has come
    return {verb: random.Random(1).sample(list(calls), len(calls)) for verb, calls in found.items()}


def seldom_met(verb: str) -> list[Call]:
    """Calls that are hardly ever drawn: a woken one finds all permits within the limit held, and one beyond
    it kept for another.
    """
    found = []
    for call in explored_calls()["acquire#"] if verb == "acquire#" else ():
        ticket, deadline = dict(call.store.tickets).get(task_of(call.told[0])[0]), call.now + 5 * SECOND
        if call.told[5] == "-" or not call.store.others or ticket is None or ticket.begun_by:
            continue
        store, held = call.store, {"value": seconds(deadline), "expiry": deadline // MS + 1_000}
        for number, state, heir in ((0, "running", ""), (1, "handed", "z")):
            record = Record("z|0|9", deadline, 1, state, call.now - SECOND, heir)
            held |= {"record": record, "record_expiry": deadline // MS + 1_000}
            store = at(at(store, number)._replace(**held), number)
        found.append(_with(call, {9: ticket.attempt, 10: "1"})._replace(store=store))
    return found[:20]


def odd_calls(verb: str, count: int) -> list[Call]:
    """So many calls of a script that no scenario makes."""
    return [_odd(call, seed) for seed, call in enumerate(islice(cycle(explored_calls()[verb]), count))]


def _odd(call: Call, seed: int) -> Call:
    """A call at an odd time, with some of what it finds and is told drawn anew."""
    draw = random.Random(seed)
    call = _later(call, draw.randrange(3_000_000_000 * SECOND, 3_000_000_100 * SECOND))
    changes = CHANGES[call.name]
    drawn = draw.sample(changes, min(draw.choice((1, 3, 6, 6)), len(changes)))
    for change in sorted(drawn, key=changes.index):  # what it is told first: the others come of that
        call = change(call, draw)
    if draw.random() < 0.4:
        call = _at_a_boundary(call, draw)
    return call._replace(store=purge(_one_permit_each(call.store, call.now), call.now))


def _later(call: Call, us: int) -> Call:
    """Everything as much later: odd, so that what is cut or rounded shows."""

    def ms(expiry: int | None) -> int | None:
        return None if expiry is None else expiry + us // MS + 1

    def moved(permit: Store) -> Store:
        record, value = permit.record, permit.value
        is_ours = value == seconds(permit.holder.deadline)
        if isinstance(record, Record) and record.deadline:
            record = record._replace(deadline=record.deadline + us, since=record.since + us)
        if value is not None and NUMBER.fullmatch(value):
            is_ours = is_ours and isinstance(record, Record)
            value = seconds(permit.holder.deadline + us) if is_ours else str(int(float(value)) + us // SECOND)
        lasts, record_lasts = ms(permit.expiry), ms(permit.record_expiry)
        return permit._replace(value=value, expiry=lasts, record=record, record_expiry=record_lasts)

    def text(known: str) -> str:
        return re.sub(r"(?<=^@)\d+|(?<=\|)\d+(?=\|)", lambda found: str(int(found[0]) + us), known)

    def live(known: str) -> str:
        return re.sub(r"(?m)^([a-z]+) (\d{16})", lambda found: f"{found[1]} {int(found[2]) + us}", known)

    store = call.store
    for number in range(1 + len(store.others)):
        store = at(moved(at(store, number)), number)
    store = store._replace(
        mark=store.mark and store.mark._replace(expiry=ms(store.mark.expiry)),
        done=store.done and store.done._replace(expiry=ms(store.done.expiry)),
        newest=store.newest and store.newest._replace(expiry=ms(store.newest.expiry)),
        terms=store.terms and Mark(live(store.terms.task_id), ms(store.terms.expiry)),
        starts=Starts(
            tuple((began + us, number, fence) for began, number, fence in store.starts.times),
            ms(store.starts.expiry),
        ),
        line=store.line._replace(places=tuple((since + us, task) for since, task in store.line.places)),
        calls=store.calls._replace(fields=tuple((task, text(known)) for task, known in store.calls.fields)),
    )
    place = PLACE_OF_A_TIME.get(call.name)
    if place is not None and call.told[place] not in ("", "0"):
        call = _with(call, {place: int(call.told[place]) + us})
    if (place := PLACES.get(call.name)) is not None and place < len(call.told):
        call = _with(call, {place: live(call.told[place])})
    return call._replace(store=store, now=call.now + us)


def _with(call: Call, changed: dict[int, object]) -> Call:
    told = list(call.told)
    for place, word in changed.items():
        told[place] = str(word)
    return call._replace(told=tuple(told))


def _one_permit_each(store: Store, now: int) -> Store:
    """A task has one permit at most beside those that rest, and a token one: of several the first."""
    seen: set[str] = set()
    tokens: set[str] = set()
    for number in range(1 + len(store.others)):
        permit = at(store, number)
        task, is_live = _whose(permit), permit.value is not None and now < permit.holder.deadline
        is_its = (is_live and permit.holder.state != "resting") or permit.holder.state == "handed"
        is_again = task in seen and is_its
        if is_again or permit.holder.token in tokens:
            store = at(permit._replace(**Permit()._asdict()), number)
        tokens |= {permit.holder.token} - {""}
        seen |= {task} if task is not None and permit.holder.state != "resting" else set()
    return store


def _at_a_boundary(call: Call, draw: random.Random) -> Call:
    """At the moment at which something ends, or a microsecond beside it."""
    period = pace_of(terms_of(call).counts)[1]
    part = draw.choice([each for each in (call.told, *call.store) if each])
    moments = [
        moment
        for number in map(int, re.findall(r"\d+", repr(part)))
        for moment in (number, number * SECOND, (number + 1) * SECOND, number - AWAY,
                       number + period, number + period - AHEAD)
        if abs(moment - call.now) < HOUR
    ]  # fmt: skip
    return call._replace(now=draw.choice(moments) + draw.choice((-1, 0, 0, 1))) if moments else call


def _count(call: Call) -> int:
    """Of how many permits a call is told, or finds."""
    told = {name.partition(b"#")[2] for name in call.keys if name.startswith((LOCK, RECORD))}
    return max(len(told), 1 + len(call.store.others))


def _own(call: Call) -> tuple[str, list[str]]:
    """The task that a call is about, and tokens of its attempts."""
    who = call.told[0] if call.told else "a"
    if call.name == "serve":
        return call.told[5] or "a", [who, call.told[4] or "one"]
    if call.name in ("acquire", "release", "renew", "hold", "forget", "hold_back"):
        task, attempt = task_of(who)
        tokens = [f"{task}|{max(attempt - 1, 0)}|9"] if task is not None else []
        return task or "a", [who, *tokens]
    return who, [f"{who}|0|5", f"{who}|1|6"]


def _permits(call: Call, draw: random.Random) -> Call:
    """Some permits are held, or kept, by the caller or by others; or another program has written them."""
    store, numbers = call.store, range(_count(call))
    for number in numbers if draw.random() < 0.5 else [draw.choice(numbers)]:
        change = draw.choice((_held, _held, _held, _foreign))
        store = at(change(at(store, number), call, draw), number)
    return call._replace(store=store)


def _held(permit: Store, call: Call, draw: random.Random) -> Store:
    """A permit that is held until its record's deadline, or has no value any more."""
    task, own = _own(call)
    heir, tokens = draw.choice(((task, own), (draw.choice(TASKS), (*TOKENS, *own))))
    token, state = draw.choice(tokens), draw.choice(STATES_OF_A_LOCK)
    if call.name == "acquire" and draw.random() < 0.2:
        token, state = own[-1], "held_for_retry"
    if call.name in ("acquire", "serve") and call.told[4] and draw.random() < 0.2:
        token = call.told[4]  # of a process that is proved dead
    if call.name == "serve" and draw.random() < 0.12:
        token, state = draw.choice((own[0], "one")), "handed"
    deadline = max(call.now + draw.choice((*BESIDE, *LONG * 3)), 1)
    since, fence = call.now - draw.randrange(9 * SECOND), draw.choice((1, 7, call.now, call.now + 5))
    info = heir if state == "handed" else draw.choice(("", "worker"))
    past = str(call.now // SECOND - draw.choice((0, 3)))
    value = draw.choice((*[seconds(deadline)] * 7, past, past, None, None, NOT_A_STRING))
    expiry = deadline // MS + 1_000
    record = Record(token, deadline, fence, state, since, info)
    lasts = None if value is None else expiry
    return permit._replace(value=value, expiry=lasts, record=record, record_expiry=expiry)


def _foreign(permit: Store, call: Call, draw: random.Random) -> Store:
    """A value or a record that another program has written, or has deleted."""
    second = call.now // SECOND + draw.randrange(-3, 4)
    numbers = str(second), f"{second}.5", f"{second}.", f"00{second}", "0", "9" * 30
    if draw.random() < 0.8 or call.name in ("renew", "hold"):
        garbage = "free" if call.name == "mark" else draw.choice(GARBAGE)  # that takes 1e9 for a number
        value = draw.choice((None, None, *numbers, garbage, NOT_A_STRING, NOT_A_STRING))
        return permit._replace(value=value, expiry=None)
    others = {"forget": (), "serve": (*TOO_LARGE, NOT_A_STRING)}.get(call.name, (NOT_A_STRING,))
    return permit._replace(record=draw.choice((None, None, *NOT_OURS, *others)), record_expiry=None)


def _whose(permit: Store) -> str | None:
    """The task that has a permit, or that it is kept for."""
    record = permit.holder
    return record.info if record.state == "handed" else task_of(record.token)[0]


def _line(call: Call, draw: random.Random) -> Call:
    """Tasks wait to be woken, or ask again by themselves; some are passed over, some have left."""
    pick, now = draw.choice, call.now
    places, calls = {task: since for since, task in call.store.line.places}, dict(call.store.calls.fields)
    if draw.random() < 0.5:
        places, calls = {}, {}
    tasks = list(dict.fromkeys((*TASKS, *[_own(call)[0]] * 2)))
    for task in draw.sample(tasks, draw.randint(1, len(tasks))):
        places.pop(task, None)
        calls.pop(task, None)
        since, misses = now - draw.randrange(1, 9 * SECOND), pick((0, 1, 13))
        place = pick((since, since, AWAY + now + pick(BESIDE), None))
        if place is not None:
            places[task] = place
        wakes = str(Waiter(misses, draw.random() < 0.3, since, pick(("call", ""))))
        text = pick((wakes, wakes, f"@{now + pick(BESIDE)}", None) if (place or 0) < AWAY else (wakes, None))
        if text is not None:
            calls[task] = text
    for number in range(pick((1, 9, 10, 11)) if draw.random() < 0.2 else 0):
        places[f"l{number:02}"], calls[f"l{number:02}"] = now - 10 * SECOND + number, f"@{now - number}"
    order, lease = tuple(sorted((since, task) for task, since in places.items())), pick(LEASES)
    store = call.store._replace(
        line=Line(order, min(pick(LEASES), lease)) if order else Line(),
        calls=Calls(tuple(sorted(calls.items())), lease) if calls else Calls(),
    )
    return call._replace(store=store)


def _marks(call: Call, draw: random.Random) -> Call:
    """A mark, and a success that counts."""
    task, own = _own(call)
    expiry = call.now // MS + draw.choice(LEASES)
    mark = draw.choice((*TASKS, task, task, task))
    tokens = [at(call.store, number).holder.token for number in range(1 + len(call.store.others))]
    done = draw.choice((*TASKS, *TOKENS, *own, *own, *filter(None, tokens)))
    if call.name in ("mark", "if_same", "forget") and draw.random() < 0.1:
        mark = done = NOT_A_STRING
    marks = [None if draw.random() < 0.2 else Mark(text, expiry) for text in (mark, done)]
    call = call._replace(store=call.store._replace(mark=marks[0], done=marks[1]))
    return _newest(call, expiry, draw) if call.name == "look" and draw.random() < 0.8 else call


def _newest(call: Call, expiry: int, draw: random.Random) -> Call:
    """What is known of the newest call, and how long a new one waits."""
    quiet, most = draw.choice((0, 7, 900)), draw.choice((0, 7, 900, 5_000))
    times = [draw.choice((0, call.now, call.now - 7, call.now - draw.randrange(3_000))) for _ in range(5)]
    text = "\n".join(map(str, (*times, 0, 2, 0, "", "", "", draw.choice(TASKS))))
    newest = draw.choice((None, Mark(draw.choice((text, text, text, "1")), expiry)))
    told = (*call.told[:4], str(quiet), str(most), draw.choice("01"))
    return call._replace(store=call.store._replace(newest=newest), told=told)


def _ticket(call: Call, draw: random.Random) -> Call:
    """An attempt of its task waits, or has begun; or there is none."""
    key = next((key for key in call.keys if key.startswith(b"ticket:")), None)
    if key is None or (call.name == "acquire" and task_of(call.told[0])[0] is None):
        return call
    attempt, copy = (9, 5) if call.name == "acquire" else (1, 2)
    number = max(int(call.told[attempt]) + draw.choice((-1, *[0] * 6, 1)), 0)
    begun_by = draw.choice((*[""] * 6, "x1", *[call.told[copy]] * 3))
    ticket = Ticket(f"{number}|{begun_by}|{draw.choice((0, 0, 1, 2))}", draw.choice(LEASES))
    tickets = dict(call.store.tickets)
    tickets.pop(key[7:].decode(), None)
    if draw.random() < 0.9:
        tickets[key[7:].decode()] = ticket
    order = tuple(sorted(tickets.items(), key=lambda each: each[0].encode()))
    return call._replace(store=call.store._replace(tickets=order))


def _terms(call: Call, draw: random.Random) -> Call:
    """Other terms are told, or known; other permits are in use; calls have started about a period ago."""
    pick, now, count = draw.choice, call.now, _count(call)
    limit, many, period = draw.randint(1, count), pick((*[1, 1, 2, 3] * 6, 2_000)), pick(PERIODS)
    terms = pick((f"{limit}", *[f"{limit}:{many}/{period}"] * 3))
    store = call.store
    if PERMITS in call.keys and draw.random() < 0.7:
        highest = max(limit, pick((*[limit, count] * 6, count, count + 1, 150)))
        known = f"{highest} {pick((terms, f'{limit}'))}"
        store = store._replace(known=None if known == "1 1" else Known(known, pick(LEASES)))
    place = PLACES.get(call.name)
    if call.name == "release":
        place = place if STARTS in call.keys else None
    if place is not None and (call.name != "acquire" or "#" in call.verb):
        is_known = call.name in ("acquire", "release")
        call = _with(call, {place: terms if is_known else pick(("0", "0", terms, "1"))})
    if STARTS in call.keys:
        beside = (-1, 0, 1, AHEAD - 1, AHEAD, AHEAD + 1, period, period // 2, period // 2, -period)
        times = {(now - period + pick(beside), draw.randrange(3), 5) for _ in range(draw.randrange(5))}
        if many == 2_000:
            times |= {(now - 9 - number, 0, 5) for number in range(pick((1_098, 1_099, 1_100, 1_101)))}
        ordered = tuple(sorted(times, key=lambda each: (each[0], b"%d#%d#%d" % each)))
        lasts = pick((period // MS, period // MS + 1, 2 * period // MS, 2 * period // MS + 2, 9_000_000))
        store = store._replace(starts=Starts(ordered, now // MS + lasts) if times else Starts())
    return call._replace(store=store)


def _live(call: Call, draw: random.Random) -> Call:
    """The key has live terms, and so has its task; they may be over; or the key is foreign."""
    if SCOPES in call.keys:
        texts = {scope: _live_terms(call, draw) for scope in draw.sample("abc", draw.choice((1, 2)))}
        scopes = Calls(tuple(sorted(texts.items())), draw.choice(LEASES))
        return call._replace(store=call.store._replace(scopes=scopes))
    if TERMS not in call.keys:
        return call
    mark = Mark(_live_terms(call, draw), call.now // MS + draw.choice(LEASES))
    mark = mark._replace(task_id=NOT_A_STRING) if draw.random() < 0.05 else mark
    call = call._replace(store=call.store._replace(terms=None if draw.random() < 0.3 else mark))
    place, may_be_told = PLACES.get(call.name, 0), STARTS in call.keys or call.name == "park"
    if may_be_told and draw.random() < 0.6:
        call = _with(call, {place: f"{call.told[place]}\n{_live_terms(call, draw)}"})
    return call


def _live_terms(call: Call, draw: random.Random) -> str:
    """Some terms, which end now or then, and what is none."""
    pick, count = draw.choice, _count(call)
    values = {
        "pause": "-",
        "limit": pick((1, 2, 3, count, count, count + 1, 100)),
        "rate": f"{pick((1, 2, 3))}/{pick((pace_of(terms_of(call).counts)[1] or 1_500, *PERIODS))}",
    }
    names = draw.sample(("pause", "limit", "rate"), pick((1, 1, 2, 3)))
    if call.name == "release" and STARTS not in call.keys:  # it hands on nothing if it cannot count
        names = pick((names, ["rate"]))
    lines = [f"{name} {call.now + pick((*BESIDE, *OF_A_PAUSE))} {values[name]}" for name in names]
    lines = [line + pick(("", " {}", ' {"because":"pause 1 -"}')) for line in lines]
    if draw.random() < 0.3:
        lines.insert(draw.randrange(3), pick(NO_TERMS).format(call.now + SECOND))
    return "\n".join(lines)


def _told(call: Call, draw: random.Random) -> Call:
    """What else the verb may be told."""
    task, words = _own(call)[0], _words(call)
    if call.verb == "acquire" and task_of(call.told[0])[0] is not None:
        call = call._replace(keys=(LOCK, RECORD, LINE, CALLS, MARK, ticket_name(task), PERMITS, TERMS))
    elif call.verb == "acquire":
        words = {place: words[place] for place in (0, 1, 2, 4)}
    if call.name == "release":
        call = call._replace(
            keys=(*call.keys[:2], LINE, CALLS, TERMS, MARK, PERMITS, DONE), told=call.told[:6]
        )
        if draw.random() < 0.5:  # with a rate
            more = (pair(number) for number in range(draw.choice((1, 2, 3))) if pair(number) != call.keys[:2])
            call = call._replace(keys=(*call.keys, STARTS, *chain.from_iterable(more)))
            call = call._replace(told=(*call.told, f"3:{draw.choice((1, 2))}/{draw.choice(PERIODS)}"))
        else:
            call = call._replace(told=(*call.told, draw.choice("123")))
        call = call._replace(told=(*call.told, str(draw.choice((number_of(call), 0, 1, 2)))))
    if call.name == "change_terms" and draw.random() < 0.5:
        call = call._replace(keys=(SCOPES,), told=(draw.choice("ab"), *call.told[1:]))
    if call.name == "forget":
        call = call._replace(keys=(DONE, RECORD, *others(draw.choice((1, 2, 3)))[1::2]))
    places = draw.sample(sorted(words), draw.choice((1, len(words), len(words))))
    call = _with(call, {place: draw.choice(words[place]) for place in places})
    if call.name == "acquire" and task_of(call.told[0])[0] is None:
        # Who has no task does not wait: it has no ticket, and no place to ask again.
        call = _with(call, {7: 0})._replace(store=call.store._replace(tickets=()))
    return call


def _words(call: Call) -> dict[int, Sequence[Any]]:
    """By place, what each script may be told."""
    now, store, (task, own) = call.now, call.store, _own(call)
    holders = [at(store, number).holder for number in range(1 + len(store.others))]
    tokens = [record.token for record in holders if record.token]
    heirs = [record.info for record in holders]
    later = f"{task}|{task_of(own[0])[1] + 1}|7"
    leases, remember, copies = (1, 1_500, 1_234_567, 4_000_000_000), (1, 60_000), ("-", "x0", "x0", "y")
    words: dict[str, dict[int, Sequence[Any]]] = {
        "acquire": {
            0: (*[later] * 6, *own, *tokens, "one", "one"), 1: leases, 2: (0, 1_000, 30_000),
            4: ("", *tokens, *own), 5: (*call.told[5:6] * 3, *copies), 6: (0, 60_001, 60_001),
            7: (0, 0, 1_000, 50_000_000), 8: (0, now - 5), 11: (0, 0, 1), 12: (0, 1, 1),
        },
        "renew": {1: leases, 2: leases},
        "hold": {1: leases, 2: leases},
        "release": {
            0: (*own, *own, *tokens, later, "one", "one"), 1: (0, 0, *(now + us for us in BESIDE)),
            2: remember, 3: (0, 0, 7_000), 4: ("", 0, 3 * SECOND), 5: (0, 5_000),
        },
        "free": {1: remember},
        "mark": {1: (1, 90_000), 2: ("until_started", "until_done", "dedupe_for")},
        "if_same": {1: ("", "", 1, 90_000)},
        "look": {
            1: ("", "until_started", "until_done", "dedupe_for"), 2: ("", *tokens, *TOKENS[:2]), 3: (0, 1, 9)
        },
        "forget": {0: own},
        "hold_back": {0: (*own[:1] * 3, *tokens), 1: (1, SECOND, SECOND, PAUSE_LOOKED_AT)},
        "change_terms": {
            1: ("pause", "limit", "rate"), 2: (0, 0, 1, 1_500, PAUSE_KEEPS, 2 * HOUR), 3: ("-", "2 {}"),
        },
        "serve": {4: ("", *tokens, *TOKENS[:2]), 5: ("", *heirs, *TASKS), 6: ("", "", "unsent")},
        "park": {1: (0, 1, 2), 2: (*[""] * 4, *copies), 7: (0, 1), 9: (0, 0, 1)},
        "leave": {
            1: (0, 1, 2), 2: copies, 4: (0, 1), 5: ("left", *tokens, *own), 6: (0, 3 * SECOND),
            8: ("", "", 1, 1_234_567),
        },
    }  # fmt: skip
    return words.get(call.name, {})


CHANGES: dict[str, tuple[Callable[[Call, random.Random], Call], ...]] = {
    "acquire": (_told, _permits, _line, _marks, _ticket, _terms, _live),
    "renew": (_told, _permits, _terms),
    "hold": (_told, _permits, _terms),
    "release": (_told, _permits, _line, _marks, _terms, _live),
    "free": (_told, _permits, _terms),
    "look": (_told, _permits, _line, _marks, _terms, _live),
    "mark": (_told, _permits, _line, _marks),
    "if_same": (_told, _marks),
    "forget": (_told, _permits, _marks),
    "serve": (_told, _permits, _line, _terms, _live),
    "park": (_told, _permits, _line, _ticket, _terms, _live),
    "leave": (_told, _permits, _line, _ticket, _terms, _live),
    "hold_back": (_told, _permits, _live),
    "change_terms": (_told, _live),
}
