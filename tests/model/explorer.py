"""Every interleaving of client programs on one lock, breadth first, each state once.

A program is a pure function from a client's state and the world's to its next moves; each move is one
atomic step on Redis or one decision of the client. Crashes, lost replies, loss of data and the clock are
moves as well. A pause is a clock that ticks while a client does not move.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from tests.model.lock import Lock
from tests.model.permits import permits_of, trimmed
from tests.model.store import SECOND, Answer, Permit, Record, Start, Store, purge

TICK = SECOND // 2
START = 10 * SECOND
INSIDE = frozenset({"inside", "renewing", "renewed"})
NOTHING = Store()
ENDED = frozenset({"done", "dead"})
VERBS = (
    "acquire",
    "renew",
    "release",
    "hold",
    "free",
    "mark",
    "if_same",
    "forget_done",
    "take_back",
)


class Client(NamedTuple):
    """Where a client stands.

    `until`: the time to which it relies on the lock, by its own reckoning; `marked_until`: to which its mark
    lasts; `counts_until`: to which its success counts; `granted`: its start. `extends`: its message is sent,
    and its mark is yet to be extended.
    """

    at: str = "idle"
    tries: int = 0
    attempt: int = 0
    beats: int = 0
    sent: int = 0
    until: int = 0
    since: int = 0
    word: str = ""
    seen: str = ""
    dead: str = ""
    marked_until: int = 0
    extends: bool = False
    permit: int = 0
    counts_until: int = 0
    granted: Start = (0, 0, 0)


DONE, DEAD = Client("done"), Client("dead")


class State(NamedTuple):
    """The whole world. `fence`: the largest one granted. `buried`: grants that were taken over.

    `bodies`: when those were granted under which a body has begun, as long as that matters.
    """

    now: int
    store: Store
    clients: tuple[Client, ...]
    crashes: int
    losses: int
    wipes: int
    fence: int = 0
    buried: tuple[tuple[str, str], ...] = ()
    bodies: tuple[int, ...] = ()


class Move(NamedTuple):
    """One step of a client. `verb` and `token` name what ran on Redis, `reply` what it answered."""

    client: Client
    store: Store
    verb: str = ""
    token: str = ""
    reply: tuple[Any, ...] = ()
    loses_reply: bool = False


class Event(NamedTuple):
    """What happened between two states; `actor` is None for the clock and the server."""

    actor: int | None
    what: str
    token: str = ""
    reply: tuple[Any, ...] = ()


class Program:
    """What a client does; `prompt`: where it stands and no time passes, `foreign`: it is none of ours."""

    prompt = frozenset[str]()
    foreign = False

    def begin(self) -> Client:
        """The state in which it begins."""
        return Client("idle")

    def moves(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        """Its possible next moves."""
        raise NotImplementedError


class World:
    """Clients on one lock, and how much may go wrong."""

    def __init__(
        self,
        *programs: Program,
        lock: Lock | None = None,  # a mutant replaces its verbs
        store: Store = NOTHING,  # what Redis holds at the start
        ticks: int,  # half seconds that the clock may advance
        crashes: int = 0,  # clients that may be killed
        losses: int = 0,  # replies that may be lost, and the command sent again
        wipes: int = 0,  # how often Redis may lose all its data, and be away for a tick
    ) -> None:
        self.programs = programs
        self.limit = max(getattr(program, "limit", 1) for program in programs)
        self.period = max(getattr(program, "period", 0) for program in programs)
        self.has_terms = self.limit > 1 or self.period > 0
        self.lock = lock or Lock()
        self.verbs = {verb: cache(getattr(self.lock, verb)) for verb in VERBS}
        self.end = START + ticks * TICK
        clients = tuple(program.begin() for program in programs)
        self.start = State(START, store, clients, crashes, losses, wipes)
        if self.has_terms:
            self.representative = Likeness(programs).representative

    def run(self, verb: str, state: State, **about: Any) -> Answer:
        """What the server does with a verb; computed once for equal arguments."""
        return self.verbs[verb](state.store, state.now, **about)

    def steps(self, state: State) -> Iterator[tuple[Event, State]]:
        """Everything that may happen next."""
        now, store, clients, crashes, losses, wipes, fence, buried, bodies = state
        clock_runs = now < self.end
        for index, (program, me) in enumerate(zip(self.programs, clients)):
            at = me.at
            if at in ENDED:
                continue
            if at in program.prompt:
                clock_runs = False
            before, behind = clients[:index], clients[index + 1 :]
            if crashes and at != "idle":
                left = (*before, DEAD, *behind)
                after = State(now, store, left, crashes - 1, losses, wipes, fence, buried, bodies)
                yield Event(index, "is killed"), after
            for client, new_store, verb, token, reply, loses_reply in program.moves(me, index, state, self):
                if loses_reply and not losses:
                    continue
                new_fence, new_buried, new_bodies = fence, buried, bodies
                if client.at == "inside" and me.granted[0]:
                    new_bodies = tuple(sorted((*bodies, me.granted[0])))
                if verb == "acquire" and reply[0] not in ("held", "paced"):
                    new_fence = max(fence, int(reply[2]))
                    if reply[0] == "taken_over" and reply[5]:
                        new_buried = tuple(sorted({*buried, grant_in(reply[5])}))
                all_of_them, left = (*before, client, *behind), losses - loses_reply
                about = wipes, new_fence, new_buried, new_bodies
                after = State(now, new_store, all_of_them, crashes, left, *about)
                yield Event(index, verb or client.at, token, reply), after
        if clock_runs:
            later = now + TICK
            yield Event(None, "tick"), state._replace(now=later, store=purge(store, later))
        if wipes and store != NOTHING:
            restarted = state._replace(now=now + TICK, store=NOTHING, wipes=wipes - 1)
            yield Event(None, "data is lost"), restarted


class Likeness:
    """Which states of clients with several permits are alike: only one of them need be followed.

    That is so if clients differ in their names only, or if a record says of a past holder what nobody asks.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.programs = programs
        leases = [getattr(program, "lease", 0) for program in programs]
        self.matters = max(leases) + max(getattr(program, "period", 0) for program in programs)
        self.needs_all_tokens = any(type(program).__name__ in ("LateCopy", "Parent") for program in programs)
        self.rests = any(getattr(program, "at_least_for", 0) for program in programs)
        named = {getattr(program, "task", "") for program in programs if type(program).__name__ == "Freed"}
        children = {getattr(program, "child", -1) for program in programs}
        copied = {getattr(program, "of", -1) for program in programs}
        kinds: dict[Any, list[int]] = {}
        tasks = [getattr(program, "task", None) for program in programs]
        for index, program in enumerate(programs):
            about = {name: value for name, value in vars(program).items() if name != "task"}
            own = tasks[index] is not None and tasks.count(tasks[index]) == 1 and tasks[index] not in named
            if own and index not in children | copied:
                kinds.setdefault((type(program).__name__, str(sorted(about.items()))), []).append(index)
        self.groups = [group for group in kinds.values() if len(group) > 1]

    def representative(self, state: State) -> State:
        """One of the states that are alike, always the same."""
        permits = permits_of(state.store, 1 + len(state.store.others))
        permits = [self._without_the_past(state, permit) for permit in permits]
        known = state.store.known and state.store.known._replace(lease=0)
        clients, buried, to = list(state.clients), state.buried, dict[str, str]()
        for group in self.groups:
            order = sorted(group, key=lambda index: clients[index])
            renamed = [state.clients[index] for index in order]
            for place, index in zip(group, order):
                to[self._name(index)] = self._name(place)
            for place, client in zip(group, renamed):
                clients[place] = client
        if any(old != new for old, new in to.items()):
            permits = [self._renamed_permit(permit, to) for permit in permits]
            clients = [
                client._replace(seen=_renamed(client.seen, to), dead=_renamed(client.dead, to))
                for client in clients
            ]
            buried = tuple(sorted((_renamed(token, to), fence) for token, fence in buried))
        store = state.store._replace(**permits[0]._asdict(), others=trimmed(permits[1:]), known=known)
        # Who was granted the lock within a lease may yet begin, beside others within a period before that.
        bodies = tuple(at for at in state.bodies if at > state.now - self.matters)
        return state._replace(store=store, clients=tuple(clients), buried=buried, fence=0, bodies=bodies)

    def _name(self, index: int) -> str:
        return f"{getattr(self.programs[index], 'task', '')} {index:x}"

    def _without_the_past(self, state: State, permit: Permit) -> Permit:
        record = permit.record
        if not isinstance(record, Record):
            return permit
        if not self.rests:
            permit = permit._replace(record=record._replace(since=0))
        if permit.value is not None or record.deadline or record.fence >= state.now:
            return permit
        sender = state.clients[int(record.token.rsplit("|", 1)[1], 16)]
        return permit if self.needs_all_tokens or sender.at not in ENDED else Permit()

    def _renamed_permit(self, permit: Permit, to: dict[str, str]) -> Permit:
        record = permit.record
        if not isinstance(record, Record):
            return permit
        return permit._replace(record=record._replace(token=_renamed(record.token, to)))


