"""django-celery-results and django-celery-beat: what their tables say of guarded calls."""

import json
import os
import re
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import pytest

from celery_setnx import is_skipped
from tests import forks
from tests.beat.beats import Beat
from tests.harness import Worker, is_parked, wait_until
from tests.stage import SOON

APP = "tests.ecosystem.scheduledapp"
COURIERS_RUN = re.compile(r"Task celery_setnx\.courier\S* succeeded")


def make_tables() -> None:
    """In a process of the project."""
    import django

    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)


def schedule(name: str, task: str, gate: str, queue: str) -> None:
    """In a process of the project: a periodic task, every second, in a queue of its own."""
    import django

    django.setup()
    from django_celery_beat import models

    second, _new = models.IntervalSchedule.objects.get_or_create(every=1, period="seconds")
    args = json.dumps([name, gate])
    models.PeriodicTask.objects.create(name=name, task=task, args=args, interval=second, queue=queue)


@pytest.fixture(scope="module")
def project(tmp_path_factory) -> dict[str, str]:
    """The environment of a process of the project, whose tables are there."""
    directory = tmp_path_factory.mktemp("django")
    environment = {
        "DJANGO_SETTINGS_MODULE": "tests.ecosystem.djangosettings",
        "ECOSYSTEM_DATABASE": str(directory / "tables.sqlite3"),
        "PYTHONPATH": os.getcwd(),
    }
    code, said = forks.ended(directory, make_tables, **environment)
    assert code == 0, said
    return environment


@pytest.fixture(scope="module")
def worker(server, project, module_worker) -> Worker:
    """A worker whose results are in the tables."""
    from tests.ecosystem import scheduledapp

    return module_worker(
        APP,
        environment=project,
        concurrency=3,
        conf={"result_backend": "django-db"},
        queues=f"celery,{scheduledapp.QUEUE}",
    )


@pytest.fixture
def tasks(worker) -> Any:
    """The tasks that the worker runs."""
    from tests.ecosystem import scheduledapp

    return scheduledapp


@pytest.fixture
def rows(project) -> Callable[..., list[dict[str, Any]]]:
    """The stored results with these values, as the database has them."""

    def rows(**wanted: str) -> list[dict[str, Any]]:
        with closing(sqlite3.connect(project["ECOSYSTEM_DATABASE"], timeout=60)) as database:
            database.row_factory = sqlite3.Row
            found = database.execute("select * from django_celery_results_taskresult").fetchall()
        return [dict(row) for row in found if all(row[name] == value for name, value in wanted.items())]

    return rows


@pytest.fixture
def stored(rows) -> Callable[[Any], dict[str, Any]]:
    """What is stored of a call, once it has ended."""

    def stored(result: Any) -> dict[str, Any]:
        def ended() -> list[dict[str, Any]]:
            return [row for row in rows(task_id=result.id) if row["status"] in ("SUCCESS", "FAILURE")]

        (row,) = wait_until(ended, f"{result.id} has ended")
        return row

    return stored


@pytest.fixture
def gate(journal, locks, gates, name) -> Iterator[str]:
    """The gate of this test; whoever is left there goes on."""
    yield name
    gates(name, 3 + journal.unended())


def test_result_of_a_skipped_call_is_stored_with_the_name_of_its_task(tasks, journal, stored, gates, gate):
    """As a success that names the holder; the holder's own result is stored beside it."""
    first = journal.reached("start", tasks.slow.delay(gate, gate))
    skipped = stored(tasks.slow.delay(gate, gate))
    result = json.loads(skipped["result"])
    assert (skipped["task_name"], skipped["status"]) == ("scheduled.slow", "SUCCESS")
    assert is_skipped(result)
    assert result["holder"]["task_id"] == first.id
    gates(gate)
    row = stored(first)
    assert (row["task_name"], row["status"], row["result"]) == (
        "scheduled.slow",
        "SUCCESS",
        json.dumps(gate),
    )


def test_call_that_waits_has_its_own_result_and_its_courier_has_none(
    tasks, worker, journal, rows, stored, gates, locks, gate
):
    """Nothing but the task's own calls is in the table."""
    first = journal.reached("start", tasks.patient.delay(gate, gate))
    waiting = tasks.patient.apply_async([gate, "free"], singleton=SOON)
    wait_until(lambda: is_parked(locks, tasks.patient.lock_key(gate), waiting.id), "the second call waits")
    wait_until(lambda: COURIERS_RUN.search(worker.log_text()), "its courier has come, and looked")
    gates(gate)
    assert json.loads(stored(waiting)["result"]) == "free"
    assert {row["task_name"] for row in rows()} <= {"scheduled.slow", "scheduled.patient", "scheduled.strict"}
    assert stored(first)["task_name"] == stored(waiting)["task_name"] == "scheduled.patient"


def test_failure_of_a_call_that_raises_is_stored(tasks, journal, stored, gates, gate):
    """`AlreadyRunning` is the error of its row."""
    first = journal.reached("start", tasks.strict.delay(gate, gate))
    row = stored(tasks.strict.delay(gate))
    assert (row["task_name"], row["status"]) == ("scheduled.strict", "FAILURE")
    assert json.loads(row["result"])["exc_type"] == "AlreadyRunning"
    gates(gate)
    assert stored(first)["status"] == "SUCCESS"


@pytest.fixture
def beat(tmp_path, project, tasks, gate) -> Iterator[Beat]:
    """A `celery beat` with the DatabaseScheduler, of one job that waits at the gate, every second."""
    code, said = forks.ended(tmp_path, schedule, gate, "scheduled.slow", gate, tasks.QUEUE, **project)
    assert code == 0, said
    beat = Beat(
        tmp_path,
        "beat",
        app=APP,
        scheduler="django_celery_beat.schedulers:DatabaseScheduler",
        environment=project,
    )
    yield beat
    if beat.process.poll() is None:
        beat.kill()


def test_ticks_during_a_run_are_skipped_and_stored_by_the_name_of_their_row(beat, journal, rows, gates, gate):
    """They come by the queue of the row, and when the run is over, the next tick runs."""
    (first,) = journal.wait_for("start", name=gate)
    journal.wait_for("conflict", 2, key=first["key"])
    skipped = wait_until(lambda: rows(periodic_task_name=gate), "a skipped tick is stored")
    assert {row["status"] for row in skipped} == {"SUCCESS"}
    assert all(is_skipped(json.loads(row["result"])) for row in skipped)
    assert len(journal.entries(what="start", name=gate)) == 1
    gates(gate)
    second = journal.wait_for("start", 2, name=gate)[1]
    beat.kill()
    gates(gate, 100)
    journal.wait_for("end", task_id=second["task_id"])
    assert journal.words(first["task_id"])[:3] == ["acquired", "start", "end"]
