"""The troubles that the migration pages name: what the old lock does, and what ours does, side by side."""

import re
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
import redis
from celery import chord, group
from celery_once import AlreadyQueued

from celery_setnx import is_skipped
from tests.harness import Worker, wait_until
from tests.migration import pages, test_rolling

APP = "tests.migration.troublesapp"
NOWHERE = "nowhere"


@pytest.fixture(scope="module")
def busy(server, logs) -> Iterator[Worker]:
    """A worker for all tests that kill none."""
    worker = Worker(logs, APP, concurrency=4)
    yield worker
    worker.kill()


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


def received(worker: Worker, result: Any) -> int:
    """How many messages of a call the worker has had, once all that was queued before now has reached it."""
    from tests.migration import troublesapp

    troublesapp.marker.delay().get(timeout=20)
    return worker.log_text().count(f"[{result.id}] received")


def test_killed_worker_leaves_its_lock(tasks, shop, journal, logs, gates):
    """Theirs refuses, or skips, every further call; ours is taken over."""
    worker = Worker(logs, APP, concurrency=4)
    name = "gated-killed"
    dead = [kind["work"].delay(name) for kind in (tasks.once, tasks.lone, tasks.ours)]
    dead.append(tasks.cached.delay(name))
    for result in dead:
        journal.wait_for("start", task_id=result.id)
    worker.kill()
    worker = Worker(logs, APP, concurrency=4)
    try:
        with pytest.raises(AlreadyQueued) as refused:
            tasks.once["work"].delay(name)
        assert refused.value.countdown > 3500
        assert tasks.lone["work"].delay(name).id == dead[1].id
        assert shop.pttl(lock_of(shop, "SINGLETONLOCK_*")) == -1
        skipped = tasks.cached.delay(name)
        assert skipped.get(timeout=20) is None
        assert "start" not in journal.words(skipped.id)

        def accepted() -> Any:
            result = tasks.ours["work"].delay(name)
            return None if result.deduplicated else result

        again = wait_until(accepted, "a call that is no duplicate of the dead one")
        journal.wait_for("start", task_id=again.id)
        gates(name)
        assert again.get(timeout=20) == name
    finally:
        worker.kill()


def test_run_longer_than_the_timeout(busy, tasks, shop, journal, gates):
    """Theirs lets a second one start beside it, and deletes its lock; ours lasts as long as the run."""

    def publish(kind: str, name: str, timeout_s: int) -> Any:
        if kind == "once":
            return tasks.once["work"].apply_async((name,), once={"timeout": timeout_s})
        tasks.lone["work"].lock_expiry = timeout_s  # the publisher sets it
        return tasks.lone["work"].delay(name)

    for kind, pattern in (("once", "qo_*"), ("lone", "SINGLETONLOCK_*")):
        name = f"gated-long-{kind}"
        first = publish(kind, name, 1)
        journal.wait_for("start", task_id=first.id)
        wait_until(lambda: lock_of(shop, pattern) is None, f"the lock of {kind} expired")  # noqa: B023
        second = publish(kind, name, 600)
        journal.wait_for("start", task_id=second.id)
        assert journal.words(first.id) == ["start"], "the first runs still"
        assert lock_of(shop, pattern) is not None
        gates(name)
        journal.wait_for("postrun", task_id=first.id)
        assert journal.words(second.id) == ["start"], "the second runs still"
        assert lock_of(shop, pattern) is None, "and its lock has been deleted by the first"
        gates(name)
        second.get(timeout=20)

    name = "gated-long-cached"
    first = tasks.cached.delay(name, 1)
    journal.wait_for("start", task_id=first.id)
    wait_until(lambda: lock_of(shop, "*cached-lock-*") is None, "the cache's lock expired")
    second = tasks.cached.delay(name, 1)
    journal.wait_for("start", task_id=second.id)
    assert journal.words(first.id) == ["start"]
    gates(name)
    gates(name)

    name = "gated-long-ours"
    first = tasks.ours["work"].delay(name)
    journal.wait_for("start", task_id=first.id)
    began = tasks.ours["work"].locked(name).since

    def three_leases_old() -> bool:
        seconds, microseconds = shop.time()
        return bool(seconds + microseconds / 1e6 > began + 3 * tasks.LEASE_S)

    wait_until(three_leases_old, "three leases have passed")
    assert tasks.ours["work"].delay(name).deduplicated
    beside = tasks.ours["work"].apply_async((name,), task_id=uuid.uuid4().hex)  # published all the same
    assert is_skipped(beside.get(timeout=20))
    gates(name)
    assert first.get(timeout=20) == name


