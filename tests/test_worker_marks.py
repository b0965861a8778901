"""From the mark to the start and beyond: real workers, real messages, real kills."""

import base64
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import pytest
import redis
from celery import uuid
from celery.exceptions import WorkerLostError
from celery.signals import after_task_publish

from celery_setnx import AlreadyRunning, LockTimeout, is_skipped
from celery_setnx import lock as lock_module
from celery_setnx.keys import mark_name
from celery_setnx.publish import send_task
from tests.conftest import LOCK_DB
from tests.harness import Journal, Worker, wait_until
from tests.proxy import Proxy

LATE_DB = 6
"""The broker whose messages come back soon."""

FREED_S = 10.0
"""A mark that will start no task is gone by then."""


@pytest.fixture(scope="module")
def way(server) -> Iterator[Proxy]:
    """The worker's way to its locks."""
    with Proxy(server.port) as proxy:
        yield proxy


@pytest.fixture(scope="module")
def marks_worker(logs, way) -> Iterator[Worker]:
    """A worker that consumes the queue `marks`, and not the queue `parked`."""
    environment = {"SETNX_TEST_LOCK_URL": way.url(LOCK_DB)}
    worker = Worker(logs, "tests.markapp", concurrency=3, queues="marks", environment=environment)
    yield worker
    worker.stop()


@pytest.fixture
def tasks(marks_worker, locks, journal) -> Any:
    """The module of tasks that the worker runs, with clean databases."""
    from tests import markapp

    journal._client.delete("parked")
    return markapp


@pytest.fixture
def parked(journal) -> Callable[[], int]:
    """How many messages are in the queue that nobody consumes."""
    return lambda: journal._client.llen("parked")


@pytest.fixture
def move(journal) -> Callable[..., None]:
    """Hands the oldest parked message to the worker, as if it had been sent there, maybe changed."""

    def move(change: Callable[[dict[str, Any]], None] = lambda message: None) -> None:
        message = json.loads(wait_until(lambda: journal._client.rpop("parked"), "a parked message"))
        _redirect(message)
        change(message)
        journal._client.lpush("marks", json.dumps(message))

    return move


def mark_of(task: Any, name: str) -> str:
    return mark_name(task.lock_key(name))


def running(journal: Journal, task: Any, name: str, **options: Any) -> Any:
    """A call that never was a duplicate, and took no mark; its body has started and waits at its gate."""
    result = task.apply_async([name], task_id=uuid(), **options)
    journal.wait_for("start", task_id=result.id)
    return result


def test_mark_is_gone_when_the_body_runs_and_the_next_call_runs_after_it(tasks, journal, gates, locks):
    """until_started: one runs, one waits for its lock, and a third is a duplicate of the one that waits."""
    first = tasks.started.delay("gated")
    journal.wait_for("start", task_id=first.id)
    assert not locks.exists(mark_of(tasks.started, "gated"))
    second = tasks.started.delay("gated")
    assert not second.deduplicated
    assert journal.wait_for("conflict", task_id=second.id)[0]["policy"] == "wait"
    assert tasks.started.delay("gated").id == second.id
    gates("gated")
    gates("gated")
    assert [first.get(timeout=10), second.get(timeout=10)] == ["gated", "gated"]
    ends, starts = (journal.entries(what=what, name="gated") for what in ("end", "start"))
    assert ends[0]["at"] <= starts[1]["at"]
    assert not locks.exists(mark_of(tasks.started, "gated"))
    assert journal.entries(what="lapsed") == []


def test_call_is_a_duplicate_until_it_is_done(tasks, journal, gates):
    """until_done: queued and running count; afterwards the next call is sent."""
    first = tasks.done.delay("gated")
    assert tasks.done.delay("gated").id == first.id
    journal.wait_for("start", task_id=first.id)
    assert tasks.done.delay("gated").id == first.id
    gates("gated")
    first.get(timeout=10)
    second = tasks.done.delay("gated")
    assert not second.deduplicated
    gates("gated")
    assert second.get(timeout=10) == "gated"
    assert journal.entries(what="lapsed") == []


