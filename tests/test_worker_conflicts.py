"""What becomes of a call whose lock another holds: real workers, real messages."""

import time
from typing import Any

import pytest
from celery import signature
from celery.exceptions import TimeoutError

from celery_setnx import AlreadyRunning, LockTimeout, is_skipped, send_task
from celery_setnx.task import lock_for
from tests.harness import Journal, wait_until


def held(tasks: Any, journal: Journal, task: Any, name: str) -> Any:
    """A call of the task whose body has started and waits at its gate."""
    result = task.delay(name)
    journal.wait_for("start", task_id=result.id)
    return result


def test_free_lock_runs_the_body_between_acquired_and_released(tasks, journal):
    """The lifecycle of a call that meets nobody: acquired, body, released, and only then the result."""
    result = tasks.work.delay("a")
    assert result.get(timeout=10) == "a"
    journal.wait_for("postrun", task_id=result.id)
    assert journal.words(result.id) == ["acquired", "start", "end", "released", "postrun"]


def test_release_leaves_a_free_lock_and_a_record_with_a_ttl(tasks, locks):
    """After a run nothing holds the lock, and what is left expires within a minute."""
    tasks.work.delay("a").get(timeout=10)
    (record,) = locks.keys("t:*")
    assert record.endswith(":holder")
    assert 0 < locks.ttl(record) <= 60


def test_auto_skips_a_plain_call(tasks, journal, gates):
    """A call on its own is skipped at once, with a result that names the holder."""
    first = held(tasks, journal, tasks.work, "gated")
    second = tasks.work.delay("gated")
    result = second.get(timeout=10)
    assert is_skipped(result)
    assert result["holder"]["task_id"] == first.id
    assert result["task"] == tasks.work.name
    assert first.id in result["holder"]["description"]
    journal.wait_for("postrun", task_id=second.id)
    assert journal.words(second.id) == ["conflict", "postrun"]
    gates("gated")
    assert first.get(timeout=10) == "gated"


def test_other_keys_run_beside_each_other(tasks, journal, gates):
    """Two keys, two bodies at the same time."""
    results = [held(tasks, journal, tasks.work, name) for name in ("gated-1", "gated-2")]
    for name in ("gated-1", "gated-2"):
        gates(name)
    assert [result.get(timeout=10) for result in results] == ["gated-1", "gated-2"]


def test_skip_result_is_the_users(tasks, journal, gates):
    """A given skip_result is returned as it is, even None."""
    first = held(tasks, journal, tasks.work, "gated")
    options = {"on_conflict": "skip", "skip_result": None}
    assert tasks.work.apply_async(["gated"], singleton=options).get(timeout=10) is None
    gates("gated")
    first.get(timeout=10)


def test_retry_runs_after_the_holder(tasks, journal, gates):
    """With retry the call comes back until the lock is free, and its own retries are untouched."""
    first = held(tasks, journal, tasks.work, "gated")
    second = tasks.work.apply_async(["gated"], singleton={"on_conflict": "retry"})
    journal.wait_for("conflict", count=2, task_id=second.id)
    gates("gated")
    gates("gated")
    assert second.get(timeout=10) == "gated"
    assert first.get(timeout=10) == "gated"
    assert {entry["retries"] for entry in journal.entries(what="retry", task_id=second.id)} == {0}
    starts = journal.entries(what="start", name="gated")
    ends = journal.entries(what="end", name="gated")
    assert ends[0]["at"] <= starts[1]["at"]
    assert starts[0]["fence"] < starts[1]["fence"]


def test_retry_keeps_everything_the_message_had(tasks, journal, gates):
    """Headers, link, priority, expiry, time limits and the call's own options survive lock waits."""
    first = held(tasks, journal, tasks.inspected, "gated")
    follower = tasks.journal_arrival.si("linked")
    second = tasks.inspected.apply_async(
        ["gated"],
        headers={"tenant": "acme"},
        link=follower,
        priority=3,
        expires=60,
        time_limit=50,
        soft_time_limit=40,
        shadow="shadowed",
        singleton={"on_conflict": "retry"},
    )
    journal.wait_for("conflict", count=2, task_id=second.id)
    gates("gated")
    gates("gated")
    seen = second.get(timeout=10)
    assert first.get(timeout=10)["headers"]["tenant"] is None
    assert seen["headers"] == {"tenant": "acme", "options": {"on_conflict": "retry"}}
    assert seen["priority"] == 3
    assert seen["expires"] is not None
    assert seen["timelimit"] == [50, 40]
    assert seen["shadow"] == "shadowed"
    assert seen["retries"] == 0
    assert len(journal.wait_for("arrival", name="linked")) == 1


