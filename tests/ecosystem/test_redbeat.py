"""celery-redbeat: its ticks of guarded jobs, and the options of their entries."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redbeat import RedBeatSchedulerEntry

from tests.beat.beats import Beat

APP = "tests.ecosystem.scheduledapp"


@pytest.fixture
def tasks(server, locks, journal, module_worker) -> Any:
    """The tasks; their worker takes from the queue of the entries, and from no other."""
    from tests.ecosystem import scheduledapp

    module_worker(APP, queues=scheduledapp.QUEUE, concurrency=3)
    return scheduledapp


@pytest.fixture
def save(tasks, journal) -> Iterator[Callable[..., Any]]:
    """Saves an entry for every second, in the queue of this worker; all are deleted afterwards."""

    def save(name: str, gate: str, **options: Any) -> None:
        options = {"queue": tasks.QUEUE, **options}
        entry = RedBeatSchedulerEntry(
            name, "scheduled.slow", 1.0, args=[gate, gate], options=options, app=tasks.app
        )
        entry.save()

    yield save
    keys = [*journal._client.scan_iter("ecosystem-redbeat:*")]
    journal._client.delete("nothing", *keys)


@pytest.fixture
def beat(tasks, tmp_path) -> Iterator[Beat]:
    """A `celery beat` with RedBeat's scheduler."""
    beat = Beat(tmp_path, "beat", app=APP, scheduler="redbeat.RedBeatScheduler")
    yield beat
    if beat.process.poll() is None:
        beat.kill()


def test_ticks_during_a_run_do_what_the_options_of_their_entry_say(beat, save, tasks, journal, gates, name):
    """They are skipped; those of an entry that says so fail. When the run is over, the next tick runs."""
    save("skips", name)
    (first,) = journal.wait_for("start", name=name)
    key = tasks.slow.lock_key(name)
    skipped = journal.wait_for("conflict", 2, key=key)[-1]
    save("raises", name, singleton={"on_conflict": "raise"})
    conflict = journal.wait_for("conflict", key=key, policy="raise")[0]
    journal.wait_for("postrun", task_id=conflict["task_id"], state="FAILURE")
    assert (skipped["policy"], conflict["policy"]) == ("skip", "raise")
    assert skipped["holder"]["task_id"] == conflict["holder"]["task_id"] == first["task_id"]
    journal.wait_for("postrun", task_id=skipped["task_id"], state="SUCCESS")
    assert len(journal.entries(what="start", name=name)) == 1
    gates(name)
    second = journal.wait_for("start", 2, name=name)[1]
    assert journal.words(first["task_id"])[:3] == ["acquired", "start", "end"]
    beat.kill()
    gates(name, 100)
    journal.wait_for("end", task_id=second["task_id"])