@pytest.mark.parametrize("name", ["done_twice", "done_autoretried", "done_held"])
def test_call_is_not_done_between_its_attempts(tasks, journal, parked, move, locks, name):
    """until_done: while the task's own retry is queued, calls are duplicates of it, and nothing lapses."""
    task = getattr(tasks, name)
    first = task.delay("a")
    journal.wait_for("released", task_id=first.id)
    assert parked() == 1
    assert [task.delay("a").id for _time in range(2)] == [first.id] * 2
    move()
    assert first.get(timeout=10) == "a"
    assert len(journal.wait_for("start", count=2, task_id=first.id)) == 2
    assert not locks.exists(mark_of(task, "a"))
    assert journal.entries(what="lapsed") == []


def test_mark_of_a_retry_lasts_for_its_queue_lease(tasks, journal, locks, parked, move):
    """The queue lease of the call holds for its retries too."""
    result = tasks.done_twice.apply_async(["a"], singleton={"queue_lease": 60})
    journal.wait_for("released", task_id=result.id)
    assert 55_000 < locks.pttl(mark_of(tasks.done_twice, "a")) <= 60_000
    move()
    result.get(timeout=10)


def test_mark_of_a_retry_is_not_shortened_by_a_slow_publisher(tasks, journal, locks):
    """A task may have run, and be queued again for long, before its publisher gets to extend the mark."""

    def slow(headers: dict[str, Any], **_details: Any) -> None:
        journal.wait_for("released", task_id=headers["id"])

    after_task_publish.connect(slow)
    try:
        tasks.done_later.delay("a")
    finally:
        after_task_publish.disconnect(slow)
    assert 10_700_000 < locks.pttl(mark_of(tasks.done_later, "a")) <= 10_800_000


@pytest.mark.parametrize("name", ["done_page", "held_page"])
def test_retry_with_another_key_leaves_nothing_of_the_old_one(tasks, journal, locks, name):
    """self.retry(args=...) is queued under its new key; once it is done the old key is free."""
    task = getattr(tasks, name)
    result = task.delay("a")
    assert result.get(timeout=10) == "next"
    journal.wait_for("released", count=2, task_id=result.id)
    assert not locks.exists(mark_of(task, "a"), task.lock_key("a"))


def test_call_may_be_sent_between_the_attempts_of_one_that_has_started(tasks, journal, parked, move):
    """until_started: a task that has started makes no duplicates, not even by its retry."""
    first = tasks.started_twice.delay("a")
    journal.wait_for("released", task_id=first.id)
    second = tasks.started_twice.delay("a")
    assert not second.deduplicated
    wait_until(lambda: parked() == 2, "both retries are queued")
    move()
    move()
    assert [first.get(timeout=10), second.get(timeout=10)] == ["a", "a"]
    assert journal.entries(what="lapsed") == []


def by_name(tasks: Any, name: str, **options: Any) -> Any:
    """A call by a producer that does not know the task, as beat publishes what it has not imported."""
    return tasks.app.send_task(tasks.started.name, [name], queue="marks", **options)


def test_calls_by_name_during_a_run_leave_one_that_follows(tasks, journal, gates, locks):
    """The first of them waits, marked as queued; the others are its duplicates, and end with a result."""
    first = running(journal, tasks.started, "gated")
    follows = by_name(tasks, "gated")
    journal.wait_for("conflict", task_id=follows.id)
    wait_until(lambda: locks.get(mark_of(tasks.started, "gated")) == follows.id, "its mark")
    others = [by_name(tasks, "gated") for _ in range(3)]
    assert all(is_skipped(other.get(timeout=10)) for other in others)
    assert [journal.wait_for("conflict", task_id=other.id)[0]["policy"] for other in others] == ["skip"] * 3
    published = tasks.started.delay("gated")
    assert published.deduplicated
    assert published.id == follows.id
    gates("gated")
    assert first.get(timeout=10) == "gated"
    journal.wait_for("start", task_id=follows.id)
    gates("gated")
    assert follows.get(timeout=10) == "gated"
    assert [entry["task_id"] for entry in journal.entries(what="start")] == [first.id, follows.id]
    assert journal.entries(what="lapsed") == []


