"""Mistakes that a client may make: each is found, by the property that it should break."""

from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from tests.model import properties
from tests.model.clients import RETENTION_MS, Call, Counted, Ours, ParentOfCounted
from tests.model.explorer import (
    DONE,
    Client,
    Event,
    Move,
    Program,
    Property,
    State,
    World,
    assert_broken,
    spinning,
)
from tests.model.scenarios import ALONE, ONE, RAISED, SHORT, SWEPT, TWO
from tests.model.store import MS, Answer, Mark, Record, Start, Store
from tests.model.waiters import (
    ORIGINAL,
    SWEEP,
    Process,
    Scene,
    Waiters,
    at_most_once,
    is_paced,
    line_moves,
    passed_over_unwoken,
    serves_all,
    time_passes,
    with_the_broker,
)

Kind = TypeVar("Kind")


def changed(kind: type[Kind], **methods: Any) -> type[Kind]:
    """A class with other methods."""
    return type(kind.__name__, (kind,), methods)


def marks_in_one_phase(call: Call, state: State, world: World) -> Answer:
    """The long lease at once, as if the message had been sent."""
    lease = call.queue_lease // MS
    return world.run("mark", state, task_id=call.task, lease=lease, dedupe=call.dedupe)


class MarksAfterRelease(Call):
    """A retry that is marked again in a round trip of its own, after the release."""

    def release(self, me: Client, index: int, state: State, world: World) -> Answer:
        return Ours.release(self, me, index, state, world)

    def after_release(self, me: Client) -> Client:
        after = super().after_release(me)
        return after._replace(at="remarking") if after.at == "queued" else after

    def _when_remarking(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = self.mark(state, world)
        until = state.now + self.grace if reply[0] == "marked" else 0
        queued = me._replace(at="queued", marked_until=until, extends=True)
        yield Move(queued, store, "mark", self.task, reply)


class FreesWhileItWaits(Call):
    """A call that frees its mark on a conflict, though it comes back."""

    def after_conflict(self, me: Client) -> Client:
        return self._queued(me)._replace(at="waiving")

    def _when_waiving(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = world.run("if_same", state, task_id=self.task)
        yield Move(self._queued(me), store, "if_same", self.task, reply)


class CountsFromReply(Ours):
    """The lease counted from when the reply was read."""

    def _when_answered(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        if me.word != "held":
            me = me._replace(until=state.now + self.lease)
        return super()._when_answered(me, index, state, world)


class TwoRoundTrips(Ours):
    """One command asks whether the lock may be had, the next takes it."""

    def _when_sent(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        _, reply = self.acquire(me, index, state, world)
        if reply[0] == "held":
            yield from super()._when_sent(me, index, state, world)
        else:
            yield Move(me._replace(at="taking", word=reply[0], seen=reply[5] or ""), state.store)

    def _when_taking(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, record = state.store, state.store.record
        if store.value is not None and isinstance(record, Record):
            store = store._replace(value="0", record=record._replace(deadline=0))
        store, reply = self.acquire(me, index, state._replace(store=store), world)
        answered = me._replace(at="answered", until=me.sent + self.lease, seen="")
        reply = (me.word, *reply[1:5], me.seen)  # it reports whom it found before
        yield Move(answered, store, "acquire", self.token(me, index), reply)


class KnowsTheFirst(Ours):
    """A client that releases and renews the first permit, whichever it has."""

    def _when_answered(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        return super()._when_answered(me._replace(permit=0), index, state, world)


class AsksOfItsOwn(Ours):
    """A client that looks at the permits within its limit only, though more are in use."""

    def acquire(self, me: Client, index: int, state: State, world: World) -> Answer:
        asked = {"token": self.token(me, index), "lease": self.lease, "retention": RETENTION_MS}
        forgotten = state._replace(store=state.store._replace(known=None))
        return world.run(
            "acquire",
            forgotten,
            **asked,
            terms=self.terms,
            count=self.limit - 1 and self.limit,
            line=self.limit > 1,
        )


def of_two(tasks: str, kind: type[Ours] = Ours, **options: Any) -> list[Ours]:
    """Clients of a lock with two permits."""
    return [kind(task, limit=2, **options) for task in tasks]


def windows(kind: type[Counted] = Counted, **of_b: Any) -> list[Counted]:
    """Two calls with one key whose success counts for a while."""
    about = {"queue_lease": 2, "lease": 3, "window": 2}
    return [kind("a", **about, is_late=of_b.pop("is_late", False)), kind("b", **about, **of_b)]


class NotesAfterRelease(Counted):
    """A success that is noted in a round trip of its own, after the release."""

    def has_succeeded(self, me: Client) -> bool:
        return False

    def _when_storing(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        yield Move(Client("noting", counts_until=state.now + self.window), state.store)

    def _when_noting(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        done = Mark(self.token(me, index), me.counts_until // MS)
        yield Move(Client("done", counts_until=me.counts_until), state.store._replace(done=done), "note")


class AsksBeforeItsLock(Counted):
    """A call that asks whether another has succeeded, and acquires then."""

    def _when_queued(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        if self.sees_another(state):
            yield Move(me._replace(at="freeing"), state.store)
        else:
            yield Move(me._replace(at="sent", sent=state.now), state.store)

    def _when_answered(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        return Call._when_answered(self, me, index, state, world)


class LeavesItsSuccess(Counted):
    """A call that fails after its release, and takes nothing back."""

    def _when_failing(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        yield Move(Client("failed"), state.store)


class LeavesTheDead(ParentOfCounted):
    """A worker parent that gives the lock of its child back, and no more."""

    def moves(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        for move in super().moves(me, index, state, world):
            yield move._replace(client=Client("forgotten")) if move.client.at == "forgetting" else move


def calls(until_done: bool, kind: type[Call] = Call, **options: Any) -> list[Call]:
    """Two calls with one key."""
    return [kind(task, until_done=until_done, queue_lease=3, lease=2, **options) for task in "ab"]


def mutant(must_break: str, *programs: Program, **options: Any) -> tuple[str, World]:
    """What the mistake of a client breaks, and where."""
    return must_break, World(*programs, **options)


A, B = Ours("a"), Ours("b")
MUTANTS = {
    "acquire in two round trips": mutant("one_taker", TwoRoundTrips("a"), TwoRoundTrips("b"), Ours("c"),
        ticks=5, crashes=1),
    "no deadline check after acquire": mutant("exclusion", changed(Ours, may_enter=lambda *_: True)("a"), B,
        ticks=6),
    "lease counted from the reply": mutant("exclusion", CountsFromReply("a"), B, ticks=6),
    "mark in one phase": mutant("no_ghost", *calls(False, changed(Call, mark=marks_in_one_phase)), ticks=3,
        crashes=1),
    "mark written back after the release": mutant("one_queued", *calls(True, MarksAfterRelease, retries=1),
        ticks=3),
    "mark kept by the skipped": mutant("no_ghost",
        *calls(False, changed(Call, after_conflict=lambda *_: DONE)), Ours("c", tries=1), ticks=2),
    "second delivery with a lower limit looks at its own permits": mutant("one_each", Ours("b", limit=3),
        Ours("a", limit=3), AsksOfItsOwn("a"), ticks=2),
    "release of another permit": mutant("no_release_lost", *of_two("ab", KnowsTheFirst), ticks=2),
    "renewal of another permit": mutant("no_false_loss", *of_two("ab", KnowsTheFirst, beats=1), ticks=2),
    "success that counts for one who has failed": mutant("no_ghost_success",
        *windows(changed(Counted, has_succeeded=lambda *_: True)), ticks=2),
    "success noted after the release": mutant("success_lasts", *windows(NotesAfterRelease), ticks=2),
    "second body before the note": mutant("no_second_body", *windows(NotesAfterRelease), ticks=2),
    "bare call that does not ask": mutant("no_second_body",
        *windows(changed(Counted, sees_another=lambda *_: False), is_bare=True), ticks=2),
    "marked call that does not ask, though its mark may have lapsed": mutant("no_second_body",
        *windows(changed(Counted, sees_another=lambda *_: False)), ticks=3),
    "asked before the lock is had": mutant("no_second_body",
        *windows(AsksBeforeItsLock, is_bare=True), ticks=2),
    "failure after the release that is not taken back": mutant("failure_frees", *windows(LeavesItsSuccess),
        ticks=2),
    "death after the release that is not taken back": mutant("failure_frees", *windows()[:1],
        LeavesTheDead(0), ticks=2, crashes=1),
    "mark freed by the waiting": mutant("mark_lasts", *calls(False, FreesWhileItWaits), ticks=2),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name):
    """The mistake breaks its property."""
    must_break, world = MUTANTS[name]
    assert_broken(world, must_break, [getattr(properties, must_break)])


class TakesAnothersBack(Ours):
    """A call without a body that takes a start back, whose ever it is."""

    def its_start(self, me: Client, store: Store) -> Start:
        return store.starts.times[0] if store.starts.times else me.granted


def ours(tasks: str, kind: type[Ours] = Ours, **options: Any) -> list[Ours]:
    """Clients with a lease of a tick."""
    return [kind(task, **{**SHORT, **ONE, **options}) for task in tasks]


def test_start_of_another_that_is_taken_back_lets_too_many_start():
    """A mistake of a client, found by the pace that it breaks."""
    world = World(*ours("abc", TakesAnothersBack, bodiless=True, limit=2), ticks=5, crashes=1)
    assert_broken(world, "pace_kept", [properties.pace_kept])


def as_it_was(world: Waiters, scene: Scene, *_: Any) -> Scene:
    """Nothing is sent, and nobody woken."""
    return scene


def no(*_: Any) -> bool:
    """Whatever is asked."""
    return False


def yes(*_: Any, **__: Any) -> bool:
    """Whatever is asked."""
    return True


def woken_alone(world: Waiters, process: Process) -> bool:
    """A message that wakes a call, or was delivered again; not one that has parked it."""
    return process.message.copy != ORIGINAL or bool(process.message.again)


def asks_if_woken(world: Waiters, process: Process) -> bool:
    """A message that wakes a call, or was delivered again."""
    message = process.message
    return bool(message.again) or (message.copy != ORIGINAL and message.task in world.late)


def ends_if(word: str) -> Any:
    """Also if a courier is answered so."""
    return lambda world, reply: reply[0] == word or Waiters.courier_ends(world, reply)


def notes_later(world: Waiters, scene: Scene) -> Scene:
    """The line is noted in another step."""
    return scene._replace(processes=tuple(sorted((*scene.processes, Process("notes", SWEEP)))))


def notes(world: Waiters, scene: Scene, process: Process) -> Iterator[tuple[Event, Scene]]:
    """The line is noted."""
    yield Event(None, "notes the line"), Waiters.noted_before(world, scene)


def with_methods(tasks: str, **options: Any) -> Waiters:
    """A world; options are its own, or other methods that it has."""
    own = [name for name in options if name not in Waiters.__dataclass_fields__]
    return changed(Waiters, **{name: options.pop(name) for name in own})(tasks, **options)


def assert_breaks(world: Waiters, must_break: Property | str) -> None:
    """Fail unless the property is broken, or the goal of this name out of reach."""
    if isinstance(must_break, str):
        assert_broken(world, must_break, [], goal=getattr(world, must_break))
    else:
        assert_broken(world, must_break.__name__, [must_break])


LOST = "all_end"
OF_WORKERS: dict[str, tuple[Property | str, str, dict[str, Any]]] = {
    "no wake-up": (LOST, "ab", {"with_wake": as_it_was, **ALONE}),
    "line never noted": (LOST, "ab",
        {"crashes": 1, "noted_before": as_it_was, "noted_after": as_it_was, **SWEPT}),
    "line noted when the call is parked": (LOST, "ab",
        {"crashes": 2, "noted_before": as_it_was, "noted_after": notes_later, "_notes": notes, **SWEPT}),
    "line forgotten though noted": (LOST, "abcd", { "crashes": 1, "is_unchanged": yes, **SWEPT}),
    "line noted before parking alone": (LOST, "ab", {"crashes": 1, "noted_after": as_it_was, **SWEPT}),
    "call that has parked asks as if it had not": (passed_over_unwoken, "abc",
        {"has_others": woken_alone, "linger": True, "late_wakes": 1, **SWEPT}),
    "backend not asked by one that has waited": (at_most_once, "ab",
        {"late": "ab", "seconds": 1, "early_seconds": True, "may_have_ended": asks_if_woken}),
    "no courier": (LOST, "ab", {"wipes": 1, "with_courier": as_it_was}),
    "courier sent when it is parked": (with_the_broker, "ab", {"crashes": 1, "sends_courier_later": yes}),
    "courier sent before a redelivered call is parked": (with_the_broker, "ab",
        {"late": "a", "crashes": 2, "sends_courier_later": no}),
    "no courier for a redelivered call": (with_the_broker, "ab",
        {"late": "a", "crashes": 2, "has_courier": lambda _, message: message.copy != ORIGINAL}),
    "courier ends when the lock is handed over": (with_the_broker, "ab", {"courier_ends": ends_if("handed")}),
    "courier ends when its call is parked": (with_the_broker, "ab", {"courier_ends": ends_if("parked")}),
    "parked without a second look": (LOST, "ab", {"is_free": no, **ALONE}),
    "handed over while it asked": (LOST, "ab", {"linger": True, "its_turn": "", **ALONE}),
    "left without waking the next": (LOST, "abc", {"revokes": 1, "wakes_next": no, **ALONE}),
    "backend not asked": (at_most_once, "ab", {"late": "a", "seconds": 1, "may_have_ended": no}),
    "sweep hands out one permit": (serves_all, "abcd", {"slots": 4, "serves_again": no, **RAISED, **SWEPT}),
    "parked beside a free permit without a second look": (line_moves, "abc",
        {"slots": 3, "is_free": no, **TWO, **ALONE}),
    "left a permit without waking the next": (line_moves, "abcd",
        {"slots": 4, "revokes": 1, "wakes_next": no, **TWO, **ALONE}),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_WORKERS)
def test_mutant_of_the_line_is_killed(name):
    """The mistake loses a call, runs it twice, lets one overtake, or wakes one twice."""
    must_break, tasks, options = OF_WORKERS[name]
    assert_breaks(with_methods(tasks, **options), must_break)


def test_paced_call_whose_line_is_not_noted_is_lost():
    """A mistake of a worker, found as not every call ends."""
    nowhere = {"noted_before": as_it_was, "noted_after": as_it_was}
    assert_breaks(with_methods("ab", pace=1, **nowhere, **SWEPT), "all_end")


def test_paced_call_that_asks_at_once_spins():
    """When it has parked it asks again and again, though no time passes."""
    world = with_methods("ab", slots=2, pace=1, late_wakes=1, met_its_pace="comes_in", **SWEPT)
    assert spinning(world, time_passes, is_paced)
