"""flower and celery-prometheus-exporter beside ours, with workers that send events."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import httpx
import psutil
import pytest

from examples.embedded import EmbeddedServer
from tests.ecosystem.play import QUEUE, Play
from tests.harness import Worker, wait_until

APP = "tests.ecosystem.watched"


@pytest.fixture(scope="module", autouse=True)
def worker_with_events(module_worker: Callable[..., Worker]) -> Worker:
    return module_worker(APP, queues=QUEUE, arguments=("-E",))


class Monitor:
    """A process that follows events, with a log."""

    def __init__(self, log: Path, *command: str, **environment: str) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, *command], stdout=out, stderr=out, env={**os.environ, **environment}
            )

    def said(self, text: str) -> int:
        """How often it has logged this; it has not ended."""
        assert self.process.poll() is None, self.log.read_text()
        return self.log.read_text().count(text)


@pytest.fixture
def monitor(tmp_path: Path) -> Iterator[Callable[..., Monitor]]:
    """Starts a monitor, which is killed in the end."""
    started: list[Monitor] = []

    def monitor(*command: str, **environment: str) -> Monitor:
        started.append(Monitor(tmp_path / "monitor.log", *command, **environment))
        return started[-1]

    yield monitor
    for one in started:
        one.process.kill()
        one.process.wait()


@pytest.fixture
def flower(monitor: Callable[..., Monitor], play: Play) -> Iterator[httpx.Client]:
    """A client of a Flower that has seen an event. It listens at a socket, whose path must be short."""
    with TemporaryDirectory() as directory:
        socket = f"{directory}/flower"
        command = ("-m", "celery", "-A", APP, "flower", f"--unix_socket={socket}")
        process = monitor(*command, FLOWER_UNAUTHENTICATED_API="true")
        wait_until(lambda: process.said("Visit me"), "Flower has started", 180)
        transport = httpx.HTTPTransport(uds=socket)
        options = {"base_url": "http://flower", "trust_env": False, "timeout": 60}
        with httpx.Client(transport=transport, **options) as client:
            wait_until(lambda: play.greet() and client.get("/api/tasks").json(), "Flower has seen a task")
            yield client
        assert not process.said("Traceback")


def test_flower_shows_how_calls_end(flower: httpx.Client, play: Play):
    """Final states are right, a parked call is LOCK-WAITING, and our events are counted."""

    def shows(**states: str) -> None:
        def states_shown() -> dict[str, str]:
            shown = flower.get("/api/tasks").json()
            return {task_id: shown.get(task_id, {}).get("state", "") for task_id in states}

        wait_until(lambda: states_shown() == states, f"Flower shows {states}, not {states_shown()}")

    _, held = play.holder()
    _, waited = play.parked()
    skipped = play.reached("conflict", play.tasks.skips.delay(play.name))
    retried = play.reached("retry", play.tasks.retries.delay(play.name))
    refused = play.failed("refuses", play.name)
    failed = play.failed("fails", play.name)
    ended = {skipped: "SUCCESS", refused: "FAILURE", failed: "FAILURE"}
    shows(**ended, **{held: "STARTED", waited: "LOCK-WAITING"})
    told = flower.get("/api/tasks").json()
    # What the key was made of.
    assert f"'about': 'name=\\'{play.name}\\''" in told[skipped]["result"]
    assert f"watched.waits(name='{play.name}')[{held}]" in told[refused]["exception"]
    play.let_go(held, waited, retried)
    shows(**ended, **dict.fromkeys((held, waited, retried), "SUCCESS"))
    for event in ("task-lock-conflict", "task-lock-waiting", "task-lock-woken"):
        assert f'{{task="watched.waits",type="{event}",' in flower.get("/metrics").text


def test_exporter_starts_over_at_each_event_that_is_not_celerys(
    monitor: Callable[..., Monitor], server: EmbeddedServer, play: Play
):
    """At a plain task's own as at ours: its counts are zero again. A task that sends no events spares it."""
    from tests.ecosystem.watched import BROKER_DB

    broker = ("--broker", server.url(BROKER_DB))
    exporter = monitor("-m", "celery_prometheus_exporter", *broker, "--addr", "127.0.0.1:0")

    def successes() -> float:
        """How many it has counted; -1 while it serves nothing."""
        sockets = psutil.Process(exporter.process.pid).net_connections()
        listening = [socket for socket in sockets if socket.status == "LISTEN"]
        if not listening:
            return -1
        url = f"http://127.0.0.1:{listening[0].laddr.port}/metrics"
        served = httpx.get(url, trust_env=False, timeout=60).text
        return sum(map(float, re.findall(r'^celery_tasks\{state="SUCCESS"\} (.+)$', served, re.MULTILINE)))

    def counts(more_than: float = 0) -> None:
        wait_until(lambda: play.greet() and successes() > more_than, "it counts", 180)

    def fails_at(act: Callable[[], object], event: str) -> None:
        counts()
        wait_until(lambda: act() and exporter.said(f"KeyError: '{event}'"), f"it has failed at {event}")
        wait_until(lambda: successes() == 0, "it has forgotten its counts")

    _, held = play.holder()
    counts()
    play.reached("conflict", play.tasks.quiet.delay(play.name))
    counts(more_than=successes())
    assert not exporter.said("KeyError")
    fails_at(lambda: play.greet("task-progress"), "progress")
    fails_at(lambda: play.reached("conflict", play.tasks.skips.delay(play.name)), "lock-conflict")
    play.let_go(held)
