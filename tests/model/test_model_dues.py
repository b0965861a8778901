"""When lines are to be looked at is never forgotten, nor claimed by two: on random schedules."""

import pytest

from tests.bounds import bound
from tests.model.dues import Schedule
from tests.model.lock import mistaken
from tests.model.mistakes import OF_DUES

SEEDS = bound(200, full=1_000, deep=20_000)


def test_due_lines_are_looked_at_as_noted():
    """As soon as was said, by one worker at a time; and what was noted meanwhile stays."""
    broken = {seed: found for seed in range(SEEDS) if (found := Schedule(seed).broken())}
    assert not broken


@pytest.mark.parametrize(("verb", "right", "wrong"), [(v, right, w) for v, right, *ws in OF_DUES for w in ws])
def test_mistake_about_due_lines_is_found(verb, right, wrong):
    """By one of the first seeds."""
    with mistaken(verb, right, wrong):
        assert any(Schedule(seed).broken() for seed in range(400))
