"""Seeded simulation: the package's Python and Lua in one process, on one clock, and all that may go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha1
from itertools import chain

import pytest

from tests.bounds import bound
from tests.simulation import calls, live, locks, newest
from tests.simulation.checker import explained, told
from tests.simulation.planted import PLANTED
from tests.simulation.scheduler import World
from tests.simulation.substitutes import substituted

SEED = os.environ.get("SEED")
SEEDS = {
    locks.play: bound(800, full=8_000, deep=500_000),
    calls.play: bound(200, full=2_000, deep=500_000),
    newest.play: bound(20, full=1_500, deep=300_000),
    live.play: bound(16, full=1_000, deep=200_000),
}
FOUND_WITHIN = 700


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    """Clock, threads, chance and network are simulated."""
    with substituted():
        yield


def first_bad(play: Callable[[int], World], seeds: Iterable[int]) -> World | None:
    """The first world in which a promise is not kept."""
    return next((world for seed in seeds if (world := play(seed)).violations), None)


@pytest.mark.parametrize("play", SEEDS, ids=["locks", "calls", "newest", "live"])
def test_simulated_world_keeps_every_promise(play):
    """Thousands of worlds, each with faults of its own; SEED=n plays one of them."""
    world = first_bad(play, [int(SEED)] if SEED else range(SEEDS[play]))
    assert world is None, explained(world)


@pytest.mark.parametrize("play", SEEDS, ids=["locks", "calls", "newest", "live"])
def test_seed_has_one_history(play):
    """Also in another process, without hiredis, after other seeds, and where sets have another order."""
    seeds = range(5 if play in (newest.play, live.play) else 20)
    here = {seed: _digest(play(seed)) for seed in seeds}
    assert {seed: _digest(play(seed)) for seed in seeds} == here
    said = (
        "import sys; sys.modules['hiredis'] = None\n"
        f"from {play.__module__} import play\nfrom tests.simulation import seeds, substitutes\n"
        "with substitutes.substituted():\n"
        f" print({{n: seeds._digest(play(n)) for n in reversed({seeds!r})}})"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, env=env, check=True)
    assert literal_eval(there.stdout) == here


def _digest(world: World) -> str:
    return sha1(told(world).encode()).hexdigest()


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.defect.__name__ for planted in PLANTED])
def test_planted_defect_is_found(monkeypatch, planted):
    """By the seed that is known to find it, or by one of the first, where nothing is wrong without it."""
    planted.defect(monkeypatch)
    world = first_bad(planted.play, chain([planted.seed], range(FOUND_WITHIN)))
    assert world is not None
    print(f"{planted.defect.__name__}: seed {world.seed}: {world.violations[0]}")
    monkeypatch.undo()
    without = planted.play(world.seed)
    assert not without.violations, explained(without)
