"""Seeded simulation: the package's Python and Lua in one process, on one clock, and all that may go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha1
from typing import Any

import pytest

from celery_setnx.call import wake
from celery_setnx.lock import keeper, lock
from celery_setnx.lock.scripts import Script
from celery_setnx.run import courier, park, run
from tests.bounds import bound
from tests.simulation import calls, locks
from tests.simulation.checker import explained, told
from tests.simulation.scheduler import World
from tests.simulation.substitutes import monotonic, substituted

SEED = os.environ.get("SEED")
SEEDS = {
    locks.play: bound(300, small=40, full=2_000, deep=500_000),
    calls.play: bound(80, small=10, full=400, deep=500_000),
}
FOUND_WITHIN = 500


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


@pytest.mark.parametrize("play", SEEDS, ids=["locks", "calls"])
def test_simulated_world_keeps_every_promise(play):
    """Thousands of worlds, each with faults of its own; SEED=n plays one of them."""
    world = first_bad(play, range(int(SEED), int(SEED) + 1) if SEED else range(SEEDS[play]))
    assert world is None, explained(world)


@pytest.mark.parametrize("play", SEEDS, ids=["locks", "calls"])
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
    plant(monkeypatch, lock._RELEASE, "if h_token ~= token then", "if not h_token then")


def late_release_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that Redis did not hear is not tried again."""
    monkeypatch.setattr(keeper.Keeper, "try_again", lambda *_args: None)


def deadline_from_the_reply(monkeypatch: pytest.MonkeyPatch) -> None:
    """A holder counts its lease from the reply, and not from before it asked."""

    def valid_until(self: Any, before: float, remaining_us: int) -> float:
        return monotonic() + remaining_us / 1e6

    monkeypatch.setattr(lock.SetnxLock, "_valid_until", valid_until)


def loss_without_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A release that is asked twice, of a lock that Redis has lost meanwhile, raises a TypeError."""
    word_of = lock.SetnxLock._word_of

    def raising(self: Any, ask: Any, *args: Any) -> Any:
        def asked() -> Any:
            reply = ask()
            if len(reply) > 4:
                int(reply[4])
            return reply

        return word_of(self, asked, *args)

    monkeypatch.setattr(lock.SetnxLock, "_word_of", raising)


def no_wakeup(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever hands a lock over sends nothing."""
    monkeypatch.setattr(wake, "_send", lambda *_args: None)


def line_not_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call parks, and no sweep is told."""
    monkeypatch.setattr(park, "look_within", lambda *_args: "epoch")


def no_courier(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call parks, and nothing of it is left with the broker."""
    monkeypatch.setattr(courier.Order, "send", lambda *_args, **_more: None)


def leaves_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A delivery that has sent itself again leaves the line, in which the new message stands by then."""
    end_wait = run.Run._end_wait

    def leave(self: Any, *, parked: bool, goes_on: bool) -> None:
        end_wait(self, parked=parked, goes_on=goes_on)
        if self.asking.lingers_since and goes_on and not parked:
            self.asking.leave()

    monkeypatch.setattr(run.Run, "_end_wait", leave)


def pace_of_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is used at twice its rate."""
    text = lock.Terms.__str__

    def doubled(self: lock.Terms) -> str:
        return text(self._replace(starts=2 * self.starts))

    monkeypatch.setattr(lock.Terms, "__str__", doubled)


DEFECTS: list[tuple[Callable[[int], World], Callable[[pytest.MonkeyPatch], None]]] = [
    (locks.play, release_of_another),
    (locks.play, late_release_forgotten),
    (locks.play, deadline_from_the_reply),
    (locks.play, loss_without_time),
    (locks.play, pace_of_one_more),
    (calls.play, no_wakeup),
    (calls.play, line_not_noted),
    (calls.play, no_courier),
    (calls.play, leaves_late),
]


@pytest.mark.parametrize(("play", "defect"), [pytest.param(*pair, id=pair[1].__name__) for pair in DEFECTS])
def test_planted_defect_is_found(monkeypatch, play, defect):
    """Each by one of the seeds that `make test` plays anyway, or soon after."""
    defect(monkeypatch)
    began = time.process_time()
    world = first_bad(play, range(FOUND_WITHIN))
    assert world is not None
    print(f"{defect.__name__}: seed {world.seed}, {time.process_time() - began:.1f} s: {world.violations[0]}")
