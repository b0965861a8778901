"""Pictures of what the benchmarks have found: made from the results alone, so they can be made again.

python -m benchmarks.plot docs/performance/results.json
"""

from __future__ import annotations

import json
import statistics
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

Results = Mapping[str, Any]

Row = tuple[list[float], float, bool, str]
"""Of a promise about a ratio: its samples, the limit, whether that is the least, and what it is."""

OURS, OTHER, BROKEN, ALLOWED, TEXT = "#1f5fa8", "#c8813a", "#b3261e", "#dcebdd", "#444444"
MARKERS = "osD^v"
WIDTH = 5.2
"""Inches: as wide as a phone's column is if the letters have ten points, so they can be read there."""
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "legend.frameon": False,
    "svg.fonttype": "none",  # letters stay letters
    "svg.hashsalt": "celery_setnx",  # the same results, the same bytes
}


def draw(results: Results, directory: Path) -> Iterator[Path]:
    """Draw what the results suffice for; where each picture is.

    Args:
        results: Of the benchmarks, by name, as results.json has them.
        directory: Where the pictures go.
    """
    pictures: dict[str, Callable[[Results], Figure | None]] = {
        "overview": overview,
        "contention": contention,
        "recovery": recovery,
    }
    for name, picture in pictures.items():
        with plt.rc_context(_STYLE):
            figure = picture(results)
            if figure is None:
                continue
            path = directory / f"{name}.svg"
            figure.savefig(path, bbox_inches="tight", metadata={"Creator": None, "Date": None})
            plt.close(figure)
        yield path


def overview(results: Results) -> Figure | None:
    """Every promised ratio: its median, its spread over the rounds, and what is allowed."""
    rows = [row for result in results.values() for row in _promised(result)]
    if not rows:
        return None
    figure, axes = plt.subplots(figsize=(WIDTH, 0.76 * len(rows) + 0.8))
    everything = [x for ratios, limit, *_rest in rows for x in (*ratios, limit)]
    left, right = min(0.04, min(everything)) * 0.8, max(everything) * 1.25
    for place, (ratios, limit, at_least, label) in enumerate(reversed(rows)):
        allowed = (limit, right) if at_least else (left, limit)
        axes.barh(place, allowed[1] - allowed[0], left=allowed[0], height=0.3, color=ALLOWED, lw=0)
        axes.plot([limit, limit], [place - 0.15, place + 0.15], color=TEXT, lw=1)
        said = [part for line in label.splitlines() for part in textwrap.wrap(line, 60)]
        axes.text(left, place + 0.2, "\n".join(said), va="bottom", linespacing=1.0)
        reached = statistics.median(ratios)
        kept = reached >= limit if at_least else reached <= limit
        colour = OURS if kept else BROKEN
        axes.plot([min(ratios), max(ratios)], [place, place], color=colour, lw=2, solid_capstyle="butt")
        axes.plot(reached, place, "o", color=colour, ms=6)
        axes.text(right * 1.06, place, f"{reached:.2g}x", va="center", color=colour)
    _without_names(axes)
    for place in range(len(rows)):
        axes.plot([1, 1], [place - 0.15, place + 0.15], color=TEXT, lw=0.8, ls=":")
    _log_axis(axes, left, right)
    axes.set_ylim(-0.4, len(rows) - 0.1)
    axes.set_xlabel("ratio (dot: median; line: lowest to highest;\ngreen: what is promised)")
    figure.tight_layout()
    return _with_machine(figure, results)


def contention(results: Results) -> Figure | None:
    """How a lock's cost depends on who else wants it, and on how many others are held."""
    curves = [figure for figure in _figures(results, "contention") if figure["kind"] == "curve"]
    if not curves:
        return None
    figure, grid = plt.subplots(len(curves), 1, figsize=(WIDTH, 2.9 * len(curves)), squeeze=False)
    for axes, curve in zip(grid.flat, curves):
        for number, (name, points) in enumerate(curve["curves"].items()):
            xs, ys = zip(*points)
            colour = OURS if number == 0 else OTHER
            axes.plot(xs, ys, marker=MARKERS[number], ms=4, color=colour, label=name)
        axes.set_title(f"{curve['title']}: {curve['y']}")
        axes.set_xlabel(curve["x"])
        axes.set_xscale("log", base=2 if max(xs) < 1000 else 10)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _place: f"{x:,.0f}"))
        axes.minorticks_off()
        axes.minorticks_off()
        if curve["log"]:
            axes.set_yscale("log")
        else:
            highest = max(y for points in curve["curves"].values() for _x, y in points)
            axes.set_ylim(0, 1.12 * highest)
        if len(curve["curves"]) > 1:
            axes.legend()
    figure.tight_layout()
    return _with_machine(figure, {"contention": results["contention"]})


