"""Locks by hand, from Python: what is listed, and that a release is of the holder that was seen."""

from unittest.mock import Mock

import pytest

from celery_setnx import LockRefused, LockUnavailable, byhand
from celery_setnx.call.back import Message
from celery_setnx.call.message import Call
from celery_setnx.lock.names import record_name
from celery_setnx.lock.survey import Sighting
from celery_setnx.signals import lock_released
from celery_setnx.terms import NewTerm, Whose, set_term
from celery_setnx.testing import locks_on
from tests.test_cli import SCENES, TASK, Stage, ask_json


@pytest.fixture
def stage_of(locks, foreign_keys) -> Stage:
    """The tasks that are looked after; there is nothing of them yet."""
    return Stage(locks, foreign_keys)


def test_locks_are_those_that_the_command_lists(stage_of):
    """Held, waited for, foreign or paced; a call that is queued, or has succeeded, is none."""
    stage_of.hold("sync")
    stage_of.park("waiting")
    stage_of.foreign("retrying")
    stage_of.start("paced")
    stage_of.queue("pending")
    stage_of.succeed("daily")
    found = {seen.key: seen for seen in byhand.locks(stage_of.app)}
    assert [*found] == [row["key"] for row in ask_json("list")]
    assert {*found} == {stage_of.key(name) for name in ("sync", "waiting", "retrying", "paced")}
    assert found[stage_of.key()].holder.task_id == "t-1"


@pytest.mark.parametrize("key", ["session:7", "tt:{a}", "t:{a}:holder", "t:{a}#1"])
def test_look_reads_no_key_that_is_no_lock(stage_of, locks, key):
    """A page that is asked for any key shows nothing of another program's."""
    locks.set(key, "secret", ex=60)
    with pytest.raises(ValueError, match="is no name of a lock of this app's tasks"):
        byhand.look(stage_of.app, key)


def test_look_knows_that_the_task_is_paused(stage_of):
    """As the list does: a task's live terms do not lie beside its locks."""
    set_term(stage_of.app, Whose(scope=f"{TASK}sync"), NewTerm("pause", 60.0, because="partner down"))
    seen = byhand.look(stage_of.app, stage_of.key())
    assert (seen.is_paused, seen.pause and seen.pause.because) == (True, "partner down")


def test_release_frees_the_lock_and_leaves_a_log_line_and_a_signal(stage_of, caplog):
    """Who did it, which lock, who held it; a renewal since then does not matter."""
    held, hear = stage_of.hold(), Mock()
    seen = byhand.look(stage_of.app, held.key)
    held.renew()
    assert byhand.look(stage_of.app, held.key).holder.raw != seen.holder.raw
    lock_released.connect(hear)
    assert byhand.release(stage_of.app, seen, by="ada")
    assert byhand.look(stage_of.app, held.key).holder is None
    assert held.release() == "lost"
    (record,) = [record for record in caplog.records if "by hand" in record.getMessage()]
    assert record.levelname == "WARNING"
    by_hand = f"{held.key} was released by hand, by ada. It was held by {TASK}sync[t-1] on w1@host"
    assert record.getMessage().startswith(by_hand)
    ((_, signal),) = hear.call_args_list
    said = [signal[name] for name in ("sender", "task_id", "key", "about", "fence", "outcome")]
    assert said == [stage_of.task("sync"), "t-1", held.key, "", held.fence, "by_hand"]


def test_release_of_a_lock_that_tasks_share_lets_the_call_in_line_go_on(stage_of):
    """A foreign holder names no task, and the scope is the name of none: no worker looks at its lines."""
    call = Call(TASK + "crowd_one", "t-9", key=stage_of.key("crowd_one"))
    message = Message({"task": call.task, "id": call.task_id}, {}, "q", ((), {}, {}), "application/json")
    stage_of.foreign("crowd_one")
    stage_of.park("crowd_one", message.packed(stage_of.app, call))
    assert byhand.release(stage_of.app, byhand.look(stage_of.app, call.key), by="ada")
    assert stage_of.is_due("crowd_one")


