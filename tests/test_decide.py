"""What a delivery does next: every combination of facts, and every answer to each question."""

import re
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from itertools import product
from typing import Any, get_args

import pytest

from celery_setnx.run.decide import RULES, Ask, End, Facts, Place, Policy, decide
from tests.docs.pages import sections, text_of


def with_answer(facts: Facts, answer: Mapping[str, Any]) -> Facts:
    """The same facts, and what was learned since."""
    after = copy(facts)
    vars(after).update(answer)
    return after


WAITS = ("wait", "join")
_SAID = (
    *("again", "has_begun", "may_be_new", "is_eager", "is_early"),
    *("joins", "asks_queued", "asks_done", "looks_again"),
)
MESSAGES = [
    with_answer(Facts(policy), dict(zip(_SAID, said)))
    for policy, said in product(get_args(Policy), product([False, True], repeat=len(_SAID)))
]
ACQUISITIONS = [
    *[{"answer": told} for told in ("unguarded", "stale")],
    *[{"answer": "superseded", "may_have_ended": may_have_ended} for may_have_ended in (False, True)],
    *[
        {"answer": "acquired", "joined": None, "may_have_ended": may_have_ended, "is_over": is_over}
        for may_have_ended, is_over in product([False, True], repeat=2)
    ],
    *[
        dict(answer="held", is_paced=paced, may_have_ended=ended, is_held_back=back, is_over=over, **holder)
        for paced, ended, back, over in product([False, True], repeat=4)
        for holder in (
            {"is_same": False, "is_own": False, "runs": True},
            {"is_same": True, "is_own": False, "runs": False},
            {"is_same": True, "is_own": True, "runs": True},
            {"is_same": True, "is_own": True, "runs": False},
        )
    ],
]  # fmt: skip
ANSWERS: dict[Ask, list[dict[str, Any]]] = {
    Ask.ASK_JOINED: [{"joined": False}, {"joined": True}],
    Ask.RENAME: [{"answer": None, "may_be_new": False, "asks_queued": False}],
    Ask.FREE_HELD: [{"freed": False}, {"freed": True}],
    Ask.ASK_ENDED: [{"ended": word} for word in ("no", "stored", "noted")],
    Ask.MARK: [{"is_queued": False}, {"is_queued": True}],
    Ask.ANNOUNCE: [{"announced": True}],
    Ask.ASK_LINE: [{"may_stand": False}, {"may_stand": True}],
    Ask.PARK: [{"place": word} for word in get_args(Place)],
    Ask.ASK_DONE: [{"is_done": False}, {"is_done": True}],
    Ask.BEGIN: [{"begun": True}],
}


def has_met(f: Facts) -> bool:
    """It stands before a lock that another has, and its attempt is not known to have ended."""
    return f.answer == "held" and f.ended in (None, "no")


def may_choose(f: Facts) -> bool:
    """Its policy decides."""
    return has_met(f) and not f.is_own and not f.is_queued


def is_refused_for_good(f: Facts) -> bool:
    return may_choose(f) and not (f.is_paced and f.has_begun)


def may_wait(f: Facts) -> bool:
    return may_choose(f) and f.policy in WAITS and not f.is_eager and not f.is_over


def has_lock(f: Facts) -> bool:
    """It has the lock, and nothing has been done in its stead."""
    return f.answer == "acquired" and not f.is_done and not f.joined and f.ended in (None, "no")


def is_superseded(f: Facts) -> bool:
    """A newer call runs instead, and its attempt is not known to have ended."""
    return f.answer == "superseded" and f.ended in (None, "no")


ENDS: dict[End, Callable[[Facts], Any]] = {
    End.RUN: lambda f: has_lock(f) and not f.looks_again and (f.again or not f.is_over),
    End.RUN_UNGUARDED: lambda f: f.answer == "unguarded",
    End.END_AS_JOINED: lambda f: f.joined and not f.is_done,
    End.END_AS_STORED: lambda f: f.ended == "stored",
    End.SKIP: lambda f: (
        (is_refused_for_good(f) and f.policy == "skip")
        or (has_met(f) and f.is_queued)
        or (may_wait(f) and f.place == "crowded")
    ),
    End.SKIP_DONE: lambda f: f.is_done,
    End.SKIP_SUPERSEDED: lambda f: is_superseded(f) and not f.looks_again,
    End.CALL: lambda f: may_choose(f) and f.policy == "callable",
    End.FAIL: lambda f: is_refused_for_good(f) and f.policy == "raise",
    End.TIME_OUT: lambda f: (
        f.is_over
        and (
            (has_lock(f) and not f.looks_again and not f.again)
            or (may_choose(f) and f.policy in (*WAITS, "retry"))
            or (may_choose(f) and f.policy in ("skip", "raise") and f.is_paced and f.has_begun)
        )
    ),
    End.COME_BACK: lambda f: (
        may_choose(f)
        and not f.is_over
        and (
            f.policy == "retry"
            or (f.policy in ("skip", "raise") and f.is_paced and f.has_begun)
            or (f.policy in WAITS and (f.is_eager or f.may_stand is False))
        )
    ),
    End.COME_BACK_AS_COPY: lambda f: may_wait(f) and f.place == "taken",
    End.COME_BACK_FOR_OWN: lambda f: has_met(f) and f.is_own,
    End.LOOK_AGAIN: lambda f: (has_lock(f) or is_superseded(f)) and f.looks_again,
    End.WAIT: lambda f: may_wait(f) and f.place == "waits",
    End.DELAY: lambda f: f.is_early,
    End.DROP: lambda f: (
        (f.answer == "stale" and not f.may_be_new)
        or f.ended == "noted"
        or (may_wait(f) and f.place == "stale")
    ),
}


