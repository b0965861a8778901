"""Each word of the scripts counts: a change breaks a contract, or a scenario or a schedule finds it."""

from __future__ import annotations

import pytest

from tests.bounds import bound
from tests.model.contract import KNOWN_WORDS, broken_clause
from tests.model.lock import TEXTS, mistaken
from tests.model.mutation import CHECKED, calls_of, equals, is_noticed, mutants_of
from tests.model.scenarios import SCENARIOS
from tests.simulation.scripts import script

EVERY = bound(12, full=1)  # of the mutants
NEED_MORE = bound(2, full=0)  # calls than there are
AT_ONCE = 100
OF_SCENARIOS = [
    ("line, a lease ends too soon", "acquire", "'|' .. copy .. '|' .. misses", "'||' .. misses"),
    (
        "line, children that die",
        "acquire",
        "local needs_turn = word == 'taken_over' or not p.is_live",
        "local needs_turn = word ~= 'taken_over' and not p.is_live",
    ),
    (
        "line, known in line",
        "acquire",
        "    if string.match(redis.call('HGET', calls, task) or '', '^%d') then return end\n",
        "",
    ),
    ("line, tickets that are forgotten", "acquire", "'|' .. copy .. '|' .. misses", "'|' .. copy .. '|0'"),
    (
        "line, wake-ups alone, calls that leave",
        "acquire",
        "    redis.call('ZREM', places, task)\n    redis.call('HDEL', calls, task)\n",
        "    redis.call('HDEL', calls, task)\n",
    ),
    (
        "line, workers that die, three calls",
        "acquire",
        "if line and p.heir and p.kind ~= 'for me' then",
        "if false then",
    ),
    (
        "lock, death that can be proved",
        "acquire",
        "token ~= '' and p.token == token",
        "token ~= ''",
    ),
    ("line of permits, limits that differ", "release", "number < limit_of(terms)", "true"),
]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("verb", [verb for verb in TEXTS if verb.rstrip("#") in KNOWN_WORDS])
def test_scripts_keep_their_contracts(verb):
    """In all calls of the scenarios, and in others that come of them by a change."""
    right = script(TEXTS[verb])
    for call, found, _ in calls_of(verb):
        assert not broken_clause(right, call, found), (call, found)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("file", "first"),
    [(file, first) for file in CHECKED for first in range(0, len(mutants_of(file)), AT_ONCE)],
)
def test_changes_of_a_script_are_noticed(file, first):
    """But those that make no difference."""
    wrong = [m for m in mutants_of(file)[first : first + AT_ONCE] if m.line not in equals()[file]]
    missed = [f"{m.file}.lua:{m.number}: {m.line}" for m in wrong[::EVERY] if not is_noticed(m)]
    assert len(missed) <= NEED_MORE, missed


def test_changes_that_make_no_difference_are_there():
    """Each that is said to make none is a change of its file."""
    for file, lines in equals().items():
        assert lines <= {mutant.line for mutant in mutants_of(file)}


@pytest.mark.timeout(400)
@pytest.mark.parametrize(("scenario", "verb", "right", "wrong"), OF_SCENARIOS)
def test_mistake_in_a_script_is_found(scenario, verb, right, wrong):
    """By a scenario in which it makes a difference."""
    with mistaken(verb, right, wrong):
        assert SCENARIOS[scenario].explored().broken
