"""The metrics: exact figures over HTTP from a prefork worker, and by OpenTelemetry; no cost when not used."""

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from celery_setnx import SetnxLock, metrics, signals
from celery_setnx.doctor.trial import TRIAL
from celery_setnx.keys import digest
from celery_setnx.lock.names import key_name
from celery_setnx.lock.record import Holder
from celery_setnx.lock.survey import survey
from celery_setnx.metrics import FIGURES
from tests.harness import Worker, age, wait_until
from tests.test_signals import MARKED, NEWEST, WORK, apart
from tests.topologies.servers import free_port

__all__ = ["apart"]  # a fixture

Scrape = dict[tuple[str, ...], float]


def read(text: str) -> Scrape:
    """The samples of ours, but for buckets and times, by name and values of their labels."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.startswith("celery_setnx_") and not sample.name.endswith(("_bucket", "_created")):
                name = sample.name.removeprefix("celery_setnx_")
                labels = [value for _, value in sorted(sample.labels.items(), reverse=True)]
                found[(name, *labels)] = sample.value
    return found


def scrape(port: int) -> Scrape:
    """What is served at a port now."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        return read(reply.read().decode())


class Measured:
    """A prefork worker with two processes that serves its metrics; what it has counted since a test began."""

    def __init__(self, start: Callable[..., Worker], files: Path) -> None:
        self.port = free_port()
        environment = {"PROMETHEUS_MULTIPROC_DIR": str(files / "new")}
        self.worker = start("tests.watchapp", conf={"test_metrics_port": self.port}, environment=environment)
        self.before: Scrape = {}

    def counts(self) -> Scrape:
        """By how much the figures have grown; those that have not are left out."""
        now = scrape(self.port)
        grown = {name: value - self.before.get(name, 0) for name, value in now.items()}
        return {name: by for name, by in grown.items() if by or name not in self.before}

    def wait_for(self, expected: Scrape) -> Scrape:
        """The counts, once these are among them."""

        def agrees() -> Scrape:
            found = self.counts()
            return found if expected.items() <= found.items() else {}

        return wait_until(agrees, f"{expected}; it has counted {self.counts()}")


@pytest.fixture(scope="module")
def serving(module_worker, tmp_path_factory) -> Iterator[Measured]:
    """That worker, for the whole module."""
    measured = Measured(module_worker, tmp_path_factory.mktemp("metrics"))
    yield measured
    measured.worker.stop()


@pytest.fixture
def measured(serving) -> Measured:
    """The same, and counts that start at nothing."""
    serving.before = scrape(serving.port)
    return serving


@pytest.fixture
def app() -> Celery:
    """An app of its own, with the task that `send_each` tells of."""
    app = Celery("measured", set_as_current=False)

    @app.task(name="shop.settle", shared=False)
    def settle() -> None: ...

    return app


@pytest.fixture
def scene(apart) -> Callable[..., Any]:
    """Plays a scene of `tests.watchapp` in the workers of a queue."""
    return lambda name, queue="celery": getattr(apart(queue), name)()


def send_each(app: Celery) -> None:
    """One of each signal, two of the times at 2 s."""
    about = {"sender": app.tasks["shop.settle"], "task_id": "1", "key": "t:{shop.settle:0}"}
    signals.lock_acquired.send(**about, fence=1, waited_s=2.0)
    signals.lock_conflict.send(**about, holder=None, remaining_s=1.0, policy="skip")
    signals.lock_taken_over.send(**about, fence=1, holder=None)
    signals.lock_lost.send(**about, fence=1, reason="gone")
    signals.uniqueness_lapsed.send(**about, marked_by=None)
    signals.call_deduplicated.send(**about, state="queued")
    signals.call_superseded.send(**about, superseded_by="2")
    signals.lock_released.send(**about, fence=1, outcome="released", held_s=2.0)
    signals.lock_released.send(**about, fence=None, outcome="freed", held_s=None)


ONCE = ("acquired_total", "taken_over_total", "lost_total", "lapsed_total", "superseded_total")
LABELLED = [("conflicts", "skip"), ("duplicates", "queued"), ("released", "released"), ("released", "freed")]
EACH = {
    **{(name, "shop.settle"): 1 for name in (*ONCE, "wait_seconds_count", "hold_seconds_count")},
    **{(f"{name}_total", "shop.settle", label): 1 for name, label in LABELLED},
    **{(f"{name}_seconds_sum", "shop.settle"): 2 for name in ("wait", "hold")},
}


