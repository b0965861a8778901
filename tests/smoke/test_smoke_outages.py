"""A broker or the lock's Redis stands still, or the holder's container loses its network."""

import time
from typing import Any

import pytest

from celery_setnx import LockLost
from tests.harness import wait_until
from tests.smoke.app import GO_ON, LEASE_S
from tests.smoke.containers import Logs, call_on


def test_broker_pause_longer_than_the_lease_leaves_the_lock_alone(
    tasks, workers, journal, gates, name, celery_broker
):
    """docker pause of the broker: the lock lives elsewhere and is renewed; all calls end."""
    holder, other = workers
    first = journal.reached("start", call_on(holder, tasks.work, name))
    second = journal.reached("conflict", call_on(other, tasks.work, name))
    before = tasks.work.locked(name)
    with celery_broker.container.paused():
        wait_until(lambda: tasks.work.locked(name).deadline > before.deadline + LEASE_S + 1, "renewals")
        assert tasks.work.locked(name).token == before.token
    gates(name, 2)
    assert first.get(timeout=60) == second.get(timeout=30) == name
    assert journal.entries(what="lost") == journal.entries(what="taken_over") == []


# Nothing of this goes by way of the broker.
@pytest.mark.parametrize("celery_broker", ["redis"], indirect=True)
def test_lock_servers_pause_shorter_than_the_lease_keeps_the_lock(
    tasks, workers, journal, gates, name, lock_server
):
    """docker pause of the lock's Redis: a renewal fails and is repeated; the holder is never in doubt."""
    holder, _other = workers
    result = journal.reached("start", call_on(holder, tasks.work, name, singleton={"lease": 15}))
    before = tasks.work.locked(name)
    with lock_server.paused():
        wait_until(lambda: "renewing goes on" in holder.logs(), "a renewal that fails")
    after = wait_until(
        lambda: (now := tasks.work.locked(name)).deadline > before.deadline + 5 and now, "a renewal"
    )
    assert after.token == before.token
    gates(name)
    assert result.get(timeout=60) == name
    journal.wait_for("postrun", task_id=result.id)
    assert journal.words(result.id) == ["acquired", "start", "end", "released", "postrun"]


def test_holder_cut_off_past_its_lease_is_told_and_harms_nobody(
    tasks: Any, workers: Any, journal: Logs, gates: Any, name: str, failovers: list[float],
    default_pytest_celery_network: Any,
) -> None:  # fmt: skip
    """docker network disconnect of the holder: another takes over, and keeps it when the first is back."""
    holder, other = workers
    first = call_on(holder, tasks.stranded, name)
    (start,) = journal.wait_for("start", task_id=first.id)
    second = journal.reached("conflict", call_on(other, tasks.stranded, name))
    default_pytest_celery_network.disconnect(holder.container.id)
    cut = time.monotonic()
    (after,) = journal.wait_for("start", task_id=second.id)
    failovers.append(time.monotonic() - cut)
    journal.wait_for("told", task_id=first.id)
    journal.wait_for("lost", task_id=first.id)
    (taken,) = journal.wait_for("taken_over")
    assert taken["holder"]["worker"] == holder.hostname()
    assert after["fence"] > start["fence"]

    theirs = tasks.stranded.locked(name)
    default_pytest_celery_network.connect(holder.container.id)
    holder.container.exec_run(["touch", GO_ON])
    journal.wait_for("postrun", task_id=first.id, state="FAILURE")
    with pytest.raises(LockLost):
        first.get(timeout=60)
    assert "was not released" not in holder.logs()  # it reached the server, which said no
    now = tasks.stranded.locked(name)
    assert (now.token, now.fence) == (theirs.token, after["fence"])
    wait_until(lambda: tasks.stranded.locked(name).deadline > now.deadline, "a renewal of the second's")
    assert journal.entries(what="lost", task_id=second.id) == []
    assert sorted(journal.words(first.id)) == ["acquired", "lost", "postrun", "start", "told"]
