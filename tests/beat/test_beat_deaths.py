"""The leader dies or is stopped, and another one takes over."""

import os
import signal
import time

import pytest

from tests.beat.beats import INTERVAL_S, LEASE_S, SLACK_S, Beat, assert_clean


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("count", "kills", "entries", "lease", "same_host"),
    [
        pytest.param(3, 10, 0, LEASE_S, False, id="PersistentScheduler, other hosts, lease 3 s"),
        pytest.param(2, 5, 0, 60, True, id="PersistentScheduler, same host, lease 60 s"),
        pytest.param(2, 2, 200, LEASE_S, False, id="201 entries"),
    ],
)
def test_kills_of_the_leader_cost_a_lease_each_and_no_tick_comes_twice(
    beats, report, journal, request, count, kills, entries, lease, same_host
):
    """A tick a second, kill -9; on the same host a proof of its death costs much less than the lease.

    What was due meanwhile fires once each, and a take-over costs no longer than with one entry.
    """
    others = {f"e{number}": 60.0 for number in range(entries)}
    conf = {"setnx_beat_lease": lease, "setnx_same_host": same_host}
    beats.start(count, entries={**others, "every": INTERVAL_S}, **conf)
    deaths = beats.end_leaders(kills)
    beats.assert_each_once(INTERVAL_S)
    assert max(deaths) < LEASE_S + 1 + INTERVAL_S + SLACK_S
    assert beats.worst_gap() < LEASE_S + 1 + INTERVAL_S + SLACK_S
    assert [name for name in others if len(beats.ticks(name)) > 2] == []
    # What was journalled was sent, but for a leader that was killed in between.
    assert len(journal.entries(what="tick")) - kills <= beats.messages() <= len(journal.entries(what="tick"))
    report(request.node.callspec.id, beats, deaths)


def test_counter_of_runs_and_missed_ticks_survives_the_leader(beats):
    """A tick that comes late after a take-over is logged, signalled and counted in Redis."""
    beats.start(2, entries={"every": INTERVAL_S}, setnx_beat_lease=LEASE_S)
    leader = beats.wait_for_leader()
    runs = beats.wait_for_ticks(2)[-1]["runs"]
    leader.kill()
    follower = beats.wait_for_leader(but=leader)
    tick = beats.wait_for_ticks(1, pid=follower.pid)[0]
    assert tick["runs"] in (runs + 1, runs + 2)  # the dead one may have sent another
    late = beats._journal.wait_for("late", entry="every")[0]
    assert late["missed"] == tick["missed"] == int(late["late_s"] / INTERVAL_S) >= 1
    follower.wait_for_log(f"beat: every is sent {late['late_s']:.1f} s late")
    follower.wait_for_log("beat: Leads now: took over")


@pytest.mark.timeout(180)
def test_terminated_leader_hands_the_lead_over_at_once(beats, report):
    """SIGTERM gives the lead back: the next tick does not wait for the lease of a minute."""

    def stop(leader: Beat) -> None:
        assert leader.stop() == 0
        assert_clean(leader.log_text())

    beats.start(3, entries={"every": INTERVAL_S}, setnx_beat_lease=60)
    ends = beats.end_leaders(3, stop)
    assert max(ends) < 1 + INTERVAL_S + SLACK_S
    beats.assert_each_once(INTERVAL_S)
    report("SIGTERM instead of kill, lease 60 s", beats, ends)


@pytest.mark.timeout(180)
def test_frozen_leader_sends_nothing_more_when_it_wakes(beats, report):
    """SIGSTOP past the lease, then SIGCONT: at most the one tick per stop that was past its check."""
    beats.start(2, entries={"every": INTERVAL_S}, setnx_beat_lease=LEASE_S)
    stops, gaps = 5, []
    for number in range(stops):
        leader = beats.wait_for_leader()
        beats.wait_for_ticks(1, pid=leader.pid)
        time.sleep(0.2 * number)  # at different moments of a second
        leader.freeze()
        frozen = beats.server_time()
        follower = beats.wait_for_leader(but=leader)
        gaps.append(beats.wait_for_ticks(1, pid=follower.pid)[-1]["at"] - frozen)
        thawed = len(beats.ticks(pid=leader.pid))
        leader.thaw()
        leader.wait_for_log("No longer leads", number + 1)
        beats.wait_for_more(2, pid=follower.pid)
        assert len(beats.ticks(pid=leader.pid)) <= thawed + 1
        follower.freeze()  # so that the one that was frozen leads again
        beats.wait_for_leader(but=follower)
        follower.thaw()
        follower.wait_for_log("No longer leads", number + 1)
    beats.assert_each_once(INTERVAL_S, stops=2 * stops)
    report("SIGSTOP past the lease instead of kill", beats, gaps)


def test_sigint_ends_a_standby_cleanly(beats):
    """A beat that does not lead ends with code 0 and disturbs nobody."""
    beats.start(2, entries={"every": INTERVAL_S})
    leader = beats.wait_for_leader()
    standby = next(beat for beat in beats.all if beat is not leader)
    standby.wait_for_log("Stands by; the leader is celery beat[beats] on beat@")
    os.kill(standby.pid, signal.SIGINT)
    assert standby.process.wait(60) == 0
    assert_clean(standby.log_text())
    beats.wait_for_more(1)
    assert beats.leader() is leader