def _renamed(token: str, to: dict[str, str]) -> str:
    """A token as that of another client."""
    if not token:
        return token
    task, attempt, index = token.split("|")
    task, _, index = to.get(f"{task} {index}", f"{task} {index}").partition(" ")
    return f"{task}|{attempt}|{index}"


@cache
def grant_in(record: str) -> tuple[str, str]:
    """Token and fence of a record: a token that was sent again may have been granted twice."""
    token, _, fence, *_ = record.split("\n")
    return token, fence


Property = Callable[[Any, Any, Event, Any], bool]
"""Of a world, the state before an event, the event, and the state after it: whether all is well."""

Origin = dict[Any, tuple[Any, Event] | None]
"""Of each state how it was first reached."""


def caused_by(*events: str) -> Callable[[Property], Property]:
    """A property that only these events can break."""

    def noted(holds: Property) -> Property:
        holds.events = frozenset(events)  # type: ignore[attr-defined]
        return holds

    return noted


class Result(NamedTuple):
    """What the exploration found: how many states, in which keys and times, and what is broken, how."""

    moments: frozenset[tuple[Store, int]]
    states: int
    seconds: float
    broken: str = ""
    trace: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = f"{self.broken} is broken in {len(self.trace)} steps" if self.broken else "all holds"
        lines = "".join(f"\n    {line}" for line in self.trace)
        return f"{self.states:,} states in {self.seconds:.1f} s: {found}{lines}"


