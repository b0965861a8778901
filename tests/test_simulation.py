"""The seeds of tests/simulation, in processes of their own: clock, threads and network are replaced there."""

import os
import subprocess
import sys

import pytest

SHARES = {
    "locks": "promise and locks",
    "calls": "promise and calls",
    "newest": "promise and newest",
    "live": "promise and live",
    "planted defects, and replays": "not promise",
}


@pytest.mark.timeout(3_600)
@pytest.mark.parametrize("share", SHARES)
def test_every_seed_keeps_every_promise_and_planted_defects_are_found(share):
    """SEED=n plays one of them: python -m pytest tests/simulation/seeds.py -k promise"""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST_", "COVERAGE_"))}
    options = ["-q", "-p", "no:xdist", "--timeout=0", "-k", SHARES[share]]  # the time is limited here
    command = [sys.executable, "-m", "pytest", *options, "tests/simulation/seeds.py"]
    found = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    print(found.stdout)
    assert found.returncode == 0, found.stdout[-6_000:]
