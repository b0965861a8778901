"""Every property has teeth: each of these mistakes is found, by the property that it should break."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import pytest

from tests.model import properties
from tests.model.clients import RETENTION_MS, Call, Classic, Counted, Freed, Ours, ParentOfCounted
from tests.model.explorer import DONE, TICK, Client, Move, Program, State, World, assert_broken, explore
from tests.model.lock import Lock
from tests.model.permits import Choice, choose
from tests.model.store import MS, Answer, Mark, Record, Store, task_of

Kind = TypeVar("Kind")
DEAD_CLASSIC = Store("9")


def changed(kind: type[Kind], **methods: Any) -> type[Kind]:
    """A class with other methods."""
    return type(kind.__name__, (kind,), methods)


def wrong(**methods: Any) -> Lock:
    """A lock with other methods."""
    return changed(Lock, **methods)()


def for_anybody(verb: Callable[..., Answer]) -> Callable[..., Answer]:
    """As if the token were the holder's."""
    return lambda lock, store, now, *, token, **rest: verb(
        lock, store, now, token=store.holder.token or token, **rest
    )


def never_takes_over(lock: Lock, store: Store, now: int, **rest: Any) -> Answer:
    """SETNX alone: held whenever the key is there."""
    after, reply = Lock.acquire(lock, store, now, **rest)
    return (store, ("held", *reply[1:])) if reply[0] == "taken_over" else (after, reply)


def keeps_the_lock(lock: Lock, store: Store, now: int, **rest: Any) -> Answer:
    """The right word, and nothing done: the lock is left to its lease."""
    return store, Lock.release(lock, store, now, **rest)[1]


def believes_the_value(lock: Lock, store: Store, now: int) -> bool:
    """No rule 5: a record counts no more once a classic loser has overwritten the value."""
    recorded = store.value == lock.value_of(store.holder.deadline)
    return recorded and Lock.record_decides(lock, store, now)


def resumes_any_attempt(lock: Lock, record: Record, token: str) -> bool:
    """A held lock is resumed even by a second delivery of the attempt that is over."""
    return record.state == "held_for_retry" and task_of(token)[0] == task_of(record.token)[0]


def frees_any_hold(lock: Lock, store: Store, now: int, *, task_id: str, **rest: Any) -> Answer:
    """A revoked task frees whatever is held for a retry."""
    holder = task_of(store.holder.token)[0]
    return Lock.free(lock, store, now, task_id=holder or task_id, **rest)


def marks_again_over_anothers(lock: Lock, store: Store, now: int, token: str, again: int) -> Store:
    """SET without NX."""
    return Lock.marked_again(lock, store._replace(mark=None) if again else store, now, token, again)


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


def one_more(lock: Lock, store: Store, now: int, count: int, limit: int, fits: Any) -> Choice:
    """A permit more than there are."""
    return choose(store, now, max(count, limit + 1), limit + 1, fits)


def the_last_first(lock: Lock, store: Store, now: int, count: int, limit: int, fits: Any) -> Choice:
    """The permit at the end, whoever has it."""
    found = choose(store, now, count, limit, fits)
    return found._replace(number=limit - 1)


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


def classics() -> list[Classic]:
    """A dead classic lock's takers: prompt, with the same timeout."""
    return [Classic(timeout=1), Classic(timeout=1)]


def calls(until_done: bool, kind: type[Call] = Call, **options: Any) -> list[Call]:
    """Two calls with one key."""
    return [kind(task, until_done=until_done, queue_lease=3, lease=2, **options) for task in "ab"]


def mutant(must_break: str, *programs: Program, **options: Any) -> tuple[str, World]:
    """What the mistake breaks, and where: options are of the world, or methods that the lock has instead."""
    methods = {name: options.pop(name) for name in list(options) if hasattr(Lock, name)}
    return must_break, World(*programs, lock=wrong(**methods), **options)


