"""The known flaws of the classic recipe, F0 to F12, on a real server; and our lock in the same schedules.

Each client of the recipe takes its steps when the test says so, and reads the clock that the test gives
it. The server's clock is the test's too, so no test sleeps. Dead locks hold second 9; tests begin at 10.
"""

from collections.abc import Callable
from typing import Any

import pytest
import redis

from celery_setnx.exceptions import LockLost, LockUnavailable
from celery_setnx.lock import Outcome, SetnxLock
from examples.embedded import EmbeddedServer
from tests.model.injected import CLOCK_KEY, EPOCH, SECOND, ServerClock

CLASSIC, OURS = "lock.classic", "lock.ours"
ZERO = EPOCH // SECOND


class Recipe:
    """A client of the recipe: `SETNX lock <now + timeout + 1>`, GET, GETSET, each a step of its own."""

    def __init__(self, client: redis.Redis, *, timeout: int, name: str = CLASSIC) -> None:
        self.client = client
        self.timeout = timeout
        self.name = name
        self.now = 10.0

    def reads_clock(self, now: float) -> None:
        """Read the time: everything until the verdict goes by it."""
        self.now = now

    @property
    def value(self) -> int:
        """What it writes."""
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

    def delete(self) -> None:
        """Release."""
        self.client.delete(self.name)


class Scene:
    """A server at second 10, with a lock of the recipe and a lock of ours."""

    def __init__(self, client: redis.Redis, clock: ServerClock) -> None:
        self.client = client
        self.clock = clock

    def at(self, second: float) -> None:
        """Let the server's time, and every process's, be a second."""
        self.clock.set(second)

    def dead_locks(self) -> None:
        """Both locks were left behind by clients that died: second 9."""
        self.client.mset({CLASSIC: ZERO + 9, OURS: ZERO + 9})

    def recipe(self, *, timeout: int = 3, name: str = CLASSIC) -> Recipe:
        """A client of the recipe."""
        return Recipe(self.client, timeout=timeout, name=name)

    def ours(self, *, lease: float = 4, off_by: float = 0, client: Any = None) -> SetnxLock:
        """A client of ours, whose process may have a clock of its own."""

        def monotonic() -> float:
            return self.clock.now / SECOND + off_by

        return SetnxLock(client or self.client, OURS, lease=lease, clock=monotonic, info={"pid": 7})

    def second(self, name: str) -> int | None:
        """A lock's value, in seconds of the test's own count."""
        value = self.client.get(name)
        return None if value is None else int(value) - ZERO


class Interfered:
    """A client of Redis to which something happens between the server's answer and its arrival."""

    def __init__(self, client: redis.Redis, meanwhile: Callable[[], object]) -> None:
        self.client = client
        self.meanwhile = meanwhile

    def execute_command(self, *command: Any) -> Any:
        """The script's answer, late."""
        reply = self.client.execute_command(*command)
        self.meanwhile()
        return reply


class LosesReplies(Interfered):
    """A client whose every first reply is lost, so that redis-py sends the command again."""

    def __init__(self, client: redis.Redis) -> None:
        super().__init__(client, lambda: None)

    def execute_command(self, *command: Any) -> Any:
        """The second answer."""
        super().execute_command(*command)
        return super().execute_command(*command)


@pytest.fixture
def scene(locks, foreign_keys, monkeypatch) -> Scene:
    """Second 10; the recipe's keys have no TTL."""
    foreign_keys |= {CLOCK_KEY, CLASSIC}
    return Scene(locks, ServerClock(locks, monkeypatch))


def held(outcome: Outcome) -> bool:
    """Whether another was in the way, and nothing else."""
    return not outcome.acquired and outcome.holder is not None


def test_f0_take_over_by_del_and_setnx_has_two_winners(scene):
    """Two clients that DEL a dead lock and SETNX it both win; of ours only one takes over."""
    scene.dead_locks()
    first, second = scene.recipe(), scene.recipe()
    assert first.finds_expired()
    assert second.finds_expired()
    first.delete()
    assert first.setnx()
    second.delete()
    assert second.setnx()

    assert scene.ours().acquire().acquired
    assert held(scene.ours().acquire())


