"""What becomes of a call whose lock another holds: real workers, real messages."""

import time
from typing import Any

import pytest
from celery import chord, signature

from celery_setnx import AlreadyRunning, LockTimeout, is_skipped, send_task
from celery_setnx.task import lock_for
from tests.stage import assert_one_at_a_time

WHOLE = "t:{tests.workerapp.whole}"
RUN = ["acquired", "start", "end", "released", "postrun"]


def again(gates: Any, result: Any) -> None:
    """The call that came back for its lock has it, and ends at its gate as the first did."""
    gates("gated")
    assert result.get(timeout=60) == "gated"


def test_auto_skips_a_plain_call(tasks, worker, journal, holding):
    """A call on its own is skipped at once, with a result that names the holder.

    A producer that does not know the task's class sends no key; the worker computes the same one.
    """
    with holding(tasks.work) as first:
        second = tasks.work.delay("gated")
        result = second.get(timeout=60)
        assert is_skipped(result)
        assert result["holder"]["task_id"] == first.id
        assert result["task"] == tasks.work.name
        assert result["holder"]["worker"] == f"{worker.name}@test"
        journal.wait_for("postrun", task_id=second.id)
        assert journal.words(second.id) == ["conflict", "postrun"]
        by_name = tasks.app.send_task(tasks.work.name, kwargs={"name": "gated"})
        assert is_skipped(by_name.get(timeout=60))
        with holding(tasks.work, "gated-other"):  # another key is nobody's business
            pass


def test_skip_result_is_the_users(tasks, holding):
    """It is returned as it is, even None; options that are set on a signature survive its serialization."""
    options = {"on_conflict": "skip", "skip_result": None}
    frozen = dict(tasks.work.s("gated").set(singleton={"skip_result": "busy"}))
    with holding(tasks.work):
        assert tasks.work.apply_async(["gated"], singleton=options).get(timeout=60) is None
        assert signature(frozen, app=tasks.app).delay().get(timeout=60) == "busy"


def test_retry_runs_after_the_holder(tasks, journal, gates, holding):
    """With retry the call comes back until the lock is free, and its own retries are untouched."""
    with holding(tasks.work):
        second = tasks.work.apply_async(["gated"], singleton={"on_conflict": "retry"})
        journal.wait_for("conflict", count=2, task_id=second.id)
    again(gates, second)
    assert {entry["retries"] for entry in journal.entries(what="retry", task_id=second.id)} == {0}
    assert_one_at_a_time(journal)
    starts = journal.entries(what="start", name="gated")
    assert starts[0]["fence"] < starts[1]["fence"]


@pytest.mark.parametrize("on_conflict", ["retry", "wait"])
def test_waiting_keeps_everything_the_message_had(tasks, journal, gates, on_conflict):
    """Headers, link, priority, expiry, time limits, shadow and the call's own options come back with it."""
    first = journal.reached("start", tasks.inspected.delay("gated"))
    singleton = {"on_conflict": on_conflict}
    options = {"headers": {"tenant": "acme"}, "link": tasks.arrival.si("linked"), "singleton": singleton}
    options |= {"priority": 3, "expires": 60, "time_limit": 50, "soft_time_limit": 40, "shadow": "shadowed"}
    second = tasks.inspected.apply_async(["gated"], **options)
    journal.wait_for("postrun", count=2 if on_conflict == "retry" else 1, task_id=second.id)
    gates("gated", 2)
    assert first.get(timeout=60)["headers"]["tenant"] is None
    came = {"priority": 3, "expires": True, "timelimit": [50, 40], "shadow": "shadowed", "retries": 0}
    assert second.get(timeout=60) == {"headers": {"tenant": "acme", "options": singleton}, **came}
    assert len(journal.wait_for("arrival", values=["linked"])) == 1


def test_raise_fails_the_task_with_the_holder(tasks, holding, worker):
    """AlreadyRunning names task, key, holder and remaining seconds, also through the result backend."""
    with holding(tasks.work, singleton={"lease": 600}) as first:
        second = tasks.work.apply_async(["gated"], singleton={"on_conflict": "raise"})
        with pytest.raises(AlreadyRunning) as caught:
            second.get(timeout=60)
    assert caught.value.task == tasks.work.name
    assert caught.value.holder["task_id"] == first.id
    assert 0 < caught.value.remaining_s <= 600
    assert second.state == "FAILURE"
    log = worker.wait_for_log(f"[{second.id}] raised expected: AlreadyRunning")
    assert "Traceback" not in log.partition(f"[{second.id}] raised expected")[2].partition("\n[")[0]