def test_call_by_name_that_is_delivered_again_while_it_runs_is_not_queued(tasks, journal, gates, locks):
    """It waits for itself, unmarked: a call that is published meanwhile must be sent, and run afterwards."""
    first = by_name(tasks, "gated")
    journal.wait_for("start", task_id=first.id)
    by_name(tasks, "gated", task_id=first.id)
    journal.wait_for("conflict", task_id=first.id)
    assert not locks.exists(mark_of(tasks.started, "gated"))
    second = tasks.started.delay("gated")
    assert not second.deduplicated
    for _ in range(3):  # the other delivery runs as well, unless it finds that the call has succeeded
        gates("gated")
    assert second.get(timeout=10) == "gated"


def test_call_by_name_that_is_awaited_is_never_a_duplicate(tasks, journal, gates):
    """A call with a callback waits its turn, though the same call is queued already."""
    running(journal, tasks.started, "gated")
    follows = by_name(tasks, "gated")
    journal.wait_for("conflict", task_id=follows.id)
    awaited = by_name(tasks, "gated", link=tasks.done.si("plain"))
    journal.wait_for("conflict", task_id=awaited.id)
    for _ in range(3):
        gates("gated")
    assert follows.get(timeout=10) == awaited.get(timeout=10) == "gated"


def test_lock_wait_keeps_the_mark(tasks, journal, gates, locks):
    """A call that waits for its lock is queued still: its courier extends its mark with every visit."""
    first = running(journal, tasks.started, "gated")
    second = tasks.started.apply_async(["gated"], singleton={"queue_lease": 9})
    journal.wait_for("waiting", task_id=second.id)
    mark = mark_of(tasks.started, "gated")
    assert locks.get(mark) == second.id
    locks.pexpire(mark, 6_000)
    wait_until(lambda: locks.pttl(mark) > 6_000, "the mark is extended")
    assert tasks.started.delay("gated").id == second.id
    gates("gated")
    gates("gated")
    assert [first.get(timeout=10), second.get(timeout=10)] == ["gated", "gated"]
    assert journal.entries(what="lapsed") == []


def test_call_with_the_id_of_one_that_has_waited_runs(tasks, journal, gates):
    """A producer may use an id again: what is remembered of the first call does not drop the second."""
    first, second = running(journal, tasks.started, "gated"), uuid()
    tasks.started.apply_async(["gated"], task_id=second)
    journal.wait_for("waiting", task_id=second)
    gates("gated")
    gates("gated")
    first.get(timeout=10)
    journal.wait_for("postrun", task_id=second, state="SUCCESS")
    gates("gated")
    tasks.started.apply_async(["gated"], task_id=second)
    wait_until(lambda: len(journal.entries(what="end", task_id=second)) == 2, "its second run", 5)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("done", {}, None),
        ("done", {"on_conflict": "raise"}, AlreadyRunning),
        ("done", {"on_conflict": "retry", "max_wait": 0}, LockTimeout),
        ("done_own_policy", {}, None),
    ],
    ids=["skip", "raise", "timeout", "callable"],
)
def test_conflict_that_ends_the_call_frees_its_mark(tasks, journal, gates, locks, move, name, options, error):
    """A call that is skipped, refused or decided upon is queued no more."""
    task = getattr(tasks, name)
    second = task.apply_async(["gated"], queue="parked", singleton=options)
    first = running(journal, task, "gated")
    assert locks.get(mark_of(task, "gated")) == second.id
    move()
    if error is None:
        result = second.get(timeout=10)
        assert result == {"busy": first.id} or is_skipped(result)
    else:
        with pytest.raises(error):
            second.get(timeout=10)
    assert not locks.exists(mark_of(task, "gated"))
    gates("gated")
    first.get(timeout=10)


