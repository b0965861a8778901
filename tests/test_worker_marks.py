"""From the mark to the start and beyond: real workers, real messages, real kills."""

import base64
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import redis
from celery import uuid
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError
from celery.signals import after_task_publish

from celery_setnx import AlreadyRunning, LockTimeout, is_skipped
from celery_setnx.lock import verbs
from celery_setnx.lock.names import mark_name
from celery_setnx.testing import pass_time
from tests.conftest import LOCK_DB
from tests.harness import Journal, settle_marks, wait_until
from tests.proxy import Proxy
from tests.stage import assert_one_at_a_time, redeliver, revoke, unacknowledged


@pytest.fixture(scope="module")
def way(server, module_worker) -> Iterator[Proxy]:
    """The way to its locks of a worker that consumes the queue `by-way`."""
    with Proxy(server.port) as proxy:
        module_worker(queues="by-way", conf={"setnx_url": proxy.url(LOCK_DB)})
        yield proxy


def mark_of(task: Any, name: str) -> str:
    return mark_name(task.lock_key(name))


def wait_until_freed(locks: redis.Redis, task: Any, name: str = "a") -> None:
    """A mark that will start no task is freed, long before its queue lease is over."""
    wait_until(lambda: not locks.exists(mark_of(task, name)), "the mark is freed", 60)


def test_call_is_a_duplicate_until_it_is_done(tasks, journal, gates, parked, holding):
    """until_done: queued and running count; afterwards the next call is sent."""
    first = tasks.done.apply_async(["gated"], queue="parked")
    assert tasks.done.delay("gated").id == first.id
    parked.move()
    journal.wait_for("start", task_id=first.id)
    assert tasks.done.delay("gated").id == first.id
    gates("gated")
    first.get(timeout=60)
    with holding(tasks.done) as second:
        assert not second.deduplicated
    assert journal.entries(what="lapsed") == []


@pytest.mark.parametrize(
    ("name", "options"),
    [("done_twice", {}), ("autoretried", {}), ("done_twice", {"hold_on_retry": True})],
    ids=["retried", "autoretried", "held"],
)
def test_call_is_not_done_between_its_attempts(tasks, journal, parked, locks, name, options):
    """until_done: while the task's own retry is queued, calls are duplicates of it, and nothing lapses."""
    options = {**options, "dedupe": "until_done", "queue_lease": 60}  # of the call, and of its retries too
    send = partial(getattr(tasks, name).apply_async, ["a"], singleton=options)
    first = journal.reached("released", send())
    assert len(parked) == 1
    if "hold_on_retry" not in options:
        assert 55_000 < locks.pttl(mark_of(getattr(tasks, name), "a")) <= 60_000
    assert [send().id for _time in range(2)] == [first.id] * 2
    parked.move()
    assert first.get(timeout=60) == "a"
    assert len(journal.wait_for("start", count=2, task_id=first.id)) == 2
    assert not locks.exists(mark_of(getattr(tasks, name), "a"))
    assert journal.entries(what="lapsed") == []


def test_mark_of_a_retry_is_not_shortened_by_a_slow_publisher(tasks, journal, locks):
    """A task may have run, and be queued again for long, before its publisher gets to extend the mark."""

    def slow(headers: dict[str, Any], **_details: Any) -> None:
        journal.wait_for("released", task_id=headers["id"])

    after_task_publish.connect(slow)
    try:
        tasks.done_twice.delay("a", 7200)
    finally:
        after_task_publish.disconnect(slow)
    settle_marks(tasks.done_twice.app)
    assert 10_700_000 < locks.pttl(mark_of(tasks.done_twice, "a")) <= 10_800_000


@pytest.mark.parametrize("options", [{}, {"hold_on_retry": True}], ids=["done", "held"])
def test_retry_with_another_key_leaves_nothing_of_the_old_one(tasks, journal, locks, options):
    """self.retry(args=...) is queued under its new key; once it is done the old key is free."""
    task = tasks.done_page
    result = task.apply_async(["a"], singleton=options)
    assert result.get(timeout=60) == "next"
    journal.wait_for("released", count=2, task_id=result.id)
    assert not locks.exists(mark_of(task, "a"), task.lock_key("a"))


