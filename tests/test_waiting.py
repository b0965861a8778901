"""Calls that wait in line: woken in order, never lost, and never run twice. Real workers.

Leases are of ten minutes, and so is the time until a courier comes: unless a test says otherwise, what
happens is a wake-up. Queues are named after the test's key.
"""

import datetime
import itertools
import os
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from celery import chain, chord
from celery.exceptions import TaskRevokedError, WorkerLostError

from celery_setnx import LockTimeout
from celery_setnx.call.wake import COURIER
from celery_setnx.lock.names import line_names, mark_name
from celery_setnx.lock.process import has_ended
from tests.harness import DEADLINE_S, Worker, wait_until
from tests.stage import SOON, Stage, assert_one_at_a_time, revoke, wait_for_ends

APP = "tests.waitapp"


@pytest.fixture(scope="module")
def second(module_worker) -> Worker:
    """A worker that shares the queue of the first, accepts pickles, and proves nobody's death."""
    conf = {"accept_content": ["json", "yaml", "pickle"], "setnx_same_host": False}
    environment = {"C_FORCE_ROOT": "1"}  # for the pickles, whoever runs the tests
    return module_worker(APP, queues="celery,second", conf=conf, environment=environment)


@pytest.fixture(scope="module")
def single(module_worker) -> Worker:
    """A worker of one process: what it does, it does in order."""
    return module_worker(APP, concurrency=1, queues="single")


@pytest.fixture
def both(worker, second) -> tuple[Worker, Worker]:
    """The workers of the usual queue."""
    return worker, second


@pytest.fixture
def stage(stage, second) -> Stage:
    """The tasks that two workers run."""
    return stage


@pytest.fixture
def doomed(stage, start_worker) -> Worker:
    """A worker with a queue of its own, to be killed."""
    return start_worker(APP, queues=stage.key)


@pytest.fixture
def adopt(stage, worker) -> Iterator[Callable[[], None]]:
    """Have another worker consume the queue of the doomed one."""

    def ask(command: Any) -> None:
        there = {"destination": [worker.node], "reply": True, "timeout": 30, "limit": 1}
        assert command(stage.key, **there)

    yield lambda: ask(stage.tasks.app.control.add_consumer)
    ask(stage.tasks.app.control.cancel_consumer)


def test_waiting_calls_run_in_order_of_arrival_over_two_workers(stage, worker, second):
    """First come, first served: the order of the line is that of the bodies, whichever worker runs them.

    max_retries=0, and a call that waits eight times still runs, as its first attempt.
    """
    first = stage.held()
    results = stage.line_up(8)
    stage.open()
    stage.have_run([first, *results])
    assert {result.get()[2] for result in results} == {0}
    for each in (worker, second):
        assert any(result.id in each.log_text() for result in results)


def test_waiting_call_meets_waits_is_woken_and_runs(stage, journal):
    """The lifecycle of a call that waits; no state is stored until its own result."""
    first = stage.held()
    sent = time.monotonic()
    second = stage.parked("x")
    stage.open()
    assert second.get(timeout=60) == [stage.key, "x", 0]
    journal.wait_for("postrun", count=2, task_id=second.id)
    waits = ["conflict", "waiting", "postrun"]
    runs = ["woken", "acquired", "start", "end", "released", "postrun"]
    assert journal.words(second.id) == [*waits, *runs]
    (waiting,) = journal.entries(what="waiting")
    assert waiting["place"] == 1
    assert waiting["holder"]["task_id"] == first.id
    (woken,) = journal.entries(what="woken")
    assert 0 < woken["waited_s"] <= woken["at"] - sent + 0.5
    assert journal.entries(what="conflict")[0]["policy"] == "wait"


