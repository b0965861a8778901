"""The rolling deploys of docs/moving.md: old and new code, workers and producers, on one Redis."""

from itertools import pairwise, product
from typing import Any

import pytest

from celery_setnx import is_skipped
from celery_setnx.testing import pass_time
from tests.harness import wait_until
from tests.migration import pages
from tests.migration.deploy import Deploy, Overlap, overlaps

each_page = pytest.mark.parametrize("page", pages.PAGES, scope="module")
each_peer = pytest.mark.parametrize("page", pages.PEERS, scope="module")


def answer_beside(deploy: Deploy, stage: str, other: str, account: str, gates: Any) -> str:
    """A body runs on a worker of one stage, and a call of its key is published by, and sent to, another.

    Returns what became of the second while the first ran: `ran`, `refused`, `skipped` or `waits`.
    """
    first = deploy.publish_to(stage, stage, account)
    deploy.journal.wait_for("start", task_id=first)
    second = deploy.publish_to(other, other, account)
    if second in (None, first):
        gates(account)
        deploy.answers()
        return "refused"

    def word() -> str | None:
        if deploy.journal.entries(what="start", task_id=second):
            return "ran"
        return {"RETRY": "waits", "SUCCESS": "skipped"}.get(deploy.result(second).state)

    found = str(wait_until(word, f"what becomes of {second}"))
    assert not deploy.journal.entries(what="end", task_id=first)
    gates(account, 2)
    deploy.answers()
    return found


@each_page
def test_old_worker_beside_a_new_one_overlaps(page, deploy_of, gates):
    """Without the step in between two bodies run at once, and the check of the other tests sees it."""
    deploy = deploy_of(page)
    deploy.workers_of(*pages.stages(page))
    assert answer_beside(deploy, "before", "after", "gated-old", gates) == "ran"
    assert answer_beside(deploy, "after", "before", "gated-new", gates) == "ran"
    assert overlaps(deploy.journal.entries()) == [
        Overlap("gated-old", "before", "after"),
        Overlap("gated-new", "after", "before"),
    ]


@each_page
def test_worker_of_the_step_between_excludes_a_new_one(page, deploy_of, gates):
    """While a body runs on one, a call of its key that comes to the other does not run beside it."""
    deploy = deploy_of(page)
    new = "step-2" if page in pages.PEERS else "after"
    deploy.workers_of("step-1", new)
    # A new producer sees what runs, whoever runs it. An old one asks its own lock only, and is accepted.
    of_new, of_old = ("refused", "waits") if page in pages.PEERS else ("skipped", "skipped")
    assert answer_beside(deploy, "step-1", new, "gated-old", gates) == of_new
    assert answer_beside(deploy, new, "step-1", "gated-new", gates) == of_old
    assert overlaps(deploy.journal.entries()) == []


@each_page
def test_rolling_deploy_never_overlaps_and_loses_nothing(page, deploy_of):
    """In no step do two bodies of a key run at once; every call has its answer; no lock is left.

    Producers of the first stage lag behind: they end with step 2.
    """
    deploy = deploy_of(page)
    stages = pages.stages(page)
    workers = [deploy.consume(stages[0])]
    publishing = {stages[0]}
    deploy.start_producer(stages[0])
    deploy.wait_for((stages[0], stages[0]), count=4)
    for before, stage in pairwise(stages):
        if stage == "after":
            # The page's condition for the last step: nobody publishes with the old code any more.
            old = publishing & {"before", "step-1"}
            deploy.stop_producers(*old)
            publishing -= old
            wait_until(lambda: not deploy.old_locks(), "the old locks are freed by the new code")
        workers.append(deploy.consume(stage))
        deploy.start_producer(stage)
        publishing.add(stage)
        # Without dedupe few calls of a key meet: there must be more of them.
        deploy.wait_for(*product(publishing, (before, stage)), count=4 if page in pages.PEERS else 8)
        deploy.retire(workers[-2])
    deploy.stop_producers(*publishing)

    answers = deploy.answers()
    entries = deploy.journal.entries()
    assert overlaps(entries) == []
    ended = {entry["task_id"] for entry in entries if entry["what"] == "end"}
    assert len(ended) >= 20
    assert deploy.locks_left() == set()
    if page == pages.CACHE:
        assert set(answers.values()) == {None}  # run or skipped: as before, nobody can tell
        return
    assert set(answers) == ended | {task_id for task_id, answer in answers.items() if is_skipped(answer)}
    # The code of the steps before the last one makes every call wait for its turn.
    assert not [worker for worker in workers[:-1] if "Skipped shop.settle" in worker.log_text()]
    if page == pages.ONCE:
        assert any(entry["what"] == "failed" for entry in entries), "no call has retried"
    theirs = ("qo_shop.settle_account_id-7", "SINGLETONLOCK_7", "h-lock:settle-7")
    deploy.shop.mset(dict.fromkeys(theirs, "crashed"))
    clear: dict[str, Any] = {}
    exec(pages.code(pages.SHARED, "clear"), clear)
    clear["delete_old_locks"](deploy.shop, pages.old_keys(page))
    assert len(deploy.old_locks()) == len(pages.PEERS) - 1, "those of the other packages"


