"""Calls that wait in line: their messages, the workers that take them, their couriers.

No clock runs here: whatever has a deadline may pass it at any time at which nobody alive keeps it, so every
length of every pause is covered, and there are few states however often a courier comes. A worker has one
message at a time; a call is acknowledged when it is taken, or (`late`) when it has ended.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any, NamedTuple

from tests.model.explorer import START, TICK, Event
from tests.model.lock import Lock
from tests.model.store import Answer, Record, Store, seconds, task_of

LEASE = 4 * TICK
OVER = START - TICK
REMEMBER_MS = 1_000_000
ORIGINAL = "-"


class Message(NamedTuple):
    """A message in the broker: `call`, `courier` or `nudge`.

    `copy`: which of the call's messages it is; of a courier, what it wakes its call with. `again`: whether it
    is `redelivered`, or has met its `own` other delivery.
    """

    kind: str
    task: str
    attempt: int = 0
    copy: str = ORIGINAL
    again: str = ""


class Process(NamedTuple):
    """A worker with a message: where it stands, the token of what it holds, whom it is about to wake and how.

    `then`: what follows when it has let the line go on.
    """

    at: str
    message: Message
    token: str = ""
    heir: str = ""
    call: str = ""
    then: str = ""


class Scene(NamedTuple):
    """The whole world.

    `fates`, by call and attempt: '' (not sent), `new`, `owed` (its courier is sent), `running`, `released`,
    `ended`, `twice`. `since`: its place in the line, 0 before its first conflict. Then: what may go wrong.
    """

    now: int
    store: Store
    broker: tuple[Message, ...]
    processes: tuple[Process, ...]
    fates: tuple[tuple[str, ...], ...]
    since: tuple[tuple[int, ...], ...]
    crashes: int
    wipes: int
    late_wakes: int
    lapses: int
    revokes: int
    seconds: int


Step = tuple[Event, Scene]
Answered = tuple[Scene, tuple[Any, ...]]


@dataclass(eq=False)
class Waiters:
    """Calls of one key, each published at the start, and how much may go wrong."""

    tasks: str  # their ids, a letter each
    _: KW_ONLY
    slots: int = 2  # workers
    late: str = ""  # whose messages are acknowledged late
    retries: Mapping[str, int] = field(default_factory=dict)  # how often a call retries itself
    couriers: bool = True  # are delivered; without them only wake-ups move the line
    linger: bool = False  # a call may ask again in its slot before it is parked
    rests: bool = False  # the lock, after each run
    proof: bool = False  # the death of a holder may be proved
    parents: bool = False  # a worker's parent may survive its child, and free its lock
    watch: bool = False  # one courier watches for the whole line
    crashes: int = 0  # workers that may be killed
    wipes: int = 0  # how often Redis may lose its data
    late_wakes: int = 0  # how often a lock kept for a call may expire though the call is on its way
    lapses: int = 0  # how often the lease of a living holder may end
    revokes: int = 0  # woken calls that may be revoked (or expire, or end with another's result)
    seconds: int = 0  # how often a message may be delivered again while its first delivery runs
    early_seconds: bool = False  # that may be while the first is being parked
    lock: Lock = field(default_factory=Lock)  # a mutant replaces its verbs

    def __post_init__(self) -> None:
        self.delivers_again = {"inside", "leaves", "wakes", "stores"}
        self.delivers_again |= {"meets", "parks"} if self.early_seconds else set()
        lock, tasks = self.lock, self.tasks
        self.acquire, self.release = _on_canonical_keys(lock.acquire), _on_canonical_keys(lock.release)
        self.park, self.leave = _on_canonical_keys(lock.park), _on_canonical_keys(lock.leave)
        # Whether the calls differ in their names only; then no two are ever at one place.
        self.alike = not (self.late or self.retries or self.linger)
        attempts = [1 + self.retries.get(task, 0) for task in tasks]
        self.start = Scene(
            START,
            Store(),
            tuple(Message("call", task) for task in tasks),
            (),
            tuple(("new", *[""] * (n - 1)) for n in attempts),
            tuple((0,) * n for n in attempts),
            *(self.crashes, self.wipes, self.late_wakes, self.lapses, self.revokes, self.seconds),
        )

    def representative(self, scene: Scene) -> Scene:
        """Of the scenes that differ in the calls' names only, one: calls are named in order of what they did.

        No verb and no property looks at a name, but the order of two at one place in the line: that there are
        none is asserted of every scene.
        """
        if not self.alike:
            return scene
        places = scene.store.line.places
        assert len({since for since, _ in places}) == len(places), "the order of names would matter"
        waiting = [message.task for message in scene.broker]
        order = sorted(
            range(len(self.tasks)),
            key=lambda n: (scene.since[n], scene.fates[n], waiting.count(self.tasks[n])),
        )
        names = "".join(self.tasks[n] for n in order)
        if names == self.tasks:
            return scene
        return scene._replace(
            store=_renamed_store(scene.store, names, self.tasks),
            broker=tuple(sorted(_renamed_message(message, names, self.tasks) for message in scene.broker)),
            processes=tuple(sorted(_renamed_process(p, names, self.tasks) for p in scene.processes)),
            fates=tuple(scene.fates[n] for n in order),
            since=tuple(scene.since[n] for n in order),
        )

    def is_over(self, scene: Scene) -> bool:
        """Every call has ended, or is lost as any task of Celery is, and nothing is left behind."""
        broker = {message for message in scene.broker if self.couriers or message.kind != "courier"}
        nothing_left = not broker and not scene.processes and not scene.store.line.places
        return nothing_left and self.all_end(scene)

    def all_end(self, scene: Scene) -> bool:
        """Every call has ended, or is lost as any task of Celery is."""
        return {fate for attempts in scene.fates for fate in attempts} <= {"", "ended", "twice"}

    def steps(self, scene: Scene) -> Iterator[Step]:
        """Everything that may happen next."""
        yield from self._time(scene)
        for message in sorted(set(scene.broker)):
            rest = _without(scene.broker, message)
            if len(scene.processes) < self.slots:
                yield from self._taken(scene._replace(broker=rest), message)
            if scene.crashes and message.kind == "call" and message.task not in self.late:
                # Acknowledged, and killed before it did anything.
                lost = scene._replace(broker=rest, crashes=scene.crashes - 1)
                yield _event(message, "dies at once"), self._abandoned(lost, message)
        for process in sorted(set(scene.processes)):
            rest = scene._replace(processes=_without(scene.processes, process))
            yield from getattr(self, f"_{process.at}")(rest, process)
            if scene.crashes:
                yield from self._killed(rest._replace(crashes=scene.crashes - 1), process)
            if scene.seconds and process.message.task in self.late and process.at in self.delivers_again:
                again = process.message._replace(again="redelivered")
                second = _sent(scene._replace(seconds=scene.seconds - 1), again)
                yield _event(again, "is delivered again"), second
        if scene.wipes and scene.store != Store():
            yield Event(None, "data is lost"), scene._replace(store=Store(), wipes=scene.wipes - 1)

    def _time(self, scene: Scene) -> Iterator[Step]:
        """A deadline passes, because nobody alive sees to it, or though somebody does."""
        store, record = scene.store, scene.store.record
        if store.value is not None and isinstance(record, Record) and record.deadline > START:
            past = record._replace(deadline=OVER)
            after = scene._replace(store=store._replace(value=seconds(OVER), record=past))
            if record.state == "running":
                kept = any(process.token == record.token for process in scene.processes)
                after, may = (after._replace(lapses=scene.lapses - kept), not kept or scene.lapses > 0)
            elif record.state == "handed":
                kept = self._is_coming(scene, record.info)
                after = after._replace(late_wakes=scene.late_wakes - kept)
                may = not kept or scene.late_wakes > 0
            else:
                may = True
            if may:
                yield Event(None, f"the deadline of a {record.state} lock passes"), after
        for task, call in store.calls.fields:
            if call == _lingers(START + LEASE):
                kept = any(p.message.task == task and p.at == "lingers" for p in scene.processes)
                if not kept or scene.late_wakes:
                    fields = tuple((t, _lingers(OVER) if t == task else c) for t, c in store.calls.fields)
                    calls = store.calls._replace(fields=fields)
                    late_wakes = scene.late_wakes - kept
                    after = scene._replace(store=store._replace(calls=calls), late_wakes=late_wakes)
                    yield Event(None, f"{task} has not asked again in time"), after

    def _is_coming(self, scene: Scene, heir: str) -> bool:
        return (
            any(message.kind == "call" and message.task == heir for message in scene.broker)
            or any(process.message.task == heir for process in scene.processes)
            or any(process.at == "wakes" and process.heir == heir for process in scene.processes)
        )

    def _taken(self, scene: Scene, message: Message) -> Iterator[Step]:
        if message.kind == "call":
            if scene.revokes and message.copy != ORIGINAL:
                revoked = scene._replace(revokes=scene.revokes - 1)
                yield _event(message, "is revoked"), _with(revoked, Process("quits", message))
            yield from self._acquires(scene, Process("", message))
        elif message.kind == "nudge":
            if not _rests(scene.store):
                yield _event(message, "comes"), _with(scene, Process("goes_on", message))
        elif self.couriers:
            yield from self._visit(scene, message)

    def _acquires(self, scene: Scene, process: Process, linger: int = 0) -> Iterator[Step]:
        """A call asks for the lock."""
        message = process.message
        token = process.token or _new_token(scene, f"{message.task}|{message.attempt}|")
        details = {
            "copy": message.copy,
            "remember": REMEMBER_MS if message.copy != ORIGINAL or message.again else 0,
            "linger": linger,
            "since": self._since(scene, message),
            "attempt": message.attempt,
        }
        for dead in self._proofs(scene):
            after, reply = self._acquired(scene, token, dead, **details)
            fate = self._fate(scene, message)
            if reply[0] == "stale":
                yield _event(message, "is dropped", token, reply), after
            elif reply[0] == "held":
                yield from self._meets_holder(after, process, token, reply)
            elif fate == "ended" and self.may_have_ended(message):
                dropped = Process("leaves", message, token)
                yield _event(message, "has run before", token, reply), _with(after, dropped)
            else:
                fate = "twice" if fate in ("running", "ended", "twice") else "running"
                after = _with(self._fated(after, message, fate), Process("inside", message, token))
                yield _event(message, "starts", token, reply), after

    def may_have_ended(self, message: Message) -> bool:
        """Whether a call that starts asks the result backend if it has ended before.

        Of a call that is acknowledged late every woken copy does: a second delivery may have parked it.
        """
        return bool(message.again) or (message.copy != ORIGINAL and message.task in self.late)

    def _acquired(self, scene: Scene, token: str, dead: str, **details: Any) -> Answered:
        asked = {"token": token, "lease": LEASE, "retention": REMEMBER_MS}
        return _answered(scene, self.acquire, **asked, dead=dead, line=True, **details)

    def _proofs(self, scene: Scene) -> list[str]:
        """The dead tokens that an acquire may come with: none, or that of a holder who is dead."""
        record = scene.store.record
        if not self.proof or not isinstance(record, Record) or record.state != "running":
            return [""]
        if any(process.token == record.token for process in scene.processes):
            return [""]
        return ["", record.token]

    def _meets_holder(
        self, scene: Scene, process: Process, token: str, reply: tuple[Any, ...]
    ) -> Iterator[Step]:
        """A call finds the lock held: by its own other delivery, for a moment, or for longer."""
        message, record = process.message, scene.store.record
        assert isinstance(record, Record)
        if record.state == "running" and task_of(record.token)[0] == message.task:
            own = message._replace(again="own")
            yield _event(message, "meets itself", token, reply), _sent(scene, own)
            return
        if self.linger and (process.at == "lingers" or record.state in ("running", "handed")):
            lingers = Process("lingers", message, token)
            yield _event(message, "lingers", token, reply), _with(scene, lingers)
        if process.at != "lingers":
            yield _event(message, "conflicts", token, reply), self._to_be_parked(scene, message)

    def _to_be_parked(self, scene: Scene, message: Message) -> Scene:
        index = self.tasks.index(message.task)
        if not scene.since[index][message.attempt]:
            since = _changed(scene.since, index, message.attempt, self._since(scene, message))
            scene = scene._replace(since=since)
        sends_courier = not self.has_courier(message) and not self.sends_courier_later(message)
        return _with(scene, Process("meets" if sends_courier else "parks", message))

    def has_courier(self, message: Message) -> bool:
        """Whether a call that has been woken has a courier still: not if it had begun before."""
        return message.copy != ORIGINAL and not message.again

    def sends_courier_later(self, message: Message) -> bool:
        """Whether the courier of a call is sent when it is parked, and not before.

        That of a second delivery is, as it would end at once: the ticket says that the call has begun. The
        broker has the message itself still, if it is acknowledged late.
        """
        return bool(message.again) and message.task in self.late

    def _lingers(self, scene: Scene, process: Process) -> Iterator[Step]:
        yield from self._acquires(scene, process, linger=LEASE)
        yield _event(process.message, "asks no more"), self._to_be_parked(scene, process.message)

    def _meets(self, scene: Scene, process: Process) -> Iterator[Step]:
        message = process.message
        after = self._owed(self.with_courier(scene, message), message)
        if not self.sends_courier_later(message):
            after = _with(after, process._replace(at="parks"))
        elif process.then == "goes_on":
            after = _with(after, process._replace(at="goes_on", then=""))
        yield _event(message, "sends its courier"), after

    def _owed(self, scene: Scene, message: Message) -> Scene:
        return self._fated(scene, message, "owed") if self._fate(scene, message) == "new" else scene

    def with_courier(self, scene: Scene, message: Message) -> Scene:
        """A call's courier is sent."""
        return _sent(scene, message._replace(kind="courier", copy=self.call_of(message), again=""))

    def _parks(self, scene: Scene, process: Process) -> Iterator[Step]:
        message = process.message
        after, reply = self._parked(scene, message, message.copy, self.call_of(message))
        goes_on = reply[0] != "stale" and self.is_free(scene.store)
        if reply[0] == "handed":
            after = self.taken_to_ask_still(after, message)
        elif reply[0] != "stale" and self.sends_courier_later(message) and not self.has_courier(message):
            parked = Process("meets", message, then="goes_on" if goes_on else "")
            after = _with(self._owed(after, message), parked)
        elif goes_on:
            after = _with(after, Process("goes_on", message))
        elif reply[0] != "stale" and _rests(scene.store):
            after = self.met_a_rest(after, message)
        yield _event(message, "parks", "", reply), after

    def taken_to_ask_still(self, scene: Scene, message: Message) -> Scene:
        """A call that is parked has been handed the lock by a release that took it to be asking still."""
        return _with(scene, Process("wakes", message, heir=message.task, call=self.call_of(message)))

    def met_a_rest(self, scene: Scene, message: Message) -> Scene:
        """A call that is parked finds that the lock rests: since its release nobody is there to wake."""
        return _with(scene, Process("wakes", message, heir=message.task, call="nudge"))

    def call_of(self, message: Message) -> str:
        """What a call is woken with: which attempt it is, and whether it has been delivered twice."""
        return f"{message.attempt}!" if message.again else str(message.attempt)

    def is_free(self, store: Store) -> bool:
        """Whether a call that has parked is to let the line go on itself."""
        return _is_free(store)

    def _parked(self, scene: Scene, message: Message, copy: str, call: str) -> Answered:
        about = {"task": message.task, "attempt": message.attempt, "since": self._since(scene, message)}
        watch = LEASE if self.watch else 0
        return _answered(scene, self.park, **about, copy=copy, call=call, remember=REMEMBER_MS, watch=watch)

    def _visit(self, scene: Scene, courier: Message) -> Iterator[Step]:
        """A courier comes."""
        after, reply = self._parked(scene, courier, "", courier.copy)
        if self.courier_ends(reply):
            yield _event(courier, "ends", "", reply), after
        elif reply[0] == "new" and self._fate(scene, courier) == "ended":
            yield _event(courier, "finds it ended", "", reply), _with(after, Process("cleans", courier))
        elif self.courier_goes_on(scene, reply):
            goes_on = Process("goes_on", courier, then="returns")
            yield _event(courier, "visits", "", reply), _with(after, goes_on)
        else:
            yield _event(courier, "visits", "", reply), _with(after, Process("returns", courier))

    def courier_ends(self, reply: tuple[Any, ...]) -> bool:
        """Whether a courier need not come again: its call has begun."""
        return bool(reply[0] == "stale" and reply[5] == "0")

    def courier_goes_on(self, scene: Scene, reply: tuple[Any, ...]) -> bool:
        """Whether a courier lets the line go on: nobody living holds the lock."""
        return reply[0] != "handed" and (_is_free(scene.store) or len(self._proofs(scene)) > 1)

    def _cleans(self, scene: Scene, process: Process) -> Iterator[Step]:
        after, reply = self._left(scene, process.message, "c")
        yield _event(process.message, "leaves the line", "", reply), after

    def _returns(self, scene: Scene, process: Process) -> Iterator[Step]:
        yield _event(process.message, "will come again"), _sent(scene, process.message)

    def _goes_on(self, scene: Scene, process: Process) -> Iterator[Step]:
        token = _new_token(scene, "c")
        for dead in self._proofs(scene):
            after, reply = self._acquired(scene, token, dead)
            if reply[0] == "held":
                yield _event(process.message, "finds it held", token, reply), self._finished(after, process)
            else:
                holds = process._replace(at="lets_go", token=token)
                yield _event(process.message, "lets the line go on", token, reply), _with(after, holds)

    def _inside(self, scene: Scene, process: Process) -> Iterator[Step]:
        message = process.message
        if message.attempt < self.retries.get(message.task, 0):
            retry = Message("call", message.task, message.attempt + 1)
            after = _with(self._fated(_sent(scene, retry), retry, "new"), process._replace(at="leaves"))
            yield _event(message, "retries itself"), after
        else:
            yield from self._leaves(scene, process)

    def _leaves(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A call gives the lock back; its result is not stored yet."""
        message = process.message
        if self._fate(scene, message) == "running" and message.task in self.late:
            scene = self._fated(scene, message, "released")
        process = process._replace(then="stores" if message.task in self.late else "ends")
        yield from self._releases(scene, process, START + LEASE if self.rests else 0)

    def _releases(self, scene: Scene, process: Process, rest_until: int = 0) -> Iterator[Step]:
        about = {"token": process.token, "rest_until": rest_until, "hand_over": LEASE}
        after, reply = _answered(scene, self.release, **about, remember=REMEMBER_MS, line=True)
        heir, call = reply[3:5]
        if heir and call:
            call = "nudge" if reply[0] == "resting" else call
            after = _with(after, process._replace(at="wakes", token="", heir=heir, call=call))
        else:
            after = self._finished(after, process)
        yield _event(process.message, "releases", "", reply), after

    _lets_go = _releases
    _frees = _releases  # a parent gives back what its dead child held

    def _wakes(self, scene: Scene, process: Process) -> Iterator[Step]:
        what = f"wakes {process.heir}"
        yield _event(process.message, what), self._finished(self.with_wake(scene, process), process)

    def with_wake(self, scene: Scene, process: Process) -> Scene:
        """A wake-up is sent, or, if the lock rests, somebody who will see to it then."""
        if process.call == "nudge":
            return _sent(scene, Message("nudge", process.heir))
        attempt, again = int(process.call.rstrip("!")), "own" if process.call.endswith("!") else ""
        return _sent(scene, Message("call", process.heir, attempt, _new_copy(scene, process.heir), again))

    def _finished(self, scene: Scene, process: Process) -> Scene:
        if process.then in ("returns", "stores"):
            return _with(scene, Process(process.then, process.message))
        if process.then == "ends" and self._fate(scene, process.message) != "twice":
            return self._fated(scene, process.message, "ended")
        return scene

    def _stores(self, scene: Scene, process: Process) -> Iterator[Step]:
        after = self._finished(scene, process._replace(then="ends"))
        yield _event(process.message, "stores its result"), after

    def _quits(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A woken call that need not run leaves the line."""
        message = process.message
        after, reply = self._left(scene, message, message.copy)
        if reply[0] != "stale":
            after = self._fated(after, message, "ended")
        if self.passes_on(reply):
            after = _with(after, Process("passes_on", message))
        yield _event(message, "leaves the line", "", reply), after

    def passes_on(self, reply: tuple[Any, ...]) -> bool:
        """Whether a call that has left the line is to hand a lock to the next one."""
        return bool(reply[0] == "handed")

    def _left(self, scene: Scene, message: Message, copy: str) -> Answered:
        about = {"task": message.task, "attempt": message.attempt, "copy": copy}
        return _answered(scene, self.leave, **about, remember=REMEMBER_MS)

    def _passes_on(self, scene: Scene, process: Process) -> Iterator[Step]:
        message = process.message
        token = _new_token(scene, f"{message.task}|{message.attempt}|")
        after, reply = self._acquired(scene, token, "", copy=message.copy, attempt=message.attempt)
        if reply[0] not in ("held", "stale"):
            after = _with(after, process._replace(at="lets_go", token=token))
        yield _event(message, "passes it on", token, reply), after

    def _killed(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A worker dies: what it had not acknowledged is delivered again."""
        message = process.message
        event = _event(message, f"is killed ({process.at})")
        if message.kind != "call":
            yield event, self.delivered_again(scene, message)
            if process.at == "returns":
                yield event, _sent(_sent(scene, message), message)
            return
        if message.task in self.late:
            if self._fate(scene, message) in ("running", "released"):
                scene = self._fated(scene, message, "owed")
            yield event, _sent(scene, message._replace(again="redelivered"))
            return
        after = self._abandoned(scene, message)
        yield event, after
        if self.parents and process.at != "frees":
            freed = Process("frees", message, process.token or "nothing")
            yield _event(message, "dies, and its parent lives"), _with(after, freed)

    def delivered_again(self, scene: Scene, courier: Message) -> Scene:
        """A courier whose worker died is delivered again: it is acknowledged late."""
        return _sent(scene, courier)

    def _abandoned(self, scene: Scene, message: Message) -> Scene:
        """A call whose message is acknowledged is lost, as Celery has it, unless it waits for its turn."""
        fate = self._fate(scene, message)
        if fate == "running" or (fate == "new" and message.copy == ORIGINAL):
            return self._fated(scene, message, "ended")
        return scene

    def _fate(self, scene: Scene, message: Message) -> str:
        return scene.fates[self.tasks.index(message.task)][message.attempt]

    def _fated(self, scene: Scene, message: Message, fate: str) -> Scene:
        index = self.tasks.index(message.task)
        return scene._replace(fates=_changed(scene.fates, index, message.attempt, fate))

    def _since(self, scene: Scene, message: Message) -> int:
        since = scene.since[self.tasks.index(message.task)][message.attempt]
        return int(since) or 1 + max(max(known) for known in scene.since)


def _on_canonical_keys(verb: Callable[..., Answer]) -> Callable[..., Answer]:
    """A verb at the start's time, computed once for equal arguments."""

    @cache
    def run(store: Store, **arguments: Any) -> Answer:
        after, reply = verb(store, START, **arguments)
        return _canonical(after), reply

    return run


@cache
def _renamed(text: str, names: str, to: str) -> str:
    """A task's name, a token of it, or the text of who watches, with another name."""
    head, bar, rest = text.partition("|")
    before, space, task = head.rpartition(" ")
    return before + space + (to[names.index(task)] if task in names and task else task) + bar + rest


@cache
def _renamed_message(message: Message, names: str, to: str) -> Message:
    return message._replace(task=_renamed(message.task, names, to))


@cache
def _renamed_process(process: Process, names: str, to: str) -> Process:
    return process._replace(
        message=_renamed_message(process.message, names, to),
        token=_renamed(process.token, names, to),
        heir=_renamed(process.heir, names, to),
    )


@cache
def _renamed_store(store: Store, names: str, to: str) -> Store:
    record = store.record
    if isinstance(record, Record):
        token, info = (_renamed(text, names, to) for text in (record.token, record.info))
        record = record._replace(token=token, info=info)
    places = tuple((since, _renamed(task, names, to)) for since, task in store.line.places)
    fields = [(_renamed(task, names, to), call) for task, call in store.calls.fields if task]
    fields += [("", _renamed(watch, names, to)) for task, watch in store.calls.fields if not task]
    return store._replace(
        record=record,
        line=store.line._replace(places=places),
        calls=store.calls._replace(fields=tuple(sorted(fields))),
        tickets=tuple(sorted((_renamed(task, names, to), ticket) for task, ticket in store.tickets)),
    )


def at_most_once(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """No attempt of a call starts twice, unless it died, or was delivered again before its end was known."""
    return not any("twice" in attempts for attempts in after.fates)


def side_by_side(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """No two calls run at the same time."""
    return sum(process.at in ("inside", "leaves") for process in after.processes) <= 1


def in_order(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """A lock goes to the first in line, and no call starts before that one unless it has waited too."""
    store, record = before.store, before.store.record
    task = event.what.split()[0]
    if event.what.endswith(" starts"):
        others = {waiter for _, waiter in store.line.places} - {task}
        kept = isinstance(record, Record) and record.state == "handed" and record.info == task
        waited = any(p.token == event.token and p.message.copy != ORIGINAL for p in after.processes)
        return not others or kept or waited or _is_free(store) or event.reply[0] == "taken_over"
    if event.what.endswith(" releases") and event.reply[3] and event.reply[0] != "handed":
        calls = dict(store.calls.fields)
        waiting = [waiter for _, waiter in store.line.places if calls.get(waiter) != _lingers(OVER)]
        return bool(event.reply[3] == waiting[0])
    return True


def _answered(scene: Scene, verb: Callable[..., Answer], **arguments: Any) -> Answered:
    store, reply = verb(scene.store, **arguments)
    return scene._replace(store=store), reply


def _is_free(store: Store) -> bool:
    record = store.record
    return store.value is None or (isinstance(record, Record) and record.deadline <= START)


def _rests(store: Store) -> bool:
    record = store.record
    return not _is_free(store) and isinstance(record, Record) and record.state == "resting"


def _canonical(store: Store) -> Store:
    """The keys without what makes no difference when no clock runs."""
    record, value = store.record, store.value
    if isinstance(record, Record):
        if record.deadline == 0:
            record = None
        else:
            deadline = START + LEASE if record.deadline > START else OVER
            record = record._replace(deadline=deadline, fence=0, since=0)
            value = value and seconds(deadline)
    line, calls = store.line._replace(lease=0), store.calls._replace(lease=0)
    return Store(value, None, record, None, None, line, calls, store.tickets)


def _lingers(until: int) -> str:
    return f"@{until}"


def _new_token(scene: Scene, prefix: str) -> str:
    record = scene.store.record
    used = {process.token for process in scene.processes}
    used |= {record.token} if isinstance(record, Record) else set()
    return next(token for n in range(16) if (token := f"{prefix}{n:x}") not in used)


def _new_copy(scene: Scene, task: str) -> str:
    messages = [*scene.broker, *[process.message for process in scene.processes]]
    used = {message.copy for message in messages if message.task == task and message.kind == "call"}
    used |= {ticket.text.split("|")[1] for owner, ticket in scene.store.tickets if owner == task}
    return next(copy for n in range(16) if (copy := f"x{n:x}") not in used)


def _event(message: Message, what: str, token: str = "", reply: tuple[Any, ...] = ()) -> Event:
    kind = "" if message.kind == "call" else f"'s {message.kind}"
    return Event(None, f"{message.task}{kind} {what}", token, reply)


def _with(scene: Scene, process: Process) -> Scene:
    return scene._replace(processes=tuple(sorted((*scene.processes, process))))


def _sent(scene: Scene, message: Message) -> Scene:
    return scene._replace(broker=tuple(sorted((*scene.broker, message))))


def _without(items: tuple[Any, ...], item: Any) -> tuple[Any, ...]:
    index = items.index(item)
    return (*items[:index], *items[index + 1 :])


def _changed(
    table: tuple[tuple[Any, ...], ...], row: int, column: int, value: Any
) -> tuple[tuple[Any, ...], ...]:
    cells = table[row]
    return (*table[:row], (*cells[:column], value, *cells[column + 1 :]), *table[row + 1 :])
