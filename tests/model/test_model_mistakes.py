"""Each word of the scripts counts: a change breaks a contract, or a scenario or a schedule finds it."""

from __future__ import annotations

import pytest

from tests.bounds import bound
from tests.model.contract import KNOWN_WORDS, broken_clause
from tests.model.lock import TEXTS, mistaken
from tests.model.mutation import CHECKED, FILES, Mutant, calls_of, equals, is_noticed, mutants_of
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
OF_LIVE_TERMS = {
    "acquire is not asked again for a live rate": ("permits", " or terms ~= '1' and not has_starts", ""),
    "acquire does not see that there are live terms": ("acquire", "PERMITS, TERMS) > 0", "PERMITS) > 0"),
    "a pause is ignored in acquire": ("acquire", "own, terms, paused = terms_of", "own, terms = terms_of"),
    "a pause is ignored in serve": ("serve", "math.max(paused, pace", "math.max(0, pace"),
    "a pause is ignored in release": ("release", "paused or 0)", "0)"),
    "a pause is ignored in leave": ("leave", "pace_of(STARTS, terms), paused", "pace_of(STARTS, terms), 0"),
    "a pause is ignored in look": ("look", "pace, paused, dead)", "pace, 0, dead)"),
    "a woken call passes a pause": ("claim", "if paused > 0 then", "if paused > 0 and not call.woken then"),
    "an heir passes a pause": ("claim", "if paused > 0 then", "if paused > 0 and p.kind ~= 'for me' then"),
    "a retry passes a pause": ("claim", "if paused > 0 then", "if paused > 0 and p.kind ~= 'mine' then"),
    "a pause is over before a later start": ("claim", "math.max(start, paused), seen", "paused, seen"),
    "a pause is called a pace": ("claim", "p, 'paused', math", "p, 'paced', math"),
    "a paused line is not looked at until the pause ends": (
        "terms", "return paused > 0 and math.min(start, now + 30000000) or start", "return start"),
    "a term that has ended counts": ("terms", " and now < tonumber(till) then", " then"),
    "a task's terms count above its key's": ("terms", "{of_task, of_key or ''}", "{of_key or '', of_task}"),
    "a key's terms do not count": ("terms", "{of_task, of_key or ''}", "{of_task}"),
    "a task's terms do not count": ("terms", "{of_task, of_key or ''}", "{of_key or ''}"),
    "a key's pause ends its task's": ("terms", "math.max(paused, tonumber(till))", "tonumber(till)"),
    "a limit of 0 counts": ("terms", "'^[1-9]%d?%d?$'", "'^%d%d?%d?$'"),
    "a rate of 0 counts": ("terms", "'^[1-9]%d?%d?%d?/", "'^%d%d?%d?%d?/"),
    "acquire notes a live limit": ("acquire", "p.number + 1), own, ms)", "p.number + 1), terms, ms)"),
    "park notes a live limit": ("park", "seen.top, own, remember)", "seen.top, terms, remember)"),
    "serve notes a live limit": ("serve", "seen.top, own, math", "seen.top, terms, math"),
    "serve compares a live limit with what is noted": ("serve", "if own ~= terms_in", "if terms ~= terms_in"),
    "release hands on a permit beyond a live limit": (
        "release", "number < limit_of(terms)", "number < limit_of(own)"),
    "release hands on whatever a live rate says": (
        "release", "string.find(terms, ':') and not pace", "false"),
    "a lock is held for its retry no longer than a pause lasts": (
        "start", "word == 'paused' and now + PAUSE_KEEPS or", ""),
    "leave hands on a permit beyond a live limit": (
        "leave", "local _, terms, paused = terms_of", "local terms, _, paused = terms_of"),
}  # fmt: skip
"""By what is wrong then: a file, what it says, and what it would say."""


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


@pytest.mark.timeout(400)
@pytest.mark.parametrize("mistake", OF_LIVE_TERMS)
def test_mistake_about_live_terms_is_noticed(mistake):
    """By the contract of a script."""
    file, right, wrong = OF_LIVE_TERMS[mistake]
    assert FILES[file].count(right) == 1
    text = FILES[file].replace(right, wrong)
    assert is_noticed(Mutant(file, "mistake", right, text, FILES[file].index(right)))
