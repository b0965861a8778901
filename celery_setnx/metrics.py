"""Counters and histograms of locks, for Prometheus and OpenTelemetry. Nothing runs unless it is asked for.

What is counted is the table `FIGURES`; the two exporters only say where it goes. No label is a key.
"""

from __future__ import annotations

import importlib
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from celery import Celery, bootsteps
from celery.utils.dispatch import Signal

from celery_setnx.connection import client_for
from celery_setnx.doctor.trial import TRIAL
from celery_setnx.exceptions import OptionError
from celery_setnx.forks import between_forks
from celery_setnx.lock.live import live_terms_of, live_terms_of_tasks, pause_in
from celery_setnx.lock.survey import survey
from celery_setnx.log import Log
from celery_setnx.options import settings_of
from celery_setnx.signals import (
    call_deduplicated,
    call_superseded,
    lock_acquired,
    lock_conflict,
    lock_lost,
    lock_released,
    lock_taken_over,
    uniqueness_lapsed,
)
from celery_setnx.wording import unstopped

logger = Log("celery_setnx")

BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 3600.0)
"""Upper bounds of the histograms' buckets, in seconds."""

_PREFIX = "celery_setnx"
_GAUGES = {
    "waiters": "Calls that wait in line for a lock.",
    "held": "Locks that are held, each permit counted.",
    "oldest_seconds": "Seconds since the oldest of the locks that are held was acquired.",
    "paused": "Pauses that count, of a whole scope or of a key.",
}
_UNITS = {"waiters": "{call}", "held": "{permit}", "oldest_seconds": "s", "paused": "{pause}"}
_NOT_SERVED = (
    "The metrics of this worker are not served: %s:%d cannot be used (%s). It works without. "
    "Give every worker of a host a port of its own."
)


@dataclass(frozen=True)
class Figure:
    """What is taken from a signal: a count or, with `seconds`, that argument of it, unless it is None.

    With `state` only those signals count whose holder is in it.
    """

    name: str
    signal: Signal
    text: str
    label: str | None = None  # the argument that is a label beside the task
    seconds: str | None = None
    state: str | None = None

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of its labels."""
        return ("task", self.label) if self.label else ("task",)


FIGURES = (
    Figure("acquired", lock_acquired, "Locks that calls have acquired."),
    Figure("conflicts", lock_conflict, "Calls that found their lock held, by policy.", "policy"),
    Figure("paced", lock_conflict, "Conflicts because of the rate alone.", "policy", state="paced"),
    Figure("taken_over", lock_taken_over, "Locks that were taken over from a dead holder."),
    Figure("lost", lock_lost, "Locks that a living holder has lost."),
    Figure("lapsed", uniqueness_lapsed, "Marks that were gone, or another's, when their call started."),
    Figure("duplicates", call_deduplicated, "Calls not published, by the earlier call's state.", "state"),
    Figure("superseded", call_superseded, "Calls that were skipped because a newer one runs instead."),
    Figure("released", lock_released, "Locks that were given back, by outcome.", "outcome"),
    Figure("wait", lock_acquired, "Seconds from a call's first conflict to its lock.", seconds="waited_s"),
    Figure("hold", lock_released, "Seconds for which a call had its lock.", seconds="held_s"),
)

Record = Callable[[Figure, float, dict[str, str]], None]


def prometheus(app: Celery, *, registry: Any = None, waiters: bool = True) -> None:
    """Count what happens to an app's locks in this process, and in those that are forked from it.

    To be called where the app is made. A prefork worker needs the environment variable
    `PROMETHEUS_MULTIPROC_DIR`, see `serve`. Calling it again for the same app and registry changes nothing.

    Args:
        app: The app.
        registry: Where the figures are. Defaults to prometheus_client's own, `REGISTRY`.
        waiters: Whether each scrape of the registry asks Redis who waits in line, and what is held. Defaults
            to True. In multiprocess mode the registry itself is not scraped, and `serve` asks.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    client = _extra("prometheus_client", "prometheus")
    registry = client.REGISTRY if registry is None else registry
    if _is_multiprocess(client):
        os.makedirs(os.environ["PROMETHEUS_MULTIPROC_DIR"], exist_ok=True)
    elif waiters and app not in _registered.setdefault(registry, set()):
        registry.register(_Gauges(app))
        _registered[registry].add(app)
    families = _families.get(registry)
    if families is None:
        families = _families[registry] = {figure: _family(client, figure, registry) for figure in FIGURES}

    def record(figure: Figure, amount: float, labels: dict[str, str]) -> None:
        family = families[figure].labels(**labels)
        (family.observe if figure.seconds else family.inc)(amount)

    _follow(app, record, f"prometheus:{id(registry)}")


