"""Calls that wait in line: woken in order, never lost, and never run twice. Real workers."""

import datetime
import itertools
import os
import re
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import redis
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError, TimeLimitExceeded, WorkerLostError

from celery_setnx import LockTimeout
from celery_setnx.keys import line_names
from celery_setnx.process import has_ended
from celery_setnx.waiting import COURIER, Order, _send_again, _unpacked
from examples.embedded import EmbeddedServer
from tests.harness import Journal, Worker, wait_until

APP = "tests.waitapp"
PICKLES = {"C_FORCE_ROOT": "1"}  # its workers accept pickles, whoever runs the tests

Start = Callable[..., Worker]


@pytest.fixture(scope="module")
def pair(server, logs) -> Iterator[list[Worker]]:
    """Two workers of two processes each, that share a queue. Not to be killed."""
    workers = [Worker(logs, APP, environment=PICKLES) for _ in range(2)]
    yield workers
    for worker in workers:
        worker.stop()


@pytest.fixture
def start(server, logs) -> Iterator[Start]:
    """Start a worker of the test's own, to be killed."""
    started = []

    def start_worker(queues: str, environment: dict[str, str] | None = None, **options: Any) -> Worker:
        worker = Worker(logs, APP, queues=queues, environment={**PICKLES, **(environment or {})}, **options)
        started.append(worker)
        return worker

    yield start_worker
    for worker in started:
        if worker.process.poll() is None:
            worker.stop()
    from tests import waitapp

    with redis.Redis.from_url(server.url(waitapp.BROKER_DB)) as broker:
        broker.delete("doomed", "far", "only", "unacked", "unacked_index")


@pytest.fixture
def alone(server, locks, journal) -> Any:
    """The module of tasks, with clean databases, and no worker."""
    from tests import waitapp

    with redis.Redis.from_url(server.url(waitapp.BROKER_DB)) as broker:
        yield waitapp
        ended = {entry["task_id"] for entry in journal.entries(what="end")}
        for entry in journal.entries(what="start"):  # of a test that has failed
            if entry["task_id"] not in ended:
                waitapp.control.rpush(f"gate:{entry['name']}", "open")
        wait_until(lambda: broker.llen("celery") == 0, "the queue is empty")


@pytest.fixture
def key() -> str:
    """A key that is no other test's: its couriers may still be on their way."""
    return uuid.uuid4().hex[:8]


@pytest.fixture
def tasks(alone, pair) -> Any:
    """The module of tasks that the two workers run."""
    return alone


def held(journal: Journal, task: Any, name: str, *args: Any, **options: Any) -> Any:
    """A call whose body has started and waits at the gate `gated-<name>`."""
    result = task.apply_async([name, *args, f"gated-{name}"], **options)
    journal.wait_for("start", task_id=result.id)
    return result


def parked(journal: Journal, task: Any, name: str, *args: Any, **options: Any) -> Any:
    """A call that waits in line behind another."""
    result = task.apply_async([name, *args], **options)
    journal.wait_for("waiting", task_id=result.id)
    return result


def line_up(journal: Journal, task: Any, name: str, count: int, **options: Any) -> list[Any]:
    """Calls that wait in line, in this order."""
    return [parked(journal, task, name, f"{name}-{number}", **options) for number in range(count)]


def messages_about(server: EmbeddedServer, tasks: Any, lock: str) -> list[str]:
    """The messages that name a lock, and that no worker has acknowledged."""
    with redis.Redis.from_url(server.url(tasks.BROKER_DB), decode_responses=True) as broker:
        return [text for text in [*broker.hvals("unacked"), *broker.lrange("celery", 0, -1)] if lock in text]


def order_of_starts(journal: Journal) -> list[str]:
    """Ids of the tasks whose bodies started, in order."""
    return [entry["task_id"] for entry in journal.entries(what="start")]


def assert_one_at_a_time(journal: Journal) -> None:
    """No body started before the one before it with its key had ended; one that was killed has no end."""
    entries = [entry for entry in journal.entries() if entry["what"] in ("start", "end")]
    for key in {entry["key"] for entry in entries}:
        running: Any = None
        spans = [(e["what"], (e["task_id"], e["pid"])) for e in entries if e["key"] == key]
        for number, (what, body) in enumerate(spans):
            beside = what == "start" and ("end", running) in spans[number:]
            assert not beside, f"{body} beside {running}: {journal.entries()}"
            running = body if what == "start" else None


