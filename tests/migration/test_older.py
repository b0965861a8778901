"""A rolling deploy from a release that knows no live terms: no call is lost on either side of a pause."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_setnx.terms import NewTerm, Whose, set_term
from tests.harness import Worker, wait_until
from tests.migration.older import lay_out_before, older_worker
from tests.pausing import Operator

APP = "tests.waitapp"
KNOWS_TERMS = "celery_setnx/lock/lua/terms.lua"
OF_OLD, OF_NEW = {"queue": "older-old"}, {"queue": "older-new"}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """The older release."""
    return lay_out_before(KNOWS_TERMS, tmp_path_factory.mktemp("older"))


@pytest.fixture(scope="module")
def old(server, tree, logs) -> Iterator[Worker]:
    """A worker of it."""
    worker = older_worker(tree, logs, APP, queues=OF_OLD["queue"])
    yield worker
    worker.kill()


@pytest.fixture
def operator(stage, old, new) -> Iterator[Operator]:
    """An operator, who leaves nothing paused."""
    operator = Operator(stage.tasks.app, new)
    yield operator
    operator.resume_all()


@pytest.fixture(scope="module")
def new(module_worker) -> Worker:
    """A worker of this release."""
    return module_worker(APP, queues=OF_NEW["queue"])


def setnx(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """`celery -A ... setnx ...`, of this release or of that in another tree."""
    command = [sys.executable, "-m", "celery", "-A", APP, "setnx", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=60, check=False)


@pytest.mark.parametrize("whose", ["key", "task"])
def test_worker_of_an_older_release_is_named(stage, operator, old, whose):
    """`pause` says who does not heed it; the others do all the same."""
    call = (stage.task.name, *([stage.key] if whose == "key" else []))
    told = f"1 worker knows no live terms, and does not heed this: {old.node}."

    def asked() -> Any:
        done = setnx("pause", *call, "--for", "1h")
        return done.returncode == 0 and told in done.stdout and done.stdout

    said = wait_until(asked, told)  # a busy worker may not answer in time
    assert ("workers will heed it within two seconds" in said) == (whose == "task")


@pytest.mark.parametrize("whose", ["key", "task"])
def test_calls_survive_a_pause_that_one_worker_knows(stage, operator, whose):
    """The older one wakes calls that the newer one has wait, which keep their places; and runs its own."""
    task = stage.task
    paused = Whose(key=task.lock_key(stage.key)) if whose == "key" else Whose(scope=task.name)

    def pause() -> None:
        operator.pause(paused)
        if paused.scope:
            operator.is_known(paused.scope)

    def resume() -> None:
        operator.resume(paused)
        if paused.scope:
            operator.is_known(paused.scope, False)

    # The older one has the lock, and hands it on.
    running = stage.held(**OF_OLD)
    waiting = stage.parked(**OF_NEW)
    pause()
    stage.open()
    stage.has_run(running)
    stage.journal.reached("postrun", waiting, 2)
    other = stage.parked(**OF_OLD)
    assert stage.starts() == [running.id]
    resume()
    stage.have_run([waiting, other])
    # The newer one has it, and hands it on to nobody. Whoever looks at the line, the older one may go on.
    running = stage.held(**OF_NEW)
    first, second = (stage.parked(**of) for of in (OF_OLD, OF_NEW))
    pause()
    stage.open()
    stage.has_run(running)
    assert second.id not in stage.starts()
    resume()
    stage.have_run([first, second])


def test_commands_of_an_older_release_see_no_lock_in_live_terms(stage, operator, tree):
    """Its `list` tells of the lock alone."""
    operator.pause(Whose(scope=stage.tasks.stopped.name))
    running = stage.held(**OF_NEW)
    operator.pause(Whose(key=stage.task.lock_key(stage.key)))
    done = setnx("list", "--json", cwd=tree)
    assert done.returncode == 0, done.stderr
    assert [lock["key"] for lock in json.loads(done.stdout)] == [stage.task.lock_key(stage.key)]
    stage.open()
    stage.has_run(running)


def test_calls_survive_a_rate_that_one_worker_knows(stage, operator):
    """The older one starts its own at once; all run, one at a time."""
    set_term(stage.tasks.app, Whose(key=stage.task.lock_key(stage.key)), NewTerm("rate", 60.0, "4/s"))
    calls = [stage.task.apply_async([stage.key], **of) for of in (OF_OLD, OF_NEW) * 6]
    stage.have_run(calls, in_order=False)
