"""Seeded simulation: the package's Python and Lua in one process, on one clock, and all that may go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
from ast import literal_eval
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from hashlib import sha1
from itertools import chain
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from celery_setnx.call import wake
from celery_setnx.call.back import ComesBack, Waits
from celery_setnx.lock import keeper, lock
from celery_setnx.lock.record import ORIGINAL
from celery_setnx.lock.scripts import Script
from celery_setnx.options import UNSET
from celery_setnx.run import acquire, courier, ends, join, looks, park, run, sweep
from tests.bounds import bound
from tests.simulation import calls, locks
from tests.simulation.checker import explained, told
from tests.simulation.scheduler import World
from tests.simulation.substitutes import monotonic, substituted

SEED = os.environ.get("SEED")
SEEDS = {
    locks.play: bound(800, full=8_000, deep=500_000),
    calls.play: bound(200, full=2_000, deep=500_000),
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


def plant(monkeypatch: pytest.MonkeyPatch, script: Script, good: str, bad: str) -> None:
    """Change a script."""
    assert script.text.count(good) == 1, good
    text = script.text.replace(good, bad)
    monkeypatch.setattr(script, "text", text)
    monkeypatch.setattr(script, "sha", sha1(text.encode()).hexdigest())


@pytest.mark.parametrize("play", SEEDS, ids=["locks", "calls"])
def test_simulated_world_keeps_every_promise(play):
    """Thousands of worlds, each with faults of its own; SEED=n plays one of them."""
    world = first_bad(play, [int(SEED)] if SEED else range(SEEDS[play]))
    assert world is None, explained(world)


@pytest.mark.parametrize("play", SEEDS, ids=["locks", "calls"])
def test_seed_has_one_history(play):
    """Also in another process, without hiredis, after other seeds, and where sets have another order."""
    seeds = range(20)
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


def sweep_serves_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is due is looked at, and does not go on."""
    unserved = SimpleNamespace(waits=1, look_in=None)
    monkeypatch.setattr(sweep, "let_the_line_go_on", lambda *_args, **_more: unserved)


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


def joins_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two calls each is to end with the other's result, which has had the lock only to ask for this one's;
    and is stored as one that retries.
    """
    come_back = join.come_back

    def storing(*args: Any, **more: Any) -> Any:
        try:
            come_back(*args, **more)
        except Waits as waits:
            raise ComesBack(str(waits), when=waits.when) from None

    def joined_by(task: Any, holder: Any, call: Any) -> str | None:
        is_other = holder.task_id != call.task_id and holder.task == task.name
        return holder.task_id if is_other and holder.state == "running" else call.join

    monkeypatch.setattr(acquire, "joined_by", joined_by)
    monkeypatch.setattr(join, "come_back", storing)


def late_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first command of a call that waits by now comes late, and gets the lock that nobody hears of."""
    plant(monkeypatch, lock._ACQUIRE.one, "if is_late or later > 0", "if later > 0")


def backend_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that is delivered again does not ask whether it has ended."""
    monkeypatch.setattr(run.Run, "_result_before", lambda _run: UNSET)


def no_timed_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """The starts of a pace are left to the sweep."""
    monkeypatch.setattr(looks.TimedLooks, "_wake", lambda *_args: None)


def window_not_taken_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that has failed after its release counts as a success."""
    monkeypatch.setattr(ends.Ends, "take_back", lambda *_args: None)


def pace_of_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock is used at twice its rate."""
    text = lock.Terms.__str__

    def doubled(self: lock.Terms) -> str:
        return text(self._replace(starts=2 * self.starts))

    monkeypatch.setattr(lock.Terms, "__str__", doubled)


def twin_of_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that came back does not ask whether the delivery that has sent it has succeeded since."""
    success_before = run.Run._success_before

    def asking(self: run.Run) -> Any:
        return success_before(self) if self.call.redelivered or self.call.copy != ORIGINAL else None

    monkeypatch.setattr(run.Run, "_success_before", asking)


class Planted(NamedTuple):
    """A defect, the scenario that finds it, and a seed by which it does at present: it is played first."""

    play: Callable[[int], World]
    defect: Callable[[pytest.MonkeyPatch], None]
    seed: int


PLANTED = [
    Planted(locks.play, release_of_another, 8),
    Planted(locks.play, late_release_forgotten, 9),
    Planted(locks.play, deadline_from_the_reply, 15),
    Planted(locks.play, loss_without_time, 4),
    Planted(locks.play, pace_of_one_more, 4),
    Planted(calls.play, no_wakeup, 0),
    Planted(calls.play, no_courier, 59),
    Planted(partial(calls.play, task="slow"), line_not_noted, 1),
    Planted(partial(calls.play, task="waits"), sweep_serves_nobody, 86),
    Planted(partial(calls.play, task="paced"), no_timed_look, 11),
    Planted(partial(calls.play, task="once_early"), window_not_taken_back, 18),
    Planted(partial(calls.play, task="joins_late"), joins_each_other, 519),
    Planted(partial(calls.play, task="joins"), late_command, 670),
    Planted(partial(calls.play, task="waits_late"), backend_not_asked, 17),
    Planted(partial(calls.play, task="waits_late"), leaves_late, 1528),
    Planted(partial(calls.play, task="retries"), twin_of_a_retry, 43),
]


@pytest.mark.parametrize("planted", PLANTED, ids=[planted.defect.__name__ for planted in PLANTED])
def test_planted_defect_is_found(monkeypatch, planted):
    """By the seed that is known to find it, or by one of the first."""
    planted.defect(monkeypatch)
    world = first_bad(planted.play, chain([planted.seed], range(FOUND_WITHIN)))
    assert world is not None
    print(f"{planted.defect.__name__}: seed {world.seed}: {world.violations[0]}")