def test_raise_fails_the_task_with_the_holder(tasks, journal, gates, worker):
    """AlreadyRunning names task, key, holder and remaining seconds, also through the result backend."""
    first = held(tasks, journal, tasks.work, "gated")
    second = tasks.work.apply_async(["gated"], singleton={"on_conflict": "raise"})
    with pytest.raises(AlreadyRunning) as caught:
        second.get(timeout=10)
    assert caught.value.task == tasks.work.name
    assert caught.value.holder["task_id"] == first.id
    assert 0 < caught.value.remaining_s <= 2
    assert second.state == "FAILURE"
    gates("gated")
    first.get(timeout=10)
    log = worker.wait_for_log(f"[{second.id}] raised expected: AlreadyRunning")
    assert "Traceback" not in log.partition(f"[{second.id}] raised expected")[2].partition("\n[")[0]


def test_callable_returns_the_result(tasks, journal, gates):
    """What an on_conflict callable returns is the task's result."""
    first = held(tasks, journal, tasks.own_policy, "gated")
    (entry,) = journal.entries(what="start")
    assert tasks.own_policy.delay("gated").get(timeout=10) == {"busy": entry["key"]}
    gates("gated")
    first.get(timeout=10)


def test_callable_may_retry_and_fail(tasks, journal, gates):
    """A callable can use the built-in policies, and sees how often the call has waited."""
    first = held(tasks, journal, tasks.stubborn, "gated")
    second = tasks.stubborn.delay("gated")
    with pytest.raises(AlreadyRunning):
        second.get(timeout=10)
    journal.wait_for("postrun", count=2, task_id=second.id)
    assert journal.words(second.id) == ["conflict", "retry", "postrun", "conflict", "postrun"]
    gates("gated")
    first.get(timeout=10)


def test_max_wait_ends_in_lock_timeout(tasks, journal, gates):
    """A call that has waited for max_wait fails, and says for how long it waited."""
    first = held(tasks, journal, tasks.work, "gated")
    options = {"on_conflict": "retry", "max_wait": 0.5}
    with pytest.raises(LockTimeout) as caught:
        tasks.work.apply_async(["gated"], singleton=options).get(timeout=10)
    assert 0.5 <= caught.value.waited_s < 5
    gates("gated")
    first.get(timeout=10)


def test_whole_task_lock_is_one_for_all_arguments(tasks, journal, gates, locks):
    """`key=()`: one lock, under a name that an operator can type."""
    first = held(tasks, journal, tasks.whole, "gated")
    assert is_skipped(tasks.whole.delay("other").get(timeout=10))
    assert locks.exists("t:{tests.workerapp.whole}")
    gates("gated")
    first.get(timeout=10)


def test_operators_lock_blocks_the_task_until_its_second(tasks, locks, foreign_keys):
    """A lock set by hand is reported as a foreign holder, and left alone."""
    name = "t:{tests.workerapp.whole}"
    foreign_keys.add(name)
    until = int(time.time()) + 600
    assert locks.setnx(name, until)
    result = tasks.whole.delay("x").get(timeout=10)
    assert is_skipped(result)
    assert result["holder"]["state"] == "foreign"
    assert result["holder"]["deadline"] == until + 1
    assert locks.get(name) == str(until)


def test_lock_value_that_is_no_time_is_held_and_reported(tasks, locks, foreign_keys, worker):
    """A foreign text under the lock's name is held for good, never overwritten, and logged as an error."""
    name = "t:{tests.workerapp.whole}"
    foreign_keys.add(name)
    locks.set(name, "maintenance")
    assert is_skipped(tasks.whole.delay("x").get(timeout=10))
    assert locks.get(name) == "maintenance"
    worker.wait_for_log("is locked by a value that is not a time: 'maintenance'")