def test_lapsed_mark_drops_no_task(tasks, journal, locks, move, marks_worker):
    """A call that waited in the queue for too long runs all the same, and tells."""
    result = tasks.started.apply_async(["a"], queue="parked", singleton={"queue_lease": 0.1})
    wait_until(lambda: not locks.exists(mark_of(tasks.started, "a")), "the mark has lapsed")
    move()
    assert result.get(timeout=10) == "a"
    (lapsed,) = journal.entries(what="lapsed")
    assert lapsed["task_id"] == result.id
    assert lapsed["key"] == tasks.started.lock_key("a")
    assert "marked_by" not in lapsed
    marks_worker.wait_for_log(f"[{result.id}] was the only one queued when it was published")


@pytest.mark.parametrize("name", ["started", "done"])
def test_mark_of_another_is_left_alone(tasks, journal, locks, move, name):
    """A call whose mark is another's by now runs, tells, and does not touch the other's mark."""
    task = getattr(tasks, name)
    first = task.apply_async(["a"], queue="parked", singleton={"queue_lease": 0.1})
    wait_until(lambda: not locks.exists(mark_of(task, "a")), "the mark has lapsed")
    second = task.apply_async(["a"], queue="parked")
    assert not second.deduplicated
    move()
    assert first.get(timeout=10) == "a"
    assert locks.get(mark_of(task, "a")) == second.id
    move()
    assert second.get(timeout=10) == "a"
    (lapsed,) = journal.entries(what="lapsed")
    assert (lapsed["task_id"], lapsed["marked_by"]) == (first.id, second.id)


def test_unguarded_run_frees_its_mark_when_it_is_over(tasks, journal, gates, locks, way):
    """on_redis_error="run": nothing could end the mark at the start, so the end of the run does."""
    acquire = lock_module._ACQUIRE.sha.encode()
    with way.fault("answer", containing=acquire, times=2, reply=b"-LOADING not yet\r\n"):
        result = tasks.started.apply_async(["gated"], singleton={"on_redis_error": "run"})
        (start,) = journal.wait_for("start", task_id=result.id)
    assert start["key"] is None
    assert locks.get(mark_of(tasks.started, "gated")) == result.id
    gates("gated")
    assert result.get(timeout=10) == "gated"
    assert not locks.exists(mark_of(tasks.started, "gated"))


def test_lost_replies_are_no_lapse(tasks, journal, locks, way):
    """The worker asks again after a lost reply, and knows that the mark was its own."""
    tasks.started.delay("warm").get(timeout=10)
    with way.fault("drop_reply", containing=lock_module._ACQUIRE.sha.encode()):
        assert tasks.started.delay("a").get(timeout=10) == "a"
    assert journal.entries(what="lapsed") == []


def test_repeated_delivery_of_a_finished_call_is_no_lapse(tasks, journal, move, marks_worker):
    """A second delivery that is dropped has not started: there is nothing to tell."""
    result = tasks.started.apply_async(["a"], queue="parked")
    copies: list[dict[str, Any]] = []
    move(lambda message: copies.append(json.loads(json.dumps(message))))
    assert result.get(timeout=10) == "a"
    (copy,) = copies
    copy["headers"]["redelivered"] = copy["properties"]["delivery_info"]["redelivered"] = True
    journal._client.lpush("marks", json.dumps(copy))
    marks_worker.wait_for_log(f"[{result.id}] has succeeded before")
    assert journal.entries(what="lapsed") == []


def test_revoked_call_frees_its_mark(tasks, journal, locks):
    """Revoked while it waits for its time: the next call is sent."""
    result = tasks.started.apply_async(["a"], countdown=3)
    assert locks.get(mark_of(tasks.started, "a")) == result.id
    result.revoke()
    wait_until(lambda: not locks.exists(mark_of(tasks.started, "a")), "the mark is freed", FREED_S)
    assert journal.entries(what="start") == []