def test_scrape_of_a_prefork_worker_counts_exactly_what_happened(measured, scene):
    """The sum of its processes over HTTP; of a retry that comes back, every conflict."""
    for name in ("skip", "skip", "wait", "fail", "take_over", "lose", "lapse", "supersede"):
        scene(name)
    released = {("released_total", task, "released"): n for task, n in ((MARKED, 1), (NEWEST, 1), (WORK, 6))}
    found = measured.wait_for(released)
    times = [name for name in found if name[0].endswith("_seconds_sum")]
    assert all(found.pop(name) >= 0 for name in times)
    # Acquired by four holders, the woken one, the one that took over, and the one that lost.
    of_work = {"acquired_total": 7, "taken_over_total": 1, "lost_total": 1, "wait_seconds_count": 7}
    once = {"acquired_total": 1, "wait_seconds_count": 1, "hold_seconds_count": 1}
    assert found == {
        **{(name, WORK): count for name, count in of_work.items()},
        **{(name, task): count for name, count in once.items() for task in (MARKED, NEWEST)},
        ("lapsed_total", MARKED): 1,
        ("superseded_total", NEWEST): 1,
        **{("conflicts_total", WORK, policy): n for policy, n in (("skip", 2), ("wait", 1), ("raise", 1))},
        **released,
        ("hold_seconds_count", WORK): 6,
    }


def test_killed_process_keeps_its_counts(measured, scene, journal):
    """kill -9 of every process in turn: what they counted stays, and what their successors count is added."""
    for _ in range(3):
        scene("skip")
    scene("free")
    measured.wait_for({("acquired_total", WORK): 4, ("released_total", WORK, "freed"): 1})
    for pid in {entry["pid"] for entry in journal.entries(what="start")}:
        if Path(f"/proc/{pid}").exists():
            os.kill(pid, signal.SIGKILL)
    for _ in range(2):
        scene("skip")
    found = measured.wait_for({("released_total", WORK, "released"): 5})
    counted = {("acquired_total", WORK): 6, ("conflicts_total", WORK, "skip"): 5}
    assert {**counted, ("released_total", WORK, "freed"): 1}.items() <= found.items()
    assert len({entry["pid"] for entry in journal.entries(what="start")}) > 1


def test_processes_of_the_pool_do_not_keep_the_port(measured, scene, journal):
    """Neither the first ones nor their successors: one that outlives its parent is in nobody's way."""
    scene("free")
    (killed,) = {entry["pid"] for entry in journal.entries(what="start")}
    parent = measured.worker.process.pid
    children = wait_until(lambda: _children_without(parent, killed), "the successor")
    listening = _listening_socket(measured.port)
    assert listening in _sockets(parent)
    for child in children:
        wait_until(lambda child=child: listening not in _sockets(child), f"{child} has closed the port")


def _children_without(parent: int, killed: int) -> set[int]:
    """The two processes of the pool, once the killed one is replaced."""
    text = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    found = {int(pid) for pid in text.split()} - {killed}
    return found if len(found) == 2 else set()


def _listening_socket(port: int) -> str:
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{port:04X}") and fields[3] == "0A":
            return f"socket:[{fields[9]}]"
    raise AssertionError(f"nobody listens at {port}")


def _sockets(pid: int) -> set[str]:
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed meanwhile
            found.add(os.readlink(path))
    return found


def test_waiters_and_holders_are_asked_for_at_the_scrape(measured, apart):
    """By scope, of Redis: whoever scrapes sees the same."""
    scenes = apart("celery")
    holder, second = scenes.conflict("wait")
    measured.wait_for({("waiters", WORK): 1, ("held", WORK): 1})
    scenes.end(holder, second)
    wait_until(lambda: not {("waiters", WORK), ("held", WORK)} & set(scrape(measured.port)), "nobody waits")


def test_prefork_worker_without_a_directory_does_not_start(start_worker):
    """Its processes would count for themselves; the error says what to set."""
    with pytest.raises(AssertionError, match="PROMETHEUS_MULTIPROC_DIR"):
        start_worker("tests.watchapp", conf={"test_metrics_port": free_port()})


def test_pool_of_threads_needs_no_directory(start_worker, scene):
    """All in one process, so its registry is served."""
    conf = {"test_metrics_port": free_port()}
    worker = start_worker("tests.watchapp", pool="threads", queues="threads", conf=conf)
    scene("skip", "threads")
    assert scrape(conf["test_metrics_port"])["conflicts_total", WORK, "skip"] == 1
    worker.stop()


