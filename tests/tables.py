"""Tables at the end of a run. What tests record for them comes from any process of pytest-xdist."""

import statistics
from collections.abc import Callable
from typing import Any

import pytest


class Recorded(list[Any]):
    """Values that a test records under a name."""

    def __init__(self, item: pytest.Item, name: str) -> None:
        super().__init__()
        self._item, self._name = item, name

    def append(self, value: Any) -> None:
        """Record a value."""
        super().append(value)
        self._item.user_properties.append((self._name, value))


def recorded(reporter: Any, name: str) -> list[tuple[str, Any]]:
    """Everything that was recorded under a name, each with the id of its test."""
    reports = [*reporter.getreports("passed"), *reporter.getreports("failed")]
    return [(r.nodeid, value) for r in reports for key, value in r.user_properties if key == name]


def write(reporter: Any, section: str, lines: list[str]) -> None:
    """Write a section's lines to the terminal."""
    reporter.section(section)
    for line in lines:
        reporter.write_line(line)


def failover_table(reporter: Any, topology_of: Callable[[str], str]) -> list[str]:
    """Each topology, its tests that passed, and the seconds of its failovers; by the ids of its tests."""
    lines = ["| topology | tests passed | failovers | median s | max s |", "|---|---|---|---|---|"]
    passed = [topology_of(report.nodeid) for report in reporter.getreports("passed")]
    for topology in sorted({*passed}):
        times = [s for nodeid, s in recorded(reporter, "failover") if topology_of(nodeid) == topology]
        figures = f"{statistics.median(times):.1f} | {max(times):.1f}" if times else "- | -"
        lines.append(f"| {topology} | {passed.count(topology)} | {len(times) or '-'} | {figures} |")
    return lines