def assert_each_ran_once(journal: Journal, results: list[Any]) -> None:
    """All succeed, and no body of theirs ran twice or beside another."""
    for result in results:
        result.get(timeout=60)  # a worker takes its time to start beside other suites
        assert result.state == "SUCCESS"
    ids = [result.id for result in results]
    assert sorted(task_id for task_id in order_of_starts(journal) if task_id in ids) == sorted(ids)
    assert_one_at_a_time(journal)


def assert_each_ran_once_in_order(journal: Journal, results: list[Any]) -> None:
    """The same, and in the order in which they waited."""
    assert_each_ran_once(journal, results)
    ids = [result.id for result in results]
    assert [task_id for task_id in order_of_starts(journal) if task_id in ids] == ids


def redeliver(tasks: Any) -> None:
    """What a living worker does every ten seconds, with the visibility timeout over: dead workers' messages
    are delivered again."""
    with tasks.app.connection_for_write(transport_options={"visibility_timeout": 0.1}) as connection:
        connection.default_channel.client.delete("unacked_mutex")  # who has it would restore later
        connection.default_channel.qos.restore_visible(num=100)


def packed_call(locks: redis.Redis, task: Any, name: str, result: Any) -> str:
    """What a waiting call is woken with."""
    _line, calls = line_names(task.lock_key(name))
    packed = locks.hget(calls, result.id)
    assert isinstance(packed, str)
    return packed


def test_waiting_calls_run_in_order_of_arrival_over_two_workers(tasks, key, journal, gates, pair):
    """First come, first served: the order of the line is that of the bodies, whichever worker runs them."""
    first = held(journal, tasks.work, key)
    results = line_up(journal, tasks.work, key, 8)
    gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, [first, *results])
    assert all(any(result.id in worker.log_text() for result in results) for worker in pair)


def test_waiting_call_meets_waits_is_woken_and_runs(tasks, key, journal, gates):
    """The lifecycle of a call that waits; no state is stored until its own result."""
    first = held(journal, tasks.work, key)
    sent = time.monotonic()
    second = parked(journal, tasks.work, key, "x")
    assert second.state == "PENDING"
    journal.wait_for("postrun", task_id=second.id)
    gates(f"gated-{key}")
    assert second.get(timeout=10) == [key, "x", 0]
    journal.wait_for("postrun", count=2, task_id=second.id)
    assert journal.words(second.id) == [
        "conflict",
        "waiting",
        "postrun",
        "woken",
        "acquired",
        "start",
        "end",
        "released",
        "postrun",
    ]
    (waiting,) = journal.entries(what="waiting")
    assert waiting["place"] == 1
    assert waiting["holder"]["task_id"] == first.id
    (woken,) = journal.entries(what="woken")
    assert 0 < woken["waited_s"] <= woken["at"] - sent + 0.5
    assert journal.entries(what="conflict")[0]["policy"] == "wait"


def test_waiting_uses_up_no_retries(tasks, key, journal, gates):
    """max_retries=0, and a call that waits twice still runs, as its first attempt."""
    held(journal, tasks.work, key)
    results = line_up(journal, tasks.work, key, 2)
    gates(f"gated-{key}")
    assert [result.get(timeout=10)[2] for result in results] == [0, 0]


def test_call_leaves_the_line_at_max_wait(tasks, key, journal, gates):
    """max_wait is over: LockTimeout is the result, soon, and those behind move up."""
    first = held(journal, tasks.work, key, singleton={"lease": 600})
    at = time.monotonic()
    second = parked(journal, tasks.work, key, "x", singleton={"max_wait": 0.5})
    third = parked(journal, tasks.work, key, "y")
    with pytest.raises(LockTimeout) as caught:
        second.get(timeout=10)
    assert 0.5 <= time.monotonic() - at < 10
    assert 0.5 <= caught.value.waited_s < 10
    assert caught.value.holder["task_id"] == first.id
    wait_until(lambda: tasks.work.locked(key).waiting == 1, "it has left the line")
    assert tasks.work.locked(key).waiters[0].task_id == third.id
    gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, [first, third])


