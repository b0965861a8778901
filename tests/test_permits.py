"""Several permits of one lock, on a real server: who has which, for how long, and what is left in Redis."""

import threading
from collections.abc import Callable
from typing import Any, NoReturn

import pytest
import redis

from celery_setnx import AlreadyRunning, LockLost, LockRefused, LockUnavailable, SetnxLock
from celery_setnx.lock import lock as lock_module
from celery_setnx.lock.line import Found, Place, leave, park
from celery_setnx.lock.lock import Outcome
from celery_setnx.lock.names import line_names, permit_names, permits_name
from celery_setnx.lock.record import ORIGINAL, Terms, task_token
from examples.embedded import EmbeddedServer
from tests.harness import lock_keys
from tests.model.injected import CLOCK_KEY, EPOCH, ServerClock

NAME = "t:{permits}"
LINE, CALLS = line_names(NAME)
PERMITS = permits_name(NAME)
LEASE = 600.0
SLACK_MS = 1_000
"""In which two TTLs are asked for, one after the other."""

ZERO = EPOCH // 1_000_000
AT = {second: str(ZERO + second) for second in range(100)}
"""Seconds of the injected clock, as Unix seconds."""


def the_lock(client: redis.Redis, limit: int = 3, **options: Any) -> SetnxLock:
    """The lock, in hands of its own."""
    return SetnxLock(client, NAME, limit=limit, **{"lease": LEASE, "line": True, **options})


def held_by(client: redis.Redis, *tokens: str, limit: int = 3, **options: Any) -> list[SetnxLock]:
    """Some acquire the lock, one after the other, each with a token of its own."""
    locks = [the_lock(client, limit, **options) for _ in tokens]
    for lock, token in zip(locks, tokens):
        assert lock.acquire(token=token).acquired
    return locks


def of_task(
    client: redis.Redis, task_id: str, limit: int = 3, *, retries: int = 0, **details: Any
) -> Outcome:
    """A task's attempt to acquire the lock."""
    return the_lock(client, limit).acquire(token=task_token(task_id, retries, "0a"), **details)


def wait(client: redis.Redis, task_id: str, since: float, limit: int = 3) -> Found:
    """A task enters the line."""
    place = Place(NAME, task_id, 0, 6000.0, terms=Terms(limit))
    return park(client, place, copy=ORIGINAL, since=since, call=f"wake {task_id}")