def serve(
    app: Celery, port: int, address: str = "0.0.0.0", *, registry: Any = None, waiters: bool = True
) -> None:
    """Count as `prometheus` does, and let each worker of the app serve its figures over HTTP.

    The worker's parent serves the sum of all its processes, those included that have died. In a prefork
    worker they write their counts to files, for which prometheus_client needs `PROMETHEUS_MULTIPROC_DIR` in
    the environment before the worker starts: a directory of this worker alone, empty at first.

    Args:
        app: The app.
        port: The port.
        address: The address. Defaults to all.
        registry: Where the figures are. Defaults to prometheus_client's own, `REGISTRY`.
        waiters: Whether each scrape asks Redis who waits in line, and what is held. Defaults to True.

    Raises:
        ImportError: prometheus_client is not installed.
    """
    client = _extra("prometheus_client", "prometheus")
    registry = client.REGISTRY if registry is None else registry
    prometheus(app, registry=registry, waiters=waiters)

    class MetricsServer(bootsteps.StartStopStep):  # type: ignore[misc]
        """Serves the figures of a worker while it runs."""

        server: Any = None

        def start(self, worker: Any) -> None:
            """Serve, unless the figures of the pool's processes would be lost."""
            _check_pool(client, worker)
            served = _sum_of_all(client, app, waiters) if _is_multiprocess(client) else registry
            try:
                self.server, _thread = client.start_http_server(port, address, registry=served)
            except OSError as error:
                logger.error(_NOT_SERVED, address, port, unstopped(error))
                return
            # A child that outlives its parent must not keep the port.
            os.register_at_fork(after_in_child=self.server.socket.close)

        def stop(self, worker: Any) -> None:
            """Serve no more."""
            if self.server is not None:
                self.server.shutdown()
                self.server.server_close()

    app.steps["worker"].add(MetricsServer)


def opentelemetry(app: Celery, *, meter: Any = None, waiters: bool = False) -> None:
    """Count what happens to an app's locks as instruments of OpenTelemetry.

    Without a meter the instruments are made by the global `MeterProvider` at the first count of each process:
    set it in the signal `worker_process_init`, because its exporting thread does not survive a fork. Call
    this once per app; twice counts twice.

    Args:
        app: The app.
        meter: Makes the instruments, at once. Defaults to the global provider's, when it is needed.
        waiters: Whether each export asks Redis who waits in line, and what is held. Every process that
            exports would report the same, so ask in one of them. Defaults to False.

    Raises:
        ImportError: opentelemetry-api is not installed.
    """
    api = _extra("opentelemetry.metrics", "opentelemetry")
    made: dict[int, dict[Figure, Any]] = {}

    def instruments() -> dict[Figure, Any]:
        pid = os.getpid() if meter is None else 0
        if pid not in made:
            made[pid] = _instruments(api, app, meter or api.get_meter(_PREFIX), waiters)
        return made[pid]

    def record(figure: Figure, amount: float, labels: dict[str, str]) -> None:
        instrument = instruments()[figure]
        (instrument.record if figure.seconds else instrument.add)(amount, labels)

    if meter is not None:
        instruments()
    _follow(app, record, f"opentelemetry:{id(made)}")


def _follow(app: Celery, record: Record, whose: str) -> None:
    """Record every figure of an app from its signal."""
    for figure in FIGURES:
        uid = f"celery_setnx.metrics:{whose}:{id(app)}:{figure.name}"
        figure.signal.connect(partial(_take, app, figure, record), weak=False, dispatch_uid=uid)


def _take(app: Celery, figure: Figure, record: Record, sender: Any, **details: Any) -> None:
    amount = details[figure.seconds] if figure.seconds else 1
    if amount is None or getattr(sender, "app", app) != app:
        return
    if figure.state and getattr(details["holder"], "state", None) != figure.state:
        return
    labels = {"task": str(getattr(sender, "name", sender))}
    if figure.label:
        labels[figure.label] = str(details[figure.label])
    with between_forks:  # a child would inherit the exporter's own lock, and wait for it for ever
        record(figure, amount, labels)


def _family(client: Any, figure: Figure, registry: Any) -> Any:
    name, text, labels = f"{_PREFIX}_{figure.name}", figure.text, figure.labels
    if figure.seconds:
        return client.Histogram(f"{name}_seconds", text, labels, buckets=BUCKETS_S, registry=registry)
    return client.Counter(name, text, labels, registry=registry)


_families: WeakKeyDictionary[Any, dict[Figure, Any]] = WeakKeyDictionary()
_registered: WeakKeyDictionary[Any, set[Celery]] = WeakKeyDictionary()


def _sum_of_all(client: Any, app: Celery, waiters: bool) -> Any:
    """A registry with the counts of all processes, dead or alive."""
    registry = client.CollectorRegistry()
    importlib.import_module("prometheus_client.multiprocess").MultiProcessCollector(registry)
    if waiters:
        registry.register(_Gauges(app))
    return registry