def test_max_wait_of_nothing_fails_at_once(tasks, key, journal, gates):
    """max_wait=0: the first conflict is the last."""
    first = held(journal, tasks.work, key)
    second = tasks.work.apply_async([key, "x"], singleton={"max_wait": 0})
    with pytest.raises(LockTimeout):
        second.get(timeout=10)
    assert tasks.work.locked(key).waiting == 0
    gates(f"gated-{key}")
    first.get(timeout=10)


@pytest.mark.parametrize("kind", ["chain", "chord", "group", "link"])
def test_workflow_of_waiting_calls_goes_on(tasks, key, journal, gates, kind):
    """What follows a call that waited is sent once, with its result."""
    held(journal, tasks.work, key)
    x, y = tasks.work.si(key, "x"), tasks.work.si(key, "y")
    expected: Any = [[key, "x", 0], [key, "y", 0]]
    if kind == "chain":
        result = chain(x, y, tasks.arrival.s()).delay()
        expected = [[key, "y", 0]]
    elif kind == "chord":
        result = chord([x, y], tasks.arrival.s()).delay()
        expected = [expected]
    elif kind == "group":
        result = group(x, y).delay()
    else:
        result = tasks.work.apply_async([key, "x"], link=tasks.arrival.s())
        expected = [key, "x", 0]
    journal.wait_for("waiting", count=1 if kind in ("chain", "link") else 2)
    gates(f"gated-{key}")
    found = result.get(timeout=20)
    assert (sorted(found[0]) if kind == "chord" else found) == (expected[0] if kind == "chord" else expected)
    if kind != "group":
        assert len(journal.wait_for("arrival")) == 1
    assert_one_at_a_time(journal)


def test_waiting_keeps_everything_the_message_had(tasks, key, journal, gates):
    """Headers, priority, expiry, time limits, shadow and link survive the line."""
    held(journal, tasks.inspected, key)
    second = parked(
        journal,
        tasks.inspected,
        key,
        headers={"tenant": "acme"},
        link=tasks.arrival.si("linked"),
        priority=3,
        expires=60,
        time_limit=50,
        soft_time_limit=40,
        shadow="shadowed",
    )
    gates(f"gated-{key}")
    assert second.get(timeout=10) == {
        "tenant": "acme",
        "priority": 3,
        "expires": True,
        "timelimit": [50, 40],
        "shadow": "shadowed",
        "retries": 0,
    }
    assert len(journal.wait_for("arrival")) == 1


@pytest.mark.parametrize(
    ("serializer", "value", "types"),
    [
        (
            "json",
            [datetime.datetime(2024, 5, 6, tzinfo=datetime.timezone.utc), uuid.UUID(int=7)],
            "datetime UUID",
        ),
        ("yaml", {1, "x"}, "int str"),
        ("pickle", (b"\x00\xff", {1, 2}, datetime.timedelta(1)), "bytes set timedelta"),
    ],
)
def test_waiting_keeps_arguments_that_only_their_serializer_carries(
    tasks, key, journal, gates, serializer, value, types
):
    """Arguments come out of the line as they went in, whatever the task's serializer."""
    held(journal, tasks.typed[serializer], key, [])
    second = parked(journal, tasks.typed[serializer], key, value)
    gates(f"gated-{key}")
    assert second.get(timeout=10) == sorted(types.split())


def test_waiting_keeps_the_serializer_of_the_call(tasks, key, journal, gates):
    """A call that was sent with a serializer of its own waits like any other."""
    held(journal, tasks.typed["json"], key, [])
    second = parked(journal, tasks.typed["json"], key, {1, 2}, serializer="pickle")
    gates(f"gated-{key}")
    assert second.get(timeout=10) == ["int", "int"]


# Death


def test_killed_child_of_the_holder_wakes_the_line(tasks, key, journal, gates):
    """kill -9 of the holder's process: its worker hands the lock over at once, long before the lease ends."""
    first = held(journal, tasks.work, key, singleton={"lease": 600})
    results = line_up(journal, tasks.work, key, 3)
    os.kill(journal.entries(what="start")[0]["pid"], signal.SIGKILL)
    assert_each_ran_once_in_order(journal, results)
    with pytest.raises(WorkerLostError):
        first.get(timeout=20)