@pytest.mark.parametrize("name", ["work", "joined"])
def test_call_leaves_the_line_at_max_wait(stage, name):
    """max_wait is over: LockTimeout is the result, soon, and those behind move up; of a joiner too.

    With max_wait=0 the first conflict is the last.
    """
    stage.task = getattr(stage.tasks, name)
    first = stage.held()
    at = time.monotonic()
    hasty = stage.task.apply_async([stage.key, "z"], singleton={"max_wait": 0})
    with pytest.raises(LockTimeout):
        hasty.get(timeout=60)
    assert stage.task.locked(stage.key).waiting == 0
    second = stage.parked("x", singleton={"max_wait": 0.5})
    third = stage.parked("y")
    with pytest.raises(LockTimeout) as caught:
        second.get(timeout=60)
    assert 0.5 <= caught.value.waited_s <= time.monotonic() - at + 0.1
    assert caught.value.holder["task_id"] == first.id
    wait_until(lambda: stage.task.locked(stage.key).waiting == 1, "it has left the line")
    assert stage.task.locked(stage.key).waiters[0].task_id == third.id
    stage.open()
    stage.have_run([first, third] if name == "work" else [first])


MOMENT = datetime.datetime(2024, 5, 6, tzinfo=datetime.timezone.utc)


@pytest.mark.parametrize(
    ("serializer", "options", "value", "types"),
    [
        ("json", {}, [MOMENT, uuid.UUID(int=7)], "UUID datetime"),
        ("yaml", {}, {1, "x"}, "int str"),
        ("json", {"serializer": "yaml"}, {1, "x"}, "int str"),
        ("pickle", {}, (b"\x00\xff", {1, 2}, datetime.timedelta(1)), "bytes set timedelta"),
        ("json", {"serializer": "pickle"}, {1, 2}, "int int"),
    ],
    ids=["json", "yaml", "yaml of the call", "pickle", "pickle of the call"],
)
def test_waiting_keeps_arguments_that_only_their_serializer_carries(
    stage, journal, locks, serializer, options, value, types
):
    """Arguments come out of the line as they went in, by the task's serializer or that of the call.

    A line holds no pickles: who can write there could have code run. Such a call polls, as with retry.
    """
    task = stage.tasks.typed[serializer]
    stage.held([], task=task, queue="second")
    call = task.apply_async([stage.key, value], queue="second", **options)
    if "pickle" in (serializer, *options.values()):
        journal.wait_for("conflict", count=2, task_id=call.id)
        parked = locks.hvals(line_names(task.lock_key(stage.key, value))[1])
        assert all(told.startswith("@") for told in parked), "it asks again by itself, if it is there"
    else:
        journal.reached("waiting", call)
    stage.open()
    assert call.get(timeout=60) == types.split()


# Death


def test_holder_whose_process_is_killed_wakes_the_line(stage):
    """kill -9: its worker hands the lock over before its lease ends."""
    first = stage.held()
    results = stage.line_up(3)
    os.kill(stage.holder_pid(), signal.SIGKILL)
    stage.have_run(results)
    with pytest.raises(WorkerLostError):
        first.get(timeout=60)
    stage.settle()


def test_killed_worker_of_the_holder_is_taken_over(stage, journal, doomed, worker, second):
    """kill -9 of the holder's worker, and no call comes: a worker's sweep proves the holder dead."""
    first = stage.held(queue=stage.key)
    results = stage.line_up(3, queue="first")
    doomed.kill()
    wait_until(lambda: has_ended(stage.holder_pid()), "the process has ended")
    stage.have_run(results, in_order=False)
    (taken,) = journal.wait_for("taken_over")
    assert taken["holder"]["task_id"] == first.id
    told = f"Task {taken['task_id']} (first in line) took over t:{{"
    wait_until(lambda: told in worker.log_text() + second.log_text(), "a worker has said so")
    line = (worker.log_text() + second.log_text()).partition(told)[2].partition("\n")[0]
    assert f"[{first.id}] on {doomed.name}@test" in line
    assert "its process on this host is dead" in line


def test_death_between_release_and_wake_loses_nobody(stage, journal, start_worker):
    """The lock is handed over, and the process that was to send the wake-up dies: its parent sends it."""
    start_worker(APP, concurrency=1, queues=stage.key, conf={"dies_before_wake": True})
    stage.held(queue=stage.key)
    results = stage.line_up(3)
    stage.open()
    journal.wait_for("died")
    stage.have_run(results, in_order=False)