def test_expired_call_frees_its_mark(tasks, journal, locks):
    """The worker frees the mark of a message that came too late, if it has not lapsed with it."""
    result = tasks.started.apply_async(["a"], countdown=3, expires=2)
    locks.pexpire(mark_of(tasks.started, "a"), 60_000)
    assert locks.get(mark_of(tasks.started, "a")) == result.id
    wait_until(lambda: not locks.exists(mark_of(tasks.started, "a")), "the mark is freed", FREED_S)
    assert journal.entries(what="start") == []


def test_unknown_task_frees_its_mark(tasks, locks, marks_worker):
    """A worker that does not know the task throws its message away, and frees its mark."""
    options = {"dedupe": "until_started", "key": "name"}
    result = send_task(tasks.app, "unknown", kwargs={"name": "a"}, queue="marks", singleton=options)
    marks_worker.wait_for_log("Received unregistered task of type 'unknown'")
    wait_until(lambda: result.id not in _values(locks), "the mark is freed", FREED_S)


def test_refused_content_frees_its_mark(tasks, locks, marks_worker):
    """A message that the worker may not read is rejected, and its mark freed."""
    result = tasks.started.apply_async(["a"], serializer="pickle")
    marks_worker.wait_for_log("ContentDisallowed")
    wait_until(lambda: result.id not in _values(locks), "the mark is freed", FREED_S)


def test_unreadable_content_frees_its_mark(tasks, locks, move, marks_worker):
    """A message that the worker cannot decode is thrown away, and its mark freed."""
    result = tasks.started.apply_async(["a"], queue="parked")
    move(lambda message: message.update(body=base64.b64encode(b"{broken").decode()))
    marks_worker.wait_for_log("Can't decode message body")
    wait_until(lambda: result.id not in _values(locks), "the mark is freed", FREED_S)


def test_revoked_retry_frees_its_mark(tasks, journal, locks, parked, move):
    """A retry that will not come is queued no more."""
    result = tasks.done_twice.delay("a")
    journal.wait_for("released", task_id=result.id)
    result.revoke()
    move()
    wait_until(lambda: not locks.exists(mark_of(tasks.done_twice, "a")), "the mark is freed", FREED_S)


def test_revoked_retry_of_a_call_without_a_header_frees_its_mark(tasks, journal, locks, parked, move):
    """Celery's own send_task takes no mark; the retry of its call does, and gives it back."""
    result = tasks.app.send_task("tests.markapp.done_twice", kwargs={"name": "a"}, queue="marks")
    journal.wait_for("released", task_id=result.id)
    assert locks.get(mark_of(tasks.done_twice, "a")) == result.id
    result.revoke()
    move()
    wait_until(lambda: not locks.exists(mark_of(tasks.done_twice, "a")), "the mark is freed", FREED_S)


@pytest.mark.parametrize("name", ["done_lingering", "held_lingering"])
def test_retry_that_is_revoked_before_its_own_first_attempt_ends_leaves_nothing(
    tasks, journal, gates, locks, marks_worker, name
):
    """What the first attempt leaves for a retry that was thrown away already must not stay."""
    task = getattr(tasks, name)
    result = task.delay("gated")
    journal.wait_for("start", task_id=result.id)
    result.revoke()
    marks_worker.wait_for_log(f"Discarding revoked task: tests.markapp.{name}[{result.id}]")
    # By the end of these the worker's parent has freed what there was to free.
    for other in ("a", "b", "c"):
        tasks.started.delay(other).get(timeout=10)
    gates("gated")
    journal.wait_for("released", task_id=result.id)
    wait_until(
        lambda: not locks.exists(mark_of(task, "gated"), task.lock_key("gated")), "nothing is left", FREED_S
    )


def test_call_lost_by_its_worker_costs_its_queue_lease(tasks, journal, locks, logs):
    """kill -9 between receive and start, acknowledged early: the call is lost, and its mark lapses."""
    doomed = Worker(logs, "tests.markapp", concurrency=1, queues="doomed")
    try:
        kwargs = {"name": "a", "stands": True}
        lost = tasks.started.apply_async(kwargs=kwargs, queue="doomed", singleton={"queue_lease": 6})
        journal.wait_for("prerun", task_id=lost.id)
    finally:
        doomed.kill()
    assert tasks.started.delay("a").id == lost.id
    fresh = wait_until(lambda: (r := tasks.started.delay("a")).id != lost.id and r, "the mark has lapsed")
    assert fresh.get(timeout=10) == "a"
    assert journal.words(lost.id) == ["prerun"]
    assert journal.entries(what="lapsed") == []


