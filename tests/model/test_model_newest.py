"""Newest wins: each change of a script or of a program is found; and what is not promised.

test_model.py explores the scenarios.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.model.explorer import assert_broken
from tests.model.lock import TEXTS
from tests.model.newest import SAFETY, Replacing

LASTS = "int(math.max(ms, redis.call('PTTL', key)))"
OF_SCRIPTS: list[tuple[str, str, str, str, str, dict[str, Any]]] = [
    (
        "a call that is only reserved counts as sent",
        "reserve",
        "newest.last = now\n",
        "newest.last = now\nnewest.settle(newest.reserved, 'b', '', 0)\n",
        "superseded_by_a_sent",
        {"digests": "xy"},
    ),
    (
        "a start is not noted",
        "acquire",
        "newest.started = math.max(newest.started, generation)",
        "",
        "older_never_starts",
        {"digests": "xy", "bounds": 1},
    ),
    (
        "a start supersedes nobody",
        "acquire",
        "if newest.started > generation or is_replaced then",
        "if is_replaced then",
        "older_never_starts",
        {"digests": "xy", "leading": True},
    ),
    (
        "there is no bound",
        "acquire",
        " and not (may_start and is_overdue)",
        "",
        "overdue_is_not_superseded",
        {"digests": "xy", "bounds": 1},
    ),
    (
        "an overdue call waits",
        "acquire",
        "(may_start and is_overdue)",
        "is_overdue",
        "settled_replaces",
        {"digests": "xyz", "bounds": 1},
    ),
    (
        "a start does not begin the bound anew",
        "acquire",
        "if begins or not is_pending then",
        "if not is_pending then",
        "settled_replaces",
        {"digests": "xyz", "bounds": 1},
    ),
    (
        "one that leads is as all others",
        "acquire",
        "not leads and newest.settled",
        "newest.settled",
        "leading_is_superseded_by_a_start",
        {"digests": "xy", "leading": True},
    ),
    (
        "one that has to wait is not known to be sent",
        "acquire",
        "if may_start or generation <= newest.settled then return end",
        "if true then return end",
        "settled_replaces",
        {"digests": "xyz"},
    ),
    (
        "an older call parks behind a newer one",
        "park",
        "math.max(newest.settled, newest.started) > generation",
        "newest.started > generation",
        "older_is_woken",
        {"digests": "xyz", "slots": 3},
    ),
    (
        "the older call is not told",
        "park",
        "return place and its or false, since",
        "return false, since",
        "older_is_woken",
        {"digests": "xyz"},
    ),
    (
        "the reply ends at the older call, whose turn has come",
        "park",
        "return place and its or false, since",
        "return place and its, since",
        "parking_is_answered",
        {"digests": "xyz"},
    ),
    (
        "parking does not settle",
        "park",
        "newest.settle(generation, task)",
        "",
        "older_is_woken",
        {"digests": "xy", "wipes": 1, "crashes": 1},
    ),
    (
        "a call that ends without a start is not noted",
        "drop",
        "newest.start(generation, ARGV[2])",
        "",
        "duplicate_of_the_newest",
        {"digests": "xx", "revokes": 1},
    ),
    (
        "a duplicate, though another is reserved",
        "reserve",
        "is_pending and is_alone and digest",
        "is_pending and digest",
        "duplicate_of_the_newest",
        {"digests": "xyx"},
    ),
    (
        "a duplicate of a call with other arguments",
        "reserve",
        "newest.digest == digest",
        "true",
        "duplicate_of_the_newest",
        {"digests": "xy"},
    ),
    (
        "a duplicate of a call that has started",
        "reserve",
        "debounce == 0 and is_pending and",
        "debounce == 0 and",
        "duplicate_of_the_newest",
        {"digests": "xx"},
    ),
    ("a TTL is shortened", "acquire", LASTS, "int(ms)", "keys_last", {"digests": "xy"}),
    ("there is no TTL", "reserve", f", 'PX', {LASTS}", "", "keys_last", {"digests": "xy"}),
    (
        "a call that is sent replaces nobody",
        "replace",
        "newest.settle(generation, ARGV[2], ARGV[3], tonumber(ARGV[4]))",
        "",
        "settled_replaces",
        {"digests": "xy"},
    ),
    (
        "a publisher that is late settles a newer one's place",
        "replace",
        "if generation < newest.settled then return end",
        "",
        "superseded_by_a_sent",
        {"digests": "xy"},
    ),
]
OF_PROGRAMS: list[tuple[str, str, dict[str, Any]]] = [
    ("a superseded call stays in line", "older_is_woken", {"digests": "xyz", "leaves": False}),
    (
        "the lock stays held for a retry that is superseded",
        "keeps_nothing",
        {"digests": "xy", "retries": {0: 1}, "hold": True, "frees": False},
    ),
    ("nobody wakes the older call", "older_is_woken", {"digests": "xyz", "wakes_older": False}),
    (
        "a publisher says that it has sent, and sends",
        "superseded_by_a_sent",
        {"digests": "xy", "settles_first": True, "deaths": 1},
    ),
]


@pytest.mark.parametrize(
    ("verb", "right", "wrong", "breaks", "about"),
    [pytest.param(*rest, id=name) for name, *rest in OF_SCRIPTS],
)
def test_mistake_in_a_script_is_found(verb, right, wrong, breaks, about):
    """By the property that it should break."""
    assert TEXTS[verb].count(right) == 1
    world = Replacing(**about, texts={verb: TEXTS[verb].replace(right, wrong)})
    assert_broken(world, breaks, SAFETY, goal=world.is_over)


@pytest.mark.parametrize(("breaks", "about"), [pytest.param(*rest, id=name) for name, *rest in OF_PROGRAMS])
def test_mistake_in_a_program_is_found(breaks, about):
    """By the property that it should break."""
    world = Replacing(**about)
    assert_broken(world, breaks, SAFETY, goal=world.is_over)
