"""The known flaws of the classic recipe, F0 to F12, on a real server; and our lock in the same schedules.

Each client of the recipe takes its steps when the test says so, and reads the clock that the test gives
it. The server's clock is the test's too, so no test sleeps. Dead locks hold second 9; tests begin at 10.
"""

from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_setnx.exceptions import LockLost, LockUnavailable
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.outcome import Outcome
from examples.embedded import EmbeddedServer
from tests.model.injected import EPOCH, SECOND, ServerClock

CLASSIC, OURS = "lock.classic", "lock.ours"
ZERO = EPOCH // SECOND


class Recipe:
    """A client of the recipe: `SETNX lock <now + timeout + 1>`, GET, GETSET, each a step of its own."""

    def __init__(
        self, client: redis.Redis, *, timeout: int = 3, name: str = CLASSIC, now: float = 10
    ) -> None:
        self.client, self.timeout, self.name, self.now = client, timeout, name, now

    @property
    def value(self) -> int:
        """What it writes: everything until the verdict goes by the time that it has read."""
        return ZERO + int(self.now) + self.timeout + 1

    def setnx(self) -> bool:
        """Take the lock if it is free."""
        return bool(self.client.setnx(self.name, self.value))

    def finds_expired(self) -> bool:
        """GET: is the lock past its time?"""
        return int(self.client.get(self.name)) < ZERO + self.now

    def getset(self) -> bool:
        """GETSET: was the lock still past its time?"""
        return int(self.client.getset(self.name, self.value)) < ZERO + self.now

    def loses_to(self, winner: "Recipe") -> bool:
        """Another GETSETs first: does that one come to hold the lock, and it itself not?"""
        return winner.getset() and not self.getset()

    def takes_over(self) -> bool:
        """GET and GETSET: does it come to hold the lock?"""
        return self.finds_expired() and self.getset()

    def delete(self) -> None:
        """Release."""
        self.client.delete(self.name)


class Scene:
    """A server at second 10, with a lock of the recipe and a lock of ours."""

    def __init__(self, client: redis.Redis, clock: ServerClock) -> None:
        self.client, self.clock = client, clock

    def at(self, second: float) -> None:
        """Let the server's time, and every process's, be a second."""
        self.clock.set(second)

    def recipe(self, **options: Any) -> Recipe:
        """A client of the recipe, which has read the clock."""
        return Recipe(self.client, **options)

    def late(self, **options: Any) -> Recipe:
        """A client of the recipe that has found the dead lock expired: GETSET is its next step."""
        client = self.recipe(**options)
        assert client.finds_expired()
        return client

    def inside(self, *, timeout: int = 1, **options: Any) -> Recipe:
        """A client of the recipe that has the lock."""
        client = self.recipe(timeout=timeout, **options)
        assert client.setnx()
        return client

    def ours(self, *, lease: float = 4, off_by: float = 0, client: Any = None) -> SetnxLock:
        """A client of ours, whose process may have a clock of its own."""

        def monotonic() -> float:
            return self.clock.now / SECOND + off_by

        return SetnxLock(client or self.client, OURS, lease=lease, clock=monotonic, info={"pid": 7})

    def acquired(self, **options: Any) -> HeldLock:
        """Our lock, which a client of ours acquires."""
        lock = self.ours(**options).acquire().lock
        assert lock is not None
        return lock

    def is_held(self, **options: Any) -> bool:
        """Whether our lock keeps a client of ours out, and nothing else does."""
        outcome = self.ours(**options).acquire()
        return not outcome.acquired and outcome.holder is not None

    def late_for_a_lock_that_vanishes(self) -> Recipe:
        """A client of the recipe whose GETSET comes when a winner has released the dead lock."""
        winner, loser = self.late(timeout=1), self.late(timeout=1)
        assert winner.getset()
        winner.delete()
        return loser

    def second(self, name: str) -> int | None:
        """A lock's value, in seconds of the test's own count."""
        value = self.client.get(name)
        return None if value is None else int(value) - ZERO

    def taken_over_and_deleted(self, late: Recipe) -> bool:
        """Whether a client that pauses past its time deletes the lock of the one who took it over."""
        assert self.recipe(timeout=1, now=13).takes_over()
        late.delete()
        return self.second(CLASSIC) is None

    def taken_over_and_kept(self, late: HeldLock) -> bool:
        """Whether the one who took our lock over keeps it, when the late holder releases it."""
        self.at(13)
        successor = self.acquired(lease=2)
        assert late.release() == "lost"
        assert self.second(OURS) == 15
        successor.renew()
        return self.is_held(lease=2)


