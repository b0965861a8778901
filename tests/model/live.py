"""Live terms of one key: who sets them, and its calls and their workers, over the real scripts.

No clock runs, as in newest.py: a term, a deadline or the time of one that is passed over may end at any time.
Every message is acknowledged late. Beside what Redis holds stands what was really said.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

from tests.model import newest
from tests.model.explorer import START, Event, Property, caused_by
from tests.model.layout import (
    CALLS,
    DONE,
    LINE,
    LOCK,
    MARK,
    NEWEST,
    PERMITS,
    RECORD,
    STARTS,
    TERMS,
    others,
    pair,
)
from tests.model.line import AWAY
from tests.model.lock import TEXTS
from tests.model.newest import LEASE, ORIGINAL, PAST, REMEMBER_MS, SWEEP, Keys, Message
from tests.model.store import MS, SECOND, seconds
from tests.model.terms import PAUSE_KEEPS
from tests.simulation.scripts import script
from tests.simulation.server import Entry, Server

OF_TASKS = b"terms of tasks"
SHORT, LONG, LONGER = (START + count * SECOND for count in (20, 7_200, 14_400))  # when a term ends
SOON = START + 30 * SECOND  # by when somebody looks at a line in a pause
HELD = PAUSE_KEEPS // 2  # for which a lock is held for a retry
HELD_ON = START + PAUSE_KEEPS  # until when it is held on, for one that has asked in a pause
LATEST = START + LEASE + SECOND  # of deadlines: that a later one is later makes no difference
REFUSED = {"paused": "is paused", "paced": "is paced", "held": "is refused", "line": "is refused"}
IN_LINE = (LINE, CALLS)
Names = tuple[bytes, ...]
name_of, number_of, ticket_of = newest._name, newest._number, newest._ticket
without, joined, sent = newest._without, newest._with, newest._sent
changed, coming = newest._changed, newest._coming


class Process(NamedTuple):
    """A worker with a message: where it stands, the task's live terms that came with it, and what it holds.

    `wakes`: the call that it is about to wake, and its attempt.
    """

    at: str
    message: Message
    live: str = ""
    token: str = ""
    permit: int = 0
    wakes: tuple[int, ...] = ()


class Published(NamedTuple):
    """A call: which attempt is to run, if the last has not ended; its place; if its retry has met a pause."""

    attempt: int = 0
    has_ended: bool = False
    place: int = 0
    has_met: bool = False

    @property
    def since(self) -> int:
        """Its place as scripts have it; 0: it has none."""
        return START - 1_000 + self.place if self.place else 0


class Said(NamedTuple):
    """What counts for the key: the end of a pause, a limit, a rate."""

    pause: int = 0
    limit: int = 0
    rate: int = 0


class Scene(NamedTuple):
    """The whole world. `is_due`: somebody looks at the line soon. `heard`: the task's live terms, at workers.

    `wrong`: what a script has done to a key. Then: what may still happen.
    """

    keys: Keys
    calls: tuple[Published, ...]
    broker: tuple[Message, ...]
    processes: tuple[Process, ...]
    is_due: bool
    heard: str
    said: Said
    wrong: str
    changes: int
    backs: int
    crashes: int
    losses: int
    lapses: int
    overlaps: int
    revokes: int

    @property
    def now(self) -> int:
        """The time, always."""
        return START

    @property
    def store(self) -> Any:
        """As traces have it."""
        return Shown(self.keys)


class Held(NamedTuple):
    """A permit that has a value, and whose it is."""

    number: int
    token: str
    deadline: int
    state: str
    heir: str

    @property
    def is_live(self) -> bool:
        """Its deadline is ahead."""
        return self.deadline > START

    def is_handed_to(self, name: str) -> bool:
        """Whether a call's start is kept for it."""
        return self.is_live and self.heir == name


