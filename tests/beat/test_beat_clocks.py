"""Beats on hosts whose clocks differ: while one leads, the lock server's clock counts."""

import struct
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import cycle
from typing import Any

import pytest

from tests.beat.beats import LEASE_S, SLACK_S, Beat, with_tables
from tests.chaos.stage import MissingTool, clock_shim
from tests.harness import wait_until
from tests.topologies.servers import not_here

SKEW_S = 30


@pytest.fixture
def skewed(beats, tmp_path) -> Callable[..., Beat]:
    """Starts a beat whose wall clock is so many seconds ahead."""
    try:
        shim = clock_shim(tmp_path)
    except MissingTool as missing:
        not_here(str(missing))

    def start(seconds: int, **options: Any) -> Beat:
        clock = tmp_path / f"{seconds}.clock"
        clock.write_bytes(struct.pack("q", seconds))
        environment = {"LD_PRELOAD": str(shim), "CHAOS_CLOCK": str(clock), **options.pop("environment", {})}
        return beats.start(environment=environment, setnx_beat_lease=LEASE_S, **options)[0]

    return start


@pytest.mark.timeout(400)
def test_ticks_follow_the_clock_of_the_server_whoever_leads(beats, skewed, report):
    """Leaders 30 s ahead, behind and right are killed in turn: no tick twice, no hole, crontabs on time."""
    entries = {"every": 1.0, "minutely": "* * * * *"}
    clocks = cycle((SKEW_S, -SKEW_S, 0))
    leader, deaths = skewed(next(clocks), entries=entries), []
    until = beats.server_time() + 140
    while beats.server_time() < until:
        follower = skewed(next(clocks), entries=entries)
        follower.wait_for_log("Stands by; the leader is")
        beats.wait_for_ticks(5, pid=leader.pid)
        leader.kill()
        dead = beats.server_time()
        deaths.append(beats.wait_for_more(1)[0]["at"] - dead)
        leader = follower
    assert len(deaths) >= 3
    beats.assert_each_once(1.0)
    assert beats.worst_gap() < LEASE_S + 1 + 1 + SLACK_S
    minutes = [int(tick["at"] // 60) for tick in beats.ticks("minutely")]
    assert minutes == list(range(minutes[0], minutes[0] + len(minutes)))
    assert len(minutes) >= 2
    assert max(tick["at"] % 60 for tick in beats.ticks("minutely")) < LEASE_S + 1 + SLACK_S
    report("clocks 30 s ahead, behind and right", beats, deaths)


@pytest.mark.parametrize("seconds", [SKEW_S, -SKEW_S])
def test_interval_is_kept_by_a_leader_with_another_clock(beats, skewed, seconds):
    """From its first tick on, restarts included."""
    beat = skewed(seconds, entries={"every": 2.0})
    beats.wait_for_ticks(3)
    stopped = time.monotonic()
    assert beat.stop() == 0
    beat.start()
    away_s = time.monotonic() - stopped
    beats.wait_for_ticks(6)
    beats.assert_each_once(2.0)
    assert beats.worst_gap() < 2 + 1 + away_s + SLACK_S


def an_hour_ago() -> datetime:
    return datetime.now(timezone.utc) - timedelta(hours=1)


@pytest.mark.parametrize("seconds", [SKEW_S, -SKEW_S])
def test_interval_in_the_tables_is_kept_by_a_leader_with_another_clock(
    beats, skewed, django_tables, tables, row, seconds
):
    """Also when the tables change, and all rows with their last runs are read again."""
    row("every", last_run_at=an_hour_ago())
    beat = skewed(seconds, **with_tables(django_tables))
    beats.wait_for_ticks(4)
    row("other", last_run_at=an_hour_ago())
    later = datetime.now(timezone.utc) + timedelta(hours=1)  # changes are told apart by clocks as well
    tables.PeriodicTasks.objects.update(last_update=later)
    beat.wait_for_log("Schedule changed")
    beats.wait_for_more(4)
    beats.assert_each_once(1.0)
    assert beats.worst_gap() < 1 + 1 + SLACK_S


@pytest.mark.timeout(240)
def test_crontab_in_the_tables_is_not_sent_again_by_a_leader_with_another_clock(
    beats, skewed, django_tables, tables, row
):
    """Its schedule asks the host's clock, so one that is fast sends it early; the next leader knows that."""
    row("minutely", crontab=tables.CrontabSchedule.objects.create(), last_run_at=an_hour_ago())
    fast = skewed(SKEW_S, **with_tables(django_tables))
    beats.wait_for_ticks(1, "minutely")  # of the hour before
    wait_until(lambda: len(beats.ticks("minutely")) >= 2, "the next minute", 70)
    right = skewed(0, **with_tables(django_tables))
    right.wait_for_log("Stands by; the leader is")
    fast.kill()
    right.wait_for_log("Leads now")
    minute = beats.ticks("minutely")[1]["at"] + SKEW_S  # what the fast host took it for
    wait_until(lambda: beats.server_time() > minute + SLACK_S, "the minute itself has come and gone", 70)
    assert len(beats.ticks("minutely")) == 2
    wait_until(lambda: len(beats.ticks("minutely")) >= 3, "the minute after it", 90)
    assert beats.ticks("minutely")[2]["at"] % 60 < SLACK_S