def test_time_limit_of_the_holder_wakes_the_line(tasks, key, journal):
    """A holder that its hard time limit has killed hands its lock over at once."""
    first = held(journal, tasks.work, key, time_limit=5, singleton={"lease": 600})
    results = line_up(journal, tasks.work, key, 3)
    assert_each_ran_once_in_order(journal, results)
    with pytest.raises(TimeLimitExceeded):
        first.get(timeout=20)


def test_killed_holder_that_is_delivered_again_stops_nobody(tasks, key, journal, gates):
    """acks_late: the killed holder's message comes again, and runs before or behind those in line."""
    first = held(journal, tasks.tardy, key, singleton={"lease": 600})
    results = line_up(journal, tasks.tardy, key, 2)
    (started,) = journal.entries(what="start")
    os.kill(started["pid"], signal.SIGKILL)
    wait_until(lambda: has_ended(started["pid"]), "the process has ended")
    for _ in range(2):  # the server may give one to the dead
        gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, results)
    assert first.get(timeout=20) == f"gated-{key}"
    assert order_of_starts(journal).count(first.id) == 2


def test_killed_worker_of_the_holder_is_taken_over_at_its_deadline(tasks, key, journal, start, pair):
    """kill -9 of the holder's worker, no call comes, and nobody proves the death: the lease ends the wait."""
    far = start("far", {"SETNX_TEST_SAME_HOST": "no"})
    doomed = start("doomed")
    first = held(journal, tasks.work, key, queue="doomed")
    results = line_up(journal, tasks.work, key, 3, queue="far")
    at = time.monotonic()
    doomed.kill()
    assert_each_ran_once(journal, results)
    (taken,) = journal.wait_for("taken_over")
    assert taken["holder"]["task_id"] == first.id
    assert 0.5 < taken["at"] - at < 2.0 * 1.2 + 20
    assert f"The courier of tests.waitapp.work[{taken['task_id']}] took over t:{{" in far.log_text()


def test_killed_worker_on_this_host_is_taken_over_when_its_courier_comes(tasks, key, journal, start, pair):
    """A courier that can prove the holder dead does not wait for its deadline."""
    doomed = start("doomed")
    first = held(journal, tasks.work, key, queue="doomed", singleton={"lease": 600})
    results = line_up(journal, tasks.work, key, 3, singleton={"retry_delay_max": 0.5})
    doomed.kill()
    wait_until(lambda: has_ended(journal.entries(what="start")[0]["pid"]), "the process has ended")
    assert_each_ran_once(journal, results)
    (taken,) = journal.wait_for("taken_over")
    assert taken["holder"]["task_id"] == first.id
    assert any("its process on this host is dead" in worker.log_text() for worker in pair)


@pytest.mark.parametrize("who", ["child", "worker"])
def test_death_between_release_and_wake_loses_nobody(tasks, key, journal, gates, start, who):
    """The lock is handed over, and who was to send the wake-up dies: its parent sends it, or a courier."""
    start("doomed", {"WAIT_DIES_BEFORE_WAKE": who})
    held(journal, tasks.work, key, queue="doomed")
    results = line_up(journal, tasks.work, key, 3)
    gates(f"gated-{key}")
    journal.wait_for("died")
    assert_each_ran_once(journal, results)


def test_killed_worker_that_parked_a_call_is_not_needed_to_wake_it(tasks, key, journal, gates, start):
    """kill -9 of the worker that parked the calls: the holder's release wakes them all the same."""
    doomed = start("doomed")
    held(journal, tasks.work, key)
    results = line_up(journal, tasks.work, key, 3, queue="doomed")
    doomed.kill()
    start("doomed")
    gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, results)
    redeliver(tasks)  # their couriers, which find nothing to do
    held(journal, tasks.work, f"{key}-b")
    gates(f"gated-{key}-b")
    wait_until(lambda: tasks.work.locked(key) is None, "nobody has the lock")
    assert len(journal.entries(what="start")) == 1 + 3 + 1


def test_line_goes_on_past_a_call_that_no_worker_takes(tasks, key, journal, gates, start):
    """A woken call whose queue has no worker is overtaken when its hand-over is over, and not before."""
    doomed = start("doomed")
    held(journal, tasks.work, key)
    second = parked(journal, tasks.work, key, "x", queue="doomed")
    doomed.kill()
    gates(f"gated-{key}")
    wait_until(lambda: (now := tasks.work.locked(key)) and now.state == "handed", "it is handed over")
    third = parked(journal, tasks.work, key, "y")
    (conflict,) = journal.entries(what="conflict", task_id=third.id)
    assert conflict["holder"]["state"] == "handed"
    assert conflict["holder"]["task_id"] == second.id
    assert third.get(timeout=20) == [key, "y", 0]
    start("doomed")
    redeliver(tasks)
    assert_each_ran_once(journal, [second, third])