def recovery(results: Results) -> Figure | None:
    """How long a key stays blocked after kill -9: every sample, and their median."""
    tables = [figure for figure in _figures(results, "recovery") if figure["kind"] == "table"]
    if not tables:
        return None
    heights = [len(table["samples"]) + 1 for table in tables]
    figure, grid = plt.subplots(
        len(tables),
        1,
        figsize=(WIDTH, 0.56 * sum(heights) + 0.8),
        sharex=True,
        squeeze=False,
        height_ratios=heights,
    )
    for axes, table in zip(grid[:, 0], tables):
        ways = list(table["samples"].items())
        for place, (name, figures) in enumerate(reversed(ways)):
            median = statistics.median(figures)
            said = f"{name}: {median:.2g}, at most {max(figures):.2g}"
            axes.text(0, place + 0.2, said, va="bottom", color=TEXT)
            axes.plot(figures, [place] * len(figures), "|", color=OTHER, ms=9, mew=1.2)
            axes.plot(median, place, "o", color=OURS, ms=6)
        _without_names(axes)
        axes.set_ylim(-0.4, len(ways) - 0.2)
        axes.set_title(table["title"], fontweight="bold")
    longest = max(max(figures) for table in tables for figures in table["samples"].values())
    grid[-1, 0].set_xlim(0, 1.05 * longest)
    grid[-1, 0].set_xlabel("seconds (dot: median; ticks: every kill)")
    figure.tight_layout()
    return _with_machine(figure, {"recovery": results["recovery"]})


def _promised(result: Any) -> Iterator[Row]:
    for figure in result["figures"]:
        for way, limit in (figure.get("flat") or {}).items():
            ys = [y for _x, y in figure["curves"][way]]
            yield [max(ys) / min(ys)], limit, False, f"{_title(figure)}\n{way}: highest / lowest"
        for limit in figure.get("limits", ()):
            if limit["to"] is None:
                continue
            pairs = zip(figure["samples"][limit["name"]], figure["samples"][limit["to"]])
            label = f"{_title(figure)}\n{limit['name']} / {limit['to']}"
            yield [one / other for one, other in pairs], limit["limit"], limit["at_least"], label


def _title(figure: Any) -> str:
    unit = figure["unit"] if figure["kind"] == "table" else figure["y"]
    return f"{figure['title']} ({unit})"


def _figures(results: Results, name: str) -> list[Any]:
    return results[name]["figures"] if name in results else []


def _log_axis(axes: Axes, left: float, right: float) -> None:
    axes.set_xscale("log")
    axes.set_xlim(left, right)
    ticks = [x for x in (0.001, 0.01, 0.1, 1, 10, 100) if left <= x <= right]
    axes.set_xticks(ticks, [f"{x:g}x" for x in ticks])
    axes.minorticks_off()


def _without_names(axes: Axes) -> None:
    """Rows have theirs above them: beside them, they would leave a phone no room."""
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)


def _with_machine(figure: Figure, results: Results) -> Figure:
    """Below it: what it was measured on."""
    last = max(results.values(), key=lambda result: result["date"])
    lines = [*last["machine"], f"{last['rounds']} rounds, {last['date'][:10]}"]
    if any(result["quick"] for result in results.values()):
        lines.append("quick: few and small samples")
    lines = [line for said in lines for line in textwrap.wrap(said, 60)]
    figure.text(0.01, -0.01, "\n".join(lines), va="top", color=TEXT)
    return figure


def main() -> int:
    """Draw the pictures beside the results."""
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    file = Path(sys.argv[1])
    for picture in draw(json.loads(file.read_text()), file.parent):
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