def test_task_that_retries_itself(busy, tasks, shop, journal):
    """celery-singleton's is never sent; celery-once's and ours run."""
    lost = tasks.lone["retrying"].delay("again")
    wait_until(lambda: lost.state == "RETRY", "the state of a retry")
    assert received(busy, lost) == 1
    assert lost.state == "RETRY"
    assert shop.get(lock_of(shop, "SINGLETONLOCK_*")) == lost.id
    for kind in (tasks.once, tasks.ours):
        result = kind["retrying"].delay("again")
        assert result.get(timeout=20) == "again"
        assert received(busy, result) == 2


def test_chord_of_equal_members(busy, tasks, shop, journal):
    """celery-singleton's hangs, celery-once's breaks off in the middle, ours counts both members."""
    hangs = chord([tasks.lone["work"].s("equal"), tasks.lone["work"].s("equal")])(tasks.total.s())
    journal.wait_for("postrun", task_id=hangs.parent.results[0].id)
    ids = {member.id: received(busy, member) for member in hangs.parent.results}
    assert sum(ids.values()) == 1
    assert hangs.state == "PENDING"

    with pytest.raises(AlreadyQueued):
        group(tasks.once["work"].s("equal"), tasks.once["work"].s("equal")).apply_async(queue=NOWHERE)
    assert shop.llen(NOWHERE) == 1

    counted = chord([tasks.ours["work"].s("equal"), tasks.ours["work"].s("equal")])(tasks.total.s())
    assert counted.get(timeout=20) == 2


def test_call_that_expires_in_the_queue(busy, tasks, shop):
    """Their lock stays; our mark is freed."""
    late, expires_s = f"late-{uuid.uuid4().hex}", 0.3
    kinds = (tasks.once, tasks.lone, tasks.ours)
    results = [kind["work"].apply_async(("late",), queue=late, expires=expires_s) for kind in kinds]
    end = time.time() + expires_s
    wait_until(lambda: time.time() > end, "the calls have expired")
    tasks.app.control.add_consumer(late, destination=[f"{busy.name}@test"], reply=True)
    wait_until(lambda: {r.state for r in results} == {"REVOKED"}, "they have been discarded")
    wait_until(lambda: lock_of(shop, "*:queued") is None, "our mark has been freed")
    assert not tasks.ours["work"].apply_async(("late",), queue=NOWHERE).deduplicated
    assert lock_of(shop, "qo_*") is not None
    assert lock_of(shop, "SINGLETONLOCK_*") is not None


def test_task_that_is_ignored(busy, tasks, shop, journal):
    """Their lock stays; ours is released."""
    for kind in (tasks.once, tasks.lone, tasks.ours):
        result = kind["ignored"].delay("quiet")
        journal.wait_for("postrun", task_id=result.id)
    assert lock_of(shop, "qo_*") is not None
    assert lock_of(shop, "SINGLETONLOCK_*") is not None
    assert tasks.ours["ignored"].locked("quiet") is None
    assert not tasks.ours["ignored"].apply_async(("quiet",), queue=NOWHERE).deduplicated


def test_argument_that_json_changes(busy, tasks, shop, journal):
    """celery-once's lock of a tuple stays after the end; ours is that of the list."""
    for kind in (tasks.once, tasks.ours):
        result = kind["work"].delay((1, 2))
        journal.wait_for("postrun", task_id=result.id)
    assert lock_of(shop, "qo_*") is not None
    with pytest.raises(AlreadyQueued):
        tasks.once["work"].delay((1, 2))
    assert not tasks.ours["work"].apply_async(((1, 2),), queue=NOWHERE).deduplicated
    assert tasks.ours["work"].lock_key((1, 2)) == tasks.ours["work"].lock_key([1, 2])