def test_killed_worker_of_holder_line_and_couriers_loses_nobody(alone, key, journal, start):
    """kill -9 of the one worker there is: the broker delivers the couriers again, and they wake the line."""
    doomed = start("only", concurrency=2)
    held(journal, alone.work, key, queue="only")
    results = line_up(journal, alone.work, key, 3, queue="only")
    doomed.kill()
    start("only", concurrency=2)
    redeliver(alone)
    assert_each_ran_once(journal, results)


def test_flushed_lock_server_loses_no_waiter(tasks, key, journal, gates, locks):
    """FLUSHDB while calls wait: their couriers put them back in line, and each runs once."""
    first = held(journal, tasks.work, key)
    results = line_up(journal, tasks.work, key, 4)
    gates(f"gated-{key}")
    locks.flushdb()
    first.get(timeout=20)
    for result in results:
        assert result.get(timeout=20)[0] == key
    starts = order_of_starts(journal)
    assert sorted(starts) == sorted([first.id, *(result.id for result in results)])


def test_flushed_lock_server_runs_no_ended_call_again(server, tasks, key, journal, gates, locks):
    """FLUSHDB when the calls have run, and before their couriers come: a stored result ends the courier."""
    held(journal, tasks.work, key)
    results = line_up(journal, tasks.work, key, 3)
    lock = tasks.work.lock_key(key)
    wait_until(lambda: len(messages_about(server, tasks, lock)) >= 3, "the broker has the couriers")
    gates(f"gated-{key}")
    assert_each_ran_once(journal, results)
    locks.flushdb()
    wait_until(lambda: not messages_about(server, tasks, lock), "the couriers have come for the last time")
    wait_until(lambda: not locks.exists(line_names(tasks.work.lock_key(key))[0]), "nobody waits")
    tasks.work.delay(key).get(timeout=10)
    assert len(order_of_starts(journal)) == 1 + 3 + 1


def test_flushed_lock_server_runs_no_woken_call_beside_itself(tasks, key, journal, gates, locks):
    """FLUSHDB while a call runs that has waited: its courier does not start it once more."""
    held(journal, tasks.work, key)
    second = parked(journal, tasks.work, key, f"gated-{key}-x")
    third = parked(journal, tasks.work, key, "y")
    gates(f"gated-{key}")
    journal.wait_for("start", task_id=second.id)
    locks.flushdb()
    # Nobody knows of the lock any more. The courier that wakes the third comes after that of the second.
    assert third.get(timeout=20) == [key, "y", 0]
    wait_until(lambda: locks.keys(f"*:ticket:{second.id}*"), "it has its ticket again")
    gates(f"gated-{key}-x")
    gates(f"gated-{key}-x")
    assert second.get(timeout=20) == [key, f"gated-{key}-x", 0]
    wait_until(lambda: not tasks.work.locked(key), "nobody has the lock")
    assert order_of_starts(journal).count(second.id) == 1


def test_worker_that_shuts_down_gives_its_couriers_back(tasks, key, journal, gates, locks, start):
    """A warm shutdown returns the couriers to the broker, and the next worker has them at once."""
    first = start("doomed")
    held(journal, tasks.work, key, singleton={"lease": 8})  # no courier comes before it is over
    results = line_up(journal, tasks.work, key, 2, queue="doomed")
    inspect = tasks.app.control.inspect(destination=[f"{first.name}@test"], timeout=5, limit=1)
    wait_until(lambda: inspect.active() == {f"{first.name}@test": []}, "it has read how the two calls ended")
    first.stop()
    assert first.process.returncode == 0, first.log_text()
    locks.flushdb()  # from now on only the couriers know
    gates(f"gated-{key}")
    start("doomed")
    assert_each_ran_once(journal, results)


# Revoked, expired, delivered late


