"""Real projects' configurations, with every policy: what plain Celery does with them works guarded.

Each is played in a process of its own, on a server of its own, by a real worker (see `real_configurations`).
"""

import subprocess
import sys
from pathlib import Path

import pytest

PROJECTS = sorted(path.stem for path in Path(__file__).parent.glob("real/[a-z]*.py"))
# A new process of Django's for each delivery, so not every policy is played.
ROWS = {"paperless": ["auto", "retry", "wait", "join", "until_done", "canvas_auto"]}


@pytest.mark.slow
@pytest.mark.parametrize("project", PROJECTS)
def test_every_policy_under_a_projects_configuration(project):
    """No body beside another, no call lost, each by its own route, each with the end that its policy says."""
    rows = ROWS.get(project, [])
    command = [sys.executable, "-m", "tests.real_configurations", f"tests.real.{project}", *rows]
    played = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert played.returncode == 0, played.stdout + played.stderr
    assert played.stdout.count(": ok\n") >= (len(rows) or 40)
