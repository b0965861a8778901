"""The troubles that docs/compared.md names: what the old locks do, and what ours does, side by side."""

import time
import uuid
from typing import Any

import pytest
import redis
from celery import chord, group
from celery_once import AlreadyQueued

from celery_setnx import is_skipped
from celery_setnx.testing import pass_time
from tests.harness import Journal, Worker, wait_until

APP = "tests.migration.troublesapp"
NOWHERE = "nowhere"
MORTAL, ALONE = "mortal", "alone"
"""The queues of a worker that is killed, and of one with one process only."""

ONCE, LONE, HEIMDALL, CACHED, OUR_MARK = "qo_*", "SINGLETONLOCK_*", "h-lock:*", "*cached-lock-*", "*:queued"
"""The keys of their locks, and of our marks."""


@pytest.fixture(scope="module")
def busy(module_worker) -> Worker:
    """A worker for all tests."""
    return module_worker(APP, concurrency=6)


@pytest.fixture
def tasks(shop, journal) -> Any:
    """The module of tasks, with clean databases."""
    from tests.migration import troublesapp

    return troublesapp


def lock_of(shop: redis.Redis, pattern: str) -> str | None:
    """The one key that matches, or None."""
    keys = list(shop.scan_iter(pattern))
    assert len(keys) <= 1, keys
    return keys[0] if keys else None


def lapse(shop: redis.Redis, pattern: str) -> None:
    """Let the time of a lock pass at once, as its server does."""
    key = lock_of(shop, pattern)
    assert shop.pttl(key) > 0, "it has a time to live"
    shop.pexpire(key, 1)
    wait_until(lambda: not shop.exists(key), f"{key} has expired")


def received(worker: Worker, result: Any) -> int:
    """How many messages of a call the worker has had, once all that was queued before now has reached it."""
    from tests.migration import troublesapp

    troublesapp.marker.delay().get(timeout=60)
    return worker.log_text().count(f"[{result.id}] received")


def started(journal: Journal, result: Any) -> int:
    """How often the body of a call has started."""
    return journal.words(result.id).count("start")


def runs_still(journal: Journal, result: Any) -> bool:
    """Whether the body of a call has started, once, and not ended."""
    return [w for w in journal.words(result.id) if w in ("start", "end", "postrun")] == ["start"]


def test_killed_worker_leaves_its_lock(busy, tasks, shop, journal, gates, start_worker):
    """Theirs refuses, or skips, every further call, until its timeout if it has one; ours is taken over."""
    victim = start_worker(APP, concurrency=5, queues=MORTAL)
    name = "gated-killed"
    kinds = (tasks.once, tasks.lone, tasks.heimdall, tasks.cached, tasks.ours)
    dead = [kind.work.apply_async((name,), queue=MORTAL) for kind in kinds]
    for result in dead:
        journal.wait_for("start", task_id=result.id)
    victim.kill()

    with pytest.raises(AlreadyQueued) as refused:
        tasks.once.work.delay(name)
    assert refused.value.countdown > 3500
    assert tasks.lone.work.delay(name).id == dead[1].id
    assert shop.pttl(lock_of(shop, LONE)) == -1
    assert tasks.heimdall.work.delay(name).id == dead[2].id
    assert received(busy, dead[2]) == 0
    assert shop.pttl(lock_of(shop, HEIMDALL)) > 3_500_000, "an hour by default"
    skipped = tasks.cached.work.delay(name)
    assert skipped.get(timeout=60) is None
    assert started(journal, skipped) == 0
    assert shop.pttl(lock_of(shop, CACHED)) > 500_000

    lapse(shop, HEIMDALL)
    lapse(shop, CACHED)
    pass_time(tasks.LEASE_S, tasks.ours.work, name)
    ours = wait_until(lambda: not (new := tasks.ours.work.delay(name)).deduplicated and new, "no duplicate")
    again = [tasks.heimdall.work.delay(name), tasks.cached.work.delay(name), ours]
    for result in again:
        journal.wait_for("start", task_id=result.id)
        gates(name)
    assert [result.get(timeout=60) for result in again] == [name] * 3


