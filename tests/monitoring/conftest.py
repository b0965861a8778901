"""A worker and a publisher, a Prometheus that scrapes them, and all that may happen to their calls."""

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
from prometheus_client import CollectorRegistry, start_http_server

from celery_setnx import metrics
from celery_setnx.terms import NewTerm, Whose, set_term
from tests.conftest import LOCK_DB, emptied
from tests.harness import GATE_S, Journal, Worker, wait_until
from tests.monitoring.dashboard import MONITORING
from tests.monitoring.prometheus import Prometheus
from tests.topologies.servers import HOST, free_port

WORK, MARKED, PACED = "tests.watchapp.work", "tests.watchapp.marked", "tests.monitoring.app.paced"


@pytest.fixture(scope="module")
def module_locks(server) -> Iterator[redis.Redis]:
    """As `locks`, for the whole module."""
    with redis.Redis.from_url(server.url(LOCK_DB), decode_responses=True) as client:
        yield from emptied(client, set())


@pytest.fixture(scope="module")
def scenes(server, module_locks) -> Iterator[Callable[[], Any]]:
    """Called for each scene: what may happen to a call, of a key of its own."""
    with redis.Redis.from_url(server.url(0), decode_responses=True) as client:
        client.delete(Journal.KEY, *client.scan_iter("gate:*"))

        def open_gate(name: str) -> None:
            client.rpush(f"gate:{name}", "open")
            client.expire(f"gate:{name}", GATE_S)

        from tests import watchapp

        yield lambda: watchapp.Scenes(module_locks, open_gate)


@pytest.fixture(scope="module")
def ports(module_worker, scenes, tmp_path_factory) -> Iterator[dict[str, int]]:
    """Those at which a prefork worker and this process, which publishes, serve their figures."""
    from tests.monitoring.app import app

    for _attempt in range(3):
        worker_port = free_port()
        worker: Worker = module_worker(
            "tests.monitoring.app",
            conf={"test_metrics_port": worker_port},
            environment={"PROMETHEUS_MULTIPROC_DIR": str(tmp_path_factory.mktemp("metrics"))},
        )
        if "are not served" not in worker.log_text():
            break
        worker.kill()  # another process took the port meanwhile
    registry = CollectorRegistry()
    metrics.prometheus(app, registry=registry, waiters=False)
    served, _thread = start_http_server(0, HOST, registry=registry)
    yield {"worker": worker_port, "publisher": served.server_port}
    served.shutdown()
    served.server_close()
    worker.stop()


@pytest.fixture(scope="module")
def rules(tmp_path_factory) -> Path:
    """The rules, each of which fires as soon as it is true."""
    path = tmp_path_factory.mktemp("rules") / "alerts.yml"
    text = (MONITORING / "alerts.yml").read_text()
    text = re.sub(r"^( +for:) \w+$", r"\1 0s", text, flags=re.MULTILINE)
    path.write_text(re.sub(r"\b15s\b", "2s", text))  # from look to look, as from scrape to scrape
    return path


def play(scenes: Callable[[], Any], prometheus: Prometheus) -> None:
    """Everything that is counted happens, once or more often."""
    from tests.monitoring.app import paced

    scenes().skip()
    # A rate needs events after the first sample.
    for counter in ("acquired_total", "hold_seconds_count"):
        query = f'celery_setnx_{counter}{{task="{WORK}"}}'
        wait_until(lambda query=query: prometheus.query(query), f"the first sample of {query}")
    for name in ("skip", "wait", "take_over", "lose", "free", "lapse", "supersede"):
        getattr(scenes(), name)()
    for _ in range(2):
        paced.delay("one").get(timeout=60)
    set_term(paced.app, Whose(scope=PACED), NewTerm("pause", 600))
    scenes().duplicate()


@pytest.fixture(scope="module")
def prometheus(scenes, ports, rules, tmp_path_factory) -> Iterator[Prometheus]:
    """It has seen all of `play`; one call holds its lock, and another waits for it, until the module ends."""
    with ExitStack() as stack:
        prometheus = Prometheus(tmp_path_factory.mktemp("prometheus"), ports, rules)
        stack.callback(prometheus.kill)
        prometheus.wait_until_ready()
        play(scenes, prometheus)
        last = scenes()
        held, waits = last.conflict("wait")
        yield prometheus
        last.end(held, waits)
