"""Several calls of a key at a time, while workers die, or are replaced by others with another limit.

Who runs beside whom is told by the bodies, not by the locks (see `tests.limitapp`).
"""

import time
from collections.abc import Callable

import pytest

from celery_setnx.lock.names import permits_name
from tests.harness import DEADLINE_S, Worker, age, due_set, wait_until
from tests.limitstage import LIMIT, Bench

APP = "tests.limitapp"


# Death


def test_killed_worker_costs_its_permits_for_a_lease(bench, locks, start_worker):
    """The others go on meanwhile, under the permits that are left; then those are taken over."""
    conf = {"setnx_same_host": False}
    doomed = start_worker(APP, concurrency=2, queues="doomed", conf=conf)
    start_worker(APP, concurrency=6, queues="elsewhere", conf=conf)
    dead = bench.fill(2, "never", queue="doomed")
    living = bench.fill(3, queue="elsewhere")
    waiting = [bench.parked(queue="elsewhere") for _ in range(9)]
    bench.kill_worker(doomed)
    bench.open(3)
    for result in (*living, *waiting):
        bench.has_run(result)
    wait_until(lambda: len(bench.permits()) == 2, "the permits of the dead are left")
    assert set(bench.permits().values()) == {result.id for result in dead}
    again = bench.fill(3, queue="elsewhere")
    late = [bench.parked(bench.gate, queue="elsewhere") for _ in range(2)]
    ids = {result.id for result in dead}
    living = [holder.token for holder in bench.task.holders(bench.key) if holder.task_id not in ids]
    age(locks, bench.task.lock_key(bench.key), 600, living=living)
    for result in late:
        bench.journal.reached("start", result)
    died = {entry["holder"]["task_id"] for entry in bench.journal.entries(what="taken_over")}
    assert died == ids
    assert not bench.journal.entries(what="lost")
    bench.open(5)
    for result in (*again, *late):
        bench.has_run(result)
    assert bench.most() == LIMIT
    bench.free()


@pytest.mark.parametrize("policy", ["wait", "retry"])
def test_all_calls_run_while_processes_and_workers_are_killed(bench, start_worker, policy):
    """Of 200 calls some die with their processes, and come again: all run, and five at a time at most.

    The lease is short, because a call that was woken in vain comes again a lease later.
    """
    task = bench.tasks.late[policy]
    lasting = start_worker(APP, concurrency=6, queues="lasting")
    doomed = start_worker(APP, concurrency=6, queues="doomed,aside")
    queues = ("lasting", "doomed") * 100
    results = [task.apply_async([bench.key, "", 0.05], queue=queue) for queue in queues]
    for count in (20, 40, 60, 80):
        wait_until(lambda: len(bench.told("end")) >= count, f"{count} calls")  # noqa: B023
        if count < 80:
            bench.kill_one(lasting)
            bench.kill_one(doomed)
    bench.lose_worker(doomed, "doomed", "aside")
    start_worker(APP, concurrency=6, queues="doomed")
    for result in results:
        result.get(timeout=60)
    assert {start["task_id"] for start in bench.told()} == {result.id for result in results}
    assert bench.most() <= LIMIT
    bench.free(task)


# Deploys


@pytest.fixture
def deploy(bench, start_worker) -> Callable[..., Worker]:
    """Start a worker whose configuration says the limit; its queue is named after the key, or another."""

    def deploy(limit: int, queue: str = bench.key) -> Worker:
        conf = {"test_limit": limit}
        return start_worker(APP, concurrency=6, conf=conf, queues=f"{queue},{aside(bench, limit)}")

    return deploy


def aside(bench: Bench, limit: int) -> str:
    """A queue of the workers of a deploy."""
    return f"{bench.key}-{limit}"