def test_callable_returns_the_result(tasks, journal, holding):
    """What an on_conflict callable returns is the task's result."""
    with holding(tasks.own_policy):
        (entry,) = journal.entries(what="start")
        busy = {"busy": entry["key"], "holder": entry["task_id"]}
        assert tasks.own_policy.delay("gated").get(timeout=60) == busy


def test_callable_may_retry_and_fail(tasks, journal, holding):
    """A callable can use the built-in policies, and sees how often the call has waited."""
    with holding(tasks.stubborn):
        second = tasks.stubborn.delay("gated")
        with pytest.raises(AlreadyRunning):
            second.get(timeout=60)
        journal.wait_for("postrun", count=2, task_id=second.id)
    assert journal.words(second.id) == ["conflict", "retry", "postrun", "conflict", "postrun"]


def test_max_wait_ends_in_lock_timeout(tasks, holding):
    """A call that has waited for max_wait fails, and says for how long it waited."""
    options = {"on_conflict": "retry", "max_wait": 0.5}
    began = time.monotonic()
    with holding(tasks.work), pytest.raises(LockTimeout) as caught:
        tasks.work.apply_async(["gated"], singleton=options).get(timeout=60)
    assert 0.5 <= caught.value.waited_s <= time.monotonic() - began + 0.1


def test_whole_task_lock_is_one_for_all_arguments(tasks, holding, locks):
    """`key=()`: one lock, under a name that an operator can type."""
    with holding(tasks.whole) as first:
        assert is_skipped(tasks.whole.delay("other").get(timeout=60))
        assert locks.exists(WHOLE)
        assert tasks.whole.lock_key("whatever") == WHOLE
        assert tasks.whole.locked("whatever").task_id == first.id


@pytest.mark.parametrize("word", [None, "maintenance"], ids=["until-a-second", "for-good"])
def test_operators_lock_blocks_the_task(tasks, locks, foreign_keys, worker, word):
    """It is reported as a foreign holder, and left alone; if its value is no time that is logged, too."""
    foreign_keys.add(WHOLE)
    until = int(time.time()) + 600
    value = word or str(until)
    assert locks.setnx(WHOLE, value)
    result = tasks.whole.delay("x").get(timeout=60)
    assert is_skipped(result)
    assert result["holder"]["state"] == "foreign"
    assert locks.get(WHOLE) == value
    if word:
        worker.wait_for_log(f"is locked by '{word}', which is not a time")
    else:
        assert result["holder"]["deadline"] == until + 1


@pytest.mark.parametrize("name", ["work", "shared", "decorated", "classy"])
def test_every_kind_of_task_is_guarded(tasks, journal, holding, locks, name):
    """Plain, shared, decorated and class-based: acquired, body, released, and only then the result.

    Nothing holds the lock then, and what is left of it expires within a minute.
    """
    task = getattr(tasks, name)
    with holding(task) as first:
        assert is_skipped(task.delay("gated").get(timeout=60))
    journal.wait_for("postrun", task_id=first.id)
    assert journal.words(first.id) == RUN
    (record,) = locks.keys("t:{*")
    assert record.endswith(":holder")
    assert 0 < locks.ttl(record) <= 60


@pytest.mark.parametrize("name", ["decorated_bound", "decorated_singleton"])
def test_decorated_task_raises(tasks, holding, name):
    """The decorator's options rule, under Celery's base class (bound) and under ours."""
    task = getattr(tasks, name)
    with holding(task), pytest.raises(AlreadyRunning):
        task.delay("gated").get(timeout=60)


def test_decorated_task_is_started_when_its_body_begins(tasks, holding):
    """task_track_started, under Celery's base class."""
    with holding(tasks.decorated) as first:
        assert first.state == "STARTED"


def test_decorated_task_comes_back_past_its_base_class(tasks, journal, gates, holding):
    """A call that waits for its lock was published before: what its base class refuses is not asked again."""
    with holding(tasks.choosy):
        second = tasks.choosy.delay("gated")
        journal.wait_for("postrun", task_id=second.id, state="RETRY")
    again(gates, second)