@pytest.mark.parametrize("stamp", [False, True], ids=["by its id", "by a stamp"])
def test_revoked_pending_call_leaves_its_key_free_to_be_published(stage, locks, both, stamp):
    """While it waits, and within a sweep: changes that come after the revoke are no duplicates of it."""
    pending = stage.tasks.pending
    first = stage.held(task=pending)
    second = stage.parked(task=pending, **{"stamped_headers": ["who"], "who": stage.key} if stamp else {})
    assert pending.delay(stage.key).id == second.id
    revoke(stage.tasks.app, second, *both, **{"who": stage.key} if stamp else {})
    wait_until(lambda: not locks.exists(mark_name(pending.lock_key(stage.key))), "its mark is gone")
    third = pending.delay(stage.key)
    assert not third.deduplicated
    stage.open()
    stage.have_run([first, third])
    assert second.state == "REVOKED"
    assert second.id not in stage.starts()


@pytest.mark.parametrize("held_by", ["another", "itself"])
def test_calls_with_one_task_id_all_run(stage, held_by):
    """Their publisher has made it up; one stands in the line, and the others ask again until it has begun."""
    same = {"task_id": f"nightly-{stage.key}"}
    stage.held(**(same if held_by == "itself" else {}))
    for _ in range(3):
        stage.task.apply_async([stage.key], **same, singleton=SOON)
    stage.journal.wait_for("waiting", **same)
    count = 4 if held_by == "itself" else 3
    stage.journal.wait_for("postrun", count, **same)
    stage.open()
    wait_until(lambda: stage.starts().count(same["task_id"]) == count, "all have run")


def test_ticket_of_a_call_that_has_begun_outlasts_its_workers(stage, locks):
    """A week, however long its message may lie in the broker; its courier makes that as long as it may."""
    stage.held()
    options = {"queue_lease": 5}
    second = stage.parked("x", singleton=options)
    third = stage.parked("y", singleton={**options, **SOON})
    stage.open()
    stage.have_run([second, third])
    (ticket,) = locks.keys(f"*:ticket:{second.id}*")
    assert 6.9 * 86400 < locks.ttl(ticket) <= 7 * 86400
    (ticket,) = locks.keys(f"*:ticket:{third.id}*")
    wait_until(lambda: 3500 < locks.ttl(ticket) <= 3605, "its courier has come")


def test_waiting_call_stays_in_its_callers_trace(stage, journal):
    """Its courier and its wake-up, which another call's process sends, are in nobody's."""
    task = stage.tasks.told
    holder = stage.held(task=task, headers={"_trace": "the holder's"})
    waiter = stage.parked(task=task, headers={"_trace": "its caller's"})
    stage.open()
    assert holder.get(timeout=60) == "the holder's"
    assert waiter.get(timeout=60) == "its caller's"
    assert journal.entries(what="traced") == []


def died_after_success(stage: Stage, doomed: Worker, adopt: Callable[[], None]) -> None:
    """Wait until the worker has died, and have its messages delivered again to another."""
    doomed.process.wait(timeout=60)
    stage.redeliver()
    adopt()


def test_chord_member_that_died_before_it_was_counted_is_counted(stage, journal, start_worker, adopt):
    """SUCCESS is stored, and the worker dies: its member, delivered again, does not run again, and counts."""
    doomed = start_worker(APP, queues=stage.key, conf={"dies_before_count": True})
    member = stage.tasks.parent.s(stage.key, "member").set(queue=stage.key)
    result = chord([member], stage.tasks.arrival.s())()
    died_after_success(stage, doomed, adopt)
    assert result.get(timeout=60) == [["member"]]
    assert len(stage.starts()) == 1
    (child,) = result.parent.results[0].children  # what it had published
    assert child.get(timeout=60) == "member"


def test_step_of_a_chain_that_has_succeeded_sends_the_next_one_once(stage, journal, start_worker, adopt):
    """SUCCESS is stored, and the worker dies: the next step was sent before, and is not sent again."""
    doomed = start_worker(APP, queues=stage.key, conf={"dies_after_success": True})
    step = stage.tasks.tardy.s(stage.key, stage.key).set(queue=stage.key)
    result = chain(step, stage.tasks.arrival.s())()
    died_after_success(stage, doomed, adopt)
    assert result.get(timeout=60) == [stage.key]
    journal.wait_for("postrun", task_id=result.parent.id)
    stage.settle()
    assert result.parent.get(timeout=60) == stage.key
    assert (len(stage.starts()), len(journal.entries(what="arrival"))) == (1, 1)
    assert [child.id for child in result.parent.children] == [result.id]