class Interfered:
    """A client of Redis to which something happens between the server's answer and its arrival.

    If replies are lost, it sends the command again, as redis-py does.
    """

    def __init__(
        self, client: redis.Redis, meanwhile: Callable[[], object] = bool, *, loses_replies: bool = False
    ) -> None:
        self.client, self.meanwhile, self.loses_replies = client, meanwhile, loses_replies

    def execute_command(self, *command: Any) -> Any:
        """The script's answer, late; or the second one."""
        if self.loses_replies:
            self.client.execute_command(*command)
        reply = self.client.execute_command(*command)
        self.meanwhile()
        return reply


@pytest.fixture
def scene(locks, clock, foreign_keys) -> Scene:
    """Second 10; the recipe's keys have no TTL."""
    foreign_keys.add(CLASSIC)
    return Scene(locks, clock)


@pytest.fixture
def dead_locks(locks) -> None:
    """Both locks were left behind by clients that died: second 9."""
    locks.mset({CLASSIC: ZERO + 9, OURS: ZERO + 9})


def test_f0_take_over_by_del_and_setnx_has_two_winners(scene, dead_locks):
    """Two clients that DEL a dead lock and SETNX it both win; of ours only one takes over."""
    for client in (scene.late(), scene.late()):
        client.delete()
        assert client.setnx()

    scene.acquired()
    assert scene.is_held()


def test_f1a_loser_extends_the_winners_lease(scene, dead_locks):
    """A late loser's GETSET moves the winner's deadline; a conflict with ours changes nothing."""
    winner, loser = scene.late(), scene.late(now=11)
    assert loser.loses_to(winner)
    assert (winner.value - ZERO, scene.second(CLASSIC)) == (14, 15)

    scene.acquired()
    scene.at(11)
    assert scene.is_held()
    assert scene.second(OURS) == 14


def test_f1b_loser_with_a_shorter_timeout_shortens_the_winners_lease(scene, dead_locks):
    """With unequal timeouts a loser needs no pause to end a lease early; a rival of ours leaves it alone."""
    winner, loser = scene.late(timeout=3), scene.late(timeout=2)
    assert loser.loses_to(winner)
    assert (winner.value - ZERO, scene.second(CLASSIC)) == (14, 13)

    scene.acquired(lease=4)
    assert scene.is_held(lease=3)
    assert scene.second(OURS) == 14


def test_f1c_loser_with_a_stale_clock_shortens_the_winners_lease(scene, dead_locks):
    """With equal timeouts a loser that paused ends a lease early; a late rival of ours leaves it alone."""
    loser, winner = scene.late(), scene.late(now=11)
    assert loser.loses_to(winner)
    assert (winner.value - ZERO, scene.second(CLASSIC)) == (15, 14)

    scene.at(11)
    scene.acquired()
    assert scene.is_held()
    assert scene.second(OURS) == 15


def test_f1d_release_of_only_the_own_value_loses_the_release(scene, dead_locks):
    """After a loser's GETSET a holder that compares values cannot release; ours can, and says `repaired`."""
    winner, loser = scene.late(), scene.late(now=11)
    assert loser.loses_to(winner)
    assert scene.client.get(CLASSIC) != str(winner.value), "so it does not delete it, and nobody will"

    loser = scene.late(name=OURS, now=11)
    holder = scene.acquired()
    assert not loser.getset()
    assert holder.release() == "repaired"
    assert scene.second(OURS) is None