def test_f1a_loser_extends_the_winners_lease(scene):
    """A late loser's GETSET moves the winner's deadline; a conflict with ours changes nothing."""
    scene.dead_locks()
    winner, loser = scene.recipe(), scene.recipe()
    assert winner.finds_expired()
    loser.reads_clock(11)
    assert loser.finds_expired()
    assert winner.getset()
    assert not loser.getset()
    assert (winner.value - ZERO, scene.second(CLASSIC)) == (14, 15)

    assert scene.ours().acquire().acquired
    scene.at(11)
    assert held(scene.ours().acquire())
    assert scene.second(OURS) == 14


def test_f1b_loser_with_a_shorter_timeout_shortens_the_winners_lease(scene):
    """With unequal timeouts a loser needs no pause to end a lease early; a rival of ours leaves it alone."""
    scene.dead_locks()
    winner, loser = scene.recipe(timeout=3), scene.recipe(timeout=2)
    assert winner.finds_expired()
    assert loser.finds_expired()
    assert winner.getset()
    assert not loser.getset()
    assert (winner.value - ZERO, scene.second(CLASSIC)) == (14, 13)

    assert scene.ours(lease=4).acquire().acquired
    assert held(scene.ours(lease=3).acquire())
    assert scene.second(OURS) == 14


def test_f1c_loser_with_a_stale_clock_shortens_the_winners_lease(scene):
    """With equal timeouts a loser that paused ends a lease early; a late rival of ours leaves it alone."""
    scene.dead_locks()
    loser, winner = scene.recipe(), scene.recipe()
    assert loser.finds_expired()
    winner.reads_clock(11)
    assert winner.finds_expired()
    assert winner.getset()
    assert not loser.getset()
    assert (winner.value - ZERO, scene.second(CLASSIC)) == (15, 14)

    scene.at(11)
    assert scene.ours().acquire().acquired
    assert held(scene.ours().acquire())
    assert scene.second(OURS) == 15


def test_f1d_release_of_only_the_own_value_loses_the_release(scene):
    """After a loser's GETSET a holder that compares values cannot release; ours can, and says `repaired`."""
    scene.dead_locks()
    winner, loser = scene.recipe(), scene.recipe()
    loser.reads_clock(11)
    assert winner.finds_expired()
    assert loser.finds_expired()
    assert winner.getset()
    assert not loser.getset()
    assert scene.client.get(CLASSIC) != str(winner.value), "so it does not delete it, and nobody will"

    loser = scene.recipe(name=OURS)
    assert loser.finds_expired()
    holder = scene.ours().acquire().lock
    loser.reads_clock(11)
    assert not loser.getset()
    assert holder is not None
    assert holder.release() == "repaired"
    assert scene.second(OURS) is None


def test_f2a_loser_breaks_mutual_exclusion(scene):
    """A paused loser lets a third client into a valid lease; past a loser of the recipe ours holds."""
    scene.dead_locks()
    paused, winner, third = (scene.recipe(timeout=1) for _ in range(3))
    assert paused.finds_expired()
    winner.reads_clock(12)
    assert winner.finds_expired()
    assert winner.getset()
    assert not paused.getset()
    third.reads_clock(13)
    assert third.finds_expired()
    assert third.getset()
    assert winner.value - ZERO == 14, "and the third is inside at 13"

    paused = scene.recipe(timeout=1, name=OURS)
    assert paused.finds_expired()
    scene.at(12)
    holder = scene.ours(lease=2).acquire().lock
    assert not paused.getset()
    scene.at(13.99)
    assert held(scene.ours(lease=2).acquire())
    assert holder is not None
    assert holder.release() == "repaired"


def test_f2b_loser_breaks_mutual_exclusion_by_the_documents_comparison(scene):
    """With the documentation's `<=` it takes one step less; ours holds to its exact deadline."""
    scene.dead_locks()
    paused, winner = scene.recipe(timeout=1), scene.recipe(timeout=1)
    assert paused.finds_expired()
    winner.reads_clock(12)
    assert winner.finds_expired()
    assert winner.getset()
    assert not paused.getset()
    assert scene.second(CLASSIC) == 12, "which the documentation calls expired at 12, two seconds early"

    scene.at(12)
    assert scene.ours(lease=2).acquire().acquired
    scene.client.set(OURS, ZERO + 12, keepttl=True)
    scene.at(13.999999)
    assert held(scene.ours(lease=2).acquire())


