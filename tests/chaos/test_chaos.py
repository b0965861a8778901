"""The chaos suite as tests. Not in the default suite: `pytest tests/chaos`."""

import os
from collections.abc import Iterator

import pytest

from tests.chaos.scenarios import SCENARIOS
from tests.chaos.stage import MissingTool, Stage
from tests.chaos.suite import Result, bite, count_of, play, table

SCALE = os.environ.get("CHAOS_SCALE", "1")
SEED = int(os.environ.get("CHAOS_SEED", "0"))
FLAWS = [(name, mutant) for name, scenario in SCENARIOS.items() for mutant in scenario.mutants]

pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def results(pytestconfig) -> Iterator[list[Result]]:
    """What was measured, printed as a table at the end."""
    results: list[Result] = []
    yield results
    reporter = pytestconfig.pluginmanager.getplugin("terminalreporter")
    if reporter is not None and results:
        reporter.write_line(f"\n{table(results)}")


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    """Servers and workers that the scenarios share."""
    stage = Stage(SEED)
    yield stage
    stage.close()


@pytest.mark.parametrize("name", SCENARIOS)
def test_chaos_breaks_no_promise(name, stage, results):
    """Whatever the fault: no overlap, rising fences, every task accounted for, no lock left."""
    try:
        result = play(stage, name, count_of(SCENARIOS[name], SCALE))
    except MissingTool as missing:
        _skip_unless_ci(missing)
    results.append(result)
    assert not result.report.violations
    assert result.injected


@pytest.mark.parametrize(("name", "mutant"), FLAWS)
def test_chaos_finds_the_flaw(name, mutant):
    """The same scenario on workers with a seeded flaw shows a violation."""
    try:
        result = bite(name, mutant, SEED)
    except MissingTool as missing:
        _skip_unless_ci(missing)
    assert result.report.violations


def _skip_unless_ci(missing: MissingTool) -> None:
    if os.environ.get("CI") == "true":
        pytest.fail(f"the chaos suite needs {missing}")
    pytest.skip(f"the chaos suite needs {missing}")
