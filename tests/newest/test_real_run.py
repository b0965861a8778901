"""A small run of newest wins, and one of debounce; and the judge finds each violation in made-up journals.

`python -m tests.newest` is the same at full size.
"""

import pytest

from tests.newest.__main__ import WAYS, lines, played
from tests.newest.judge import judged

CALLS, KEYS = 1000, 20


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_newest_call_is_the_last_to_run_whoever_is_killed(way):
    """Nothing is broken, although processes are killed, messages come twice, and most calls are replaced."""
    verdict, _ = played(way, CALLS, KEYS, seed=0)
    said = "\n".join(lines(way, verdict))
    assert not verdict.broken, said
    kills = {name: verdict.counts[f"killed {name}"] for name in ("publishers", "workers", "bodies")}
    assert kills == dict.fromkeys(kills, 1), said
    for what in ("bodies", "superseded", "redeliveries", "copies put into the broker"):
        assert verdict.counts[what] > KEYS, said


def call(name, t, *, sent=True, received=True):
    """A call of one key whose generation is the time at which it was reserved."""
    about = {"id": name, "t": t, "began": t, "key": "k", "version": name.upper(), "generation": t}
    return [
        {"kind": "reserved", **about},
        *([{"kind": "sent", "id": name, "t": t + 0.1}] if sent else []),
        *([{"kind": "received", "id": name, "t": t + 0.2, "again": False}] if received else []),
    ]


def body(name, t, generation, fence=None):
    return [{"kind": "begin", "id": name, "t": t, "key": "k", "generation": generation, "fence": fence or t}]


def skipped(by):
    return ("SUCCESS", {"celery_setnx": "skipped", "superseded_by": by})


A, B = call("a", 1), call("b", 2)
BOTH_RAN = {"a": ("SUCCESS", "A"), "b": ("SUCCESS", "B")}


def broken(records, results, quiet_s=0.0, most_s=0.0):
    """What is broken, a word each."""
    records = sorted((record for part in records for record in part), key=lambda record: record["t"])
    return judged(records, results, quiet_s, most_s).broken


def test_run_in_order_is_not_broken():
    """Nor one whose older call was replaced."""
    assert broken([A, B, body("a", 3, 1), body("b", 4, 2)], BOTH_RAN) == []
    assert broken([A, B, body("b", 3, 2)], {**BOTH_RAN, "a": skipped("b")}) == []


def test_older_body_after_a_newer_one_is_found():
    """Its generation fell, and the last body is not the newest call's."""
    found = broken([A, B, body("b", 3, 2), body("a", 4, 1)], BOTH_RAN)
    assert ["fell" in what for what in found] == [True, False]
    assert "its last body" in found[1]


def test_key_whose_newest_call_did_not_run_is_found():
    """Though it has ended."""
    found = broken([A, B, body("a", 3, 1)], {**BOTH_RAN, "b": skipped("a")})
    assert ["its last body" in found[0], "skipped for no newer" in found[1]] == [True, True]


@pytest.mark.parametrize("end", [None, ("FAILURE", "?"), ("SUCCESS", "other"), skipped("b"), skipped("x")])
def test_call_that_ends_otherwise_is_found(end):
    """Not at all, with an error, with another's result, or for a call that is not newer."""
    ended = {"b": end} if end else {}
    (found,) = broken([A, B, body("a", 3, 1), body("b", 4, 2)], {"a": BOTH_RAN["a"], **ended})
    assert "ended with" in found or "skipped for" in found


def test_call_that_was_sent_later_with_an_older_number_is_found():
    """Its publishing began after the other's had returned."""
    late = [{**record, **({"generation": 0.5} if "generation" in record else {})} for record in call("b", 2)]
    found = broken([A, late, body("b", 3, 0.5), body("a", 4, 1)], BOTH_RAN)
    assert ["was published after" in what for what in found] == [True]


def test_call_that_nobody_received_is_found_unless_a_worker_was_killed():
    """A worker that is killed as it reads loses one message: kombu's, and none of ours."""
    lost = [A, call("b", 2, received=False), body("a", 3, 1)]
    assert len(broken(lost, {"a": BOTH_RAN["a"]})) == 1
    killed = [{"kind": "kill", "how": "worker", "t": 2}]
    assert broken([*lost, killed], {"a": BOTH_RAN["a"]}) == []
    replaced = [A, B, call("c", 2.5, received=False), body("a", 3, 1), killed]
    assert broken(replaced, {"a": BOTH_RAN["a"], "b": skipped("c")}) == []


def test_call_that_was_not_sent_replaces_nobody():
    """Its publisher was killed."""
    assert broken([A, call("b", 2, sent=False, received=False), body("a", 3, 1)], {"a": BOTH_RAN["a"]}) == []


@pytest.mark.parametrize(("at", "is_early"), [(4.8, True), (5, False)])
def test_body_before_its_call_is_due_is_found(at, is_early):
    """It is due when it has been quiet for so long, or the first has waited for the bound."""
    ran = {"b": BOTH_RAN["b"], "a": skipped("b")}
    assert len(broken([A, B, body("b", at, 2)], ran, 3, 60)) == is_early
    assert len(broken([A, B, body("b", at, 2)], ran, 60, 4)) == is_early
