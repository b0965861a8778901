"""Draws what the dashboard's queries answer: four minutes of a shop in which something goes wrong.

python -m tests.monitoring.picture docs/dashboard.svg

It needs Debian's prometheus, and the extra `bench`.
"""

from __future__ import annotations

import importlib
import io
import os
import random
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from prometheus_client import CollectorRegistry, start_http_server

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from celery_setnx import metrics
from celery_setnx.connection import client_for
from examples.embedded import EmbeddedServer
from tests.harness import wait_until
from tests.monitoring.dashboard import Query, panels, queries
from tests.monitoring.prometheus import Prometheus
from tests.topologies.servers import HOST, free_port

RUN_S, STEP_S = 240, 2
WINDOW = "20s"
"""Of rates, as the scrapes are 2 s apart."""
WIDTH = 5.2
"""Inches: as wide as a phone's column is if the letters have ten points, so they can be read there."""
COLOURS = ("#1f5fa8", "#c8813a", "#1a7f37", "#d1242f", "#8250df", "#6e7781")
INK, DIM = "#24292f", "#6e7781"
UNITS = {"short": "", "cps": "per second", "s": "seconds"}
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": DIM,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "text.color": INK,
    "xtick.color": DIM,
    "ytick.color": DIM,
    "legend.frameon": False,
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "celery_setnx",  # the same answers, the same bytes
}

Series = list[tuple[str, list[float], list[float]]]
"""What a query has answered: the name of each line, its times in seconds since the run began, its values."""


def answers(prometheus: Prometheus, begin: float, end: float) -> dict[str, list[Series]]:
    """Of every panel that shows a history, by its title: a list for each of its queries."""
    found: dict[str, list[Series]] = {}
    for panel in panels():
        if panel["type"] == "timeseries":
            found[panel["title"]] = [
                [
                    (_named(query, labels), [at - begin for at, _value in values], [v for _at, v in values])
                    for labels, values in prometheus.history(
                        query.within(WINDOW, f"{end - begin:.0f}s"), begin, end, STEP_S
                    )
                ]
                for query in queries(panel["title"])
            ]
    return found


def figures(prometheus: Prometheus, seconds: int) -> dict[str, float]:
    """Of every panel that shows one figure, by its title."""
    titles = [panel["title"] for panel in panels() if panel["type"] == "stat"]
    return {
        title: prometheus.query(query.within(WINDOW, f"{seconds}s"))[0][1]
        for title in titles
        for query in queries(title)
    }


def _named(query: Query, labels: Mapping[str, str]) -> str:
    name = query.legend
    for label, value in labels.items():
        name = name.replace("{{" + label + "}}", value)
    return name


def draw(shown: Mapping[str, list[Series]], counted: Mapping[str, float], seconds: float) -> bytes:
    """The picture, as SVG."""
    units = {panel["title"]: panel["fieldConfig"]["defaults"]["unit"] for panel in panels()}
    bars = {panel["title"] for panel in panels() if _is_of_bars(panel)}
    with plt.rc_context(_STYLE):
        figure = plt.figure(figsize=(WIDTH, 1.1 + 2.3 * len(shown)), layout="constrained")
        top, below = figure.subfigures(2, 1, height_ratios=(1.1, 2.3 * len(shown)))
        for place, (title, count) in enumerate(counted.items()):
            x = (place + 0.5) / len(counted)
            top.text(x, 0.8, f"{count:.0f}", ha="center", va="center", fontsize=15, weight="bold")
            top.text(x, 0.6, textwrap.fill(title, 9), ha="center", va="top", color=DIM)
        grid = below.subplots(len(shown), squeeze=False)
        for axes, (title, parts) in zip(grid.flat, shown.items()):
            axes.set_title(title)
            (_bars if title in bars else _lines)(axes, parts)
            _finish(axes, UNITS[units[title]], seconds)
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Creator": None, "Date": None})
        plt.close(figure)
    return file.getvalue()


def _is_of_bars(panel: Any) -> bool:
    return bool(panel["fieldConfig"]["defaults"].get("custom", {}).get("drawStyle") == "bars")


def _lines(axes: Axes, parts: list[Series]) -> None:
    """A colour for each series; the second query of a panel is dashed, in the colours of the first."""
    for dashed, series in enumerate(parts):
        for place, (name, xs, ys) in enumerate(series):
            xs, ys = _with_gaps(xs, ys)
            axes.plot(xs, ys, ("-", "--")[dashed], color=COLOURS[place % len(COLOURS)], lw=1.3, label=name)


def _bars(axes: Axes, parts: list[Series]) -> None:
    """What happened at a time, side by side if there is more than one."""
    series = [each for part in parts for each in part]
    for place, (name, xs, ys) in enumerate(series):
        axes.bar(xs, ys, width=STEP_S, color=COLOURS[place % len(COLOURS)], label=name, lw=0)


def _with_gaps(xs: list[float], ys: list[float]) -> tuple[list[float], list[float]]:
    """Where Prometheus has no answer, the line has a gap."""
    known = dict(zip(xs, ys))
    if not known:
        return [], []
    steps = round((max(xs) - min(xs)) / STEP_S)
    times = [min(xs) + step * STEP_S for step in range(steps + 1)]
    return times, [known.get(at, float("nan")) for at in times]