def pass_on(stage: Stage, seen: Sighting) -> None:
    """Another call of the same task has the lock."""
    stage.locks.delete(seen.key, record_name(seen.key))
    stage.hold(task_id="t-2")


CHANGES = {
    "another's": ("held", pass_on),
    "free": ("held", lambda stage, seen: stage.locks.delete(seen.key, record_name(seen.key))),
    "another foreign one's": ("foreign", lambda stage, seen: stage.locks.set(seen.key, "other")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_release_touches_nothing_that_was_not_seen(stage_of, locks, change, caplog):
    """It says so, and tells nobody."""
    scene, happens = CHANGES[change]
    SCENES[scene](stage_of, "sync")
    seen = byhand.look(stage_of.app, stage_of.key())
    happens(stage_of, seen)
    before = locks.mget(seen.key, record_name(seen.key))
    assert not byhand.release(stage_of.app, seen, by="ada")
    assert locks.mget(seen.key, record_name(seen.key)) == before
    assert "by hand" not in caplog.text


def test_release_of_a_free_lock_does_nothing(stage_of, caplog):
    """There is nobody whose lock it could be."""
    assert not byhand.release(stage_of.app, byhand.look(stage_of.app, stage_of.key()), by="ada")
    assert "by hand" not in caplog.text


def test_release_of_one_permit_leaves_the_others(stage_of):
    """It is about the holder that was chosen."""
    held = stage_of.hold_many({}, {}, {})
    *_, last = byhand.look(stage_of.app, held[0].key).of_each()
    assert byhand.release(stage_of.app, last, by="ada")
    assert [one.release() for one in held] == ["released", "released", "lost"]


def test_release_lets_the_first_in_line_run(stage, journal):
    """It is woken, and runs beside the call that had the lock, which runs on."""
    first = stage.held()
    woken = stage.parked(stage.gate)
    app, key = stage.task.app, stage.task.lock_key(stage.key)
    seen = byhand.look(app, key)
    (waiter,) = byhand.waiters(app, seen)
    assert (waiter.task_id, waiter.place, seen.waiting) == (woken.id, 1, 1)
    assert byhand.release(app, seen, by="ada")
    journal.reached("start", woken)
    assert "end" not in journal.words(first.id)
    stage.open(2)
    assert first.get(timeout=60) == woken.get(timeout=60) == [stage.key, stage.gate, 0]


def test_release_counts_though_its_line_cannot_be_noted(stage_of, limited, caplog):
    """The lock is free by then; the log says that workers will see to the line."""
    caplog.set_level("INFO")
    held = stage_of.hold("waiting")
    stage_of.park("waiting")
    may = ("~t:*", "+@all", "-zscore")
    with locks_on(stage_of.app, limited(*may)):
        assert byhand.release(stage_of.app, byhand.look(stage_of.app, held.key), by="ada")
    assert f"No worker was told to look at the line of {held.key}: " in caplog.text
    assert byhand.look(stage_of.app, held.key).holder is None


ASKED = {
    "locks": lambda app, seen: [*byhand.locks(app)],
    "look": lambda app, seen: byhand.look(app, seen.key),
    "waiters": byhand.waiters,
    "release": lambda app, seen: byhand.release(app, seen, by="ada"),
}


@pytest.mark.parametrize("ask", ASKED.values(), ids=ASKED)
def test_server_that_does_not_answer_or_refuses_raises_our_errors(stage_of, limited, ask):
    """Not those of the client library."""
    stage_of.hold()
    seen = byhand.look(stage_of.app, stage_of.key())
    with locks_on(stage_of.app, "redis://127.0.0.1:1/1"), pytest.raises(LockUnavailable):
        ask(stage_of.app, seen)
    with locks_on(stage_of.app, limited("~t:*", "+ping")), pytest.raises(LockRefused):
        ask(stage_of.app, seen)
    assert byhand.look(stage_of.app, stage_of.key()).holder == seen.holder
