"""The troubles of `test_troubles` with celery-heimdall and with the `cache.add` recipe, beside ours."""

import time
import uuid
from typing import Any

from celery import chord

from celery_setnx import is_skipped
from tests.harness import Journal, Worker, wait_until
from tests.migration import test_troubles
from tests.migration.test_troubles import APP, NOWHERE, lock_of, received

HEIMDALL, CACHED = "h-lock:*", "*cached-lock-*"
"""The keys of their locks."""
ALONE = "alone"
"""The queue of a worker with one process only."""

busy, tasks = test_troubles.busy, test_troubles.tasks


def started(journal: Journal, result: Any) -> int:
    """How often the body of a call has started."""
    return journal.words(result.id).count("start")


def take_from(worker: Worker, tasks: Any, queue: str) -> None:
    """Have the worker take calls from one more queue."""
    tasks.app.control.add_consumer(queue, destination=[f"{worker.name}@test"], reply=True)


def test_killed_worker_leaves_its_lock_until_the_timeout(tasks, shop, journal, logs):
    """Until then heimdall hands out the dead call, and the recipe skips; ours is taken over."""
    worker = Worker(logs, APP, concurrency=6)
    name = "gated-dead"
    dead = tasks.heimdall["work"].delay(name)
    brief = tasks.heimdall_brief.delay(name)
    cached = tasks.cached.delay(name)
    cached_brief = tasks.cached.delay(f"{name}-brief", tasks.BRIEF_S)
    ours = tasks.ours["work"].delay(name)
    for result in (dead, brief, cached, cached_brief, ours):
        journal.wait_for("start", task_id=result.id)
    worker.kill()
    worker = Worker(logs, APP, concurrency=6)
    try:
        assert tasks.heimdall["work"].delay(name).id == dead.id
        assert received(worker, dead) == 0
        skipped = tasks.cached.delay(name)
        assert skipped.get(timeout=20) is None
        assert started(journal, skipped) == 0
        assert shop.pttl(lock_of(shop, f"*cached-lock-{name}")) > 500_000
        ttls = {shop.get(key): shop.pttl(key) for key in shop.scan_iter(HEIMDALL)}
        assert ttls[dead.id] > 3_500_000, "an hour by default"

        wait_until(lambda: lock_of(shop, f"*cached-lock-{name}-brief") is None, "the cache's lock expired")
        wait_until(lambda: len(list(shop.scan_iter(HEIMDALL))) == 1, "heimdall's short lock expired")
        again = [tasks.heimdall_brief.delay(name), tasks.cached.delay(f"{name}-brief")]
        assert again[0].id != brief.id

        def accepted() -> Any:
            result = tasks.ours["work"].delay(name)
            return None if result.deduplicated else result

        again.append(wait_until(accepted, "a call that is no duplicate of the dead one"))
        for result in again:
            journal.wait_for("start", task_id=result.id)
    finally:
        worker.kill()


def test_run_of_heimdall_longer_than_its_timeout(busy, tasks, shop, journal, gates, monkeypatch):
    """A second one starts beside it, and its lock is deleted by the end of the first."""
    name, task = "gated-long-heimdall", tasks.heimdall_brief
    first = task.delay(name)
    journal.wait_for("start", task_id=first.id)
    wait_until(lambda: lock_of(shop, HEIMDALL) is None, "the lock expired")
    monkeypatch.setitem(task.heimdall, "unique_timeout", 600)  # the publisher sets it
    second = task.delay(name)
    journal.wait_for("start", task_id=second.id)
    assert journal.words(first.id) == ["start"], "the first runs still"
    assert shop.get(lock_of(shop, HEIMDALL)) == second.id
    gates(name)
    journal.wait_for("postrun", task_id=first.id)
    assert journal.words(second.id) == ["start"], "the second runs still"
    assert lock_of(shop, HEIMDALL) is None, "and its lock has been deleted by the first"
    gates(name)
    assert second.get(timeout=20) == name