def test_prometheus_twice_counts_every_figure_once(app):
    """Each signal, and its times; of an unknown time nothing. As when `prometheus` and `serve` are called.

    Of another app's tasks nothing is counted: each app has its own figures.
    """
    registry, others = CollectorRegistry(), CollectorRegistry()
    metrics.prometheus(app, registry=registry, waiters=False)
    metrics.prometheus(app, registry=registry, waiters=False)
    metrics.prometheus(Celery("other", set_as_current=False), registry=others, waiters=False)
    send_each(app)
    assert read(generate_latest(registry).decode()) == EACH
    assert read(generate_latest(others).decode()) == {}


def test_conflicts_with_nothing_but_the_pace_are_counted_apart(app):
    """They are conflicts, too; one can tell the calls that wait from those that are skipped."""
    registry = CollectorRegistry()
    metrics.prometheus(app, registry=registry, waiters=False)
    about = {"sender": app.tasks["shop.settle"], "task_id": "1", "key": "k", "remaining_s": 1.0}
    for state, policy in (("paced", "wait"), ("paced", "skip"), ("running", "wait")):
        signals.lock_conflict.send(**about, policy=policy, holder=Holder("", 1.0, 0, state, None))
    counts = read(generate_latest(registry).decode())
    assert counts == {
        ("conflicts_total", "shop.settle", "wait"): 2,
        ("conflicts_total", "shop.settle", "skip"): 1,
        ("paced_total", "shop.settle", "wait"): 1,
        ("paced_total", "shop.settle", "skip"): 1,
    }


def test_figures_stand_when_redis_cannot_be_asked(app, caplog):
    """The waiters are missing from the scrape, and a line says why."""
    app.conf.setnx_url, registry = "redis://127.0.0.1:1/0", CollectorRegistry()
    metrics.prometheus(app, registry=registry)
    send_each(app)
    assert read(generate_latest(registry).decode()) == EACH
    assert caplog.text.count("missing from the metrics") == 1


