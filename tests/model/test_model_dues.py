"""When lines are to be looked at is never forgotten, nor claimed by two: on random schedules."""

from tests.bounds import bound
from tests.model.dues import Schedule

SEEDS = bound(200, full=1_000, deep=20_000)


def test_due_lines_are_looked_at_as_noted():
    """As soon as was said, by one worker at a time; and what was noted meanwhile stays."""
    broken = {seed: found for seed in range(SEEDS) if (found := Schedule(seed).broken())}
    assert not broken