A, B = Ours("a"), Ours("b")
BELIEVES_THE_VALUE = {"record_decides": believes_the_value, "store": DEAD_CLASSIC}
MUTANTS = {
    "release without owner check": mutant("no_stale_release", A, B,
        release=for_anybody(Lock.release), ticks=6),
    "renewal without owner check": mutant("entry_kept", Ours("a", beats=1), B,
        renew=for_anybody(Lock.renew), ticks=6),
    "renewal revives an expired lease": mutant("entry_kept", Ours("a", beats=1, lease=1), Classic(timeout=1),
        may_still_renew=lambda *_: True, ticks=8),
    "take-over one tick early": mutant("exclusion", A, B,
        is_past=lambda _, now, deadline: now >= deadline - TICK, ticks=6),
    "acquire in two round trips": mutant("one_taker", TwoRoundTrips("a"), TwoRoundTrips("b"), Ours("c"),
        ticks=5, crashes=1),
    "fence by INCR": mutant("fences_rise", A, B, next_fence=lambda _, n, now: n + 1, ticks=6, wipes=1),
    "fence by INCR, record expired": mutant("fences_rise", A, B, next_fence=lambda _, n, now: n + 1, ticks=8),
    "release keeps the lock": mutant("no_release_lost", A, release=keeps_the_lock, ticks=2),
    "no deadline check after acquire": mutant("exclusion", changed(Ours, may_enter=lambda *_: True)("a"), B,
        ticks=6),
    "lease counted from the reply": mutant("exclusion", CountsFromReply("a"), B, ticks=6),
    "deadline rounded down": mutant("exclusion", Ours("a", lease=3),
        Classic(timeout=1, tries=2, strict=False), value_of=lambda _, deadline: str(deadline // 1000000),
        ticks=8),
    "proof of death of anybody": mutant("exclusion", A, Ours("b", proof=True), Ours("c", proof=True),
        proves_death=lambda _, record, dead: dead != "" and record.state == "running", ticks=3, crashes=1),
    "proof of death of a lock that rests": mutant("entry_kept", Ours("a", at_least_for=4),
        Ours("b", proof=True), proves_death=lambda _, record, dead: dead != "" and record.token == dead,
        ticks=3, crashes=1, losses=1),
    "rest ignored": mutant("entry_kept", Ours("a", at_least_for=4), B,
        passes_rest=lambda _, record, token: record.state == "resting", ticks=4),
    "hold resumed by the same attempt": mutant("entry_kept", Ours("a", hold=3, retries=1), A,
        resumes=resumes_any_attempt, ticks=4),
    "another's hold freed": mutant("no_stale_release", Ours("a", hold=3, retries=1), Freed("b"),
        free=frees_any_hold, ticks=4),
    "no repair: release lost": mutant("no_release_lost", Ours("a", lease=4), *classics(),
        **BELIEVES_THE_VALUE, ticks=8),
    "no repair: told lost": mutant("no_false_loss", Ours("a", lease=4, beats=1), *classics(),
        **BELIEVES_THE_VALUE, ticks=8),
    "no repair: two holders": mutant("exclusion", Ours("a", lease=8), Classic(timeout=1), B,
        **BELIEVES_THE_VALUE, ticks=12),
    "mark deleted by another": mutant("others_mark_kept", *calls(False), Ours("c"), ends_mark=lambda *_: True,
        ticks=5),
    "mark over another's": mutant("others_mark_kept", *calls(False), may_mark=lambda *_: True, ticks=2),
    "mark beside the running": mutant("one_queued", *calls(True), executes_a_task=lambda *_: False, ticks=2),
    "mark kept by the start": mutant("no_ghost", *calls(False), ends_mark=lambda *_: False, ticks=2),
    "mark not written back": mutant("one_queued", *calls(True, MarksAfterRelease, retries=1),
        marked_again=lambda _, store, *rest: store, ticks=3),
    "mark written back over another's": mutant("others_mark_kept", *calls(True, retries=1),
        marked_again=marks_again_over_anothers, ticks=3),
    "lapsed mark extended": mutant("no_ghost", *calls(False),
        may_extend=lambda _, mark, task_id: mark is None or mark.task_id == task_id, ticks=2),
    "mark shortened": mutant("mark_lasts", *calls(True, retries=1, countdown=3),
        longer=lambda _, mark, new: new, ticks=5),
    "another's mark extended": mutant("others_mark_kept", *calls(False),
        may_extend=lambda _, mark, task_id: mark is not None, ticks=2),
    "another's mark freed": mutant("others_mark_kept", *calls(False), may_unmark=lambda *_: True, ticks=3),
    "mark in one phase": mutant("no_ghost", *calls(False, changed(Call, mark=marks_in_one_phase)), ticks=3,
        crashes=1),
    "mark written back after the release": mutant("one_queued", *calls(True, MarksAfterRelease, retries=1),
        ticks=3),
    "mark kept by the skipped": mutant("no_ghost",
        *calls(False, changed(Call, after_conflict=lambda *_: DONE)), Ours("c", tries=1), ticks=2),
    "one permit too many": mutant("exclusion", *of_two("abc"), choose=one_more, ticks=2),
    "one permit too many for one with a lower limit": mutant("beyond_drains", *of_two("a"), Ours("b"),
        choose=one_more, ticks=2),
    "permit chosen that is held": mutant("exclusion", *of_two("abc"), choose=the_last_first,
        record_decides=lambda *_: False, is_past=lambda *_: True, ticks=2),
    "second delivery has a second permit": mutant("one_each", *of_two("aa"),
        is_own=lambda _, record, token: record.token == token, ticks=2),
    "second delivery has another permit than that which has lapsed": mutant("one_each",
        *of_two("a", hold=3, retries=1, lease=2), *of_two("a", tries=1), *of_two("b", lease=2, tries=1),
        takes_its_own_over=lambda *_: False, ticks=3),
    "acquire sent again has a second permit": mutant("one_each", *of_two("a"), is_own=lambda *_: False,
        ticks=2, losses=1),
    "second delivery with a lower limit looks at its own permits": mutant("one_each", Ours("b", limit=3),
        Ours("a", limit=3), AsksOfItsOwn("a"), ticks=2),
    "release of another permit": mutant("no_release_lost", *of_two("ab", KnowsTheFirst), ticks=2),
    "renewal of another permit": mutant("no_false_loss", *of_two("ab", KnowsTheFirst, beats=1), ticks=2),
    "permit taken over one tick early": mutant("exclusion", *of_two("abc"),
        is_past=lambda _, now, deadline: now >= deadline - TICK,
        choose=lambda _, store, now, *rest: choose(store, now + TICK, *rest), ticks=6),
    "fence that stands still": mutant("fences_rise", *of_two("ab"), next_fence=lambda _, n, now: n or now,
        ticks=4),
    "proof of anybody's death opens a permit": mutant("exclusion",
        *of_two("a", lease=1, tries=1), *of_two("bd", tries=1), *of_two("c", proof=True, tries=2), ticks=2,
        crashes=1,        proves_death=lambda _, record, dead: dead != "" and record.state == "running"),
    "another's permit freed": mutant("no_stale_release", *of_two("a", hold=3, retries=1), *of_two("b"),
        Freed("b"), free=frees_any_hold, ticks=4),
    "success that counts for one who has failed": mutant("no_ghost_success",
        *windows(changed(Counted, has_succeeded=lambda *_: True)), ticks=2),
    "success not noted": mutant("success_lasts", *windows(), ticks=2,
        succeeded=lambda _, store, *rest: store),
    "success noted for a quarter of the time": mutant("success_lasts", *windows(), ticks=3,
        succeeded=lambda lock, store, now, token, ms, word: Lock.succeeded(
            lock, store, now, token, ms // 4, word)),
    "success noted for ever": mutant("success_lasts", *windows(), ticks=2,
        succeeded=lambda lock, store, now, token, ms, word: store._replace(done=Mark("a|0|a0", None))),
    "another's success taken back": mutant("others_success_kept", *windows(is_bare=True), ticks=4,
        is_success_of=lambda *_: True),
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
    "success noted after it was taken back": mutant("failure_frees", *windows(is_bare=True, is_late=True),
        ticks=2, may_count=lambda *_: True),
    "failure that says nothing to its release": mutant("failure_frees", *windows(is_bare=True, is_late=True),
        ticks=2, state_of_failed=lambda *_: "running"),
    "failure that keeps its release from freeing the lock": mutant("no_false_loss",
        *windows(is_bare=True, is_late=True), ticks=2, state_of_failed=lambda *_: "lost"),
    "death after the release that is not taken back": mutant("failure_frees", *windows()[:1],
        LeavesTheDead(0), ticks=2, crashes=1),
    "mark freed by the waiting": mutant("mark_lasts", *calls(False, FreesWhileItWaits), ticks=2),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name):
    """The mistake breaks its property."""
    must_break, world = MUTANTS[name]
    assert_broken(world, must_break, [getattr(properties, must_break)])


def test_mutant_that_loses_a_permit_is_killed():
    """A permit that nobody takes over is lost for ever with its holder."""
    for lock, holds in ((Lock(), True), (wrong(acquire=never_takes_over), False)):
        world = World(*of_two("ab", lease=2), lock=lock, ticks=3, crashes=1)
        assert (properties.lost_permit(lock, explore(world, []), 3, 2) is None) == holds


def test_mutant_that_never_takes_over_is_killed():
    """Without take-over a dead lock is not acquired within its lease."""
    for lock, holds in ((Lock(), True), (wrong(acquire=never_takes_over), False)):
        world = World(Ours("a", lease=3), Ours("b", lease=3), lock=lock, ticks=4, crashes=1)
        assert (properties.slowest_acquire(lock, explore(world, []), 3) <= 3) == holds


@pytest.mark.parametrize("until_done", [False, True])
def test_mutant_that_marks_for_ever_is_killed(until_done):
    """A mark without a lease blocks its key for ever once the call is lost."""
    lock = wrong(mark_of=lambda _, task_id, now, lease: Mark(task_id, None))
    world = World(*calls(until_done), lock=lock, ticks=4, crashes=1)
    assert properties.slowest_publish(world.lock, explore(world, []), 1_000, until_done=until_done) > 1_000
