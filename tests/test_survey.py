"""What a survey sees, how few commands it takes, and that a lock dropped by hand is the one that was seen."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from celery_setnx.exceptions import LockForbidden, LockRefused
from celery_setnx.keys import digest
from celery_setnx.lock import verbs
from celery_setnx.lock.line import LineEntry, park
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.look import Sighting, look
from celery_setnx.lock.marks import Mark, mark_all
from celery_setnx.lock.names import (
    key_name,
    line_names,
    mark_name,
    permit_names,
    permits_name,
    record_name,
    starts_name,
    take_over_name,
)
from celery_setnx.lock.process import identity
from celery_setnx.lock.record import PLAIN, Terms
from celery_setnx.lock.scripts import Script
from celery_setnx.lock.survey import BATCH, COMMANDS, drop, forget_starts, survey
from celery_setnx.lock.takeover import TakeOver, last_take_over, note_take_over
from celery_setnx.lock.verbs import serve
from examples.embedded import EmbeddedServer
from tests.conftest import LOCK_DB
from tests.harness import age, lock_keys, server_us

EACH = ("time", "zcount", "zrevrange")
"""What a look at a lock asks once, beside MGET."""

KEY = key_name("t", "app.sync", digest([7]))


def hold(locks: redis.Redis, key: str = KEY, limit: int = 1, **info: Any) -> Any:
    """A held lock."""
    about = {"task": "app.sync", "task_id": "t-1", **info}
    return SetnxLock(locks, key, info=about, limit=limit).acquire().lock


def hold_many(locks: redis.Redis, count: int, limit: int, key: str = KEY) -> list[Any]:
    """So many held permits of one lock, by number."""
    return [hold(locks, key, limit, task_id=f"t-{number}") for number in range(count)]


def queue(locks: redis.Redis, key: str = KEY, task_id: str = "t-2") -> Mark:
    """A marked key."""
    mark = Mark(key, task_id)
    mark_all(locks, [mark], dedupe="until_started", lease=600)
    return mark


def wait_in_line(locks: redis.Redis, task_id: str, since: float) -> None:
    """A task that waits for KEY."""
    park(locks, LineEntry(KEY, task_id, 0, remember=60), since=since, call="")


def fill(locks: redis.Redis, count: int) -> set[str]:
    """So many held locks, without a TTL, to be flushed; their keys."""
    deadline_us = int((time.time() + 600) * 1e6)
    keys = [key_name("t", "app.sync", digest([number])) for number in range(count)]
    record = f"id|0|ab\n{deadline_us}\n{deadline_us}\nrunning\n{deadline_us}\n{{}}"
    locks.mset(dict.fromkeys(keys, -(-deadline_us // 1_000_000)))
    locks.mset(dict.fromkeys(map(record_name, keys), record))
    return set(keys)


@contextmanager
def commands(locks: redis.Redis) -> Iterator[dict[str, int]]:
    """How often each command was called within the block."""
    called: dict[str, int] = {}
    locks.config_resetstat()
    yield called
    called.update({name[8:]: stat["calls"] for name, stat in locks.info("commandstats").items()})
    called.pop("config|resetstat", None)


@pytest.mark.parametrize(
    ("where", "process", "abandoned"),
    [
        (identity(), "alive", False),
        ({**identity(), "start": 0}, "dead", True),
        ({"host": "other", "pid": 7}, "unknown", False),
    ],
    ids=["alive", "dead", "elsewhere"],
)
def test_process_of_a_running_holder_is_known_on_its_own_host(locks, where, process, abandoned):
    """One that is surely dead has left its lock, though the lease runs; a lock that rests is not left."""
    held = hold(locks, **where)
    seen = look(locks, KEY)
    assert (seen.process, seen.is_abandoned, seen.is_stale) == (process, abandoned, False)
    assert (seen.holder.pid, seen.holder.as_dict()["pid"]) == (where["pid"], where["pid"])
    held.release(at_least_for=60)
    resting = look(locks, KEY)
    assert (resting.holder.state, resting.process, resting.is_abandoned) == ("resting", None, False)


def test_survey_sees_all_parts_of_a_lock_once(locks):
    """Lock, record, mark, line and tickets are one sighting; past its deadline it is stale."""
    held = hold(locks, worker="w@h")
    queue(locks)
    wait_in_line(locks, "t-3", time.time())
    wait_in_line(locks, "t-4", time.time())
    (seen,) = survey(locks, "t")
    assert (seen.key, seen.scope, seen.digest, seen.task) == (KEY, "app.sync", digest([7]), "app.sync")
    assert (seen.holder.token, seen.holder.fence, seen.holder.state) == (held.token, held.fence, "running")
    assert (seen.mark, seen.waiting, seen.is_stale) == ("t-2", 2, False)
    assert 500 < seen.mark_ends_s <= 600
    assert seen.remaining_s + seen.age_s == pytest.approx(30, abs=0.001)
    age(locks, KEY, 30)
    (seen,) = survey(locks, "t")
    assert (seen.is_stale, seen.holder.task_id) == (True, "t-1")
    assert seen.remaining_s <= 0


def test_survey_leaves_out_what_a_release_remembers(locks):
    """No locks, no sightings; a record alone is no lock, but says who had it last, deleted or released."""
    assert list(survey(locks, "t")) == []
    assert look(locks, KEY).last_holder is None
    held = hold(locks)
    assert look(locks, KEY).last_holder is None
    locks.delete(KEY)
    assert look(locks, KEY).last_holder.task_id == "t-1"
    held = hold(locks)
    held.release()
    assert locks.exists(record_name(KEY))
    assert list(survey(locks, "t")) == []
    last = look(locks, KEY).last_holder
    assert (last.task_id, last.state, last.fence) == ("t-1", "released", held.fence)


def test_survey_sees_a_mark_and_a_line_without_a_lock(locks):
    """A call that is queued, and one that waits for a free lock, are seen too."""
    queue(locks)
    (seen,) = survey(locks, "t")
    assert (seen.holder, seen.mark, seen.waiting) == (None, "t-2", 0)
    locks.delete(mark_name(KEY))
    wait_in_line(locks, "t-3", time.time())
    (seen,) = survey(locks, "t")
    assert (seen.holder, seen.mark, seen.waiting) == (None, None, 1)


@pytest.mark.parametrize("value", ["99999999999", "12", "maintenance"])
def test_survey_sees_a_foreign_lock(locks, foreign_keys, value):
    """A value set by redis-cli is a lock, of a foreigner; it is dropped as it was seen."""
    locks.set(KEY, value)
    foreign_keys.add(KEY)
    (seen,) = survey(locks, "t")
    assert (seen.holder.state, seen.holder.value, seen.task) == ("foreign", value, "app.sync")
    assert (seen.remaining_s is not None) == (value != "maintenance")
    assert seen.is_stale == (value == "12")
    assert drop(locks, seen)
    assert not locks.exists(KEY)


def test_survey_sees_a_key_that_is_no_string(locks):
    """Another program's hash in the lock's place is in the way, and is said to be no text."""
    locks.hset(KEY, "a", "b")
    locks.expire(KEY, 60)
    (seen,) = survey(locks, "t")
    assert (seen.holder.state, seen.holder.value) == ("foreign", "(not a string)")
    assert not drop(locks, seen)
    assert locks.exists(KEY)


def test_survey_survives_foreign_words_where_a_record_would_be(locks):
    """A record that is none makes the lock a foreigner's."""
    locks.set(KEY, int(time.time()) + 60, ex=60)
    locks.set(record_name(KEY), "not a record", ex=60)
    (seen,) = survey(locks, "t")
    assert seen.holder.state == "foreign"
    assert seen.last_holder is None


