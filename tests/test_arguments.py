"""Arguments that do not fit a task with `typing=False`: published, and an ordinary failure in the worker."""

from typing import Any

import pytest

from celery_setnx import UnkeyableCall

MISFITS: list[Any] = [((), {}), (("a", 1, 2), {}), ((), {"nme": "a"}), (("a",), {"name": "b"})]
TASKS = ["untyped", "untyped_all", "untyped_whole", "untyped_decorated"]


def fails(result: Any, journal: Any) -> None:
    """Its body's call failed as Python has it, under its lock."""
    with pytest.raises(TypeError, match=r"plainly\(\)") as failure:
        result.get(timeout=60)
    assert type(failure.value) is TypeError
    journal.wait_for("postrun", task_id=result.id)
    words = [word for word in journal.words(result.id) if word != "lapsed"]  # a slow publisher's mark
    assert words == ["acquired", "released", "postrun"]


@pytest.mark.parametrize(("args", "kwargs"), MISFITS)
@pytest.mark.parametrize("name", TASKS)
def test_call_that_does_not_fit_fails_in_the_worker(tasks, journal, name, args, kwargs):
    """As it does without us."""
    fails(getattr(tasks, name).apply_async(args, kwargs), journal)


@pytest.mark.parametrize("name", TASKS)
def test_call_by_name_that_does_not_fit_fails_in_the_worker(tasks, journal, name):
    """Its key is computed there, by the same rule."""
    fails(tasks.app.send_task(f"tests.workerapp.{name}"), journal)


def test_fan_out_of_calls_that_do_not_fit_is_published(tasks, journal):
    """Each of them fails in the worker."""
    outcomes: list[Any] = []
    done = tasks.untyped_all.fan_out([("a", 1, 2), {}, ("a",)], each=outcomes.append)
    assert (done.accepted, done.failed) == (3, 0)
    outcomes.sort(key=lambda outcome: outcome.index)
    states = [journal.wait_for("postrun", task_id=outcome.task_id)[0]["state"] for outcome in outcomes]
    assert states == ["FAILURE", "FAILURE", "SUCCESS"]


def test_equal_calls_that_do_not_fit_are_one(tasks, parked):
    """While the first of them is queued the second is a duplicate; another is not."""
    task = tasks.untyped_all
    first, again, other = (task.apply_async(["a", 1, n], queue="parked") for n in (2, 2, 3))
    assert (again.id, again.deduplicated) == (first.id, True)
    assert not other.deduplicated


def test_call_that_does_not_fit_has_the_key_that_it_names(tasks):
    """So it excludes the calls that do fit; where it names none, what it gives is the key."""
    named, whole, all_of_it = tasks.untyped, tasks.untyped_whole, tasks.untyped_all
    assert named.lock_key("a", 1, 2) == named.lock_key(name="a", nme="b") == named.lock_key("a")
    assert whole.lock_key() == whole.lock_key("a", 1, 2) == whole.lock_key("a")
    assert len({all_of_it.lock_key(*args) for args in ((), ("a",), ("a", 1, 2), ("a", 1, 3))}) == 4
    assert named.lock_key() == named.lock_key() != named.lock_key(nme="a")


def test_call_that_does_not_fit_is_refused_where_celery_checks_arguments(tasks):
    """With typing, which is the default: nothing is published."""
    with pytest.raises(UnkeyableCall, match="missing a required argument: 'name'"):
        tasks.done.delay()


def test_argument_without_a_canonical_form_is_refused_all_the_same(tasks):
    """Its call could not be told from others."""
    with pytest.raises(UnkeyableCall, match="has no canonical form"):
        tasks.untyped_all.delay(object(), 1, 2)
