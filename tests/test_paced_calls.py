"""Calls whose starts are paced, in real workers: never more than the rate in any window, and none is lost.

A start is known by its fence: that is the lock server's time (us) at which its call acquired.
"""

from bisect import bisect_left
from collections import Counter
from typing import Any

import pytest
from celery import chain, chord

from celery_setnx import AlreadyRunning, is_skipped, send_task
from celery_setnx.testing import pass_time
from tests.bounds import bound
from tests.harness import Worker, wait_until
from tests.limitstage import Bench, worker_children

APP = "tests.limitapp"
STARTS, PERIOD_S = 50, 2.0
CALLS = bound(200, full=1_000)


@pytest.fixture(scope="module")
def workers(module_worker) -> list[Worker]:
    """Four workers."""
    return [module_worker(APP, concurrency=4) for _ in range(4)]


@pytest.fixture
def shared(bench, workers) -> Bench:
    """The tasks that the workers run."""
    return bench


def times(bench: Bench) -> list[float]:
    """When calls of the key have started, by the lock server's clock."""
    return sorted(start["fence"] / 1e6 for start in bench.told())


def most_in(found: list[float], period_s: float) -> int:
    """How many started in any window of so long, at most."""
    return max((bisect_left(found, at + period_s) - n for n, at in enumerate(found)), default=0)


