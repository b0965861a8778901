"""Draws what has just happened: the demo's take-over and its saves, five calls of a tenant, ten a minute.

python -m examples.picture docs/take-over.svg
python -m examples.picture docs/save-as-one-types.svg
python -m examples.picture docs/five-at-a-time.svg
python -m examples.picture docs/ten-a-minute.svg
"""

from __future__ import annotations

import importlib
import io
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar
from xml.sax.saxutils import escape

from rich.console import Console

from examples.demo import TYPED, Demo, Saved, TakeOver, stage
from examples.embedded import EmbeddedServer

WIDTH, LEFT, RIGHT, FONT = 600, 20, 20, 17
DEAD_ROW, LOCK_ROW, HEIR_ROW, AXIS = 20, 96, 172, 252
"""Where each row's name stands; its bar is below that. Narrow, so that it can be read on a phone."""
RUNS, RENEWED, LEASE, TRIED, DEAD, INK = "#1a7f37", "#e3b341", "#f6e3a8", "#6e7781", "#d1242f", "#24292f"
NEXT = "#4ac26b"  # what runs, too: so that two bodies, one right after the other, are seen to be two
LIVES_S = 1.2
LANES, LANE, NAMES = 30, 32, 95
"""Of permits and workers: where the first row is, how far they are apart, and how wide their names are."""
WINDOWS = (0, 5, 10)
"""After which starts of a rate begin the windows that are drawn."""

Scene = TypeVar("Scene")


