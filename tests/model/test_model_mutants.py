"""Mistakes that a client may make: each is found, by the property that it should break."""

from collections.abc import Iterator
from typing import Any, TypeVar

import pytest

from tests.model import properties
from tests.model.clients import RETENTION_MS, Call, Counted, Ours, ParentOfCounted
from tests.model.explorer import DONE, Client, Move, Program, State, World, assert_broken
from tests.model.store import MS, Answer, Mark, Record, Store

Kind = TypeVar("Kind")
DEAD_CLASSIC = Store("9")


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
        store, reply = world.run("unmark", state, task_id=self.task)
        yield Move(self._queued(me), store, "unmark", self.task, reply)


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
