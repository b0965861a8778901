# mypy: disable-error-code="untyped-decorator"
"""Calls that end with the holder's result (`on_conflict="join"`). Real workers."""

import os
import signal
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from celery import Celery, chain, chord

from celery_setnx import LockTimeout, OptionError, SingletonTask
from tests.harness import Journal, Worker, wait_until

APP = "tests.waitapp"
ENVIRONMENT = {"C_FORCE_ROOT": "1"}  # it accepts pickles, whoever runs the tests


@pytest.fixture(scope="module")
def crew(server, logs) -> Iterator[Worker]:
    """A worker with four processes. Not to be killed."""
    worker = Worker(logs, APP, concurrency=4, environment=ENVIRONMENT)
    yield worker
    worker.stop()


@pytest.fixture
def single(server, logs) -> Iterator[Worker]:
    """A worker with one process, and a queue of its own; it may be killed."""
    worker = Worker(logs, APP, concurrency=1, queues="single", environment=ENVIRONMENT)
    yield worker
    if worker.process.poll() is None:
        worker.stop()


@pytest.fixture
def tasks(crew, locks, journal) -> Iterator[Any]:
    """The module of tasks that the worker runs, with clean databases."""
    from tests import waitapp

    yield waitapp
    ended = {entry["task_id"] for entry in journal.entries(what="end")}
    for entry in journal.entries(what="start"):  # of a test that has failed
        if entry["task_id"] not in ended:
            waitapp.control.rpush(f"gate:{entry['name']}", "open")


@pytest.fixture
def key() -> str:
    """A key that is no other test's: its couriers may still be on their way."""
    return uuid.uuid4().hex[:8]


def held(journal: Journal, task: Any, name: str, **options: Any) -> Any:
    """A call whose body has started and waits at the gate `gated-<name>`."""
    result = task.apply_async([name, f"gated-{name}"], **options)
    journal.wait_for("start", task_id=result.id)
    return result


def join(journal: Journal, task: Any, name: str, count: int, **options: Any) -> list[Any]:
    """Calls that wait for the holder's result."""
    results = [task.apply_async([name], **options) for _ in range(count)]
    for result in results:
        journal.wait_for("waiting", task_id=result.id)
        journal.wait_for("postrun", task_id=result.id)
    return results


def starters(journal: Journal) -> list[str]:
    """Ids of the tasks whose bodies started, in order."""
    return [entry["task_id"] for entry in journal.entries(what="start")]


def test_ten_joiners_end_with_the_one_result(tasks, key, journal, gates):
    """Ten equal calls while one runs: one run in all, and eleven results, all the holder's."""
    first = held(journal, tasks.joined, key)
    results = join(journal, tasks.joined, key, 10)
    gates(f"gated-{key}")
    for result in [first, *results]:
        assert result.get(timeout=20) == [key, first.id]
        assert result.state == "SUCCESS"
    assert starters(journal) == [first.id]
    wait_until(lambda: tasks.joined.locked(key) is None, "nobody has the lock")


def test_joiner_takes_no_lock(tasks, key, journal, gates):
    """The lifecycle of a joiner: it meets the lock, waits, and ends; it is never the holder."""
    held(journal, tasks.joined, key)
    (second,) = join(journal, tasks.joined, key, 1)
    gates(f"gated-{key}")
    second.get(timeout=20)
    postruns = journal.wait_for("postrun", count=2, task_id=second.id)
    assert set(journal.words(second.id)) == {"conflict", "waiting", "postrun"}
    assert {entry["state"] for entry in postruns[:-1]} <= {"IGNORED", "RETRY"}
    assert journal.entries(what="conflict", task_id=second.id)[0]["policy"] == "join"


def test_holders_error_is_the_joiners_too(tasks, key, journal, gates):
    """A failed holder's exception, with its arguments, is raised in every joiner."""
    first = held(journal, tasks.joined_failing, key)
    results = join(journal, tasks.joined_failing, key, 3)
    gates(f"gated-{key}")
    for result in [first, *results]:
        with pytest.raises(ZeroDivisionError, match=key):
            result.get(timeout=20)
        assert result.state == "FAILURE"
    assert starters(journal) == [first.id]


def test_chain_of_a_joiner_goes_on_with_the_holders_result(tasks, key, journal, gates):
    """What follows a joiner gets the holder's result, once."""
    first = held(journal, tasks.joined, key)
    result = chain(tasks.joined.s(key), tasks.arrival.s("next")).delay()
    journal.wait_for("waiting")
    gates(f"gated-{key}")
    assert result.get(timeout=20) == [[key, first.id], "next"]
    assert len(journal.entries(what="arrival")) == 1


def test_chord_of_joiners_has_its_callback(tasks, key, journal, gates):
    """Equal members of a chord are one run, and count as often as they are."""
    result = chord([tasks.joined.s(key, f"gated-{key}") for _ in range(4)], tasks.arrival.s()).delay()
    journal.wait_for("waiting", count=3)
    gates(f"gated-{key}")
    (runner,) = set(starters(journal))
    assert result.get(timeout=20) == [[[key, runner]] * 4]
    assert starters(journal) == [runner]
    assert len(journal.entries(what="arrival")) == 1


