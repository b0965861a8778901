"""Two workers in two containers want the same lock."""

from celery_setnx import is_skipped
from tests.smoke.containers import call_on

CALLS = 15


def test_calls_of_two_workers_run_one_at_a_time(tasks, workers, journal, control, name):
    """A number that bodies in both containers count up in two steps misses nobody."""
    results = [call_on(worker, tasks.count, name) for _ in range(CALLS) for worker in workers]
    for result in results:
        result.get(timeout=60)
    assert int(control.get(f"number:{name}")) == 2 * CALLS
    counted = journal.wait_for("counted", 2 * CALLS)
    assert [entry["inside"] for entry in counted] == [1] * 2 * CALLS
    assert {entry["host"] for entry in counted} == {worker.container.id[:12] for worker in workers}


def test_skipped_call_names_the_other_container(tasks, workers, journal, gates, name):
    """The result of a call that is skipped says which container has the lock."""
    holder, other = workers
    first = call_on(holder, tasks.work, name)
    (start,) = journal.wait_for("start", task_id=first.id)
    second = call_on(other, tasks.work, name, singleton={"on_conflict": "skip"})
    skipped = second.get(timeout=60)
    (met,) = journal.wait_for("conflict", task_id=second.id)
    gates(name)
    assert first.get(timeout=60) == name
    assert is_skipped(skipped)
    assert skipped["holder"]["worker"] == holder.hostname()
    assert skipped["holder"]["task_id"] == first.id
    assert met["holder"]["host"] == start["host"] == holder.container.id[:12]
