"""Jobs of a plain `celery beat` that knows no task: slower than their interval, or sent by two beats."""

import re

import pytest

from tests.beat.beats import JOBS_QUEUE, Beat, Beats, assert_clean
from tests.harness import Journal, Worker, wait_until

JOBS = "tests.beat.jobs"


def plain_beat(beats: Beats, **names: str) -> Beat:
    """A beat with Celery's own scheduler that sends these jobs every second, each with its name."""
    entries = {job: {"task": f"jobs.{job}", "schedule": 1.0, "args": [name]} for job, name in names.items()}
    (beat,) = beats.start(scheduler=None, level="DEBUG", entries=entries, task_default_queue=JOBS_QUEUE)
    return beat


def stop(beat: Beat, worker: Worker | None = None, entries: int = 1) -> None:
    """Stop a beat while it sleeps after a tick: in the middle of a send, SIGTERM ends it with an error.

    Args:
        beat: The beat; it logs at DEBUG.
        worker: Who is to have received all that it has sent. Defaults to nobody.
        entries: How many it sends in a tick. Defaults to 1.
    """
    before = beat.sent()

    def is_received() -> bool:
        return worker is None or received(worker) == beat.sent()

    wait_until(lambda: beat.is_asleep_after(before, entries) and is_received(), "a tick, and sleep")
    assert beat.stop() == 0


def received(worker: Worker) -> int:
    return len({*re.findall(r"Task jobs\.\w+\[(\S+)\] received", worker.log_text())})


def all_ended(journal: Journal, beat: Beat) -> None:
    """Wait until every call that the beat sent is done."""
    wait_until(
        lambda: (
            len({e["task_id"] for e in journal.entries(what="postrun") if e["state"] == "SUCCESS"})
            == beat.sent()
        ),
        "all calls done",
    )


def runs(journal: Journal) -> list[str]:
    return [entry["what"] for entry in journal.entries() if entry["what"] in ("start", "end")]


def test_job_slower_than_its_interval_runs_one_at_a_time(beats, start_worker, journal, gates):
    """No traceback anywhere, and one INFO line per skipped tick, which names the running job."""
    worker: Worker = start_worker(JOBS, queues=JOBS_QUEUE, concurrency=3)
    beat = plain_beat(beats, slow="gated-slow")
    (first,) = journal.wait_for("start")
    journal.wait_for("conflict", 4)
    assert runs(journal) == ["start"]
    gates("gated-slow")
    journal.wait_for("start", 2)
    journal.wait_for("conflict", 5)
    stop(beat, worker)
    # A tick that is received only would run, and wait for a gate, once the run is over.
    journal.wait_for("conflict", beat.sent() - 2)
    gates("gated-slow")
    all_ended(journal, beat)
    assert runs(journal) == ["start", "end", "start", "end"]
    skipped = [line for line in worker.log_text().splitlines() if "Skipped jobs.slow" in line]
    conflicts = journal.entries(what="conflict")
    assert len(skipped) == len(conflicts) == beat.sent() - len(journal.entries(what="start"))
    assert all("INFO" in line and "is held by jobs.slow[" in line for line in skipped)
    during = [line for line in skipped if f"jobs.slow[{first['task_id']}]" in line]
    assert len(during) >= 4
    for log in (beat.log_text(), worker.log_text()):
        assert_clean(log)


def test_job_that_follows_runs_at_most_once_more(beats, start_worker, journal, gates):
    """With dedupe="until_started", of the ticks during a run one waits, and the others are skipped."""
    worker: Worker = start_worker(JOBS, queues=JOBS_QUEUE, concurrency=3)
    beat = plain_beat(beats, follow="gated-follow")
    journal.wait_for("start")
    wait_until(lambda: beat.sent() >= 6, "five more ticks")
    stop(beat, worker)

    def skipped() -> int:
        return worker.log_text().count("Skipped jobs.follow")

    # A tick that is received only has not been compared with the run yet.
    wait_until(lambda: skipped() == beat.sent() - 2, "one runs, one waits, the others are skipped")
    for _ in range(3):
        gates("gated-follow")
    all_ended(journal, beat)
    assert runs(journal) == ["start", "end"] * 2
    assert skipped() == beat.sent() - 2
    for log in (beat.log_text(), worker.log_text()):
        assert_clean(log)


@pytest.mark.clock  # how far apart the beats tick is chance
def test_job_of_two_beats_runs_once_per_interval_if_it_rests(beats, start_worker, journal):
    """Two plain beats of which neither knows of the other; without at_least_for both fire."""
    start_worker(JOBS, queues=JOBS_QUEUE, concurrency=2)
    names = {"rest": "rest", "slow": "bare"}
    plain_beat(beats, **names)
    journal.wait_for("start", name="rest")
    # Half a second apart as their clocks would have them: the second starts between two ticks of the first.
    second = plain_beat(beats, **names)
    wait_until(lambda: second.sent() >= 2, "its first tick")
    begun = journal.entries(what="start", name="rest")[-1]["fence"]  # from now on there are two
    wait_until(lambda: min(beat.sent() for beat in beats.all) >= 16, "eight ticks of each")
    for beat in beats.all:
        stop(beat, entries=len(names))

    def fences(name: str) -> list[int]:  # microseconds of the server's clock at the acquisition
        return sorted(entry["fence"] for entry in journal.entries(what="start", name=name))

    rested = [two - one for one, two in zip(fences("rest"), fences("rest")[1:])]
    assert min(rested) >= 900_000
    fired = {name: sum(fence > begun for fence in fences(name)) for name in ("bare", "rest")}
    assert fired["bare"] > 1.3 * fired["rest"]


def test_job_of_which_two_may_run_has_two_runs_at_a_time(beats, start_worker, journal, gates):
    """limit=2, and a body that outlasts its interval: the first two ticks run, the others are skipped."""
    worker: Worker = start_worker(JOBS, queues=JOBS_QUEUE, concurrency=4)
    beat = plain_beat(beats, several="gated-several")
    journal.wait_for("conflict", 3)
    assert runs(journal) == ["start"] * 2
    stop(beat, worker)
    journal.wait_for("conflict", beat.sent() - 2)
    gates("gated-several", 2)
    all_ended(journal, beat)
    assert runs(journal) == ["start"] * 2 + ["end"] * 2
    for log in (beat.log_text(), worker.log_text()):
        assert_clean(log)
