"""Several permits of one lock, as its callers see them, on a real server.

Who has which, for how long and in which order, tests/model says.
"""

from typing import Any

import pytest
import redis

from celery_setnx import AlreadyRunning, LockRefused, LockUnavailable, SetnxLock
from celery_setnx.lock import lock as lock_module
from celery_setnx.lock import verbs
from celery_setnx.lock.line import LineEntry, ParkReply, leave, park
from celery_setnx.lock.names import permit_names, permits_name
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import ORIGINAL, Terms, task_token
from celery_setnx.lock.verbs import Caller, serve
from tests.harness import lock_keys
from tests.model.injected import CLOCK_KEY, EPOCH

NAME = "t:{permits}"
PERMITS = permits_name(NAME)
LEASE = 600.0
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


def of_task(client: redis.Redis, task_id: str, limit: int = 3, **details: Any) -> Outcome:
    """A task's attempt to acquire the lock."""
    return the_lock(client, limit).acquire(token=task_token(task_id, 0, "0a"), caller=Caller(**details))


def wait(client: redis.Redis, task_id: str, since: float, limit: int = 3) -> ParkReply:
    """A task enters the line."""
    place = LineEntry(NAME, task_id, 0, 6000.0, terms=Terms(limit))
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


def test_refused_caller_is_told_of_two_holders_whatever_the_limit(locks):
    """Of the one that ends first, and of the one that has held for longest: the reply is short."""
    held_by(locks, *(f"holder{number:03}" for number in range(100)), limit=100)
    found = verbs.acquire(the_lock(locks, 100), token="another")
    assert sum(str(item).count("holder") for item in found) == 2
    assert len("".join(map(str, found))) < 500


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
    acquire = verbs.acquire

    def interrupted(*args: Any, **more: Any) -> Any:
        assert acquire(*args, **more).permit == 1
        raise KeyboardInterrupt

    monkeypatch.setattr(verbs, "acquire", interrupted)
    with pytest.raises(KeyboardInterrupt):
        the_lock(locks).acquire()
    assert tokens(locks) == {0: "one"}


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


def test_call_whose_own_permit_has_lapsed_beyond_a_lowered_limit_stands_in_line(locks):
    """It passes nobody who waits, and is told who holds what it may have: its own serves no line."""
    held_by(locks, "one", "two")
    of_task(locks, "a")
    lapse(locks, 2)
    wait(locks, "b", 10.0, limit=2)
    outcome = the_lock(locks, 2).acquire(token=task_token("a", 0, "0b"))
    assert (outcome.acquired, outcome.holder.token, outcome.ends_first.token) == (False, "one", "one")
    assert not outcome.is_due


def test_woken_call_that_finds_more_free_has_the_line_looked_at(locks):
    """The limit was raised, and nobody has told the line."""
    (one,) = held_by(locks, "one", limit=1)
    for task_id, since in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
        wait(locks, task_id, since, limit=1)
    one.release()
    woken = the_lock(locks, 3)
    assert woken.acquire(token=task_token("a", 0, "0a"), caller=Caller(copy="a1")).is_due
    assert [serve(the_lock(locks)).heir.task_id for _ in range(2)] == ["b", "c"]
    assert not of_task(locks, "b", copy="b1").is_due


@pytest.mark.parametrize("starts", [1, 2])
def test_call_has_the_line_looked_at_if_one_more_may_start(locks, starts):
    """Else the next start is noted already."""
    for task_id, since in (("a", 10.0), ("b", 20.0)):
        wait(locks, task_id, since)
    paced = SetnxLock(locks, NAME, lease=LEASE, line=True, limit=3, rate=(starts, 60))
    assert paced.acquire(token=task_token("a", 0, "0a"), caller=Caller(copy="a1")).is_due == (starts > 1)


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
    assert locks.zrange(f"{NAME}:line", 0, -1) == ["a", "b"]
    assert serve(the_lock(locks, 2)).heir.task_id == "a"


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


def test_permit_with_a_foreign_record_is_refused(locks, foreign_keys):
    """It names the record: no permit is given in doubt."""
    held_by(locks, "one")
    record = f"{NAME}#1:holder"
    foreign_keys.add(record)
    locks.set(record, "nobody")
    with pytest.raises(LockRefused, match=r"FOREIGNRECORD .*#1:holder is no record"):
        of_task(locks, "a")


@pytest.mark.parametrize("text", ["", "many", "3 0"])
def test_what_is_known_of_permits_may_be_garbage(locks, text):
    """It counts as nothing known, and is written anew."""
    held_by(locks, "one")
    locks.set(PERMITS, text, px=60_000)
    assert serve(the_lock(locks)).holder.token == "one"
    assert of_task(locks, "a").lock.permit == 1
    assert locks.get(PERMITS) == "3 3"