@pytest.mark.parametrize("policy", ["wait", "retry"])
def test_call_that_gets_its_slot_after_its_max_wait_fails_though_its_lock_is_free(
    stage, parked, locks, policy
):
    """It may have stood in a queue for long; and what is behind it goes on."""
    options = {"on_conflict": policy, "max_wait": 5}
    late = stage.task.apply_async([stage.key], queue="parked", singleton=options)
    met = locks.time()[0] - 60
    parked.move(lambda message: message["headers"]["singleton"].update(since=met, waits=1))
    said = r"gave up after waiting 6\d.\d s \(max_wait\): .* came free too late"
    with pytest.raises(LockTimeout, match=said):
        late.get(timeout=60)
    assert stage.starts() == []
    stage.has_run(stage.task.delay(stage.key))


@pytest.mark.parametrize("bar", ["fail", "ignore", "reject", "init", "retry"])
def test_woken_call_that_ends_before_its_body_leaves_the_line(stage, locks, bar):
    """before_start or Celery's loader raises: the next one has its turn, and the call comes no more."""
    task = stage.tasks.barred
    holder = stage.held(task=task)
    barred = task.apply_async([stage.key], {"bar": bar, "late": True})
    stage.journal.reached("waiting", barred)
    behind = stage.parked(task=task, singleton={"dedupe": None, "on_conflict": "wait"})
    stage.open()
    stage.has_run(holder)
    stage.has_run(behind)
    if bar == "retry":
        stage.has_run(barred)
    assert stage.starts().count(barred.id) == (bar == "retry")
    wait_until(lambda: not locks.exists(*line_names(task.lock_key(stage.key))), "nobody is in the line")


@pytest.mark.clock
def test_flushed_lock_server_runs_no_woken_call_beside_itself(stage, journal, gates, locks):
    """FLUSHDB while a call runs that has waited: its courier does not start it once more.

    Its holder learns of the loss by a renewal, and before its courier comes.
    """
    short, gate = {"lease": 2, "retry_delay_max": 30}, f"{stage.gate}-x"
    stage.held(singleton=short)
    second = stage.parked(gate, singleton=short)
    third = stage.parked("y", singleton=short)
    stage.open()
    journal.wait_for("start", task_id=second.id)
    locks.flushdb()
    # Nobody knows of the lock any more. The courier that wakes the third comes after that of the second.
    assert third.get(timeout=60) == [stage.key, "y", 0]
    wait_until(lambda: locks.keys(f"*:ticket:{second.id}*"), "it has its ticket again")
    gates(gate, 2)
    stage.has_run(second)
    wait_until(lambda: not stage.tasks.work.locked(stage.key), "nobody has the lock")
    assert stage.starts().count(second.id) == 1


def test_worker_lets_couriers_go_whose_calls_have_begun(stage, start_worker):
    """Out of its timer, acknowledged, with its prefetch as it was; that of a call that waits stays."""
    worker = start_worker(APP, queues=stage.key, conf={"lets_go_soon": True})
    first = stage.held(queue=stage.key)
    results = stage.line_up(3, queue=stage.key)
    asks = stage.tasks.app.control.inspect([worker.node], timeout=10)

    def has() -> tuple[int, int]:
        """How many couriers it holds, and its prefetch beyond the usual."""
        (held,), (stats,) = asks.scheduled().values(), asks.stats().values()
        return len(held), stats["prefetch_count"] - 2 * stage.tasks.app.conf.worker_prefetch_multiplier

    wait_until(lambda: has() == (3, 3), "it holds three couriers")
    stage.open()
    stage.have_run([first, *results])
    stage.held(queue=stage.key)
    last = stage.parked("last", queue=stage.key)
    wait_until(lambda: has() == (1, 1), "it holds the courier of the last")
    assert len([message for message in stage.messages() if COURIER in message]) == 1
    stage.open()
    stage.has_run(last)


