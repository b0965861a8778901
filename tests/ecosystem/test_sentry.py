"""sentry-sdk beside ours."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.beat.beats import HOT_STANDBY, Beat
from tests.ecosystem.play import QUEUE, Play
from tests.harness import Journal, Worker

APP = "tests.ecosystem.sentryapp"


@pytest.fixture(scope="module")
def watched_worker(module_worker: Callable[..., Worker]) -> Worker:
    return module_worker(APP, queues=QUEUE)


def test_sentry_reports_the_errors_of_a_guarded_body(watched_worker, play: Play, journal: Journal):
    """With the task's name and id; a call that waits, or fails with AlreadyRunning, is no error."""
    _, held = play.holder()
    _, waited = play.parked()
    play.failed("refuses", play.name)
    play.let_go(held, waited)
    failed = play.failed("fails", play.name)
    (event,) = journal.wait_for("event")
    assert (event["task"], event["task_id"], event["errors"]) == (
        "watched.fails",
        failed,
        ["ZeroDivisionError"],
    )


def test_sentry_traces_each_run_in_its_callers_trace(watched_worker, play: Play, journal: Journal):
    """One transaction a run; the call that waited has two, both in the trace of what has published it."""
    other, held = play.holder()
    publisher, waited = play.parked()
    play.let_go(held, waited)
    traces = {}
    for task_id, runs in {other: 1, held: 1, publisher: 1, waited: 2}.items():
        transactions = journal.wait_for("transaction", runs, task_id=task_id)
        traces[task_id] = [transaction["trace"] for transaction in transactions]
    assert traces[held] == traces[other] != traces[publisher]
    assert traces[waited] == traces[publisher] * 2


@pytest.fixture
def beat(server, tmp_path: Path) -> Iterator[Callable[..., Beat]]:
    """Starts a beat, which is killed in the end."""
    started: list[Beat] = []

    def beat(scheduler: str | None, ticks: str) -> Beat:
        environment = {"SETNX_TEST_TICKS": ticks}
        started.append(Beat(tmp_path, "beat", app=APP, scheduler=scheduler, environment=environment))
        return started[-1]

    yield beat
    for process in started:
        process.kill()


@pytest.mark.parametrize("scheduler", [None, HOT_STANDBY])
def test_sentry_closes_the_check_in_of_a_skipped_tick(
    scheduler, watched_worker, beat, play: Play, journal: Journal
):
    """With "ok", while the other runs. A tick that is a duplicate leaves its check-in open."""
    beat(scheduler, play.name)
    opened = {e["monitor"]: e["check_in"] for e in journal.wait_for("check_in", 4, status="in_progress")}
    assert set(opened) == {"one", "another", "queued", "again"}
    (skipped,) = journal.wait_for("check_in", status="ok")
    assert skipped["monitor"] in ("one", "another")
    assert not journal.entries(what="end")
    play.let_go()
    watched_worker.take_from(play.tasks.app, f"aside-{play.name}")
    closed = journal.wait_for("check_in", 3, status="ok")
    assert len({entry["monitor"] for entry in closed} & {"queued", "again"}) == 1
    assert {entry["check_in"] for entry in closed} == {opened[entry["monitor"]] for entry in closed}
