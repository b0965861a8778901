"""Several calls of a key at a time: never more than the limit, and no permit lost. Real workers.

Who runs beside whom is told by the bodies, not by the locks (see `tests.limitapp`). Leases are of ten
minutes: what happens is a hand-over, or a death that was noticed; else a test says that time passes.
"""

import json
from functools import partial
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import TaskRevokedError, WorkerLostError

from celery_setnx import AlreadyRunning, OptionError, send_task
from celery_setnx.lock.names import permit_names
from tests.harness import Worker, age, wait_until
from tests.limitstage import LIMIT, TWO, Bench
from tests.protocol.client import ClassicClient, Server
from tests.stage import revoke

APP = "tests.limitapp"


@pytest.fixture(scope="module")
def workers(module_worker) -> list[Worker]:
    """Two workers, each with more pool processes than there are permits."""
    return [module_worker(APP, concurrency=6) for _ in range(2)]


@pytest.fixture
def shared(bench, workers) -> Bench:
    """The tasks that the two workers run."""
    return bench


def policies(tasks: Any) -> dict[str, Any]:
    """The tasks that run every call, by their policy."""
    return {"wait": tasks.work, "retry": tasks.retries}


# How many, and in which order


@pytest.mark.parametrize("policy", ["wait", "retry"])
def test_never_more_than_the_limit_run(shared, policy):
    """200 calls of one key: five bodies at a time at most, and five do run; each call once."""
    task = policies(shared.tasks)[policy]
    first = shared.fill(task=task)
    results = [task.delay(shared.key, "", 0.02) for _ in range(195)]
    shared.open(LIMIT)
    for result in (*first, *results):
        result.get(timeout=60)
    starts = shared.told()
    assert sorted(start["task_id"] for start in starts) == sorted(r.id for r in (*first, *results))
    assert {start["permit"] for start in starts} == set(range(LIMIT))
    assert shared.most() == LIMIT
    shared.free(task)


def test_waiting_calls_are_handed_permits_in_order_of_arrival(shared):
    """Each release lets the first in line run, under the permit that was released.

    One permit comes free at a time, because of two that do so at once the second's heir may start first.
    """
    first = shared.fill()
    results = [shared.parked(f"{shared.gate}-{number}") for number in range(8)]
    by_number = {shared.of(result)["permit"]: result for result in first}
    shared.open()
    for count, result in enumerate(results):
        shared.journal.reached("start", result)
        assert [start["task_id"] for start in shared.told()[LIMIT:]] == [r.id for r in results[: count + 1]]
        permit = shared.of(result)["permit"]
        ended = by_number[permit]
        shared.journal.wait_for("end", task_id=ended.id)
        by_number[permit] = result
        shared.open(gate=f"{shared.gate}-{count}")
    shared.open(LIMIT - 1)
    for result in (*first, *results):
        shared.has_run(result)
    assert shared.most() == LIMIT


# Death, and others


def test_permit_of_a_killed_pool_process_is_handed_on_by_its_worker(shared):
    """kill -9 of one of five: its worker hands its permit to the first in line; the others keep theirs."""
    (doomed,) = shared.fill(1, "never")
    others = shared.fill(LIMIT - 1)
    waiting, last = shared.parked(shared.gate), shared.parked(shared.gate)
    victim = shared.of(doomed)
    before = shared.permits()
    shared.kill(victim["pid"])
    shared.journal.reached("start", waiting)
    (freed,) = shared.journal.wait_for("released", task_id=doomed.id)
    assert freed["outcome"] == "freed"
    assert shared.of(waiting)["permit"] == victim["permit"]
    assert shared.permits() == {**before, victim["permit"]: waiting.id}
    with pytest.raises(WorkerLostError):
        doomed.get(timeout=60)
    shared.open(LIMIT + 1)
    for result in (*others, waiting, last):
        shared.has_run(result)
    assert shared.most() == LIMIT
    shared.free()


@pytest.mark.parametrize("ends", ["released", "expired"])
def test_classic_client_is_one_holder_among_five(shared, server, locks, foreign_keys, ends):
    """Four of ours run beside it; one that waits goes on when it has released, or its time is over."""
    key = shared.task.lock_key(shared.key)
    foreign_keys.add(key)  # the recipe sets no TTL
    with Server(server.port, 1) as connection:
        classic = ClassicClient(connection, key, timeout_s=600)
        assert classic.acquire()
        first = shared.fill(LIMIT - 1)
        waiting = shared.parked()
        assert shared.permits() == {0: None, **{shared.of(r)["permit"]: r.id for r in first}}
        assert shared.task.holders(shared.key)[0].state == "foreign"
        if ends == "released":
            classic.release()
        else:
            age(locks, key, 602, living=[holder.token for holder in shared.task.holders(shared.key)])
    shared.has_run(waiting)
    assert shared.of(waiting)["permit"] == 0
    shared.open(LIMIT - 1)
    for result in first:
        shared.has_run(result)
    shared.free()