def test_call_may_be_sent_between_the_attempts_of_one_that_has_started(tasks, journal, parked):
    """until_started: a task that has started makes no duplicates, not even by its retry."""
    options = {"dedupe": "until_started"}
    first = journal.reached("released", tasks.done_twice.apply_async(["a"], singleton=options))
    second = tasks.done_twice.apply_async(["a"], singleton=options)
    assert not second.deduplicated
    wait_until(lambda: len(parked) == 2, "both retries are queued")
    parked.move()
    parked.move()
    assert [first.get(timeout=60), second.get(timeout=30)] == ["a", "a"]
    assert journal.entries(what="lapsed") == []


def by_name(tasks: Any, name: str, **options: Any) -> Any:
    """A call by a producer that does not know the task, as beat publishes what it has not imported."""
    return tasks.app.send_task(tasks.started.name, [name], **options)


def test_calls_by_name_during_a_run_leave_one_that_follows(tasks, journal, gates, holding, locks):
    """The first of them waits, marked as queued; the others are its duplicates, and end with a result."""
    with holding(tasks.started, task_id=uuid()) as first:
        follows = journal.reached("conflict", by_name(tasks, "gated"))
        wait_until(lambda: locks.get(mark_of(tasks.started, "gated")) == follows.id, "its mark")
        others = [by_name(tasks, "gated") for _ in range(3)]
        assert all(is_skipped(other.get(timeout=60)) for other in others)
        policies = [journal.wait_for("conflict", task_id=other.id)[0]["policy"] for other in others]
        assert policies == ["skip"] * 3
        published = tasks.started.delay("gated")
        assert published.deduplicated
        assert published.id == follows.id
    journal.wait_for("start", task_id=follows.id)
    gates("gated")
    assert follows.get(timeout=60) == "gated"
    assert [entry["task_id"] for entry in journal.entries(what="start")] == [first.id, follows.id]
    assert journal.entries(what="lapsed") == []


def test_call_by_name_that_is_delivered_again_while_it_runs_is_not_queued(tasks, journal, gates, locks):
    """It waits for itself, unmarked: a call that is published meanwhile must be sent, and run afterwards."""
    first = journal.reached("start", by_name(tasks, "gated"))
    by_name(tasks, "gated", task_id=first.id)
    journal.wait_for("conflict", task_id=first.id)
    assert not locks.exists(mark_of(tasks.started, "gated"))
    second = tasks.started.delay("gated")
    assert not second.deduplicated
    gates("gated", 3)  # the other delivery runs as well, unless it finds that the call has succeeded
    assert second.get(timeout=60) == "gated"


def test_call_by_name_that_is_awaited_is_never_a_duplicate(tasks, journal, gates, holding):
    """A call with a callback waits its turn, though the same call is queued already."""
    with holding(tasks.started, task_id=uuid()):
        follows = journal.reached("conflict", by_name(tasks, "gated"))
        awaited = journal.reached("conflict", by_name(tasks, "gated", link=tasks.done.si("plain")))
    gates("gated", 2)
    assert follows.get(timeout=60) == awaited.get(timeout=30) == "gated"


def test_lock_wait_keeps_the_mark(tasks, journal, gates, holding, locks):
    """A call that waits for its lock is queued still: its mark lasts until its courier comes, and longer."""
    mark = mark_of(tasks.started, "gated")
    with holding(tasks.started, task_id=uuid()):
        options = {"queue_lease": 60}
        second = journal.reached("waiting", tasks.started.apply_async(["gated"], singleton=options))
        assert locks.get(mark) == second.id
        journal.wait_for("postrun", task_id=second.id)
        assert locks.pttl(mark) > (480 + 50) * 1000
        assert tasks.started.delay("gated").id == second.id
    gates("gated")
    assert second.get(timeout=60) == "gated"
    assert journal.entries(what="lapsed") == []


