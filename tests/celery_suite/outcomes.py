"""A plugin of pytest: what becomes of each test, as lines of JSON in a file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

EXPECTED = {"skipped": "xfailed", "passed": "xpassed"}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """A line for each phase of a test, for each of its subtests, and for each time that it begins again."""
    crash = getattr(report.longrepr, "reprcrash", None)
    about: dict[str, Any] = {
        "test": report.nodeid,
        "outcome": EXPECTED.get(report.outcome) if hasattr(report, "wasxfail") else report.outcome,
        "took_s": report.duration,
        "why": str(crash.message if crash else report.longrepr or ""),
    }
    with Path(os.environ["CELERY_SUITE_OUTCOMES"]).open("a") as file:
        file.write(json.dumps(about) + "\n")