def test_decorated_task_that_retries_by_another_key_holds_that(tasks, journal, gates):
    """Celery hands a retry the headers of the attempt before; the key in them is the old one."""
    call = {"name": "a", "then": "gated-b"}
    options = {"key": "name", "dedupe": "until_done"}
    result = send_task(tasks.app, tasks.moving.name, kwargs=call, singleton=options)
    (start,) = journal.wait_for("start", task_id=result.id)
    assert start["key"] == lock_for(tasks.moving, ("gated-b", "gated-b"), {}).name
    gates("gated-b")
    assert result.get(timeout=60) == "gated-b"


def test_send_task_with_arguments_that_do_not_fit_fails_loudly(tasks, journal):
    """A call whose key cannot be computed is a failure, never an unlocked run."""
    result = tasks.app.send_task(tasks.work.name, kwargs={"wrong": 1})
    with pytest.raises(Exception, match="Cannot compute the lock key of a call of"):
        result.get(timeout=60)
    assert journal.entries(what="start") == []


# Its own retries, its end


@pytest.mark.parametrize("options", [{}, {"scope": "elsewhere", "key": ()}], ids=["task", "call"])
def test_own_retry_keeps_its_own_count_and_its_key(tasks, journal, options):
    """self.retry() runs under the same lock again each time, and max_retries counts only the task's own."""
    result = tasks.flaky.apply_async(["a", 2], singleton=options)
    assert result.get(timeout=60) == 2
    journal.wait_for("postrun", count=3, task_id=result.id)
    acquired = journal.entries(what="acquired", task_id=result.id)
    key = "t:{elsewhere}" if options else tasks.flaky.lock_key("a", 2)
    assert [entry["key"] for entry in acquired] == [key] * 3
    assert [entry["fence"] for entry in acquired] == sorted(entry["fence"] for entry in acquired)


def test_autoretry_runs_under_the_lock_and_leaves_our_errors_alone(tasks, journal, gates, holding, parked):
    """autoretry_for=(Exception,) retries the body's own error, locked again; a conflict fails at once."""
    with holding(tasks.autoretried) as first:
        second = tasks.autoretried.delay("gated")
        with pytest.raises(AlreadyRunning):
            second.get(timeout=60)
        gates("gated")
        parked.move()
    assert len(journal.wait_for("released", count=2, task_id=first.id)) == 2
    assert journal.entries(what="retry", task_id=second.id) == []


def test_direct_call_inside_a_body_is_not_guarded(tasks, journal):
    """A task may call itself as a function: no lock, no deadlock, and its own lock stays."""
    result = tasks.recursive.delay(2)
    assert result.get(timeout=60) == [2, [1, [0, None]]]
    journal.wait_for("postrun", task_id=result.id)
    assert journal.words(result.id) == ["acquired", "released", "postrun"]


# What is linked, and a decorated task


def test_chain_step_of_a_decorated_task_waits_for_its_lock(tasks, journal, gates, holding):
    """A step whose key is held retries, and the steps after it still run."""
    with holding(tasks.decorated):
        result = (tasks.decorated.si("gated") | tasks.plain.s()).delay()
        journal.wait_for("retry")
    again(gates, result)
    assert_one_at_a_time(journal)


def test_chord_member_that_raises_fails_the_chord(tasks, holding):
    """With raise a conflict is a real failure, so the chord's body fails instead of hanging."""
    header = [tasks.work.si("gated").set(singleton={"on_conflict": "raise"}), tasks.plain.si(1)]
    with holding(tasks.work), pytest.raises(Exception, match="is already running"):
        chord(header, tasks.plain.s()).delay().get(timeout=60)


@pytest.mark.parametrize(
    ("link", "options", "state"),
    [("link", {}, "SUCCESS"), ("link_error", {"on_conflict": "raise"}, "FAILURE")],
    ids=["skipped", "raising"],
)
def test_immutable_link_of_a_call_that_does_not_run_happens(tasks, journal, holding, link, options, state):
    """A skipped call succeeds, so what was linked to it happens; one that raises calls its errback."""
    linked = {link: tasks.arrival.si(link)}
    with holding(tasks.work):
        second = tasks.work.apply_async(["gated"], singleton=options, **linked)
        result = second.get(timeout=30, propagate=False)
        journal.wait_for("arrival", values=[link])
    assert second.state == state
    assert is_skipped(result) or isinstance(result, AlreadyRunning)