def ends_of(facts: Facts, asked: tuple[Ask, ...] = ()) -> Iterator[tuple[Facts, End]]:
    """How a delivery may end, whatever is answered; the lock is tried for once more, at most."""
    step = decide(facts)
    if isinstance(step, End):
        yield facts, step
        return
    assert step not in asked, f"{step} is asked twice: {vars(facts)}"
    fresh = {
        "freed": None,
        "ended": None,
        "announced": False,
        "is_queued": None,
        "place": None,
        "begun": False,
    }
    for answer in [{**fresh, **told} for told in ACQUISITIONS] if step is Ask.ACQUIRE else ANSWERS[step]:
        after = with_answer(facts, answer)
        if step is not Ask.ACQUIRE and decide(after) is Ask.ACQUIRE and facts.answer is not None:
            continue  # what follows is what follows the first
        yield from ends_of(after, () if step is Ask.ACQUIRE else (*asked, step))


@pytest.mark.parametrize("policy", get_args(Policy))
def test_each_delivery_ends_as_the_rules_say_whatever_is_answered(policy):
    """Each combination of facts has one end, by what is known then; and no question is asked twice."""
    seen = set()
    for message in MESSAGES:
        if message.policy == policy:
            for facts, end in ends_of(message):
                assert [each for each, applies in ENDS.items() if applies(facts)] == [end], vars(facts)
                seen.add(end)
    assert {End.RUN, End.DROP, End.DELAY, End.COME_BACK_FOR_OWN, End.SKIP_DONE, End.SKIP_SUPERSEDED} <= seen


def test_each_end_is_reached():
    """None is left of a rule that is gone."""
    assert ENDS.keys() == set(End)
    assert {rule.then for rules in RULES.values() for rule in rules} == {*End, *Ask}


def test_call_whose_time_has_not_come_asks_nobody():
    """Before its time no question and no lock: its message waits in the broker."""
    for message in MESSAGES:
        if message.is_early:
            assert decide(message) is End.DELAY


def test_superseded_call_that_may_have_ended_asks_first():
    """Its first delivery may have stored a result, which a skip would overwrite."""
    for ended, end in (("no", End.SKIP_SUPERSEDED), ("stored", End.END_AS_STORED), ("noted", End.DROP)):
        facts = with_answer(Facts("wait"), {"answer": "superseded", "may_have_ended": True})
        assert decide(facts) is Ask.ASK_ENDED
        assert decide(with_answer(facts, {"ended": ended})) is end


def facts_on_the_way(facts: Facts) -> Iterator[Facts]:
    """What is known whenever something is decided."""
    yield facts
    step = decide(facts)
    if isinstance(step, Ask) and not (step is Ask.ACQUIRE and facts.answer is not None):
        for answer in ACQUISITIONS if step is Ask.ACQUIRE else ANSWERS[step]:
            after = with_answer(facts, answer)
            yield from facts_on_the_way(after) if after.answer is not None or facts.answer is None else ()


def test_each_rule_is_needed():
    """Without it some delivery goes on in another way, or in none."""
    needed = set()
    for message in MESSAGES:
        for facts in facts_on_the_way(message):
            rules = RULES[facts.answer]
            applying = [rule for rule in rules if rule.applies(facts)]
            if len(applying) < 2 or applying[0].then != applying[1].then:
                needed.add((facts.answer, applying[0]))
    assert [rule for answer, rules in RULES.items() for rule in rules if (answer, rule) not in needed] == []


def test_docs_list_the_rules_by_which_a_delivery_ends():
    """A list for each answer about the lock, in the order in which its rules are read."""
    text = sections(text_of("docs/how-it-works.md"), 3)["What a delivery does next"]
    lists = re.findall(r"^\*\*.*\*\*\n\n((?:\d+\. .*\n)+)", text, re.MULTILINE)
    sole = re.findall(r"^\*\*.*\*\*: (.*)$", text, re.MULTILINE)
    ends = [[rule for rule in rules if isinstance(rule.then, End)] for rules in RULES.values()]
    assert sole == [rules[0].then.value for rules in ends if len(rules) == 1]
    assert lists == [
        "".join(f"{place}. {rule.when}: {rule.then.value}\n" for place, rule in enumerate(rules, 1))
        for rules in ends
        if len(rules) > 1
    ]