def test_heimdall_task_that_retries_itself(busy, tasks, shop, journal):
    """It is never sent: its own lock is in the way."""
    lost = tasks.heimdall["retrying"].delay("again")
    journal.wait_for("postrun", task_id=lost.id)
    assert received(busy, lost) == 1
    assert lost.state == "RETRY"
    assert shop.get(lock_of(shop, HEIMDALL)) == lost.id
    assert tasks.heimdall["retrying"].delay("again").id == lost.id


def test_recipe_task_that_retries_itself(tasks, journal, logs):
    """It runs, if the run that asked for it has left the lock: with one process always."""
    worker = Worker(logs, APP, concurrency=1, queues=ALONE)
    try:
        for task in (tasks.cached_tidying, tasks.ours["tidying"]):
            result = task.apply_async(("again",), queue=ALONE)
            assert result.get(timeout=20) == "again"
            assert started(journal, result) == 2
    finally:
        worker.kill()


def test_retry_that_starts_before_its_run_has_ended(busy, tasks, journal, gates):
    """The recipe skips it, for its own run's lock, and says success; ours runs it afterwards."""
    name = "untidy-cached"
    lost = tasks.cached_tidying.delay(name)
    journal.wait_for("tidying", task_id=lost.id)
    assert lost.get(timeout=20) is None
    journal.wait_for("postrun", task_id=lost.id)
    gates(name)
    journal.wait_for("postrun", 2, task_id=lost.id)
    assert received(busy, lost) == 2
    assert started(journal, lost) == 1
    assert lost.get(timeout=20) is None

    name = "untidy-ours"
    result = tasks.ours["tidying"].delay(name)
    journal.wait_for("tidying", task_id=result.id)
    wait_until(lambda: received(busy, result) >= 2, "the retry has reached the worker")
    gates(name)
    gates(name)
    assert result.get(timeout=20) == name
    words = [word for word in journal.words(result.id) if word != "postrun"]
    assert words == ["start", "end", "tidying", "tidied"] * 2, "one after the other"


def test_chord_of_members_that_are_equal(busy, tasks, shop, journal, gates):
    """Heimdall's hangs; the recipe's ends, with None for the member that was skipped; ours runs both."""
    name = "gated-equal-heimdall"
    work = tasks.heimdall["work"]
    hangs = chord([work.s(name), work.s(name)])(tasks.answers.s())
    [entry] = journal.wait_for("start", name=repr(name))
    gates(name)
    journal.wait_for("postrun", task_id=entry["task_id"])
    sent = {member.id: received(busy, member) for member in hangs.parent.results}
    assert sum(sent.values()) == sent[entry["task_id"]] == 1
    assert received(busy, hangs) == 0
    assert hangs.state == "PENDING"
    assert lock_of(shop, HEIMDALL) is None, "nothing runs, and nothing will"

    name = "gated-equal-cached"
    ends = chord([tasks.cached.s(name), tasks.cached.s(name)])(tasks.answers.s())
    [entry] = journal.wait_for("start", name=repr(name))
    [skipped] = {member.id for member in ends.parent.results} - {entry["task_id"]}
    journal.wait_for("postrun", task_id=skipped)
    gates(name)
    assert ends.get(timeout=20) in ([name, None], [None, name])
    assert len(journal.entries(what="start", name=repr(name))) == 1

    name = "gated-equal-ours"
    work = tasks.ours["work"]
    counted = chord([work.s(name), work.s(name)])(tasks.answers.s())
    gates(name)
    gates(name)
    assert counted.get(timeout=20) == [name, name]
    assert received(busy, counted) == 1
    assert len(journal.entries(what="start", name=repr(name))) == 2