def test_revoked_waiter_leaves_and_the_next_runs_at_once(tasks, key, journal, gates):
    """A waiter that was revoked does not run; its state is REVOKED, and nobody waits for it."""
    held(journal, tasks.work, key, singleton={"lease": 600})
    second, third = line_up(journal, tasks.work, key, 2)
    assert len(tasks.app.control.revoke(second.id, reply=True, timeout=5, limit=2)) == 2
    at = time.monotonic()
    gates(f"gated-{key}")
    assert third.get(timeout=10) == [key, f"{key}-1", 0]
    assert time.monotonic() - at < 5
    with pytest.raises(TaskRevokedError):
        second.get(timeout=10)
    assert second.state == "REVOKED"
    assert second.id not in order_of_starts(journal)


def test_expired_waiter_leaves_the_line(tasks, key, journal, gates):
    """A waiter that expires is REVOKED soon, while the holder still runs, and those behind move up."""
    held(journal, tasks.work, key, singleton={"lease": 600})
    second = parked(journal, tasks.work, key, "x", expires=5)
    third = parked(journal, tasks.work, key, "y")
    with pytest.raises(TaskRevokedError):
        second.get(timeout=20)
    wait_until(lambda: tasks.work.locked(key).waiting == 1, "it has left the line")
    gates(f"gated-{key}")
    assert third.get(timeout=10) == [key, "y", 0]
    assert second.id not in order_of_starts(journal)
    assert second.state == "REVOKED"


def test_late_copy_of_a_call_changes_nothing(tasks, key, journal, gates, locks, pair):
    """A second wake-up of a call that has run is dropped: no second run, and the result stands."""
    held(journal, tasks.work, key)
    second = parked(journal, tasks.work, key, "x")
    packed = packed_call(locks, tasks.work, key, second)
    gates(f"gated-{key}")
    assert second.get(timeout=10) == [key, "x", 0]
    _send_again(_unpacked(tasks.app, packed))
    said = f"tests.waitapp.work[{second.id}] has been started by another message"
    wait_until(lambda: any(said in worker.log_text() for worker in pair), "it is dropped")
    assert second.state == "SUCCESS"
    assert order_of_starts(journal).count(second.id) == 1


def test_late_copy_of_a_running_call_changes_nothing(tasks, key, journal, gates, locks, pair):
    """A second wake-up of a call that runs is dropped, and the one behind it still waits its turn."""
    held(journal, tasks.work, key)
    second = parked(journal, tasks.work, key, "gated-x")
    packed = packed_call(locks, tasks.work, key, second)
    third = parked(journal, tasks.work, key, "y")
    gates(f"gated-{key}")
    journal.wait_for("start", task_id=second.id)
    _send_again(_unpacked(tasks.app, packed))
    said = f"tests.waitapp.work[{second.id}] has been started by another message"
    wait_until(lambda: any(said in worker.log_text() for worker in pair), "it is dropped")
    gates("gated-x")
    assert_each_ran_once_in_order(journal, [second, third])


def test_late_copy_that_has_expired_does_not_revoke_a_result(alone, key, journal, gates, locks, start):
    """A second wake-up that comes after the call's expiry, and after its failure, is dropped in silence."""
    start("only", concurrency=1)
    start("doomed", concurrency=1)
    held(journal, alone.failing, key, queue="doomed")
    second = parked(journal, alone.failing, key, "x", expires=60, queue="only")
    call = _unpacked(alone.app, packed_call(locks, alone.failing, key, second))
    gates(f"gated-{key}")
    with pytest.raises(ZeroDivisionError):
        second.get(timeout=10)
    assert call.options["expires"]
    call.options["expires"] = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(seconds=1)
    _send_again(call)
    assert alone.beside.apply_async([1], queue="only").get(timeout=10) == 1  # it has come after it
    assert second.state == "FAILURE"
    assert journal.entries(what="revoked") == []
    assert order_of_starts(journal).count(second.id) == 1


def test_courier_does_not_overwrite_a_failure(alone, key, journal, gates, start):
    """With task_track_started a late copy would store STARTED over FAILURE; a courier stores nothing."""
    worker = start("only")
    first = held(journal, alone.failing, key, queue="only")
    second = parked(journal, alone.failing, key, "x", queue="only")
    gates(f"gated-{key}")
    for result in (first, second):
        with pytest.raises(ZeroDivisionError):
            result.get(timeout=10)
    wait_until(
        lambda: re.search(rf"Task {re.escape(COURIER)}\S+ succeeded", worker.log_text()), "it has come"
    )
    assert (first.state, second.state) == ("FAILURE", "FAILURE")


