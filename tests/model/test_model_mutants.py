"""Every property has teeth: each of these mistakes is found, by the property that it should break."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.model.clients import Call, Classic, Freed, Ours
from tests.model.explorer import DONE, TICK, Client, Move, Property, State, World, explore
from tests.model.lock import MS, Lock, Mark, Record, Store, Ticket, task_of
from tests.model.properties import (
    entry_kept,
    exclusion,
    fences_rise,
    mark_lasts,
    no_false_loss,
    no_ghost,
    no_release_lost,
    no_stale_release,
    one_queued,
    one_taker,
    others_mark_kept,
    slowest_acquire,
    slowest_publish,
)
from tests.model.waiters import Message, Process, Scene, Waiters, at_most_once, in_order

Answer = tuple[Store, tuple[Any, ...]]


class ReleasesForAnybody(Lock):
    """Release without comparing the token."""

    def release(self, store: Store, now: int, *, token: str, **arguments: Any) -> Answer:
        """As if the token were the holder's."""
        token = store.record.token if isinstance(store.record, Record) else token
        return super().release(store, now, token=token, **arguments)


class RenewsForAnybody(Lock):
    """Renewal without comparing the token."""

    def renew(self, store: Store, now: int, *, token: str, lease: int, retention: int) -> Answer:
        """As if the token were the holder's."""
        token = store.record.token if isinstance(store.record, Record) else token
        return super().renew(store, now, token=token, lease=lease, retention=retention)


class RenewsTheDead(Lock):
    """Renewal that brings an expired lease back to life."""

    def may_still_renew(self, store: Store, now: int) -> bool:
        """At any time."""
        return True


class TakesOverEarly(Lock):
    """Take-over one tick before the deadline."""

    def is_past(self, now: int, deadline: int) -> bool:
        """A tick too early."""
        return now >= deadline - TICK


class NeverTakesOver(Lock):
    """SETNX alone."""

    def acquire(self, store: Store, now: int, **arguments: Any) -> Answer:
        """Held whenever the key is there."""
        after, reply = super().acquire(store, now, **arguments)
        return (store, ("held", *reply[1:])) if reply[0] == "taken_over" else (after, reply)


class Counts(Lock):
    """INCR instead of the clock."""

    def next_fence(self, previous: int, now: int) -> int:
        """One more than the record says, if there is a record."""
        return previous + 1


class KeepsTheLock(Lock):
    """Release that leaves the lock to its lease."""

    def release(self, store: Store, now: int, **arguments: Any) -> Answer:
        """The right word, and nothing done."""
        return store, super().release(store, now, **arguments)[1]


