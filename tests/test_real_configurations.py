"""Real projects' configurations, with every policy: what plain Celery does with them works guarded.

Each is played in a process of its own, on a server of its own, by a real worker (see `real_configurations`).
"""

import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.parametrize("project", ["airflow", "openedx", "posthog", "sentry", "superset"])
def test_every_policy_under_a_projects_configuration(project):
    """No body beside another, no call lost, each by its own route, each with the end that its policy says."""
    command = [sys.executable, "-m", "tests.real_configurations", f"tests.real.{project}"]
    played = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert played.returncode == 0, played.stdout + played.stderr
    assert played.stdout.count(": ok\n") >= 40
