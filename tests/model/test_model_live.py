"""Live terms in every interleaving that the bounds allow; and each mistake in a script is found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.bounds import DEEP, bound
from tests.model.explorer import assert_broken, assert_holds
from tests.model.live import SAFETY, Live
from tests.model.lock import TEXTS

pytestmark = pytest.mark.timeout(3_600 if DEEP else 600)

BOTH, TERMS, SLOW = ("pause", "task"), ("limit 1", "pause"), "rate 1/60000000"
SCENARIOS: dict[str, Callable[[], Live]] = {
    "calls that wait": lambda: Live(bound("ww", full="www"), changes=bound(2, full=1, deep=2)),
    "one comes back": lambda: Live(bound("wr", full="wwr"), changes=2),
    "workers that die": lambda: Live("ww", crashes=1, changes=bound(1, full=2)),
    "replies that are lost": lambda: Live("ww", losses=1, changes=bound(1, full=2)),
    "the task is paused": lambda: Live("ww", says=BOTH, changes=bound(1, full=2)),
    "the task is paused, and a worker dies": lambda: Live(bound("wr", full="ww"), says=("task",), crashes=1),
    "woken calls that leave": lambda: Live(bound("wwr", full="www"), revokes=1),
    "a retry": lambda: Live("ww", retries=1),
    "a lock held for a retry": lambda: Live("rw", retries=1, hold=True, crashes=bound(0, full=1), losses=1),
    "a lock held for a retry, of the task": lambda: Live("ww", says=("task",), retries=1, hold=True),
    "a body that holds back": lambda: Live("wr", backs=1, lapses=1, crashes=bound(0, full=1)),
    "a lower limit": lambda: Live(bound("wwr", full="www"), own="2", says=("limit 1",), slots=3),
    "a higher limit": lambda: Live("www", own="2", says=("limit 3",), slots=3, changes=bound(1, full=2)),
    "a higher limit, swept by others": lambda: Live(
        bound("wwr", full="www"), own="2", says=("limit 3",), slots=3, sweeper="0"
    ),
    "a lower limit and a pause": lambda: Live(bound("wr", full="ww"), own="2", says=TERMS, changes=2),
    "a rate": lambda: Live("ww", says=(SLOW,), crashes=bound(0, full=1)),
    "a rate and a pause": lambda: Live(bound("wr", full="ww"), says=(SLOW, "pause"), changes=2),
}

TWO: dict[str, Any] = {"policies": "ww"}
HELD: dict[str, Any] = {"policies": "rw", "retries": 1, "hold": True}
LOWER: dict[str, Any] = {"policies": "wwr", "own": "2", "says": ("limit 1",), "slots": 3}
HIGHER: dict[str, Any] = {"policies": "www", "own": "2", "says": ("limit 3",), "slots": 3}
GONE: dict[str, Any] = {"policies": "www", "revokes": 1}
BACK: dict[str, Any] = {"policies": "wr", "backs": 1, "lapses": 1}
OF_SCRIPTS: list[tuple[str, str, str, dict[str, Any], str, str]] = [
    ("a pause is in nobody's way", "acquire", "none_starts_in_a_pause", TWO,
     "if paused > 0 then return p, 'paused', math.max(start, paused), seen end", ""),
    ("who finds the lock free does not ask for its terms", "acquire", "none_starts_in_a_pause", TWO,
     "TICKET, PERMITS, TERMS) > 0)", "TICKET, PERMITS) > 0)"),
    ("a task's pause does not count", "acquire", "none_starts_in_a_pause", {**TWO, "says": ("task",)},
     "ipairs({of_task, of_key or ''})", "ipairs({of_key or ''})"),
    ("a resumed lock is in no pause", "acquire", "none_starts_in_a_pause", HELD,
     "or word == 'again' then return p, word, nil", "or word ~= 'acquired' then return p, word, nil"),
    ("who looks hands on in a pause", "serve", "none_is_handed_in_a_pause", TWO,
     "local start = math.max(paused, pace", "local start = math.max(0, pace"),
    ("a release hands on in a pause", "release", "none_is_handed_in_a_pause", TWO,
     "AHEAD) or 0, paused or 0)", "AHEAD) or 0, 0)"),
    ("a call that leaves hands on in a pause", "leave", "none_is_handed_in_a_pause", GONE,
     "if start > 0 then", "if start > 0 and pace then"),
    ("a line is forgotten in a pause", "serve", "none_is_lost", TWO,
     "start > 0 and look_for(start, paused) or pace and pace.next_room() or 0", "0"),
    ("a release looks at the line at the end of the pause alone", "release", "looked_at_soon", TWO,
     "return paused > 0 and math.min(start, now + 30000000) or start", "return start"),
    ("a call that leaves has its line looked at no sooner", "leave", "looked_at_soon", GONE,
     "int(look_for(start, paused))", "int(start)"),
    ("a pause that is over holds the line up", "serve", "line_goes_on", TWO,
     "now < tonumber(till)", "true"),
    ("a refused call is passed over", "acquire", "place_is_kept", TWO,
     "line.put_back(p.heir, 'unsent')", "line.put_back(p.heir, 'missed', 1000000)"),
    ("a refused call has lost its place", "acquire", "place_is_kept", TWO,
     "    line.put_back(p.heir, 'unsent')\n", ""),
    ("a refused call keeps what it was handed", "acquire", "place_is_kept", TWO,
     "    store(p, 'released', 0, 60000)\n", ""),
    ("a permit that a higher limit gives is not noted", "serve", "place_is_kept", HIGHER,
     " or p.number >= in_use(known)", ""),
    ("a lower limit does not count", "acquire", "within_the_terms", LOWER,
     "limit = as_limit(value) or limit", "limit = limit"),
    ("a higher limit that is over counts on", "acquire", "within_the_terms", HIGHER,
     "now < tonumber(till)", "true"),
    ("a rate is in nobody's way", "acquire", "within_the_terms", {**TWO, "says": (SLOW,)},
     "if start > 0 then return p, 'paced', start, seen end", ""),
    ("a call notes what counts for a while", "acquire", "own_terms_are_noted", LOWER,
     "math.max(seen.top, p.number + 1), own, ms)", "math.max(seen.top, p.number + 1), terms, ms)"),
    ("a call that parks notes what counts for a while", "park", "own_terms_are_noted", LOWER,
     "seen.top, own, remember)", "seen.top, terms, remember)"),
    ("who looks notes what counts for a while", "serve", "own_terms_are_noted", HIGHER,
     "seen.top, own, math.ceil", "seen.top, terms, math.ceil"),
    ("a lock held for a retry is not held on", "acquire", "held_is_kept", HELD,
     "math.max(p.deadline, till), retention", "p.deadline, retention"),
    ("a lock held for a retry is held on for no longer than now", "acquire", "held_is_kept", HELD,
     "now + PAUSE_KEEPS or", "now or"),
    ("a body ends a pause sooner", "hold_back", "holding_back_is_the_holders", BACK,
     "if stands >= till then", "if false then"),
    ("a body whose lease has ended holds back", "hold_back", "holding_back_is_the_holders", BACK,
     " or not p.is_live then", " then"),
    ("a body holds back the key of another", "hold_back", "holding_back_is_the_holders", BACK,
     "p.token ~= token or", ""),
    ("a resumed key stays paused", "change_terms", "what_is_said_stands", TWO,
     "field and field ~= name and", "field and"),
    ("a new limit ends a pause", "change_terms", "what_is_said_stands", {**TWO, "says": TERMS, "changes": 2},
     "field and field ~= name and", "false and"),
    ("terms last as long as the newest", "hold_back", "keys_last", {**BACK, "own": "2", "says": ("limit 1",)},
     "last = math.max(last, ends)", "last = ends"),
    ("terms of tasks last for ever", "change_terms", "keys_last", {**TWO, "says": ("task",)},
     "text)\n  keep_for(TERMS, ms)", "text)"),
    ("terms of a key last for ever", "change_terms", "keys_last", TWO,
     ", 'PX', int(ms))", ")"),
]  # fmt: skip


@pytest.mark.parametrize("name", SCENARIOS)
def test_it_holds_in_every_interleaving(name):
    """No step breaks a property, and from every state each call may end."""
    world = SCENARIOS[name]()
    assert_holds(world, SAFETY, goal=world.is_over)


@pytest.mark.parametrize(
    ("verb", "breaks", "about", "right", "wrong"),
    [pytest.param(*rest, id=name) for name, *rest in OF_SCRIPTS],
)
def test_mistake_in_a_script_is_found(verb, breaks, about, right, wrong):
    """By the property that it should break."""
    assert TEXTS[verb].count(right) == 1
    world = Live(**about, texts={verb: TEXTS[verb].replace(right, wrong)})
    assert_broken(world, breaks, SAFETY, goal=world.is_over)


def test_line_that_is_noted_before_a_call_parks_alone_is_forgotten():
    """Who looks meanwhile finds it empty; so it is noted once more."""
    world = Live("w", notes_again=False)
    assert_broken(world, "none_is_lost", SAFETY, goal=world.is_over)