@pytest.mark.clock
def test_run_longer_than_the_timeout(busy, tasks, shop, journal, gates, monkeypatch):
    """Theirs lets a second one start beside it, and deletes its lock; ours lasts as long as the run.

    Our keeper really renews: three leases of two seconds pass. A second run has names of its own: bodies of
    the first may wait at their gates still.
    """
    own = f"gated-{uuid.uuid4().hex}"
    ours = journal.reached("start", tasks.ours.work.apply_async((own,), singleton={"lease": 2}))
    began = tasks.ours.work.locked(own).since

    monkeypatch.setattr(tasks.lone.work, "lock_expiry", 600)  # the publisher sets it
    for kind, pattern in (("once", ONCE), ("lone", LONE), ("heimdall", HEIMDALL), ("cached", CACHED)):
        name = f"{own}-{kind}"
        task = getattr(tasks, kind).work
        first = journal.reached("start", task.delay(name))
        lapse(shop, pattern)
        second = journal.reached("start", task.delay(name))
        assert runs_still(journal, first)
        assert lock_of(shop, pattern) is not None
        gates(name)
        journal.wait_for("postrun", task_id=first.id)
        assert runs_still(journal, second)
        if kind != "cached":  # the recipe looks at the clock before it deletes
            assert lock_of(shop, pattern) is None, "and its lock has been deleted by the first"
        gates(name)
        assert second.get(timeout=60) == name

    def three_leases_old() -> bool:
        seconds, microseconds = shop.time()
        return bool(seconds + microseconds / 1e6 > began + 6)

    wait_until(three_leases_old, "three leases have passed")
    assert tasks.ours.work.delay(own).deduplicated
    beside = tasks.ours.work.apply_async((own,), task_id=uuid.uuid4().hex)  # published all the same
    assert is_skipped(beside.get(timeout=60))
    gates(own)
    assert ours.get(timeout=60) == own


def test_task_that_retries_itself(busy, tasks, shop, journal):
    """celery-singleton's and heimdall's are never sent, for their own lock; celery-once's and ours run."""
    for task, pattern in ((tasks.lone.retrying, LONE), (tasks.heimdall.retrying, HEIMDALL)):
        lost = journal.reached("postrun", task.delay("again"))
        assert received(busy, lost) == 1
        assert lost.state == "RETRY"
        assert shop.get(lock_of(shop, pattern)) == lost.id
        assert task.delay("again").id == lost.id
    for task in (tasks.once.retrying, tasks.ours.retrying):
        result = task.delay("again")
        assert result.get(timeout=60) == "again"
        assert started(journal, result) == 2  # one that comes before its run has ended is received again


def test_recipe_task_that_retries_itself(tasks, journal, start_worker):
    """It runs, if the run that asked for it has left the lock: with one process always."""
    start_worker(APP, concurrency=1, queues=ALONE)
    for task in (tasks.cached.tidying, tasks.ours.tidying):
        result = task.apply_async(("again",), queue=ALONE)
        assert result.get(timeout=60) == "again"
        assert started(journal, result) == 2


def test_retry_that_starts_before_its_run_has_ended(busy, tasks, journal, gates):
    """The recipe skips it, for its own run's lock, and says success; ours runs it afterwards."""
    name = "untidy-cached"
    lost = journal.reached("tidying", tasks.cached.tidying.delay(name))
    assert lost.get(timeout=60) is None
    journal.wait_for("postrun", task_id=lost.id)
    gates(name)
    journal.wait_for("postrun", 2, task_id=lost.id)
    assert received(busy, lost) == 2
    assert started(journal, lost) == 1
    assert lost.get(timeout=60) is None

    name = "untidy-ours"
    result = journal.reached("tidying", tasks.ours.tidying.delay(name))
    wait_until(lambda: received(busy, result) >= 2, "the retry has reached the worker")
    gates(name, 2)
    assert result.get(timeout=60) == name
    words = [w for w in journal.words(result.id) if w in ("start", "end", "tidying", "tidied")]
    assert words == ["start", "end", "tidying", "tidied"] * 2, "one after the other"


def test_chord_of_equal_members(busy, tasks, shop, journal, gates):
    """Singleton's and heimdall's hang, celery-once's breaks off, the recipe skips one, ours runs both."""

    def begin(kind: str) -> tuple[Any, str]:
        work = getattr(tasks, kind).work
        return chord([work.s(f"gated-{kind}"), work.s(f"gated-{kind}")])(tasks.answers.s()), f"gated-{kind}"

    for kind, pattern in (("lone", LONE), ("heimdall", HEIMDALL)):
        hangs, name = begin(kind)
        [entry] = journal.wait_for("start", name=name)
        gates(name)
        journal.wait_for("postrun", task_id=entry["task_id"])
        sent = {member.id: received(busy, member) for member in hangs.parent.results}
        assert sum(sent.values()) == sent[entry["task_id"]] == 1
        assert received(busy, hangs) == 0
        assert hangs.state == "PENDING"
        assert lock_of(shop, pattern) is None, "nothing runs, and nothing will"

    with pytest.raises(AlreadyQueued):
        group(tasks.once.work.s("equal"), tasks.once.work.s("equal")).apply_async(queue=NOWHERE)
    assert shop.llen(NOWHERE) == 1

    ends, name = begin("cached")
    [entry] = journal.wait_for("start", name=name)
    [skipped] = {member.id for member in ends.parent.results} - {entry["task_id"]}
    journal.wait_for("postrun", task_id=skipped)
    gates(name)
    assert ends.get(timeout=60) in ([name, None], [None, name])
    assert len(journal.entries(what="start", name=name)) == 1

    counted, name = begin("ours")
    gates(name, 2)
    assert counted.get(timeout=60) == [name, name]
    assert received(busy, counted) == 1
    assert len(journal.entries(what="start", name=name)) == 2