class Shown:
    """What the keys say."""

    def __init__(self, keys: Keys) -> None:
        found = dict(keys)
        texts = {name: entry.value.decode() for name, entry in keys if entry.kind == "string"}
        records = [(n, texts[pair(n)[1]].split("\n", 5)) for n in range(4) if pair(n)[0] in found]
        self.held = [Held(n, r[0], int(r[1]), r[3], r[5] if r[3] == "handed" else "") for n, r in records]
        self.line = [(at, task.decode()) for at, task in found[LINE].value] if LINE in found else []
        waits = found[CALLS].value if CALLS in found else ()
        self.misses = {task.decode(): call.split(b"|")[0].rstrip(b"+") for task, call in waits}
        self.starts = len(found[STARTS].value) if STARTS in found else 0
        self.terms = [line.split(" ", 2) for line in texts.get(TERMS, "").split("\n") if line]
        pauses = [int(till) for name, till, _ in self.terms if name == "pause"]
        self.pause = max((till for till in pauses if till > START), default=0)
        self.own = texts[PERMITS].split(" ")[1] if PERMITS in texts else ""
        self.of_task = found[OF_TASKS].value[0][1].decode() if OF_TASKS in found else ""
        self.value = self.held, self.line, self.terms

    def of(self, number: int) -> Held:
        """A permit; one that nobody has, too."""
        return next((each for each in self.held if each.number == number), Held(number, "|", 0, "", ""))


shown = lru_cache(200_000)(Shown)
Step = tuple[Event, Scene]