# Celery's ways to publish


@pytest.mark.parametrize("policy", ["work", "auto"])
def test_chord_of_a_hundred_runs_five_at_a_time(shared, policy):
    """All members run, also with "auto", which retries in a workflow; the callback once, with all results."""
    task = getattr(shared.tasks, policy)
    members = [task.s(shared.key, "", 0.01) for _ in range(100)]
    result = chord(members)(shared.tasks.total.s())
    assert result.get(timeout=60) == 100
    assert [entry["count"] for entry in shared.journal.entries(what="total", task_id=result.id)] == [100]
    assert len(shared.told()) == 100
    assert shared.most() <= LIMIT
    shared.free(task)


def test_group_and_chains_share_the_permits(shared):
    """A group of ten and five chains of three steps, of one key: every step runs, in its chain's order."""
    step = shared.tasks.step
    grouped = group(step.s([], shared.key) for _ in range(10)).delay()
    chains = [chain(step.s([], shared.key), step.s(shared.key), step.s(shared.key)).delay() for _ in range(5)]
    assert [len(permits) for permits in grouped.get(timeout=60)] == [1] * 10
    for result in chains:
        assert len(result.get(timeout=60)) == 3
        ids = [result.parent.parent.id, result.parent.id, result.id]
        assert [start["task_id"] for start in shared.told() if start["task_id"] in ids] == ids
    assert len(shared.told()) == 10 + 15
    assert shared.most() <= LIMIT


@pytest.mark.parametrize("way", ["ours", "with a limit", "celery"])
def test_calls_by_name_count_among_the_five(shared, way):
    """A sender without the task's code: how many of its calls run is said by the workers, not by it."""
    producer = shared.tasks.make_app("producer", shared.tasks.BROKER_DB)
    options = {"key": "name", **({"limit": 7} if way == "with a limit" else {})}
    arguments = {"name": shared.key, "gate": shared.gate}
    send = partial(send_task, producer, singleton=options) if way != "celery" else producer.send_task
    results = [send("limit.work", kwargs=arguments) for _ in range(LIMIT + 1)]
    shared.journal.wait_for("start", LIMIT, key=shared.key)
    shared.journal.wait_for("waiting")
    assert len(shared.permits()) == LIMIT
    shared.open(LIMIT + 1)
    for result in results:
        shared.journal.wait_for("postrun", task_id=result.id, state="SUCCESS")
    assert sorted(shared.starts()) == sorted(result.id for result in results)
    assert shared.most() == LIMIT


def test_limit_is_no_option_of_a_single_call(shared):
    """Where the task is known it is refused, also by send_task: all calls of a key must agree on it."""
    text = "option 'limit' of a call of limit.work is one for all calls of the task; give it to the task"
    with pytest.raises(OptionError, match=text):
        shared.task.apply_async([shared.key], singleton={"limit": 7})
    with pytest.raises(OptionError, match=text):
        send_task(shared.tasks.app, "limit.work", kwargs={"name": shared.key}, singleton={"limit": 7})


# One call, one permit


def test_own_retry_keeps_its_permit_and_resumes_it(shared):
    """hold_on_retry: both attempts of a call have one permit and one fence; nobody has it in between."""
    task = shared.tasks.holds
    first = shared.fill(TWO, task=task)
    waiting = shared.parked(task=task)
    shared.open(TWO)
    permits = set()
    for result in first:
        shared.journal.wait_for("start", 2, task_id=result.id)
        attempts = shared.journal.entries(what="start", task_id=result.id)
        assert [start["retries"] for start in attempts] == [0, 1]
        assert len({(start["permit"], start["fence"]) for start in attempts}) == 1
        permits.add(attempts[0]["permit"])
    assert permits == {0, 1}
    assert waiting.id not in shared.starts()
    shared.open(TWO)
    for result in (*first, waiting):
        result.get(timeout=60)
    assert shared.most() == TWO
    shared.free(task)


def test_each_permit_rests_for_itself(shared, locks):
    """at_least_for: two short runs keep two permits; whose rest is over first is whose permit is free."""
    task = shared.tasks.rests
    rested = [task.delay(shared.key), task.delay(shared.key)]
    for result in rested:
        shared.has_run(result)
    rested.sort(key=lambda result: shared.of(result)["permit"])
    assert [holder.state for holder in task.holders(shared.key)] == ["resting"] * 2
    waiting = shared.parked(task=task)
    # By the name of permit 0, which is the lock's, both would grow older.
    age(locks, permit_names(task.lock_key(shared.key), 1)[0], 600)
    shared.has_run(waiting)
    assert shared.of(waiting)["permit"] == 1
    assert shared.permits(task) == {0: rested[0].id, 1: waiting.id}


