"""Seeded simulation: the package's Python and Lua in one process, on one clock, with all that may go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha1
from typing import Any

import pytest

from celery_setnx.lock import keeper, lock
from celery_setnx.lock.scripts import Script
from tests.bounds import bound
from tests.simulation import locks
from tests.simulation.checker import explained, told
from tests.simulation.scheduler import World
from tests.simulation.substitutes import monotonic, substituted

SEED = os.environ.get("SEED")
SEEDS = bound(300, small=40, full=10_000, deep=500_000)
FOUND_WITHIN = 1000


@pytest.fixture(autouse=True)
def simulated() -> Iterator[None]:
    """Clock, threads, chance and network are simulated."""
    with substituted():
        yield


def first_bad(play: Callable[[int], World], seeds: range) -> World | None:
    """The first world in which a promise is not kept."""
    return next((world for seed in seeds if (world := play(seed)).violations), None)


def plant(monkeypatch: pytest.MonkeyPatch, script: Script, good: str, bad: str) -> None:
    """Change a script."""
    assert script.text.count(good) == 1, good
    text = script.text.replace(good, bad)
    monkeypatch.setattr(script, "text", text)
    monkeypatch.setattr(script, "sha", sha1(text.encode()).hexdigest())


@pytest.mark.parametrize("play", [locks.play])
def test_simulated_world_keeps_every_promise(play):
    """Thousands of worlds, each with faults of its own; SEED=n plays one of them."""
    world = first_bad(play, range(int(SEED), int(SEED) + 1) if SEED else range(SEEDS))
    assert world is None, explained(world)


@pytest.mark.parametrize("play", [locks.play])
def test_seed_has_one_history(play):
    """Also in another process, in which sets have another order."""
    seeds = range(3, 6)
    here = [sha1(told(play(seed)).encode()).hexdigest() for seed in seeds]
    assert [sha1(told(play(seed)).encode()).hexdigest() for seed in seeds] == here
    said = (
        f"from {play.__module__} import play\nfrom tests.simulation.checker import told\n"
        "from tests.simulation.substitutes import substituted\nfrom hashlib import sha1\n"
        f"with substituted():\n for n in {seeds!r}: print(sha1(told(play(n)).encode()).hexdigest())"
    )
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    there = subprocess.run([sys.executable, "-c", said], capture_output=True, text=True, env=env, check=True)
    assert there.stdout.split() == here


def release_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lock._RELEASE, "if h_token ~= token then return lost() end", "")


def renewals_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """After one that failed."""
    plan = keeper.Keeper._plan

    def once(self: Any, watched: Any) -> None:
        plan(self, watched)
        if watched.failing:
            watched.due = float("inf")

    monkeypatch.setattr(keeper.Keeper, "_plan", once)


def late_release_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Redis did not hear is not tried again."""
    monkeypatch.setattr(keeper.Keeper, "try_again", lambda *_args: None)


def deadline_from_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder counts its lease from the reply, and not from before it asked."""

    def valid_until(self: Any, before: float, remaining_us: int) -> float:
        return monotonic() + remaining_us / 1e6

    monkeypatch.setattr(lock.SetnxLock, "_valid_until", valid_until)


def loss_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """As it was: a release that is asked twice, of a lock that Redis has lost meanwhile, raised a TypeError."""
    word_of = lock.SetnxLock._word_of

    def raising(self: Any, ask: Any, *args: Any) -> Any:
        def asked() -> Any:
            reply = ask()
            if len(reply) > 4:
                int(reply[4])
            return reply

        return word_of(self, asked, *args)

    monkeypatch.setattr(lock.SetnxLock, "_word_of", raising)


DEFECTS = [
    (locks.play, release_of_another),
    (locks.play, renewals_stop),
    (locks.play, late_release_forgotten),
    (locks.play, deadline_from_the_reply),
    (locks.play, loss_without_time),
]


@pytest.mark.parametrize(("play", "defect"), DEFECTS, ids=lambda value: value.__name__)
def test_planted_defect_is_found(monkeypatch, play, defect, record_property):
    """Each by one of the seeds that `make test` plays anyway, or soon after."""
    defect(monkeypatch)
    began = time.process_time()
    world = first_bad(play, range(FOUND_WITHIN))
    assert world is not None
    record_property("found", f"seed {world.seed}, {time.process_time() - began:.1f} s")
    print(f"{defect.__name__}: seed {world.seed}, {time.process_time() - began:.1f} s: {world.violations[0]}")