@dataclass(eq=False)
class Live:
    """Calls of one key, each of which waits in line (`w`) or comes back (`r`); and how much may happen."""

    policies: str
    _: KW_ONLY
    own: str = "1"  # the task's limit
    says: tuple[str, ...] = ("pause",)  # of the key; `task`: that the task is paused
    changes: int = 1  # how often that is said
    slots: int = 2  # workers
    retries: int = 0  # of the first call
    hold: bool = False  # the lock is held for a retry
    backs: int = 0  # how often a body may hold its key back
    crashes: int = 0
    losses: int = 0  # replies that may be lost, and the command sent again
    lapses: int = 0  # leases that may end though their holder lives
    overlaps: int = 1  # looks by who knows of no pause, before a call parks that has met it
    revokes: int = 0  # woken calls that may be revoked
    sweeper: str = ""  # what workers that look know of the limit, if not the task's own
    notes_again: bool = True  # that the line is due, when a call has parked
    texts: Mapping[str, str] = field(default_factory=dict)  # a mutant's

    def __post_init__(self) -> None:
        self.scripts = {verb: script(self.texts.get(verb, text)) for verb, text in TEXTS.items()}
        self.known: dict[Any, tuple[Keys, list[Any], str]] = {}
        calls = tuple(Published() for _ in self.policies)
        broker = tuple(Message(number) for number in range(len(calls)))
        budgets = [getattr(self, name) for name in Scene._fields[Scene._fields.index("changes") :]]
        self.start = Scene((), calls, broker, (), False, "", Said(), "", *budgets)
        self.others = others(int(self.own))

    # What Redis does.

    def ran(self, scene: Scene, verb: str, keys: Names, *told: Any) -> tuple[Scene, list[Any]]:
        """What a script leaves, and its reply; it is asked again with more keys if it wants them."""
        words = tuple(str(word).encode() for word in told)
        asked = verb, scene.keys, keys, words
        if asked not in self.known:
            server = Server(scene.keys, START)
            reply = self.scripts[verb].run(server, keys, words)
            found = list(map(newest._said, reply.split(b" ") if isinstance(reply, bytes) else reply))
            self.known[asked] = _canonical(server.keys), found, _wrong(server.keys)
        left, found, wrong = self.known[asked]
        if found[0] == "more":
            first = (*keys[:8], STARTS) if verb == "acquire" else keys[: keys.index(TERMS) + 1]
            return self.ran(scene, verb, first + others(int(found[1])), *told)
        return scene._replace(keys=left, wrong=scene.wrong or wrong), [*found, *[None] * (9 - len(found))]

    def answers(self, scene: Scene, verb: str, keys: Names, *told: Any) -> Iterator[tuple[Scene, list[Any]]]:
        """The same; and once more if the reply is lost, and the command is sent again."""
        after, reply = self.ran(scene, verb, keys, *told)
        yield after, reply
        if scene.losses:
            yield self.ran(after._replace(losses=scene.losses - 1), verb, keys, *told)

    # What may happen.

    def steps(self, scene: Scene) -> Iterator[Step]:
        """Everything that may happen next."""
        yield from self._operator(scene)
        yield from self._times(scene)
        for message in sorted(set(scene.broker)):
            if len(scene.processes) < self.slots:
                rest = scene._replace(broker=without(scene.broker, message))
                yield from self._asks(rest, Process("asks", message, scene.heard))
                if scene.revokes and message.copy != ORIGINAL:
                    less = rest._replace(revokes=scene.revokes - 1)
                    yield from self._quits(less, Process("quits", message, scene.heard))
        for process in sorted(set(scene.processes)):
            rest = scene._replace(processes=without(scene.processes, process))
            yield from getattr(self, f"_{process.at}")(rest, process)
            if scene.crashes:
                dead = rest._replace(crashes=scene.crashes - 1)
                again = process.message._replace(again=True)
                yield _event("is killed", process), dead if process.message == SWEEP else sent(dead, again)
        overlaps = any(p.at == "stands_by" and p.live != scene.heard for p in scene.processes)
        is_looked_at = any(process.message == SWEEP for process in scene.processes)
        if scene.is_due and not is_looked_at and overlaps <= scene.overlaps:
            yield from self._looks(scene._replace(overlaps=scene.overlaps - overlaps))

    def _operator(self, scene: Scene) -> Iterator[Step]:
        for told in self.says if scene.changes else ():
            name, _, value = told.partition(" ")
            key, scope = (OF_TASKS, "scope") if name == "task" else (TERMS, "")
            about = scope, name.replace("task", "pause"), LONG - START, f"{value or '-'} {{}}"
            after, _ = self.ran(scene._replace(changes=scene.changes - 1), "change_terms", (key,), *about)
            if not scope:
                count = int(value.split("/")[0]) if value else LONG
                after = after._replace(said=scene.said._replace(**{name: count}))
            yield Event(None, f"{told} is set"), after
        for name, _ in filter(lambda each: each[1], scene.said._asdict().items()):
            after, _ = self.ran(scene, "change_terms", (TERMS,), "", name, 0, "- {}")
            yield Event(None, f"{name} is ended"), after._replace(said=scene.said._replace(**{name: 0}))
        if text := shown(scene.keys).of_task:
            after, _ = self.ran(scene, "change_terms", (OF_TASKS,), "scope", "pause", 0, "- {}")
            yield Event(None, "the task is resumed"), after
        if text != scene.heard:
            yield Event(None, "workers hear of it"), scene._replace(heard=text)

    def _times(self, scene: Scene) -> Iterator[Step]:
        keys, seen = dict(scene.keys), shown(scene.keys)
        for name, _ in filter(lambda each: each[1], scene.said._asdict().items()):
            lines = ((kind, PAST if kind == name else till, rest) for kind, till, rest in seen.terms)
            text = "\n".join(f"{kind} {till} {rest}" for kind, till, rest in lines)
            past = newest._with_key(scene, TERMS, text)
            yield Event(None, f"{name} is over"), past._replace(said=scene.said._replace(**{name: 0}))
        if seen.of_task or scene.heard or any(process.live for process in scene.processes):
            processes = tuple(sorted(process._replace(live="") for process in scene.processes))
            left = tuple(each for each in scene.keys if each[0] != OF_TASKS)
            over = scene._replace(keys=left, heard="", processes=processes)
            yield Event(None, "the task's pause is over"), over
        for each in seen.held:
            lives = each.state == "running" and any(p.token == each.token for p in scene.processes)
            if each.is_live and lives <= scene.lapses and (lives or self._may_lapse(scene, each)):
                lock, beside = pair(each.number)
                record = keys[beside].value.decode().replace(f"\n{each.deadline}\n", f"\n{PAST}\n", 1)
                past = newest._with_key(newest._with_key(scene, beside, record), lock, seconds(PAST))
                what = f"the deadline of a {each.state} lock passes"
                yield Event(None, what), past._replace(lapses=scene.lapses - lives)
        for at, task in seen.line:
            if at > AWAY + START:
                back = ((float(AWAY + PAST) if who == task else since, who) for since, who in seen.line)
                places = tuple(sorted((since, who.encode()) for since, who in back))
                later = tuple(sorted({**keys, LINE: keys[LINE]._replace(value=places)}.items()))
                yield Event(None, f"{task} is to be back"), scene._replace(keys=later)
        if STARTS in keys:
            fewer = {**keys, STARTS: keys[STARTS]._replace(value=keys[STARTS].value[1:])}
            left = tuple(sorted(each for each in fewer.items() if each[1].value))
            yield Event(None, "a start counts no more"), scene._replace(keys=left)

    def _may_lapse(self, scene: Scene, held: Held) -> bool:
        """Whether nobody who lives keeps it, or comes for it in time."""
        if held.state == "running":
            return True
        number = number_of(held.heir or held.token[0])
        # A retry that has asked in a pause comes in time only if it was held on.
        is_late = not held.heir and scene.calls[number].has_met and held.deadline < HELD_ON
        return is_late or number not in coming(scene)

    def _terms(self, process: Process) -> str:
        return f"{self.own}\n{process.live}" if process.live else self.own

    def _asks(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A call asks for its lock."""
        message, name = process.message, name_of(process.message.call)
        call, terms = scene.calls[message.call], self._terms(process)
        token = process.token or _new_token(scene, f"{name}|{message.attempt}|")
        begun = REMEMBER_MS if message.again or message.copy != ORIGINAL else 0
        keys = (LOCK, RECORD, *IN_LINE, MARK, ticket_of(name), PERMITS, TERMS)
        keys += () if terms == "1" else (STARTS, *self.others)
        told = (token, LEASE, REMEMBER_MS, "", "", message.copy, begun, 0, call.since, message.attempt, terms)
        for after, reply in self.answers(scene, "acquire", keys, *told, int(message.again), 0):
            word, is_its_own = reply[0], (reply[5] or "").startswith(f"{name}|")
            permit = reply[3] if reply[7] is None else reply[8]  # it says little if it was free
            holds = process._replace(at="inside", token=token, permit=int(permit or 0))
            if word == "stale":
                yield _event("is dropped", process), after
            elif word in REFUSED and (is_its_own or self.policies[message.call] == "r"):
                has_met = call.has_met or (is_its_own and word == "paused")
                after = changed(after, message.call, has_met=has_met)
                again = message._replace(again=message.again or (is_its_own and word == "held"))
                yield _event(REFUSED[word], process, word), sent(after, again)
            elif word in REFUSED:
                place = call.place or 1 + max(each.place for each in scene.calls)
                parks = process._replace(at="parks" if word in ("held", "line") else "stands_by")
                after = changed(after._replace(is_due=True), message.call, place=place)
                yield _event(REFUSED[word], process, word), joined(after, parks)
            elif call.has_ended or message.attempt < call.attempt:
                yield _event("has run before", holds, word), joined(after, holds._replace(at="leaves"))
            else:
                what = "goes on" if word == "again" else "starts"
                yield _event(what, holds, word, process.live), joined(after, holds)

    def _parks(self, scene: Scene, process: Process) -> Iterator[Step]:
        message, name = process.message, name_of(process.message.call)
        keys = (LOCK, RECORD, *IN_LINE, ticket_of(name), PERMITS, NEWEST, TERMS)
        told = name, message.attempt, message.copy, scene.calls[message.call].since, message.attempt
        for after, reply in self.answers(scene, "park", keys, *told, REMEMBER_MS, self._terms(process)):
            if reply[0] == "stale":
                yield _event("is dropped", process), after
                continue
            is_its_turn = process.at == "parks" and reply[2] is None and reply[4] == "1"
            if is_its_turn or reply[0] == "handed":
                after = joined(after, process._replace(at="asks"))
            after = after._replace(is_due=after.is_due or self.notes_again)
            yield _event("parks", process, reply[0]), after

    _stands_by = _parks  # though it is the first at a free lock: no call may start

    def _inside(self, scene: Scene, process: Process) -> Iterator[Step]:
        message, call = process.message, scene.calls[process.message.call]
        for till in (SHORT, LONGER) if scene.backs else ():
            less, keys = scene._replace(backs=scene.backs - 1), (*pair(process.permit), TERMS)
            for after, reply in self.answers(less, "hold_back", keys, process.token, till - START, "{}"):
                pause = scene.said.pause if reply[0] == "lost" else int(reply[2])
                after = joined(after._replace(said=scene.said._replace(pause=pause)), process)
                yield _event("holds back", process, reply[0], till), after
        is_this, leaves = call.attempt == message.attempt, process._replace(at="leaves")
        if is_this and message.call == 0 and message.attempt < self.retries:
            retry = sent(scene, Message(0, message.attempt + 1))
            retry = changed(retry, 0, attempt=message.attempt + 1, place=0, has_met=False)
            holds = process._replace(at="holds") if self.hold else leaves
            yield _event("retries", process), joined(retry, holds)
        else:
            ended = changed(scene, message.call, has_ended=call.has_ended or is_this)
            yield _event("ends", process), joined(ended, leaves)

    def _holds(self, scene: Scene, process: Process) -> Iterator[Step]:
        told = process.token, HELD, REMEMBER_MS
        for after, reply in self.answers(scene, "hold", pair(process.permit), *told):
            yield _event("holds it", process, reply[0]), after

    def _leaves(self, scene: Scene, process: Process) -> Iterator[Step]:
        number, terms = process.permit, self._terms(process)
        keys = (*pair(number), *IN_LINE, TERMS, *((MARK, PERMITS) if number or process.live else ()))
        if process.live:
            keys += (DONE, STARTS, *(name for name in (*pair(0), *self.others) if name not in pair(number)))
        told: tuple[Any, ...] = process.token, 0, REMEMBER_MS, 0, SECOND, 0
        told += () if terms == "1" else (terms, number)
        for after, reply in self.answers(scene, "release", keys, *told):
            heir, call, look = reply[3:6]
            after = after._replace(is_due=after.is_due or bool(look))
            yield _event("releases", process, look, heir), _waking(after, process.message, heir, call)

    def _quits(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A woken call is revoked: it leaves the line."""
        (call, attempt, copy, _), name = process.message, name_of(process.message.call)
        keys = (LOCK, RECORD, *IN_LINE, ticket_of(name), PERMITS, STARTS, TERMS)
        told = name, attempt, copy, REMEMBER_MS, 0, f"left {name}", SECOND, self._terms(process)
        for after, (word, _, heir, waker, look, *_) in self.answers(scene, "leave", keys, *told):
            ended = after if word == "stale" else changed(after, call, has_ended=True)
            ended = ended._replace(is_due=ended.is_due or bool(look))
            yield _event("leaves", process, look, heir), _waking(ended, process.message, heir, waker)

    def _wakes(self, scene: Scene, process: Process) -> Iterator[Step]:
        yield Event(process.wakes[0], "is woken"), sent(scene, newest._copy(scene, *process.wakes))

    def _looks(self, scene: Scene) -> Iterator[Step]:
        """A worker looks at the line, on the terms that it knows."""
        keys = (LOCK, RECORD, *IN_LINE, PERMITS, STARTS, TERMS, *self.others)
        terms = f"{self.sweeper or self.own}\n{scene.heard}".rstrip("\n")
        told = _new_token(scene, "s|0|"), SECOND, REMEMBER_MS, LEASE, "", "", "", terms
        for after, (word, _, value, _, heir, call, due, *_) in self.answers(scene, "serve", keys, *told):
            waits = heir is not None or due != "0" or (word == "held" and value is not None)
            after = _waking(after._replace(is_due=waits), SWEEP, heir, call)
            yield Event(None, "a worker looks", "", (word, heir)), after

    # Where it is to get.

    def is_over(self, scene: Scene) -> bool:
        """Each call has ended, and nobody waits."""
        is_quiet = not scene.broker and not scene.processes and not shown(scene.keys).line
        return is_quiet and all(call.has_ended for call in scene.calls)


# What holds of every step.


@caused_by("starts")
def none_starts_in_a_pause(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """Neither in the key's, nor in its task's if the delivery has brought that."""
    return not before.said.pause and not event.reply[1]


@caused_by("releases", "leaves", "a worker looks")
def none_is_handed_in_a_pause(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """It would be refused."""
    return not before.said.pause or event.reply[1] is None


def none_is_lost(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """Each call that has not ended comes, or stands in a line that somebody looks at, or is about to note."""
    seen, on_their_way = shown(after.keys), coming(after)
    waits = {number_of(task) for _, task in seen.line}
    handed = {number_of(each.heir) for each in seen.held if each.heir}
    is_seen_to = after.is_due or any(process.at in ("parks", "stands_by") for process in after.processes)
    owed = {number for number, call in enumerate(after.calls) if not call.has_ended}
    is_known = owed <= waits | handed | on_their_way
    return is_known and (is_seen_to or not waits | (handed - on_their_way))


@caused_by("a worker looks")
def line_goes_on(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """Without a pause, and with a permit and a start to be had, the first is handed it."""
    seen, said = shown(before.keys), before.said
    waits = [task for since, task in seen.line if since < AWAY]
    is_free = any(not seen.of(number).is_live for number in range(_limit(world, before)))
    handed = [each for each in seen.held if each.heir]
    is_slow = said.rate and seen.starts + sum(each.is_live for each in handed) >= said.rate
    if said.pause or before.heard or is_slow or not waits or not is_free:
        return True
    comes_back = not all(each.is_live for each in handed)
    comes_back |= any(AWAY <= at <= AWAY + START for at, _ in seen.line)
    return event.reply[1] == waits[0] or (comes_back and event.reply[1] is not None)


@caused_by("is paused", "parks")
def place_is_kept(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """A call that is refused in a pause gives back what it was handed, and is not passed over."""
    was, seen, number = shown(before.keys), shown(after.keys), event.actor or 0
    name, place = name_of(number), after.calls[number].since
    if name not in was.misses or event.reply[0] == "handed":
        return True
    if event.what == "is paused" and not any(each.is_handed_to(name) for each in was.held):
        return True
    is_handed = any(each.is_handed_to(name) for each in seen.held)
    return not is_handed and (place, name) in seen.line and seen.misses.get(name) == was.misses[name]


@caused_by("starts")
def within_the_terms(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """A call starts within the rate, and the limit that counts, unless that permit is its own already."""
    number = next(process.permit for process in after.processes if process.token == event.token)
    seen, name = shown(before.keys), event.token[0]
    is_its_own = name in (seen.of(number).token[0], seen.of(number).heir)
    is_alone = before.lapses < world.lapses or all(
        (process.at, process.permit) != ("inside", number) for process in before.processes
    )
    is_slow = before.said.rate and seen.starts >= before.said.rate
    return is_alone and not is_slow and (is_its_own or number < _limit(world, before))


def own_terms_are_noted(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """Never those that count for a while."""
    return shown(after.keys).own in ("", world.own)


@caused_by("starts")
def held_is_kept(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """Nobody else has what is held for a retry that comes in time."""
    number = next(process.permit for process in after.processes if process.token == event.token)
    held = shown(before.keys).of(number)
    is_others = held.state == "held_for_retry" and held.token[0] != event.token[0]
    return not is_others or number_of(held.token[0]) not in coming(before)


@caused_by("holds back")
def holding_back_is_the_holders(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """Only the live holder can, and no pause ends sooner."""
    was, till = before.said.pause, event.reply[1]
    holders = [each.token for each in shown(before.keys).held if each.is_live and each.state == "running"]
    return shown(after.keys).pause == (max(was, till) if event.token in holders else was)


@caused_by("releases", "leaves")
def looked_at_soon(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """A pause may end at any time."""
    look = event.reply[0]
    return not (before.said.pause and look) or int(look) <= SOON


def what_is_said_stands(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """The key's pause is the one that was set, until it is ended."""
    return shown(after.keys).pause == after.said.pause


def keys_last(world: Live, before: Scene, event: Event, after: Scene) -> bool:
    """Each key has a TTL; that of terms reaches to their end."""
    return not after.wrong


SAFETY: tuple[Property, ...] = (
    keys_last, none_starts_in_a_pause, none_is_handed_in_a_pause, place_is_kept, within_the_terms,
    own_terms_are_noted, held_is_kept, holding_back_is_the_holders, looked_at_soon, what_is_said_stands,
    line_goes_on, none_is_lost,
)  # fmt: skip


# Parts.


def _event(what: str, process: Process, *reply: Any) -> Event:
    return Event(process.message.call, what, process.token, reply or ("",))


def _limit(world: Live, scene: Scene) -> int:
    return scene.said.limit or int(world.own)


def _new_token(scene: Scene, start: str) -> str:
    used = {process.token for process in scene.processes} | {each.token for each in shown(scene.keys).held}
    return next(token for n in range(16) if (token := f"{start}{n:x}") not in used)


def _waking(scene: Scene, message: Message, heir: str | None, call: str | None) -> Scene:
    if not heir or call is None:
        return scene
    return joined(scene, Process("wakes", message, wakes=(number_of(heir), int(call))))


def _wrong(keys: Mapping[bytes, Entry]) -> str:
    for name, entry in keys.items():
        texts = [entry.value] if name == TERMS else [entry.value[0][1]] if name == OF_TASKS else []
        ends = [int(line.split(b" ")[1]) for text in texts for line in text.split(b"\n")]
        if entry.expiry is None or entry.expiry * MS < max(ends, default=0):
            return f"{name.decode()} ends before what it says, or never"
    return ""


def _canonical(keys: Mapping[bytes, Entry]) -> Keys:
    """With no more of what was than somebody asks."""
    found = {}
    for name, entry in keys.items():
        value, lasts = entry.value, LONGER if name in (TERMS, OF_TASKS) else START + LEASE
        if name.startswith(RECORD):
            token, deadline, _, state, _, info = value.decode().split("\n", 5)
            token = "|0|0" if deadline == "0" and state == "released" else token
            deadline = str(min(int(deadline), LATEST))
            value = "\n".join((token, deadline, "1", state, str(START), info)).encode()
        if name == STARTS:
            value = tuple((float(START), b"%d#9#%d" % (START, n)) for n in range(len(value)))
        found[name] = Entry(entry.kind, value, lasts // MS + REMEMBER_MS)
    return tuple(sorted(found.items()))