class Drawing:
    """Shapes on a time axis, in seconds since the first body started."""

    def __init__(self, seconds: float, axis: int = AXIS, names: int = 0, step_s: int = 1) -> None:
        self._left, self._height = LEFT + names, axis + 30
        self._scale = (WIDTH - self._left - RIGHT) / seconds
        self._shapes: list[str] = []
        for second in range(0, int(seconds) + 1, step_s):
            self.line(second, axis - 6, axis, TRIED)
            self.text(self.x(second), axis + 12, f"{second} s", TRIED, "middle")

    def x(self, second: float) -> float:
        """Where a time is."""
        return self._left + second * self._scale

    def bar(self, row: int, begins: float, ends: float, colour: str, height: int = 24) -> None:
        """Something that lasts; at least two pixels of it."""
        y = row + 26
        width = max(2.0, (ends - begins) * self._scale)
        where = f'x="{self.x(begins):.1f}" y="{y - height // 2}" width="{width:.1f}" height="{height}"'
        self._shapes.append(f'<rect {where} rx="3" fill="{colour}"/>')

    def line(self, second: float, top: int, bottom: int, colour: str, dashes: str = "") -> None:
        """A moment."""
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self._shapes.append(
            f'<path d="M{self.x(second):.1f} {top}V{bottom}" stroke="{colour}" stroke-width="1.5"{dashed}/>'
        )

    def text(self, x: float, y: int, text: str, colour: str = INK, anchor: str = "start") -> None:
        """Words, with their middle line at y."""
        self._shapes.append(
            f'<text x="{x:.1f}" y="{y + 5}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self, title: str) -> str:
        """The picture."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img" '
                'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" '
                f'font-size="{FONT}">',
                f"<title>{escape(title)}</title>",
                f'<rect width="{WIDTH}" height="{self._height}" rx="8" fill="#ffffff"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )


def take_over(demo: Demo, scene: TakeOver) -> str:
    """What happened, from the events that the workers have written down."""
    history = demo.history
    (start,) = history.of("start", task_id=scene.first)
    (taken,) = history.of("taken_over", task_id=scene.second)
    (end,) = history.of("end", task_id=scene.second)
    conflicts = [entry["at"] - start["at"] for entry in history.of("conflict", task_id=scene.second)]
    killed, deadline = scene.killed_at - start["at"], taken["holder"]["deadline"] - start["at"]
    resumed, ended = taken["at"] - start["at"], end["at"] - start["at"]
    late_ms = (resumed - deadline) * 1000

    picture = Drawing(ended + 1.7)
    lease_s = demo.app.settle.singleton["lease"]
    for y, row in ((DEAD_ROW, "a worker"), (LOCK_ROW, "its lock"), (HEIR_ROW, "a worker on another host")):
        picture.text(LEFT, y, row)
    picture.bar(DEAD_ROW, 0.0, killed, RUNS)
    picture.line(killed, DEAD_ROW + 10, DEAD_ROW + 42, DEAD)
    picture.text(picture.x(killed) + 8, DEAD_ROW + 26, "kill -9", DEAD)
    picture.bar(LOCK_ROW, 0.0, killed, RENEWED)
    picture.text(picture.x(0.0) + 6, LOCK_ROW + 26, "renewed")
    picture.bar(LOCK_ROW, killed, deadline, LEASE)
    picture.text(picture.x(killed) + 8, LOCK_ROW + 26, f"its lease ({lease_s} s) ends")
    picture.bar(LOCK_ROW, resumed, ended, RUNS)
    for moment in conflicts:
        picture.bar(HEIR_ROW, moment, moment, TRIED, 14)
    picture.text(picture.x(conflicts[0]), HEIR_ROW + 50, "asks, and is told: held", TRIED)
    picture.line(resumed, LOCK_ROW + 10, HEIR_ROW + 42, RUNS, "4 3")
    picture.bar(HEIR_ROW, resumed, ended, RUNS)
    picture.text(picture.x(resumed) + 10, LOCK_ROW + 26, "takes it over", RUNS)
    picture.text(picture.x(resumed) + 10, LOCK_ROW + 46, f"{late_ms:.0f} ms later", RUNS)
    picture.text(picture.x(resumed) + 10, HEIR_ROW + 26, "runs", RUNS)
    return picture.svg(
        "A worker is killed. A worker on another host takes its lock over when the lease has ended"
    )


def saves(demo: Demo, scene: Saved) -> str:
    """How long each call has waited, and which of them has run."""
    history, origin = demo.history, scene.sent[0][0]
    (start,), (end,) = history.of("start", page=7), history.of("end", page=7)
    skipped = {entry["task_id"]: entry["at"] - origin for entry in history.of("superseded")}
    starts, ends, last = start["at"] - origin, end["at"] - origin, scene.sent[-1][0] - origin

    picture = Drawing(ends + 0.15, LANES + len(TYPED) * LANE + 28, NAMES)
    for lane, (sent_at, call) in enumerate(scene.sent):
        row = LANES + lane * LANE
        picture.text(LEFT, row + 26, f'"{TYPED[: lane + 1]}"')
        is_newest = call.id == start["task_id"]
        picture.bar(row, sent_at - origin, starts if is_newest else skipped[call.id], LEASE)
        if not is_newest:
            picture.text(picture.x(skipped[call.id]) - 8, row + 26, "skipped", anchor="end")
    row = LANES + (len(TYPED) - 1) * LANE
    picture.text(picture.x(last) + 8, row + 26, f"{scene.quiet_s:g} s without a key")
    picture.bar(row, starts, ends, RUNS)
    picture.text(picture.x(starts), LANES - 8, "saved, once", RUNS, "middle")
    picture.line(starts, LANES + 10, row + 10, RUNS, "4 3")
    return picture.svg(
        "Five saves while one types. Each call waits for a newer one. The first four are skipped, and the "
        "last one runs"
    )


def permits(entries: list[dict[str, Any]], limit: int, lease_s: float) -> str:
    """Which body had which permit, and when, from the journal of the example."""
    began = [entry for entry in entries if entry["what"] == "begins" and entry["tenant"] == "acme"]
    ends = {entry["number"]: entry["at"] for entry in entries if entry["what"] in ("ends", "dies")}
    origin, dead = began[0]["at"], began[0]["permit"]
    (taken,) = (entry for entry in entries if entry["what"] == "is taken over")
    killed, deadline, resumed = (at - origin for at in (ends[0], taken["deadline"], taken["at"]))

    picture = Drawing(max(ends.values()) - origin + 0.2, LANES + limit * LANE + 28, NAMES)
    for permit in range(limit):
        row = LANES + permit * LANE
        picture.text(LEFT, row + 26, f"permit {permit}")
        for place, body in enumerate(entry for entry in began if entry["permit"] == permit):
            starts, stops = body["at"] - origin, ends[body["number"]] - origin
            picture.bar(row, starts, stops, (RUNS, NEXT)[place % 2])
    row = LANES + dead * LANE
    picture.bar(row, killed, deadline, LEASE)
    picture.text(picture.x(killed) + 8, row + 26, f"its lease ({lease_s:g} s)")
    picture.line(killed, LANES - 2, row + 42, DEAD)
    picture.text(picture.x(killed) + 8, LANES - 8, "kill -9", DEAD)
    picture.line(resumed, LANES - 2, row + 42, RUNS, "4 3")
    picture.text(picture.x(resumed) + 8, LANES - 8, "handed on", RUNS)
    return picture.svg(
        "Five calls of a tenant run at a time. A worker is killed: its permit is the next call's when its "
        "lease has ended, and the other four go on"
    )


def starts(entries: list[dict[str, Any]], period_s: float, workers: tuple[str, ...]) -> str:
    """Which calls of a partner started when, and how many in some windows, from the journal."""
    acme = [entry for entry in entries if entry["partner"] == "acme"]
    begun = [entry for entry in acme if entry["what"] == "starts"]
    ended = [entry["us"] for entry in acme if entry["what"] == "ends"]
    at = [(entry["us"] - begun[0]["us"]) / 1e6 for entry in begun]
    ends = [(us - begun[0]["us"]) / 1e6 for us in ended]

    lanes = len(workers) + len(WINDOWS)
    picture = Drawing(ends[-1] + 0.3, LANES + lanes * LANE + 28, NAMES, step_s=2)
    for row, name in enumerate(workers):
        picture.text(LEFT, LANES + row * LANE + 26, "a worker" if row == 0 else name)
    for place, (entry, starts_at, ends_at) in enumerate(zip(begun, at, ends)):
        row = next(row for row, name in enumerate(workers) if entry["worker"].endswith(f"@{name}"))
        picture.bar(LANES + row * LANE, starts_at, ends_at, (RUNS, NEXT)[place % 2])
    for row, first in enumerate(WINDOWS, len(workers)):
        begins, y = at[first], LANES + row * LANE
        within = sum(begins <= moment < begins + period_s for moment in at)
        picture.text(LEFT, y + 26, f"any {period_s:g} s")
        picture.bar(y, begins, begins + period_s, LEASE)
        picture.text(picture.x(begins) + 8, y + 26, f"{within} starts")
        picture.line(begins + period_s, LANES + 10, y + 38, TRIED, "4 3")
    (refused,) = [number for number, times in Counter(e["number"] for e in begun).items() if times == 2]
    first, second = (moment for entry, moment in zip(begun, at) if entry["number"] == refused)
    for moment, said, anchor in ((first, "answered with 429", "start"), (second, "sent again", "end")):
        picture.line(moment, LANES - 2, LANES + len(workers) * LANE + 8, DEAD)
        picture.text(picture.x(moment) + (8 if anchor == "start" else -8), LANES - 8, said, DEAD, anchor)
    return picture.svg(
        "Ten calls of a partner start, by two workers, and the others wait until the window has moved on: no "
        f"window of {period_s:g} s has more than ten starts. One call is answered with 429, and starts again"
    )


def draw_take_over() -> str:
    """What the demo has shown."""
    with _demo() as demo:
        return take_over(demo, _shown(demo, demo.take_over(LIVES_S)))


def draw_saves() -> str:
    """What the demo has shown."""
    with _demo() as demo:
        return saves(demo, _shown(demo, demo.newest_wins()))


@contextmanager
def _demo() -> Iterator[Demo]:
    """The demo with its workers, which says nothing."""
    with tempfile.TemporaryDirectory() as logs, stage(Console(file=io.StringIO()), Path(logs)) as demo:
        demo.start()
        yield demo


def _shown(demo: Demo, scene: Scene) -> Scene:
    """A scene that was true.

    Raises:
        ValueError: It was not.
    """
    if not all(is_true for is_true, _, _ in demo.checks):
        raise ValueError(f"the demo has not shown it: {demo.checks}")
    return scene


@contextmanager
def _played(name: str) -> Iterator[Any]:
    """An example that has sent its calls, on a server of its own."""
    with EmbeddedServer() as server:
        os.environ["REDIS_URL"] = server.url()  # the example reads it when it is imported
        example = importlib.import_module(f"examples.{name}")
        example.send()
        yield example


def draw_permits() -> str:
    """What the example has seen."""
    with _played("five_at_a_time") as example:
        return permits(example.journal(), example.LIMIT, example.LEASE_S)


def draw_starts() -> str:
    """What the example has seen."""
    with _played("ten_a_minute") as example:
        return starts(example.journal(), example.PERIOD_S, example.WORKERS)


PICTURES: dict[str, Callable[[], str]] = {
    "take-over": draw_take_over,
    "save-as-one-types": draw_saves,
    "five-at-a-time": draw_permits,
    "ten-a-minute": draw_starts,
}


def main() -> int:
    path = Path(sys.argv[1])
    path.write_text(PICTURES[path.stem]())
    return 0


if __name__ == "__main__":
    sys.exit(main())
