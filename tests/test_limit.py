"""Several calls of a key at a time: never more than the limit, and no permit lost. Real workers.

Who runs beside whom is told by the bodies, not by the locks (see `tests.limitapp`). Leases are of ten
minutes: what happens is a hand-over, or a death that was noticed; else a test says that time passes.
"""

from functools import partial
from typing import Any

import pytest
from celery import chain, chord, group
from celery.exceptions import WorkerLostError

from celery_setnx import AlreadyRunning, OptionError, send_task
from tests.harness import Worker
from tests.limitstage import LIMIT, TWO, Bench
from tests.protocol.client import ClassicClient, Server

APP = "tests.limitapp"


@pytest.fixture(scope="module")
def workers(module_worker) -> list[Worker]:
    """Two workers, each with more pool processes than there are permits."""
    return [module_worker(APP, concurrency=6) for _ in range(2)]


@pytest.fixture
def shared(bench, workers) -> Bench:
    """The tasks that the two workers run."""
    return bench


# How many, and in which order


def test_never_more_than_the_limit_run(shared):
    """Sixty calls of one key: five bodies at a time at most, and five do run; each call once."""
    first = shared.fill()
    results = [shared.task.delay(shared.key, "", 0.02) for _ in range(55)]
    shared.open(LIMIT)
    for result in (*first, *results):
        result.get(timeout=60)
    starts = shared.told()
    assert sorted(start["task_id"] for start in starts) == sorted(r.id for r in (*first, *results))
    assert {start["permit"] for start in starts} == set(range(LIMIT))
    assert shared.most() == LIMIT
    shared.free()


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


def test_classic_client_is_one_holder_among_five(shared, server, locks, foreign_keys):
    """Four of ours run beside it; one that waits goes on when it has released, which wakes nobody."""
    key = shared.task.lock_key(shared.key)
    foreign_keys.add(key)  # the recipe sets no TTL
    with Server(server.port, 1) as connection:
        classic = ClassicClient(connection, key, timeout_s=600)
        assert classic.acquire()
        first = shared.fill(LIMIT - 1)
        waiting = shared.parked()
        assert shared.permits() == {0: None, **{shared.of(r)["permit"]: r.id for r in first}}
        assert shared.task.holders(shared.key)[0].state == "foreign"
        classic.release()
    shared.has_run(waiting)
    assert shared.of(waiting)["permit"] == 0
    shared.open(LIMIT - 1)
    for result in first:
        shared.has_run(result)
    shared.free()


# Celery's ways to publish


def test_chord_runs_five_at_a_time(shared):
    """All members run, with "auto", which retries in a workflow; the callback once, with all results."""
    task = shared.tasks.auto
    members = [task.s(shared.key, "", 0.01) for _ in range(40)]
    result = chord(members)(shared.tasks.total.s())
    assert result.get(timeout=60) == 40
    assert [entry["count"] for entry in shared.journal.entries(what="total", task_id=result.id)] == [40]
    assert len(shared.told()) == 40
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
    text = "option 'limit' of a call of limit.work is the same for all calls of the task; give it to the task"
    with pytest.raises(OptionError, match=text):
        shared.task.apply_async([shared.key], singleton={"limit": 7})
    with pytest.raises(OptionError, match=text):
        send_task(shared.tasks.app, "limit.work", kwargs={"name": shared.key}, singleton={"limit": 7})


# What is queued


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


def crowd(shared: Bench, task: Any) -> list[Any]:
    """Five calls that run: the first has the lock for longest, the second has the shortest lease."""
    first, second = shared.fill(1, task=task), shared.fill(1, task=task, singleton={"lease": 60})
    return [*first, *second, *shared.fill(LIMIT - 2, task=task)]


def test_longest_holder_and_first_end_are_named(shared):
    """To an error, and to a policy of one's own: who has held for longest of all, and when the first ends."""
    raises, tells = shared.tasks.raises, shared.tasks.tells
    calls = crowd(shared, raises)
    with pytest.raises(AlreadyRunning) as caught:
        raises.delay(shared.key).get(timeout=60)
    assert caught.value.holder["task_id"] == calls[0].id
    assert 0 < caught.value.remaining_s <= 60
    assert raises.lock_key(shared.key) in str(caught.value)
    assert f"limit.raises(name={shared.key!r})[{calls[0].id}]" in str(caught.value)
    shared.open(LIMIT)
    for call in calls:  # a worker whose processes all wait takes the next message all the same
        shared.has_run(call)
    longest, *_ = crowd(shared, tells)
    said = tells.delay(shared.key).get(timeout=60)
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