@pytest.mark.parametrize("prefix", ["t", "t*", "[t]", "t?", "a^b-c", "t\\t"])
def test_survey_keeps_to_its_prefix(locks, prefix):
    """Signs that mean something to SCAN mean themselves. The key of a whole task is its scope alone."""
    for name in ("t", "t*", "[t]", "t?", "a^b-c", "t\\t", "tt", "t:t"):
        hold(locks, f"{name}:{{app.sync}}")
    (seen,) = survey(locks, prefix)
    assert (seen.key, seen.scope, seen.digest) == (f"{prefix}:{{app.sync}}", "app.sync", "")


def test_survey_sees_the_permits_of_a_lock_as_one(locks):
    """One sighting with all who hold it, and how many may."""
    held = hold_many(locks, 3, limit=5)
    (seen,) = survey(locks, "t")
    assert (seen.key, seen.scope, seen.digest, seen.limit) == (KEY, "app.sync", digest([7]), 5)
    each = [(one.permit, one.token, one.fence) for one in held]
    assert [(one.permit, one.token, one.fence) for one in seen.holders] == each
    assert [one.permit for one in held] == [0, 1, 2]
    assert look(locks, KEY).holders == seen.holders
    assert [one.holder.task_id for one in seen.of_each()] == ["t-0", "t-1", "t-2"]