def explore(
    world: Any,
    properties: Sequence[Property],
    limit: int = 10_000_000,
    *,
    goal: Callable[[Any], bool] | None = None,
) -> Result:
    """Visit every reachable state, and stop at the first property that is broken.

    A world has a `start` and `steps(state)`. With a goal, there must also be a way to it from every state. It
    may name a `representative` of states that are alike: only that one is followed. Raises RuntimeError past
    the limit: a bound that is not reached proves nothing.
    """
    trace = sys.gettrace()
    gc.disable()  # millions of tuples, none of them in a cycle
    if type(trace).__module__.startswith("coverage"):
        sys.settrace(None)  # millions of calls, none of them of the package
    try:
        return _explore(world, properties, limit, goal)
    finally:
        sys.settrace(trace)
        gc.enable()


def assert_holds(world: Any, properties: Sequence[Property], **options: Any) -> Result:
    """Fail if a property is broken in a state that can be reached."""
    result = explore(world, properties, **options)
    print(result)
    assert not result.broken, str(result)
    return result


def assert_broken(world: Any, must_break: str, properties: Sequence[Property], **options: Any) -> None:
    """Fail unless this is what is broken."""
    result = explore(world, properties, **options)
    print(result)
    assert result.broken == must_break


def _explore(
    world: Any, properties: Sequence[Property], limit: int, goal: Callable[[Any], bool] | None
) -> Result:
    began = time.perf_counter()
    at_stake = cache(lambda what: [p for p in properties if what in getattr(p, "events", (what,))])
    representative = getattr(world, "representative", None)
    origin: Origin = {world.start: None}
    sources: dict[Any, list[Any]] = {}
    frontier = [world.start]
    while frontier:
        reached: list[Any] = []
        for state in frontier:
            for event, after in world.steps(state):
                for holds in at_stake(event.what):
                    if not holds(world, state, event, after):
                        trace = _trace(origin, state, event, after)
                        spent = time.perf_counter() - began
                        return Result(frozenset(), len(origin), spent, holds.__name__, trace)
                if representative is not None:
                    after = representative(after)
                step = (state, event)
                if origin.setdefault(after, step) is step:
                    reached.append(after)
                if goal is not None:
                    sources.setdefault(after, []).append(state)
        if len(origin) > limit:
            raise RuntimeError(f"more than {limit:,} states")
        frontier = reached
    moments = frozenset((state.store, state.now) for state in origin)
    stuck = _first_stuck(origin, sources, goal) if goal is not None else None
    spent = time.perf_counter() - began
    if goal is not None and stuck is not None:
        before = origin[stuck]
        trace = _trace(origin, *before, stuck) if before else ()
        return Result(moments, len(origin), spent, goal.__name__, trace)
    return Result(moments, len(origin), spent)