@pytest.mark.parametrize("name", ["shared", "decorated", "classy"])
def test_every_kind_of_task_is_guarded(tasks, journal, gates, name):
    """Shared, decorated and class-based tasks hold a lock while they run."""
    task = getattr(tasks, name)
    first = held(tasks, journal, task, "gated")
    assert is_skipped(task.delay("gated").get(timeout=10))
    gates("gated")
    assert first.get(timeout=10) == "gated"
    journal.wait_for("postrun", task_id=first.id)
    assert journal.words(first.id) == ["acquired", "start", "end", "released", "postrun"]


@pytest.mark.parametrize("name", ["decorated_bound", "decorated_singleton"])
def test_decorated_task_raises(tasks, journal, gates, name):
    """The decorator's options rule, under Celery's base class (bound) and under ours."""
    task = getattr(tasks, name)
    first = held(tasks, journal, task, "gated")
    with pytest.raises(AlreadyRunning):
        task.delay("gated").get(timeout=10)
    gates("gated")
    assert first.get(timeout=10) == "gated"


def test_decorated_task_comes_back_past_its_base_class(tasks, journal, gates):
    """A call that waits for its lock was published before: what its base class refuses is not asked again."""
    first = held(tasks, journal, tasks.choosy, "gated")
    second = tasks.choosy.delay("gated")
    journal.wait_for("postrun", task_id=second.id, state="RETRY")
    gates("gated")
    gates("gated")
    assert [result.get(timeout=10) for result in (first, second)] == ["gated", "gated"]


def test_decorated_task_that_retries_by_another_key_holds_that(tasks, journal, gates):
    """Celery hands a retry the headers of the attempt before; the key in them is the old one."""
    call = {"name": "a", "then": "gated-b"}
    options = {"key": "name", "dedupe": "until_done"}
    result = send_task(tasks.app, tasks.moving.name, kwargs=call, singleton=options)
    (start,) = journal.wait_for("start", task_id=result.id)
    assert start["key"] == lock_for(tasks.moving, ("gated-b", "gated-b"), {}).name
    gates("gated-b")
    assert result.get(timeout=10) == "gated-b"


def test_decorated_task_retries(tasks, journal, gates):
    """A decorated function in a chain waits for its lock like any other step."""
    first = held(tasks, journal, tasks.decorated, "gated")
    second = (tasks.decorated.si("gated") | tasks.plain.s()).delay()
    journal.wait_for("retry")
    gates("gated")
    gates("gated")
    assert second.get(timeout=10) == "gated"
    first.get(timeout=10)


def test_send_task_by_name_is_guarded(tasks, journal, gates):
    """A producer that does not know the task's class sends no key; the worker computes the same one."""
    first = held(tasks, journal, tasks.work, "gated")
    second = tasks.app.send_task("tests.workerapp.work", kwargs={"name": "gated"})
    assert is_skipped(second.get(timeout=10))
    gates("gated")
    first.get(timeout=10)


def test_send_task_with_arguments_that_do_not_fit_fails_loudly(tasks, journal):
    """A call whose key cannot be computed is a failure, never an unlocked run."""
    result = tasks.app.send_task("tests.workerapp.work", kwargs={"wrong": 1})
    with pytest.raises(Exception, match="Cannot compute the lock key of a call of"):
        result.get(timeout=10)
    assert journal.entries(what="start") == []


def test_own_retry_keeps_its_own_count(tasks, journal):
    """self.retry() runs under the lock again each time, and max_retries counts only the task's own."""
    result = tasks.flaky.delay("a", 2)
    assert result.get(timeout=15) == 2
    journal.wait_for("postrun", count=3, task_id=result.id)
    acquired = journal.entries(what="acquired", task_id=result.id)
    assert len(acquired) == 3
    assert len({entry["key"] for entry in acquired}) == 1
    assert [entry["fence"] for entry in acquired] == sorted(entry["fence"] for entry in acquired)


def test_autoretry_runs_under_the_lock(tasks, journal):
    """autoretry_for retries the body's own error, under the lock again."""
    result = tasks.autoretried.delay("a")
    with pytest.raises(ZeroDivisionError):
        result.get(timeout=10)
    assert len(journal.wait_for("released", count=2, task_id=result.id)) == 2


def test_autoretry_leaves_our_errors_alone(tasks, journal, gates):
    """Under autoretry_for=(Exception,) a conflict still fails at once."""
    first = held(tasks, journal, tasks.autoretried, "gated")
    second = tasks.autoretried.delay("gated")
    with pytest.raises(AlreadyRunning):
        second.get(timeout=10)
    assert journal.entries(what="retry", task_id=second.id) == []
    gates("gated")
    gates("gated")
    with pytest.raises(ZeroDivisionError):
        first.get(timeout=10)