def test_survey_sees_a_permit_though_the_first_is_free(locks):
    """The lock itself may be free; when all are it is no sighting, though what is known of it stays."""
    first, second = hold_many(locks, 2, limit=3)
    first.release()
    (seen,) = survey(locks, "t")
    assert ([one.permit for one in seen.holders], seen.limit, seen.holder.task_id) == ([1], 3, "t-1")
    second.release()
    assert locks.exists(permits_name(KEY))
    assert list(survey(locks, "t")) == []
    assert look(locks, KEY).last_holder.task_id == "t-1"


def test_survey_sees_permits_beyond_a_limit_that_was_lowered(locks):
    """They are held until they are released; how many they are is not forgotten with `:permits`."""
    hold_many(locks, 3, limit=3)
    assert not SetnxLock(locks, KEY, limit=2).acquire().acquired
    (seen,) = survey(locks, "t")
    assert ([one.permit for one in seen.holders], seen.limit) == ([0, 1, 2], 2)
    assert [one.permit for one in seen.within.holders] == [0, 1]
    locks.delete(permits_name(KEY))
    (seen,) = survey(locks, "t")
    assert ([one.permit for one in seen.holders], seen.limit, seen.has_several) == ([0, 1, 2], 1, True)


@pytest.mark.parametrize(
    ("trouble", "first"),
    [(None, "t-0"), ("dead", "t-2"), ("foreign", None), ("stale and dead", "t-1")],
)
def test_holder_of_several_is_the_one_that_needs_a_look_first(locks, foreign_keys, trouble, first):
    """A lease that has ended, a dead process, a value that never ends, or else who has held for longest."""
    held = hold_many(locks, 2, limit=4)
    if trouble in ("dead", "stale and dead"):
        held.append(hold(locks, limit=4, task_id="t-2", **{**identity(), "start": 0}))
    if trouble == "foreign":
        foreign_keys.add(f"{KEY}#3")
        locks.set(f"{KEY}#3", "maintenance")
    if trouble == "stale and dead":
        age(locks, KEY, 30, living=[held[0].token, held[2].token])
    (seen,) = survey(locks, "t")
    assert seen.holder.task_id == first
    assert seen.is_abandoned == (trouble in ("dead", "stale and dead"))
    assert seen.is_stale == (trouble == "stale and dead")
    assert len(seen.holders) == (3 if trouble else 2)


def test_survey_sees_a_permit_that_is_no_string(locks):
    """Another program's hash in a permit's place is in the way of that permit alone."""
    hold(locks, limit=3)
    locks.hset(f"{KEY}#2", "a", "b")
    locks.expire(f"{KEY}#2", 60)
    for seen in (*survey(locks, "t"), look(locks, KEY)):
        told = [(one.permit, one.state, one.value == "(not a string)") for one in seen.holders]
        assert told == [(0, "running", False), (2, "foreign", True)]


@pytest.mark.parametrize(
    ("text", "limit"), [("999999999999 5", 5), ("-1 5", 1), ("0 0", 1), ("maintenance", 1), ("5", 1), ("", 1)]
)
def test_survey_survives_foreign_words_about_permits(locks, text, limit):
    """What is no number of permits says nothing of them; those that are there are seen."""
    hold_many(locks, 2, limit=2)
    locks.set(permits_name(KEY), text, ex=60)
    (seen,) = survey(locks, "t")
    assert ([one.permit for one in seen.holders], seen.limit) == ([0, 1], limit)


def test_survey_looks_at_each_lock_once():
    """One script each; once more, if it has more permits than are there. What it asks is little."""
    with EmbeddedServer() as own, redis.Redis(port=own.port, decode_responses=True) as locks:
        keys = sorted(fill(locks, 50))
        list(survey(locks, "t"))
        with commands(locks) as alone:
            assert len(list(survey(locks, "t"))) == 50
        once = {"scan": alone["scan"], "hgetall": 1}
        assert alone == {**once, "evalsha": 50, **dict.fromkeys(EACH, 50), "mget": 2 * 50}
        for key in keys[:2]:
            hold_many(locks, 2, limit=3, key=f"{key[:-4]}more}}")
        with commands(locks) as several:
            assert len(list(survey(locks, "t"))) == 52
        assert several["evalsha"] == 52 + 2


