"""Calls that replace each other: their publishers, messages and workers, over the real scripts.

No clock runs, as in waiters.py: a deadline, the bound, or the time of one that is passed over may pass at any
moment. Generations rise with each reservation, so calls are named in the order in which they reserve. Every
message is acknowledged late: a worker that dies has its message delivered again. What Redis holds is told by
its keys alone; beside it stands what really happened.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, NamedTuple

from tests.model.explorer import START, Event, Property
from tests.model.line import AWAY
from tests.model.lock import TEXTS
from tests.model.store import MS, SECOND, seconds
from tests.simulation.scripts import script
from tests.simulation.server import Entry, Server

LOCK, RECORD, LINE, CALLS, PERMITS, STARTS = b"lock", b"holder", b"line", b"calls", b"permits", b"starts"
NEWEST, DONE, TERMS = b"newest", b"done", b"terms"
ORIGINAL = "-"
LEASE, BOUND = 1_000 * SECOND, 5 * SECOND
REMEMBER_MS = 1_000_000
PAST = START - SECOND
FIRST, LAST = 3, 4  # lines of what is known of the newest

Keys = tuple[tuple[bytes, Entry], ...]


class Message(NamedTuple):
    """A message of a call in the broker; `again`: another delivery of it may have begun."""

    call: int
    attempt: int = 0
    copy: str = ORIGINAL
    again: bool = False


SWEEP = Message(-1)


class Process(NamedTuple):
    """A worker with a message: where it stands, its token, and whom it is about to wake, and how."""

    at: str
    message: Message
    token: str = ""
    wakes: tuple[int, ...] = ()  # call and attempt


class Published(NamedTuple):
    """A call. `phase`: '', `reserved`, `sent`, or `gone`: its publisher died before it sent it.

    `settles`: whether its publisher is still to say that it is sent. `fate`: '', `duplicate`, `running`,
    `ran`, `superseded`, `revoked` or `lost`. `since`: its place in the line.
    """

    phase: str = ""
    generation: int = 0
    leads: bool = False
    settles: bool = False
    fate: str = ""
    since: int = 0
    began: int = 0  # attempts that have started


class Scene(NamedTuple):
    """The whole world: what Redis holds, what really happened, and what may still go wrong.

    `started` and `settled`: the newest call of which that is known while the data live. `is_overdue`: nothing
    has started for the bound, though calls wait. `wrong`: what a script has done to a key.
    """

    keys: Keys
    calls: tuple[Published, ...]
    broker: tuple[Message, ...]
    processes: tuple[Process, ...]
    started: int
    settled: int
    is_overdue: bool
    wrong: str
    now: int
    crashes: int
    losses: int
    wipes: int
    seconds: int
    revokes: int
    drops: int
    deaths: int
    bounds: int

    @property
    def store(self) -> Any:
        """As traces have it."""
        return _Shown(dict(self.keys))


class _Shown:
    def __init__(self, keys: Mapping[bytes, Entry]) -> None:
        texts = [keys[name].value.decode() if name in keys else "" for name in (RECORD, NEWEST)]
        line = [task.decode() for _, task in keys[LINE].value] if LINE in keys else []
        record = texts[0].split("\n") if texts[0] else []
        self.value = f"{record[0]} {record[3]}" if record else None, line, texts[1].replace("\n", " ")


Step = tuple[Event, Scene]


@dataclass(eq=False)
class Replacing:
    """Calls of one key, published in this order, and how much may go wrong."""

    digests: str  # of each call's arguments, a letter
    _: KW_ONLY
    slots: int = 2  # workers
    retries: Mapping[int, int] = field(default_factory=dict)
    hold: bool = False
    leading: bool = False
    debounce: int = 0
    crashes: int = 0
    losses: int = 0  # replies that may be lost, and the command sent again
    wipes: int = 0
    seconds: int = 0  # messages that may be delivered again while their first delivery runs
    revokes: int = 0
    drops: int = 0  # messages that the broker may lose
    deaths: int = 0  # publishers that may die before they send
    bounds: int = 0  # how often the bound may pass
    begins: int = START  # us
    texts: Mapping[str, str] = field(default_factory=dict)  # a mutant's
    leaves: bool = True  # a superseded call leaves the line
    frees: bool = True  # and gives back what is held for it
    wakes_older: bool = True
    settles_first: bool = False  # before it sends

    def __post_init__(self) -> None:
        self.scripts = {verb: script(self.texts.get(verb, text)) for verb, text in TEXTS.items()}
        self.known: dict[Any, tuple[Keys, tuple[Any, ...], str]] = {}
        names = Scene._fields[Scene._fields.index("crashes") :]
        calls = tuple(Published() for _ in self.digests)
        self.start = Scene(
            (), calls, (), (), 0, 0, False, "", self.begins, *[getattr(self, each) for each in names]
        )

    # What Redis does.

    def ran(self, scene: Scene, verb: str, keys: tuple[bytes, ...], *told: Any) -> tuple[Scene, list[Any]]:
        """What a script leaves, and its reply."""
        words = tuple(str(word).encode() for word in told)
        asked = verb, scene.keys, scene.now, keys, words
        if asked not in self.known:
            server = Server(scene.keys, scene.now)
            reply = self.scripts[verb].run(server, keys, words)
            said = tuple(_said(word) for word in (reply.split(b" ") if isinstance(reply, bytes) else reply))
            wrong = _wrong(dict(scene.keys), server.keys, scene.now)
            self.known[asked] = _canonical(server.keys, scene.now), said, wrong
        left, said, wrong = self.known[asked]
        return scene._replace(keys=left, wrong=scene.wrong or wrong), list(said)

    def answers(
        self, scene: Scene, verb: str, keys: tuple[bytes, ...], *told: Any
    ) -> Iterator[tuple[Scene, list[Any], str]]:
        """The same; and once more if the reply is lost, and the command is sent again."""
        after, reply = self.ran(scene, verb, keys, *told)
        yield after, reply, verb
        if scene.losses:
            again = self.ran(after._replace(losses=scene.losses - 1), verb, keys, *told)
            yield *again, f"{verb}, twice"

    # What may happen.

    def steps(self, scene: Scene) -> Iterator[Step]:
        """Everything that may happen next."""
        yield from self._published(scene)
        yield from self._times(scene)
        for message in sorted(set(scene.broker)):
            rest = scene._replace(broker=_without(scene.broker, message))
            if len(scene.processes) < self.slots:
                yield from self._taken(rest, message)
            if scene.drops and message == Message(message.call):
                lost = _fated(rest._replace(drops=scene.drops - 1), message.call, "lost")
                yield _event("is lost by the broker", message), lost
        for process in sorted(set(scene.processes)):
            rest = scene._replace(processes=_without(scene.processes, process))
            yield from getattr(self, f"_{process.at}")(rest, process)
            if scene.crashes:
                again = process.message._replace(again=True)
                dead = rest._replace(crashes=scene.crashes - 1)
                dead = dead if process.message == SWEEP else _sent(dead, again)
                yield _event("is killed", process.message), dead
            if scene.seconds and process.at == "inside":
                again = process.message._replace(again=True)
                twin = _sent(scene._replace(seconds=scene.seconds - 1), again)
                yield _event("is delivered again", process.message), twin
        yield from self._swept(scene)
        if scene.wipes and scene.keys:
            later = scene.now + SECOND
            lost = scene._replace(
                keys=(), wipes=scene.wipes - 1, now=later, started=0, settled=0, is_overdue=False
            )
            yield Event(None, "data is lost"), lost
        if scene.now > self.begins:
            yield from self._couriers(scene)

    def _couriers(self, scene: Scene) -> Iterator[Step]:
        """Of calls that Redis has forgotten."""
        calls = dict(scene.keys).get(CALLS)
        waits = {_number(task.decode()) for task, _ in calls.value} if calls else set()
        for number, call in enumerate(scene.calls):
            is_owed = call.phase == "sent" and call.fate in ("", "running")
            if is_owed and number not in _coming(scene) | waits:
                message = Message(number, call.began, "courier", again=True)
                yield Event(number, "its courier sends it"), _sent(scene, message)

    def _published(self, scene: Scene) -> Iterator[Step]:
        for number, call in enumerate(scene.calls):
            before = number == 0 or scene.calls[number - 1].phase != ""
            if call.phase == "" and before:
                yield from self._reserves(scene, number)
            elif call.phase == "reserved":
                sent = _changed(scene, number, phase="sent", settles=True)
                yield _event("is sent", Message(number)), _sent(sent, Message(number))
                if scene.deaths:
                    gone = _changed(scene, number, phase="gone", fate="lost")
                    yield Event(number, "its publisher dies"), gone._replace(deaths=scene.deaths - 1)
                if self.settles_first:
                    yield from self._settles(scene, number, call)
            elif call.settles:
                yield from self._settles(scene, number, call)

    def _reserves(self, scene: Scene, number: int) -> Iterator[Step]:
        told = self.digests[number], REMEMBER_MS, self.debounce, BOUND, int(self.leading), REMEMBER_MS
        for after, (word, generation, *_), what in self.answers(scene, "reserve", (NEWEST,), *told):
            if word == "queued":
                after = _changed(after, number, phase="gone", fate="duplicate", generation=int(generation))
                yield Event(number, "is a duplicate", "", (generation,)), after
            else:
                about = {"generation": int(generation), "leads": word == "leading"}
                yield Event(number, what, "", (word,)), _changed(after, number, phase="reserved", **about)

    def _settles(self, scene: Scene, number: int, call: Published) -> Iterator[Step]:
        told = call.generation, _name(number), self.digests[number], scene.now, REMEMBER_MS
        for after, reply, what in self.answers(scene, "replace", (NEWEST,), *told):
            if reply[0] == "settled":
                after = after._replace(settled=max(after.settled, call.generation))
            yield Event(number, what, "", tuple(reply)), _changed(after, number, settles=False)

    def _times(self, scene: Scene) -> Iterator[Step]:
        keys = dict(scene.keys)
        newest = _newest(keys)
        if scene.bounds and newest and newest[FIRST] > 0 and scene.now < newest[FIRST] + BOUND:
            words = keys[NEWEST].value.decode().split("\n")
            words[FIRST] = words[LAST] = str(scene.now - BOUND)
            passed = _with_key(scene, NEWEST, "\n".join(words))
            yield Event(None, "the bound passes"), passed._replace(is_overdue=True, bounds=scene.bounds - 1)
        record = _record(keys)
        if record and LOCK in keys and int(record[1]) > scene.now and self._may_lapse(scene, record):
            record[1] = str(PAST)
            past = _with_key(_with_key(scene, RECORD, "\n".join(record)), LOCK, seconds(PAST))
            yield Event(None, f"the deadline of a {record[3]} lock passes"), past
        if LINE in keys:
            for at, task in keys[LINE].value:
                if at > AWAY + scene.now:
                    places = tuple(
                        sorted(
                            (float(AWAY + PAST) if who == task else since, who)
                            for since, who in keys[LINE].value
                        )
                    )
                    after = {**keys, LINE: keys[LINE]._replace(value=places)}
                    yield (
                        Event(None, f"{task.decode()} is to be back"),
                        scene._replace(keys=tuple(sorted(after.items()))),
                    )

    def _may_lapse(self, scene: Scene, record: list[str]) -> bool:
        if record[3] == "running":
            return all(process.token != record[0] for process in scene.processes)
        if record[3] == "handed":
            return _number(record[5]) not in _coming(scene)
        return True

    def _taken(self, scene: Scene, message: Message) -> Iterator[Step]:
        if scene.revokes and scene.calls[message.call].fate != "running":
            revoked = scene._replace(revokes=scene.revokes - 1)
            yield _event("is revoked", message), _with(revoked, Process("revoked", message))
        yield from self._asks(scene, Process("asks", message))

    def _revoked(self, scene: Scene, process: Process) -> Iterator[Step]:
        message = process.message
        call = scene.calls[message.call]
        told = call.generation, _name(message.call), ""
        for after, reply, what in self.answers(scene, "drop", (NEWEST,), *told):
            if reply[0] == "done":
                started = max(after.started, call.generation)
                after = after._replace(
                    started=started, is_overdue=after.is_overdue and after.settled > started
                )
            after = _fated(after, message.call, "revoked")
            yield (
                Event(message.call, what, "", tuple(reply)),
                self._ended(after, process, leaves=message.copy != ORIGINAL),
            )

    def _asks(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A call asks for its lock."""
        message, (call, name) = (
            process.message,
            (scene.calls[process.message.call], _name(process.message.call)),
        )
        token = process.token or _new_token(scene, f"{name}|{message.attempt}|")
        begun = REMEMBER_MS if message.again or message.copy != ORIGINAL else 0
        keys = (LOCK, RECORD, LINE, CALLS, NEWEST, _ticket(name), PERMITS, TERMS)
        told: tuple[Any, ...] = (
            token,
            LEASE,
            REMEMBER_MS,
            "",
            "",
            message.copy,
            begun,
            0,
            call.since,
            message.attempt,
            1,
        )
        told += (int(message.again), 0, call.generation, BOUND, int(call.leads), REMEMBER_MS)
        is_free = LOCK not in dict(scene.keys) and LINE not in dict(scene.keys)
        for after, reply, what in self.answers(scene, "acquire", keys, *told):
            word, has_run = reply[0], call.fate == "ran" and message.again
            held = Process("inside", message, token)
            if word == "stale":
                yield _event("is dropped", message), after
            elif word == "superseded":
                by = reply[6]
                about = (by, "free" if is_free and what == "acquire" else "")
                if has_run:
                    yield _event("has run before", message), self._ended(after, process)
                    continue
                runs = any(p.at == "inside" and p.message.call == message.call for p in after.processes)
                after = after if runs or call.fate == "ran" else _fated(after, message.call, "superseded")
                at = "frees" if self.hold and self.frees and message.attempt else ""
                yield (
                    Event(message.call, "is superseded", "", about),
                    (_with(after, Process(at, message)) if at else self._ended(after, process)),
                )
            elif word in ("held", "line"):
                if call.generation > after.settled and not call.leads:
                    after = after._replace(settled=call.generation)
                elif call.leads:
                    after = after._replace(settled=max(after.settled, call.generation))
                own = _record(dict(after.keys))
                if word == "held" and own and own[0].startswith(f"{name}|"):
                    yield _event("waits for its own", message), _sent(after, message._replace(again=True))
                else:
                    if not call.since:
                        since = after.now - 1_000 + sum(each.since > 0 for each in after.calls)
                        after = _changed(after, message.call, since=since)
                    yield (
                        Event(message.call, "is refused", "", (word,)),
                        _with(after, Process("parks", message)),
                    )
            elif has_run:
                yield _event("has run before", message), _with(after, held._replace(at="leaves"))
            else:
                started = max(after.started, call.generation)
                began = _changed(
                    after, message.call, fate="running", began=max(call.began, message.attempt + 1)
                )
                began = began._replace(
                    started=started, settled=max(after.settled, call.generation), is_overdue=False
                )
                yield Event(message.call, "starts", token, (word, str(scene.started))), _with(began, held)

    def _frees(self, scene: Scene, process: Process) -> Iterator[Step]:
        keys = (LOCK, RECORD, PERMITS)
        for after, _, what in self.answers(scene, "free", keys, _name(process.message.call), REMEMBER_MS):
            yield _event(what, process.message), self._ended(after, process)

    def _parks(self, scene: Scene, process: Process) -> Iterator[Step]:
        message, (call, name) = (
            process.message,
            (scene.calls[process.message.call], _name(process.message.call)),
        )
        keys = (LOCK, RECORD, LINE, CALLS, _ticket(name), PERMITS, NEWEST, TERMS)
        generation = 0 if call.leads else call.generation
        told = name, message.attempt, message.copy, call.since, message.attempt, REMEMBER_MS, 1, 0, generation
        for after, reply, what in self.answers(scene, "park", keys, *told):
            word, older, is_full = reply[0], (*reply, None)[5], len(reply) == 6
            if word in ("superseded", "handed") or (reply[2] is None and reply[4] == "1"):
                yield Event(message.call, what, "", (word,)), _with(after, Process("asks", message))
            elif word == "stale":
                yield _event("is dropped", message), after
            else:
                at = Process(
                    "tells", message, wakes=_waits(after, older) if older and self.wakes_older else ()
                )
                yield Event(message.call, what, "", (word, older, is_full)), _with(after, at)

    def _tells(self, scene: Scene, process: Process) -> Iterator[Step]:
        """It has parked: it wakes the older call, which ends; and what is known of it lasts."""
        told = scene.calls[process.message.call].generation, _name(process.message.call), REMEMBER_MS
        after, _ = self.ran(scene, "drop", (NEWEST,), *told)
        if process.wakes:
            after = _sent(after, _copy(after, *process.wakes))
        yield _event("waits", process.message), after

    def _inside(self, scene: Scene, process: Process) -> Iterator[Step]:
        message = process.message
        ended = (
            scene
            if scene.calls[message.call].began > message.attempt + 1
            else _fated(scene, message.call, "ran")
        )
        yield _event("ends", message), _with(ended, process._replace(at="leaves"))
        if (
            message.attempt < self.retries.get(message.call, 0)
            and scene.calls[message.call].began == message.attempt + 1
        ):
            retry = _sent(scene, Message(message.call, message.attempt + 1))
            retry = _fated(retry, message.call, "")
            yield (
                _event("retries", message),
                _with(retry, process._replace(at="holds" if self.hold else "leaves")),
            )

    def _holds(self, scene: Scene, process: Process) -> Iterator[Step]:
        told = process.token, LEASE, REMEMBER_MS
        for after, reply, what in self.answers(scene, "hold", (LOCK, RECORD), *told):
            yield Event(process.message.call, what, "", tuple(reply[:1])), after

    def _leaves(self, scene: Scene, process: Process) -> Iterator[Step]:
        told = process.token, 0, REMEMBER_MS, 0, SECOND, 0
        for after, reply, what in self.answers(
            scene, "release", (LOCK, RECORD, LINE, CALLS, TERMS, NEWEST), *told
        ):
            yield Event(process.message.call, what, "", tuple(reply[:1])), _waking(after, process, reply[3:5])

    def _ended(self, scene: Scene, process: Process, *, leaves: bool = True) -> Scene:
        """A call that ends without its lock leaves the line if it may be there."""
        message = process.message
        may_be = message.copy != ORIGINAL or message.again
        return _with(scene, Process("quits", message)) if leaves and may_be and self.leaves else scene

    def _quits(self, scene: Scene, process: Process) -> Iterator[Step]:
        message, name = process.message, _name(process.message.call)
        keys = (LOCK, RECORD, LINE, CALLS, _ticket(name), PERMITS, STARTS, TERMS)
        token = f"left {name} {message.attempt} {message.copy}"
        told = name, message.attempt, message.copy, REMEMBER_MS, 0, token, SECOND, 1, ""
        for after, reply, what in self.answers(scene, "leave", keys, *told):
            yield Event(message.call, what, "", tuple(reply[:1])), _waking(after, process, reply[2:4])

    def _wakes(self, scene: Scene, process: Process) -> Iterator[Step]:
        yield Event(process.wakes[0], "is woken"), _sent(scene, _copy(scene, *process.wakes))

    def _swept(self, scene: Scene) -> Iterator[Step]:
        keys, record = dict(scene.keys), _record(dict(scene.keys))
        is_held = LOCK in keys and record is not None and int(record[1]) > scene.now
        waits = LINE in keys or (record is not None and record[3] == "handed" and LOCK in keys)
        if is_held or not waits or any(process.at == "wakes" for process in scene.processes):
            return
        names = (LOCK, RECORD, LINE, CALLS, PERMITS, STARTS, TERMS)
        told = _new_token(scene, "s|0|"), SECOND, REMEMBER_MS, LEASE, "", "", "", 0
        after, reply = self.ran(scene, "serve", names, *told)
        if after != scene:
            swept = Process("wakes", SWEEP)
            yield Event(None, "a worker sweeps", "", tuple(reply[:1])), _waking(after, swept, reply[4:6])

    # Where it is to get.

    def is_over(self, scene: Scene) -> bool:
        """Each call that was sent has ended, and nothing is left behind."""
        ends = all(call.phase != "sent" or call.fate not in ("", "running") for call in scene.calls)
        begun = all(call.phase in ("sent", "gone") for call in scene.calls)
        return begun and ends and not scene.broker and not scene.processes and LINE not in dict(scene.keys)