def test_expired_call_of_heimdall_and_of_the_recipe(busy, tasks, shop):
    """Heimdall's lock stays; the recipe has taken none."""
    late, expires_s = f"late-{uuid.uuid4().hex}", 0.3
    kinds = (tasks.heimdall["work"], tasks.cached, tasks.ours["work"])
    results = [task.apply_async(("late",), queue=late, expires=expires_s) for task in kinds]
    end = time.time() + expires_s
    wait_until(lambda: time.time() > end, "the calls have expired")
    take_from(busy, tasks, late)
    wait_until(lambda: {r.state for r in results} == {"REVOKED"}, "they have been discarded")
    wait_until(lambda: lock_of(shop, "*:queued") is None, "our mark has been freed")
    assert shop.pttl(lock_of(shop, HEIMDALL)) > 3_500_000
    assert tasks.heimdall["work"].apply_async(("late",), queue=NOWHERE).id == results[0].id
    assert shop.llen(NOWHERE) == 0
    assert lock_of(shop, CACHED) is None
    assert tasks.cached.delay("late").get(timeout=20) == "late"


def test_call_of_heimdall_by_its_name_only(busy, tasks, shop, journal, gates):
    """The second is skipped when it starts, but deletes the lock of the first: a third runs beside that."""
    name = "gated-named-heimdall"
    first = tasks.app.send_task("heimdall.work", (name,))
    journal.wait_for("start", task_id=first.id)
    assert shop.get(lock_of(shop, HEIMDALL)) == first.id
    second = tasks.app.send_task("heimdall.work", (name,))
    assert second.get(timeout=20) is None
    journal.wait_for("postrun", task_id=second.id)
    assert started(journal, second) == 0
    assert lock_of(shop, HEIMDALL) is None
    third = tasks.app.send_task("heimdall.work", (name,))
    journal.wait_for("start", task_id=third.id)
    assert journal.words(first.id) == ["start"], "the first runs still"
    gates(name)
    gates(name)
    assert [first.get(timeout=20), third.get(timeout=20)] == [name, name]


def test_third_call_by_its_name_only(busy, tasks, journal, gates):
    """The recipe and ours skip the third as well."""
    for task, skips in (("cached.work", lambda answer: answer is None), ("ours.work", is_skipped)):
        name = f"gated-third-{task}"
        first = tasks.app.send_task(task, (name,))
        journal.wait_for("start", task_id=first.id)
        for _ in range(2):
            result = tasks.app.send_task(task, (name,))
            assert skips(result.get(timeout=20))
            journal.wait_for("postrun", task_id=result.id)
            assert started(journal, result) == 0
        assert journal.words(first.id) == ["start"], "the first runs still"
        gates(name)
        assert first.get(timeout=20) == name


def test_call_of_heimdall_that_is_published_during_the_run(busy, tasks, journal, gates):
    """It is not published: the caller gets the run that began before."""
    name = "gated-during-heimdall"
    first = tasks.heimdall["work"].delay(name)
    journal.wait_for("start", task_id=first.id)
    assert tasks.heimdall["work"].delay(name).id == first.id
    gates(name)
    journal.wait_for("postrun", task_id=first.id)
    assert received(busy, first) == 1
    assert len(journal.entries(what="start", name=repr(name))) == 1


def test_call_of_the_recipe_that_is_published_during_the_run(busy, tasks, journal, gates):
    """It is skipped if a worker takes it during the run; it runs if one takes it afterwards."""
    name, late = "gated-during-cached", f"late-{uuid.uuid4().hex}"
    first = tasks.cached.delay(name)
    journal.wait_for("start", task_id=first.id)
    at_once = tasks.cached.delay(name)
    queued = tasks.cached.apply_async((name,), queue=late)
    assert at_once.get(timeout=20) is None
    assert started(journal, at_once) == 0
    assert journal.words(first.id) == ["start"], "the first runs still"
    gates(name)
    assert first.get(timeout=20) == name
    take_from(busy, tasks, late)
    gates(name)
    assert queued.get(timeout=20) == name
    assert started(journal, queued) == 1
