"""The check of what a call costs finds one command more, and five per cent more instructions."""

import copy
import json

import pytest

from benchmarks import count

RECORDED = json.loads(count.RECORDED.read_text())["rows"]
OURS = [name for name in RECORDED if any(word in name for word in count.OURS)]


def found(
    name: str, figure: str, times: float = 1.0, more: float = 0.0, same_versions: bool = True
) -> list[str]:
    """What is found where one figure of one row is another."""
    rows = copy.deepcopy(RECORDED)
    rows[name][figure] = rows[name][figure] * times + more
    return list(count.differences(RECORDED, rows, same_versions=same_versions))


def test_what_was_recorded_is_no_difference():
    """Nor is a third of the tolerance, in any figure."""
    for name in RECORDED:
        for figure in count.FIGURES:
            assert found(name, figure, times=1 if figure in count.EXACT else 1.01) == []


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("figure", count.EXACT)
@pytest.mark.parametrize("same_versions", [True, False])
def test_one_command_more_per_call_is_found(name, figure, same_versions):
    """With any version of what is not ours."""
    assert found(name, figure, more=1, same_versions=same_versions) == [
        f"{name}: {figure} {RECORDED[name][figure] + 1:g} per call, recorded {RECORDED[name][figure]:g}, "
        "may differ by 0.05"
    ]


@pytest.mark.parametrize("name", [name for name in RECORDED if RECORDED[name]["instructions"] > 0.1])
@pytest.mark.parametrize("times", [0.95, 1.05])
def test_five_per_cent_of_instructions_are_found(name, times):
    """More or less, of ours or of a peer's: what is promised beside it must be looked at again."""
    (said,) = found(name, "instructions", times=times)
    assert said.startswith(f"{name}: instructions ")


def test_row_that_is_gone_or_new_is_found():
    """A way that nobody counts any more would hold nothing."""
    rows = {name: row for name, row in RECORDED.items() if name != OURS[0]}
    assert list(count.differences(RECORDED, rows, same_versions=True)) == [f"{OURS[0]}: not counted any more"]
    assert list(count.differences(rows, RECORDED, same_versions=True)) == [f"{OURS[0]}: not recorded"]


def test_windows_are_medians_per_call_without_what_a_window_costs():
    """One window of three that met something else changes nothing."""
    figures = dict.fromkeys(("trips", *count.TRAFFIC), 3)
    empty = {"locks": figures, "broker": figures, "instructions": 1000, "server": 100}
    server = dict.fromkeys(figures, 3 + 20)
    busy = {"locks": server, "broker": server, "instructions": 21_000, "server": 2100}
    struck = {**busy, "instructions": 99_000}
    windows = [{"name": count.NOTHING, "calls": 1, **empty}] * 3
    windows += [{"name": "one", "calls": 10, **window} for window in (busy, struck, busy)]
    wanted = dict.fromkeys(count.FIGURES, 2.0) | {
        "instructions": 2000.0,
        "server": 200.0,
        "broker bytes": 4.0,
    }
    assert count.rows_of(windows) == {"one": wanted}