def test_look_touches_nothing(locks, limited):
    """Neither a key nor a TTL, be there what there may; a user who may only read may look."""
    start(locks, 2)
    hold_many(locks, 2, limit=3)
    queue(locks)
    wait_in_line(locks, "t-3", time.time())
    before = {key: (locks.dump(key), locks.expiretime(key)) for key in lock_keys(locks)}
    allowed = [f"+{name.lower()}" for name in (*COMMANDS, "SELECT")]
    with redis.Redis.from_url(limited("~t:*", *allowed)) as reader:
        seen = look(reader, KEY, terms=Terms(3, 2, 60.0), dedupe="until_started", waiters=9)
    assert (seen.duplicate, seen.original, seen.word) == ("queued", "t-2", "paced")
    assert [waiter.task_id for waiter in seen.waiters] == ["t-3"]
    assert {key: (locks.dump(key), locks.expiretime(key)) for key in lock_keys(locks)} == before


@pytest.mark.parametrize("limit", [1, 3])
def test_look_says_what_a_call_is_told(locks, limit):
    """The word that an acquire on the same terms is told."""
    for state in ("free", "held", "ended", "line"):
        locks.flushdb()
        if state != "free":
            held = hold_many(locks, limit, limit)
            for one in held if state == "line" else ():
                one.release()
        if state == "line":
            wait_in_line(locks, "t-3", time.time())
        if state == "ended":
            age(locks, KEY, 30)
        seen = look(locks, KEY, terms=Terms(limit))
        lock = SetnxLock(locks, KEY, limit=limit, mark=mark_name(KEY))
        word = verbs.acquire(lock, token="new").word
        assert seen.word == word == {"free": "acquired", "ended": "taken_over"}.get(state, state)


def test_look_by_a_dead_token_says_that_the_lock_is_taken_over(locks):
    """As an acquire that has proved the holder dead."""
    held = hold(locks)
    assert look(locks, KEY).word == "held"
    assert look(locks, KEY, dead=held.token).word == "taken_over"
    wait_in_line(locks, "t-3", time.time())
    assert look(locks, KEY, dead=held.token).word == "line"


@pytest.mark.parametrize(
    ("dedupe", "running", "done"),
    [("until_started", None, None), ("until_done", "running", None), ("dedupe_for", "running", "done")],
)
def test_look_says_of_which_call_it_would_be_a_duplicate(locks, dedupe, running, done):
    """What a publisher is told: queued, running, or done."""
    held = SetnxLock(locks, KEY, line=True).acquire(token="t-1|0|ab").lock
    seen = look(locks, KEY, dedupe=dedupe)
    assert (seen.duplicate, seen.original) == (running, running and "t-1")
    held.release(done_for=60)
    seen = look(locks, KEY, dedupe=dedupe)
    assert (seen.duplicate, seen.original) == (done, done and "t-1")
    assert (seen.done, seen.done_by) == ("t-1|0|ab", "t-1")
    queue(locks)
    seen = look(locks, KEY, dedupe=dedupe)
    assert (seen.duplicate, seen.original) == ("queued", "t-2")
    assert look(locks, KEY).duplicate is None


def start(locks: redis.Redis, count: int, limit: int = 1, rate: tuple[int, float] = (2, 60)) -> None:
    """So many calls that have started and ended."""
    for _ in range(count):
        SetnxLock(locks, KEY, info={"task": "app.sync"}, limit=limit, rate=rate).acquire().lock.release()


@pytest.mark.parametrize("count", [1, 2])
def test_survey_sees_the_starts_of_a_free_lock(locks, count):
    """How many there were of how many there may be, and when the next may be."""
    start(locks, count)
    for seen in (*survey(locks, "t"), look(locks, KEY)):
        assert (seen.key, seen.holder, seen.mark, seen.waiting) == (KEY, None, None, 0)
        assert (seen.terms, seen.limit, seen.started) == (Terms(1, 2, 60.0), 1, count)
        assert seen.is_paced == (count == 2)
        first = locks.zrange(starts_name(KEY), 0, 0, withscores=True)[0][1] / 1e6
        assert seen.next_start == (pytest.approx(first + 60, abs=1e-5) if count == 2 else None)
    assert len(list(survey(locks, "t"))) == 1