def test_held_permits_are_counted_by_scope_in_one_survey(server, locks, app, monkeypatch):
    """Each permit of each lock, but for those whose deadlines have passed; asked once for all gauges."""
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t")
    keys = {name: key_name("t", name[0], digest([name])) for name in ("a1", "a2", "b1", "b2", "c1")}
    for name, limit, count in (("a1", 3, 2), ("a2", 3, 3), ("b1", 1, 1), ("c1", 2, 2)):
        for _ in range(count):
            assert SetnxLock(locks, keys[name], limit=limit).acquire().acquired
    age(locks, keys["c1"], 30)
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    metrics.prometheus(app, registry=registry)
    metrics.opentelemetry(app, meter=MeterProvider([reader]).get_meter("test"), waiters=True)
    assert held(read(generate_latest(registry).decode())) == {("held", "a"): 5, ("held", "b"): 1}
    surveys: list[str] = []

    def counted(client: Any, prefix: str, **which: bool) -> Any:
        surveys.append(prefix)
        return survey(client, prefix, **which)

    monkeypatch.setattr(metrics, "survey", counted)
    for of_b in (1, 2):
        (gauges,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
        points = {
            (gauge.name, point.attributes["scope"]): point.value
            for gauge in gauges.metrics
            for point in gauge.data.data_points
            if gauge.name != "celery_setnx.oldest"
        }
        assert points == {("celery_setnx.held", "a"): 5, ("celery_setnx.held", "b"): of_b}
        assert len(surveys) == of_b
        SetnxLock(locks, keys["b2"]).acquire()


def test_lock_that_a_worker_tries_as_it_starts_is_no_held_lock(server, locks, app):
    """It is no task's: no scope of its name comes and goes with each start."""
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t")
    for scope in (TRIAL, "a"):
        assert SetnxLock(locks, key_name("t", scope, digest(["1"]))).acquire().acquired
    registry = CollectorRegistry()
    metrics.prometheus(app, registry=registry)
    assert held(read(generate_latest(registry).decode())) == {("held", "a"): 1}
    assert ("oldest_seconds", TRIAL) not in read(generate_latest(registry).decode())


def held(figures: dict[Any, Any]) -> dict[Any, Any]:
    """How many locks are held, of all figures."""
    return {name: count for name, count in figures.items() if name[0] != "oldest_seconds"}


def test_age_of_the_oldest_lock_is_told_by_scope(server, locks, app):
    """Of several the oldest; one whose deadline has passed does not count."""
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t")
    for scope, key, since_s, lease in (("a", "1", 5000, 9000), ("a", "2", 100, 600), ("b", "1", 900, 600)):
        name = key_name("t", scope, digest([key]))
        assert SetnxLock(locks, name, lease=lease).acquire().acquired
        age(locks, name, since_s)
    registry, reader = CollectorRegistry(), InMemoryMetricReader()
    metrics.prometheus(app, registry=registry)
    metrics.opentelemetry(app, meter=MeterProvider([reader]).get_meter("test"), waiters=True)
    told = {name: s for name, s in read(generate_latest(registry).decode()).items() if "oldest" in name[0]}
    assert told.keys() == {("oldest_seconds", "a")}
    assert 5000 <= told[("oldest_seconds", "a")] < 5600
    (gauges,) = reader.get_metrics_data().resource_metrics[0].scope_metrics
    (oldest,) = [gauge for gauge in gauges.metrics if gauge.name == "celery_setnx.oldest"]
    assert (oldest.unit, len(oldest.data.data_points)) == ("s", 1)


def test_opentelemetry_counts_every_figure(server, locks, app):
    """The same table, with a unit for times; and who waits in line, if that is asked for."""
    from tests.watchapp import telemetry

    app.conf.update(setnx_url=server.url(1), setnx_prefix="t")
    line = "t:{shop.settle:00000000000000000000000000000000}:line"
    locks.zadd(line, {"a": 1, "b": 2})
    locks.expire(line, 60)
    reader = InMemoryMetricReader()
    metrics.opentelemetry(app, meter=MeterProvider([reader]).get_meter("test"), waiters=True)
    send_each(app)
    assert telemetry(reader) == {
        name.removesuffix("_total").removesuffix("_seconds_count"): value
        for (name, *labels), value in EACH.items()
        if not name.endswith("_sum") and labels[-1] != "freed"
    } | {"released": 2, "waiters": 2}


def test_opentelemetry_counts_in_each_process_of_a_prefork_worker(start_worker, scene, tmp_path):
    """With the provider that `worker_process_init` has set; a successor begins anew.

    Its port for metrics is taken: the tasks matter more, and the log says what to do.
    """
    from tests import watchapp

    with socket.create_server(("127.0.0.1", 0)) as taken:
        worker = start_worker(
            "tests.watchapp",
            concurrency=1,
            queues="other",
            conf={"test_metrics_port": taken.getsockname()[1], "test_opentelemetry": True},
            environment={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path)},
        )
    names = ("acquired", "taken_over", "released", "wait", "hold")
    for _ in range(2):
        scene("free", "other")
        scene("take_over", "other")
        found = watchapp.measured.apply_async(queue="other").get(timeout=60)
        assert found == dict.fromkeys(names, 1)
    worker.wait_for_log("The metrics of this worker are not served")


def test_labels_never_name_a_key():
    """Keys are without number, and a label must not be."""
    assert {label for figure in FIGURES for label in figure.labels} == {"task", "policy", "state", "outcome"}


@pytest.mark.parametrize(
    ("ask", "extra"), [(metrics.prometheus, "prometheus"), (metrics.opentelemetry, "opentelemetry")]
)
def test_missing_extra_is_named(app, ask, extra, monkeypatch):
    """The error says what to install."""
    for module in ("prometheus_client", "opentelemetry.metrics"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"pip install 'celery_setnx\[{extra}\]'"):
        ask(app)


def test_nothing_of_it_is_imported_unless_asked_for(server, locks):
    """Importing the package and running a guarded call loads neither the metrics nor their client."""
    code = (
        "import sys, celery, celery_setnx\n"
        "from celery.contrib.testing.worker import start_worker\n"
        "app = celery.Celery('lean', broker=sys.argv[1], backend=sys.argv[1], set_as_current=False)\n"
        "def body(): return 7\n"
        "task = app.task(name='lean', base=celery_setnx.SingletonTask)(body)\n"
        "with start_worker(app, pool='solo', perform_ping_check=False):\n"
        "    print(task.delay().get(timeout=60))\n"
        "names = ('celery_setnx.metrics', 'prometheus_client')\n"
        "print([name for name in names if name in sys.modules])\n"
    )
    found = subprocess.run([sys.executable, "-c", code, server.url(13)], capture_output=True, text=True)
    assert found.stdout.splitlines() == ["7", "[]"], found.stderr