def retire(bench: Bench, worker: Worker, limit: int) -> None:
    """Have a worker run what it has taken, and end."""
    worker.take_no_more_from(bench.tasks.app, bench.key)
    bench.tasks.note.apply_async(queue=aside(bench, limit)).get(
        timeout=60
    )  # it ends a read that is under way
    control = bench.tasks.app.control
    asked = control.inspect([worker.node], timeout=DEADLINE_S, limit=1)

    def is_idle() -> bool:
        return not any(calls for told in (asked.reserved(), asked.active()) for calls in told.values())

    wait_until(is_idle, "it has run all that it has taken")
    worker.kill()


def test_limit_is_lowered_and_raised_by_deploys_under_load(bench, locks, deploy):
    """5, 3, 5: never more than 5; when those with 5 are gone, and what they began, 3; then 5 again."""
    task = bench.tasks.circulates
    five = deploy(5)
    bench.journal._client.set(f"load:{bench.key}", "on", ex=300)
    sent = [task.apply_async([bench.key, 0.1], queue=bench.key).id for _ in range(15)]
    wait_until(lambda: bench.most() == 5, "five at a time")
    three = deploy(3)
    retire(bench, five, 5)
    permits = permits_name(task.lock_key(bench.key))
    wait_until(lambda: str(locks.get(permits)).endswith(" 3"), "nobody says 5 any more")
    wait_until(lambda: max(bench.permits(task), default=0) < 3, "the permits beyond the limit are free")
    since, count = time.monotonic(), len(bench.told())
    wait_until(lambda: len(bench.told()) > count + 15, "more calls")
    until = time.monotonic()
    deploy(5)
    retire(bench, three, 3)
    wait_until(lambda: bench.most(since=until) == 5, "five at a time again")
    bench.journal._client.delete(f"load:{bench.key}")

    def have_all_run() -> bool:  # the last may be with the broker still, and wait for no permit yet
        sent_by_bodies = bench.journal._client.lrange(f"sent:{bench.key}", 0, -1)
        return sorted(start["task_id"] for start in bench.told()) == sorted(sent + sent_by_bodies)

    wait_until(have_all_run, "each call has begun once")
    bench.free(task)
    assert have_all_run()
    assert bench.most() == 5
    assert bench.most(since=since, until=until) <= 3


def test_line_hears_of_a_raised_limit_with_the_next_call(bench, deploy):
    """Two more permits: the first two in line have them before the call that has told of them."""
    deploy(3)
    deploy(5, "five")
    first = bench.fill(3, queue=bench.key)
    waiting = [bench.parked(bench.gate, queue=bench.key) for _ in range(3)]
    newcomer = bench.parked(queue="five")
    for result in waiting[:2]:
        bench.journal.reached("start", result)
    assert set(bench.permits()) == set(range(5))
    assert set(bench.permits().values()) == {result.id for result in (*first, *waiting[:2])}
    assert [waiter.task_id for waiter in bench.task.locked(bench.key).waiters] == [waiting[2].id, newcomer.id]
    bench.open(6)
    for result in (*first, *waiting, newcomer):
        bench.has_run(result)


def test_line_hears_of_a_raised_limit_when_a_worker_looks_at_it(bench, locks, deploy):
    """Nobody comes, and nobody ends: the worker that knows of two more permits hands them out."""
    deploy(3)
    first = bench.fill(3, queue=bench.key)
    waiting = [bench.parked(bench.gate, queue=bench.key) for _ in range(3)]
    assert set(bench.permits()) == {0, 1, 2}
    deploy(5, "five")
    lines, line = due_set(bench.tasks.app, bench.task.name), bench.task.lock_key(bench.key)

    def are_all_held() -> bool:
        locks.zadd(lines, {line: locks.time()[0] * 1_000_000}, xx=True)  # it is due
        return set(bench.permits()) == set(range(5))

    wait_until(are_all_held, "five hold permits")
    for result in waiting[:2]:
        bench.journal.reached("start", result)
    assert set(bench.permits().values()) == {result.id for result in (*first, *waiting[:2])}
    bench.open(6)
    for result in (*first, *waiting):
        bench.has_run(result)
