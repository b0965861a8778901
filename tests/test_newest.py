"""The newest call of a key, as its callers see it: reserved, sent, started, ended without a start.

Redis only.
"""

from typing import Any

import pytest
import redis

from celery_setnx import LockUnavailable, SetnxLock
from celery_setnx.lock.line import LineEntry, park
from celery_setnx.lock.look import look
from celery_setnx.lock.marks import Mark, extend_all, free_all
from celery_setnx.lock.names import line_names, newest_name
from celery_setnx.lock.newest import (
    MOST,
    Debounce,
    Ending,
    Reservation,
    Wanted,
    drop_all,
    newest_of,
    replace_all,
    reserve_all,
)
from celery_setnx.lock.outcome import Outcome
from celery_setnx.lock.record import ORIGINAL, task_token
from celery_setnx.lock.verbs import Caller, Generation
from tests.harness import age, server_us

KEY = "t:{newest}"
NAME = newest_name(KEY)
REMEMBER = 600.0
FIELDS = (
    *("reserved", "settled", "started", "first", "last", "due", "superseded", "parked"),
    *("parked_as", "replaced", "digest", "task"),
)


def record(**fields: Any) -> str:
    """What is known, as the scripts write it."""
    return "\n".join(str(fields.get(name, "" if name in FIELDS[8:] else 0)) for name in FIELDS)


def known(client: redis.Redis) -> dict[str, Any]:
    """What is known of the newest call, by name."""
    found = dict(zip(FIELDS, str(client.get(NAME)).split("\n")))
    return {name: value if name in FIELDS[8:] else int(value) for name, value in found.items()}


def reserve(client: redis.Redis, task_id: str = "a", digest: str = "", **debounce: Any) -> Reservation:
    """What a publisher does before it sends."""
    wanted, told = (
        [Wanted(KEY, task_id, digest)],
        {"debounce": Debounce(**debounce), "lease": REMEMBER, "remember": REMEMBER},
    )
    (found,) = reserve_all(client, wanted, **told)
    assert isinstance(found, Reservation), found
    return found


def settle(client: redis.Redis, *calls: Reservation, remember: float = REMEMBER) -> None:
    """What a publisher does after it has sent."""
    assert replace_all(client, calls, remember) == [None] * len(calls)


def sent(client: redis.Redis, task_id: str = "a", digest: str = "", **debounce: Any) -> Reservation:
    """A call that was sent."""
    call = reserve(client, task_id, digest, **debounce)
    settle(client, call)
    return call


def lock(client: redis.Redis) -> SetnxLock:
    return SetnxLock(client, KEY, mark=NAME, line=True, lease=REMEMBER)


def start(client: redis.Redis, call: Any, **caller: Any) -> Outcome:
    """What a worker does."""
    newest = Generation(call.generation, 60.0, call.leads, REMEMBER)
    token = task_token(call.task_id, 0, "ab")
    return lock(client).acquire(token=token, caller=Caller(newest=newest, **caller))


def run(client: redis.Redis, call: Reservation) -> None:
    """A call that has started and ended."""
    outcome = start(client, call)
    assert outcome.lock is not None
    assert outcome.lock.release() == "released"


def end(client: redis.Redis, call: Reservation, last_s: float | None = None) -> bool:
    """Whether a call that ends without a start, or waits on, was still to start."""
    (found,) = drop_all(client, [Ending(KEY, call.task_id, call.generation, last_s)])
    assert isinstance(found, bool), found
    return found


def wait(client: redis.Redis, call: Reservation, since: float) -> Any:
    """A call that parks."""
    place = LineEntry(KEY, call.task_id, 0, 6000.0, generation=call.generation)
    return park(client, place, copy=ORIGINAL, since=since, call=f"wake {call.task_id}")


# Generations.


def test_generations_grow_from_the_servers_clock(locks):
    """Each is larger than all before; the first is the time in microseconds."""
    before = server_us(locks)
    found = [reserve(locks).generation for _call in range(50)]
    assert before <= found[0] < found[-1] <= MOST
    assert sorted(set(found)) == found