def spinning(world: Any, is_time: Callable[[Event], bool], turns: Callable[[Event], bool]) -> str:
    """An event of this kind that may happen again and again though no time passes; empty if none does.

    Raises RuntimeError beyond a bound, as ever more is sent: that is no end either.
    """
    after: dict[Any, list[tuple[Any, Event]]] = {}
    representative = getattr(world, "representative", lambda state: state)
    found = [world.start]
    while found:
        state = found.pop()
        if state not in after:
            steps = [(representative(to), event) for event, to in world.steps(state)]
            after[state] = [(to, event) for to, event in steps if not is_time(event)]
            found += [to for to, _ in steps]
        if len(after) > 100_000:
            raise RuntimeError("more than 100,000 states")
    part = _parts(after)
    ways_round = (
        event.what
        for state, steps in after.items()
        for to, event in steps
        if part[to] == part[state] and turns(event)
    )
    return next(ways_round, "")


def _parts(after: dict[Any, list[tuple[Any, Event]]]) -> dict[Any, int]:
    """A number for each state: the same for those that lead to each other (Kosaraju)."""
    order: list[Any] = []
    seen: set[Any] = set()
    for start in after:
        stack = [] if start in seen else [(start, iter(after[start]))]
        seen.add(start)
        while stack:
            state, steps = stack[-1]
            to = next((to for to, _ in steps if to not in seen), None)
            if to is None:
                order.append(stack.pop()[0])
            else:
                seen.add(to)
                stack.append((to, iter(after[to])))
    before: dict[Any, list[Any]] = {}
    for state, steps in after.items():
        for to, _ in steps:
            before.setdefault(to, []).append(state)
    part: dict[Any, int] = {}
    for number, start in enumerate(reversed(order)):
        found = [] if start in part else [start]
        while found:
            state = found.pop()
            if part.setdefault(state, number) == number:
                found += [earlier for earlier in before.get(state, ()) if earlier not in part]
    return part


def _first_stuck(origin: Origin, sources: dict[Any, list[Any]], goal: Callable[[Any], bool]) -> Any:
    """The state nearest to the start from which there is no way to the goal."""
    saved = {state for state in origin if goal(state)}
    frontier = list(saved)
    while frontier:
        for before in sources.get(frontier.pop(), ()):
            if before not in saved:
                saved.add(before)
                frontier.append(before)
    return next((state for state in origin if state not in saved), None)


def _trace(origin: Origin, state: Any, event: Event, after: Any) -> tuple[str, ...]:
    lines = [_line(event, after)]
    step = origin[state]
    while step is not None:
        before, event = step
        lines.append(_line(event, state))
        state, step = before, origin[before]
    return tuple(reversed(lines))


def _line(event: Event, after: Any) -> str:
    who = "" if event.actor is None else f"client {event.actor} "
    answer = f" -> {event.reply[0]}" if event.reply else ""
    token = f" {event.token}" if event.token else ""
    return f"{after.now / SECOND:g} s: {who}{event.what}{token}{answer} (lock {after.store.value})"