def test_f2c_unequal_timeouts_break_mutual_exclusion_without_a_pause(scene):
    """A prompt loser with a shorter timeout takes three seconds of six; among ours the record decides."""
    scene.dead_locks()
    winner, loser, third = scene.recipe(timeout=5), scene.recipe(timeout=1), scene.recipe(timeout=1)
    assert winner.finds_expired()
    assert loser.finds_expired()
    assert winner.getset()
    assert not loser.getset()
    third.reads_clock(13)
    assert third.finds_expired()
    assert third.getset()
    assert winner.value - ZERO == 16, "and the third is inside at 13"

    loser = scene.recipe(timeout=1, name=OURS)
    assert loser.finds_expired()
    holder = scene.ours(lease=6).acquire().lock
    assert not loser.getset()
    scene.at(13)
    assert held(scene.ours(lease=2).acquire())
    holder.renew()
    assert scene.second(OURS) == 19, "repaired, with the TTL that the loser's GETSET had removed"


def test_f2d_reading_the_clock_again_before_getset_does_not_help(scene):
    """The pause moves behind the second reading; ours reads the clock in the same step as it writes."""
    scene.dead_locks()
    paused, winner, third = (scene.recipe(timeout=1) for _ in range(3))
    assert paused.finds_expired()
    paused.reads_clock(10)
    winner.reads_clock(12)
    assert winner.finds_expired()
    assert winner.getset()
    assert not paused.getset()
    third.reads_clock(13)
    assert third.finds_expired()
    assert third.getset()

    scene.at(12)
    assert scene.ours(lease=2).acquire().acquired
    assert held(scene.ours(lease=2).acquire())
    scene.at(13)
    assert held(scene.ours(lease=2).acquire())


def test_f3a_lock_vanishes_between_setnx_and_get(scene):
    """The recipe dies of int(None) when the holder releases in between; ours sees held, then free."""
    holder, rival = scene.recipe(), scene.recipe()
    assert holder.setnx()
    assert not rival.setnx()
    holder.delete()
    with pytest.raises(TypeError):
        rival.finds_expired()

    ours = scene.ours()
    assert ours.acquire().acquired
    assert held(scene.ours().acquire())
    assert ours.release() == "released"
    assert scene.ours().acquire().acquired


def test_f3b_getset_on_a_vanished_lock_leaves_an_orphan(scene):
    """The recipe dies of int(None) once it has written a lock that nobody holds; ours leaves none."""
    scene.dead_locks()
    winner, loser = scene.recipe(timeout=1), scene.recipe(timeout=1)
    assert winner.finds_expired()
    assert loser.finds_expired()
    assert winner.getset()
    winner.delete()
    with pytest.raises(TypeError):
        loser.getset()
    assert scene.second(CLASSIC) == 12

    assert scene.ours().acquire().lock.release() == "released"
    later = scene.ours().acquire().lock
    assert later.release() == "released"
    assert scene.second(OURS) is None


def test_f3c_reading_no_value_as_lost_leaves_an_orphan(scene):
    """A client that reads nil as "not expired" locks everybody out; of ours the next one in line acquires."""
    scene.dead_locks()
    winner, loser, third = (scene.recipe(timeout=1) for _ in range(3))
    assert winner.finds_expired()
    assert loser.finds_expired()
    assert winner.getset()
    winner.delete()
    assert scene.client.getset(CLASSIC, loser.value) is None, "and it starts over"
    third.reads_clock(12)
    assert not third.setnx()
    assert not third.finds_expired()

    scene.ours().acquire().lock.release()
    scene.at(12)
    assert scene.ours().acquire().acquired


def test_f3d_reading_no_value_as_won_leaves_no_orphan(scene):
    """Nil says that the lock was free: the client that reads it so is the holder, as the next of ours is."""
    scene.dead_locks()
    winner, loser = scene.recipe(timeout=1), scene.recipe(timeout=1)
    assert winner.finds_expired()
    assert loser.finds_expired()
    assert winner.getset()
    winner.delete()
    assert scene.client.getset(CLASSIC, loser.value) is None, "and it is the holder"
    loser.delete()
    assert scene.recipe().setnx()

    scene.ours().acquire().lock.release()
    assert scene.ours().acquire().acquired


