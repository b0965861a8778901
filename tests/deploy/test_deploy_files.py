"""How workers are told to end: each snippet is read by its own tool, and the numbers fit each other."""

import signal
import subprocess
import sys
from functools import partial

import pytest
from celery import Celery

from celery_setnx.beat import leader
from celery_setnx.options import Options, settings
from tests.deploy import snippets
from tests.deploy.snippets import (
    COMPOSE,
    KUBERNETES,
    SOFT,
    UNIT,
    compose_says,
    kubernetes_says,
    of_deployment,
    of_service,
    of_unit,
    systemd_says,
)
from tests.docs.pages import ROOT, text_of
from tests.harness import Worker, wait_until

MARGIN_S = 30.0
ENDINGS = {
    "systemd": of_unit,
    "kubernetes": partial(of_deployment, "proj-worker"),
    "compose alpha": partial(of_service, "alpha"),
    "compose beta": partial(of_service, "beta"),
}
READERS = {systemd_says: UNIT, kubernetes_says: KUBERNETES, compose_says: COMPOSE}


@pytest.fixture
def workers_app(server):
    """The module of tasks that the workers run; it can be imported once there is a server."""
    from tests import workerapp

    return workerapp


@pytest.mark.parametrize("says", READERS, ids=["systemd", "kubernetes", "compose"])
def test_file_is_one_for_its_tool(says, tmp_path):
    """systemd-analyze, strict schemas and docker-compose config with every profile have nothing to say."""
    assert says(READERS[says].read_text(), tmp_path) == ""


@pytest.mark.parametrize(
    ("says", "right", "wrong", "said"),
    [
        (systemd_says, "TimeoutStopSec=", "TimeoutStopSecs=", "Unknown key"),
        (systemd_says, "KillMode=mixed", "KillMode=some", "Failed to parse kill mode"),
        (systemd_says, snippets.PROGRAM, "/nowhere/celery", "not executable"),
        (kubernetes_says, "GracePeriodSeconds: 90", "GracePeriod: 90", "terminationGracePeriod"),
        (kubernetes_says, "GracePeriodSeconds: 90", "GracePeriodSeconds: 90s", "90s"),
        (compose_says, "stop_grace_period:", "stop_grace:", "stop_grace"),
        (compose_says, "stop_grace_period: 40s", "stop_grace_period: soon", "soon"),
    ],
)
def test_wrong_file_is_found_by_its_tool(says, right, wrong, said, tmp_path):
    """An unknown key, a value that is none, a program that is not there."""
    text = READERS[says].read_text()
    assert right in text
    assert said in says(text.replace(right, wrong), tmp_path)


@pytest.mark.parametrize("name", ENDINGS)
def test_worker_is_killed_a_margin_after_its_soft_shutdown(name):
    """The grace period is the soft shutdown and 30 s; and SIGTERM asks for a soft shutdown."""
    ending = ENDINGS[name]()
    assert ending.grace_s == ending.soft_s + MARGIN_S
    assert ending.environment["REMAP_SIGTERM"] == "SIGQUIT"


@pytest.mark.parametrize(
    ("name", "file"), [("systemd", UNIT), ("kubernetes", KUBERNETES), ("compose alpha", COMPOSE)]
)
def test_page_has_the_numbers_of_the_files(name, file):
    """docs/runbook.md, in the row that links to the file."""
    page, ending = text_of("docs/runbook.md"), ENDINGS[name]()
    (row,) = [line for line in page.splitlines() if f"../{file.relative_to(ROOT)})" in line]
    assert row.endswith(f"| {ending.soft_s:g} s | {ending.grace_s:g} s |")


def test_systemd_and_kubernetes_start_the_same_worker():
    """The commands differ in the path alone, and are killed after the same time."""
    unit, manifest = of_unit(), of_deployment("proj-worker")
    assert unit.command[0] == snippets.PROGRAM
    assert ["celery", *unit.command[1:]] == manifest.command
    assert unit.grace_s == manifest.grace_s


def test_numbers_that_the_comments_name_are_ours():
    """The lease of a lock, and of a beat, to which a beat's grace period leaves room."""
    lease_s, beat_lease_s = Options().lease, settings(Celery("proj").conf).beat_lease
    assert f"its lease ({lease_s:g} s)" in UNIT.read_text().replace("\n# ", " ")
    assert f"its lease ({lease_s:g} s)" in KUBERNETES.read_text()
    assert f"(setnx_beat_lease, {beat_lease_s:g} s)" in KUBERNETES.read_text()
    assert of_deployment("proj-beat").grace_s > beat_lease_s


def test_probe_is_no_quicker_than_a_shutdown():
    """A worker has no heartbeat in its soft shutdown, and must not be killed for that."""
    pod = snippets.deployments()["proj-worker"]["spec"]["template"]["spec"]
    command = pod["containers"][0]["livenessProbe"]["exec"]["command"][-1]
    age_s = float(command.partition("-newermt '-")[2].partition(" seconds'")[0])
    assert age_s > pod["terminationGracePeriodSeconds"]


def test_worker_that_is_told_to_end_hands_back_what_does_not(
    start_worker, locks, journal, gates, name, workers_app, monkeypatch
):
    """The unit's own command, but for the app and the number: SIGTERM, and the next worker runs the call."""
    ending = of_unit()
    command = [each for each in ending.command if not each.startswith(SOFT)][1:]
    command[command.index("proj")] = "tests.workerapp"

    def popen(_command, **options):
        options["env"] |= ending.environment
        return subprocess.Popen([sys.executable, "-m", "celery", *command, f"{SOFT}1"], **options)

    monkeypatch.setattr(Worker, "popen", staticmethod(popen))
    first = start_worker()
    gate = f"gated-{name}"
    call = workers_app.late.apply_async((gate,))
    journal.wait_for("start", task_id=call.id)
    asked = workers_app.app.control.inspect(timeout=30, limit=1)
    wait_until(lambda: any((asked.active() or {}).values()), "the worker has heard that the body runs")
    first.process.send_signal(signal.SIGTERM)
    first.wait_for_log("Initiating Soft Shutdown, terminating in 1.0 seconds")
    wait_until(lambda: first.process.poll() is not None, f"the worker has ended; its log: {first.log}")
    start_worker()
    journal.wait_for("start", 2, task_id=call.id)
    gates(gate)
    assert call.get(timeout=60) == gate
    assert len(journal.entries(what="end", task_id=call.id)) == 1


def test_beat_of_the_manifest_leads_and_gives_its_lead_back(locks, workers_app, tmp_path):
    """Its own command, but for the app and the schedule's file; SIGTERM ends it with code 0."""
    command = of_deployment("proj-beat").command[1:]
    command[command.index("proj")] = "tests.workerapp"
    command[command.index("/tmp/schedule")] = str(tmp_path / "schedule")
    log = tmp_path / "beat.log"
    with log.open("wb") as said:
        beat = subprocess.Popen(
            [sys.executable, "-m", "celery", *command], stdin=subprocess.DEVNULL, stdout=said, stderr=said
        )
    try:
        wait_until(lambda: "Leads now" in log.read_text() or beat.poll() is not None, "the beat leads")
        assert "Leads now" in log.read_text(), log.read_text()
        assert leader(workers_app.app) is not None
        beat.terminate()
        assert beat.wait(60) == 0
        assert leader(workers_app.app) is None
    finally:
        beat.kill()
        beat.wait()
