"""Workflows with equal members: nothing hangs, nothing is lost."""

import pytest
from celery import chain, chord, group

from celery_setnx import AlreadyRunning, is_skipped
from tests.harness import Journal

TIMEOUT_S = 30


def overlaps(journal: Journal, name: str) -> int:
    """The most bodies of this name that ran at the same time."""
    moments = sorted(
        (entry["at"], 1 if entry["what"] == "start" else -1)
        for entry in journal.entries(name=name)
        if entry["what"] in ("start", "end")
    )
    running = most = 0
    for _at, step in moments:
        running += step
        most = max(most, running)
    return most


def test_chain_of_equal_steps_runs_every_step(tasks, journal):
    """Each step of a chain has its turn, though all have the same key."""
    result = chain(tasks.crowded.si(n) for n in range(4)).delay()
    assert result.get(timeout=TIMEOUT_S) == 3
    assert len(journal.entries(what="start", name="crowded")) == 4


def test_chain_step_waits_for_a_foreign_holder(tasks, journal, gates):
    """A step whose key is held retries, and the steps after it still run."""
    first = tasks.work.delay("gated")
    journal.wait_for("start", task_id=first.id)
    result = (tasks.work.si("gated") | tasks.plain.si("after")).delay()
    journal.wait_for("retry")
    gates("gated")
    gates("gated")
    assert result.get(timeout=TIMEOUT_S) == "after"
    assert overlaps(journal, "gated") == 1


def test_group_of_equal_members_answers_for_each(tasks, journal):
    """Every member of a group has a result: it ran, or it was skipped."""
    results = group(tasks.crowded.s(n) for n in range(6)).delay().get(timeout=TIMEOUT_S)
    assert len(results) == 6
    assert any(not is_skipped(result) for result in results)
    assert overlaps(journal, "crowded") == 1


def test_chord_of_equal_members_counts_all(tasks, journal):
    """The members of a chord wait for each other: the body gets the result of every one."""
    result = chord([tasks.crowded.s(n) for n in range(6)], tasks.total.s()).delay()
    assert result.get(timeout=TIMEOUT_S) == 15
    assert overlaps(journal, "crowded") == 1


def test_chord_of_retrying_members_counts_each_once(tasks, journal):
    """Own retries and lock waits of chord members do not disturb the count."""
    header = [
        tasks.flaky.s("same", failures).set(singleton={"on_conflict": "retry"}) for failures in (0, 1, 2)
    ]
    assert chord(header, tasks.total.s()).delay().get(timeout=TIMEOUT_S) == 3
    assert overlaps(journal, "same") == 1


def test_chord_member_that_raises_fails_the_chord(tasks, journal, gates):
    """With raise a conflict is a real failure, so the chord's body fails instead of hanging."""
    first = tasks.work.delay("gated")
    journal.wait_for("start", task_id=first.id)
    header = [tasks.work.si("gated").set(singleton={"on_conflict": "raise"}), tasks.plain.si(1)]
    with pytest.raises(Exception, match="is already running"):
        chord(header, tasks.total.s()).delay().get(timeout=TIMEOUT_S)
    gates("gated")
    first.get(timeout=TIMEOUT_S)


def test_mutable_link_waits_for_a_result_to_hand_on(tasks, journal, gates):
    """A call whose link takes its result retries: the link never gets a skip_result."""
    first = tasks.work.delay("gated")
    journal.wait_for("start", task_id=first.id)
    second = tasks.work.apply_async(["gated"], link=tasks.journal_arrival.s())
    journal.wait_for("retry", task_id=second.id)
    gates("gated")
    gates("gated")
    assert journal.wait_for("arrival")[0]["name"] == "gated"
    first.get(timeout=TIMEOUT_S)


def test_immutable_link_of_a_skipped_call_still_runs(tasks, journal, gates):
    """A skipped call succeeds, so what was linked to it happens."""
    first = tasks.work.delay("gated")
    journal.wait_for("start", task_id=first.id)
    second = tasks.work.apply_async(["gated"], link=tasks.journal_arrival.si("linked"))
    assert is_skipped(second.get(timeout=TIMEOUT_S))
    journal.wait_for("arrival", name="linked")
    gates("gated")
    first.get(timeout=TIMEOUT_S)


def test_link_error_of_a_raising_call_runs(tasks, journal, gates):
    """A call that fails with AlreadyRunning calls its errback."""
    first = tasks.work.delay("gated")
    journal.wait_for("start", task_id=first.id)
    second = tasks.work.apply_async(
        ["gated"], link_error=tasks.journal_arrival.si("failed"), singleton={"on_conflict": "raise"}
    )
    with pytest.raises(AlreadyRunning):
        second.get(timeout=TIMEOUT_S)
    journal.wait_for("arrival", name="failed")
    gates("gated")
    first.get(timeout=TIMEOUT_S)


def test_map_and_starmap_call_the_body_without_a_lock(tasks, journal):
    """celery.map calls tasks as functions; such calls are not guarded, and do not deadlock."""
    assert tasks.add.starmap([(1, 2), (1, 2)]).delay().get(timeout=TIMEOUT_S) == [3, 3]
    assert journal.entries(what="acquired") == []


def test_replaced_task_waits_for_its_own_lock(tasks, journal):
    """self.replace() by a call with the same key: the successor has the same id, and waits its turn."""
    assert tasks.replacing.delay("a", 1).get(timeout=TIMEOUT_S) == "a"
    assert overlaps(journal, "a") == 1