def test_worker_that_shuts_down_gives_its_couriers_back(stage, locks, doomed, adopt):
    """A warm shutdown returns the couriers to the broker, and the next worker has them at once."""
    stage.held()
    results = stage.line_up(2, queue=stage.key, singleton={"retry_delay_max": 1})
    wait_for_ends(stage.tasks.app, doomed)
    doomed.process.terminate()
    assert doomed.process.wait(DEADLINE_S) == 0, doomed.log_text()
    assert len([message for message in stage.messages() if COURIER in message]) == 2
    locks.flushdb()  # from now on only the couriers know
    stage.open()
    adopt()
    stage.have_run(results, in_order=False)


# Revoked, expired, delivered late


def test_waiter_that_is_revoked_leaves_and_the_next_runs_at_once(stage, both):
    """Its state is REVOKED, and nobody waits for it; it leaves while the holder still runs."""
    stage.held()
    second, third = stage.parked("x"), stage.parked("y")
    revoke(stage.tasks.app, second, *both)
    wait_until(lambda: stage.tasks.work.locked(stage.key).waiting == 1, "it has left the line")
    stage.open()
    assert third.get(timeout=60) == [stage.key, "y", 0]
    with pytest.raises(TaskRevokedError):
        second.get(timeout=60)
    assert second.state == "REVOKED"
    assert second.id not in stage.starts()
    stage.settle()


def test_late_copy_of_a_call_that_runs_changes_nothing(stage, journal, gates, worker):
    """A second wake-up of it is dropped, and the one behind waits its turn."""
    stage.held()
    second = stage.parked(f"{stage.gate}-x", queue="first")
    wake_again = stage.waker(stage.tasks.work, second)
    third = stage.parked("y")
    stage.open()
    journal.wait_for("start", task_id=second.id)
    wake_again()
    worker.wait_for_log(f"[{second.id}]: this message is dropped: another message has started")
    gates(f"{stage.gate}-x")
    stage.have_run([second, third])


@pytest.mark.parametrize("has_expired", [False, True])
def test_late_copy_of_a_call_that_has_failed_starts_nothing_and_stores_nothing(
    stage, journal, single, has_expired
):
    """task_track_started: STARTED is stored when a body begins, so a second wake-up leaves FAILURE.

    One that comes after the call's expiry, too, is dropped in silence, and revokes nothing.
    """
    failing = stage.tasks.failing
    first = stage.held(task=failing)
    second = stage.parked("x", task=failing, queue="single", expires=60 if has_expired else None)
    assert (first.state, second.state) == ("STARTED", "PENDING")
    wake_again = stage.waker(failing, second)
    stage.open()
    with pytest.raises(ZeroDivisionError):
        second.get(timeout=60)
    wake_again(**({"expires": MOMENT.isoformat()} if has_expired else {}))
    assert stage.tasks.plain.apply_async([1], queue="single").get(timeout=60) == 1  # it has come after it
    assert failing.AsyncResult(second.id).state == "FAILURE"  # the first has read it before
    assert journal.entries(what="revoked") == []
    assert stage.starts().count(second.id) == 1


def test_courier_of_an_ended_call_stores_nothing_and_starts_nothing(stage, journal, single):
    """A courier stores nothing over FAILURE.

    One call comes by name, without our header: it is one call in all its messages.
    """
    failing = stage.tasks.failing
    first = stage.held(task=failing)
    second = stage.parked("x", task=failing, queue="single")
    third = stage.tasks.app.send_task(failing.name, [stage.key, "y"], queue="single")
    journal.wait_for("waiting", task_id=third.id)
    stage.open()
    for result in (first, second, third):
        with pytest.raises(ZeroDivisionError):
            result.get(timeout=60)
    wait_until(lambda: not stage.messages(), "the couriers have come for the last time")
    assert stage.tasks.plain.apply_async([1], queue="single").get(timeout=60) == 1  # after what they sent
    stored = [failing.AsyncResult(result.id) for result in (first, second, third)]  # as it is now
    assert [result.state for result in stored] == ["FAILURE"] * 3
    assert stage.starts() == [first.id, second.id, third.id]


# The lock's other states


