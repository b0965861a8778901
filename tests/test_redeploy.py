"""A key, an option, an argument or a name changes while calls are queued: docs/runbook.md. Real workers."""

from collections.abc import Callable
from typing import Any

import pytest
from celery import Celery
from celery.result import AsyncResult

from celery_setnx import is_skipped
from tests.harness import Worker, wait_until

ACCOUNT = "gated-7"
NEXT = "redeploy-next"
"""A queue that nobody consumes until the second step."""


@pytest.fixture(autouse=True)
def clean(locks, journal) -> None:
    """No key is left from another test."""
    journal._client.delete("redeploy", NEXT)


@pytest.fixture
def start(start_worker) -> Callable[..., Worker]:
    """Starts a worker of a release."""

    def start(release: str, queue: str = "redeploy") -> Worker:
        return start_worker("tests.redeployapp", queues=queue, conf={"release": release})

    return start


def app_of(release: str) -> Celery:
    """The app of a release, to publish by."""
    from tests import redeployapp

    return redeployapp.release(release)


def publish(release: str, *args: Any, queue: str = "redeploy", task: str = "redeploy.settle") -> AsyncResult:
    """Publish a call of one account with the code of a release."""
    return app_of(release).tasks[task].apply_async((ACCOUNT, *args), queue=queue)


def key_of(journal: Any, result: AsyncResult) -> str:
    """Under which lock the body of a call has started."""
    return str(journal.wait_for("start", task_id=result.id)[0]["key"])


def beside(journal: Any, first: AsyncResult, second: AsyncResult) -> bool:
    """Whether the second starts while the first runs, or waits for it."""

    def word() -> Any:
        return {"start", "waiting"} & {*journal.words(second.id)}

    found = wait_until(word, f"what becomes of {second.id}")
    return "start" in found and "end" not in journal.words(first.id)


def test_queued_call_keeps_the_key_of_its_message(start, journal, gates):
    """A worker whose code makes keys of other things runs it under the old one."""
    old = publish("coarse", "x")
    start("fine")
    tasks = app_of("coarse").tasks
    assert key_of(journal, old) == tasks["redeploy.settle"].lock_key(ACCOUNT, "x")
    gates(ACCOUNT)
    assert old.get(timeout=60) == ACCOUNT


@pytest.mark.parametrize(
    ("before", "after", "runs_beside"),
    [
        ("coarse", "fine", True),
        ("all arguments", "one argument more", True),
        ("coarse", "other prefix", True),
        ("coarse", "other server", True),
        ("coarse", "skips", False),
        ("coarse", "coarse", False),
    ],
)
def test_calls_of_two_releases_side_by_side(start, journal, gates, before, after, runs_beside):
    """With a changed key they run at once, and with another server; with other options they do not."""
    start(after)
    queue = "redeploy"
    if after == "other server":  # where the locks are is said by the worker's code, not by the message
        queue = NEXT
        start(before, queue)
    first = journal.reached("start", publish(before, "x", queue=queue))
    second = publish(after, "x")
    if after == "skips":
        assert is_skipped(second.get(timeout=60))
    else:
        assert beside(journal, first, second) == runs_beside
    gates(ACCOUNT, 2)
    assert first.get(timeout=60) == ACCOUNT


def test_changed_key_in_two_steps_runs_nothing_side_by_side(start, journal, gates):
    """What new code publishes is parked in another queue until the calls with the old key have run."""
    worker = start("fine")
    old = [publish("coarse", "x"), publish("coarse", "y")]
    new = publish("fine", "x", queue=NEXT)
    gates(ACCOUNT, 2)
    for result in old:
        assert result.get(timeout=60) == ACCOUNT
    assert journal.words(new.id) == []
    worker.take_from(app_of("fine"), NEXT)
    journal.wait_for("start", task_id=new.id)
    gates(ACCOUNT)
    assert new.get(timeout=60) == ACCOUNT


def test_queued_call_obeys_the_options_of_the_workers_code(start, journal, gates):
    """Published by code that would wait, it is skipped by a worker whose code skips."""
    start("skips")
    first = journal.reached("start", publish("coarse", "x"))
    assert is_skipped(publish("coarse", "y").get(timeout=60))
    gates(ACCOUNT)
    assert first.get(timeout=60) == ACCOUNT


def test_renamed_task_that_keeps_scope_and_old_name_excludes_the_old_calls(start, journal, gates):
    """One lock for both names: a call by the new one waits for a call by the old one."""
    start("renamed")
    first = journal.reached("start", publish("coarse", "x"))
    second = publish("renamed", "x", task="redeploy.book")
    assert not beside(journal, first, second)
    gates(ACCOUNT, 2)
    assert [first.get(timeout=60), second.get(timeout=60)] == [ACCOUNT, ACCOUNT]