# What holds of every step.


def older_never_starts(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """No call starts after a newer one has started, or has ended without a start."""
    return event.what != "starts" or after.calls[event.actor or 0].generation >= before.started


def newest_runs(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """When all is over the newest call that was sent has run, if it came, and was not revoked."""
    if not world.is_over(after) or any(call.settles for call in after.calls):
        return True
    came = [call for call in after.calls if call.phase == "sent"]
    if not came or came[-1].fate in ("lost", "revoked"):
        return True
    return came[-1].fate == "ran"


def overdue_is_not_superseded(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """Once the bound has passed, only a newer start supersedes a call that need not wait."""
    if event.what != "is superseded" or not before.is_overdue or event.reply[1] != "free":
        return True
    return before.started > before.calls[event.actor or 0].generation


def superseded_by_a_sent(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """Who supersedes a call was sent, and is newer."""
    if event.what != "is superseded":
        return True
    number = _number(event.reply[0])
    by, call = after.calls[number], after.calls[event.actor or 0]
    return by.phase == "sent" and (by.generation > call.generation)


def leading_is_superseded_by_a_start(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """Only a start supersedes a call that leads."""
    call = after.calls[event.actor or 0]
    return event.what != "is superseded" or not call.leads or before.started > call.generation


def duplicate_of_the_newest(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """A duplicate equals the newest call that is sent, which has not started; nothing later is reserved."""
    if event.what != "is a duplicate":
        return True
    number = event.actor or 0
    of = [
        each
        for each, call in enumerate(before.calls)
        if str(call.generation) == event.reply[0] and call.phase == "sent"
    ]
    is_newest = all(call.generation <= int(event.reply[0]) for call in before.calls if call.phase != "")
    equals = of and world.digests[of[0]] == world.digests[number]
    return bool(equals) and is_newest and before.started < int(event.reply[0]) and world.debounce == 0


def older_is_woken(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """Of calls that wait in line only the newest is left to its turn: each older one has a message."""
    keys = dict(after.keys)
    if event.what != "waits" or LINE not in keys:
        return True
    waits = [_number(task.decode()) for _, task in keys[LINE].value]
    waits = [number for number in waits if not after.calls[number].leads]
    newest = max((after.calls[number].generation for number in waits), default=0)
    return all(number in _coming(after) for number in waits if after.calls[number].generation < newest)


def settled_replaces(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """No call starts, or has to wait, if a newer one is known to be sent; but one that leads does.

    Once the bound has passed, one that need not wait starts.
    """
    call = before.calls[event.actor or 0]
    may = call.leads or (event.what == "starts" and before.is_overdue)
    if event.what not in ("starts", "is refused") or may:
        return True
    return before.settled <= call.generation


def keeps_nothing(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """A superseded call that has ended holds no lock."""
    record = _record(dict(after.keys))
    if record is None or LOCK not in dict(after.keys) or record[3] != "held_for_retry":
        return True
    number = _number(record[0][0])
    return after.calls[number].fate != "superseded" or number in _coming(after) or int(record[1]) <= after.now


def parking_is_answered(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """The reply to who parks has all its words: a table ends at its first nil."""
    return not event.what.startswith("park") or len(event.reply) < 3 or event.reply[2]


def keys_last(world: Replacing, before: Scene, event: Event, after: Scene) -> bool:
    """Each key has a TTL; that of what is known of the newest is never shortened."""
    return not after.wrong


SAFETY: tuple[Property, ...] = (
    keys_last,
    parking_is_answered,
    older_never_starts,
    newest_runs,
    overdue_is_not_superseded,
    superseded_by_a_sent,
    leading_is_superseded_by_a_start,
    duplicate_of_the_newest,
    settled_replaces,
    keeps_nothing,
    older_is_woken,
)


# Parts.


def _coming(scene: Scene) -> set[int]:
    """Calls with a message on its way, or in hand, or about to be sent."""
    found = {message.call for message in scene.broker}
    for process in scene.processes:
        found |= {process.message.call, *process.wakes[:1]} if process.at != "tells" else {*process.wakes[:1]}
    return found


def _name(number: int) -> str:
    return "abcdef"[number]


def _number(task: str) -> int:
    return "abcdef".index(task)


def _ticket(name: str) -> bytes:
    return b"ticket:" + name.encode()


def _said(word: Any) -> str | None:
    return word.decode() if isinstance(word, bytes) else None if word is None else str(word)


def _event(what: str, message: Message) -> Event:
    return Event(message.call, what)


def _without(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
    place = items.index(item)
    return items[:place] + items[place + 1 :]


def _with(scene: Scene, process: Process) -> Scene:
    return scene._replace(processes=tuple(sorted((*scene.processes, process))))


def _sent(scene: Scene, message: Message) -> Scene:
    return scene._replace(broker=tuple(sorted((*scene.broker, message))))


def _changed(scene: Scene, number: int, **changes: Any) -> Scene:
    calls = list(scene.calls)
    calls[number] = calls[number]._replace(**changes)
    return scene._replace(calls=tuple(calls))


def _fated(scene: Scene, number: int, fate: str) -> Scene:
    return _changed(scene, number, fate=fate)


def _with_key(scene: Scene, name: bytes, text: str) -> Scene:
    keys = dict(scene.keys)
    keys[name] = keys[name]._replace(value=text.encode())
    return scene._replace(keys=tuple(sorted(keys.items())))


def _record(keys: Mapping[bytes, Entry]) -> list[str] | None:
    return keys[RECORD].value.decode().split("\n", 5) if RECORD in keys else None


def _newest(keys: Mapping[bytes, Entry]) -> list[int] | None:
    return [int(word) for word in keys[NEWEST].value.decode().split("\n")[:8]] if NEWEST in keys else None


def _new_token(scene: Scene, start: str) -> str:
    record = _record(dict(scene.keys))
    used = {process.token for process in scene.processes} | ({record[0]} if record else set())
    return next(token for n in range(16) if (token := f"{start}{n:x}") not in used)


def _copy(scene: Scene, number: int, attempt: int) -> Message:
    """A message that wakes a call."""
    ticket = dict(scene.keys).get(_ticket(_name(number)))
    used = {m.copy for m in scene.broker if m.call == number}
    used |= {p.message.copy for p in scene.processes if p.message.call == number}
    used |= {ticket.value.decode().split("|")[1]} if ticket else set()
    return Message(number, attempt, next(copy for n in range(16) if (copy := f"x{n}") not in used))


def _waits(scene: Scene, task: str) -> tuple[int, ...]:
    """A call in the line, and its attempt."""
    calls = dict(scene.keys).get(CALLS)
    text = dict(calls.value).get(task.encode(), b"").decode() if calls else ""
    found = re.fullmatch(r"\d+\|\d+\|(\d+)", text)
    return (_number(task), int(found[1])) if found else ()


def _waking(scene: Scene, process: Process, told: list[Any]) -> Scene:
    heir, call = (*told, None, None)[:2]
    if not heir or call is None:
        return scene
    return _with(scene, Process("wakes", process.message, wakes=(_number(heir), int(call))))


def _wrong(before: Mapping[bytes, Entry], after: Mapping[bytes, Entry], now: int) -> str:
    for name, entry in after.items():
        if entry.expiry is None:
            return f"{name.decode()} has no TTL"
    old, new = before.get(NEWEST), after.get(NEWEST)
    if old and (not new or (new.expiry or 0) < (old.expiry or 0)):
        return "newest is shorter"
    if new and not old and new.expiry != now // MS + REMEMBER_MS:
        return "newest lasts for another time"
    return ""


def _canonical(keys: Mapping[bytes, Entry], now: int) -> Keys:
    """With no more of what was than somebody asks; what is known of the newest lasts longer than it must."""
    found = {}
    for name, entry in keys.items():
        expiry = now // MS + (2 * REMEMBER_MS if name == NEWEST else REMEMBER_MS + LEASE // MS)
        value = entry.value
        if name == RECORD:
            token, deadline, _, state, _, info = value.decode().split("\n", 5)
            if deadline == "0" and state == "released":
                token = "|0|0"
            value = "\n".join((token, deadline, "1", state, str(START), info)).encode()
        if name == NEWEST:  # how many were superseded is counted for people
            words = value.decode().split("\n")
            value = "\n".join((*words[:6], "0", *words[7:])).encode()
        found[name] = Entry(entry.kind, value, expiry)
    return tuple(sorted(found.items()))