@pytest.mark.clock  # a busy machine may not start as many as it might
def test_no_window_has_more_starts_than_the_rate(shared):
    """A thousand calls of a key at full bounds; each once, and the pace is used."""
    results = [shared.tasks.paced.delay(shared.key) for _ in range(CALLS)]
    for result in results:
        result.get(timeout=120)
    found = times(shared)
    assert Counter(start["task_id"] for start in shared.told()) == Counter(r.id for r in results)
    assert most_in(found, PERIOD_S) == STARTS
    # By the end of the run at least 95 % of the starts that were possible had been made.
    possible = STARTS * (1 + (found[-1] - found[0]) // PERIOD_S)
    print(f"{CALLS} starts in {found[-1] - found[0]:.2f} s, of {possible:.0f} possible ones")
    shared.free(shared.tasks.paced)


SELDOM_S = 60  # no test here ends in time if each start has to wait for a sweep


@pytest.mark.parametrize(
    ("count", "calls", "arguments"),
    [
        pytest.param(4, 20, (), id="four workers"),
        # Celery itself starts a process for each call, and now and then only after five seconds.
        pytest.param(1, 8, ("--max-tasks-per-child", "1"), id="a process for each call"),
    ],
)
def test_line_goes_on_at_its_pace_between_two_sweeps(bench, start_worker, count, calls, arguments):
    """Workers that hardly ever sweep: who hears of the end of a delivery looks when the next may start."""
    for _ in range(count):
        start_worker(APP, concurrency=2, conf={"test_sweep_s": SELDOM_S}, arguments=arguments)
    for task, period_s in ((bench.tasks.often, 0.1), (bench.tasks.often_rests, 0.2)):
        results = [task.delay(f"{bench.key}{period_s}") for _ in range(calls)]
        for result in results:
            result.get(timeout=120)
        ids = {result.id for result in results}
        found = sorted(
            start["fence"] / 1e6 for start in bench.journal.entries(what="start") if start["task_id"] in ids
        )
        assert len(found) == calls
        assert most_in(found, period_s) == 1
        print(f"a start every {(found[-1] - found[1]) / (calls - 2):.3f} s, of {period_s} s that it may be")


# What becomes of a call that may not start yet


def started_twice(shared: Bench, task: Any) -> None:
    """Two calls of the key have run: that is all for ten minutes."""
    for result in [task.delay(shared.key) for _ in range(2)]:
        shared.has_run(result)


def test_call_waits_for_its_pace_and_runs_when_that_allows_it(shared):
    """With "auto" too. A worker looks at the line when the next may start, and wakes the first."""
    task = shared.tasks.slow["auto"]
    started_twice(shared, task)
    first, second, third = (shared.parked(task=task) for _ in range(3))
    (met, *_) = shared.journal.entries(what="conflict", task_id=first.id)
    assert met["holder"]["state"] == "paced"
    assert 500 < met["remaining_s"] <= 600
    pass_time(600, task, shared.key)
    for result in (first, second):
        shared.has_run(result)
    assert len(shared.told()) == 4
    pass_time(600, task, shared.key)
    shared.has_run(third)
    shared.free(task)


def test_skipped_and_failed_calls_say_that_it_is_for_their_pace(shared):
    """Nobody holds the lock; each says of itself what its key was made of."""
    about = f"name={shared.key!r}"
    started_twice(shared, shared.tasks.slow["skip"])
    skipped = shared.tasks.slow["skip"].delay(shared.key).get(timeout=60)
    assert is_skipped(skipped)
    assert (skipped["holder"]["state"], skipped["about"]) == ("paced", about)
    started_twice(shared, shared.tasks.slow["raise"])
    said = rf"slow_raises\({about}\) may not start yet: .* its pace of 2 in 600 s"
    with pytest.raises(AlreadyRunning, match=said):
        shared.tasks.slow["raise"].delay(shared.key).get(timeout=60)


def test_every_attempt_of_a_task_is_a_start(shared):
    """Its own retry asks as any call does: the third start in ten minutes waits."""
    task = shared.tasks.slow["again"]
    (first,) = shared.fill(1, task=task)
    shared.open()
    shared.journal.wait_for("start", 2, task_id=first.id)
    other = shared.parked(task=task)
    shared.open()
    assert first.get(timeout=60) in (0, 1)
    assert other.id not in shared.starts()
    pass_time(600, task, shared.key)
    shared.has_run(other)


def test_retry_that_holds_the_lock_waits_for_its_pace_and_resumes(shared):
    """hold_on_retry: nobody has the lock in between, and both attempts have one fence."""
    task = shared.tasks.quick["held"]
    (first,) = shared.fill(1, task=task)
    waiting = shared.parked(task=task)
    shared.open()
    shared.journal.wait_for("start", 2, task_id=first.id)
    shared.open()
    for result in (first, waiting):
        result.get(timeout=60)
    attempts = shared.journal.entries(what="start", task_id=first.id)
    assert len({start["fence"] for start in attempts}) == 1
    assert shared.starts() == [first.id, first.id, waiting.id]
    began, resumed, _waiting = shared.told()
    assert resumed["time"] - began["fence"] / 1e6 >= 1.99


@pytest.mark.clock  # its retry is to come within the two seconds in which its start counts
def test_attempt_of_a_call_that_has_begun_is_not_skipped_for_its_pace(shared):
    """What refuses its retry is the call's own start: it comes back when it may start again."""
    task = shared.tasks.quick["skip"]
    (first,) = shared.fill(1, task=task)
    shared.open()
    shared.journal.wait_for("start", 2, task_id=first.id)
    shared.open()
    assert first.get(timeout=60) == 0
    met = shared.journal.entries(what="conflict", task_id=first.id)
    assert {conflict["policy"] for conflict in met if conflict["holder"]["state"] == "paced"} == {"retry"}


# Celery's ways to publish


def test_chord_and_chains_go_at_their_pace(shared):
    """All members run, and the callback has all results; steps of chains run in order."""
    step = shared.tasks.paced_step
    members = [step.s([], shared.key) for _ in range(20)]
    chains = [chain(step.s([], shared.key), step.s(shared.key)).delay() for _ in range(5)]
    assert chord(members)(shared.tasks.total.s()).get(timeout=60) == 20
    for result in chains:
        assert len(result.get(timeout=60)) == 2
    assert len(shared.told()) == 30
    assert most_in(times(shared), 1.0) <= 10


def test_calls_by_name_go_at_the_pace_of_the_task(shared):
    """A sender without the task's code, and one who names another rate."""
    producer = shared.tasks.make_app("producer", shared.tasks.BROKER_DB)
    about = {"singleton": {"key": "name", "rate": "1000/s"}}
    results = [send_task(producer, "limit.slow", kwargs={"name": shared.key}, **about) for _ in range(3)]
    shared.journal.wait_for("start", 2, key=shared.key)
    (waiting,) = shared.journal.wait_for("waiting")
    assert waiting["task_id"] in [result.id for result in results]
    assert len(shared.told()) == 2


# Death, loss and deploys


def test_all_calls_run_at_their_pace_while_processes_and_workers_are_killed(bench, start_worker):
    """A start counts though its process has died; what comes again starts again, at the pace."""
    task = bench.tasks.quick["wait"]
    lasting = start_worker(APP, concurrency=4, queues="lasting")
    doomed = start_worker(APP, concurrency=4, queues="doomed,aside")
    results = [task.apply_async([bench.key, "", 0.05], queue=queue) for queue in ("lasting", "doomed") * 20]
    for count in (8, 16):
        wait_until(lambda: len(bench.told("end")) >= count, f"{count} calls")  # noqa: B023
        bench.kill_one(lasting)
        bench.kill_one(doomed)
    bench.lose_worker(doomed, "doomed", "aside")
    start_worker(APP, concurrency=4, queues="doomed")
    for result in results:
        result.get(timeout=60)
    assert {start["task_id"] for start in bench.told()} == {result.id for result in results}
    assert most_in(times(bench), 1.0) <= 10
    assert bench.most() <= 5
    bench.free(task)


def test_rate_is_lowered_by_a_deploy_under_load(bench, start_worker):
    """Twenty a second, then five: never more than the old rate; and no call of the new workers is more than
    the fifth in a second, whoever has started the others.
    """
    task, control = bench.tasks.quick["load"], bench.journal._client
    old = start_worker(APP, concurrency=4, queues=bench.key, conf={"test_starts": 20})
    control.set(f"load:{bench.key}", "on", ex=300)
    for _ in range(10):
        task.apply_async([bench.key], queue=bench.key)
    wait_until(lambda: most_in(times(bench), 1.0) > 5, "more than the new rate")
    new = start_worker(APP, concurrency=4, queues=bench.key, conf={"test_starts": 5})
    pids = worker_children(new)

    def of_new() -> list[float]:
        return [start["fence"] / 1e6 for start in bench.told() if start["pid"] in pids]

    # Perhaps none of the new ones: as long as the old workers start more, its own rate may allow it none.
    both = len(bench.told())
    wait_until(lambda: len(bench.told()) >= both + 10, "calls while both run")
    old.stop()
    count = len(of_new())
    wait_until(lambda: len(of_new()) >= count + 10, "calls at the new rate")
    control.delete(f"load:{bench.key}")
    bench.free(task)
    every = times(bench)
    assert most_in(every, 1.0) <= 20
    for at in of_new():
        assert bisect_left(every, at) - bisect_left(every, at - 1.0 + 1e-5) < 5
