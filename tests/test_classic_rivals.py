"""Beside programs that run the classic recipe: each excludes the other, also after a crash."""

import os
import signal
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from examples.embedded import EmbeddedServer
from tests.harness import wait_until
from tests.rivals import ClassicLock, OurLock

LOCK_DB = 1
NAME = "lock.shared"


def start(kind: str, server: EmbeddedServer, history: Path, seconds: float, section_s: float) -> Any:
    arguments = [kind, server.url(LOCK_DB), NAME, str(history), str(seconds), str(section_s)]
    return subprocess.Popen([sys.executable, "-m", "tests.rivals", *arguments])


def sections(history: Path) -> list[tuple[str, float, float]]:
    """Kind, begin and end of every section, in order of their begins."""
    open_since: dict[str, float] = {}
    found = []
    for line in history.read_text().splitlines():
        kind, pid, what, at = line.split()
        if what == "begin":
            open_since[pid] = float(at)
        else:
            found.append((kind, open_since.pop(pid), float(at)))
    return sorted(found, key=lambda section: section[1])


def test_ours_and_the_recipe_exclude_each_other(server, locks, foreign_keys, tmp_path):
    """Six processes of both kinds on one lock for five seconds: no two sections overlap."""
    foreign_keys.add(NAME)  # the recipe sets no TTL
    history = tmp_path / "history"
    rivals = [start(kind, server, history, 5, 0.002) for kind in ("ours", "classic") * 3]
    assert [rival.wait(30) for rival in rivals] == [0] * 6
    found = sections(history)
    overlapping = [pair for pair in pairwise(found) if pair[1][1] < pair[0][2]]
    assert overlapping == []
    counts = Counter(kind for kind, _begin, _end in found)
    assert min(counts["ours"], counts["classic"]) > 20


@pytest.mark.parametrize(("victim", "heir"), [("ours", ClassicLock), ("classic", OurLock)])
def test_lock_of_a_killed_rival_is_taken_over_in_both_directions(
    server, locks, foreign_keys, tmp_path, victim, heir
):
    """kill -9 of one kind in its section: the other waits out the deadline, then takes over."""
    foreign_keys.add(NAME)
    history = tmp_path / "history"
    process = start(victim, server, history, 30, 30)
    wait_until(lambda: history.exists() and "begin" in history.read_text(), "the victim is inside")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    deadline = int(locks.get(NAME))
    lock = heir(locks, NAME, 2)
    assert not lock.acquire()
    wait_until(lock.acquire, "taken over")
    assert locks.time()[0] >= deadline
    lock.release()
    assert not locks.exists(NAME)


def test_recipe_is_kept_out_while_ours_is_renewed(locks, foreign_keys):
    """A classic client never gets a lock that its holder keeps renewing, far beyond one lease."""
    ours = OurLock(locks, NAME, 1)
    assert ours.acquire()
    assert ours.held is not None
    until = locks.time()[0] + 5
    rival = ClassicLock(locks, NAME, 2)
    while locks.time()[0] < until:
        ours.held.renew()
        assert not rival.acquire()
    ours.release()
    assert rival.acquire()
    rival.release()