def test_soft_time_limit_releases(tasks, journal, locks):
    """A body that is ended by its soft time limit gives the lock back."""
    result = tasks.limited.delay("gated")
    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        result.get(timeout=15)
    journal.wait_for("postrun", task_id=result.id)
    assert journal.words(result.id) == ["acquired", "start", "released", "postrun"]


def test_lease_is_renewed_while_the_body_runs(tasks, journal, gates):
    """A body may take longer than its lease: nobody else gets the lock meanwhile."""
    first = held(tasks, journal, tasks.work, "gated")
    (start,) = journal.entries(what="start")
    # Three leases of 2 s: without renewal another would be let in.
    while time.monotonic() < start["at"] + 6:
        assert is_skipped(tasks.work.delay("gated").get(timeout=10))
    gates("gated")
    first.get(timeout=10)
    journal.wait_for("postrun", task_id=first.id)
    assert journal.words(first.id) == ["acquired", "start", "end", "released", "postrun"]


def test_at_most_for_ends_renewal(tasks, journal, gates):
    """After at_most_for the lease runs out: the loss is signalled, and ensure() tells the body."""
    first = held(tasks, journal, tasks.overlong, "gated")
    journal.wait_for("lost", task_id=first.id)
    gates("gated")
    with pytest.raises(Exception, match="at_most_for is over"):
        first.get(timeout=10)


def test_at_least_for_rests_after_the_body(tasks, journal):
    """A lock with at_least_for stays closed after a short body, then opens by itself."""
    first = tasks.resting.delay("a")
    first.get(timeout=10)
    skipped = tasks.resting.delay("a").get(timeout=10)
    assert is_skipped(skipped)
    assert skipped["holder"]["state"] == "resting"
    wait_until(lambda: tasks.resting.delay("a").get(timeout=10) == "a", "the rest is over")
    assert journal.wait_for("released", task_id=first.id)[0]["outcome"] == "resting"
    assert journal.entries(what="taken_over") == []


def test_unknown_option_of_a_call_is_refused_at_the_call(tasks):
    """A misspelt option never reaches the broker."""
    with pytest.raises(ValueError, match="did you mean 'on_conflict'"):
        tasks.work.apply_async(["a"], singleton={"on_conflct": "skip"})


def test_key_of_one_call_survives_its_retry(tasks, journal):
    """A call with a scope of its own comes back under the same lock."""
    result = tasks.flaky.apply_async(["a", 1], singleton={"scope": "elsewhere", "key": ()})
    result.get(timeout=10)
    keys = {entry["key"] for entry in journal.wait_for("acquired", count=2, task_id=result.id)}
    assert keys == {"t:{elsewhere}"}


def test_direct_call_inside_a_body_is_not_guarded(tasks, journal):
    """A task may call itself as a function: no lock, no deadlock, and its own lock stays."""
    result = tasks.recursive.delay(2)
    assert result.get(timeout=10) == [2, [1, [0, None]]]
    journal.wait_for("postrun", task_id=result.id)
    assert journal.words(result.id) == ["acquired", "released", "postrun"]


def test_signature_dict_carries_options(tasks, journal, gates):
    """Options set on a signature survive its serialization."""
    first = held(tasks, journal, tasks.work, "gated")
    frozen = dict(tasks.work.s("gated").set(singleton={"skip_result": "busy"}))
    assert signature(frozen, app=tasks.app).delay().get(timeout=10) == "busy"
    gates("gated")
    first.get(timeout=10)


def test_slow_end_of_a_retrying_body_makes_its_own_retry_wait(tasks, journal, gates):
    """The next attempt meets the lock of the one before it: it waits, whatever on_conflict says."""
    result = tasks.lingering.apply_async(["gated"], singleton={"on_conflict": "raise", "max_wait": 0})
    conflicts = journal.wait_for("conflict", count=2, task_id=result.id)
    assert {entry["policy"] for entry in conflicts} == {"wait"}
    gates("gated")
    assert result.get(timeout=10) == 1
    with pytest.raises(TimeoutError):
        tasks.app.AsyncResult("never-sent").get(timeout=0.01)
