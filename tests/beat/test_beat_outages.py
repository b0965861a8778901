"""Beats whose lock server is away, refuses them, or is locked by hand."""

import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest

from examples.embedded import EmbeddedServer
from tests.beat.beats import LEASE_S, LOCK, SLACK_S
from tests.proxy import Proxy


def refused(proxy: Proxy) -> AbstractContextManager[Any]:
    proxy.cut()
    return proxy.fault("cut_before", times=1_000_000)


AWAY: dict[str, Callable[[Proxy], AbstractContextManager[Any]]] = {
    "no connection": refused,
    "no answer": lambda proxy: proxy.black_hole(),
}


@pytest.mark.parametrize("away", AWAY.values(), ids=AWAY)
def test_nobody_ticks_while_redis_is_away_for_longer_than_the_lease(beats, proxy, journal, away):
    """Then one leads again, what is due fires once, and its lateness is told."""
    beats.start(3, entries={"every": 1.0}, setnx_url=proxy.url(1), setnx_beat_lease=LEASE_S)
    beats.wait_for_ticks(3)
    with away(proxy):
        gone = beats.server_time()
        time.sleep(3 * LEASE_S)  # the outage
        back = beats.server_time()
    during = [tick for tick in beats.ticks() if gone + 0.5 < tick["at"] < back]
    assert during == []
    beats.wait_for_more(3)
    assert next(tick["at"] for tick in beats.ticks() if tick["at"] >= back) < back + LEASE_S + 1 + SLACK_S
    beats.assert_each_once(1.0)
    missed = [entry["missed"] for entry in journal.entries(what="late")]
    assert len([count for count in missed if count >= 2 * LEASE_S - 1]) == 1


def test_short_outage_costs_no_lead(beats, proxy):
    """The leader goes on when Redis answers within its lease, and its ticks go on."""
    beats.start(2, entries={"every": 1.0}, setnx_url=proxy.url(1), setnx_beat_lease=20)
    leader = beats.wait_for_leader()
    beats.wait_for_ticks(2)
    with refused(proxy):
        time.sleep(2)  # the outage
    beats.wait_for_more(3)
    assert beats.leader() is leader
    beats.assert_each_once(1.0)


def test_lock_set_by_hand_pauses_all_beats(beats, locks, foreign_keys):
    """`SETNX 'prefix:{celery.beat:app}' <time>` before they start; each names it, and all go on after it."""
    foreign_keys.add(LOCK)
    pause_s = 45
    until = int(beats.server_time()) + pause_s
    assert locks.setnx(LOCK, until)
    for beat in beats.start(2, entries={"every": 1.0}):
        beat.wait_for_log(f"Stands by; the leader is a foreign client (value '{until}'")
    assert beats.wait_for_ticks(1)[0]["at"] >= until
    beats.wait_for_ticks(3)
    beats.assert_each_once(1.0)


def test_lock_set_by_hand_in_place_of_the_leaders_is_mended(beats, locks):
    """A leader inside its lease is not paused by a value: it renews, and ticks on."""
    (leader,) = beats.start(entries={"every": 1.0}, setnx_beat_lease=LEASE_S)
    beats.wait_for_ticks(1)
    hand = int(beats.server_time()) + 600
    locks.set(LOCK, hand)
    leader.wait_for_log(f"A classic client had overwritten {LOCK} by '{hand}'; repaired.")
    beats.wait_for_more(2)
    assert locks.get(LOCK) != str(hand)


def test_beat_that_may_not_lock_ends_with_an_error(beats, limited):
    """A critical line names what is missing, and the exit code is not 0."""
    url = limited("~*", "+@all", "-eval", "-evalsha")
    (beat,) = beats.start(entries={"every": 1.0}, setnx_url=url)
    assert beat.process.wait(60) != 0
    (line,) = [line for line in beat.log_text().splitlines() if "CRITICAL" in line]
    assert "LockForbidden" in line
    assert "evalsha" in line
    assert beats.ticks() == []


def test_beat_starts_before_its_redis_does(beats):
    """It stands by, says why, and leads when Redis answers."""
    server = EmbeddedServer()
    try:
        server.stop()
        (beat,) = beats.start(entries={"every": 1.0}, setnx_url=server.url(1))
        beat.wait_for_log("Stands by; nobody can lead. Redis does not serve the lock")
        server.start(server.port)
        beat.wait_for_log("Leads now")
        beats.wait_for_ticks(2)
    finally:
        server.stop()