class RoundsDown(Lock):
    """The lock's value rounded down to the second."""

    def value_of(self, deadline: int) -> str:
        """A second that may lie before the deadline."""
        return str(deadline // 1_000_000)


class BelievesTheValue(Lock):
    """No rule 5: a record counts only while the value is its own."""

    def record_decides(self, store: Store, now: int) -> bool:
        """Not once a classic loser has overwritten the value."""
        record = store.record
        recorded = isinstance(record, Record) and store.value == self.value_of(record.deadline)
        return recorded and super().record_decides(store, now)


class BelievesAnyProof(Lock):
    """Take-over on proof of death that does not compare the dead token."""

    def proves_death(self, record: Record, dead: str) -> bool:
        """Somebody died."""
        return dead != "" and record.state == "running"


class BuriesAlive(Lock):
    """Take-over on proof of death in any state."""

    def proves_death(self, record: Record, dead: str) -> bool:
        """Even of a lock that rests."""
        return dead != "" and record.token == dead


class IgnoresRest(Lock):
    """A resting lock stands in nobody's way."""

    def passes_rest(self, record: Record, token: str) -> bool:
        """Everybody passes."""
        return record.state == "resting"


class ResumesAnyAttempt(Lock):
    """A held lock is resumed by any delivery of the task."""

    def resumes(self, record: Record, token: str) -> bool:
        """Even by a second delivery of the attempt that is over."""
        return record.state == "held_for_retry" and task_of(token)[0] == task_of(record.token)[0]


class FreesAnyHold(Lock):
    """A revoked task frees whatever is held for a retry."""

    def free(self, store: Store, now: int, *, task_id: str, remember: int) -> Answer:
        """As if the task were the one it is held for."""
        record = store.record
        holder = task_of(record.token)[0] if isinstance(record, Record) else None
        return super().free(store, now, task_id=holder or task_id, remember=remember)


class MarksForEver(Lock):
    """A mark without a lease."""

    def mark_of(self, task_id: str, now: int, lease: int) -> Mark:
        """No TTL."""
        return Mark(task_id, None)


class MarksOverAnothers(Lock):
    """A mark that is set without a look at the one that is there."""

    def may_mark(self, mark: Mark, task_id: str) -> bool:
        """Whosever it is."""
        return True


class MarksBesideTheRunning(Lock):
    """A publish that does not ask whether a task runs, though it should with `until_done`."""

    def executes_a_task(self, store: Store, now: int) -> bool:
        """Nobody runs."""
        return False


class DeletesAnyMark(Lock):
    """Starting deletes whatever mark there is."""

    def ends_mark(self, mark: str, token: str) -> bool:
        """Also another's."""
        return True


class KeepsTheMark(Lock):
    """Starting does not end the task's own mark."""

    def ends_mark(self, mark: str, token: str) -> bool:
        """Never."""
        return False


class ForgetsTheMark(Lock):
    """A retry does not write its mark back."""

    def marked_again(self, store: Store, now: int, token: str, again: int) -> Store:
        """Release only."""
        return store


class MarksAgainOverAnothers(Lock):
    """A retry writes its mark back, whoever was marked meanwhile."""

    def marked_again(self, store: Store, now: int, token: str, again: int) -> Store:
        """SET without NX."""
        return super().marked_again(store._replace(mark=None) if again else store, now, token, again)


class ExtendsLapsedMarks(Lock):
    """An extension that sets a mark which is no longer there."""

    def may_extend(self, mark: Mark | None, task_id: str) -> bool:
        """Unless it is another's."""
        return mark is None or mark.task_id == task_id


class ShortensMarks(Lock):
    """An extension that comes late cuts the mark that the retry has written meanwhile."""

    def longer(self, mark: Mark | None, new: Mark) -> Mark:
        return new


class ExtendsAnyMark(Lock):
    """An extension that does not compare the task id."""

    def may_extend(self, mark: Mark | None, task_id: str) -> bool:
        """Whosever it is."""
        return mark is not None


class FreesAnyMark(Lock):
    """A mark that is freed without comparing the task id."""

    def may_unmark(self, mark: Mark, task_id: str) -> bool:
        """Whosever it is."""
        return True


class HandsToNobody(Lock):
    """Release that does not hand over."""

    def next_in_line(self, store: Store, now: int) -> tuple[str | None, int, tuple[str, ...]]:
        """Whoever waits."""
        return None, 0, ()


class HandsToTheLast(Lock):
    """Release that hands over to the one who came last."""

    def next_in_line(self, store: Store, now: int) -> tuple[str | None, int, tuple[str, ...]]:
        """The other end of the line."""
        return store.line.places[-1][1] if store.line.places else None, 0, ()


class LetsAnybodyIn(Lock):
    """A lock that is kept for one is open to all."""

    def is_for(self, heir: str | None, task: str | None) -> bool:
        """For whoever asks."""
        return heir is not None


class LetsNobodyIn(Lock):
    """A lock that is kept for one is open to none until its deadline."""

    def is_for(self, heir: str | None, task: str | None) -> bool:
        """For nobody."""
        return False

    def is_woken(self, ticket: Ticket | None, copy: str) -> bool:
        """Not for the woken either."""
        return False


class IgnoresTickets(Lock):
    """Any message of a call starts it."""

    def is_stale(self, ticket: Ticket, attempt: int, copy: str) -> bool:
        """Whatever the ticket says."""
        return False


class ComparesNoCopies(Lock):
    """A ticket that tells attempts apart, and not the messages of one."""

    def is_stale(self, ticket: Ticket, attempt: int, copy: str) -> bool:
        """Only if a later attempt waits or has begun."""
        return int(ticket.text.split("|")[0]) > attempt


class ComparesNoAttempts(Lock):
    """A ticket that tells messages apart, and not the attempts of a call."""

    def is_stale(self, ticket: Ticket, attempt: int, copy: str) -> bool:
        """Only if another message of this very attempt has begun."""
        return ticket.text.split("|")[0] == str(attempt) and super().is_stale(ticket, attempt, copy)


class ClaimsNoTicket(Lock):
    """A start that is not written into the ticket."""

    def begun(self, store: Store, task: str, text: str, ticket: Ticket | None, remember: int) -> Store:
        """As if nobody else could come."""
        return store


class WakesNobody(Waiters):
    """A release after which no wake-up is sent."""

    def with_wake(self, scene: Scene, process: Process) -> Scene:
        """Nothing is sent."""
        return scene


class SendsNoCourier(Waiters):
    """A call that is parked, and nobody looks after it."""

    def with_courier(self, scene: Scene, message: Message) -> Scene:
        """Nothing is sent."""
        return scene


class SendsCouriersLater(Waiters):
    """A call that is parked first, though its message is acknowledged already."""

    def sends_courier_later(self, message: Message) -> bool:
        """Always."""
        return True


class SendsCouriersFirst(Waiters):
    """The courier of a call that had begun is sent before the call is parked again."""

    def sends_courier_later(self, message: Message) -> bool:
        """Never."""
        return False


class TrustsOldCouriers(Waiters):
    """A redelivered call whose courier may have ended when it began."""

    def has_courier(self, message: Message) -> bool:
        """As of any that was woken."""
        return message.copy != "-"


class EndsWhenHanded(Waiters):
    """A courier that ends when the lock is kept for its call: somebody has woken it."""

    def courier_ends(self, reply: tuple[Any, ...]) -> bool:
        """Or was about to."""
        return reply[0] == "handed" or super().courier_ends(reply)


class EndsWhenParked(Waiters):
    """A courier that ends when it finds its call in the line."""

    def courier_ends(self, reply: tuple[Any, ...]) -> bool:
        """It will be woken."""
        return reply[0] == "parked" or super().courier_ends(reply)


class OnlyLooks(Waiters):
    """A courier that does not let the line go on."""

    def courier_goes_on(self, scene: Scene, reply: tuple[Any, ...]) -> bool:
        """Whoever has died."""
        return False


class AcknowledgesCouriersEarly(Waiters):
    """A courier that is lost with its worker."""

    def delivered_again(self, scene: Scene, courier: Message) -> Scene:
        """It is gone."""
        return scene


class LooksOnce(Waiters):
    """A call that does not look at the lock again once it is parked."""

    def is_free(self, store: Store) -> bool:
        """It was held a moment ago."""
        return False


class LeavesItToOthers(Waiters):
    """A call that has been handed the lock while it asked, and is parked as if it had not."""

    def taken_to_ask_still(self, scene: Scene, message: Message) -> Scene:
        """Nobody is woken."""
        return scene


class OverlooksTheRest(Waiters):
    """A call that is parked while the lock rests, and counts on the release that is over."""

    def met_a_rest(self, scene: Scene, message: Message) -> Scene:
        """Nobody is woken."""
        return scene


class KeepsToItself(Waiters):
    """A call that leaves the line, and does not pass on the lock that is kept for it."""

    def passes_on(self, reply: tuple[Any, ...]) -> bool:
        """Never."""
        return False


class AsksNoBackend(Waiters):
    """A woken copy that does not ask whether its call has ended before."""

    def may_have_ended(self, message: Message) -> bool:
        """Only a second delivery asks."""
        return bool(message.again)


class MarksInOnePhase(Call):
    """A publisher that marks with the long lease at once."""

    def mark(self, state: State, world: World) -> Answer:
        """As if the message had been sent."""
        return world.verbs.mark(
            state.store, state.now, task_id=self.task, lease=self.queue_lease // MS, dedupe=self.dedupe
        )


class MarksAfterRelease(Call):
    """A retry that is marked again in a round trip of its own, after the release."""

    def release(self, me: Client, index: int, state: State, world: World) -> Answer:
        """Release only."""
        return Ours.release(self, me, index, state, world)

    def after_release(self, me: Client) -> Client:
        """Queued, and yet to be marked."""
        after = super().after_release(me)
        return after._replace(at="remarking") if after.at == "queued" else after

    def _when_remarking(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = self.mark(state, world)
        until = state.now + self.grace if reply[0] == "marked" else 0
        queued = me._replace(at="queued", marked_until=until, extends=True)
        yield Move(queued, store, "mark", self.task, reply)


class SkipsMarked(Call):
    """A call that is skipped, and keeps its mark."""

    def after_conflict(self, me: Client) -> Client:
        """Done."""
        return DONE


class FreesWhileItWaits(Call):
    """A call that frees its mark on a conflict, though it comes back."""

    def after_conflict(self, me: Client) -> Client:
        """Queued, and about to free the mark."""
        return self._queued(me)._replace(at="waiving")

    def _when_waiving(self, me: Client, index: int, state: State, world: World) -> Iterator[Move]:
        store, reply = world.verbs.unmark(state.store, state.now, task_id=self.task)
        yield Move(self._queued(me), store, "unmark", self.task, reply)


class EntersUnchecked(Ours):
    """No deadline check after acquire."""

    def may_enter(self, me: Client, now: int) -> bool:
        """Whatever the clock says."""
        return True


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


def classics() -> list[Classic]:
    """A dead classic lock's takers: prompt, with the same timeout."""
    return [Classic(timeout=1), Classic(timeout=1)]


def calls(until_done: bool, kind: type[Call] = Call, **options: Any) -> list[Call]:
    """Two calls with one key."""
    return [kind(task, until_done=until_done, queue_lease=3, lease=2, **options) for task in "ab"]


DEAD_CLASSIC = Store("9")
MUTANTS: dict[str, tuple[Property[State], World]] = {
    "release without owner check": (
        no_stale_release,
        World(Ours("a"), Ours("b"), lock=ReleasesForAnybody(), ticks=6),
    ),
    "renewal without owner check": (
        entry_kept,
        World(Ours("a", beats=1), Ours("b"), lock=RenewsForAnybody(), ticks=6),
    ),
    "renewal revives an expired lease": (
        entry_kept,
        World(Ours("a", beats=1, lease=1), Classic(timeout=1), lock=RenewsTheDead(), ticks=8),
    ),
    "take-over one tick early": (exclusion, World(Ours("a"), Ours("b"), lock=TakesOverEarly(), ticks=6)),
    "acquire in two round trips": (
        one_taker,
        World(TwoRoundTrips("a"), TwoRoundTrips("b"), Ours("c"), ticks=5, crashes=1),
    ),
    "fence by INCR": (fences_rise, World(Ours("a"), Ours("b"), lock=Counts(), ticks=6, wipes=1)),
    "fence by INCR, record expired": (fences_rise, World(Ours("a"), Ours("b"), lock=Counts(), ticks=8)),
    "release keeps the lock": (no_release_lost, World(Ours("a"), lock=KeepsTheLock(), ticks=2)),
    "no deadline check after acquire": (
        exclusion,
        World(EntersUnchecked("a"), Ours("b"), ticks=6),
    ),
    "lease counted from the reply": (exclusion, World(CountsFromReply("a"), Ours("b"), ticks=6)),
    "deadline rounded down": (
        exclusion,
        World(Ours("a", lease=3), Classic(timeout=1, tries=2, strict=False), lock=RoundsDown(), ticks=8),
    ),
    "proof of death of anybody": (
        exclusion,
        World(
            Ours("a"),
            Ours("b", proof=True),
            Ours("c", proof=True),
            lock=BelievesAnyProof(),
            ticks=3,
            crashes=1,
        ),
    ),
    "proof of death of a lock that rests": (
        entry_kept,
        World(
            Ours("a", at_least_for=4), Ours("b", proof=True), lock=BuriesAlive(), ticks=3, crashes=1, losses=1
        ),
    ),
    "rest ignored": (entry_kept, World(Ours("a", at_least_for=4), Ours("b"), lock=IgnoresRest(), ticks=4)),
    "hold resumed by the same attempt": (
        entry_kept,
        World(Ours("a", hold=3, retries=1), Ours("a"), lock=ResumesAnyAttempt(), ticks=4),
    ),
    "another's hold freed": (
        no_stale_release,
        World(Ours("a", hold=3, retries=1), Freed("b"), lock=FreesAnyHold(), ticks=4),
    ),
    "no repair: release lost": (
        no_release_lost,
        World(Ours("a", lease=4), *classics(), lock=BelievesTheValue(), store=DEAD_CLASSIC, ticks=8),
    ),
    "no repair: told lost": (
        no_false_loss,
        World(Ours("a", lease=4, beats=1), *classics(), lock=BelievesTheValue(), store=DEAD_CLASSIC, ticks=8),
    ),
    "no repair: two holders": (
        exclusion,
        World(
            Ours("a", lease=8),
            Classic(timeout=1),
            Ours("b"),
            lock=BelievesTheValue(),
            store=DEAD_CLASSIC,
            ticks=12,
        ),
    ),
    "mark deleted by another": (
        others_mark_kept,
        World(*calls(False), Ours("c"), lock=DeletesAnyMark(), ticks=5),
    ),
    "mark over another's": (others_mark_kept, World(*calls(False), lock=MarksOverAnothers(), ticks=2)),
    "mark beside the running": (one_queued, World(*calls(True), lock=MarksBesideTheRunning(), ticks=2)),
    "mark kept by the start": (no_ghost, World(*calls(False), lock=KeepsTheMark(), ticks=2)),
    "mark not written back": (
        one_queued,
        World(*calls(True, MarksAfterRelease, retries=1), lock=ForgetsTheMark(), ticks=3),
    ),
    "mark written back over another's": (
        others_mark_kept,
        World(*calls(True, retries=1), lock=MarksAgainOverAnothers(), ticks=3),
    ),
    "lapsed mark extended": (no_ghost, World(*calls(False), lock=ExtendsLapsedMarks(), ticks=2)),
    "mark shortened": (
        mark_lasts,
        World(*calls(True, retries=1, countdown=3), lock=ShortensMarks(), ticks=5),
    ),
    "another's mark extended": (others_mark_kept, World(*calls(False), lock=ExtendsAnyMark(), ticks=2)),
    "another's mark freed": (others_mark_kept, World(*calls(False), lock=FreesAnyMark(), ticks=3)),
    "mark in one phase": (no_ghost, World(*calls(False, MarksInOnePhase), ticks=3, crashes=1)),
    "mark written back after the release": (
        one_queued,
        World(*calls(True, MarksAfterRelease, retries=1), ticks=3),
    ),
    "mark kept by the skipped": (
        no_ghost,
        World(*calls(False, SkipsMarked), Ours("c", tries=1), ticks=2),
    ),
    "mark freed by the waiting": (
        mark_lasts,
        World(*calls(False, FreesWhileItWaits), ticks=2),
    ),
}


LOST = "a lost wake"
WAITERS: dict[str, tuple[Property[Scene] | str, Waiters]] = {
    "release hands over to nobody": (LOST, Waiters("ab", lock=HandsToNobody())),
    "release hands over to the last": (in_order, Waiters("abc", slots=3, lock=HandsToTheLast())),
    "lock kept for one open to all": (
        in_order,
        Waiters("abcd", slots=3, couriers=False, lock=LetsAnybodyIn()),
    ),
    "lock kept for one open to none": (LOST, Waiters("ab", couriers=False, lock=LetsNobodyIn())),
    "ticket not checked": (at_most_once, Waiters("ab", late_wakes=1, lock=IgnoresTickets())),
    "ticket without copies": (at_most_once, Waiters("ab", late_wakes=1, lock=ComparesNoCopies())),
    "ticket without attempts": (
        at_most_once,
        Waiters("ab", retries={"a": 1}, late_wakes=1, lock=ComparesNoAttempts()),
    ),
    "ticket not claimed": (at_most_once, Waiters("ab", late_wakes=1, lock=ClaimsNoTicket())),
    "no wake-up": (LOST, WakesNobody("ab", couriers=False)),
    "no courier": (LOST, SendsNoCourier("ab", crashes=1)),
    "courier sent when it is parked": (LOST, SendsCouriersLater("ab", crashes=2)),
    "courier sent before a redelivered call is parked": (LOST, SendsCouriersFirst("ab", late="a", crashes=2)),
    "no courier for a redelivered call": (LOST, TrustsOldCouriers("ab", late="a", crashes=2)),
    "courier ends when the lock is handed over": (LOST, EndsWhenHanded("ab", crashes=1)),
    "courier ends when its call is parked": (LOST, EndsWhenParked("ab", crashes=1)),
    "courier only looks": (LOST, OnlyLooks("ab", crashes=1)),
    "courier acknowledged early": (LOST, AcknowledgesCouriersEarly("ab", crashes=2)),
    "parked without a second look": (LOST, LooksOnce("ab", couriers=False)),
    "handed over while it asked": (LOST, LeavesItToOthers("ab", couriers=False, linger=True)),
    "parked during a rest": (LOST, OverlooksTheRest("ab", couriers=False, rests=True)),
    "left without passing on": (LOST, KeepsToItself("abc", couriers=False, revokes=1)),
    "backend not asked": (at_most_once, AsksNoBackend("ab", late="ab", seconds=1)),
}


@pytest.mark.parametrize("name", WAITERS)
def test_mutant_of_the_line_is_killed(name):
    """The mistake loses a call, runs it twice, or lets one overtake."""
    must_break, world = WAITERS[name]
    if isinstance(must_break, str):
        result = explore(world, [], goal=world.all_end)
        assert result.broken == "all_end"
    else:
        result = explore(world, [must_break])
        assert result.broken == must_break.__name__
    print(f"{name}: {result}")


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_killed(name):
    """The mistake breaks its property."""
    must_break, world = MUTANTS[name]
    result = explore(world, [must_break])
    print(f"{name}: {result}")
    assert result.broken == must_break.__name__


def test_mutant_that_never_takes_over_is_killed():
    """Without take-over a dead lock is not acquired within its lease."""
    lease = 3
    for lock, holds in ((Lock(), True), (NeverTakesOver(), False)):
        world = World(Ours("a", lease=lease), Ours("b", lease=lease), lock=lock, ticks=4, crashes=1)
        assert (slowest_acquire(lock, explore(world, []), lease) <= lease) == holds


@pytest.mark.parametrize("until_done", [False, True])
def test_mutant_that_marks_for_ever_is_killed(until_done):
    """A mark without a lease blocks its key for ever once the call is lost."""
    world = World(*calls(until_done), lock=MarksForEver(), ticks=4, crashes=1)
    assert slowest_publish(world.lock, explore(world, []), 1_000, until_done=until_done) > 1_000
