"""What a survey sees, how few commands it takes, and that a lock dropped by hand is the one that was seen."""

import time
from typing import Any

import pytest
import redis

from celery_setnx.keys import digest
from celery_setnx.lock.line import Place, park
from celery_setnx.lock.lock import SetnxLock
from celery_setnx.lock.marks import Mark, mark_all
from celery_setnx.lock.names import key_name, line_names, mark_name, record_name, take_over_name
from celery_setnx.lock.process import identity
from celery_setnx.lock.survey import BATCH, NOT_TEXT, drop, last_holder, look, survey, waiters
from celery_setnx.lock.takeover import TakeOver, last_take_over, note_take_over
from examples.embedded import EmbeddedServer
from tests.harness import age, lock_keys

KEY = key_name("t", "app.sync", digest([7]))


def hold(locks: redis.Redis, key: str = KEY, **info: Any) -> Any:
    """A held lock."""
    return SetnxLock(locks, key, info={"task": "app.sync", "task_id": "t-1", **info}).acquire().lock


def queue(locks: redis.Redis, key: str = KEY, task_id: str = "t-2") -> Mark:
    """A marked key."""
    mark = Mark(key, task_id)
    mark_all(locks, [mark], dedupe="until_started", lease=600)
    return mark


def wait_in_line(locks: redis.Redis, task_id: str, since: float) -> None:
    """A task that waits for KEY."""
    park(locks, Place(KEY, task_id, 0, remember=60), since=since, call="")


def fill(locks: redis.Redis, count: int) -> set[str]:
    """So many held locks, without a TTL, to be flushed; their keys."""
    deadline_us = int((time.time() + 600) * 1e6)
    keys = [key_name("t", "app.sync", digest([number])) for number in range(count)]
    record = f"id|0|ab\n{deadline_us}\n{deadline_us}\nrunning\n{deadline_us}\n{{}}"
    locks.mset(dict.fromkeys(keys, -(-deadline_us // 1_000_000)))
    locks.mset(dict.fromkeys(map(record_name, keys), record))
    return set(keys)


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
    assert held is not None
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
    assert last_holder(look(locks, KEY)) is None
    held = hold(locks)
    assert last_holder(look(locks, KEY)) is None
    locks.delete(KEY)
    assert last_holder(look(locks, KEY)).task_id == "t-1"
    held = hold(locks)
    held.release()
    assert locks.exists(record_name(KEY))
    assert list(survey(locks, "t")) == []
    last = last_holder(look(locks, KEY))
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
    assert (seen.holder.state, seen.holder.value) == ("foreign", NOT_TEXT)
    assert not drop(locks, seen)
    assert locks.exists(KEY)


def test_survey_survives_foreign_words_where_a_record_would_be(locks):
    """A record that is none makes the lock a foreigner's."""
    locks.set(KEY, int(time.time()) + 60, ex=60)
    locks.set(record_name(KEY), "not a record", ex=60)
    (seen,) = survey(locks, "t")
    assert seen.holder.state == "foreign"
    assert last_holder(seen) is None


@pytest.mark.parametrize("prefix", ["t", "t*", "[t]", "t?", "a^b-c", "t\\t"])
def test_survey_keeps_to_its_prefix(locks, prefix):
    """Signs that mean something to SCAN mean themselves. The key of a whole task is its scope alone."""
    for name in ("t", "t*", "[t]", "t?", "a^b-c", "t\\t", "tt", "t:t"):
        hold(locks, f"{name}:{{app.sync}}")
    (seen,) = survey(locks, prefix)
    assert (seen.key, seen.scope, seen.digest) == (f"{prefix}:{{app.sync}}", "app.sync", "")


@pytest.mark.slow
def test_survey_of_20_000_locks_takes_few_commands():
    """Each lock once, by SCAN and MGET in batches; never KEYS, and nothing per lock."""
    with EmbeddedServer() as own, redis.Redis(port=own.port, decode_responses=True) as locks:
        keys = fill(locks, 20_000)
        locks.config_resetstat()
        seen = [sighting.key for sighting in survey(locks, "t")]
        called = {name[8:]: stat["calls"] for name, stat in locks.info("commandstats").items()}
    assert len(seen) == len(keys)
    assert set(seen) == keys
    assert called["mget"] == len(keys) / BATCH
    assert "keys" not in called
    assert sum(count for name, count in called.items() if name != "scan") < 100
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
    found = [(waiter.place, waiter.task_id, round(waiter.age_s)) for waiter in waiters(locks, KEY, now)]
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
