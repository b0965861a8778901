"""A call that joins: what it waited for dies with its process, or the lock server cannot answer it."""

import os
import signal

import redis
from celery.states import READY_STATES

from examples.embedded import EmbeddedServer
from tests.harness import Worker


def test_join_runs_itself_when_the_other_dies_with_its_process(tasks, journal, gates):
    """That the holder's process was killed is no result to end with: the call that waited for it runs."""
    holder = tasks.work.apply_async(["gated-dies"])
    (start,) = journal.wait_for("acquired", task_id=holder.id)
    joiner = tasks.work.apply_async(["gated-dies"], singleton={"on_conflict": "join"})
    (conflict,) = journal.wait_for("conflict", task_id=joiner.id)
    os.kill(conflict["holder"]["pid"], signal.SIGKILL)
    journal.wait_for("start", task_id=joiner.id)
    gates("gated-dies")
    assert joiner.get(timeout=20) == "gated-dies"
    assert start["fence"] < journal.wait_for("acquired", task_id=joiner.id)[0]["fence"]


def test_join_waits_for_a_lock_server_that_is_full(tasks, journal, gates, logs):
    """A woken call that the lock server cannot serve asks again, and ends once, with the holder's result."""
    with EmbeddedServer() as locks, redis.Redis(port=locks.port) as client:
        worker = Worker(logs, queues="full", environment={"SETNX_TEST_LOCK_URL": locks.url()})
        holder = tasks.work.apply_async(["gated-full"], queue="full")
        journal.wait_for("start", task_id=holder.id)
        joiner = tasks.work.apply_async(["gated-full"], queue="full", singleton={"on_conflict": "join"})
        journal.wait_for("postrun", task_id=joiner.id, state="IGNORED")
        client.config_set("maxmemory", 1)
        gates("gated-full")
        journal.wait_for("released", task_id=holder.id)
        journal.wait_for("postrun", 2, task_id=joiner.id)  # after a lease of asking in place
        client.config_set("maxmemory", 0)
        journal.wait_for("postrun", task_id=joiner.id, state="SUCCESS")
        states = [entry["state"] for entry in journal.entries(what="postrun", task_id=joiner.id)]
        assert [state for state in states if state in READY_STATES] == ["SUCCESS"]
        worker.stop()


def test_join_runs_itself_when_the_other_was_shut_down_cold(tasks, journal, gates, logs):
    """Celery stores RETRY for what a cold shutdown cancels, and nobody sends it again: the next one runs."""
    worker = Worker(logs, queues="cold")
    holder = tasks.work.apply_async(["gated-cold"], queue="cold")
    journal.wait_for("start", task_id=holder.id)
    joiner = tasks.work.apply_async(["gated-cold"], singleton={"on_conflict": "join"})
    journal.wait_for("postrun", task_id=joiner.id, state="IGNORED")
    os.kill(worker.process.pid, signal.SIGQUIT)
    worker.process.wait(10)
    journal.wait_for("start", task_id=joiner.id)
    gates("gated-cold")
    assert joiner.get(timeout=20) == "gated-cold"
