"""The demo of docker-compose.yml: the demo's checks, with containers for workers.

docker compose up --build --wait
docker compose run --rm demo
"""

from __future__ import annotations

import sys
import time
from itertools import count, pairwise
from typing import Any

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from celery_setnx import is_skipped
from examples import demo_app
from examples.compose.app import BODY_S, PERIOD_S, app, crash
from examples.demo import WIDTH, Demo, History, Missed, policies_picture, summary

POLLS = 4


class Container:
    """A worker in another container: it is killed by asking, and its log read where it passes it on."""

    def __init__(self, name: str, history: History) -> None:
        self.name = name
        self.node = f"celery@{name}"
        self._history = history

    def kill(self) -> None:
        """kill -9 of the worker. The container dies, and its engine starts it again."""
        crash.apply_async(queue=self.name)

    def has_failed(self) -> bool:
        return False  # not to be seen from here

    def log_line(self, *texts: str) -> str:
        """The first take-over in its log that holds the texts; else nothing."""
        lines = [entry["text"] for entry in self._history.of("log", worker=self.node)]
        return next((line for line in lines if all(text in line for text in texts)), "")


class ComposeDemo(Demo):
    """Three scenes across containers."""

    def __init__(self, console: Console) -> None:
        history = History(demo_app.client, demo_app.HISTORY)
        containers = [Container(name, history) for name in ("alpha", "beta")]
        super().__init__(console, demo_app, history, *containers)
        self._numbers = count(1)

    def title(self, _number: int, title: str, remark: str) -> None:
        super().title(next(self._numbers), title, remark)

    def contention(self) -> None:
        """Two containers want one key; another key is free."""
        self.title(1, "Two containers, one key", "and another key")
        history, report = self.history, self.app.report
        calls: dict[str, Any] = {}
        with self.shown(lambda: policies_picture(history, calls)) as wait:
            calls["alpha, May"] = may = report.apply_async(["May"], queue="alpha")
            wait(lambda: history.of("start", task_id=may.id), "alpha reports on May")
            calls["beta, May"] = twin = report.apply_async(["May"], queue="beta")
            wait(twin.ready, "the same call on beta has a result")
            calls["beta, June"] = june = report.apply_async(["June"], queue="beta")
            wait(lambda: history.of("start", task_id=june.id), "beta reports on June")
            for _ in (may, june):
                self.app.open_gate("report")
            wait(lambda: may.ready() and june.ready(), "both reports are written")

        result = twin.result
        self.check(
            "one key: one container runs, the other skips",
            is_skipped(result) and history.words(twin.id) == ["conflict"] and may.result == "report of May",
            f"{len(history.of('start', task_id=may.id) + history.of('start', task_id=twin.id))} body",
        )
        holder = result["holder"] if is_skipped(result) else {}
        self.check(
            "the skipped call names the other container",
            holder.get("worker") == self.alpha.node,
            f"held by {holder.get('worker')}",
        )
        self.check(
            "another key runs meanwhile",
            history.of("start", task_id=june.id, worker=self.beta.node) != []
            and history.place("start", june.id) < history.place("end", may.id),
            f"on {self.beta.node}",
        )

    def periodic(self) -> None:
        """Beat sends a job more often than it can run."""
        self.title(2, f"Beat: every {PERIOD_S:g} s a job of {BODY_S:g} s", "on whichever worker is free")
        began = self.app.server_time()
        with self.shown(lambda: self._polls_picture(began)) as wait:
            wait(lambda: len(self._polls()) > POLLS, f"beat's job has run {POLLS} times")

        bodies = self._polls()
        overlaps = sum(end is None or end > start for (_, end), (start, _) in pairwise(bodies))
        self.check(
            "beat's job never overlaps", overlaps == 0, f"{overlaps} overlaps among {len(bodies)} bodies"
        )
        skipped = len(self._skipped_polls())
        self.check("a call that comes too early is skipped", skipped > 0, f"{skipped} skipped")

    def restart(self) -> None:
        """The killed container comes back."""
        with self.shown(lambda: self._restart_picture()) as wait:
            wait(lambda: self.history.of("ready", worker=self.alpha.node), "alpha's container is back")

        self.check("the killed container comes back", True, f"{self.alpha.node} is ready again")

    def _polls(self) -> list[tuple[float, float | None]]:
        return self.history.bodies(job="poll")

    def _skipped_polls(self) -> list[dict[str, Any]]:
        return [e for e in self.history.of("conflict") if e["holder"]["task"].endswith(".poll")]

    def _polls_picture(self, began: float) -> RenderableType:
        rows = Table.grid(padding=(0, 2))
        for entry in self.history.of("start", job="poll"):
            rows.add_row(f"{entry['at'] - began:4.1f} s", entry["worker"], "runs")
        rows.add_row("", "", Text(f"{len(self._skipped_polls())} skipped", "dim"))
        return rows

    def _restart_picture(self) -> RenderableType:
        back = self.history.of("ready", worker=self.alpha.node)
        return Text(f"alpha  {'is back' if back else 'starts again'}", "green" if back else "dim")


def run(console: Console) -> bool:
    """Run the demo; true if everything it shows is true."""
    began = time.monotonic()
    # What an earlier run has left.
    demo_app.client.delete(demo_app.HISTORY, *demo_app.client.scan_iter(f"{demo_app.PREFIX}:gate:*"))
    demo = ComposeDemo(console)
    console.print(
        Text.assemble(("celery_setnx", "bold"), "  tasks that run at most once at a time per key\n")
    )
    console.print(f"   locks    {demo_app.URL}\n   broker   {app.connection().as_uri()}", style="dim")
    try:
        demo.contention()
        demo.periodic()
        demo.take_over()
        demo.restart()
        demo.leftovers()
    except Missed as missed:
        demo.check("everything happens in time", False, str(missed))
    console.print(summary(demo.checks, time.monotonic() - began))
    return all(is_true for is_true, _, _ in demo.checks)


if __name__ == "__main__":
    sys.exit(not run(Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else WIDTH)))