def _is_multiprocess(client: Any) -> bool:
    """True if prometheus_client keeps counts in files; it decides so when it is imported."""
    return bool(client.values.ValueClass._multiprocess)


def _check_pool(client: Any, worker: Any) -> None:
    """Refuse figures that a pool's processes would keep to themselves."""
    is_prefork = any(base.__module__ == "celery.concurrency.prefork" for base in worker.pool_cls.__mro__)
    if is_prefork and not _is_multiprocess(client):
        raise OptionError(
            "celery_setnx.metrics.serve: the processes of a prefork worker count separately. Start the "
            "worker with PROMETHEUS_MULTIPROC_DIR set to an empty directory of its own, or use another pool "
            "(-P threads)"
        )


class _Gauges:
    """Asks Redis at each scrape how many calls wait, what is held, since when, and paused, by scope."""

    def __init__(self, app: Celery) -> None:
        self._app = app

    def describe(self) -> list[Any]:
        """The empty families: registering them must not ask Redis."""
        core = _extra("prometheus_client.core", "prometheus")
        return [
            core.GaugeMetricFamily(f"{_PREFIX}_{name}", text, labels=["scope"])
            for name, text in _GAUGES.items()
        ]

    def collect(self) -> Iterator[Any]:
        """The families, with a figure for each scope in which anybody waits, or holds a lock."""
        counts = _counts(self._app)
        for family, name in zip(self.describe(), _GAUGES):
            for scope, count in counts[name].items():
                family.add_metric([scope], count)
            yield family


def _counts(app: Celery) -> dict[str, Mapping[str, float]]:
    """Each gauge by scope, of one survey; nothing if Redis cannot be asked: the other figures stand."""
    waiting: Counter[str] = Counter()
    held: Counter[str] = Counter()
    oldest: dict[str, float] = {}
    client, prefix, now = client_for(app), settings_of(app).prefix, time.time()
    try:
        texts = live_terms_of_tasks(client, prefix).items()
        paused = Counter(
            {scope: int(pause_in(live_terms_of(text, now)) is not None) for scope, text in texts}
        )
        for sighting in survey(client, prefix, marks=False):
            waiting[sighting.scope] += sighting.waiting
            paused[sighting.scope] += pause_in(sighting.live) is not None
            held[sighting.scope] += len(sighting.living)
            for age_s in (one.age_s for one in sighting.of_each() if not one.is_stale and one.age_s):
                oldest[sighting.scope] = max(oldest.get(sighting.scope, 0.0), age_s)
    except Exception as error:  # noqa: BLE001 - it is a scrape's thread: the other figures stand
        logger.warning("The gauges (waiters, held, oldest, paused) are missing from the metrics: %s", error)
        return {name: {} for name in _GAUGES}
    for count in (waiting, held):
        del count[TRIAL]  # what each worker tries as it starts
    oldest.pop(TRIAL, None)
    # Without the scopes in which there is nothing.
    return {"waiters": +waiting, "held": +held, "oldest_seconds": oldest, "paused": +paused}


class _Observed:
    """What one survey has found, for the callback of each gauge: OpenTelemetry asks them one by one."""

    def __init__(self, api: Any, app: Celery) -> None:
        self._api, self._app = api, app
        self._counts: dict[str, Mapping[str, float]] = {}

    def observe(self, name: str, _options: Any) -> list[Any]:
        """The figures of a gauge, of a new survey unless another gauge has just asked."""
        if name not in self._counts:
            self._counts = _counts(self._app)
        counts = self._counts.pop(name)
        return [self._api.Observation(count, {"scope": scope}) for scope, count in counts.items()]


def _instruments(api: Any, app: Celery, meter: Any, waiters: bool) -> dict[Figure, Any]:
    made, buckets = {}, {"explicit_bucket_boundaries_advisory": list(BUCKETS_S)}
    for figure in FIGURES:
        name, text = f"{_PREFIX}.{figure.name}", figure.text
        if figure.seconds:
            made[figure] = meter.create_histogram(name, unit="s", description=text, **buckets)
        else:
            made[figure] = meter.create_counter(name, description=text)
    observed = _Observed(api, app)
    for name, text in _GAUGES.items() if waiters else ():
        callback, unit = partial(observed.observe, name), _UNITS[name]
        short = f"{_PREFIX}.{name.removesuffix('_seconds')}"
        meter.create_observable_gauge(short, [callback], unit=unit, description=text)
    return made


def _extra(module: str, extra: str) -> Any:
    """A module that only an extra installs."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(
            f"celery_setnx.metrics needs {module.partition('.')[0]}, which is not installed: "
            f"pip install 'celery_setnx[{extra}]'"
        ) from error