def lapse(client: redis.Redis, *permits: int) -> None:
    """The leases of some permits have ended a moment ago."""
    for permit in permits:
        name, record = permit_names(NAME, permit)
        token, _, *rest = str(client.get(record)).split("\n", 2)
        deadline = client.time()[0] * 1_000_000 - 1_000_000
        client.set(record, "\n".join((token, str(deadline), *rest)), keepttl=True)
        client.set(name, -(-deadline // 1_000_000), keepttl=True)


def tokens(client: redis.Redis) -> dict[int, str]:
    """Who holds which permit."""
    return {holder.permit: holder.token for holder in the_lock(client).holders()}


def states(client: redis.Redis) -> dict[int, str]:
    """Which permit is in which state."""
    return {holder.permit: holder.state for holder in the_lock(client).holders()}


# What a lock of several permits is


@pytest.mark.parametrize("limit", [0, -1, 101, True, 2.0, "3", None])
def test_limit_out_of_range_is_refused(locks, limit):
    """A whole number from 1 to 100, and nothing else."""
    with pytest.raises(ValueError, match="must be a whole number from 1 to 100"):
        the_lock(locks, limit)


def test_so_many_hold_it_and_the_next_is_refused(locks):
    """Each has a permit, the lowest first; the refusal names who holds one for longest, and the first end."""
    longest, _ = held_by(locks, "one", "two")
    last = the_lock(locks, lease=300)
    assert last.acquire(token="three").lock.permit == 2
    outcome = the_lock(locks).acquire()
    assert (outcome.acquired, outcome.holder.token, outcome.ends_first.token) == (False, "one", "three")
    assert 290 < outcome.remaining_s <= 300
    assert tokens(locks) == {0: "one", 1: "two", 2: "three"}
    assert longest.holder().token == "one"
    with pytest.raises(AlreadyRunning, match="token one"), the_lock(locks):
        pass
    assert last.release() == "released"
    assert longest.holder() is None  # as one may be had
    assert tokens(locks) == {0: "one", 1: "two"}


@pytest.mark.parametrize("limit", [3, 100])
def test_refused_caller_is_told_of_two_holders_whatever_the_limit(locks, limit):
    """Of the one that ends first, and of the one that has held for longest: the reply is short."""
    held_by(locks, *(f"holder{number:03}" for number in range(limit)), limit=limit)
    reply = lock_module._acquire(the_lock(locks, limit), "another", "", "", ())
    assert sum(str(item).count("holder") for item in reply) == 2
    assert len(repr(reply)) < 500


def test_keys_of_permits_are_beside_the_lock(locks):
    """The first is the lock itself, in the format of a lock with one permit; all are in its slot."""
    held_by(locks, "one", "two")
    assert lock_keys(locks) == {NAME, f"{NAME}:holder", f"{NAME}#1", f"{NAME}#1:holder", f"{NAME}:permits"}
    assert locks.get(f"{NAME}:permits") == "3 3"
    for permit, token in enumerate(("one", "two")):
        name, record = permit_names(NAME, permit)
        fields = str(locks.get(record)).split("\n")
        assert (fields[0], fields[3], fields[5]) == (token, "running", "{}")
        assert int(str(locks.get(name))) == -(-int(fields[1]) // 1_000_000)


def test_keys_of_a_name_without_a_tag_are_in_its_slot(locks):
    """A tag is put around it, as around the record's."""
    for _ in range(2):
        assert SetnxLock(locks, "lock.foo", limit=2).acquire().acquired
    others = {"{lock.foo}#1", "{lock.foo}#1:holder", "{lock.foo}:permits"}
    assert lock_keys(locks) == {"lock.foo", "{lock.foo}:holder", *others}


def test_one_permit_leaves_no_key_of_several(locks):
    """With the default limit the keys are those of a lock that knows of no permits."""
    lock = SetnxLock(locks, NAME, line=True, lease=LEASE)
    held = lock.acquire().lock
    held.renew()
    wait(locks, "a", 10.0, limit=1)
    held.release()
    assert lock.heirs[-1].task_id == "a"
    assert of_task(locks, "a", 1, copy="a1").acquired
    assert not [key for key in lock_keys(locks) if "#" in key or key.endswith(":permits")]


def test_released_permit_is_the_next_ones(locks):
    """The lowest that is free; the others stay whose they are. A release is answered alike twice."""
    _, two, three = held_by(locks, "one", "two", "three")
    assert [three.release(), two.release(), two.release()] == ["released"] * 3
    assert of_task(locks, "a").lock.permit == 1
    assert tokens(locks) == {0: "one", 1: "a|0|0a"}


def test_fences_grow_for_each_permit(locks):
    """Each holder of a permit has a larger fence than the one before, also past a death."""
    held_by(locks, "one", "two")
    first = of_task(locks, "a").lock
    first.release()
    second = of_task(locks, "b").lock
    lapse(locks, 2)
    third = of_task(locks, "c")
    assert [held.permit for held in (first, second, third.lock)] == [2, 2, 2]
    assert first.fence < second.fence < third.lock.fence
    assert third.taken_over_from.task_id == "b"


def test_renewal_moves_one_permit_and_what_is_known_of_all(locks):
    """No other permit's deadline; `:permits` lasts at least as long as the permit that is renewed."""
    held_by(locks, "one", "two")
    held = the_lock(locks, lease=1000).acquire().lock
    before = {permit: locks.mget(permit_names(NAME, permit)) for permit in (0, 1)}
    locks.pexpire(PERMITS, 5_000)
    held.renew()
    assert held.permit == 2
    assert {permit: locks.mget(permit_names(NAME, permit)) for permit in (0, 1)} == before
    assert locks.pttl(PERMITS) + SLACK_MS >= locks.pttl(f"{NAME}#2") > 1_000_000


def test_lost_permit_is_not_renewed(locks):
    """Without its key, its record or its lease a permit is lost, whatever others there are."""
    losses: list[Callable[[], object]] = [
        lambda: lapse(locks, 1),
        lambda: locks.delete(f"{NAME}#1"),
        lambda: locks.delete(f"{NAME}#1:holder"),
    ]
    for lose in losses:
        locks.flushdb()
        held_by(locks, "one")
        held = the_lock(locks).acquire().lock
        lose()
        with pytest.raises(LockLost):
            held.renew()
        assert tokens(locks) == {0: "one"} or tokens(locks)[1] == ""  # foreign, without its record


def test_renewal_and_release_repair_a_permit_that_a_classic_loser_overwrote(locks):
    """While our record is unexpired the permit is ours."""
    held_by(locks, "one")
    held = the_lock(locks).acquire().lock
    locks.getset(f"{NAME}#1", 7)
    held.renew()
    assert int(str(locks.get(f"{NAME}#1"))) > locks.time()[0]
    locks.getset(f"{NAME}#1", 7)
    assert [held.release(), held.release()] == ["repaired", "repaired"]
    assert not locks.exists(f"{NAME}#1")


def test_same_token_has_one_permit(locks):
    """An acquire that is sent again is answered with the first's permit, fence and deadline."""
    held_by(locks, "one", "two")
    first, again = (the_lock(locks).acquire(token="mine").lock for _ in range(2))
    assert (again.permit, again.fence) == (first.permit, first.fence) == (2, first.fence)
    assert len(tokens(locks)) == 3


def test_second_delivery_takes_no_second_permit(locks):
    """It is refused by its own, and told of that one, though others have held theirs for longer."""
    held_by(locks, "one")
    assert of_task(locks, "a").lock.permit == 1
    second = the_lock(locks).acquire(token=task_token("a", 0, "0b"))
    assert (second.acquired, second.holder.task_id, second.holder.state) == (False, "a", "running")
    assert len(tokens(locks)) == 2


def test_second_delivery_takes_its_own_lapsed_permit_over(locks):
    """Not a free one: the first may be alive yet, and must find that it has lost what it had."""
    one, _ = held_by(locks, "one", "two")
    first = of_task(locks, "a").lock
    one.release()
    lapse(locks, 2)
    second = the_lock(locks).acquire(token=task_token("a", 0, "0b"))
    assert (second.lock.permit, second.taken_over_from.token) == (2, first.token)
    assert first.hold(LEASE) == "lost"
    assert tokens(locks) == {1: "two", 2: "a|0|0b"}


def test_permit_held_for_a_retry_is_resumed(locks):
    """The retry has the same permit and fence; before it nobody has it, nor its other delivery."""
    held_by(locks, "one")
    held = of_task(locks, "a").lock
    assert held.hold(LEASE) == "held_for_retry"
    assert locks.pttl(PERMITS) + SLACK_MS >= locks.pttl(f"{NAME}#1")
    assert not the_lock(locks).acquire(token=task_token("a", 0, "0b")).acquired
    assert of_task(locks, "b").lock.permit == 2
    resumed = of_task(locks, "a", retries=1).lock
    assert (resumed.permit, resumed.fence) == (1, held.fence)


def test_permit_held_for_a_retry_that_will_not_come_is_freed(locks):
    """Whichever it is; that of another task is not."""
    held_by(locks, "one")
    of_task(locks, "a").lock.hold(LEASE)
    assert not the_lock(locks).free_held("b")
    assert the_lock(locks).free_held("a")
    assert tokens(locks) == {0: "one"}


def test_permit_rests_for_all_but_its_own_task(locks):
    """What rests is held; the task whose permit rests has it before a free one."""
    held = of_task(locks, "a").lock
    assert held.release(at_least_for=500) == "resting"
    assert [of_task(locks, task_id).lock.permit for task_id in "bc"] == [1, 2]
    refused = of_task(locks, "d")
    assert (refused.acquired, states(locks)[0]) == (False, "resting")
    assert of_task(locks, "a", retries=1).lock.permit == 0


def test_what_is_known_of_permits_lasts_as_long_as_one_that_rests(locks):
    """However long that is: whoever is told of fewer permits must hear that there are more."""
    held_by(locks, "one", retention=0)
    resting = the_lock(locks, lease=5, retention=0).acquire().lock
    assert resting.release(at_least_for=5_000) == "resting"
    assert locks.pttl(PERMITS) + SLACK_MS >= locks.pttl(f"{NAME}#1") > 4_000_000


def test_permit_that_rests_is_known_by_its_state(locks):
    """Its end is no death."""
    held_by(locks, "one")
    assert of_task(locks, "a").lock.release(at_least_for=500) == "resting"
    assert states(locks) == {0: "running", 1: "resting"}
    lapse(locks, 1)
    taken = of_task(locks, "b")
    assert (taken.lock.permit, taken.taken_over_from) == (1, None)


def test_lapsed_permit_is_taken_over_from_its_dead_holder(locks):
    """It says from whom; the old holder's release and renewal change nothing."""
    held_by(locks, "one", "two", "three")
    lapse(locks, 1)
    outcome = of_task(locks, "a")
    assert (outcome.lock.permit, outcome.taken_over_from.token) == (1, "two")
    assert the_lock(locks).free_dead("two") == "lost"
    assert tokens(locks) == {0: "one", 1: "a|0|0a", 2: "three"}


def test_permit_of_a_proved_dead_holder_is_taken_over(locks):
    """Before its deadline, when all are held; another's proof opens nothing, nor one beside a free one."""
    held_by(locks, "one", "two", "three")
    assert not the_lock(locks).acquire(dead="nobody").acquired
    outcome = the_lock(locks).acquire(dead="two")
    assert (outcome.lock.permit, outcome.taken_over_from.token) == (1, "two")


def test_proof_of_death_is_sought_of_the_one_that_ends_first(locks, monkeypatch):
    """A dead holder's lease is no longer renewed, so sooner or later that is it."""
    asked: list[Any] = []
    monkeypatch.setattr(lock_module, "is_surely_dead", lambda info: asked.append(info) or True)
    held_by(locks, "one", "two", info={"pid": 1})
    the_lock(locks, lease=30, info={"pid": 2}).acquire(token="dead")
    outcome = the_lock(locks).acquire_at_death()
    assert asked == [{"pid": 2}]
    assert (outcome.lock.permit, outcome.taken_over_from.token) == (2, "dead")


def test_dead_holders_permit_is_released_on_its_behalf(locks):
    """Whichever it has; and if it had given it back, or never had one, that is said."""
    _, two = held_by(locks, "one", "two")
    assert the_lock(locks).free_dead("two") == "freed"
    assert tokens(locks) == {0: "one"}
    assert the_lock(locks).free_dead("two") == "ended"
    assert the_lock(locks).free_dead("three") == "lost"
    assert two.release() == "released"


def test_interrupted_acquire_gives_back_the_permit_that_it_may_hold(locks, monkeypatch):
    """Whichever the server gave it."""
    held_by(locks, "one")
    acquire = SetnxLock._acquire_once

    def interrupted(self: SetnxLock, *args: Any) -> Any:
        assert acquire(self, *args).lock.permit == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(SetnxLock, "_acquire_once", interrupted)
    with pytest.raises(KeyboardInterrupt):
        the_lock(locks).acquire()
    assert tokens(locks) == {0: "one"}


def test_with_gives_back_what_its_own_thread_has_taken(locks):
    """Threads share one object: each has a permit of its own, and gives back that one."""
    lock = SetnxLock(locks, NAME, limit=3, lease=LEASE)
    inside, over = threading.Barrier(3), threading.Barrier(3)
    left: list[tuple[int, bool]] = []

    def run() -> None:
        with lock as held:
            inside.wait(60)
            over.wait(60)
        left.append((held.permit, bool(locks.exists(permit_names(NAME, held.permit)[0]))))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    with lock as held:
        inside.wait(60)
        assert len(lock.holders()) == 3
        over.wait(60)
        for thread in threads:
            thread.join(60)
        assert lock.holders() == [holder for holder in lock.holders() if holder.token == held.token]
    assert sorted(left) == [(permit, False) for permit in range(3) if permit != held.permit]
    assert lock.holders() == []


# Limits that differ


def test_client_that_is_told_of_fewer_permits_asks_again_with_more(locks):
    """So one whose limit was lowered finds its own: it resumes, and is refused by its other delivery."""
    held_by(locks, "one", "two")
    of_task(locks, "a").lock.hold(LEASE)
    narrow = the_lock(locks, 1)
    resumed = narrow.acquire(token=task_token("a", 1, "0a"))
    assert (resumed.acquired, resumed.lock.permit) == (True, 2)
    resumed.lock.renew()
    assert not the_lock(locks, 1).acquire(token=task_token("a", 1, "0b")).acquired
    assert narrow.release() == "released"
    assert tokens(locks) == {0: "one", 1: "two"}


def test_lowered_limit_steals_nothing_and_lets_permits_drain(locks):
    """Those beyond it stay their holders', and are nobody's after them; what is known shrinks with them."""
    one, two, three = held_by(locks, "one", "two", "three")
    assert not of_task(locks, "a", 1).acquired
    assert locks.get(PERMITS) == "3 1"
    assert [two.release(), one.release()] == ["released"] * 2
    assert of_task(locks, "a", 1).lock.permit == 0
    assert not of_task(locks, "b", 1).acquired
    assert locks.get(PERMITS) == "3 1"
    three.release()
    assert not of_task(locks, "b", 1).acquired
    assert not locks.exists(PERMITS)
    assert tokens(locks) == {0: "a|0|0a"}


def test_permit_beyond_a_lowered_limit_is_handed_to_nobody(locks):
    """By whoever knows of the lower limit: neither released nor found lapsed."""
    one, _, _ = held_by(locks, "one", "two", "three")
    wait(locks, "a", 10.0, limit=1)
    assert the_lock(locks, 1).free_dead("three") == "freed"
    assert states(locks) == {0: "running", 1: "running"}
    lapse(locks, 1)
    assert the_lock(locks, 1).serve().heir is None
    assert one.release() == "released"
    assert (one.heirs[-1].task_id, states(locks)[0]) == ("a", "handed")


def test_call_whose_own_permit_has_lapsed_beyond_a_lowered_limit_stands_in_line(locks):
    """It passes nobody who waits, and is told who holds what it may have: its own serves no line."""
    held_by(locks, "one", "two")
    of_task(locks, "a")
    lapse(locks, 2)
    wait(locks, "b", 10.0, limit=2)
    again = the_lock(locks, 2)
    asked: list[None] = []

    def serve_once(*_: Any) -> NoReturn:
        asked.append(None)
        raise LockUnavailable(NAME, "it would ask for ever")

    again._serve_once = serve_once
    outcome = again.acquire(token=task_token("a", 0, "0b"))
    assert (outcome.acquired, outcome.holder.token, outcome.ends_first.token) == (False, "one", "one")
    assert asked == []


def test_raised_limit_serves_the_line(locks):
    """A call that enters it says so, and whoever serves it hands out what is new; a newcomer passes none."""
    held_by(locks, "one", limit=1)
    wait(locks, "a", 10.0, limit=1)
    found = wait(locks, "b", 20.0, limit=2)
    assert (found.state, found.place, found.holder) == ("new", 2, None)
    newcomer = the_lock(locks, 3)
    assert not newcomer.acquire(token=task_token("new", 0, "0a")).acquired
    assert [heir.task_id for heir in newcomer.heirs] == ["a", "b"]
    assert states(locks) == {0: "running", 1: "handed", 2: "handed"}


def test_service_that_knows_of_a_raised_limit_hands_out_what_is_new(locks):
    """Without a call that tells of it; who does not know it goes by what was told last."""
    held_by(locks, "one", limit=1)
    for task_id, since in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
        wait(locks, task_id, since, limit=1)
    assert the_lock(locks, 3).serve().heir is None
    served = [the_lock(locks, 3).serve(knows_terms=True) for _ in range(3)]
    assert [one.heir and one.heir.task_id for one in served] == ["a", "b", None]
    assert states(locks) == {0: "running", 1: "handed", 2: "handed"}
    assert locks.get(f"{NAME}:permits") == "3 3"
    assert of_task(locks, "b", 1, copy="b1").lock.permit == 2


def test_woken_call_that_finds_more_free_lets_the_line_go_on(locks):
    """The limit was raised, and nobody has told the line: the first who starts does."""
    (one,) = held_by(locks, "one", limit=1)
    for task_id, since in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
        wait(locks, task_id, since, limit=1)
    one.release()
    woken = the_lock(locks, 3)
    assert woken.acquire(token=task_token("a", 0, "0a"), copy="a1").acquired
    assert [heir.task_id for heir in woken.heirs] == ["b", "c"]
    assert of_task(locks, "b", copy="b1").acquired
    assert states(locks) == {0: "running", 1: "running", 2: "handed"}


def test_task_whose_id_begins_as_anothers_is_another(locks):
    """Ids may have the character that parts a token."""
    assert of_task(locks, "a|b", 2).acquired
    assert of_task(locks, "a", 2).lock.permit == 1


# The line


def test_each_released_permit_goes_to_the_next_in_line(locks):
    """First come, first served, whichever permit comes free; nobody else may have it."""
    one, two = held_by(locks, "one", "two", limit=2)
    for task_id, since in (("b", 20.0), ("a", 10.0)):
        assert wait(locks, task_id, since, limit=2).state == "new"
    two.release()
    one.release()
    assert (two.heirs[-1].task_id, one.heirs[-1].task_id) == ("a", "b")
    assert not of_task(locks, "new", 2).acquired
    assert [of_task(locks, task_id, 2, copy=f"{task_id}1").lock.permit for task_id in "ba"] == [0, 1]
    assert not locks.exists(LINE, CALLS)


def test_permit_that_is_handed_over_is_seen(locks):
    """As the task's for which it is kept, by place, and by whoever parks."""
    held_by(locks, "one")
    (two,) = held_by(locks, "two", limit=2)
    wait(locks, "a", 10.0, limit=2)
    two.release()
    assert states(locks) == {0: "running", 1: "handed"}
    assert wait(locks, "a", 10.0, limit=2).state == "handed"


def test_all_whom_a_newcomer_hands_a_permit_are_known_to_it(locks):
    """Two lapsed permits go to two who wait: both are to be woken, and not the last one only."""
    held_by(locks, "one", "two", limit=2)
    wait(locks, "a", 10.0, limit=2)
    wait(locks, "b", 20.0, limit=2)
    lapse(locks, 0, 1)
    newcomer = the_lock(locks, 2)
    assert not newcomer.acquire(token=task_token("new", 0, "0a")).acquired
    assert [(heir.task_id, heir.call) for heir in newcomer.heirs] == [("a", "wake a"), ("b", "wake b")]


def test_line_is_looked_at_again_while_a_permit_is_kept_for_a_call(locks):
    """Though another permit is free and nobody else waits: that call may not come."""
    one, two = held_by(locks, "one", "two", limit=2)
    wait(locks, "a", 10.0, limit=2)
    two.release()
    one.release()
    served = the_lock(locks, 2).serve()
    assert (served.heir, served.waits) == (None, True)
    assert 5 < served.look_in <= 10


@pytest.mark.parametrize("lose", [lapse, lambda locks, _: locks.delete(f"{NAME}#1")], ids=["late", "deleted"])
def test_call_that_does_not_come_for_its_permit_is_passed_over_though_another_is_free(locks, lose):
    """For a lease: it is out of the line, and known to be; then it has its place again."""
    one, two = held_by(locks, "one", "two", limit=2)
    wait(locks, "a", 10.0, limit=2)
    two.release()
    one.release()
    lose(locks, 1)
    served = the_lock(locks, 2).serve()
    assert served.heir is None
    assert served.look_in == pytest.approx(LEASE, abs=1)
    assert str(locks.hget(CALLS, "a")).startswith("1|")
    assert tokens(locks) == {}


def test_each_call_that_does_not_come_for_its_permit_is_passed_over(locks):
    """One at a time: whoever serves the line is told to go on at once, though nobody else waits."""
    one, two = held_by(locks, "one", "two", limit=2)
    for task_id, since in (("a", 10.0), ("b", 20.0)):
        wait(locks, task_id, since, limit=2)
    one.release()
    two.release()
    lapse(locks, 0, 1)
    assert the_lock(locks, 2).serve().look_in == 0
    assert the_lock(locks, 2).serve().look_in == pytest.approx(LEASE, abs=5)
    assert {task: str(call)[:2] for task, call in locks.hgetall(CALLS).items()} == {"a": "1|", "b": "1|"}


def test_call_that_does_not_come_for_a_permit_beyond_the_limit_is_passed_over(locks):
    """Its permit drains, and the next one has what is free within the limit."""
    one, two = held_by(locks, "one", "two", limit=2)
    wait(locks, "a", 10.0, limit=2)
    two.release()
    wait(locks, "b", 20.0, limit=1)
    lapse(locks, 1)
    served = the_lock(locks, 1).serve()
    assert (served.heir, served.holder) == (None, None)
    assert str(locks.hget(CALLS, "a")).startswith("1|")
    assert states(locks) == {0: "running"}
    one.release()
    assert one.heirs[-1].task_id == "b"


def test_service_says_whether_it_is_to_be_done_again(locks):
    """At once while another permit is free and somebody waits, one at a time."""
    held_by(locks, "one", "two", limit=2)
    for task_id, since in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
        wait(locks, task_id, since, limit=2)
    lapse(locks, 0, 1)
    first, second, third = (the_lock(locks, 2).serve() for _ in range(3))
    assert (first.heir.task_id, first.look_in) == ("a", 0)
    assert second.heir.task_id == "b"
    assert 5 < second.look_in <= 10
    assert (third.heir, third.holder.state) == (None, "handed")


def test_call_that_leaves_passes_its_permit_on(locks):
    """Whichever is kept for it; the others stay."""
    _, two = held_by(locks, "one", "two", limit=2)
    wait(locks, "a", 10.0, limit=2)
    wait(locks, "b", 20.0, limit=2)
    two.release()
    assert leave(locks, Place(NAME, "a", 0, 60.0), copy="a1") == "handed"
    served = the_lock(locks, 2).serve(away="a")
    assert served.heir.task_id == "b"
    assert states(locks) == {0: "running", 1: "handed"}


def test_call_that_comes_late_has_a_free_permit_or_one_that_is_kept_for_another(locks):
    """Nobody runs under that one; the other stands where it stood."""
    one, two = held_by(locks, "one", "two", limit=2)
    for task_id, since in (("a", 10.0), ("b", 20.0)):
        wait(locks, task_id, since, limit=2)
    one.release()
    lapse(locks, 0)
    assert the_lock(locks, 2).serve().heir.task_id == "b"
    late = of_task(locks, "a", 2, copy="a1")
    assert (late.acquired, late.lock.permit) == (True, 0)
    assert locks.zrange(LINE, 0, -1) == ["b"]
    two.release()
    assert of_task(locks, "b", 2, copy="b1").lock.permit == 1


def test_script_hands_its_permit_to_nobody_as_it_wakes_nobody(locks):
    """Who waits is not passed, and keeps its place until a worker looks; else it would be passed over."""
    script = SetnxLock(locks, NAME, limit=2, lease=LEASE)
    assert script.acquire(token="script").acquired
    held_by(locks, "other", limit=2)
    for task_id, since in (("a", 10.0), ("b", 20.0)):
        wait(locks, task_id, since, limit=2)
    assert script.release() == "released"
    refused = script.acquire(token="again")
    assert (refused.acquired, refused.holder.token, refused.waiters) == (False, "other", 2)
    assert states(locks) == {1: "running"}
    assert locks.zrange(LINE, 0, -1) == ["a", "b"]
    assert the_lock(locks, 2).serve().heir.task_id == "a"


# What others put there


def test_classic_client_is_one_holder_among_many(locks, foreign_keys):
    """It has the lock itself, and is respected to the end of its second; ours have the others."""
    foreign_keys.add(NAME)
    assert locks.setnx(NAME, locks.time()[0] + 500)
    assert [of_task(locks, task_id).lock.permit for task_id in "ab"] == [1, 2]
    refused = of_task(locks, "c")
    assert (refused.acquired, states(locks)[0]) == (False, "foreign")
    assert not locks.setnx(NAME, 7)
    locks.set(NAME, locks.time()[0] - 2)
    assert of_task(locks, "c").taken_over_from.state == "foreign"


def test_classic_client_is_kept_out_by_the_holder_of_the_first_permit(locks):
    """It knows of that one only, and has it when that is free."""
    one, _ = held_by(locks, "one", "two")
    assert not locks.setnx(NAME, 7)
    one.release()
    assert locks.setnx(NAME, locks.time()[0] + 500)
    locks.delete(NAME)


@pytest.mark.parametrize("value", ["theirs", "-1", "", "1e9"])
def test_permit_whose_value_is_no_time_is_held_by_a_foreigner(locks, foreign_keys, value):
    """For ever; the others are had, and nobody's renewal or release touches it."""
    name = f"{NAME}#1"
    foreign_keys.add(name)
    locks.set(name, value)
    assert [of_task(locks, task_id).lock.permit for task_id in "ab"] == [0, 2]
    assert not of_task(locks, "c").acquired
    assert locks.get(name) == value


@pytest.mark.parametrize("kind", ["list", "handed"])
def test_permit_whose_key_is_of_another_type_is_held_by_a_foreigner(locks, foreign_keys, kind):
    """Also if it was kept for a call: that call waits until its place is free, and stops no other."""
    name = f"{NAME}#1"
    foreign_keys.add(name)
    if kind == "handed":
        one, two = held_by(locks, "one", "two")
        wait(locks, "a", 10.0)
        two.release()
        one.release()
        locks.delete(name)
    locks.rpush(name, "x")
    wait(locks, "b", 20.0)
    assert the_lock(locks).serve().heir.task_id == "b"
    assert the_lock(locks).serve().look_in != 0, "it is served for ever"
    assert locks.lrange(name, 0, -1) == ["x"]
    assert of_task(locks, "b", copy="b1").lock.permit != 1


@pytest.mark.parametrize("garbage", ["", "nobody", "a\n1\n2", "a\n1\n2\nRUNNING\n"])
def test_permit_with_a_foreign_record_is_refused(locks, foreign_keys, garbage):
    """And nothing is changed: whoever put it there is told of, and no permit is given in doubt."""
    held_by(locks, "one")
    record = f"{NAME}#1:holder"
    foreign_keys.add(record)
    locks.set(record, garbage)
    with pytest.raises(LockRefused, match=r"FOREIGNRECORD .*#1:holder is no record"):
        of_task(locks, "a")
    assert locks.get(record) == garbage
    assert not locks.exists(f"{NAME}#1")


@pytest.mark.parametrize("text", ["", "many", "3", "-1 3", "3 3 3", "3 0", "0 0"])
def test_what_is_known_of_permits_may_be_garbage(locks, text):
    """It counts as nothing known, and is written anew."""
    held_by(locks, "one")
    locks.set(PERMITS, text, px=60_000)
    assert the_lock(locks).serve().holder.token == "one"
    assert of_task(locks, "a").lock.permit == 1
    assert locks.get(PERMITS) == "3 3"


def test_permits_are_found_though_what_is_known_of_them_is_lost(locks):
    """Deleted or evicted: whoever has a limit looks at all permits within it."""
    held_by(locks, "one", "two", "three")
    locks.delete(PERMITS)
    assert not of_task(locks, "a").acquired
    assert locks.get(PERMITS) == "3 3"


# What a server refuses


def test_full_server_gives_no_permit_and_serves_whoever_holds_one():
    """Renewal, hold, release, hand-over, rest and the line need no memory."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url(), decode_responses=True) as client:
        held = [the_lock(client, 4) for _ in range(4)]
        outcomes = [lock.acquire(token=task_token(f"t{number}", 0, "0a")) for number, lock in enumerate(held)]
        for task_id, since in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
            wait(client, task_id, since, 4)
        client.config_set("maxmemory", "1")
        with pytest.raises(LockUnavailable):
            of_task(client, "new", 5)
        for outcome in outcomes:
            outcome.lock.renew()
        assert held[1].release() == "released"
        assert held[1].heirs[-1].task_id == "a"
        assert outcomes[2].lock.hold(LEASE) == "held_for_retry"
        assert outcomes[3].lock.release(at_least_for=500) == "resting"
        place = Place(NAME, "b", 0, 200_000.0, terms=Terms(4))  # longer than anything is known yet
        assert park(client, place, since=20.0, call="wake b").state == "parked"
        assert leave(client, Place(NAME, "c", 0, 60.0, terms=Terms(4)), copy="c1") == "left"
        assert the_lock(client, 4).free_held("t2")
        assert the_lock(client, 4).serve().heir.task_id == "b"
        assert all(client.pttl(key) > 0 for key in client.scan_iter())


NEEDED = {"time", "get", "mget", "set", "pttl", "exists"}


@pytest.mark.parametrize("command", sorted(NEEDED))
def test_acquire_without_a_permission_that_it_needs_is_refused(locks, limited, command):
    """The refusal is ours, and nothing is acquired."""
    held_by(locks, "one")
    before = locks.mget(*permit_names(NAME, 0), *permit_names(NAME, 1))
    url = limited("~*", "+@all", f"-{command}")
    with redis.Redis.from_url(url) as client, pytest.raises(LockRefused):
        of_task(client, "a")
    assert locks.mget(*permit_names(NAME, 0), *permit_names(NAME, 1)) == before


def test_every_key_outlives_what_it_speaks_of(locks):
    """After every verb each key has a TTL, and `:permits` one that is as long as any other permit's."""

    def check() -> None:
        left = {key: locks.pttl(key) for key in lock_keys(locks)}
        assert min(left.values()) > 0
        assert left[PERMITS] + SLACK_MS >= max(left.get(f"{NAME}#{permit}", 0) for permit in (1, 2))

    held = [the_lock(locks).acquire().lock for _ in range(3)]
    check()
    held[1].renew()
    check()
    wait(locks, "a", 10.0)
    held[1].release()
    check()
    held[2].hold(5 * LEASE)
    check()
    assert of_task(locks, "a", copy="a1").lock.permit == 1
    check()
    lapse(locks, 1)
    wait(locks, "b", 20.0)
    the_lock(locks).serve()
    check()


# One permit, byte for byte


def keys_of(client: redis.Redis) -> dict[str, object]:
    """What all keys say, and when those of the lock expire, in seconds of the test's clock."""
    said: dict[str, object] = {}
    for key in sorted(lock_keys(client) - {CLOCK_KEY}):
        kind = client.type(key)
        value = (
            client.zrange(key, 0, -1) if kind == "zset" else client.hgetall(key) if kind == "hash" else None
        )
        value = client.get(key) if value is None else value
        expiry = client.pexpiretime(key) / 1000 - ZERO
        said[key.removeprefix(NAME)] = (value, expiry) if expiry > 0 else value
    return said


def test_one_permit_is_what_a_lock_without_permits_was(locks, foreign_keys, monkeypatch):
    """Every key, value, record and expiry, verb by verb, as before there were permits."""
    foreign_keys.add(CLOCK_KEY)
    clock = ServerClock(locks, monkeypatch)
    about: dict[str, Any] = {"lease": 10, "retention": 60, "line": True}

    def acquired(task_id: str, copy: str = ORIGINAL) -> SetnxLock:
        lock = SetnxLock(locks, NAME, **about)
        assert lock.acquire(token=task_token(task_id, 0, "0a"), copy=copy).acquired
        return lock

    def record(token: str, deadline: int, fence: str, state: str, since: int, info: str = "{}") -> str:
        end = f"{AT[deadline]}000000" if deadline else "0"
        return f"{token}|0|0a\n{end}\n{fence}\n{state}\n{AT[since]}000000\n{info}"

    first = f"{AT[10]}000000"
    a = acquired("a")
    assert keys_of(locks) == {
        "": (AT[20], 80.0), ":holder": (record("a", 20, first, "running", 10), 80.0)
    }  # fmt: skip
    clock.set(12)
    held = a.acquire(token=task_token("a", 0, "0a")).lock
    held.renew()
    assert keys_of(locks) == {
        "": (AT[22], 82.0), ":holder": (record("a", 22, first, "running", 10), 82.0)
    }  # fmt: skip
    assert held.hold(20) == "held_for_retry"
    assert keys_of(locks) == {
        "": (AT[32], 92.0), ":holder": (record("a", 32, first, "held_for_retry", 10), 92.0)
    }  # fmt: skip
    assert SetnxLock(locks, NAME, **about).free_held("a")
    assert keys_of(locks) == {":holder": record("a", 0, first, "released", 10)}
    b = acquired("b")
    assert b.release() == "released"
    assert keys_of(locks) == {":holder": record("b", 0, f"{AT[12]}000000", "released", 12)}
    c = acquired("c")
    fence = f"{AT[12]}000001"
    wait(locks, "d", 10.0, limit=1)
    waits = {":calls": {"d": "0|10000000|wake d"}, ":ticket:d": "0||0"}
    assert keys_of(locks) == {
        "": (AT[22], 82.0), ":holder": (record("c", 22, fence, "running", 12), 82.0), ":line": ["d"], **waits
    }  # fmt: skip
    assert c.release() == "released"
    handed = record("c", 22, fence, "handed", 12, "d")
    assert keys_of(locks) == {"": (AT[22], 82.0), ":holder": (handed, 82.0), **waits}
    d = acquired("d", copy="d1")
    fence = f"{AT[12]}000002"
    assert keys_of(locks) == {
        "": (AT[22], 82.0), ":holder": (record("d", 22, fence, "running", 12), 82.0), ":ticket:d": "0|d1|0"
    }  # fmt: skip
    resting = d.acquire(token=task_token("d", 0, "0a"), copy="d1").lock
    assert resting.release(at_least_for=5) == "resting"
    assert keys_of(locks) == {
        "": (AT[17], 77.0), ":holder": (record("d", 17, fence, "resting", 12), 77.0), ":ticket:d": "0|d1|0"
    }  # fmt: skip


def test_full_server_gives_no_permit_at_a_pace():
    """To ask for the pace writes nothing: after that a server would let the rest of the script write, too."""
    with EmbeddedServer() as server, redis.Redis.from_url(server.url(), decode_responses=True) as client:
        assert the_lock(client, 2, rate=(5, 100.0)).acquire().acquired
        client.config_set("maxmemory", "1")
        with pytest.raises(LockUnavailable):
            the_lock(client, 2, lease=LEASE / 2, rate=(5, 100.0)).acquire()
        assert client.zcard(f"{NAME}:starts") == 1


def test_overtaken_call_that_may_not_start_yet_stands_where_it_stood(locks):
    """Though another wake-up of it is on its way."""
    wait(locks, "a", 10.0)
    lock = the_lock(locks, 3, rate=(1, 100.0))
    assert lock.serve().heir.task_id == "a"
    locks.hset(f"{NAME}:calls", "a", "0+|10000000|wake a")
    seconds, us = locks.time()
    locks.zadd(f"{NAME}:starts", {"another": seconds * 1_000_000 + us})
    locks.expire(f"{NAME}:starts", 200)
    outcome = lock.acquire(token=task_token("a", 0, "0a"), copy="a1", remember=60)
    assert (outcome.acquired, outcome.paced) == (False, True)
    assert locks.zrange(f"{NAME}:line", 0, -1, withscores=True) == [("a", 10_000_000.0)]


@pytest.mark.parametrize("now_of", ["nobody", "the first in line", "another program"])
def test_dead_holder_that_had_given_its_lock_back_has_ended(locks, now_of):
    """Whoever has it now, nothing is freed, and nobody is told so."""
    lock = SetnxLock(locks, "ended", line=True)
    held = lock.acquire(token="a|0|1a").lock
    if now_of == "the first in line":
        lock.acquire(token="b|0|2b", linger=60)
    held.release()
    if now_of == "another program":
        locks.set("ended", "99999999999", ex=60)
    found = locks.get("ended")
    assert (found is None) == (now_of == "nobody")
    assert lock.free_dead("a|0|1a") == "ended"
    assert locks.get("ended") == found