def test_f2a_loser_breaks_mutual_exclusion(scene, dead_locks):
    """A paused loser lets a third client into a valid lease; past a loser of the recipe ours holds."""
    paused, winner = scene.late(timeout=1), scene.late(timeout=1, now=12)
    assert paused.loses_to(winner)
    assert scene.recipe(timeout=1, now=13).takes_over()
    assert winner.value - ZERO == 14, "and the third is inside at 13"

    paused = scene.late(timeout=1, name=OURS)
    scene.at(12)
    holder = scene.acquired(lease=2)
    assert not paused.getset()
    scene.at(13.99)
    assert scene.is_held(lease=2)
    assert holder.release() == "repaired"


def test_f2b_loser_breaks_mutual_exclusion_by_the_documents_comparison(scene, dead_locks):
    """With the documentation's `<=` it takes one step less; ours holds to its exact deadline."""
    paused, winner = scene.late(timeout=1), scene.late(timeout=1, now=12)
    assert paused.loses_to(winner)
    assert scene.second(CLASSIC) == 12, "which the documentation calls expired at 12, two seconds early"

    scene.at(12)
    scene.acquired(lease=2)
    scene.client.set(OURS, ZERO + 12, keepttl=True)
    scene.at(13.999999)
    assert scene.is_held(lease=2)


def test_f2c_unequal_timeouts_break_mutual_exclusion_without_a_pause(scene, dead_locks):
    """A prompt loser with a shorter timeout takes three seconds of six; among ours the record decides."""
    winner, loser = scene.late(timeout=5), scene.late(timeout=1)
    assert loser.loses_to(winner)
    assert scene.recipe(timeout=1, now=13).takes_over()
    assert winner.value - ZERO == 16, "and the third is inside at 13"

    loser = scene.late(timeout=1, name=OURS)
    holder = scene.acquired(lease=6)
    assert not loser.getset()
    scene.at(13)
    assert scene.is_held(lease=2)
    holder.renew()
    assert scene.second(OURS) == 19, "repaired, with the TTL that the loser's GETSET had removed"


def test_f2d_reading_the_clock_again_before_getset_does_not_help(scene, dead_locks):
    """The pause moves behind the second reading; ours reads the clock in the same step as it writes."""
    paused = scene.late(timeout=1)
    paused.now = 10  # read again, before the pause
    assert scene.late(timeout=1, now=12).getset()
    assert not paused.getset()
    assert scene.recipe(timeout=1, now=13).takes_over()

    scene.at(12)
    scene.acquired(lease=2)
    assert scene.is_held(lease=2)
    scene.at(13)
    assert scene.is_held(lease=2)


def test_f3a_lock_vanishes_between_setnx_and_get(scene):
    """The recipe dies of int(None) when the holder releases in between; ours sees held, then free."""
    holder, rival = scene.inside(timeout=3), scene.recipe()
    assert not rival.setnx()
    holder.delete()
    with pytest.raises(TypeError):
        rival.finds_expired()

    ours = scene.acquired()
    assert scene.is_held()
    assert ours.release() == "released"
    scene.acquired()


def test_f3b_getset_on_a_vanished_lock_leaves_an_orphan(scene, dead_locks):
    """The recipe dies of int(None) once it has written a lock that nobody holds; ours leaves none."""
    loser = scene.late_for_a_lock_that_vanishes()
    with pytest.raises(TypeError):
        loser.getset()
    assert scene.second(CLASSIC) == 12

    for _ in range(2):
        assert scene.acquired().release() == "released"
    assert scene.second(OURS) is None


def test_f3c_reading_no_value_as_lost_leaves_an_orphan(scene, dead_locks):
    """A client that reads nil as "not expired" locks everybody out; of ours the next one in line acquires."""
    loser = scene.late_for_a_lock_that_vanishes()
    assert scene.client.getset(CLASSIC, loser.value) is None, "and it starts over"
    third = scene.recipe(timeout=1, now=12)
    assert not third.setnx()
    assert not third.finds_expired()

    scene.acquired().release()
    scene.at(12)
    scene.acquired()


def test_f3d_reading_no_value_as_won_leaves_no_orphan(scene, dead_locks):
    """Nil says that the lock was free: the client that reads it so is the holder, as the next of ours is."""
    loser = scene.late_for_a_lock_that_vanishes()
    assert scene.client.getset(CLASSIC, loser.value) is None, "and it is the holder"
    loser.delete()
    assert scene.recipe().setnx()

    scene.acquired().release()
    scene.acquired()


