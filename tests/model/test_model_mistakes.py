"""Each line of the scripts counts: a changed one breaks its script's contract, or a scenario finds it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest

from tests.bounds import bound
from tests.model.asked import CHANGES, explored_calls, odd_calls
from tests.model.contract import KNOWN_WORDS, Played, broken_clause, played
from tests.model.lock import TEXTS, Call, mistaken
from tests.model.mistakes import MISTAKES
from tests.model.scenarios import SCENARIOS
from tests.simulation.scripts import script

OF_EACH = bound(150, full=1_400)  # calls of a script, as they were made
MUTANTS = [
    (where, verb, right, wrong)
    for where, mistakes in MISTAKES.items()
    for verb, right, *wrongs in mistakes
    for wrong in wrongs
]
# The contract needs more calls than usual bounds have: some show in few.
LOOKED_FOR = bound(MISTAKES.keys() - {"contract"}, full=MISTAKES.keys())


@cache
def calls_of(verb: str) -> list[tuple[Call, Played, Played]]:
    """Calls of a script, odd and explored; what it makes of each, also on a full server."""
    many = OF_EACH * len(CHANGES[verb.rstrip("#")]) // 2
    calls = odd_calls(verb, many) + explored_calls()[verb][:OF_EACH]
    right = script(TEXTS[verb])
    return [(call, played(right, call), played(right, call, is_full=True)) for call in calls]


def broken_by(verb: str, text: str) -> Iterator[str]:
    """What a changed text breaks of the contract, where it differs from the right one."""
    wrong = script(text)
    for place, (call, right, right_if_full) in enumerate(calls_of(verb)):
        found = played(wrong, call)
        differs = found != right or (place % 4 == 0 and played(wrong, call, is_full=True) != right_if_full)
        if differs or place < 40:
            yield broken_clause(wrong, call, found)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("verb", [verb for verb in TEXTS if verb.rstrip("#") in KNOWN_WORDS])
def test_scripts_keep_their_contracts(verb):
    """In all calls of the scenarios, and in others that come of them by a change."""
    right = script(TEXTS[verb])
    for call, found, _ in calls_of(verb):
        assert not broken_clause(right, call, found), (call, found)


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("where", "verb", "right", "wrong"), [m for m in MUTANTS if m[0] in LOOKED_FOR])
def test_mistake_in_a_script_is_found(where, verb, right, wrong):
    """By the contract of its script, or by a scenario in which it makes a difference."""
    if where == "contract":
        assert TEXTS[verb].count(right) == 1
        assert any(broken_by(verb, TEXTS[verb].replace(right, wrong)))
    else:
        with mistaken(verb, right, wrong):
            assert SCENARIOS[where].explored().broken