def test_call_that_expires_in_the_queue(busy, tasks, shop):
    """The locks of three stay, the recipe has taken none; our mark is freed."""
    late, expires_s = f"late-{uuid.uuid4().hex}", 0.3
    kinds = (tasks.heimdall, tasks.once, tasks.lone, tasks.cached, tasks.ours)
    results = [kind.work.apply_async(("late",), queue=late, expires=expires_s) for kind in kinds]
    end = time.time() + expires_s
    wait_until(lambda: time.time() > end, "the calls have expired")
    busy.take_from(tasks.app, late)
    wait_until(lambda: {r.state for r in results} == {"REVOKED"}, "they have been discarded")
    wait_until(lambda: lock_of(shop, OUR_MARK) is None, "our mark has been freed")
    assert not tasks.ours.work.apply_async(("late",), queue=NOWHERE).deduplicated
    assert tasks.heimdall.work.apply_async(("late",), queue=NOWHERE).id == results[0].id
    assert shop.llen(NOWHERE) == 1
    assert shop.pttl(lock_of(shop, HEIMDALL)) > 3_500_000
    assert None not in (lock_of(shop, ONCE), lock_of(shop, LONE))
    assert lock_of(shop, CACHED) is None
    assert tasks.cached.work.delay("late").get(timeout=60) == "late"


def test_task_that_is_ignored(busy, tasks, shop, journal):
    """Their lock stays; ours is released."""
    for kind in (tasks.once, tasks.lone, tasks.ours):
        journal.reached("postrun", kind.ignored.delay("quiet"))
    assert None not in (lock_of(shop, ONCE), lock_of(shop, LONE))
    assert tasks.ours.ignored.locked("quiet") is None
    assert not tasks.ours.ignored.apply_async(("quiet",), queue=NOWHERE).deduplicated


def test_argument_that_json_changes(busy, tasks, shop, journal):
    """celery-once's lock of a tuple stays after the end; ours is that of the list."""
    for kind in (tasks.once, tasks.ours):
        journal.reached("postrun", kind.work.delay((1, 2)))
    assert lock_of(shop, ONCE) is not None
    with pytest.raises(AlreadyQueued):
        tasks.once.work.delay((1, 2))
    assert not tasks.ours.work.apply_async(((1, 2),), queue=NOWHERE).deduplicated
    assert tasks.ours.work.lock_key((1, 2)) == tasks.ours.work.lock_key([1, 2])


@pytest.mark.parametrize("kind", ["once_early", "ours_early", "heimdall"])
def test_call_that_is_published_during_the_run(busy, tasks, journal, gates, kind):
    """With unlock_before_run both bodies run at once; with until_started the second waits.

    With heimdall it is not published: the caller gets the run that began before.
    """
    task, name = getattr(tasks, kind).work, f"gated-{kind}"
    first = journal.reached("start", task.delay(name))
    second = task.delay(name)
    assert (second.id == first.id) == (kind == "heimdall")
    if kind == "heimdall":
        assert received(busy, first) == started(journal, first) == 1
    elif kind == "once_early":
        journal.wait_for("start", task_id=second.id)
        assert runs_still(journal, first)
    else:
        wait_until(lambda: task.locked(name).waiting == 1, "the second waits in line")
        assert started(journal, second) == 0
    gates(name, 2)
    assert [first.get(timeout=60), second.get(timeout=20)] == [name, name]