@pytest.mark.parametrize("name", ["reserved", "settled", "started"])
def test_generations_grow_past_a_clock_that_has_gone_back(locks, name):
    """What is known may be from a future, of a clock or of a publisher: it is grown past."""
    future = server_us(locks) + 3600 * 10**6
    locks.set(NAME, record(**{name: future}), px=600_000)
    assert [reserve(locks).generation for _call in range(2)] == [future + 1, future + 2]


def test_many_reservations_take_one_round_trip_each_of_its_key(locks):
    """Of two calls of one key the second has the larger generation."""
    wanted = [Wanted("t:{x}", "a", ""), Wanted("t:{y}", "b", ""), Wanted("t:{x}", "c", "")]
    a, b, c = reserve_all(locks, wanted, debounce=Debounce(), lease=60, remember=60)
    assert [a.task_id, b.task_id, c.task_id] == ["a", "b", "c"]
    assert a.generation < c.generation


def test_what_is_reserved_and_not_sent_replaces_nobody(locks):
    """Its publisher has died: the calls before it start."""
    call = sent(locks)
    reserve(locks, "b")
    assert start(locks, call).acquired


def test_call_that_was_sent_replaces_those_before_it(locks):
    """They are told by whom, however many there are."""
    calls = [sent(locks, task_id) for task_id in "abc"]
    assert [start(locks, call).superseded_by for call in calls[:2]] == ["c", "c"]
    assert start(locks, calls[2]).acquired


def test_settling_only_raises(locks):
    """Publishers are late in any order: the newest stays the newest."""
    a, b = reserve(locks, "a"), reserve(locks, "b")
    settle(locks, b, a, b)
    assert (known(locks)["settled"], known(locks)["task"]) == (b.generation, "b")
    assert start(locks, a).superseded_by == "b"


def test_call_replaces_those_before_it_by_its_start(locks):
    """Its publisher has not said yet that it was sent."""
    a, b = sent(locks, "a"), reserve(locks, "b")
    run(locks, b)
    assert start(locks, a).superseded_by == "b"


@pytest.mark.parametrize("task_id", ["a", "b"])
def test_late_settle_changes_nothing_at_or_below_what_has_started(locks, task_id):
    """A reply or a publisher that is late takes nothing back."""
    calls = {each: reserve(locks, each) for each in "ab"}
    run(locks, calls["b"])
    before = locks.get(NAME)
    settle(locks, calls[task_id])
    assert locks.get(NAME) == before


def test_start_begins_the_count_anew(locks):
    """How many were superseded, and since when one waits, is counted from the last start."""
    for task_id in "abc":
        last = sent(locks, task_id)
    assert (known(locks)["superseded"], known(locks)["first"] > 0) == (2, True)
    run(locks, last)
    assert (known(locks)["superseded"], known(locks)["first"]) == (0, 0)


def test_message_that_comes_twice_starts_twice(locks):
    """A newer start supersedes; its own does not."""
    call = sent(locks)
    run(locks, call)
    run(locks, call)


def test_older_call_never_starts_after_a_newer_one(locks):
    """Though the newer one has ended long ago, and nobody has been in time to say that it was sent."""
    older, newer = sent(locks, "a"), reserve(locks, "b")
    run(locks, newer)
    age(locks, KEY, REMEMBER / 2)
    assert start(locks, older).superseded_by == "b"


# What waits.


def test_older_call_that_would_have_to_wait_is_superseded_at_once(locks):
    """However long newer ones have waited: it is no use in line."""
    older = sent(locks, "a")
    sent(locks, "b")
    age(locks, KEY, 100)
    assert lock(locks).acquire().acquired
    assert start(locks, older).superseded_by == "b"


def test_call_starts_though_newer_ones_wait_if_none_has_started_for_its_bound(locks):
    """A key that is published all the time would starve else. The newest has its turn afterwards."""
    older, newer = sent(locks, "a"), sent(locks, "b")
    age(locks, KEY, 59)
    assert start(locks, older).superseded_by == "b"
    age(locks, KEY, 2)
    run(locks, older)
    assert start(locks, newer).acquired


def test_only_one_starts_past_the_bound(locks):
    """After its start the others are superseded again."""
    a, b, c = (sent(locks, task_id) for task_id in "abc")
    age(locks, KEY, 61)
    run(locks, b)
    assert start(locks, a).superseded_by == "c"
    assert start(locks, c).acquired