def test_redelivery_of_a_running_call_takes_no_second_permit(shared):
    """It meets itself, though four permits are free, and is dropped when the call has succeeded."""
    task = shared.tasks.late["wait"]
    # The other one comes back when this one has ended, and not between its release and its result.
    (result,) = shared.fill(1, task=task, singleton={"retry_delay": 2, "retry_delay_max": 2})
    (message,) = (text for text in shared.broker.hvals("unacked") if result.id in text)
    again = json.loads(message)[0]
    again["properties"]["delivery_info"]["redelivered"] = again["headers"]["redelivered"] = True
    shared.broker.lpush("celery", json.dumps(again))
    (conflict, *_more) = shared.journal.wait_for("conflict", task_id=result.id)
    assert conflict["holder"]["task_id"] == result.id
    assert list(shared.permits(task).values()) == [result.id]
    shared.open()
    shared.has_run(result)

    def is_gone() -> bool:
        texts = [*shared.broker.hvals("unacked"), *shared.broker.lrange("celery", 0, -1)]
        return not any(result.id in text for text in texts)

    wait_until(is_gone, "no message of the call is left")
    assert shared.starts() == [result.id]


def test_revoked_call_leaves_the_line_and_costs_no_permit(shared, workers):
    """Those behind it have their turns."""
    first = shared.fill()
    revoked, last = shared.parked(), shared.parked()
    revoke(shared.tasks.app, revoked, *workers)
    wait_until(lambda: shared.task.locked(shared.key).waiting == 1, "it has left the line")
    with pytest.raises(TaskRevokedError):
        revoked.get(timeout=60)
    shared.open(LIMIT)
    for result in (*first, last):
        shared.has_run(result)
    assert revoked.id not in shared.starts()
    shared.free()


def test_two_run_and_one_more_is_queued(shared):
    """dedupe="until_started", limit=2: what runs makes no duplicate, what is queued does."""
    task = shared.tasks.follows
    first = [shared.held(task=task), shared.held(task=task)]  # one that is queued makes a duplicate
    queued = shared.parked(task=task)
    again = task.delay(shared.key)
    assert [result.deduplicated for result in (*first, queued, again)] == [False, False, False, True]
    assert again.id == queued.id
    shared.open(TWO)
    for result in (*first, queued):
        shared.has_run(result)
    assert shared.most() == TWO
    later = task.delay(shared.key)
    assert not later.deduplicated
    shared.has_run(later)


# What is said of the holders


def crowd(shared: Bench, task: Any) -> Any:
    """Five calls that run, of which the second has the shortest lease: the first of them."""
    (longest,) = shared.fill(1, task=task)
    shared.fill(1, task=task, singleton={"lease": 60})
    shared.fill(LIMIT - 2, task=task)
    return longest


def test_error_names_the_longest_holder_and_the_first_end(shared):
    """on_conflict="raise": `holder` has held for longest of all, `remaining_s` is the first end of any."""
    longest = crowd(shared, shared.tasks.raises)
    with pytest.raises(AlreadyRunning) as caught:
        shared.tasks.raises.delay(shared.key).get(timeout=60)
    assert caught.value.holder["task_id"] == longest.id
    assert 0 < caught.value.remaining_s <= 60
    assert shared.tasks.raises.lock_key(shared.key) in str(caught.value)
    assert f"limit.raises(name={shared.key!r})[{longest.id}]" in str(caught.value)


def test_conflict_names_the_longest_holder_and_the_first_end(shared):
    """A policy of one's own sees the same."""
    longest = crowd(shared, shared.tasks.tells)
    said = shared.tasks.tells.delay(shared.key).get(timeout=60)
    assert said["holder"] == longest.id
    assert 0 < said["remaining_s"] <= 60


def test_locked_is_none_while_a_permit_is_free(shared):
    """`holders()` tells of all, by their permits' numbers; `locked()` of the one that has held longest."""
    assert (shared.task.holders(shared.key), shared.task.locked(shared.key)) == ([], None)
    first = shared.fill(LIMIT - 1)
    assert shared.task.locked(shared.key) is None
    last = shared.held()
    found = shared.task.holders(shared.key)
    assert [(holder.permit, holder.state) for holder in found] == [(n, "running") for n in range(LIMIT)]
    by_permit = {shared.of(result)["permit"]: result.id for result in (*first, last)}
    assert [holder.task_id for holder in found] == [by_permit[number] for number in range(LIMIT)]
    waiting = shared.parked()
    locked = shared.task.locked(shared.key)
    oldest = min((shared.of(result)["fence"], result.id) for result in first)[1]
    assert locked.task_id == oldest
    assert [waiter.task_id for waiter in locked.waiters] == [waiting.id]
    shared.open(LIMIT)
    for result in (*first, last, waiting):
        shared.has_run(result)