def test_f4a_late_release_deletes_anothers_lock(scene):
    """A plain DEL after the lease deletes the new holder's lock; ours answers `lost` and changes nothing."""
    late, taker = scene.recipe(timeout=1), scene.recipe(timeout=1)
    assert late.setnx()
    taker.reads_clock(13)
    assert taker.finds_expired()
    assert taker.getset()
    late.delete()
    assert scene.second(CLASSIC) is None

    late_lock = scene.ours(lease=2).acquire().lock
    scene.at(13)
    new_lock = scene.ours(lease=2).acquire().lock
    assert late_lock.release() == "lost"
    assert scene.second(OURS) == 15
    new_lock.renew()


def test_f4b_checking_the_time_before_del_is_not_atomic(scene):
    """A pause between check and DEL deletes the new holder's lock; ours compares and deletes in one step."""
    late, taker = scene.recipe(timeout=1), scene.recipe(timeout=1)
    assert late.setnx()
    assert ZERO + late.now < late.value, "so it may delete it, and then it pauses"
    taker.reads_clock(13)
    assert taker.finds_expired()
    assert taker.getset()
    late.delete()
    assert scene.second(CLASSIC) is None

    late_lock = scene.ours(lease=2).acquire().lock
    late_lock.ensure()
    scene.at(13)
    new_lock = scene.ours(lease=2).acquire().lock
    assert late_lock.release() == "lost"
    new_lock.renew()


def test_f4c_comparing_the_value_before_del_is_not_atomic(scene):
    """A pause between GET and DEL deletes the new holder's lock; ours compares and deletes in one step."""
    late, taker = scene.recipe(timeout=1), scene.recipe(timeout=1)
    assert late.setnx()
    assert scene.client.get(CLASSIC) == str(late.value), "so it may delete it, and then it pauses"
    taker.reads_clock(13)
    assert taker.finds_expired()
    assert taker.getset()
    late.delete()
    assert scene.second(CLASSIC) is None

    late_lock = scene.ours(lease=2).acquire().lock
    assert scene.second(OURS) == 12
    scene.at(13)
    new_lock = scene.ours(lease=2).acquire().lock
    assert late_lock.release() == "lost"
    new_lock.renew()


def test_f4d_late_release_lets_a_third_client_in(scene):
    """After another's DEL a third client holds a second valid lease; with ours it is turned away."""
    late, taker, third = (scene.recipe(timeout=1) for _ in range(3))
    assert late.setnx()
    taker.reads_clock(13)
    assert taker.finds_expired()
    assert taker.getset()
    late.delete()
    third.reads_clock(13)
    assert third.setnx()

    late_lock = scene.ours(lease=2).acquire().lock
    scene.at(13)
    assert scene.ours(lease=2).acquire().acquired
    late_lock.release()
    assert held(scene.ours(lease=2).acquire())


def test_f5_holder_paused_past_its_lease_overlaps(scene):
    """No lock stops a frozen holder: ours tells it on waking, and gives its successor a larger fence."""
    frozen, taker = scene.recipe(timeout=1), scene.recipe(timeout=1)
    assert frozen.setnx()
    taker.reads_clock(13)
    assert taker.finds_expired()
    assert taker.getset(), "while the frozen one is still inside, and knows nothing"

    frozen_lock = scene.ours(lease=2).acquire().lock
    scene.at(13)
    successor = scene.ours(lease=2).acquire().lock
    assert successor.fence > frozen_lock.fence
    with pytest.raises(LockLost):
        frozen_lock.ensure()


def test_f6a_client_with_a_fast_clock_steals_a_live_lock(scene):
    """A clock five seconds ahead robs a live holder; no client's clock decides anything of ours."""
    holder, thief = scene.recipe(), scene.recipe()
    assert holder.setnx()
    thief.reads_clock(15)
    assert thief.finds_expired()
    assert thief.getset()

    assert scene.ours().acquire().acquired
    assert held(scene.ours(off_by=5).acquire())


def test_f6b_client_with_a_slow_clock_is_robbed_at_once(scene):
    """A clock five seconds behind writes a lease that is over; ours writes the server's time."""
    slow, taker = scene.recipe(), scene.recipe()
    slow.reads_clock(5)
    assert slow.setnx()
    assert taker.finds_expired()
    assert taker.getset()

    assert scene.ours(off_by=-5).acquire().acquired
    assert held(scene.ours().acquire())


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
    assert scene.recipe().setnx()
    poller = scene.recipe()
    assert scene.ours().acquire().acquired
    for half_second in range(200):
        poller.reads_clock(10 + half_second / 2)
        assert not poller.getset()
        scene.at(10 + half_second / 2)
        outcome = scene.ours().acquire()
        if outcome.acquired:
            assert half_second == 8, "the lease was 4 s"
            outcome.lock.release()
            scene.ours(lease=100).acquire()