def test_call_that_runs_is_not_superseded(locks):
    """Asked again, or delivered again, it has the lock, or finds it held by itself."""
    call = sent(locks)
    assert start(locks, call).acquired
    sent(locks, "b")
    assert start(locks, call).acquired
    token = task_token(call.task_id, 0, "cd")
    told = Caller(newest=Generation(call.generation, 60.0, False, REMEMBER))
    assert lock(locks).acquire(token=token, caller=told).holder.task_id == "a"


def test_call_without_a_generation_neither_replaces_nor_is_replaced(locks):
    """It starts beside the newest, and leaves what is known as it is."""
    sent(locks, "b")
    before = locks.get(NAME)
    outcome = SetnxLock(locks, KEY, line=True).acquire(token=task_token("a", 0, "ab"))
    assert outcome.acquired
    assert locks.get(NAME) == before


def test_call_that_must_wait_replaces_those_before_it(locks):
    """Its publisher has not said yet that it was sent, and it is there."""
    older, newer = sent(locks, "a"), reserve(locks, "b")
    held = lock(locks).acquire().lock
    assert start(locks, newer).holder is not None
    held.release()
    assert start(locks, older).superseded_by == "b"


def test_newer_call_that_parks_takes_the_place_of_an_older_one(locks):
    """The older one is named: it is woken, to end."""
    assert lock(locks).acquire().acquired
    older, other, newer = sent(locks, "a"), reserve(locks, "x"), reserve(locks, "b")
    assert wait(locks, older, since=10.0).older is None
    locks.zadd(line_names(KEY)[0], {"between": 15_000_000})
    settle(locks, newer)
    assert wait(locks, other, since=17.0).state == "superseded"
    found = wait(locks, newer, since=20.0)
    assert (found.older, found.place) == ("a", 1)
    assert list(locks.zrange(line_names(KEY)[0], 0, -1)) == ["b", "between", "a"]
    assert wait(locks, older, since=10.0).state == "superseded"


def test_call_that_parks_again_wakes_nobody(locks):
    """A courier asks for a call that stands in line already."""
    assert lock(locks).acquire().acquired
    call = sent(locks)
    assert [wait(locks, call, since=10.0).older for _time in range(2)] == [None, None]


# Ends without a start.


def test_call_that_ends_without_a_start_counts_as_started(locks):
    """Older ones do not start in its place; it is pending no more."""
    older, newest = sent(locks, "a"), sent(locks, "b", digest="d")
    assert end(locks, newest)
    assert look(locks, KEY).newest is None
    assert start(locks, older).superseded_by == "b"
    assert reserve(locks, "c", digest="d").state == "marked"


def test_older_call_that_ends_leaves_the_newest(locks):
    """What ends does so at its own place."""
    older, newest = sent(locks, "a"), sent(locks, "b")
    assert end(locks, older)
    assert look(locks, KEY).newest.task_id == "b"
    assert start(locks, newest).acquired


def test_end_of_what_has_started_changes_nothing(locks):
    """Nor does that of a call of which nothing is known."""
    call = sent(locks)
    run(locks, call)
    before = locks.get(NAME)
    assert not end(locks, call)
    assert locks.get(NAME) == before
    locks.delete(NAME)
    assert not end(locks, call)
    assert not locks.exists(NAME)


def test_mark_with_a_generation_is_what_is_known_of_the_newest(locks):
    """Extended it lasts longer; freed its call counts as started."""
    older, newest = sent(locks, "a"), sent(locks, "b")
    mark = Mark(KEY, "b", newest.generation)
    assert mark.name == NAME
    assert extend_all(locks, [mark], [3600]) is None
    assert locks.pttl(NAME) > 3_500_000
    assert free_all(locks, [mark]) is None
    assert start(locks, older).superseded_by == "b"


# How long it is known.


def test_what_is_known_never_lasts_shorter(locks):
    """Whoever remembers for less leaves the time as it is."""
    call = reserve(locks)
    settle(locks, call, remember=6000)
    reserve(locks, "b")
    settle(locks, call, remember=5)
    assert end(locks, call, last_s=5)
    assert end(locks, call)
    assert 5_900_000 < locks.pttl(NAME) <= 6_000_000