def test_next_start_that_is_seen_is_that_which_a_refused_call_is_told(locks):
    """With one permit and with several, and as the window moves on."""
    for rate in ((2, 60.0), (3, 60.0)):
        start(locks, 1, rate=rate)
        age(locks, KEY, 20)
        start(locks, rate[0] - 1, limit=3, rate=rate)
        seen, told = look(locks, KEY), SetnxLock(locks, KEY, limit=3, rate=rate).acquire()
        assert told.paced
        assert seen.next_start == pytest.approx(told.server_time + told.remaining_s, abs=1e-3)
        age(locks, KEY, 41)  # the first one counts no more
        seen = look(locks, KEY)
        assert (seen.next_start, seen.started) == (None, rate[0] - 1)
        locks.flushdb()


def test_lock_that_is_held_is_not_paced_though_its_pace_allows_no_start(locks):
    """Its holder is in the way, until it has released; with several permits nobody is where one is free."""
    start(locks, 1)
    held = SetnxLock(locks, KEY, rate=(2, 60)).acquire().lock
    seen = look(locks, KEY)
    assert (seen.is_paced, seen.next_start is None, seen.started) == (False, False, 2)
    held.release()
    assert look(locks, KEY).is_paced
    assert look(locks, KEY, terms=Terms(1, 5, 60.0)).next_start is None  # a call that may start more often
    assert look(locks, KEY, terms=PLAIN).next_start is None
    locks.flushdb()
    several = [SetnxLock(locks, KEY, limit=3, rate=(2, 60)).acquire().lock for _ in range(2)]
    assert look(locks, KEY).is_paced
    assert several[1].permit == 1


def test_call_to_which_a_permit_is_handed_counts_as_a_start(locks):
    """It is about to; if no start is left but that one, the next may be as soon as it has been."""
    start(locks, 1, limit=2)
    park(locks, LineEntry(KEY, "t-9", 0, remember=60, terms=Terms(2, 2, 60.0)), since=time.time(), call="")
    assert serve(SetnxLock(locks, KEY, limit=2, line=True, rate=(2, 60)), knows_terms=True).heir is not None
    seen, told = look(locks, KEY), SetnxLock(locks, KEY, limit=2, rate=(2, 60)).acquire()
    assert [holder.state for holder in seen.holders] == ["handed"]
    assert (seen.started, told.paced) == (2, True)
    assert seen.next_start == pytest.approx(told.server_time + told.remaining_s, abs=1e-3)


def test_next_start_is_soon_where_no_start_is_left_but_that_of_who_is_woken(locks):
    """That one may not come: then somebody else may start."""
    park(locks, LineEntry(KEY, "t-9", 0, remember=60, terms=Terms(2, 1, 60.0)), since=time.time(), call="")
    lock = SetnxLock(locks, KEY, limit=2, line=True, rate=(1, 60))
    assert serve(lock, knows_terms=True).heir is not None
    seen, told = look(locks, KEY), SetnxLock(locks, KEY, limit=2, rate=(1, 60)).acquire()
    assert (seen.started, told.paced) == (1, True)
    assert seen.next_start - seen.server_time == pytest.approx(told.remaining_s) == pytest.approx(1.0)


def test_start_that_is_later_than_now_is_none(locks):
    """The clock was set back: scripts drop it."""
    start(locks, 2)
    locks.zadd(starts_name(KEY), {"later": server_us(locks) + 3600e6})
    seen = look(locks, KEY)
    assert seen.started == 2
    assert 0 < seen.next_start - seen.server_time <= 60


@pytest.mark.parametrize("protocol", [2, 3])
@pytest.mark.parametrize("decode", [True, False], ids=["text", "bytes"])
def test_look_is_read_whatever_a_reply_looks_like(server, locks, protocol, decode):
    """As text or as bytes, by either protocol."""
    start(locks, 2)
    hold(locks)
    with redis.Redis.from_url(server.url(1), protocol=protocol, decode_responses=decode) as client:
        assert look(client, KEY)._replace(server_time=0.0) == look(locks, KEY)._replace(server_time=0.0)
        assert look(client, KEY).started == 2


