"""Calls that wait in line: their messages, the workers that take them and that sweep, their couriers.

No clock runs here: whatever has a deadline may pass it at any time at which nobody alive keeps it, and a
worker may sweep at any time while the line is noted as due. So every length of every pause is covered, and
there are few states. A worker has one message at a time; a call is acknowledged when it is taken, or (`late`)
when it has ended. A courier visits in one step: if its worker dies, it is delivered again.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass, field
from functools import cache
from typing import Any, NamedTuple

from tests.model.explorer import START, TICK, Event
from tests.model.line import AWAY, waiter, waiting
from tests.model.lock import Lock
from tests.model.permits import at, highest_in, permit_in, permits_of
from tests.model.store import (
    MS,
    Answer,
    Calls,
    Known,
    Line,
    Permit,
    Record,
    Starts,
    Store,
    Ticket,
    seconds,
    task_of,
)

LEASE = 4 * TICK
OVER = START - TICK
REMEMBER_MS = 1_000_000
BEGUN_MS = 2_000_000
EXPIRY = START // MS + REMEMBER_MS  # of a key that no time passes for
ORIGINAL = "-"
LATE = "~"


class Message(NamedTuple):
    """A message in the broker: `call` or `courier`; or the business of a `sweep`.

    `copy`: which of the call's messages it is; of a courier, what it wakes its call with. `again`: whether it
    is `redelivered`, or has met its `own` other delivery. `late`: whether the lock was handed over in vain.
    """

    kind: str
    task: str
    attempt: int = 0
    copy: str = ORIGINAL
    again: str = ""
    late: bool = False


SWEEP = Message("sweep", "")


class Process(NamedTuple):
    """A worker with a message: where it stands, the token of what it holds, whom it is about to wake and how.

    `then`: what follows when it has woken that one. `permit`: which of several it holds.
    """

    at: str
    message: Message
    token: str = ""
    heir: str = ""
    call: str = ""
    then: str = ""
    permit: int = 0


class Scene(NamedTuple):
    """The whole world.

    `fates`, by call and attempt: '' (not sent), `new`, `owed` (its courier is sent), `running`, `released`,
    `ended`, `twice`, `left` to its courier. `since`: its place in the line, 0 before its first conflict.
    `is_due`: whether workers are to look at the line. Then: what may go wrong.
    """

    now: int
    store: Store
    broker: tuple[Message, ...]
    processes: tuple[Process, ...]
    fates: tuple[tuple[str, ...], ...]
    since: tuple[tuple[int, ...], ...]
    is_due: bool
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
    limit: int = 1  # how many permits there are
    limits: Mapping[str, int] = field(default_factory=dict)  # for some calls, whose worker has another code
    pace: int = 0  # how many may start within a period; 0: any number
    paces: Mapping[str, int] = field(default_factory=dict)  # for some calls, whose worker has another code
    endless: str = ""  # calls that run for ever
    parked: str = ""  # who waits from the start, while the first runs: then there was one permit
    late: str = ""  # whose messages are acknowledged late
    retries: Mapping[str, int] = field(default_factory=dict)  # how often a call retries itself
    couriers: bool = True  # are delivered
    sweeps: bool = True  # workers look at the line; else only wake-ups and newcomers move it
    linger: bool = False  # a call may ask again in its slot before it is parked
    rests: bool = False  # the lock, after each run
    proof: bool = False  # the death of a holder may be proved
    parents: bool = False  # a worker's parent may survive its child, and free its lock
    hears: bool = False  # it hears how a woken call ended, and has one that retries itself leave the line
    forgets: bool = False  # tickets that couriers have shortened are forgotten before late messages come
    absent: str = ""  # whose wake-ups are thrown away, and who does not leave the line
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
        verbs = (lock.acquire, lock.release, lock.serve, lock.park, lock.leave)
        self.acquire, self.release, self.serve, self.park, self.leave = (
            self.on_canonical_keys(verb) for verb in verbs
        )
        # Whether the calls differ in their names only; then no two are ever at one place.
        told_apart = self.late or self.retries or self.linger or self.absent or self.limits or self.endless
        told_apart = told_apart or self.paces
        self.alike = not told_apart
        self.most = max(self.limit, *self.limits.values()) if self.limits else self.limit
        attempts = [1 + self.retries.get(task, 0) for task in tasks]
        self.start = Scene(
            START,
            Store(),
            tuple(Message("call", task) for task in tasks),
            (),
            tuple(("new", *[""] * (n - 1)) for n in attempts),
            tuple((0,) * n for n in attempts),
            False,
            *[getattr(self, name) for name in Scene._fields[Scene._fields.index("crashes") :]],
        )
        if self.parked:
            self.start = self.with_parked(self.start)

    def with_parked(self, scene: Scene) -> Scene:
        """Some wait already: the limit is raised at the start."""
        first, rest = Message("call", self.tasks[0]), scene
        asked = {"token": f"{first.task}|0|0", "lease": LEASE, "retention": REMEMBER_MS, "line": True}
        rest, _ = _answered(rest, self.acquire, **asked)
        rest = self._fated(_with(rest, Process("inside", first, asked["token"])), first, "running")
        waits = [Message("call", task) for task in self.parked]
        for message in waits:
            about = {"task": message.task, "attempt": 0, "copy": message.copy, "call": self.call_of(message)}
            since = self._since(rest, message)
            rest, _ = _answered(rest, self.park, **about, since=since, remember=REMEMBER_MS)
            index = self.tasks.index(message.task)
            rest = self._fated(rest, message, "owed")
            rest = rest._replace(since=_changed(rest.since, index, 0, since), is_due=True)
        return rest._replace(broker=tuple(m for m in rest.broker if m not in (first, *waits)))

    def on_canonical_keys(self, verb: Callable[..., Answer]) -> Callable[..., Answer]:
        """A verb at the start's time, computed once for equal arguments."""

        @cache
        def run(store: Store, **arguments: Any) -> Answer:
            after, reply = verb(store, START, **arguments)
            return _canonical(after, self.forgets), reply

        return run

    def limit_of(self, task: str) -> int:
        """How many permits there are, as far as a call's worker knows."""
        return self.limits.get(task, self.limit)

    def pace_of(self, task: str) -> int:
        """How many may start within a period, as far as a call's worker knows."""
        return self.paces.get(task, self.pace)

    def terms_of(self, task: str) -> str:
        """On what terms a call has a permit."""
        limit, pace = self.limit_of(task), self.pace_of(task)
        return f"{limit}:{pace}/{LEASE}" if pace else str(limit)

    def told(self, store: Store, task: str, *, limit: bool = False) -> dict[str, Any]:
        """Of how many permits a script is told: asked again with more, if more are in use."""
        if self.pace:
            told = {"count": max(self.limit_of(task), highest_in(store)[0])}
            return {**told, "terms": self.terms_of(task)} if limit else told
        if self.most == 1:
            return {}
        own = self.limit_of(task)
        count = max(own, highest_in(store)[0])
        about: dict[str, Any] = {"count": 0 if count == 1 else count}
        return {**about, "terms": str(own)} if limit else about

    def representative(self, scene: Scene) -> Scene:
        """Of the scenes that differ in the calls' names only, one: calls are named in order of what they did.

        No verb and no property looks at a name, but the order of two at one place in the line: that there are
        none is asserted of every scene.
        """
        if not self.alike:
            return scene
        places = [since for since, _ in scene.store.line.places if since < AWAY]
        assert len(set(places)) == len(places), "the order of names would matter"
        messages = [message.task for message in scene.broker]
        order = sorted(
            range(len(self.tasks)),
            key=lambda n: (scene.since[n], scene.fates[n], messages.count(self.tasks[n])),
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
        is_forgotten = not (self.sweeps and scene.is_due)
        return (
            self.all_is_done(scene) and self.all_end(scene) and not scene.store.line.places and is_forgotten
        )

    def all_is_done(self, scene: Scene) -> bool:
        """No message is left, and nobody has one in hand."""
        return not scene.broker and not scene.processes

    def all_end(self, scene: Scene) -> bool:
        """Every call has ended, or is lost as any task of Celery is; but for the one that never comes."""
        fates = zip(self.tasks, scene.fates)
        ends = {"", "ended", "twice", "left"}
        never = self.absent + self.endless
        return all(fate in ends for task, attempts in fates if task not in never for fate in attempts)

    def steps(self, scene: Scene) -> Iterator[Step]:
        """Everything that may happen next."""
        yield from self._deadlines(scene)
        yield from self._other_times(scene)
        busy = [p for p in scene.processes if p.message != SWEEP and p.at != "hears"]
        for message in sorted(set(scene.broker)):
            rest = _without(scene.broker, message)
            if message.kind == "courier":
                yield from self._visit(scene._replace(broker=rest), message)
            elif len(busy) < self.slots:
                yield from self._taken(scene._replace(broker=rest), message)
            if scene.crashes and message.kind == "call" and message.task not in self.late:
                # Acknowledged, and killed before it did anything.
                lost = scene._replace(broker=rest, crashes=scene.crashes - 1)
                yield _event(message, "dies at once"), self._abandoned(lost, message)
        for process in sorted(set(scene.processes)):
            rest = scene._replace(processes=_without(scene.processes, process))
            if process.at != "inside" or process.message.task not in self.endless:
                yield from getattr(self, f"_{process.at}")(rest, process)
            if scene.crashes:
                yield from self._killed(rest._replace(crashes=scene.crashes - 1), process)
            is_late = process.message != SWEEP and process.message.task in self.late
            if scene.seconds and is_late and process.at in self.delivers_again:
                again = process.message._replace(again="redelivered")
                second = _sent(scene._replace(seconds=scene.seconds - 1), again)
                yield _event(again, "is delivered again"), second
        if self.sweeps and scene.is_due and self.may_sweep(scene):
            yield from self._goes_on(scene, Process("", SWEEP))
        if scene.wipes and scene.store != Store():
            lost = scene._replace(store=Store(), is_due=False, wipes=scene.wipes - 1)
            yield Event(None, "data is lost"), lost

    def may_sweep(self, scene: Scene) -> bool:
        """Whether a worker may look: none does."""
        return all(process.message != SWEEP for process in scene.processes)

    def _deadlines(self, scene: Scene) -> Iterator[Step]:
        """The lock's deadline passes, because nobody alive sees to it, or though somebody does."""
        for number in range(1 + len(scene.store.others)):
            yield from self._deadline(scene, number)

    def _deadline(self, scene: Scene, number: int) -> Iterator[Step]:
        store = at(scene.store, number)
        record = store.record
        if store.value is not None and isinstance(record, Record) and record.deadline > START:
            past = record._replace(deadline=OVER)
            after = scene._replace(store=at(store._replace(value=seconds(OVER), record=past), number))
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
                what = f"the deadline of a {record.state} lock passes"
                yield Event(None, f"{what} ({number})" if number else what), after

    def _other_times(self, scene: Scene) -> Iterator[Step]:
        """The time passes until which a call is passed over, or asks again, or is known to have begun."""
        store = scene.store
        if store.starts.times:
            left = store._replace(starts=Starts(store.starts.times[1:]))
            yield Event(None, "a start counts no more"), scene._replace(store=_canonical(left, self.forgets))
        for until, task in store.line.places:
            if until == AWAY + START + LEASE:
                places = tuple((AWAY + OVER, task) if t == task else (u, t) for u, t in store.line.places)
                after = scene._replace(store=_canonical(store._replace(line=Line(places)), self.forgets))
                yield Event(None, f"{task} is to have its place again"), after
        for task, ticket in store.tickets:
            is_short = self.forgets and ticket.begun_by and ticket.lease == REMEMBER_MS
            courier = any(m.kind == "courier" and m.task == task for m in scene.broker)
            if is_short and not courier and not self._is_coming(scene, task):
                tickets = tuple(known for known in store.tickets if known[0] != task)
                after = scene._replace(store=store._replace(tickets=tickets))
                yield Event(None, f"{task} is forgotten"), after
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
        """Whether a message of a call is on its way and not late, or in hand, or about to be sent."""
        return (
            any(m.kind == "call" and m.task == heir and not m.late for m in scene.broker)
            or any(process.message.task == heir for process in scene.processes)
            or any(process.heir == heir for process in scene.processes)
        )

    def _taken(self, scene: Scene, message: Message) -> Iterator[Step]:
        if message.task == self.absent and message.copy != ORIGINAL:
            yield _event(message, "is thrown away"), scene
            return
        if scene.revokes and message.copy != ORIGINAL:
            revoked = scene._replace(revokes=scene.revokes - 1)
            yield _event(message, "is revoked"), _with(revoked, Process("quits", message))
        yield from self._acquires(scene, Process("", message))

    def _acquires(self, scene: Scene, process: Process, linger: int = 0) -> Iterator[Step]:
        """A call asks for the lock."""
        message = process.message
        token = process.token or _new_token(scene, f"{message.task}|{message.attempt}|")
        details = {
            "copy": message.copy,
            "remember": BEGUN_MS if self.has_others(process) else 0,
            "linger": linger,
            "since": self._since(scene, message),
            "attempt": message.attempt,
            **self.told(scene.store, message.task, limit=True),
        }
        for dead in self._proofs(scene):
            asked = {"token": token, "lease": LEASE, "retention": REMEMBER_MS, "dead": dead}
            after, reply = _answered(scene, self.acquire, **asked, line=True, **details)
            fate = self._fate(scene, message)
            if reply[0] == "stale":
                yield _event(message, "is dropped", token, reply), self._goes(after, process, "")
            elif reply[0] == "line":
                yield _event(message, "is refused", token, reply), self._to_be_parked(after, process)
            elif reply[0] == "paced":
                yield _event(message, "is paced", token, reply), self._to_be_parked(after, process, "_paced")
            elif reply[0] == "held":
                yield from self._meets_holder(after, process, token, reply)
            elif fate == "ended" and self.may_have_ended(process):
                dropped = self._goes(after, process._replace(permit=permit_in(reply)), "leaves", token)
                yield _event(message, "has run before", token, reply), dropped
            else:
                fate = "twice" if fate in ("running", "ended", "twice") else "running"
                process = process._replace(permit=permit_in(reply))
                started = self._goes(self._fated(after, message, fate), process, "inside", token)
                if len(reply) > 9 and reply[9] != "0" and reply[7] != "0":  # others may have their turns, too
                    started = _noted(started)
                yield _event(message, "starts", token, reply), started

    def has_others(self, process: Process) -> bool:
        """Whether it is to be remembered for long that this message has begun its call."""
        message = process.message
        return message.copy != ORIGINAL or bool(message.again) or _has_parked(process)

    def _goes(self, scene: Scene, process: Process, at: str, token: str = "") -> Scene:
        """A call that has its answer goes on."""
        after = Process(at, process.message, token, permit=process.permit)
        if at == "lingers" and _has_parked(process):
            after = after._replace(then="comes_in")
        return _with(scene, after) if after.at else scene

    def _known_late(self, scene: Scene, process: Process) -> Process:
        """One that is about to wake a call, and has passed it over itself."""
        return process._replace(call=_late(process.call)) if process.heir in _away(scene.store) else process

    def _comes_in(self, scene: Scene, process: Process) -> Iterator[Step]:
        yield from self._acquires(scene, process)

    def may_have_ended(self, process: Process) -> bool:
        """Whether a call that starts asks the result backend if it has ended before.

        Of a call that is acknowledged late every message does that has waited: another may have come.
        """
        message = process.message
        has_waited = message.copy != ORIGINAL or process.at in ("comes_in", "lingers")
        return bool(message.again) or (has_waited and message.task in self.late)

    def _proofs(self, scene: Scene) -> list[str]:
        """The dead tokens that an acquire may come with: none, or that of a holder who is dead."""
        if not self.proof:
            return [""]
        records = [permit.record for permit in permits_of(scene.store, 1 + len(scene.store.others))]
        running = {r.token for r in records if isinstance(r, Record) and r.state == "running"}
        return ["", *sorted(running - {process.token for process in scene.processes})]

    def _meets_holder(
        self, scene: Scene, process: Process, token: str, reply: tuple[Any, ...]
    ) -> Iterator[Step]:
        """A call finds the lock held: by its own other delivery, for a moment, or for longer."""
        message, record = process.message, at(scene.store, permit_in(reply)).record
        assert isinstance(record, Record)
        if record.state == "running" and task_of(record.token)[0] == message.task:
            own = message._replace(again="own")
            yield _event(message, "meets itself", token, reply), self._goes(_sent(scene, own), process, "")
            return
        woken = ", woken" * (message.copy != ORIGINAL and not message.again)
        if self.linger and (process.at == "lingers" or record.state in ("running", "handed")):
            lingers = self._goes(scene, process, "lingers", token)
            yield _event(message, f"lingers{woken}", token, reply), lingers
        if process.at != "lingers":
            yield _event(message, f"conflicts{woken}", token, reply), self._to_be_parked(scene, process)

    def _to_be_parked(self, scene: Scene, process: Process, paced: str = "") -> Scene:
        """A call has its line looked at; then it sends its courier, and parks."""
        message = process.message
        index = self.tasks.index(message.task)
        if not scene.since[index][message.attempt]:
            since = _changed(scene.since, index, message.attempt, self._since(scene, message))
            scene = scene._replace(since=since)
        scene = self.noted_before(scene)
        if not self.couriers:
            return self._goes(self._owed(scene, message), process, f"parks{paced}")
        sends_courier = not self.has_courier(message) and not self.sends_courier_later(message)
        return self._goes(scene, process, f"meets{paced}" if sends_courier else f"parks{paced}")

    def noted_before(self, scene: Scene) -> Scene:
        """A call that is about to park notes its line as due."""
        return _noted(scene)

    def noted_after(self, scene: Scene) -> Scene:
        """And once more when it has parked, unless the holder is still the one that it has met.

        A worker may have found the lock free meanwhile, and nobody waiting.
        """
        return _noted(scene)

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
        yield _event(process.message, "asks no more"), self._to_be_parked(scene, process)

    def _meets(self, scene: Scene, process: Process) -> Iterator[Step]:
        message = process.message
        after = self._owed(self.with_courier(scene, message), message)
        if not self.sends_courier_later(message):
            after = _with(after, process._replace(at=process.at.replace("meets", "parks")))
        elif process.then:
            after = _with(after, process._replace(at=process.then, then=""))
        yield _event(message, "sends its courier"), after

    def _meets_paced(self, scene: Scene, process: Process) -> Iterator[Step]:
        yield from self._meets(scene, process)

    def _owed(self, scene: Scene, message: Message) -> Scene:
        return self._fated(scene, message, "owed") if self._fate(scene, message) == "new" else scene

    def with_courier(self, scene: Scene, message: Message) -> Scene:
        """A call's courier is sent; two are as good as one."""
        courier = message._replace(kind="courier", copy=self.call_of(message), again="", late=False)
        return scene if courier in scene.broker else _sent(scene, courier)

    def _parks(self, scene: Scene, process: Process) -> Iterator[Step]:
        message = process.message
        after, reply = self._parked(scene, message, message.copy, self.call_of(message))
        then = ""
        if reply[0] == "stale":
            yield _event(message, "is dropped", "", reply), after
            return
        limit = self.limit_of(message.task)
        if process.at == "parks_paced" and reply[0] != "handed":
            then = self.met_its_pace
        elif reply[0] == "handed" or (self.is_free(scene.store, limit) and reply[4] == "1"):
            then = self.its_turn
        after = self.noted_after(after)
        if self.couriers and self.sends_courier_later(message) and not self.has_courier(message):
            then, after = "", _with(self._owed(after, message), Process("meets", message, then=then))
        yield _event(message, "parks", "", reply), _with(after, Process(then, message)) if then else after

    its_turn = "comes_in"  # a call that has parked, and is the first at a free lock or its heir, acquires it
    met_its_pace = ""  # the first start that may be is a sweep's

    def _parks_paced(self, scene: Scene, process: Process) -> Iterator[Step]:
        yield from self._parks(scene, process)

    def call_of(self, message: Message) -> str:
        """What a call is woken with: which attempt it is, and whether it has been delivered twice."""
        return f"{message.attempt}!" if message.again else str(message.attempt)

    def is_free(self, store: Store, limit: int) -> bool:
        """Whether a call that has parked may have its turn by now."""
        return any(_is_free(at(store, number)) for number in range(limit))

    def _parked(self, scene: Scene, message: Message, copy: str, call: str) -> Answered:
        about = {"task": message.task, "attempt": message.attempt, "since": self._since(scene, message)}
        about |= self.told(scene.store, message.task, limit=True)
        return _answered(scene, self.park, **about, copy=copy, call=call, remember=REMEMBER_MS)

    def _visit(self, scene: Scene, courier: Message) -> Iterator[Step]:
        """A courier comes, and puts its call back into a line that has lost it."""
        after, reply = self._parked(scene, courier, "", courier.copy)
        if self.courier_ends(reply):
            yield _event(courier, "ends", "", reply), after
        elif reply[0] == "new" and self._fate(scene, courier) == "ended":
            yield _event(courier, "finds it ended", "", reply), _with(after, Process("cleans", courier))
        elif after.store != scene.store or not scene.is_due:
            yield _event(courier, "visits", "", reply), self.noted_before(_sent(after, courier))

    def courier_ends(self, reply: tuple[Any, ...]) -> bool:
        """Whether a courier need not come again: its call has begun."""
        return bool(reply[0] == "stale")

    def _cleans(self, scene: Scene, process: Process) -> Iterator[Step]:
        after, reply = self._left(scene, process.message, "c")
        yield _event(process.message, "leaves the line", "", reply), after

    def _served(self, scene: Scene, process: Process, what: str) -> Iterator[Any]:
        """What comes of serving the line: event, scene and answer."""
        about = {"token": "s", "hand_over": LEASE, "remember": REMEMBER_MS, "lease": LEASE}
        about |= self.told(scene.store, process.message.task, limit=self.pace > 0)
        for dead in self._proofs(scene):
            after, reply = _answered(scene, self.serve, **about, dead=dead)
            yield _event(process.message, what, "s", reply), after, reply

    def _goes_on(self, scene: Scene, process: Process) -> Iterator[Step]:
        for event, after, reply in self._served(scene, process, "lets the line go on"):
            then = "goes_on" if self.serves_again(reply) else ""
            if reply[5]:
                waking = process._replace(at="wakes", heir=reply[4], call=reply[5], then=then)
                after = _with(after, self._known_late(after, waking))
            elif then:
                after = _with(after, process._replace(at=then))
            elif reply[0] == "empty" and reply[6] == "0":
                after = _with(after, Process("settles", SWEEP))
            if after != scene or process.at:
                yield event, after

    def serves_again(self, reply: tuple[Any, ...]) -> bool:
        """Whether whoever has served a line does it again: somebody waits beside another free permit."""
        return bool(reply[6] == str(START))

    def _settles(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A worker that found nobody waiting forgets the line, unless a call has noted it meanwhile."""
        forgotten = scene._replace(is_due=scene.is_due and not self.is_unchanged(process))
        yield _event(SWEEP, "settles", process.then), forgotten

    def is_unchanged(self, process: Process) -> bool:
        """Whether nobody has noted the line since a worker claimed it."""
        return process.then != "changed"

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
        about |= {"permit": process.permit} if process.permit else {}
        about |= self.told(scene.store, process.message.task, limit=True)
        after, reply = _answered(scene, self.release, **about, remember=REMEMBER_MS, line=True)
        heir, call, look = reply[3:6]
        after = _noted(after) if look else after
        if heir and call:
            after = _with(after, process._replace(at="wakes", token="", heir=heir, call=call, permit=0))
        else:
            after = self._finished(after, process)
        yield _event(process.message, "releases", "", reply), after

    _frees = _releases  # a parent gives back what its dead child held

    def _wakes(self, scene: Scene, process: Process) -> Iterator[Step]:
        what = f"wakes {process.heir}"
        woken = self.with_wake(scene, process)
        yield _event(process.message, what), self._finished(woken, process)

    def with_wake(self, scene: Scene, process: Process) -> Scene:
        """A wake-up is sent."""
        call = process.call.rstrip(LATE)
        attempt, again = int(call.rstrip("!")), "own" if call.endswith("!") else ""
        copy = _new_copy(scene, process.heir)
        return _sent(scene, Message("call", process.heir, attempt, copy, again, process.call.endswith(LATE)))

    def _finished(self, scene: Scene, process: Process) -> Scene:
        if process.then == "ends":
            message = process.message
            if self._fate(scene, message) != "twice":
                scene = self._fated(scene, message, "ended")
            retries = message.attempt < self.retries.get(message.task, 0)
            is_heard = self.hears and retries and message.copy != ORIGINAL
            return _with(scene, Process("hears", message)) if is_heard else scene
        after = Process(process.then, process.message, process.token)
        if process.token:
            after = after._replace(permit=process.permit)
        return _with(scene, after) if process.then else scene

    def _stores(self, scene: Scene, process: Process) -> Iterator[Step]:
        after = self._finished(scene, process._replace(then="ends"))
        yield _event(process.message, "stores its result"), after

    def _quits(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A woken call that need not run leaves the line."""
        message = process.message
        after, reply = self._left(scene, message, message.copy)
        if reply[0] != "stale":
            after = self._fated(after, message, "ended")
        yield _event(message, "leaves the line", "", reply), self._passed_on(after, message, reply)

    def _hears(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A worker's parent hears that an attempt has sent its retry, which may wait already."""
        message = process.message
        after, reply = self._left(scene, message, message.copy)
        what = "has retried itself, and leaves the line"
        yield _event(message, what, "", reply), self._passed_on(after, message, reply)

    def _passed_on(self, scene: Scene, message: Message, reply: tuple[Any, ...]) -> Scene:
        """Whoever is next is woken, or the line looked at, when a call has left for which a lock was kept."""
        heir, call, look = reply[2:] if reply[0] == "left" else (None, None, "")
        scene = _noted(scene) if look else scene
        waking = Process("wakes", message, heir=heir or "", call=call or "")
        return _with(scene, waking) if self.wakes_next(call) else scene

    def wakes_next(self, call: str | None) -> bool:
        """Whether somebody is to be woken when a call has left the line."""
        return bool(call)

    def _left(self, scene: Scene, message: Message, copy: str) -> Answered:
        about = {"task": message.task, "attempt": message.attempt, "copy": copy}
        about |= self.told(scene.store, message.task, limit=True)
        return _answered(scene, self.leave, **about, remember=BEGUN_MS, hand_over=LEASE)

    def _killed(self, scene: Scene, process: Process) -> Iterator[Step]:
        """A worker dies: what it had not acknowledged is delivered again."""
        message = process.message
        event = _event(message, f"is killed ({process.at})")
        if message.kind != "call":
            yield event, scene if message == SWEEP else _sent(scene, message)
            return
        if message.task in self.late:
            if self._fate(scene, message) in ("running", "released"):
                scene = self._fated(scene, message, "owed")
            yield event, _sent(scene, message._replace(again="redelivered"))
            return
        after = self._abandoned(scene, message)
        yield event, after
        if self.parents and process.at != "frees":
            freed = Process("frees", message, process.token or "nothing", permit=process.permit)
            yield _event(message, "dies, and its parent lives"), _with(after, freed)

    def _abandoned(self, scene: Scene, message: Message) -> Scene:
        """A call whose message is acknowledged is lost, as Celery has it, unless it waits for its turn.

        One that had not parked is its courier's to put back.
        """
        fate = self._fate(scene, message)
        if fate == "running" or (fate == "new" and message.copy == ORIGINAL):
            return self._fated(scene, message, "ended")
        is_left = message.copy == ORIGINAL and waiter(scene.store, message.task) is None
        if self.couriers or not is_left or fate != "owed":
            return scene
        return self._fated(scene, message, "left")

    def _fate(self, scene: Scene, message: Message) -> str:
        return scene.fates[self.tasks.index(message.task)][message.attempt]

    def _fated(self, scene: Scene, message: Message, fate: str) -> Scene:
        index = self.tasks.index(message.task)
        return scene._replace(fates=_changed(scene.fates, index, message.attempt, fate))

    def _since(self, scene: Scene, message: Message) -> int:
        since = scene.since[self.tasks.index(message.task)][message.attempt]
        return int(since) or 1 + max(max(known) for known in scene.since)


@cache
def _renamed(text: str, names: str, to: str) -> str:
    """A task's name, or a token of it, with another name."""
    task, bar, rest = text.partition("|")
    return (to[names.index(task)] if task and task in names else task) + bar + rest


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
    others = tuple(
        permit._replace(record=_renamed_record(permit.record, names, to)) for permit in store.others
    )
    places = sorted((since, _renamed(task, names, to)) for since, task in store.line.places)
    fields = [(_renamed(task, names, to), call) for task, call in store.calls.fields]
    return store._replace(
        record=_renamed_record(store.record, names, to),
        others=others,
        line=store.line._replace(places=tuple(places)),
        calls=store.calls._replace(fields=tuple(sorted(fields))),
        tickets=tuple(sorted((_renamed(task, names, to), ticket) for task, ticket in store.tickets)),
    )


def _renamed_record(record: Record | str | None, names: str, to: str) -> Record | str | None:
    if not isinstance(record, Record):
        return record
    token, info = (_renamed(text, names, to) for text in (record.token, record.info))
    return record._replace(token=token, info=info)


def at_most_once(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """No attempt of a call starts twice, unless it died, or was delivered again before its end was known."""
    return not any("twice" in attempts for attempts in after.fates)


def side_by_side(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """No more calls run at the same time than there are permits, by the highest limit that any knows."""
    return sum(process.at in ("inside", "leaves") for process in after.processes) <= world.most


def one_permit_each(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """No call has two permits, or one and another kept for it."""
    owners = []
    for permit in permits_of(after.store, 1 + len(after.store.others)):
        record = permit.record
        if permit.value is not None and isinstance(record, Record) and record.deadline > START:
            owners.append(record.info if record.state == "handed" else task_of(record.token)[0])
    return len(set(owners)) == len(owners)


def line_moves(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """No line stands beside a free permit, but while somebody is about to see to it."""
    busy = any(process.at != "inside" for process in after.processes)
    comes = any(map(_is_woken, after.broker))
    if busy or comes or not waiting(after.store):
        return True
    limit = min(highest_in(after.store)[1], *[world.limit_of(task) for task in world.tasks])
    is_free = any(_is_free(at(after.store, number)) for number in range(limit))
    return not is_free or (world.sweeps and after.is_due)


def in_order(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """A lock goes to the first in line, and no call starts before that one unless it was woken."""
    store = before.store
    task = event.what.split()[0]
    line = waiting(store)
    if event.what.endswith(" starts"):
        is_heir = task in _heirs(store)
        woken = any(p.token == event.token and p.message.copy != ORIGINAL for p in after.processes)
        return not line or line[0] == task or is_heir or woken
    if event.what.endswith(" releases") and event.reply[3]:
        return bool(event.reply[3] == _first_of(store, line))
    if event.what.endswith("leaves the line") and any(event.reply[2:3]):
        return bool(event.reply[2] == _first_of(store, [other for other in line if other != task]))
    if event.token == "s" and event.reply[4]:
        known = [(until, task, waiter(store, task)) for until, task in store.line.places]
        back = [(who.since, task) for until, task, who in known if until == AWAY + OVER and who]
        order = sorted([*back, *[place for place in store.line.places if place[0] < AWAY]])
        served = event.reply[3].split("\n") if event.reply[3] else [""] * 6
        heir = served[5] if served[3] == "handed" else ""
        return bool(event.reply[4] == _first_of(store, [task for _, task in order if task != heir]))
    return True


def _is_woken(message: Message) -> bool:
    return message.kind == "call" and message.copy != ORIGINAL and not message.late


def serves_all(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """Who lets a line go on does so until nobody waits beside a free permit."""
    if not event.what.endswith("lets the line go on") or not waiting(after.store):
        return True
    goes_on = any("goes_on" in (process.at, process.then) for process in after.processes)
    limit = highest_in(after.store)[1]
    is_free = any(_is_free(at(after.store, number)) for number in range(limit))
    return goes_on or not is_free or _is_paced(world, after.store, "")


def _is_paced(world: Waiters, store: Store, task: str) -> bool:
    """Whether as many have started, or are about to, as may within a period."""
    pace = world.pace_of(task)
    return 0 < pace <= len(store.starts.times) + len(_live_heirs(store))


def starts_left(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """No more have started, or were woken to start, within a period than may."""
    most = max(world.pace, *world.paces.values()) if world.paces else world.pace
    return len(after.store.starts.times) + len(_live_heirs(after.store)) <= most


def pace_of_who_starts(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """No call starts beside as many starts as its own rate allows, and each start is noted."""
    if not event.what.endswith(" starts"):
        return True
    count = len(before.store.starts.times)
    return count < world.pace_of(event.what.split()[0]) and len(after.store.starts.times) == count + 1


def woken_may_start(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """No call is refused for its pace to which a permit is handed: its start is kept for it."""
    return not (event.what.endswith(" is paced") and event.what.split()[0] in _live_heirs(before.store))


def late_takes_a_start(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """A call that was woken, though late, is not refused for starts that are only kept for others.

    Two would wait for each other for ever.
    """
    task, heirs = event.what.split()[0], _live_heirs(before.store)
    ticket = dict(before.store.tickets).get(task)
    woken = any(p.message.task == task and p.message.copy != ORIGINAL for p in after.processes)
    if not event.what.endswith(" is paced") or not woken or ticket is None or ticket.begun_by:
        return True
    others = max(len(heirs) - 1, 0)
    return len(before.store.starts.times) + others >= world.pace_of(task)


def stands_where_it_stood(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """A call that gives back what it was handed, as it may not start yet, has its place in line again."""
    task = event.what.split()[0]
    known = waiter(before.store, task)
    if not event.what.endswith(" is paced") or known is None or task not in _heirs(before.store):
        return True
    return (known.since, task) in after.store.line.places and task not in _live_heirs(after.store)


def _live_heirs(store: Store) -> set[str]:
    """For whom permits are kept."""
    records = [(p.value, p.record) for p in permits_of(store, 1 + len(store.others))]
    return {
        r.info
        for value, r in records
        if value is not None and isinstance(r, Record) and r.state == "handed" and r.deadline > START
    }


def beyond_drains(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """A permit beyond a limit is had by nobody who knows of that limit, but by whose it was already."""
    task, what = event.what.split()[0], event.what.partition(" ")[2]
    if what == "starts":
        (process,) = [p for p in after.processes if p.token == event.token]
        return process.permit < world.limit_of(task) or task in _heirs(at(before.store, process.permit), 1)
    gives_back = what.endswith(("releases", "leaves the line"))
    for number in range(world.limit_of(task) if gives_back else highest_in(before.store)[1], world.most):
        old, new = at(before.store, number), at(after.store, number)
        if (gives_back or event.token == "s") and _heirs(new, 1) - _heirs(old, 1):
            return False
    return True


def _heirs(store: Store, limit: int = 100) -> set[str]:
    """For whom permits are kept, or were until their deadline."""
    records = [permit.record for permit in permits_of(store, min(limit, 1 + len(store.others)))]
    return {r.info for r in records if isinstance(r, Record) and r.state == "handed"}


def _first_of(store: Store, line: list[str]) -> str:
    calls = dict(store.calls.fields)
    return next(task for task in line if calls.get(task) != _lingers(OVER))


def one_wake_up(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """Of a call at most one wake-up is on its way, but for those that came too late for their hand-over."""
    woken = [
        (m.task, m.attempt) for m in after.broker if m.kind == "call" and m.copy != ORIGINAL and not m.late
    ]
    for process in after.processes:
        if process.heir and not process.call.endswith(LATE):
            woken.append((process.heir, int(process.call.rstrip("!"))))
    return len(set(woken)) == len(woken)


def passed_over_unwoken(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """Who is passed over was woken before, or is about to be, or to ask."""
    on_their_way = {m.task for m in after.broker if m.kind == "call" and m.copy != ORIGINAL}
    on_their_way |= {process.heir for process in after.processes}
    on_their_way |= {process.message.task for process in after.processes if process.at != "hears"}
    return _away(after.store) - _away(before.store) <= on_their_way


def with_the_broker(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """A call that has not ended has a message, if only its courier, in the broker or in a worker's hands."""
    messages = {*after.broker, *[process.message for process in after.processes]}
    kept = {(message.task, message.attempt) for message in messages if message.kind in ("call", "courier")}
    return all(
        fate in ("", "ended", "twice") or (task, attempt) in kept
        for task, attempts in zip(world.tasks, after.fates)
        for attempt, fate in enumerate(attempts)
    )


def known_in_line(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """What a call is woken with is kept until it begins, or leaves."""
    lost = [task for task, _ in before.store.calls.fields if waiter(before.store, task)]
    return not any(
        waiter(after.store, task) is None and "owed" in after.fates[world.tasks.index(task)] for task in lost
    )


def woken_are_let_in(world: Waiters, before: Scene, event: Event, after: Scene) -> bool:
    """A woken call is not refused a lock that is only kept for another."""
    task = event.what.split()[0]
    return not (event.what.endswith(", woken") and _heirs(before.store, world.limit_of(task)))


def time_passes(event: Event) -> bool:
    """Whether time passes."""
    return event.actor is None and any(
        what in event.what for what in ("counts no more", "passes", "is to have its place again")
    )


def is_paced(event: Event) -> bool:
    """Whether a call is refused for its pace."""
    return event.what.endswith(" is paced")


def _answered(scene: Scene, verb: Callable[..., Answer], **arguments: Any) -> Answered:
    store, reply = verb(scene.store, **arguments)
    after = scene._replace(store=store)
    passed_over = _away(store) - _away(scene.store)
    return (_too_late(after, passed_over) if passed_over else after), reply


def _away(store: Store) -> set[str]:
    return {task for until, task in store.line.places if until >= AWAY}


def _too_late(scene: Scene, tasks: set[str]) -> Scene:
    """The wake-ups of these calls come after the end of their hand-over."""
    broker = [m._replace(late=m.kind == "call") if m.task in tasks else m for m in scene.broker]
    processes = [p._replace(call=_late(p.call)) if p.heir in tasks else p for p in scene.processes]
    return scene._replace(broker=tuple(sorted(broker)), processes=tuple(sorted(processes)))


def _late(call: str) -> str:
    """What a call is woken with, if that comes too late for its hand-over."""
    return call if call.endswith(LATE) else call + LATE


def _noted(scene: Scene) -> Scene:
    """The line is noted as due; who looks at it just now sees that it was."""
    processes = [p._replace(then="changed") if p.at == "settles" else p for p in scene.processes]
    return scene._replace(is_due=True, processes=tuple(sorted(processes)))


def _is_free(store: Store) -> bool:
    record = store.record
    return store.value is None or (isinstance(record, Record) and record.deadline <= START)


def _canonical(store: Store, forgets: bool) -> Store:
    """The keys without what makes no difference when no clock runs."""
    first, *others = (_canonical_permit(permit) for permit in permits_of(store, 1 + len(store.others)))
    while others and others[-1] == Permit():
        others.pop()
    places = [
        (since if since < AWAY else AWAY + (START + LEASE if since > AWAY + START else OVER), task)
        for since, task in store.line.places
    ]
    fields = []
    for task, call in store.calls.fields:
        who = waiter(store, task)
        fields.append((task, str(who._replace(misses=min(who.misses, 1))) if who else call))
    tickets = [
        (task, Ticket(text[:-1] + "1" if text[-1] > "1" else text, lease if forgets else BEGUN_MS))
        for task, (text, lease) in store.tickets
    ]
    known = store.known and Known(store.known.text, REMEMBER_MS)
    line = Line(tuple(sorted(places)), REMEMBER_MS if places else -1)
    calls = Calls(tuple(fields), REMEMBER_MS if fields else -1)
    count = len(store.starts.times)
    starts = Starts(tuple((START - count + place, 0, 0) for place in range(count)), EXPIRY if count else None)
    return Store(*first, None, line, calls, tuple(tickets), tuple(others), known, starts=starts)


def _canonical_permit(permit: Permit) -> Permit:
    value, _, record, _ = permit
    if isinstance(record, Record):
        if record.deadline == 0:
            record = None
        else:
            deadline = START + LEASE if record.deadline > START else OVER
            token = "h" if record.state == "handed" else record.token
            record = record._replace(token=token, deadline=deadline, fence=0, since=0)
            value = value and seconds(deadline)
    return Permit(value, value and EXPIRY, record, record and EXPIRY)


def _has_parked(process: Process) -> bool:
    """Whether this delivery was about to wait when its turn came."""
    return process.at == "comes_in" or (process.at == "lingers" and process.then == "comes_in")


def _lingers(until: int) -> str:
    return f"@{until}"


def _new_token(scene: Scene, prefix: str) -> str:
    records = [permit.record for permit in permits_of(scene.store, 1 + len(scene.store.others))]
    used = {process.token for process in scene.processes}
    used |= {record.token for record in records if isinstance(record, Record)}
    return next(token for n in range(16) if (token := f"{prefix}{n:x}") not in used)


def _new_copy(scene: Scene, task: str) -> str:
    messages = [*scene.broker, *[process.message for process in scene.processes]]
    used = {message.copy for message in messages if message.task == task and message.kind == "call"}
    used |= {ticket.text.split("|")[1] for owner, ticket in scene.store.tickets if owner == task}
    return next(copy for n in range(16) if (copy := f"x{n:x}") not in used)


def _event(message: Message, what: str, token: str = "", reply: tuple[Any, ...] = ()) -> Event:
    kind = "" if message.kind == "call" else f"'s {message.kind}"
    who = f"{message.task}{kind}" if message.task else f"a {message.kind}"
    return Event(None, f"{who} {what}", token, reply)


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
