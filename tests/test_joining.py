"""Calls that end with the holder's result (`on_conflict="join"`). Real workers."""

import os
import signal

import pytest
import redis
from celery import chain, chord
from celery.states import READY_STATES

from celery_setnx import LockUnavailable
from examples.embedded import EmbeddedServer
from tests.harness import Worker, wait_until
from tests.stage import SOON, Stage

APP = "tests.waitapp"
ACCEPTS = {"accept_content": ["json", "application/x-python-serialize"]}


@pytest.fixture
def single(stage, start_worker) -> Worker:
    """A worker with one process, whose queue is named after the key; it may be killed."""
    return start_worker(APP, concurrency=1, queues=stage.key)


@pytest.fixture
def stage(stage) -> Stage:
    """Its calls wait for the holder's result, unless they are told otherwise."""
    stage.task = stage.tasks.joined
    return stage


def test_ten_joiners_end_with_the_one_result(stage, journal):
    """Ten equal calls while one runs: one run in all, and eleven results, all the holder's.

    A joiner meets the lock, waits, and ends; it is never the holder.
    """
    first = stage.held()
    results = stage.line_up(10)
    stage.open()
    for result in [first, *results]:
        assert result.get(timeout=60) == [stage.key, first.id]
        assert result.state == "SUCCESS"
    assert stage.starts() == [first.id]
    wait_until(lambda: stage.tasks.joined.locked(stage.key) is None, "nobody has the lock")
    joiner = results[0].id
    postruns = journal.wait_for("postrun", count=2, task_id=joiner)
    words = set(journal.words(joiner)) - {"retry"}  # of asking again, until the result is stored
    assert words == {"conflict", "waiting", "postrun"}
    assert {entry["state"] for entry in postruns[:-1]} <= {"IGNORED", "RETRY"}
    assert journal.entries(what="conflict", task_id=joiner)[0]["policy"] == "join"


@pytest.mark.parametrize(
    "options",
    [{"serializer": "pickle"}, {"singleton": {"key": ["name", "halts"]}}],
    ids=["pickled", "another key"],
)
def test_joiners_that_cannot_stand_in_line_end_with_the_one_result(stage, journal, start_worker, options):
    """They poll, and do not run when the lock is free."""
    start_worker(APP, concurrency=4, queues=stage.key, conf=ACCEPTS)
    terms = {"retry_delay_max": 0.2, **options.get("singleton", {})}
    options = {**options, "queue": stage.key, "singleton": terms}
    first = stage.held(**options)
    results = [stage.task.apply_async([stage.key], **options) for _ in range(3)]
    for result in results:
        journal.wait_for("conflict", 2, task_id=result.id)
    stage.open()
    for result in [first, *results]:
        assert result.get(timeout=60) == [stage.key, first.id]
    assert stage.starts() == [first.id]


def test_joiner_whose_lock_comes_free_before_it_waits_ends_with_the_holders_result(stage, journal, gates):
    """It has met the holder."""
    first = stage.held()
    second = stage.task.apply_async([stage.key], {"halts": stage.key})
    journal.wait_for("halts", task_id=second.id)
    stage.open()
    assert first.get(timeout=60) == [stage.key, first.id]
    gates(stage.key)
    assert second.get(timeout=60) == [stage.key, first.id]
    assert stage.starts() == [first.id]


@pytest.mark.parametrize(
    ("reason", "error"), [("", ZeroDivisionError), ("gone", LockUnavailable)], ids=["its-own", "for-redis"]
)
def test_holders_error_is_the_joiners_too(stage, reason, error):
    """A failed holder's exception, with its arguments, is raised in every joiner: no trouble of its own."""
    options = {"task": stage.tasks.failing, "singleton": {"on_conflict": "join"}}
    options["kwargs"] = {"reason": reason}
    first = stage.held(**options)
    results = stage.line_up(3, **options)
    stage.open()
    for result in [first, *results]:
        with pytest.raises(error, match=reason or stage.key):
            result.get(timeout=60)
        assert result.state == "FAILURE"
    assert stage.starts() == [first.id]


def test_chain_of_a_joiner_goes_on_with_the_holders_result(stage, journal):
    """What follows a joiner gets the holder's result, once."""
    first = stage.held()
    result = chain(stage.tasks.joined.s(stage.key), stage.tasks.arrival.s("next")).delay()
    journal.wait_for("waiting")
    stage.open()
    assert result.get(timeout=60) == [[stage.key, first.id], "next"]
    assert len(journal.entries(what="arrival")) == 1


def test_chord_of_joiners_has_its_callback(stage, journal):
    """Equal members of a chord are one run, and count as often as they are."""
    members = [stage.tasks.joined.s(stage.key, stage.gate) for _ in range(4)]
    result = chord(members, stage.tasks.arrival.s()).delay()
    journal.wait_for("waiting", count=3)
    journal.wait_for("start")
    stage.open()
    (runner,) = set(stage.starts())
    assert result.get(timeout=60) == [[[stage.key, runner]] * 4]
    assert stage.starts() == [runner]
    assert len(journal.entries(what="arrival")) == 1