def test_call_of_the_recipe_that_is_published_during_the_run(busy, tasks, journal, gates):
    """It is skipped if a worker takes it during the run; it runs if one takes it afterwards."""
    name, late = "gated-during-cached", f"late-{uuid.uuid4().hex}"
    task = tasks.cached.work
    first = journal.reached("start", task.delay(name))
    queued = task.apply_async((name,), queue=late)
    at_once = task.delay(name)
    assert at_once.get(timeout=60) is None
    assert started(journal, at_once) == 0
    assert runs_still(journal, first)
    gates(name)
    assert first.get(timeout=60) == name
    busy.take_from(tasks.app, late)
    gates(name)
    assert queued.get(timeout=60) == name
    assert started(journal, queued) == 1


@pytest.mark.parametrize("kind", ["once", "lone"])
def test_call_by_its_name_only(busy, tasks, journal, gates, kind):
    """send_task asks neither peer: two bodies run at once."""
    name = f"gated-named-{kind}"
    both = [tasks.app.send_task(f"{kind}.work", (name,)) for _ in range(2)]
    for result in both:
        journal.wait_for("start", task_id=result.id)
    assert journal.entries(what="end", name=name) == []
    gates(name, 2)
    assert [result.get(timeout=60) for result in both] == [name, name]


@pytest.mark.parametrize(("kind", "skips"), [("cached", lambda answer: answer is None), ("ours", is_skipped)])
def test_third_call_by_its_name_only(busy, tasks, journal, gates, kind, skips):
    """The recipe and ours meet the lock when they start: they skip the second, and the third as well."""
    name = f"gated-third-{kind}"
    first = journal.reached("start", tasks.app.send_task(f"{kind}.work", (name,)))
    for _ in range(2):
        result = tasks.app.send_task(f"{kind}.work", (name,))
        assert skips(result.get(timeout=60))
        journal.wait_for("postrun", task_id=result.id)
        assert started(journal, result) == 0
    assert runs_still(journal, first)
    gates(name)
    assert first.get(timeout=60) == name


def test_call_of_heimdall_by_its_name_only(busy, tasks, shop, journal, gates):
    """The second is skipped when it starts, but deletes the lock of the first: a third runs beside that."""
    name = "gated-named-heimdall"
    first = journal.reached("start", tasks.app.send_task("heimdall.work", (name,)))
    assert shop.get(lock_of(shop, HEIMDALL)) == first.id
    second = tasks.app.send_task("heimdall.work", (name,))
    assert second.get(timeout=60) is None
    journal.wait_for("postrun", task_id=second.id)
    assert started(journal, second) == 0
    assert lock_of(shop, HEIMDALL) is None
    third = journal.reached("start", tasks.app.send_task("heimdall.work", (name,)))
    assert runs_still(journal, first)
    gates(name, 2)
    assert [first.get(timeout=60), third.get(timeout=20)] == [name, name]


def test_call_by_keyword(tasks):
    """celery-singleton makes two keys of one call; we make one."""
    options = {"queue": NOWHERE}
    lone, ours = tasks.lone.work, tasks.ours.work
    assert lone.apply_async(("a",), **options).id != lone.apply_async((), {"name": "a"}, **options).id
    assert ours.apply_async(("a",), **options).id == ours.apply_async((), {"name": "a"}, **options).id


def test_number_and_text(tasks):
    """celery-once makes one key of 1 and "1"; we make two."""
    tasks.once.work.apply_async((1,), queue=NOWHERE)
    with pytest.raises(AlreadyQueued):
        tasks.once.work.apply_async(("1",), queue=NOWHERE)
    tasks.ours.work.apply_async((1,), queue=NOWHERE)
    assert not tasks.ours.work.apply_async(("1",), queue=NOWHERE).deduplicated


def test_argument_that_is_no_json(tasks):
    """celery-singleton has no key for a UUID; we have."""
    account = uuid.uuid4()
    with pytest.raises(TypeError):
        tasks.lone.work.apply_async((account,), queue=NOWHERE)
    first = tasks.ours.work.apply_async((account,), queue=NOWHERE)
    assert tasks.ours.work.apply_async((account,), queue=NOWHERE).id == first.id


def test_apply_beside_a_queued_call(tasks, shop):
    """The end of an eager call deletes the queued call's lock of theirs; it leaves our mark alone."""
    kinds = (tasks.once, tasks.lone, tasks.ours)
    for kind in kinds:
        kind.work.apply_async(("eager",), queue=NOWHERE)
    assert None not in (lock_of(shop, ONCE), lock_of(shop, LONE))
    for kind in kinds:
        kind.work.apply(("eager",))
    assert (lock_of(shop, ONCE), lock_of(shop, LONE)) == (None, None)
    assert tasks.ours.work.apply_async(("eager",), queue=NOWHERE).deduplicated
