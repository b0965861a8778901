"""A call is revoked: while it holds its lock, and while it is queued under its mark."""

import uuid

from tests.harness import wait_until
from tests.smoke.containers import call_on

LEASE_S = 60


def test_revoked_holder_frees_its_lock_at_once(tasks, workers, journal, gates, name):
    """revoke(terminate=True): the worker frees the lock long before its lease ends."""
    holder, other = workers
    first = journal.reached("start", call_on(holder, tasks.work, name, singleton={"lease": LEASE_S}))
    second = journal.reached("conflict", call_on(other, tasks.work, name))
    first.revoke(terminate=True)
    journal.wait_for("start", task_id=second.id)
    gates(name)
    assert second.get(timeout=60) == name
    journal.wait_for("released", task_id=first.id)  # by the process, or by its worker for it
    assert journal.entries(what="taken_over") == []
    assert journal.entries(what="end", task_id=first.id) == []


def test_revoked_queued_call_frees_its_mark(tasks, workers, journal, gates, name):
    """A queued call is revoked: its mark is freed, so the next call is published, and runs."""
    blockers = [call_on(worker, tasks.work, f"gated-{uuid.uuid4().hex}") for worker in workers * 2]
    journal.wait_for("start", 4)  # every process of both workers is busy
    queued = tasks.once.delay(name)
    assert tasks.once.delay(name).deduplicated
    queued.revoke()
    for worker in workers:
        wait_until(lambda w=worker: f"as revoked: {queued.id}" in w.logs(), f"{worker.hostname()} to know")
    for blocker in journal.entries(what="start"):
        gates(blocker["name"])
    for result in blockers:
        result.get(timeout=60)
    gates(name)
    following = wait_until(lambda: not (again := tasks.once.delay(name)).deduplicated and again, "no mark")
    assert following.get(timeout=60) == name
    assert journal.entries(what="start", task_id=queued.id) == []