def test_joiners_wait_for_the_holders_last_attempt(stage, journal):
    """A holder that retries has no result yet: its joiners end with that of its last attempt."""
    stage.task = stage.tasks.patient
    options = {"singleton": {"on_conflict": "join", "hold_on_retry": False}, "kwargs": {"countdown": 0.3}}
    first = stage.held(**options)
    results = stage.line_up(3, **options)
    stage.open()
    for result in results:  # woken by the end of the first attempt, they find the second, and wait for that
        journal.wait_for("waiting", 2, task_id=result.id)
    stage.open()
    for result in [first, *results]:
        assert result.get(timeout=60) == [first.id, 1]
    assert stage.starts() == [first.id, first.id]


def test_joiners_of_a_killed_holder_have_one_run_among_them(stage, journal):
    """A holder that died has no result: one of its joiners runs in its stead, and all end with its result."""
    first = stage.held()
    results = stage.line_up(8)
    os.kill(stage.holder_pid(), signal.SIGKILL)
    found = [result.get(timeout=60) for result in results]
    own = {first.id, *(result.id for result in results)}
    began, runner, *more = (task_id for task_id in stage.starts() if task_id in own)
    assert (began, more) == (first.id, []), journal.entries()
    assert found == [[stage.key, runner]] * 8
    assert first.id != runner
    fences = [entry["fence"] for entry in journal.entries(what="acquired")]
    assert fences == sorted(fences)


def test_joiner_of_a_holder_that_was_shut_down_cold_runs_itself(stage, single):
    """Celery stores RETRY for what a cold shutdown cancels, and nobody sends it again: the next one runs."""
    first = stage.held(queue=stage.key)
    second = stage.parked(singleton=SOON)
    os.kill(single.process.pid, signal.SIGQUIT)
    assert second.get(timeout=60) == [stage.key, second.id]
    assert stage.starts() == [first.id, second.id]


@pytest.mark.parametrize(
    ("holder", "joiner", "is_revoked"),
    [
        ({"ignore_result": True, "singleton": {"on_conflict": "wait"}}, {"retry_delay_max": 0.1}, False),
        ({}, {}, True),
        ({"singleton": {"scope": "shared", "on_conflict": "wait"}}, {"scope": "shared"}, False),
    ],
    ids=["not-stored", "revoked", "of-another-task"],
)
def test_joiner_of_a_holder_that_leaves_it_no_result_runs_itself(stage, holder, joiner, is_revoked):
    """It is not stored, or was revoked while it ran; one of another task in a shared scope is not its own."""
    first = stage.held(task=stage.tasks.work if "scope" in joiner else stage.tasks.joined, **holder)
    second = stage.parked(singleton=joiner)
    if is_revoked:
        first.revoke(terminate=True, signal="SIGKILL")
    else:
        stage.open()
    assert second.get(timeout=60) == [stage.key, second.id]
    assert stage.starts() == [first.id, second.id]


def test_call_after_the_holders_end_has_a_run_of_its_own(stage):
    """While joiners end with the old result a new call runs, and does not get it."""
    first = stage.held()
    results = stage.line_up(10)
    stage.open()
    assert first.get(timeout=60) == [stage.key, first.id]
    fresh = stage.tasks.joined.delay(stage.key)
    assert fresh.get(timeout=60) == [stage.key, fresh.id]
    assert [result.get(timeout=60) for result in results] == [[stage.key, first.id]] * 10
    assert stage.starts() == [first.id, fresh.id]


def test_joiners_hold_no_pool_slot(stage, single):
    """A worker with one process runs other tasks while five of its calls wait for a result elsewhere."""
    first = stage.held()
    results = stage.line_up(5, queue=stage.key)
    assert stage.tasks.plain.apply_async([7], queue=stage.key).get(timeout=60) == 7
    assert stage.tasks.joined.locked(stage.key).waiting == 5
    stage.open()
    assert [result.get(timeout=60) for result in results] == [[stage.key, first.id]] * 5


def test_join_waits_for_a_lock_server_that_is_full(stage, journal, start_worker):
    """A woken call that the lock server cannot serve asks again, and ends once, with the holder's result."""
    with EmbeddedServer() as locks, redis.Redis(port=locks.port) as client:
        start_worker(APP, queues=stage.key, conf={"setnx_url": locks.url()})
        options = {"queue": stage.key, "singleton": {"lease": 5}}
        first = stage.held(**options)
        second = stage.parked(**options)
        client.config_set("maxmemory", 1)
        stage.open()
        journal.wait_for("released", task_id=first.id)
        journal.wait_for("postrun", 2, task_id=second.id)  # after a lease of asking in place
        client.config_set("maxmemory", 0)
        journal.wait_for("postrun", task_id=second.id, state="SUCCESS")
        states = [entry["state"] for entry in journal.entries(what="postrun", task_id=second.id)]
        assert [state for state in states if state in READY_STATES] == ["SUCCESS"]
        assert second.get(timeout=60) == [stage.key, first.id]
