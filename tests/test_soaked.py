"""The judge of the soak finds each violation in a journal made by hand, and none in a similar journal."""

import pytest

from benchmarks.soaked import check, table

STUCK_S = 6.0


def begin(t, call="a", pid=1, key="k"):
    return {"kind": "begin", "t": t, "call": call, "key": key, "pid": pid}


def end(t, call="a", pid=1, key="k"):
    return {"kind": "end", "t": t, "call": call, "key": key, "pid": pid}


def kill(t, call="a", pid=1, how="process"):
    return {"kind": "kill", "t": t + 0.01, "before": t, "call": call, "pid": pid, "how": how}


def sent(t, call="a", key="k"):
    return {"kind": "sent", "t": t, "call": call, "key": key}


def skip(t, call="a"):
    return {"kind": "skip", "t": t, "call": call, "pid": 9}


def refused(t, key="k"):
    return {"kind": "refused", "t": t, "key": key}


def found(*records):
    """The violations in a journal: each name once for each time that it was found."""
    return [name for name, ways in check(records, STUCK_S).found.items() for _ in ways]


def after_a_kill(*records):
    """A call whose body is killed at 1.5, and what comes then."""
    return found(sent(0), begin(1), kill(1.5), *records)


def test_body_inside_another_is_an_overlap():
    """Of two processes that live."""
    assert found(begin(1), begin(2, "b", 2), end(3, "b", 2), end(4)) == ["overlap"]


@pytest.mark.parametrize(("key", "at"), [("other", 2), ("k", 4.5)])
def test_bodies_of_two_keys_or_one_after_the_other_do_not_overlap(key, at):
    """They may all run."""
    assert found(begin(1), end(4), begin(at, "b", 2, key), end(5, "b", 2, key)) == []


def test_body_that_was_killed_overlaps_no_later_one():
    """It may overlap an earlier one: its life ends just before the kill."""
    assert after_a_kill(begin(1.6, "a", 2), end(2, "a", 2)) == []
    assert found(begin(1), begin(1.4, "b", 2), kill(1.5), end(2, "b", 2)) == ["overlap"]


def test_every_body_that_begins_beside_another_counts():
    """Three within one long body are three."""
    within = [r for n in (2, 3, 4) for r in (begin(n, f"b{n}", n), end(n + 0.5, f"b{n}", n))]
    assert found(begin(1), *within, end(9)) == ["overlap"] * 3


def test_call_that_is_completed_twice_ran_twice():
    """One that was killed in between did not."""
    assert found(begin(1), end(2), begin(3), end(4)) == ["twice"]
    assert after_a_kill(begin(3, pid=2), end(4, pid=2)) == []


def test_call_that_leaves_no_trace_is_lost():
    """So is one whose body was killed, and that came no more."""
    assert found(sent(0)) == ["lost"]
    assert after_a_kill() == ["lost"]


@pytest.mark.parametrize("kind", ["end", "skip", "failed", "queued"])
def test_call_with_an_answer_is_not_lost(kind):
    """Nor one that the broker still has."""
    assert found(sent(0), begin(0.5), {"kind": kind, "t": 1, "call": "a", "pid": 1}) == []


def test_killed_call_that_is_skipped_for_the_dead_is_found():
    """Its second delivery met the lock that its first had left behind."""
    assert after_a_kill(skip(1.7)) == ["skipped"]


def test_killed_call_that_is_skipped_for_a_living_body_is_not():
    """A body that began as the call was skipped may have had the lock before it said so."""
    assert after_a_kill(begin(1.6, "b", 2), skip(1.7), end(3, "b", 2)) == []
    assert after_a_kill(skip(1.7), begin(1.8, "b", 2), end(3, "b", 2)) == []


def test_killed_call_that_is_skipped_for_a_body_of_the_past_or_of_another_key_is_found():
    """Neither had the lock when the call was skipped."""
    past = found(begin(0, "b", 2), end(0.9, "b", 2), sent(0), begin(1), kill(1.5), skip(1.7))
    assert past == ["skipped"]
    other = after_a_kill(begin(1.6, "b", 2, "other"), skip(1.7), end(3, "b", 2, "other"))
    assert other == ["skipped"]


def test_killed_call_that_is_skipped_long_before_the_next_body_is_found():
    """That body had not asked for the lock yet."""
    assert after_a_kill(skip(1.7), begin(3, "b", 2), end(4, "b", 2)) == ["skipped"]


def test_skip_before_the_kill_or_of_a_call_that_was_completed_is_none():
    """The first is of an earlier delivery, the second of one that was not needed."""
    assert found(sent(0), skip(0.5), begin(1), kill(1.5)) == []
    assert after_a_kill(skip(1.7), begin(4, pid=2), end(5, pid=2)) == []


def test_key_without_a_body_for_too_long_after_a_kill_is_stuck():
    """Its calls were published or refused; whether a body comes at last does not matter."""
    calls = [refused(t) for t in range(2, 12)]
    assert after_a_kill(*calls, begin(8, "b", 2), end(8.5, "b", 2), begin(9, pid=3), end(9.5, pid=3)) == [
        "stuck"
    ]
    assert after_a_kill(*calls, skip(20)) == ["skipped", "stuck"]


def test_key_that_is_used_again_in_time_is_not_stuck():
    """Nor one that nobody called, nor one that another body uses."""
    calls = [refused(t) for t in range(2, 12)]
    last = [begin(13, pid=4), end(14, pid=4)]
    assert after_a_kill(*calls, begin(7, "b", 2), end(8, "b", 2), *last) == []
    assert after_a_kill(*last) == []
    assert after_a_kill(*(refused(t, "other") for t in range(2, 12)), *last) == []
    assert found(begin(0, "b", 2), sent(0), begin(1), kill(1.5), *calls, end(11, "b", 2), *last) == [
        "overlap"
    ]


def test_kill_that_met_no_body_is_no_kill():
    """The body had just ended: nothing was killed but a process that waits."""
    assert check([begin(1), end(2), kill(2.1)], STUCK_S).counts["kills"] == 0
    assert check([begin(1), kill(1.5), kill(1.6)], STUCK_S).counts["kills"] == 1


def test_every_violation_is_counted_and_told():
    """What is counted is what was found."""
    verdict = check([sent(0), begin(1), begin(2, "b", 2), end(3, "b", 2), kill(4), sent(5, "c")], STUCK_S)
    told = verdict.as_json()
    assert told["violations"] == {"overlap": 1, "twice": 0, "skipped": 0, "lost": 2, "stuck": 0}
    assert (told["kills"], told["bodies"], told["sent"]) == (1, 2, 2)
    assert table({"x": told}).endswith("\n| x | 1000 | 0 | 0 | 2000 | 0 |")