def test_call_that_waits_keeps_what_is_known_for_longer(locks):
    """It says for how long at least."""
    call = sent(locks)
    assert end(locks, call, last_s=6000)
    assert 5_900_000 < locks.pttl(NAME) <= 6_000_000


def test_what_is_known_lasts_from_the_start_on(locks):
    """A message that comes late finds that a newer call has started."""
    call = sent(locks)
    locks.pexpire(NAME, 5_000)
    run(locks, call)
    assert locks.pttl(NAME) > 590_000


# Duplicates.


def test_call_is_a_duplicate_if_it_equals_the_newest_that_has_not_started(locks):
    """In all its arguments: it gets that one's id."""
    first = sent(locks, "a", digest="d")
    found = reserve(locks, "b", digest="d")
    assert (found.is_duplicate, found.state, found.task_id) == (True, "queued", "a")
    assert found.generation == first.generation
    assert not reserve(locks, "b", digest="e").is_duplicate


@pytest.mark.parametrize(
    "between",
    [
        pytest.param(lambda locks, first: run(locks, first), id="started"),
        pytest.param(lambda locks, first: end(locks, first), id="ended"),
        pytest.param(lambda locks, first: sent(locks, "b", digest="e"), id="newer-sent"),
        pytest.param(lambda locks, first: reserve(locks, "b", digest="e"), id="newer-reserved"),
    ],
)
def test_equal_call_is_no_duplicate_after_what_may_have_come_between(locks, between):
    """A, B, A: the last A is sent, or B would be the newest."""
    first = sent(locks, "a", digest="d")
    between(locks, first)
    assert not reserve(locks, "c", digest="d").is_duplicate


def test_call_whose_arguments_have_no_digest_is_no_duplicate(locks):
    """Nobody can say that two of them are equal."""
    sent(locks, "a")
    assert not reserve(locks, "b").is_duplicate


def test_call_that_only_its_worker_has_told_of_has_no_equals(locks):
    """Until its publisher says with which arguments it was sent."""
    assert lock(locks).acquire().acquired
    call = reserve(locks, "a", digest="d")
    assert start(locks, call).holder is not None
    assert not reserve(locks, "b", digest="d").is_duplicate


# Debounce.


def test_debounced_call_is_due_after_the_quiet_time(locks):
    """Each call begins it anew, an equal one too."""
    found = [sent(locks, task_id, digest="d", quiet_s=5, most_s=60) for task_id in "ab"]
    assert [(call.is_duplicate, call.wait_s, call.leads) for call in found] == [(False, 5.0, False)] * 2
    assert look(locks, KEY).newest.due_in_s == pytest.approx(5, abs=1)
    assert known(locks)["due"] == round(found[1].due * 1e6)


def test_debounced_call_is_due_at_most_so_long_after_the_first(locks):
    """What is left of it shrinks with time, to nothing."""
    for task_id in "abc":  # each is published before the one before it is due
        assert sent(locks, task_id, quiet_s=20, most_s=60).wait_s == 20
        age(locks, KEY, 19)
    assert sent(locks, "d", quiet_s=20, most_s=60).wait_s == pytest.approx(3, abs=1)
    age(locks, KEY, 4)
    assert sent(locks, "e", quiet_s=20, most_s=60).wait_s == 0


def test_longest_time_begins_anew_after_a_start(locks):
    """With the next call."""
    call = sent(locks, "a", quiet_s=5, most_s=60)
    age(locks, KEY, 59)
    run(locks, call)
    assert sent(locks, "b", quiet_s=5, most_s=60).wait_s == 5


LEADING = {"quiet_s": 5, "most_s": 60, "leads": True}


def test_first_call_of_a_quiet_key_leads(locks):
    """It waits for nothing; those after it wait, and do not supersede it before they have started."""
    first, second = sent(locks, "a", **LEADING), sent(locks, "b", **LEADING)
    assert [(call.leads, call.wait_s) for call in (first, second)] == [(True, 0.0), (False, 5.0)]
    run(locks, first)
    assert start(locks, second).acquired


