"""More projects' configurations, with every policy (see `test_real_configurations`)."""

import subprocess
import sys
from importlib.util import find_spec

import pytest


def play(project: str, *rows: str) -> None:
    """Have every row end as its policy says, or those that are named."""
    command = [sys.executable, "-m", "tests.real_configurations", f"tests.real.{project}", *rows]
    played = subprocess.run(command, capture_output=True, text=True, timeout=290)
    assert played.returncode == 0, played.stdout + played.stderr
    assert played.stdout.count(": ok\n") >= (len(rows) or 40)


@pytest.mark.slow
@pytest.mark.parametrize("project", ["addons", "cookiecutter", "pretix", "priorities", "weblate"])
def test_every_policy_under_a_projects_configuration(project):
    """No body beside another, no call lost, each by its own route, each with the end that its policy says."""
    play(project)


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("django_celery_results") is None, reason="django_celery_results is not installed"
)
def test_pickles_results_in_a_database_and_a_child_for_each_task():
    """Paperless-ngx: a new process of Django's for each delivery, so not every policy is played."""
    play("paperless", "auto", "retry", "wait", "join", "until_done", "canvas_auto")