def test_f4a_late_release_deletes_anothers_lock(scene):
    """A plain DEL after the lease deletes the new holder's lock; ours answers `lost` and changes nothing."""
    assert scene.taken_over_and_deleted(scene.inside())
    assert scene.taken_over_and_kept(scene.acquired(lease=2))


def test_f4b_checking_the_time_before_del_is_not_atomic(scene):
    """A pause between check and DEL deletes the new holder's lock; ours compares and deletes in one step."""
    late = scene.inside()
    assert ZERO + late.now < late.value, "so it may delete it, and then it pauses"
    assert scene.taken_over_and_deleted(late)

    late_lock = scene.acquired(lease=2)
    late_lock.ensure()
    assert scene.taken_over_and_kept(late_lock)


def test_f4c_comparing_the_value_before_del_is_not_atomic(scene):
    """A pause between GET and DEL deletes the new holder's lock; ours compares and deletes in one step."""
    late = scene.inside()
    assert scene.client.get(CLASSIC) == str(late.value), "so it may delete it, and then it pauses"
    assert scene.taken_over_and_deleted(late)

    late_lock = scene.acquired(lease=2)
    assert scene.second(OURS) == 12
    assert scene.taken_over_and_kept(late_lock)


def test_f4d_late_release_lets_a_third_client_in(scene):
    """After another's DEL a third client holds a second valid lease; with ours it is turned away."""
    assert scene.taken_over_and_deleted(scene.inside())
    scene.inside(now=13)

    assert scene.taken_over_and_kept(scene.acquired(lease=2))
    assert scene.is_held(lease=2)


def test_f5_holder_paused_past_its_lease_overlaps(scene):
    """No lock stops a frozen holder: ours tells it on waking, and gives its successor a larger fence."""
    scene.inside()
    assert scene.recipe(timeout=1, now=13).takes_over(), "while the frozen one is inside, and knows nothing"

    frozen_lock = scene.acquired(lease=2)
    scene.at(13)
    assert scene.acquired(lease=2).fence > frozen_lock.fence
    with pytest.raises(LockLost):
        frozen_lock.ensure()


def test_f6a_client_with_a_fast_clock_steals_a_live_lock(scene):
    """A clock five seconds ahead robs a live holder; no client's clock decides anything of ours."""
    scene.inside(timeout=3)
    assert scene.recipe(now=15).takes_over()

    scene.acquired()
    assert scene.is_held(off_by=5)


def test_f6b_client_with_a_slow_clock_is_robbed_at_once(scene):
    """A clock five seconds behind writes a lease that is over; ours writes the server's time."""
    scene.inside(timeout=3, now=5)
    assert scene.recipe().takes_over()

    scene.acquired(off_by=-5)
    assert scene.is_held()