def test_waiter_starts_when_the_rest_is_over(stage, journal):
    """With at_least_for the first in line starts when the lock has rested: not before, and not long after."""
    first = stage.held(task=stage.tasks.resting)
    results = stage.line_up(2, task=stage.tasks.resting)
    stage.open()
    stage.have_run([first, *results])  # the next courier would come in ten minutes
    acquired = [entry["fence"] for entry in journal.entries(what="acquired")]  # us, by the server's clock
    assert all(after - before >= 500_000 for before, after in itertools.pairwise(acquired))


@pytest.mark.parametrize("queue", ["celery", "parked"], ids=["runs", "revoked"])
def test_waiters_wait_for_the_holders_retry(stage, journal, parked, both, queue):
    """hold_on_retry: the line waits until the retry has run too, or hands on what one will not come for."""
    first = journal.reached("start", stage.tasks.patient.apply_async([stage.key, stage.gate, queue]))
    second = stage.parked(task=stage.tasks.patient)
    stage.open()
    journal.wait_for("released", outcome="held_for_retry", task_id=first.id)
    if queue == "parked":
        revoke(stage.tasks.app, first, *both)
        parked.move()
        wait_until(lambda: first.state == "REVOKED", "its state is stored")
    else:
        stage.open()
        assert first.get(timeout=60) == [first.id, 1]
    assert second.get(timeout=60) == [second.id, 0]
    assert stage.starts() == [first.id] * (1 if queue == "parked" else 2) + [second.id]
    assert_one_at_a_time(journal)


def test_task_that_sends_itself_does_not_deadlock(stage, journal):
    """A call sent from inside the lock waits until its sender has ended."""
    stage.tasks.again.apply_async([stage.key, 3])
    journal.wait_for("end", name="left-0")
    assert [entry["name"] for entry in journal.entries(what="start")] == [f"left-{n}" for n in (3, 2, 1, 0)]
    assert_one_at_a_time(journal)


def test_thousand_publishes_while_one_runs_are_one_more_run(stage, journal, locks):
    """dedupe="until_started", nothing else: one running, one pending, which is queued while it waits.

    The mark of each is gone when its body runs.
    """
    pending = stage.tasks.pending
    mark = mark_name(pending.lock_key(stage.key))
    first = stage.held(task=pending)
    assert not locks.exists(mark)
    results = [pending.delay(stage.key) for _ in range(1000)]
    journal.wait_for("waiting")
    assert journal.entries(what="conflict")[0]["policy"] == "wait"
    results.append(pending.delay(stage.key))
    assert len({result.id for result in results}) == 1
    stage.open()
    assert results[-1].get(timeout=60) == ""
    assert stage.starts() == [first.id, results[0].id]
    assert [result.deduplicated for result in results] == [False] + [True] * 1000
    assert_one_at_a_time(journal)
    assert not locks.exists(mark)
    assert journal.entries(what="lapsed") == []
    again = pending.delay(stage.key)
    assert not again.deduplicated
    again.get(timeout=60)


# What is seen of it


@pytest.mark.parametrize("name", ["decided", "silent"])
def test_calls_wait_by_a_policy_of_their_own_and_without_a_result(stage, journal, name):
    """conflict.wait() parks as on_conflict="wait" does, and so does ignore_result: in order, once.

    Who has the lock and who waits is seen, and each is told its place.
    """
    task = getattr(stage.tasks, name)
    calls = [stage.held(task=task), *stage.line_up(3, task=task)]
    holder = task.locked(stage.key)
    assert [each.task_id for each in (holder, *holder.waiters)] == [call.id for call in calls]
    assert [entry["place"] for entry in journal.entries(what="waiting")] == [1, 2, 3]
    stage.open()
    for call in calls:
        journal.wait_for("postrun", task_id=call.id, state="SUCCESS")
    assert stage.starts() == [call.id for call in calls]
    assert_one_at_a_time(journal)


@pytest.mark.parametrize(("pool", "concurrency"), [("threads", 4), ("solo", 1)])
def test_every_pool_parks_and_wakes_in_order(stage, start_worker, pool, concurrency):
    """Six calls of one key under another pool: each runs once, in order, one at a time."""
    start_worker(APP, queues=stage.key, pool=pool, concurrency=concurrency)
    first = stage.held(queue="celery" if pool == "solo" else stage.key)
    results = stage.line_up(6, queue=stage.key)
    stage.open()
    stage.have_run([first, *results])