def test_call_by_name_runs_once_when_its_courier_comes(alone, key, journal, gates, start):
    """A call that came without our header is one call in all its messages."""
    worker = start("only")
    held(journal, alone.work, key, queue="only")
    second = alone.app.send_task(alone.work.name, [key, "x"], queue="only")
    journal.wait_for("waiting", task_id=second.id)
    gates(f"gated-{key}")
    second.get(timeout=10)
    came = rf"Task {re.escape(COURIER)}\S+ succeeded"
    wait_until(lambda: re.search(came, worker.log_text()), "its courier has come")
    assert alone.beside.apply_async([1], queue="only").get(timeout=10) == 1  # after whatever that has sent
    assert order_of_starts(journal).count(second.id) == 1


# The lock's other states


def test_waiter_starts_when_the_rest_is_over(tasks, key, journal, gates):
    """With at_least_for the first in line starts when the lock has rested: not before, and not long after."""
    began = time.monotonic()
    first = held(journal, tasks.resting, key)
    results = line_up(journal, tasks.resting, key, 2)
    lined_up_s = time.monotonic() - began
    gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, [first, *results])
    acquired = [entry["fence"] for entry in journal.entries(what="acquired")]  # us, by the server's clock
    for before, after in itertools.pairwise(acquired):
        assert 1_000_000 <= after - before < (2 + lined_up_s) * 1_000_000


def test_waiters_wait_for_the_holders_retry(tasks, key, journal, gates):
    """hold_on_retry: the line waits until the retry has run too."""
    first = held(journal, tasks.patient, key)
    second = parked(journal, tasks.patient, key)
    gates(f"gated-{key}")
    journal.wait_for("released", outcome="held_for_retry", task_id=first.id)
    gates(f"gated-{key}")
    assert first.get(timeout=10) == f"gated-{key}"
    assert second.get(timeout=10) == ""
    assert order_of_starts(journal) == [first.id, first.id, second.id]
    assert_one_at_a_time(journal)


def test_waiters_go_on_when_the_holders_retry_is_revoked(tasks, key, journal, gates):
    """hold_on_retry: a retry that will not come hands its lock to the first in line."""
    first = tasks.patient.apply_async([key, f"gated-{key}", 5])
    journal.wait_for("start", task_id=first.id)
    second = parked(journal, tasks.patient, key)
    gates(f"gated-{key}")
    journal.wait_for("released", outcome="held_for_retry", task_id=first.id)
    assert len(tasks.app.control.revoke(first.id, reply=True, timeout=5, limit=2)) == 2
    assert second.get(timeout=20) == ""
    assert order_of_starts(journal) == [first.id, second.id]
    assert first.state == "REVOKED"


def test_task_that_sends_itself_does_not_deadlock(tasks, key, journal):
    """A call sent from inside the lock waits until its sender has ended."""
    tasks.again.apply_async([key, 3])
    journal.wait_for("end", name="left-0")
    assert [entry["name"] for entry in journal.entries(what="start")] == [f"left-{n}" for n in (3, 2, 1, 0)]
    assert_one_at_a_time(journal)


def test_chain_of_one_key_does_not_deadlock(tasks, journal):
    """Each step of a chain has the lock that the step before it had."""
    assert chain(tasks.alone.si(1), tasks.alone.si(2), tasks.alone.si(3)).delay().get(timeout=10) == 3
    assert_one_at_a_time(journal)


def test_group_of_one_key_does_not_deadlock(tasks, journal):
    """Members that exclude each other run one after another, and a chord over them has its callback."""
    assert group(tasks.alone.s(n) for n in range(5)).delay().get(timeout=20) == [0, 1, 2, 3, 4]
    assert chord([tasks.alone.s(n) for n in range(5)], tasks.total.s()).delay().get(timeout=20) == 10
    assert len(journal.entries(what="start")) == 10
    assert_one_at_a_time(journal)