def test_call_with_the_id_of_one_that_has_waited_runs(tasks, journal, gates, holding):
    """A producer may use an id again: what is remembered of the first call does not drop the second."""
    second = uuid()
    with holding(tasks.started, task_id=uuid()):
        tasks.started.apply_async(["gated"], task_id=second)
        journal.wait_for("waiting", task_id=second)
    gates("gated")
    journal.wait_for("postrun", task_id=second, state="SUCCESS")
    gates("gated")
    tasks.started.apply_async(["gated"], task_id=second)
    wait_until(lambda: len(journal.entries(what="end", task_id=second)) == 2, "its second run")


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("done", {}, None),
        ("done", {"on_conflict": "raise"}, AlreadyRunning),
        ("done", {"on_conflict": "retry", "max_wait": 0}, LockTimeout),
        ("own_policy", {"dedupe": "until_done"}, None),
    ],
    ids=["skip", "raise", "timeout", "callable"],
)
def test_conflict_that_ends_the_call_frees_its_mark(tasks, holding, locks, parked, name, options, error):
    """A call that is skipped, refused or decided upon is queued no more."""
    task = getattr(tasks, name)
    second = task.apply_async(["gated"], queue="parked", singleton=options)
    with holding(task, task_id=uuid()) as first:
        assert locks.get(mark_of(task, "gated")) == second.id
        parked.move()
        result = second.get(timeout=30, propagate=False)
        assert not locks.exists(mark_of(task, "gated"))
    if error:
        assert isinstance(result, error)
    else:
        assert is_skipped(result) or result["holder"] == first.id


@pytest.mark.parametrize(("name", "is_marked_again"), [("started", False), ("started", True), ("done", True)])
def test_lapsed_mark_drops_no_task(tasks, journal, locks, parked, worker, name, is_marked_again):
    """A call that waited in the queue for too long runs all the same, and tells.

    If its mark is another's by now, it does not touch that.
    """
    task = getattr(tasks, name)
    first = task.apply_async(["a"], queue="parked", singleton={"queue_lease": 0.1})
    wait_until(lambda: not locks.exists(mark_of(task, "a")), "the mark has lapsed")
    second = task.apply_async(["a"], queue="parked") if is_marked_again else None
    parked.move()
    assert first.get(timeout=60) == "a"
    if second:
        assert not second.deduplicated
        assert locks.get(mark_of(task, "a")) == second.id
        parked.move()
        assert second.get(timeout=60) == "a"
    (lapsed,) = journal.entries(what="lapsed")
    assert (lapsed["task_id"], lapsed["key"]) == (first.id, task.lock_key("a"))
    assert lapsed.get("marked_by") == (second and second.id)
    worker.wait_for_log(f"[{first.id}] started after its mark")


def test_unguarded_run_frees_its_mark_when_it_is_over(tasks, journal, gates, locks, way):
    """on_redis_error="run": nothing could end the mark at the start, so the end of the run does."""
    acquire = verbs.ACQUIRE.sha.encode()
    with way.fault("answer", containing=acquire, times=2, reply=b"-LOADING not yet\r\n"):
        options = {"on_redis_error": "run"}
        result = tasks.started.apply_async(["gated"], queue="by-way", singleton=options)
        (start,) = journal.wait_for("start", task_id=result.id)
    assert start["key"] is None
    assert locks.get(mark_of(tasks.started, "gated")) == result.id
    gates("gated")
    assert result.get(timeout=60) == "gated"
    assert not locks.exists(mark_of(tasks.started, "gated"))


def test_lost_replies_are_no_lapse(tasks, journal, locks, way):
    """The worker asks again after a lost reply, and knows that the mark was its own."""
    tasks.started.apply_async(["warm"], queue="by-way").get(timeout=60)
    with way.fault("drop_reply", containing=verbs.ACQUIRE.sha.encode()):
        assert tasks.started.apply_async(["a"], queue="by-way").get(timeout=60) == "a"
    assert journal.entries(what="lapsed") == []


def test_repeated_delivery_of_a_finished_call_is_no_lapse(tasks, journal, parked, worker):
    """A second delivery that is dropped has not started: there is nothing to tell."""
    result = tasks.started.apply_async(["a"], queue="parked")
    copies: list[dict[str, Any]] = []
    parked.move(lambda message: copies.append(json.loads(json.dumps(message))))
    assert result.get(timeout=60) == "a"
    (copy,) = copies
    copy["headers"]["redelivered"] = copy["properties"]["delivery_info"]["redelivered"] = True
    parked.send(copy)
    worker.wait_for_log(f"[{result.id}]: this message is dropped: it has succeeded before")
    assert journal.entries(what="lapsed") == []