def test_joiners_wait_for_the_holders_last_attempt(tasks, key, journal, gates):
    """A holder that retries has no result yet: its joiners end with that of its last attempt."""
    first = held(journal, tasks.joined_retrying, key)
    results = join(journal, tasks.joined_retrying, key, 3)
    gates(f"gated-{key}")
    gates(f"gated-{key}")
    for result in [first, *results]:
        assert result.get(timeout=20) == [first.id, 1]
    assert starters(journal) == [first.id, first.id]


@pytest.mark.parametrize("how", ["child", "worker"])
def test_joiner_of_a_killed_holder_runs_itself(tasks, key, journal, gates, single, how):
    """A holder that died has no result: the first of its joiners runs, and the others end with its result."""
    first = held(journal, tasks.joined, key, queue="single")
    results = join(journal, tasks.joined, key, 3, singleton={"retry_delay_max": 0.2})
    if how == "child":
        os.kill(journal.entries(what="start")[0]["pid"], signal.SIGKILL)
    else:
        single.kill()
    found = [result.get(timeout=20) for result in results]
    assert found[0] != [key, first.id]
    assert found[0][1] in [result.id for result in results]
    runs = starters(journal)[1:]
    assert len(runs) == len(set(runs))
    assert {runner for _name, runner in found} == set(runs)


def test_joiner_of_a_forgotten_result_runs_itself(tasks, key, journal, gates):
    """A holder whose result is not stored leaves its joiners to themselves."""
    first = held(journal, tasks.joined, key, ignore_result=True, singleton={"on_conflict": "wait"})
    (second,) = join(journal, tasks.joined, key, 1, singleton={"retry_delay_max": 0.1})
    gates(f"gated-{key}")
    assert second.get(timeout=20) == [key, second.id]
    assert starters(journal) == [first.id, second.id]


def test_joiner_of_a_revoked_holder_runs_itself(tasks, key, journal, gates):
    """A holder that was revoked while it ran has no result: its joiner runs."""
    first = held(journal, tasks.joined, key)
    (second,) = join(journal, tasks.joined, key, 1)
    first.revoke(terminate=True, signal="SIGKILL")
    assert second.get(timeout=20) == [key, second.id]
    assert starters(journal) == [first.id, second.id]


def test_joiner_of_another_task_runs_itself(tasks, key, journal, gates):
    """The lock of a shared scope may be another task's, whose result is no result of this one."""
    options = {"scope": "shared"}
    held(journal, tasks.work, key, singleton=options)
    (second,) = join(journal, tasks.joined, key, 1, singleton=options)
    gates(f"gated-{key}")
    assert second.get(timeout=20) == [key, second.id]


def test_call_after_the_holders_end_has_a_run_of_its_own(tasks, key, journal, gates):
    """While joiners end with the old result a new call runs, and does not get it."""
    first = held(journal, tasks.joined, key)
    results = join(journal, tasks.joined, key, 10)
    gates(f"gated-{key}")
    assert first.get(timeout=20) == [key, first.id]
    fresh = tasks.joined.delay(key)
    assert fresh.get(timeout=20) == [key, fresh.id]
    assert [result.get(timeout=20) for result in results] == [[key, first.id]] * 10
    assert starters(journal) == [first.id, fresh.id]


def test_joiners_hold_no_pool_slot(tasks, key, journal, gates, single):
    """A worker with one process runs other tasks while five of its calls wait for a result elsewhere."""
    first = held(journal, tasks.joined, key)
    results = join(journal, tasks.joined, key, 5, queue="single")
    assert tasks.beside.apply_async([7], queue="single").get(timeout=10) == 7
    assert tasks.joined.locked(key).waiting == 5
    gates(f"gated-{key}")
    assert [result.get(timeout=20) for result in results] == [[key, first.id]] * 5


def test_max_wait_ends_a_join(tasks, key, journal, gates):
    """A joiner waits no longer than max_wait."""
    first = held(journal, tasks.joined, key)
    (second,) = join(journal, tasks.joined, key, 1, singleton={"max_wait": 0.5})
    at = time.monotonic()
    with pytest.raises(LockTimeout):
        second.get(timeout=20)
    assert time.monotonic() - at < 3
    gates(f"gated-{key}")
    assert first.get(timeout=20) == [key, first.id]


def test_join_with_ignore_result_is_refused(server):
    """A task whose results are not stored cannot be joined."""
    app = Celery(broker=server.url(6), backend=server.url(6), set_as_current=False)
    with pytest.raises(OptionError, match="ignore_result"):

        @app.task(
            base=SingletonTask,
            lazy=False,
            shared=False,
            ignore_result=True,
            singleton={"on_conflict": "join"},
        )
        def silent() -> None: ...
