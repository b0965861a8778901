"""What becomes of a call whose lock another holds: real workers, real messages."""

import time
from typing import Any

import pytest
from celery import chain, chord, group, signature

from celery_setnx import AlreadyRunning, LockTimeout, is_skipped, send_task
from celery_setnx.task import lock_for
from celery_setnx.testing import pass_time
from tests.harness import Journal

WHOLE = "t:{tests.workerapp.whole}"
RUN = ["acquired", "start", "end", "released", "postrun"]


def again(gates: Any, result: Any) -> None:
    """The call that came back for its lock has it, and ends at its gate as the first did."""
    gates("gated")
    assert result.get(timeout=30) == "gated"


def assert_one_at_a_time(journal: Journal, name: str) -> None:
    """No two bodies of this name ran at the same time."""
    words = [e["what"] for e in journal.entries(name=name) if e["what"] in ("start", "end")]
    assert words == ["start", "end"] * (len(words) // 2)


def test_free_lock_runs_the_body_between_acquired_and_released(tasks, journal):
    """The lifecycle of a call that meets nobody: acquired, body, released, and only then the result."""
    result = tasks.work.delay("a")
    assert result.get(timeout=30) == "a"
    journal.wait_for("postrun", task_id=result.id)
    assert journal.words(result.id) == RUN


def test_release_leaves_a_free_lock_and_a_record_with_a_ttl(tasks, locks):
    """After a run nothing holds the lock, and what is left expires within a minute."""
    tasks.work.delay("a").get(timeout=30)
    (record,) = locks.keys("t:*")
    assert record.endswith(":holder")
    assert 0 < locks.ttl(record) <= 60


def test_auto_skips_a_plain_call(tasks, journal, holding):
    """A call on its own is skipped at once, with a result that names the holder."""
    with holding(tasks.work) as first:
        second = tasks.work.delay("gated")
        result = second.get(timeout=30)
        assert is_skipped(result)
        assert result["holder"]["task_id"] == first.id
        assert result["task"] == tasks.work.name
        assert first.id in result["holder"]["description"]
        journal.wait_for("postrun", task_id=second.id)
        assert journal.words(second.id) == ["conflict", "postrun"]


def test_other_keys_run_beside_each_other(tasks, holding):
    """Two keys, two bodies at the same time."""
    with holding(tasks.work, "gated-1"), holding(tasks.work, "gated-2"):
        pass


def test_skip_result_is_the_users(tasks, holding):
    """A given skip_result is returned as it is, even None."""
    options = {"on_conflict": "skip", "skip_result": None}
    with holding(tasks.work):
        assert tasks.work.apply_async(["gated"], singleton=options).get(timeout=30) is None


def test_signature_dict_carries_options(tasks, holding):
    """Options set on a signature survive its serialization."""
    frozen = dict(tasks.work.s("gated").set(singleton={"skip_result": "busy"}))
    with holding(tasks.work):
        assert signature(frozen, app=tasks.app).delay().get(timeout=30) == "busy"


def test_retry_runs_after_the_holder(tasks, journal, gates, holding):
    """With retry the call comes back until the lock is free, and its own retries are untouched."""
    with holding(tasks.work):
        second = tasks.work.apply_async(["gated"], singleton={"on_conflict": "retry"})
        journal.wait_for("conflict", count=2, task_id=second.id)
    again(gates, second)
    assert {entry["retries"] for entry in journal.entries(what="retry", task_id=second.id)} == {0}
    assert_one_at_a_time(journal, "gated")
    starts = journal.entries(what="start", name="gated")
    assert starts[0]["fence"] < starts[1]["fence"]


@pytest.mark.parametrize("on_conflict", ["retry", "wait"])
def test_waiting_keeps_everything_the_message_had(tasks, journal, gates, on_conflict):
    """Headers, link, priority, expiry, time limits, shadow and the call's own options come back with it."""
    first = tasks.inspected.delay("gated")
    journal.wait_for("start", task_id=first.id)
    second = tasks.inspected.apply_async(
        ["gated"],
        headers={"tenant": "acme"},
        link=tasks.arrival.si("linked"),
        priority=3,
        expires=60,
        time_limit=50,
        soft_time_limit=40,
        shadow="shadowed",
        singleton={"on_conflict": on_conflict},
    )
    journal.wait_for("postrun", count=2 if on_conflict == "retry" else 1, task_id=second.id)
    gates("gated", 2)
    assert first.get(timeout=30)["headers"]["tenant"] is None
    assert second.get(timeout=30) == {
        "headers": {"tenant": "acme", "options": {"on_conflict": on_conflict}},
        "priority": 3,
        "expires": True,
        "timelimit": [50, 40],
        "shadow": "shadowed",
        "retries": 0,
    }
    assert len(journal.wait_for("arrival", values=["linked"])) == 1


def test_raise_fails_the_task_with_the_holder(tasks, holding, worker):
    """AlreadyRunning names task, key, holder and remaining seconds, also through the result backend."""
    with holding(tasks.work, singleton={"lease": 600}) as first:
        second = tasks.work.apply_async(["gated"], singleton={"on_conflict": "raise"})
        with pytest.raises(AlreadyRunning) as caught:
            second.get(timeout=30)
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
        assert tasks.own_policy.delay("gated").get(timeout=30) == {"busy": entry["key"]}


def test_callable_may_retry_and_fail(tasks, journal, holding):
    """A callable can use the built-in policies, and sees how often the call has waited."""
    with holding(tasks.stubborn):
        second = tasks.stubborn.delay("gated")
        with pytest.raises(AlreadyRunning):
            second.get(timeout=30)
        journal.wait_for("postrun", count=2, task_id=second.id)
    assert journal.words(second.id) == ["conflict", "retry", "postrun", "conflict", "postrun"]


def test_max_wait_ends_in_lock_timeout(tasks, holding):
    """A call that has waited for max_wait fails, and says for how long it waited."""
    options = {"on_conflict": "retry", "max_wait": 0.5}
    began = time.monotonic()
    with holding(tasks.work), pytest.raises(LockTimeout) as caught:
        tasks.work.apply_async(["gated"], singleton=options).get(timeout=30)
    assert 0.5 <= caught.value.waited_s <= time.monotonic() - began + 0.1


def test_whole_task_lock_is_one_for_all_arguments(tasks, holding, locks):
    """`key=()`: one lock, under a name that an operator can type."""
    with holding(tasks.whole):
        assert is_skipped(tasks.whole.delay("other").get(timeout=30))
        assert locks.exists(WHOLE)


def test_operators_lock_blocks_the_task_until_its_second(tasks, locks, foreign_keys):
    """A lock set by hand is reported as a foreign holder, and left alone."""
    foreign_keys.add(WHOLE)
    until = int(time.time()) + 600
    assert locks.setnx(WHOLE, until)
    result = tasks.whole.delay("x").get(timeout=30)
    assert is_skipped(result)
    assert result["holder"]["state"] == "foreign"
    assert result["holder"]["deadline"] == until + 1
    assert locks.get(WHOLE) == str(until)


def test_lock_value_that_is_no_time_is_held_and_reported(tasks, locks, foreign_keys, worker):
    """A foreign text under the lock's name is held for good, never overwritten, and logged as an error."""
    foreign_keys.add(WHOLE)
    locks.set(WHOLE, "maintenance")
    assert is_skipped(tasks.whole.delay("x").get(timeout=30))
    assert locks.get(WHOLE) == "maintenance"
    worker.wait_for_log("is locked by a value that is not a time: 'maintenance'")


@pytest.mark.parametrize("name", ["shared", "decorated", "classy"])
def test_every_kind_of_task_is_guarded(tasks, journal, holding, name):
    """Shared, decorated and class-based tasks hold a lock while they run."""
    task = getattr(tasks, name)
    with holding(task) as first:
        assert is_skipped(task.delay("gated").get(timeout=30))
    journal.wait_for("postrun", task_id=first.id)
    assert journal.words(first.id) == RUN


@pytest.mark.parametrize("name", ["decorated_bound", "decorated_singleton"])
def test_decorated_task_raises(tasks, holding, name):
    """The decorator's options rule, under Celery's base class (bound) and under ours."""
    task = getattr(tasks, name)
    with holding(task), pytest.raises(AlreadyRunning):
        task.delay("gated").get(timeout=30)


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
    assert result.get(timeout=30) == "gated-b"


def test_send_task_by_name_is_guarded(tasks, holding):
    """A producer that does not know the task's class sends no key; the worker computes the same one."""
    with holding(tasks.work):
        second = tasks.app.send_task(tasks.work.name, kwargs={"name": "gated"})
        assert is_skipped(second.get(timeout=30))


def test_send_task_with_arguments_that_do_not_fit_fails_loudly(tasks, journal):
    """A call whose key cannot be computed is a failure, never an unlocked run."""
    result = tasks.app.send_task(tasks.work.name, kwargs={"wrong": 1})
    with pytest.raises(Exception, match="Cannot compute the lock key of a call of"):
        result.get(timeout=30)
    assert journal.entries(what="start") == []


def test_unknown_option_of_a_call_is_refused_at_the_call(tasks):
    """A misspelt option never reaches the broker."""
    with pytest.raises(ValueError, match="did you mean 'on_conflict'"):
        tasks.work.apply_async(["a"], singleton={"on_conflct": "skip"})


# Its own retries, its end


def test_own_retry_keeps_its_own_count(tasks, journal):
    """self.retry() runs under the lock again each time, and max_retries counts only the task's own."""
    result = tasks.flaky.delay("a", 2)
    assert result.get(timeout=30) == 2
    journal.wait_for("postrun", count=3, task_id=result.id)
    acquired = journal.entries(what="acquired", task_id=result.id)
    assert len(acquired) == 3
    assert len({entry["key"] for entry in acquired}) == 1
    assert [entry["fence"] for entry in acquired] == sorted(entry["fence"] for entry in acquired)


def test_key_of_one_call_survives_its_retry(tasks, journal):
    """A call with a scope of its own comes back under the same lock."""
    result = tasks.flaky.apply_async(["a", 1], singleton={"scope": "elsewhere", "key": ()})
    result.get(timeout=30)
    keys = {entry["key"] for entry in journal.wait_for("acquired", count=2, task_id=result.id)}
    assert keys == {"t:{elsewhere}"}


def test_autoretry_runs_under_the_lock_and_leaves_our_errors_alone(tasks, journal, gates):
    """autoretry_for=(Exception,) retries the body's own error, locked again; a conflict fails at once."""
    first = tasks.autoretried.delay("gated")
    journal.wait_for("start", task_id=first.id)
    second = tasks.autoretried.delay("gated")
    with pytest.raises(AlreadyRunning):
        second.get(timeout=30)
    gates("gated", 2)
    with pytest.raises(ZeroDivisionError):
        first.get(timeout=30)
    assert len(journal.wait_for("released", count=2, task_id=first.id)) == 2
    assert journal.entries(what="retry", task_id=second.id) == []


def test_slow_end_of_a_retrying_body_makes_its_own_retry_wait(tasks, journal, gates):
    """The next attempt meets the lock of the one before it: it waits, whatever on_conflict says."""
    result = tasks.lingering.apply_async(["gated"], singleton={"on_conflict": "raise", "max_wait": 0})
    conflicts = journal.wait_for("conflict", count=2, task_id=result.id)
    assert {entry["policy"] for entry in conflicts} == {"wait"}
    gates("gated")
    assert result.get(timeout=30) == 1


@pytest.mark.clock
def test_soft_time_limit_releases(tasks, journal):
    """A body that is ended by its soft time limit, of a second, gives the lock back."""
    result = tasks.limited.delay("gated")
    with pytest.raises(Exception, match="SoftTimeLimitExceeded"):
        result.get(timeout=30)
    journal.wait_for("postrun", task_id=result.id)
    assert journal.words(result.id) == ["acquired", "start", "released", "postrun"]


@pytest.mark.clock
def test_lease_is_renewed_while_the_body_runs(tasks, journal, holding):
    """A body may take longer than its lease: nobody else gets the lock meanwhile. Three real leases pass."""
    with holding(tasks.work, singleton={"lease": 1.5}) as first:
        began = time.monotonic()
        while time.monotonic() < began + 4.5:
            assert is_skipped(tasks.work.delay("gated").get(timeout=30))
    journal.wait_for("postrun", task_id=first.id)
    assert journal.words(first.id) == RUN


def test_at_most_for_ends_renewal(tasks, journal, gates):
    """After at_most_for the lease runs out: the loss is signalled, and ensure() tells the body."""
    first = tasks.overlong.delay("gated")
    journal.wait_for("lost", task_id=first.id)
    gates("gated")
    with pytest.raises(Exception, match="at_most_for is over"):
        first.get(timeout=30)


def test_at_least_for_rests_after_the_body(tasks, journal):
    """A lock with at_least_for stays closed after a short body, then opens by itself."""
    first = tasks.resting.apply_async(["a"], singleton={"at_least_for": 600})
    first.get(timeout=30)
    skipped = tasks.resting.delay("a").get(timeout=30)
    assert is_skipped(skipped)
    assert skipped["holder"]["state"] == "resting"
    pass_time(600, tasks.resting, "a")
    assert tasks.resting.delay("a").get(timeout=30) == "a"
    assert journal.wait_for("released", task_id=first.id)[0]["outcome"] == "resting"
    assert journal.entries(what="taken_over") == []


def test_direct_call_inside_a_body_is_not_guarded(tasks, journal):
    """A task may call itself as a function: no lock, no deadlock, and its own lock stays."""
    result = tasks.recursive.delay(2)
    assert result.get(timeout=30) == [2, [1, [0, None]]]
    journal.wait_for("postrun", task_id=result.id)
    assert journal.words(result.id) == ["acquired", "released", "postrun"]


# Workflows with equal members: nothing hangs, nothing is lost


@pytest.mark.parametrize("on_conflict", ["auto", "wait"])
@pytest.mark.parametrize("kind", ["chain", "chord"])
def test_every_step_of_equal_key_has_its_turn(tasks, journal, kind, on_conflict):
    """The steps of a chain and the members of a chord wait for each other: each one runs, and counts."""
    steps = [tasks.crowded.si(n).set(singleton={"on_conflict": on_conflict}) for n in range(5)]
    workflow, result = (chain(steps), 4) if kind == "chain" else (chord(steps, tasks.total.s()), 10)
    assert workflow.delay().get(timeout=30) == result
    assert len(journal.entries(what="start", name="crowded")) == 5
    assert_one_at_a_time(journal, "crowded")


@pytest.mark.parametrize("on_conflict", ["auto", "wait"])
def test_group_of_equal_members_answers_for_each(tasks, journal, on_conflict):
    """Every member of a group has a result: it ran, or it was skipped; if they wait, all run."""
    members = [tasks.crowded.s(n).set(singleton={"on_conflict": on_conflict}) for n in range(5)]
    results = group(members).delay().get(timeout=30)
    ran = [result for result in results if not is_skipped(result)]
    assert len(results) == 5
    assert ran == [0, 1, 2, 3, 4] if on_conflict == "wait" else ran
    assert_one_at_a_time(journal, "crowded")


def test_chord_of_retrying_members_counts_each_once(tasks, journal):
    """Own retries and lock waits of chord members do not disturb the count."""
    header = [
        tasks.flaky.s("same", failures).set(singleton={"on_conflict": "retry"}) for failures in (0, 1, 2)
    ]
    assert chord(header, tasks.total.s()).delay().get(timeout=30) == 3
    assert_one_at_a_time(journal, "same")


@pytest.mark.parametrize("name", ["work", "decorated"])
def test_chain_step_waits_for_a_foreign_holder(tasks, journal, gates, holding, name):
    """A step whose key is held retries, and the steps after it still run; also of a decorated function."""
    task = getattr(tasks, name)
    with holding(task):
        result = (task.si("gated") | tasks.plain.s()).delay()
        journal.wait_for("retry")
    again(gates, result)
    assert_one_at_a_time(journal, "gated")


def test_chord_member_that_raises_fails_the_chord(tasks, holding):
    """With raise a conflict is a real failure, so the chord's body fails instead of hanging."""
    header = [tasks.work.si("gated").set(singleton={"on_conflict": "raise"}), tasks.plain.si(1)]
    with holding(tasks.work), pytest.raises(Exception, match="is already running"):
        chord(header, tasks.total.s()).delay().get(timeout=30)


def test_mutable_link_waits_for_a_result_to_hand_on(tasks, journal, gates, holding):
    """A call whose link takes its result retries: the link never gets a skip_result."""
    with holding(tasks.work):
        second = tasks.work.apply_async(["gated"], link=tasks.arrival.s())
        journal.wait_for("retry", task_id=second.id)
    again(gates, second)
    assert journal.wait_for("arrival")[0]["values"] == ["gated"]


def test_immutable_link_of_a_skipped_call_still_runs(tasks, journal, holding):
    """A skipped call succeeds, so what was linked to it happens."""
    with holding(tasks.work):
        second = tasks.work.apply_async(["gated"], link=tasks.arrival.si("linked"))
        assert is_skipped(second.get(timeout=30))
        journal.wait_for("arrival", values=["linked"])


def test_link_error_of_a_raising_call_runs(tasks, journal, holding):
    """A call that fails with AlreadyRunning calls its errback."""
    options = {"link_error": tasks.arrival.si("failed"), "singleton": {"on_conflict": "raise"}}
    with holding(tasks.work):
        with pytest.raises(AlreadyRunning):
            tasks.work.apply_async(["gated"], **options).get(timeout=30)
        journal.wait_for("arrival", values=["failed"])


def test_map_and_starmap_call_the_body_without_a_lock(tasks, journal):
    """celery.map calls tasks as functions; such calls are not guarded, and do not deadlock."""
    assert tasks.add.starmap([(1, 2), (1, 2)]).delay().get(timeout=30) == [3, 3]
    assert journal.entries(what="acquired") == []


def test_replaced_task_waits_for_its_own_lock(tasks, journal):
    """self.replace() by a call with the same key: the successor has the same id, and waits its turn."""
    assert tasks.replacing.delay("a", 1).get(timeout=30) == "a"
    assert_one_at_a_time(journal, "a")