def test_call_lost_with_its_pool_process_frees_its_mark(tasks, journal, locks):
    """kill -9 of a pool process before the start: the worker's parent knows that the call will not come."""
    result = tasks.started.apply_async(kwargs={"name": "a", "stands": True})
    (prerun,) = journal.wait_for("prerun", task_id=result.id)
    os.kill(prerun["pid"], signal.SIGKILL)
    with pytest.raises(WorkerLostError):
        result.get(timeout=20)
    wait_until(lambda: not locks.exists(mark_of(tasks.started, "a")), "the mark is freed", FREED_S)


def test_call_that_comes_back_from_its_dead_worker_starts_under_its_mark(
    tasks, server, journal, gates, locks, logs
):
    """kill -9 between receive and start with acks_late: a duplicate until the message is delivered again."""
    environment = {"SETNX_TEST_BROKER_DB": str(LATE_DB)}
    with redis.Redis.from_url(server.url(LATE_DB)) as client:
        client.flushdb()
        doomed = Worker(logs, "tests.markapp", concurrency=1, queues="late", environment=environment)
        try:
            with tasks.app.connection_for_write(server.url(LATE_DB)) as connection:
                kwargs = {"name": "a", "stands": True}
                result = tasks.late.apply_async(kwargs=kwargs, queue="late", connection=connection)
            journal.wait_for("prerun", task_id=result.id)
        finally:
            doomed.kill()
        # A worker brings messages back when it starts, and then only after minutes.
        wait_until(
            lambda: client.zrangebyscore("unacked_index", 0, time.time() - 1.1),
            "the visibility timeout is over",
        )
    heir = Worker(logs, "tests.markapp", concurrency=1, queues="late", environment=environment)
    try:
        journal.wait_for("prerun", count=2, task_id=result.id)
        assert tasks.late.delay("a").id == result.id
        gates(result.id)
        assert result.get(timeout=10) == "a"
    finally:
        heir.stop()
    assert len(journal.entries(what="start", task_id=result.id)) == 1
    assert not locks.exists(mark_of(tasks.late, "a"))
    assert journal.entries(what="lapsed") == []


def test_marks_lost_with_their_server_lose_no_call(tasks, journal, locks, move):
    """FLUSHDB while calls are queued: one more per key may be sent, all run one by one, and that is told."""
    names = [f"key-{number}" for number in range(5)]
    firsts = {name: tasks.started.apply_async([name], queue="parked") for name in names}
    locks.flushdb()
    seconds = {name: tasks.started.apply_async([name], queue="parked") for name in names}
    assert not any(result.deduplicated for result in seconds.values())
    assert all(tasks.started.apply_async([name], queue="parked").deduplicated for name in names)
    for _message in range(len(names) * 2):
        move()
    for name in names:
        assert [firsts[name].get(timeout=10), seconds[name].get(timeout=10)] == [name, name]
        starts, ends = (journal.entries(what=what, name=name) for what in ("start", "end"))
        assert len(starts) == 2
        times = sorted([(e["at"], "start") for e in starts] + [(e["at"], "end") for e in ends])
        assert all(one[1] != other[1] for one, other in pairwise(times))
    lapsed = journal.entries(what="lapsed")
    assert sorted(entry["task_id"] for entry in lapsed) == sorted(result.id for result in firsts.values())


def _redirect(message: dict[str, Any]) -> None:
    """A message that waits for its lock goes back to the queue from which it seems to come."""
    message["properties"]["delivery_info"]["routing_key"] = "marks"


def _values(locks: redis.Redis) -> list[str]:
    """What is in the marks that there are."""
    return [locks.get(name) for name in locks.scan_iter("*:queued")]