def test_f7a_server_that_loses_its_data_has_two_holders():
    """No lock on one server survives that: ours has a larger fence next, and tells the old holder."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url(), decode_responses=True) as client:
        assert client.setnx(CLASSIC, ZERO)
        before = SetnxLock(client, OURS).acquire().lock
        server.restart()
        assert client.setnx(CLASSIC, ZERO)
        after = SetnxLock(client, OURS).acquire().lock
        assert after.fence > before.fence
        with pytest.raises(LockLost):
            before.renew()


def test_f8_getset_on_every_poll_extends_a_dead_lock_for_ever(scene):
    """Without the GET before it, GETSET keeps a dead lock from ever ending; polling ours changes nothing."""
    poller = scene.inside(timeout=3)
    scene.acquired()
    for half_second in range(200):
        poller.now = 10 + half_second / 2
        assert not poller.getset()
        scene.at(poller.now)
        outcome = scene.ours().acquire()
        if outcome.acquired:
            assert half_second == 8, "the lease was 4 s"
            outcome.lock.release()
            scene.acquired(lease=100)


def test_f9_lease_in_whole_seconds_without_one_more_is_too_short(scene):
    """int(11.9) + 1 is 12: a lease of a tenth of a second; ours lasts to the microsecond."""
    scene.client.setnx(CLASSIC, int(ZERO + 11.9) + 1)
    assert float(scene.client.get(CLASSIC)) < ZERO + 12.05

    scene.at(11.9)
    scene.acquired(lease=1)
    for second in (12.05, 12.899999):
        scene.at(second)
        assert scene.is_held(lease=1)
    scene.at(12.9)
    assert scene.ours(lease=1).acquire().taken_over_from is not None


def test_f9_deadline_in_whole_milliseconds_is_too_short(scene):
    """A deadline rounded down to the millisecond ends early; ours is kept in microseconds."""
    now, lease = 10.000999, 0.15
    scene.client.set(CLASSIC, f"{int(now * 1000) + int(lease * 1000)}", px=60_000)
    assert int(scene.client.get(CLASSIC)) / 1000 < 10.150998 < now + lease

    scene.at(now)
    scene.acquired(lease=lease)
    scene.at(10.150998)
    assert scene.is_held(lease=lease)
    scene.at(10.150999)
    scene.acquired(lease=lease)


def test_f10_lease_that_ended_before_the_reply_is_not_entered(scene):
    """The recipe enters on a lease that is over; ours looks at its clock, gives the lock back and says so."""
    scene.inside(now=10)
    assert scene.recipe(timeout=1, now=13).takes_over(), "and both enter at 13"

    interfered = Interfered(scene.client, lambda: scene.at(13))
    with pytest.raises(LockUnavailable):
        scene.ours(lease=2, client=interfered).acquire()
    assert scene.second(OURS) is None
    scene.acquired(lease=2)


def test_f10_lease_that_was_taken_over_before_the_reply_is_not_entered(scene):
    """When another has the lock by the time of the reply, giving it back touches nothing of the other's."""
    outcomes: list[Outcome] = []

    def another_takes_over() -> None:
        scene.at(13)
        if not outcomes:
            outcomes.append(scene.ours(lease=2).acquire())

    with pytest.raises(LockUnavailable):
        scene.ours(lease=2, client=Interfered(scene.client, another_takes_over)).acquire()
    assert outcomes[0].taken_over_from is not None
    outcomes[0].lock.renew()


def test_f11a_winner_of_a_resent_setnx_thinks_it_lost(scene):
    """After a lost reply SETNX answers 0 to the winner; ours knows its token again."""
    winner = scene.recipe()
    winner.setnx()
    assert not winner.setnx()
    assert not winner.finds_expired()

    assert scene.acquired(client=Interfered(scene.client, loses_replies=True)).release() == "released"


def test_f11b_winner_of_a_resent_getset_thinks_it_lost(scene, dead_locks):
    """After a lost reply GETSET answers the winner's own value; ours knows its token again."""
    winner = scene.late()
    assert winner.getset()
    assert not winner.getset()

    assert scene.acquired(client=Interfered(scene.client, loses_replies=True)).release() == "released"


def test_f11c_resent_release_deletes_a_lock_of_the_same_second(scene):
    """A timestamp is no identity: even an atomic compare-and-delete hits another's; our token does not."""
    delete_own = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0"
    first = scene.inside(timeout=3)
    scene.client.eval(delete_own, 1, CLASSIC, first.value)
    scene.inside(timeout=3)
    assert scene.client.eval(delete_own, 1, CLASSIC, first.value) == 1, "sent again after a lost reply"

    first_lock = scene.acquired()
    assert first_lock.release() == "released"
    second_lock = scene.acquired()
    assert scene.second(OURS) == 14, "as it was for the first"
    assert first_lock.release() == "lost"
    second_lock.renew()


def test_f12_value_does_not_say_who_holds_the_lock(scene):
    """Two holders of the recipe write the same; our take-over names the dead one, and its fence is larger."""
    assert scene.recipe().value == scene.recipe().value

    dead = scene.acquired(lease=2)
    scene.at(12)
    outcome = scene.ours(lease=2).acquire()
    assert outcome.taken_over_from is not None
    assert outcome.taken_over_from.token == dead.token
    assert outcome.taken_over_from.info == {"pid": 7}
    assert outcome.lock.fence > dead.fence
