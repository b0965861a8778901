"""The holder's container dies, or is restarted."""

import threading
import time
from typing import Any

from tests.harness import wait_until
from tests.smoke.containers import call_on


def started_on(workers: Any, start: dict[str, Any]) -> tuple[Any, Any]:
    """The worker that runs a body, and the other one."""
    first, second = workers
    return (first, second) if first.container.id.startswith(start["host"]) else (second, first)


def test_second_call_takes_over_from_a_killed_container(tasks, workers, journal, gates, name, failovers):
    """docker kill -9 of the holder: the call that waits takes its lock over, and names it."""
    holder, other = workers
    first = call_on(holder, tasks.work, name)
    (start,) = journal.wait_for("start", task_id=first.id)
    second = journal.reached("conflict", call_on(other, tasks.work, name))
    holder.kill()
    killed = time.monotonic()
    (after,) = journal.wait_for("start", task_id=second.id)
    failovers.append(time.monotonic() - killed)
    gates(name)
    assert second.get(timeout=60) == name
    (taken,) = journal.wait_for("taken_over")
    assert taken["task_id"] == second.id
    assert taken["holder"]["worker"] == holder.hostname()
    assert taken["holder"]["task_id"] == first.id
    wait_until(lambda: f"took over {start['key']} from" in other.logs(), "the take-over in the log")
    assert after["fence"] > start["fence"]
    assert journal.words(first.id) == ["acquired", "start"]


def test_killed_containers_call_is_delivered_again(tasks, workers, journal, gates, name):
    """docker kill -9 of the holder with acks_late: its call comes again, waits for its lock, ends once."""
    # Longer than Redis takes to deliver again, so that the lock is met on every broker.
    result = tasks.late.apply_async([name], singleton={"lease": 15})
    (start,) = journal.wait_for("start", task_id=result.id)
    holder, other = started_on(workers, start)
    holder.kill()
    (conflict, *_) = journal.wait_for("conflict", task_id=result.id)
    assert conflict["policy"] == "wait"
    (_, again) = journal.wait_for("start", 2, task_id=result.id)
    gates(name)
    assert result.get(timeout=60) == name
    assert other.container.id.startswith(again["host"])
    (taken,) = journal.wait_for("taken_over")
    assert taken["holder"]["worker"] == holder.hostname()
    assert taken["holder"]["fence"] == start["fence"] < again["fence"]
    assert len(journal.wait_for("end", task_id=result.id)) == 1


def test_warm_restart_lets_the_holder_end(tasks, workers, journal, gates, name):
    """docker restart: the body ends first and gives its lock back; the call that waits runs next."""
    holder, other = workers
    first = journal.reached("start", call_on(holder, tasks.work, name))
    second = journal.reached("conflict", call_on(other, tasks.work, name))
    restart = threading.Thread(target=holder.restart)
    restart.start()
    try:
        wait_until(lambda: "Warm shutdown" in holder.logs(), "a warm shutdown")
        assert journal.entries(what="start", task_id=second.id) == []
    finally:
        gates(name, 2)
        restart.join()
    assert first.get(timeout=60) == second.get(timeout=20) == name
    journal.wait_for("end", 2)
    assert journal.entries(what="taken_over") == []
    bodies = [entry for entry in journal.entries() if entry["what"] in ("start", "end")]
    assert [entry["task_id"] for entry in bodies] == [first.id, first.id, second.id, second.id]
    third = call_on(holder, tasks.work, name)  # the restarted worker works
    gates(name)
    assert third.get(timeout=60) == name


def test_impatient_restart_runs_the_call_once_more(tasks, workers, journal, gates, name, failovers):
    """docker restart that kills after a second, with acks_late: the call runs again, and ends once."""
    result = tasks.late.delay(name)
    (start,) = journal.wait_for("start", task_id=result.id)
    holder, _other = started_on(workers, start)
    began = time.monotonic()
    holder.container.restart(timeout=1)
    (_, again) = journal.wait_for("start", 2, task_id=result.id)
    failovers.append(time.monotonic() - began)
    gates(name)
    assert result.get(timeout=60) == name
    (taken,) = journal.wait_for("taken_over")
    assert taken["holder"]["fence"] == start["fence"] < again["fence"]
    journal.wait_for("end")
    bodies = [entry["what"] for entry in journal.entries() if entry["what"] in ("start", "end")]
    assert bodies == ["start", "start", "end"]
