"""Beside programs that run the classic recipe: each excludes the other, also after a crash."""

import multiprocessing
import os
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import redis

from celery_setnx import HeldLock, SetnxLock
from celery_setnx.testing import _age
from tests.protocol.client import ClassicClient, Server

pytestmark = pytest.mark.slow

LOCK_DB = 1
NAME = "lock.shared"
LONG_S = 600  # nothing expires because the machine is slow
FORK = multiprocessing.get_context("fork")


class ClassicLock(ClassicClient):
    """The SETNX recipe of the Redis documentation as programs have it: client clocks and all."""

    def __init__(self, client: Any, timeout: int) -> None:
        options = client.connection_pool.connection_kwargs
        super().__init__(Server(options["port"], LOCK_DB), NAME, timeout, clock=time.time)


class OurLock:
    """SetnxLock with the rival's two verbs."""

    def __init__(self, client: Any, timeout: int) -> None:
        self.lock = SetnxLock(client, NAME, lease=timeout + 1)
        self.held: HeldLock | None = None

    def acquire(self) -> bool:
        self.held = self.lock.acquire().lock
        return self.held is not None

    def release(self) -> None:
        self.lock.release()


RIVALS = {"ours": OurLock, "classic": ClassicLock}


def compete(kind: str, url: str, history: Path, start: Any, count: int) -> None:
    """Run sections under the lock, so many; write when each began and ended."""
    lock = RIVALS[kind](redis.Redis.from_url(url, decode_responses=True), LONG_S)
    log = os.open(history, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    start.wait(60)
    while count:
        time.sleep(0.002)  # the recipe polls
        if lock.acquire():
            begin = time.monotonic()
            time.sleep(0.002)  # a section takes its time
            os.write(log, f"{begin} {time.monotonic()} {kind}\n".encode())
            lock.release()
            count -= 1


def stay(kind: str, url: str, inside: Any) -> None:
    """Take the lock, and keep it."""
    if RIVALS[kind](redis.Redis.from_url(url, decode_responses=True), LONG_S).acquire():
        inside.set()
    time.sleep(LONG_S)


def test_ours_and_the_recipe_exclude_each_other(server, locks, foreign_keys, tmp_path):
    """Six processes of both kinds on one lock, fifty sections each: no two overlap."""
    foreign_keys.add(NAME)  # the recipe sets no TTL
    history, start = tmp_path / "history", FORK.Barrier(6)
    about = (server.url(LOCK_DB), history, start, 50)
    rivals = [FORK.Process(target=compete, args=(kind, *about)) for kind in ("ours", "classic") * 3]
    for rival in rivals:
        rival.start()
    for rival in rivals:
        rival.join(60)
    assert [rival.exitcode for rival in rivals] == [0] * 6
    found = [line.split() for line in history.read_text().splitlines()]
    sections = sorted((float(begin), float(end), kind) for begin, end, kind in found)
    assert [pair for pair in pairwise(sections) if pair[1][0] < pair[0][1]] == []
    assert Counter(kind for *_, kind in sections) == {"ours": 150, "classic": 150}
    follow = {(one[2], other[2]) for one, other in pairwise(sections)}
    assert follow >= {("ours", "classic"), ("classic", "ours")}


@pytest.mark.parametrize(("victim", "heir"), [("ours", "classic"), ("classic", "ours")])
def test_lock_of_a_killed_rival_is_taken_over_in_both_directions(server, locks, foreign_keys, victim, heir):
    """kill -9 of one kind in its section: the other waits out the deadline, then takes over."""
    foreign_keys.add(NAME)
    inside = FORK.Event()
    process = FORK.Process(target=stay, args=(victim, server.url(LOCK_DB), inside))
    process.start()
    assert inside.wait(60), "the victim is inside"
    process.kill()
    process.join()
    lock = RIVALS[heir](locks, LONG_S)
    assert not lock.acquire()
    left_s = int(locks.get(NAME)) - locks.time()[0]
    _age(locks, lock=NAME, by_s=left_s - 60)
    assert not lock.acquire(), "a minute before the deadline"
    _age(locks, lock=NAME, by_s=62)
    assert lock.acquire()
    lock.release()
    assert not locks.exists(NAME)
