"""Real projects' configurations, with every policy: what plain Celery does with them works guarded.

Two of them in `make test`, all in the CI. Each is played in a process of its own, on a server of its own, by
a real worker (see `real_configurations`).
"""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.bounds import bound

PROJECTS = bound(
    ["pretix", "weblate"], full=sorted(path.stem for path in Path(__file__).parent.glob("real/[a-z]*.py"))
)
# A new process of Django's for each delivery, so not every policy is played.
ROWS = {"paperless": ["auto", "retry", "wait", "join", "until_done", "canvas_auto"]}
AT_A_TIME = 3  # they mostly wait

Played = subprocess.CompletedProcess[str]


def play(project: str) -> Played:
    command = [sys.executable, "-m", "tests.real_configurations", f"tests.real.{project}"]
    return subprocess.run(
        [*command, *ROWS.get(project, [])], capture_output=True, text=True, timeout=290, check=False
    )


@pytest.fixture(scope="module")
def played(request: pytest.FixtureRequest) -> Iterator[dict[str, "Future[Played]"]]:
    """What came of each project whose test is to run."""
    tests = [item for item in request.session.items if item.path == request.path]
    projects = [test.callspec.params["project"] for test in tests]  # type: ignore[attr-defined]
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        yield {project: pool.submit(play, project) for project in projects}


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS)
def test_every_policy_under_a_projects_configuration(project, played):
    """No body beside another, no call lost, each by its own route, each with the end that its policy says."""
    result = played[project].result()
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": ok\n") >= len(ROWS.get(project, range(40)))