@pytest.mark.parametrize(
    ("headers", "change", "said"),
    [
        ({}, {}, "Discarding revoked task: tests.workerapp.started"),
        ({"expires": "2024-05-06T00:00:00+00:00"}, {}, "Discarding revoked task: tests.workerapp.started"),
        ({"task": "unknown"}, {}, "Received unregistered task of type 'unknown'"),
        ({}, {"content-type": "application/x-python"}, "ContentDisallowed"),
        ({}, {"body": base64.b64encode(b"{broken").decode()}, "Can't decode message body"),
    ],
    ids=["revoked", "expired", "unknown", "refused", "unreadable"],
)
def test_message_that_starts_nothing_frees_its_mark(
    tasks, journal, locks, parked, worker, headers, change, said
):
    """Revoked, too late, of an unknown task, refused or broken: the worker frees its mark with it."""
    result = tasks.started.apply_async(["a"], queue="parked")
    assert locks.get(mark_of(tasks.started, "a")) == result.id
    if not headers and not change:
        revoke(tasks.app, result, worker)

    def broken(message: dict[str, Any]) -> None:
        message.update(change)
        message["headers"].update(headers)
        message["headers"]["singleton"]["task"] = message["headers"]["task"]

    parked.move(broken)
    worker.wait_for_log(said)
    wait_until_freed(locks, tasks.started)
    assert journal.entries(what="start") == []


@pytest.mark.parametrize("bar", ["fail", "ignore", "reject", "init"])
def test_call_that_ends_before_its_body_frees_its_mark(stage, journal, locks, bar):
    """before_start or Celery's loader raises: the call will not run, and its mark ends with it."""
    task = stage.tasks.barred
    result = task.apply_async([stage.key], {"bar": bar})
    journal.wait_for("postrun", task_id=result.id)
    wait_until_freed(locks, task, stage.key)
    assert stage.starts() == []


def test_call_that_retries_before_its_body_keeps_its_mark(stage, journal, locks):
    """before_start retries: the call is queued until its retry has started."""
    result = stage.tasks.barred.apply_async([stage.key], {"bar": "retry"})
    stage.has_run(result)
    wait_until_freed(locks, stage.tasks.barred, stage.key)
    assert journal.entries(what="lapsed") == []


def test_call_that_its_pool_process_cannot_read_frees_its_mark(stage, locks, start_worker):
    """The worker's parent has read it, its child refuses it, and Celery stores a failure."""
    start_worker(queues=stage.key, conf={"include": ["tests.waitapp"], "pool_accepts": ["yaml"]})
    result = stage.tasks.barred.apply_async([stage.key], queue=stage.key)
    with pytest.raises(Exception, match="Refusing to deserialize"):
        result.get(timeout=60)
    wait_until_freed(locks, stage.tasks.barred, stage.key)


def test_request_of_ones_own_does_its_part_beside_ours(tasks, journal, locks, parked, worker):
    """A class that is derived from SingletonRequest frees the mark of a revoked call, as ours does."""
    result = tasks.own_request.apply_async(["a"], queue="parked")
    assert locks.get(mark_of(tasks.own_request, "a")) == result.id
    revoke(tasks.app, result, worker)
    parked.move()
    wait_until_freed(locks, tasks.own_request)
    journal.wait_for("discarded", task_id=result.id)


@pytest.mark.parametrize("has_header", [True, False])
def test_revoked_retry_frees_its_mark(tasks, journal, locks, parked, worker, has_header):
    """A retry that will not come is queued no more; nor is that of a call by name, which took no mark."""
    task = tasks.done_twice
    result = task.delay("a") if has_header else tasks.app.send_task(task.name, kwargs={"name": "a"})
    journal.wait_for("released", task_id=result.id)
    assert locks.get(mark_of(task, "a")) == result.id
    revoke(tasks.app, result, worker)
    parked.move()
    wait_until_freed(locks, task)


@pytest.mark.parametrize("options", [{}, {"hold_on_retry": True}], ids=["done", "held"])
def test_retry_that_is_revoked_before_its_own_first_attempt_ends_leaves_nothing(
    tasks, journal, gates, locks, worker, options
):
    """What the first attempt leaves for a retry that was thrown away already must not stay."""
    task = tasks.lingering
    result = journal.reached("start", task.apply_async(["gated"], singleton=tasks.DONE | options))
    result.revoke()
    worker.wait_for_log(f"Discarding revoked task: {task.name}[{result.id}]")
    # By the end of these the worker's parent has freed what there was to free.
    for other in ("a", "b", "c"):
        tasks.started.delay(other).get(timeout=60)
    gates("gated")
    journal.wait_for("released", task_id=result.id)
    wait_until(lambda: not locks.exists(mark_of(task, "gated"), task.lock_key("gated")), "nothing is left")