def test_f9_lease_in_whole_seconds_without_one_more_is_too_short(scene):
    """int(11.9) + 1 is 12: a lease of a tenth of a second; ours lasts to the microsecond."""
    scene.client.setnx(CLASSIC, int(ZERO + 11.9) + 1)
    assert float(scene.client.get(CLASSIC)) < ZERO + 12.05

    scene.at(11.9)
    assert scene.ours(lease=1).acquire().acquired
    for second in (12.05, 12.899999):
        scene.at(second)
        assert held(scene.ours(lease=1).acquire())
    scene.at(12.9)
    assert scene.ours(lease=1).acquire().taken_over_from is not None


def test_f9_deadline_in_whole_milliseconds_is_too_short(scene):
    """A deadline rounded down to the millisecond ends early; ours is kept in microseconds."""
    now, lease = 10.000999, 0.15
    scene.client.set(CLASSIC, f"{int(now * 1000) + int(lease * 1000)}", px=60_000)
    assert int(scene.client.get(CLASSIC)) / 1000 < 10.150998 < now + lease

    scene.at(now)
    assert scene.ours(lease=lease).acquire().acquired
    scene.at(10.150998)
    assert held(scene.ours(lease=lease).acquire())
    scene.at(10.150999)
    assert scene.ours(lease=lease).acquire().acquired


def test_f10_lease_that_ended_before_the_reply_is_not_entered(scene):
    """The recipe enters on a lease that is over; ours looks at its clock, gives the lock back and says so."""
    late, taker = scene.recipe(timeout=1), scene.recipe(timeout=1)
    late.reads_clock(10)
    taker.reads_clock(13)
    assert late.setnx()
    assert taker.finds_expired()
    assert taker.getset(), "and both enter at 13"

    interfered = Interfered(scene.client, lambda: scene.at(13))
    with pytest.raises(LockUnavailable):
        scene.ours(lease=2, client=interfered).acquire()
    assert scene.second(OURS) is None
    assert scene.ours(lease=2).acquire().acquired


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

    outcome = scene.ours(client=LosesReplies(scene.client)).acquire()
    assert outcome.acquired
    assert outcome.lock.release() == "released"


def test_f11b_winner_of_a_resent_getset_thinks_it_lost(scene):
    """After a lost reply GETSET answers the winner's own value; ours knows its token again."""
    scene.dead_locks()
    winner = scene.recipe()
    assert winner.finds_expired()
    winner.getset()
    assert not winner.getset()

    outcome = scene.ours(client=LosesReplies(scene.client)).acquire()
    assert outcome.acquired
    assert outcome.lock.release() == "released"


def test_f11c_resent_release_deletes_a_lock_of_the_same_second(scene):
    """A timestamp is no identity: even an atomic compare-and-delete hits another's; our token does not."""
    delete_own = "return redis.call('GET', KEYS[1]) == ARGV[1] and redis.call('DEL', KEYS[1]) or 0"
    first, second = scene.recipe(), scene.recipe()
    assert first.setnx()
    scene.client.eval(delete_own, 1, CLASSIC, first.value)
    assert second.setnx()
    assert scene.client.eval(delete_own, 1, CLASSIC, first.value) == 1, "sent again after a lost reply"

    first_lock = scene.ours().acquire().lock
    assert first_lock.release() == "released"
    second_lock = scene.ours().acquire().lock
    assert scene.second(OURS) == 14, "as it was for the first"
    assert first_lock.release() == "lost"
    second_lock.renew()


def test_f12_value_does_not_say_who_holds_the_lock(scene):
    """Two holders of the recipe write the same; our take-over names the dead one, and its fence is larger."""
    assert scene.recipe().value == scene.recipe().value

    dead = scene.ours(lease=2).acquire().lock
    scene.at(12)
    outcome = scene.ours(lease=2).acquire()
    assert outcome.taken_over_from is not None
    assert outcome.taken_over_from.token == dead.token
    assert outcome.taken_over_from.info == {"pid": 7}
    assert outcome.lock.fence > dead.fence