@each_peer
def test_old_producers_are_refused_without_leaving(page, deploy_of):
    """A call that a new worker has run to its end keeps the old lock."""
    deploy = deploy_of(page, ("base=Leaving", "base=SingletonTask"))
    deploy.worker("step-2")
    first = deploy.publish_to("step-2", "before", "7")
    assert deploy.result(first).get(timeout=60) is None
    assert deploy.publish_to("step-2", "before", "7") in (None, first)
    assert len(deploy.old_locks()) == 1


def test_old_worker_of_heimdall_drops_new_calls_without_both(deploy_of):
    """It skips a call of a new producer, for the lock of one that is queued: that call never runs."""
    deploy = deploy_of(pages.HEIMDALL, ("base=Both", "base=HeimdallTask"))
    deploy.worker("step-1")
    queued = deploy.publish("before", "7", queue="nobody's")
    dropped = deploy.publish_to("step-1", "step-2", "7")
    assert deploy.result(dropped).get(timeout=60) is None
    assert deploy.journal.entries(what="start", task_id=dropped) == []
    assert deploy.publish("step-2", "7", queue="nobody's") not in (dropped, queued)


def test_unlock_before_run_through_the_deploy(deploy_of, gates):
    """What is published during a run, by old code or new, is accepted, and runs after it."""
    early = ('once={"keys": ["account_id"]', 'once={"keys": ["account_id"], "unlock_before_run": True')
    deploy = deploy_of(pages.ONCE, early, ("until_done", "until_started"))
    deploy.workers_of("step-1", "step-2")
    for publisher in ("before", "step-1", "step-2"):
        account = f"gated-{publisher}"
        ids = [deploy.publish_to("step-2", publisher, account)]
        deploy.journal.wait_for("start", task_id=ids[0])
        ids.append(deploy.publish_to("step-1", publisher, account))
        wait_until(lambda: deploy.result(ids[1]).state == "RETRY", "the second waits")  # noqa: B023
        ids.append(deploy.publish_to("step-2", "step-2", account))
        assert len({*ids, None}) == (4 if publisher != "step-2" else 3)
        for _ in ids:
            gates(account)
        deploy.answers()
    assert overlaps(deploy.journal.entries()) == []


def test_crash_in_the_middle_of_the_deploy(deploy_of, gates):
    """A killed worker of the step between is taken over by the new code, which frees the old lock, too."""
    deploy = deploy_of(pages.SINGLETON)
    old, _new = deploy.workers_of("step-1", "step-2")
    dead = deploy.publish_to("step-1", "step-1", "gated-7")
    deploy.journal.wait_for("start", task_id=dead)
    old.kill()
    assert deploy.publish_to("step-2", "step-1", "gated-7") == dead, "the old lock is the dead call's"
    pass_time(60, deploy.settle("step-2"), "gated-7", "step-1")
    heir = wait_until(
        lambda: (task_id := deploy.publish_to("step-2", "step-2", "gated-7")) != dead and task_id,
        "a call that is no duplicate of the dead one",
    )
    deploy.journal.wait_for("start", task_id=heir)
    gates("gated-7")
    assert deploy.result(heir).get(timeout=60) is None
    wait_until(lambda: not deploy.old_locks(), "the old lock is freed")