def stands(journal: Journal, task: Any, queue: str = "celery", **options: Any) -> Any:
    """A call that was accepted, and stands still before it starts."""
    result = task.apply_async(kwargs={"name": "a", "stands": True}, queue=queue, **options)
    journal.wait_for("prerun", task_id=result.id)
    return result


def test_call_lost_by_its_worker_costs_its_queue_lease(tasks, journal, start_worker):
    """kill -9 between receive and start, acknowledged early: the call is lost, and its mark lapses."""
    doomed = start_worker(concurrency=1, queues="doomed")
    lost = stands(journal, tasks.started, "doomed", singleton={"queue_lease": 600})
    doomed.kill()
    assert tasks.started.delay("a").id == lost.id
    pass_time(600, tasks.started, "a")
    fresh = tasks.started.delay("a")
    assert fresh.id != lost.id
    assert fresh.get(timeout=60) == "a"
    assert [word for word in journal.words(lost.id) if word != "deduplicated"] == ["prerun"]
    assert journal.entries(what="lapsed") == []


def test_call_lost_with_its_pool_process_frees_its_mark(tasks, journal, locks):
    """kill -9 of a pool process before the start: the worker's parent knows that the call will not come."""
    result = stands(journal, tasks.started)
    os.kill(journal.entries(what="prerun")[0]["pid"], signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        result.get(timeout=60)
    wait_until_freed(locks, tasks.started)


@pytest.mark.parametrize("end", ["time limit", "terminated"])
def test_call_that_celery_ends_before_its_start_frees_its_mark(tasks, journal, locks, end):
    """Its message is not delivered again, though that of a call whose process was lost would be."""
    result = stands(journal, tasks.tardy, time_limit=5 if end == "time limit" else 60)
    if end == "terminated":
        tasks.app.control.revoke(result.id, terminate=True, signal="SIGKILL")
    with pytest.raises((TimeLimitExceeded, TaskRevokedError)):
        result.get(timeout=60)
    wait_until_freed(locks, tasks.tardy)


def test_call_that_comes_back_from_its_dead_worker_starts_under_its_mark(
    tasks, journal, gates, locks, start_worker
):
    """kill -9 between receive and start with acks_late: a duplicate until the message is delivered again."""
    doomed = start_worker(concurrency=1, queues="doomed")
    result = stands(journal, tasks.late, "doomed")
    doomed.kill()
    redeliver(journal._client, unacknowledged(journal._client, "doomed"), to="celery")
    journal.wait_for("prerun", count=2, task_id=result.id)
    assert tasks.late.delay("a").id == result.id
    gates(result.id, 2)  # the server may give one to the dead
    assert result.get(timeout=60) == "a"
    assert len(journal.entries(what="start", task_id=result.id)) == 1
    wait_until_freed(locks, tasks.late)
    assert journal.entries(what="lapsed") == []


def test_marks_lost_with_their_server_lose_no_call(tasks, journal, locks, parked):
    """FLUSHDB while calls are queued: one more per key may be sent, all run one by one, and that is told."""
    names = [f"key-{number}" for number in range(5)]
    firsts = {name: tasks.started.apply_async([name], queue="parked") for name in names}
    locks.flushdb()
    seconds = {name: tasks.started.apply_async([name], queue="parked") for name in names}
    assert not any(result.deduplicated for result in seconds.values())
    assert all(tasks.started.apply_async([name], queue="parked").deduplicated for name in names)
    for _message in range(len(names) * 2):
        parked.move()
    for name in names:
        assert [firsts[name].get(timeout=60), seconds[name].get(timeout=30)] == [name, name]
        assert len(journal.entries(what="start", name=name)) == 2
    assert_one_at_a_time(journal)
    lapsed = journal.entries(what="lapsed")
    assert sorted(entry["task_id"] for entry in lapsed) == sorted(result.id for result in firsts.values())