def test_call_that_is_published_during_the_run(busy, tasks, journal, gates):
    """With unlock_before_run both bodies run at once; with until_started the second waits."""
    name = "gated-early"
    for task, starts in ((tasks.once_early, 2), (tasks.ours_early, 1)):
        first = task.delay(name)
        journal.wait_for("start", task_id=first.id)
        second = task.delay(name)
        assert second.id != first.id
        if starts == 2:
            journal.wait_for("start", task_id=second.id)
            assert journal.words(first.id) == ["start"]
        else:
            wait_until(lambda: tasks.ours_early.locked(name).waiting == 1, "the second waits in line")
            assert journal.words(second.id) in ([], ["postrun"])
        gates(name)
        gates(name)
        assert [first.get(timeout=20), second.get(timeout=20)] == [name, name]


def test_call_by_its_name_only(busy, tasks, journal, gates):
    """send_task asks neither peer: two bodies run at once. Ours meets the lock when it starts."""
    for kind in ("once", "lone"):
        name = f"gated-named-{kind}"
        both = [tasks.app.send_task(f"{kind}.work", (name,)) for _ in range(2)]
        for result in both:
            journal.wait_for("start", task_id=result.id)
        assert journal.entries(what="end", name=repr(name)) == []
        gates(name)
        gates(name)
    name = "gated-named-ours"
    first = tasks.app.send_task("ours.work", (name,))
    journal.wait_for("start", task_id=first.id)
    assert is_skipped(tasks.app.send_task("ours.work", (name,)).get(timeout=20))
    gates(name)
    assert first.get(timeout=20) == name


def test_call_by_keyword(tasks):
    """celery-singleton makes two keys of one call; we make one."""
    options = {"queue": NOWHERE}
    lone, ours = tasks.lone["work"], tasks.ours["work"]
    assert lone.apply_async(("a",), **options).id != lone.apply_async((), {"name": "a"}, **options).id
    assert ours.apply_async(("a",), **options).id == ours.apply_async((), {"name": "a"}, **options).id


def test_number_and_text(tasks):
    """celery-once makes one key of 1 and "1"; we make two."""
    tasks.once["work"].apply_async((1,), queue=NOWHERE)
    with pytest.raises(AlreadyQueued):
        tasks.once["work"].apply_async(("1",), queue=NOWHERE)
    tasks.ours["work"].apply_async((1,), queue=NOWHERE)
    assert not tasks.ours["work"].apply_async(("1",), queue=NOWHERE).deduplicated


def test_argument_that_is_no_json(tasks):
    """celery-singleton has no key for a UUID; we have."""
    account = uuid.uuid4()
    with pytest.raises(TypeError):
        tasks.lone["work"].apply_async((account,), queue=NOWHERE)
    first = tasks.ours["work"].apply_async((account,), queue=NOWHERE)
    assert tasks.ours["work"].apply_async((account,), queue=NOWHERE).id == first.id


def test_apply_beside_a_queued_call(tasks, shop):
    """The end of an eager call deletes the queued call's lock of theirs; it leaves our mark alone."""
    for kind in (tasks.once, tasks.lone, tasks.ours):
        kind["work"].apply_async(("eager",), queue=NOWHERE)
    assert lock_of(shop, "qo_*") is not None
    assert lock_of(shop, "SINGLETONLOCK_*") is not None
    for kind in (tasks.once, tasks.lone, tasks.ours):
        kind["work"].apply(("eager",))
    assert lock_of(shop, "qo_*") is None
    assert lock_of(shop, "SINGLETONLOCK_*") is None
    assert tasks.ours["work"].apply_async(("eager",), queue=NOWHERE).deduplicated


@pytest.mark.parametrize("page", pages.PAGES)
def test_every_test_that_a_page_names_is_here(page):
    """What a page says is shown is shown."""
    named = set(re.findall(r"`(test_\w+)`", pages.text(page)))
    assert named
    assert named <= {*globals(), *vars(test_rolling)}