def _finish(axes: Axes, unit: str, seconds: float) -> None:
    axes.set_xlim(0, seconds)
    axes.set_xticks(range(0, int(seconds) + 1, 60), [f"{m} min" for m in range(int(seconds) // 60 + 1)])
    axes.set_ylim(0, max(axes.get_ylim()[1], 0.1))
    axes.yaxis.set_major_locator(MaxNLocator(4, integer=not unit))
    axes.set_ylabel(unit, color=DIM)
    axes.grid(axis="y", color="#e6e8eb", lw=0.6)
    axes.set_axisbelow(True)
    handles, names = axes.get_legend_handles_labels()
    if names:
        columns = min(2, len(names))
        axes.legend(
            handles, names, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=columns,
            handlelength=1.4, columnspacing=1.0, borderaxespad=0.2, labelspacing=0.3,
        )  # fmt: skip


class Shop:
    """Two workers with metrics, each of which may be killed, and what is asked of them."""

    def __init__(self, directory: Path, ports: Mapping[str, int], url: str) -> None:
        self._directory, self._ports, self._url = directory, ports, url
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        os.environ["SHOP_URL"] = url
        self.tasks: Any = importlib.import_module("tests.monitoring.shop")

    def start(self, name: str) -> None:
        """A worker of the common queue, and of one of its own."""
        files = tempfile.mkdtemp(dir=self._directory)
        environment = {"METRICS_PORT": str(self._ports[name]), "PROMETHEUS_MULTIPROC_DIR": files}
        with (self._directory / f"{name}.log").open("ab") as log:
            self._workers[name] = subprocess.Popen(
                [sys.executable, "-m", "celery", "-A", "tests.monitoring.shop", "worker", "-c", "4",
                 "-n", f"{name}@shop", "-Q", f"celery,{name}", "-l", "INFO"],
                env={**os.environ, **environment}, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def wait_until_ready(self, name: str) -> None:
        """Come back when the worker answers."""
        ping = self.tasks.app.control.ping
        wait_until(lambda: ping(destination=[f"{name}@shop"], timeout=1), f"{name} answers")

    def kill(self, name: str) -> None:
        """kill -9 of a worker and its pool."""
        worker = self._workers.pop(name)
        os.killpg(worker.pid, 9)
        worker.wait()

    def end(self) -> None:
        """The same with all that are left."""
        for name in list(self._workers):
            self.kill(name)

    def holder(self, task: Any, key: str) -> Any:
        """Who has a lock, once it is held."""
        return wait_until(lambda: task.locked(key, 0), f"{task.name} {key} is held")

    def kill_process(self) -> None:
        """The pool process of a running call dies."""
        self.tasks.settle.delay("of a process", 20)
        os.kill(self.holder(self.tasks.settle, "of a process").info["pid"], 9)

    def kill_worker(self) -> None:
        """A whole worker dies while a call has its lock; the same call waits, and takes the lock over."""
        self.tasks.settle.apply_async(["of a worker", 20], queue="worker 2")
        self.holder(self.tasks.settle, "of a worker")
        self.kill("worker 2")
        self.tasks.settle.apply_async(["of a worker", 1], singleton={"on_conflict": "wait"})

    def lose(self) -> None:
        """A lock vanishes from Redis while its body runs."""
        self.tasks.settle.delay("lost", 8)
        self.holder(self.tasks.settle, "lost")
        client_for(self.tasks.app).delete(self.tasks.settle.lock_key("lost", 8))


def events(shop: Shop) -> Iterator[tuple[float, Callable[[], Any]]]:
    """What happens, and after how many seconds."""
    tasks, chance = shop.tasks, random.Random(7)
    for tenth in range(0, (RUN_S - 10) * 10, 4):
        account, lasts_s = f"account {chance.randrange(4)}", chance.uniform(0.2, 1.6)
        yield tenth / 10, lambda account=account, lasts_s=lasts_s: tasks.settle.delay(account, lasts_s)
    for number in range(55):
        yield 30 + number, lambda: tasks.report.delay("2026-11", chance.uniform(1.2, 1.8))
        yield 100 + number, lambda: tasks.notify.delay("acme", 0.2)
    for number in range(140):
        yield 60 + number, lambda number=number: tasks.remind.delay(number % 3, 2.5)
        yield 60.1 + number, lambda number=number: tasks.remind.delay(number % 3, 2.5)
    yield 50, shop.kill_process
    yield 130, shop.kill_worker
    yield 145, lambda: shop.start("worker 2")
    yield 185, shop.lose


@contextmanager
def published(tasks: Any, port: int) -> Iterator[None]:
    """This process counts, too: it publishes."""
    registry = CollectorRegistry()
    metrics.prometheus(tasks.app, registry=registry, waiters=False)
    served, _thread = start_http_server(port, HOST, registry=registry)
    yield
    served.shutdown()
    served.server_close()


def main() -> int:
    """Play, ask, draw."""
    path = Path(sys.argv[1])
    ports = {name: free_port() for name in ("worker 1", "worker 2", "publisher")}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        server = stack.enter_context(EmbeddedServer())
        shop = Shop(directory, ports, server.url().rpartition("/")[0])
        stack.callback(shop.end)
        for name in ("worker 1", "worker 2"):
            shop.start(name)
        for name in ("worker 1", "worker 2"):
            shop.wait_until_ready(name)
        stack.enter_context(published(shop.tasks, ports["publisher"]))
        prometheus = Prometheus(directory, ports)
        stack.callback(prometheus.kill)
        prometheus.wait_until_ready()
        began = time.time()
        for after_s, happen in sorted(events(shop), key=lambda event: event[0]):
            time.sleep(max(0.0, began + after_s - time.time()))
            happen()
        time.sleep(max(0.0, began + RUN_S - time.time()))
        shown = answers(prometheus, began, began + RUN_S)
        path.write_bytes(draw(shown, figures(prometheus, RUN_S), RUN_S))
        return 0


if __name__ == "__main__":
    sys.exit(main())
