"""Draws the take-over after a kill -9, as the demo has just seen it.

python -m examples.picture docs/take-over.svg
"""

from __future__ import annotations

import io
import sys
import tempfile
from pathlib import Path
from xml.sax.saxutils import escape

from rich.console import Console

from examples.demo import Demo, TakeOver, stage

WIDTH, LEFT, RIGHT = 880, 96, 28
ALPHA, LOCK, BETA, AXIS = 66, 116, 166, 214
HEIGHT = AXIS + 34
RUNS, HELD, TRIED, DEAD, INK = "#1a7f37", "#e3b341", "#6e7781", "#d1242f", "#24292f"
LIVES_S = 1.2


class Drawing:
    """Shapes on a time axis, in seconds since the first body started."""

    def __init__(self, seconds: float) -> None:
        self._scale = (WIDTH - LEFT - RIGHT) / seconds
        self._shapes: list[str] = []
        for second in range(int(seconds) + 1):
            self.line(second, AXIS - 14, AXIS - 8, TRIED)
            self.text(self.x(second), AXIS + 4, f"{second} s", TRIED, "middle")

    def x(self, second: float) -> float:
        """Where a time is."""
        return LEFT + second * self._scale

    def bar(self, y: int, begins: float, ends: float, colour: str, height: int = 22) -> None:
        """Something that lasts; at least two pixels of it."""
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
            f'<text x="{x:.1f}" y="{y + 4}" fill="{colour}" text-anchor="{anchor}">{escape(text)}</text>'
        )

    def svg(self, title: str) -> str:
        """The picture."""
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
                'font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="12">',
                f"<title>{escape(title)}</title>",
                f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#ffffff"/>',
                *self._shapes,
                "</svg>\n",
            ]
        )


def drawn(demo: Demo, scene: TakeOver) -> str:
    """What happened, from the events that the workers have written down."""
    history = demo.history
    (start,) = history.of("start", task_id=scene.first)
    (taken,) = history.of("taken_over", task_id=scene.second)
    (end,) = history.of("end", task_id=scene.second)
    conflicts = [entry["at"] - start["at"] for entry in history.of("conflict", task_id=scene.second)]
    killed, deadline = scene.killed_at - start["at"], taken["holder"]["deadline"] - start["at"]
    resumed, ended = taken["at"] - start["at"], end["at"] - start["at"]
    late_ms = (resumed - deadline) * 1000

    picture = Drawing(ended + 1.5)
    for y, row in ((ALPHA, "worker alpha"), (LOCK, "lock"), (BETA, "worker beta")):
        picture.text(LEFT - 8, y, row, INK, "end")
    picture.bar(ALPHA, 0.0, killed, RUNS)
    picture.line(killed, ALPHA - 22, ALPHA + 14, DEAD)
    picture.text(picture.x(killed) + 6, ALPHA, "kill -9: nobody is left to release the lock", DEAD)
    picture.bar(LOCK, 0.0, deadline, HELD)
    picture.text(picture.x(0.05), LOCK, f"held by alpha's task, fence {start['fence']}; renewed while it ran")
    picture.bar(LOCK, resumed, ended, RUNS)
    for moment in conflicts:
        picture.bar(BETA, moment, moment, TRIED, 14)
    picture.text(
        picture.x(conflicts[0]) + 6,
        BETA - 16,
        "the same call: is told who has the lock, and comes back",
        TRIED,
    )
    picture.line(resumed, ALPHA - 6, BETA + 18, RUNS, "4 3")
    picture.bar(BETA, resumed, ended, RUNS)
    picture.text(picture.x(resumed) + 6, ALPHA, "the lease has ended:", RUNS)
    picture.text(picture.x(resumed) + 6, ALPHA + 16, f"taken over {late_ms:.0f} ms later", RUNS)
    picture.text(picture.x(ended) + 6, BETA, f"runs, fence {taken['fence']}", RUNS)
    return picture.svg("A worker is killed; another one takes its lock over when the lease has ended")


def main() -> int:
    (path,) = sys.argv[1:]
    with tempfile.TemporaryDirectory() as logs, stage(Console(file=io.StringIO()), Path(logs)) as demo:
        demo.start()
        scene = demo.take_over(LIVES_S)
        if not all(is_true for is_true, _, _ in demo.checks):
            print(f"The demo has not shown it: {demo.checks}", file=sys.stderr)
            return 1
        Path(path).write_text(drawn(demo, scene))
    return 0


if __name__ == "__main__":
    sys.exit(main())