def test_thousand_publishes_while_one_runs_are_one_more_run(tasks, key, journal, gates):
    """dedupe="until_started", nothing else: one running, one pending."""
    first = held(journal, tasks.pending, key)
    results = [tasks.pending.delay(key) for _ in range(1000)]
    journal.wait_for("waiting")
    assert len({result.id for result in results}) == 1
    gates(f"gated-{key}")
    assert results[-1].get(timeout=10) == ""
    assert order_of_starts(journal) == [first.id, results[0].id]
    assert not results[0].deduplicated
    assert all(result.deduplicated for result in results[1:])
    again = tasks.pending.delay(key)
    assert not again.deduplicated
    again.get(timeout=10)


# What is seen of it


def test_locked_tells_who_waits_where_and_for_how_long(tasks, key, journal, gates):
    """Holder, number of waiters, and the place and age of each."""
    first = held(journal, tasks.work, key)
    results = line_up(journal, tasks.work, key, 3)
    holder = tasks.work.locked(key)
    assert holder.task_id == first.id
    assert holder.waiting == 3
    assert [(waiter.place, waiter.task_id) for waiter in holder.waiters] == [
        (place, result.id) for place, result in enumerate(results, 1)
    ]
    ages = [waiter.age_s for waiter in holder.waiters]
    assert ages == sorted(ages, reverse=True)
    assert 0 < ages[-1] < 5
    assert [entry["place"] for entry in journal.entries(what="waiting")] == [1, 2, 3]
    gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, [first, *results])
    wait_until(lambda: tasks.work.locked(key) is None, "nobody has the lock")


def test_direct_and_eager_calls_do_not_wait(tasks, key, journal, gates):
    """Called as a function, or with .apply(), a task asks for no lock."""
    first = held(journal, tasks.work, key)
    assert tasks.work(key, "x") == [key, "x", 0]
    assert tasks.work.apply([key, "y"]).get() == [key, "y", 0]
    assert tasks.work.locked(key).waiting == 0
    gates(f"gated-{key}")
    first.get(timeout=10)


def test_callable_policy_may_wait(tasks, key, journal, gates):
    """conflict.wait() in a policy of one's own parks the call as on_conflict="wait" does."""
    first = held(journal, tasks.decided, key)
    second = parked(journal, tasks.decided, key, "x")
    assert tasks.decided.locked(key).waiting == 1
    gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, [first, second])


def test_call_without_a_result_waits_too(alone, key, journal, gates, start):
    """ignore_result: parked, woken, in order, once."""
    start("only")
    first = held(journal, alone.silent, key, queue="only")
    results = line_up(journal, alone.silent, key, 3, queue="only")
    gates(f"gated-{key}")
    journal.wait_for("released", count=4)
    assert order_of_starts(journal) == [first.id, *(result.id for result in results)]
    assert_one_at_a_time(journal)


@pytest.mark.parametrize(("pool", "concurrency"), [("threads", 4), ("solo", 1)])
def test_every_pool_parks_and_wakes_in_order(alone, key, journal, gates, start, pool, concurrency):
    """Twenty calls of one key under another pool: each runs once, in order, one at a time."""
    start("only", pool=pool, concurrency=concurrency)
    if pool == "solo":
        start("doomed")
    first = held(journal, alone.work, key, queue="doomed" if pool == "solo" else "only")
    results = line_up(journal, alone.work, key, 20, queue="only")
    gates(f"gated-{key}")
    assert_each_ran_once_in_order(journal, [first, *results])


def test_courier_of_a_call_that_cannot_be_sent_comes_again(alone, key, journal, gates, start):
    """Whatever goes wrong with it, the courier does not end before its call has begun. One of a newer worker,
    which says more, is understood."""
    worker = start("only")
    first = held(journal, alone.work, key, queue="only")
    order = Order(
        key=alone.work.lock_key(key),
        task=alone.work.name,
        task_id="unreadable",
        attempt=0,
        call_id="",
        since=1.0,
        call="no/type utf-8 nothing",
        until=2.0,  # over: it is to be sent
        lease=1.0,
        pace=0.2,
        queue_lease=5.0,
        remember=5.0,
        marked=False,
    )
    said = {"key": order.key, "order": {**asdict(order), "colour": "blue"}}
    alone.app.tasks[COURIER].apply_async(kwargs=said, queue="only")
    wait_until(
        lambda: worker.log_text().count(f"The courier of {order} comes back later") >= 2, "it has come twice"
    )
    gates(f"gated-{key}")
    assert first.get(timeout=10)[0] == key