# What a server refuses


def test_full_server_gives_no_permit_and_serves_whoever_holds_one(own_locks):
    """Renewal, hold, release, hand-over, rest and the line need no memory."""
    held = [the_lock(own_locks, 4) for _ in range(4)]
    outcomes = [lock.acquire(token=task_token(f"t{number}", 0, "0a")) for number, lock in enumerate(held)]
    for task_id, since in (("a", 10.0), ("b", 20.0), ("c", 30.0)):
        wait(own_locks, task_id, since, 4)
    own_locks.config_set("maxmemory", "1")
    with pytest.raises(LockUnavailable):
        of_task(own_locks, "new", 5)
    for outcome in outcomes:
        outcome.lock.renew()
    assert held[1].release() == "released"
    assert held[1].turns[-1].heir.task_id == "a"
    assert outcomes[2].lock.hold(LEASE) == "held_for_retry"
    assert outcomes[3].lock.release(at_least_for=500) == "resting"
    place = LineEntry(NAME, "b", 0, 200_000.0, terms=Terms(4))  # longer than anything is known yet
    assert park(own_locks, place, since=20.0, call="wake b").state == "parked"
    assert leave(own_locks, LineEntry(NAME, "c", 0, 60.0, terms=Terms(4)), copy="c1").word == "left"
    assert the_lock(own_locks, 4).free_held("t2")
    assert serve(the_lock(own_locks, 4)).heir.task_id == "b"
    assert all(own_locks.pttl(key) > 0 for key in own_locks.scan_iter())


NEEDED = {"time", "mget", "set", "pttl", "exists"}


@pytest.mark.parametrize("command", sorted(NEEDED))
def test_acquire_without_a_permission_that_it_needs_is_refused(locks, limited, command):
    """The refusal is ours, and nothing is acquired."""
    held_by(locks, "one")
    before = locks.mget(*permit_names(NAME, 0), *permit_names(NAME, 1))
    url = limited("~*", "+@all", f"-{command}")
    with redis.Redis.from_url(url) as client, pytest.raises(LockRefused):
        of_task(client, "a")
    assert locks.mget(*permit_names(NAME, 0), *permit_names(NAME, 1)) == before


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


def test_one_permit_is_what_a_lock_without_permits_was(locks, clock):
    """Every key, value, record and expiry, verb by verb, as before there were permits."""
    about: dict[str, Any] = {"lease": 10, "retention": 60, "line": True}

    def acquired(task_id: str, copy: str = ORIGINAL) -> SetnxLock:
        lock = SetnxLock(locks, NAME, **about)
        assert lock.acquire(token=task_token(task_id, 0, "0a"), caller=Caller(copy=copy)).acquired
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
    resting = d.acquire(token=task_token("d", 0, "0a"), caller=Caller(copy="d1")).lock
    assert resting.release(at_least_for=5) == "resting"
    assert keys_of(locks) == {
        "": (AT[17], 77.0), ":holder": (record("d", 17, fence, "resting", 12), 77.0), ":ticket:d": "0|d1|0"
    }  # fmt: skip


def test_overtaken_call_that_may_not_start_yet_stands_where_it_stood(locks):
    """Though another wake-up of it is on its way."""
    wait(locks, "a", 10.0)
    lock = the_lock(locks, 3, rate=(1, 100.0))
    assert serve(lock).heir.task_id == "a"
    locks.hset(f"{NAME}:calls", "a", "0+|10000000|wake a")
    seconds, us = locks.time()
    locks.zadd(f"{NAME}:starts", {"another": seconds * 1_000_000 + us})
    locks.expire(f"{NAME}:starts", 200)
    outcome = lock.acquire(token=task_token("a", 0, "0a"), caller=Caller(copy="a1", remember_s=60))
    assert (outcome.acquired, outcome.paced) == (False, True)
    assert locks.zrange(f"{NAME}:line", 0, -1, withscores=True) == [("a", 10_000_000.0)]


@pytest.mark.parametrize("now_of", ["nobody", "the first in line", "another program"])
def test_dead_holder_that_had_given_its_lock_back_has_ended(locks, now_of):
    """Whoever has it now, nothing is freed, and nobody is told so."""
    lock = SetnxLock(locks, "ended", line=True)
    held = lock.acquire(token="a|0|1a").lock
    if now_of == "the first in line":
        lock.acquire(token="b|0|2b", caller=Caller(linger_s=60))
    held.release()
    if now_of == "another program":
        locks.set("ended", "99999999999", ex=60)
    found = locks.get("ended")
    assert (found is None) == (now_of == "nobody")
    assert lock.free_dead("a|0|1a") == "ended"
    assert locks.get("ended") == found