@pytest.mark.parametrize("forget", ["permits", "kind"])
def test_survey_survives_starts_of_which_it_knows_no_pace(locks, forget):
    """`:permits` may lapse before them; another program may have a key of that name."""
    start(locks, 2)
    locks.delete(permits_name(KEY) if forget == "permits" else starts_name(KEY))
    if forget == "kind":
        locks.set(starts_name(KEY), "7", ex=60)
    assert [seen.key for seen in survey(locks, "t")] == ([KEY] if forget == "permits" else [])
    seen = look(locks, KEY)
    assert (seen.next_start, seen.is_paced) == (None, False)
    if forget == "permits":
        assert look(locks, KEY, terms=Terms(1, 2, 60.0)).is_paced


def test_starts_that_were_seen_are_forgotten(locks):
    """Those that came later count on."""
    start(locks, 2, rate=(3, 60))
    seen = look(locks, KEY)
    start(locks, 1, rate=(3, 60))
    assert forget_starts(locks, seen) == 2
    assert (look(locks, KEY).started, locks.zcard(starts_name(KEY))) == (1, 1)
    assert forget_starts(locks, seen) == 0
    assert forget_starts(locks, Sighting(KEY)) == 0


@pytest.mark.slow
def test_survey_of_20_000_locks_takes_few_round_trips(monkeypatch):
    """Each lock once, by SCAN and by a script, a thousand in a round trip; never KEYS."""
    asked: list[int] = []
    with EmbeddedServer() as own, redis.Redis(port=own.port, decode_responses=True) as locks:
        keys = fill(locks, 20_000)
        look(locks, KEY)
        many = Script.many

        def counted(script: Script, client: Any, calls: Any) -> Any:
            if client is locks:  # others are renewed meanwhile
                asked.append(len(calls))
            return many(script, client, calls)

        monkeypatch.setattr(Script, "many", counted)
        with commands(locks) as called:
            seen = [sighting.key for sighting in survey(locks, "t")]
    assert len(seen) == len(keys)
    assert set(seen) == keys
    assert asked == [BATCH] * (len(keys) // BATCH)
    assert called["evalsha"] == len(keys)
    assert "keys" not in called
    assert called["scan"] < 3 * 2 * len(keys) / BATCH


def test_survey_sees_each_lock_once_while_the_server_rehashes(locks):
    """SCAN may name a key twice when tables grow meanwhile."""
    keys = fill(locks, 3000)
    found = survey(locks, "t")
    first = next(found)
    locks.mset({f"other:{number}": "" for number in range(20_000)})
    seen = [first.key, *(sighting.key for sighting in found)]
    assert len(seen) == len(set(seen))
    assert set(seen) == keys
    locks.flushdb()


def test_waiters_come_in_the_order_of_the_line(locks):
    """Who has waited longest is first."""
    now = time.time()
    wait_in_line(locks, "second", now - 5)
    wait_in_line(locks, "first", now - 9)
    found = [
        (waiter.place, waiter.task_id, round(waiter.age_s)) for waiter in look(locks, KEY, waiters=9).waiters
    ]
    assert found == [(1, "first", 9), (2, "second", 5)]
    assert locks.zcard(line_names(KEY)[0]) == 2


def test_take_over_is_known_for_as_long_as_it_is_kept(locks):
    """The note has a TTL, is no lock, and is found again as it was."""
    assert last_take_over(locks, KEY) is None
    noted = TakeOver(1.5, "app.sync[t-2]", {"task_id": "t-1"})
    note_take_over(locks, KEY, noted, 60)
    assert last_take_over(locks, KEY) == noted
    assert 0 < locks.pttl(take_over_name(KEY)) <= 60_000
    assert list(survey(locks, "t")) == []
    note_take_over(locks, KEY, TakeOver(2.5, "app.sync[t-3]", {}), 0)  # nothing is kept
    assert last_take_over(locks, KEY) == noted


@pytest.mark.parametrize("words", ["no json", "7", '{"at": 1}'])
def test_take_over_in_other_words_is_none(locks, words):
    """What another program, or a newer version, has put there is not understood, and no error."""
    locks.set(take_over_name(KEY), words, ex=60)
    assert last_take_over(locks, KEY) is None


def test_drop_deletes_lock_and_record(locks):
    """Nothing is left but what is not the lock's: its mark."""
    held = hold(locks)
    queue(locks)
    assert drop(locks, look(locks, KEY))
    assert lock_keys(locks) == {mark_name(KEY)}
    assert held.release() == "lost"


def test_drop_compares_bytes(server, locks):
    """What another program has written may be no text, and stays if it has written since."""
    with redis.Redis.from_url(server.url(LOCK_DB)) as client:
        client.set(KEY, b"\xff\xfe", ex=60)
        seen = look(client, KEY)
        client.set(KEY, b"\xff\xff", ex=60)
        assert not drop(client, seen)
        client.set(KEY, b"\xff\xfe", ex=60)
        assert drop(client, seen)
    assert not locks.exists(KEY)


def test_drop_deletes_nothing_if_the_record_has_changed(locks):
    """The value may be the next holder's by chance."""
    hold(locks)
    seen = look(locks, KEY)
    locks.append(record_name(KEY), "x")
    assert not drop(locks, seen)
    assert locks.exists(KEY, record_name(KEY)) == 2


def test_drop_deletes_the_permit_that_was_seen(locks):
    """That of the holder, with its record, and no other; what is known of the permits stays."""
    first, second = hold_many(locks, 2, limit=2)
    of_first, of_second = look(locks, KEY).of_each()
    assert drop(locks, of_second)
    assert [one.permit for one in look(locks, KEY).holders] == [0]
    assert not locks.exists(*permit_names(KEY, 1))
    first.renew()
    assert second.release() == "lost"
    assert not drop(locks, of_first)
    assert locks.exists(permits_name(KEY))


def test_drop_does_nothing_to_another_lock_than_was_seen(locks):
    """Renewed since it is kept, the next holder's is left alone, a free one is nothing to drop."""
    assert not drop(locks, look(locks, KEY))
    held = hold(locks)
    seen = look(locks, KEY)
    held.renew()
    assert not drop(locks, seen)
    held.renew()
    age(locks, KEY, 30)
    seen = look(locks, KEY)
    assert seen.is_stale
    next_one = hold(locks)
    assert not drop(locks, seen)
    next_one.renew()


def test_drop_leaves_a_lock_that_has_become_another_program_s_or_ours(locks, foreign_keys):
    """A foreign value of this very second, seen before, is not the lock that is ours by now."""
    locks.set(KEY, "1", ex=60)
    seen = look(locks, KEY)
    locks.delete(KEY)
    held = hold(locks)
    locks.set(KEY, "1", keepttl=True)  # as a holder's value may come to be: that of a second which was seen
    assert not drop(locks, seen)
    assert locks.exists(KEY, record_name(KEY)) == 2
    assert held.release() == "repaired"


def test_drop_of_a_foreign_lock_takes_the_record_beside_it(locks):
    """What was seen there would refuse each call."""
    locks.set(KEY, "1", ex=60)
    locks.set(record_name(KEY), "garbage", ex=60)
    assert look(locks, KEY).word == "refused"
    with pytest.raises(LockRefused):
        SetnxLock(locks, KEY).acquire()
    assert drop(locks, look(locks, KEY))
    assert look(locks, KEY).word == "acquired"
    assert SetnxLock(locks, KEY).acquire().acquired


@pytest.mark.parametrize("text", ["1 3/4", "1 3:4/5/6", "1 3:5/", "1 3:0/5", f"1 {'9' * 50}"])
def test_words_about_permits_that_are_nearly_ours_say_nothing(locks, text):
    """No look fails by them, and newcomers have the lock on plain terms."""
    hold(locks)
    locks.set(permits_name(KEY), text, ex=60)
    (seen,) = survey(locks, "t")
    assert (seen.terms, seen.word) == (PLAIN, "held")


def test_look_without_the_right_to_see_starts_is_refused(locks, limited):
    """Not told that a call may start which may not."""
    start(locks, 2)
    allowed = [f"+{name.lower()}" for name in (*COMMANDS, "SELECT") if name != "ZREVRANGE"]
    reader = redis.Redis.from_url(limited("~t:*", *allowed))
    with reader, pytest.raises(LockForbidden, match=r"(?i)zrevrange"):
        look(reader, KEY)


def test_text_that_is_no_utf_8_is_seen_and_dropped(server, locks, foreign_keys):
    """It can be printed; what is dropped are the bytes that were seen."""
    locks.set(KEY, b"\xff\xfe")
    foreign_keys.add(KEY)
    with redis.Redis.from_url(server.url(1)) as client:
        seen = look(client, KEY)
        assert seen.holder.value.encode()
        locks.set(KEY, b"\xfe\xff")
        assert not drop(client, seen)
        assert drop(client, look(client, KEY))
    assert not locks.exists(KEY)
