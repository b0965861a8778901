"""The flaws that chaos looks for apply to the package as it is: a name that changed hides none."""

import pytest

from tests.chaos import flaws
from tests.chaos.scenarios import SCENARIOS
from tests.forks import ended

_FLAWS = {flaw for scenario in SCENARIOS.values() for flaw in scenario.mutants}


def _seed(flaw: str) -> None:
    flaws.seed(flaw)
    print("seeded")


@pytest.mark.parametrize("flaw", sorted(_FLAWS))
def test_flaw_applies(flaw, tmp_path):
    """A process can make the flaw its own: all that it replaces is still there."""
    code, said = ended(tmp_path, _seed, flaw)  # who measures coverage adds that nothing was measured
    assert (code, said.split("\n")[0]) == (0, "seeded"), said


def test_flaw_of_a_name_that_is_gone_is_refused(monkeypatch):
    """What would change nothing is an error."""
    monkeypatch.setitem(flaws.ATTRIBUTES, "of_old", [(flaws.Keeper, "_gone", None)])
    with pytest.raises(RuntimeError, match="expects _gone of"):
        flaws.seed("of_old")