def test_newer_start_supersedes_one_that_leads(locks):
    """A message that comes late is older data."""
    first, second = sent(locks, "a", **LEADING), sent(locks, "b", **LEADING)
    run(locks, second)
    assert start(locks, first).superseded_by == "b"


@pytest.mark.parametrize(
    "before",
    [
        pytest.param(lambda locks: sent(locks, "a", **LEADING), id="waits"),
        pytest.param(lambda locks: reserve(locks, "a", **LEADING), id="reserved"),
        pytest.param(lambda locks: run(locks, sent(locks, "a", **LEADING)), id="started"),
    ],
)
def test_no_call_leads_where_the_key_is_not_quiet(locks, before):
    """A call waits, or is about to be sent, or there was one within the quiet time."""
    before(locks)
    assert not reserve(locks, "b", **LEADING).leads


def test_key_is_quiet_again_after_the_quiet_time(locks):
    """If nothing waits."""
    run(locks, sent(locks, "a", **LEADING))
    age(locks, KEY, 6)
    assert reserve(locks, "b", **LEADING).leads


# What is told of it.


def test_look_tells_of_the_newest_and_of_how_many_it_has_replaced(locks):
    """Which call, when it is due, and for how long that is known; nothing once it has started."""
    for task_id in "abc":
        last = sent(locks, task_id, quiet_s=5, most_s=60)
    seen = look(locks, KEY)
    assert (seen.newest.task_id, seen.newest.generation) == ("c", last.generation)
    assert (seen.newest.superseded, seen.queued) == (2, "c")
    assert seen.newest.lapses_in_s == pytest.approx(REMEMBER, abs=10)
    run(locks, last)
    assert look(locks, KEY).newest is None


@pytest.mark.parametrize(
    "text",
    [None, "", "a", "a\n" * 10, record()[2:], record(settled="-1"), record(settled="9" * 5000), record()],
)
def test_what_is_no_newest_call_is_none(text):
    """Nothing known, another program's text, too little, no numbers, or none that waits."""
    assert newest_of(text, 0.0, 1.0) is None


# What blocks nothing.

TOO_LONG = "9" * 40
MALFORMED = ["", "another program's", record(settled=-1), record() + "\n", record(reserved="1e15"), "\n" * 10]


@pytest.mark.parametrize("text", MALFORMED)
def test_what_another_program_has_written_counts_as_nothing(locks, text):
    """It is written anew by the next call."""
    locks.set(NAME, text, px=600_000)
    assert look(locks, KEY).newest is None
    run(locks, sent(locks))
    assert known(locks)["settled"] == known(locks)["started"] > 0


@pytest.mark.parametrize("names", [FIELDS[:8], ["reserved"], ["settled"], ["started"], ["first"], ["last"]])
def test_numbers_that_are_no_generations_block_nothing(locks, names):
    """They are too long for any: calls are published, start, and replace each other."""
    locks.set(NAME, record(**dict.fromkeys(names, TOO_LONG)), px=600_000)
    a, b = sent(locks, "a"), sent(locks, "b")
    assert a.generation < b.generation <= MOST
    assert start(locks, a).superseded_by == "b"
    run(locks, b)


def test_another_type_blocks_nothing(locks, foreign_keys):
    """What is no text counts as nothing."""
    foreign_keys.add(NAME)
    locks.lpush(NAME, "x")
    assert look(locks, KEY).newest is None
    run(locks, sent(locks))


def test_full_server_grants_nothing_and_takes_what_ends(own_locks):
    """No generation and no start; a lock is renewed and released, and a call that ends is noted."""
    older, newest = sent(own_locks, "a"), sent(own_locks, "b")
    held = lock(own_locks).acquire().lock
    own_locks.config_set("maxmemory", 1)
    (refused,) = reserve_all(own_locks, [Wanted(KEY, "c", "")], debounce=Debounce(), lease=60, remember=60)
    assert isinstance(refused, LockUnavailable)
    (error,) = replace_all(own_locks, [newest], REMEMBER)
    assert isinstance(error, LockUnavailable)
    held.renew()
    assert held.release() == "released"
    with pytest.raises(LockUnavailable):
        start(own_locks, newest)
    assert end(own_locks, newest)
    own_locks.config_set("maxmemory", 0)
    assert start(own_locks, older).superseded_by == "b"
