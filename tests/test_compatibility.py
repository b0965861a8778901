"""The compatibility table of the docs: it agrees with the package's bounds, and with what runs here."""

from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

from tests.versions.smoke import TESTS
from tests.versions.table import PACKAGES, PAGE, Cell, Row, cells, following_cells, installed, minor, rows

ROWS = rows(PAGE.read_text())
BOUNDS = {
    found.name: found.specifier
    for found in map(Requirement, metadata.requires("celery_setnx") or [])
    if found.marker is None
}
ROW = Row(
    {"celery": Version("5.6.0"), "kombu": Version("5.6.0"), "redis": Version("5.0.0")},
    {"celery": Version("5.6.3"), "kombu": Version("5.7.0"), "redis": Version("8.1.0")},
    "3.12",
)


def cell(edge: str) -> Cell:
    return next(cell for cell in cells([ROW]) if cell.edge == edge)


def test_table_starts_at_the_lowest_celery_that_is_allowed():
    """The first row's lowest version is the package's lower bound."""
    (bound,) = (Version(part.version) for part in BOUNDS["celery"] if part.operator == ">=")
    assert minor(bound) == ROWS[0].celery


def test_table_has_every_minor_version_in_order():
    """No row is missing between the first and the last."""
    first, last = (ROWS[end].lowest["celery"] for end in (0, -1))
    assert [row.celery for row in ROWS] == [f"{first.major}.{n}" for n in range(first.minor, last.minor + 1)]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.celery)
def test_row_is_of_one_celery_within_the_bounds_of_the_package(row):
    """Nothing is promised that pip would refuse; the lowest comes first, of the same minor Celery."""
    for versions in (row.lowest, row.newest):
        assert all(versions[name] in BOUNDS[name] for name in BOUNDS)
    assert minor(row.newest["celery"]) == row.celery
    assert all(row.lowest[name] <= row.newest[name] for name in PACKAGES)


@pytest.mark.parametrize("package", PACKAGES)
def test_table_is_true_of_what_runs_here(package):
    """What is installed lies within the row of its Celery, or is a later release of that major version."""
    (row,) = (row for row in ROWS if row.celery == minor(installed("celery")))
    assert installed(package) >= row.lowest[package]
    assert installed(package).major <= row.newest[package].major


def test_both_servers_meet_lowest_and_newest_versions():
    """Each server has cells of both kinds, and each row has both servers."""
    every = cells(ROWS)
    assert {(one.edge, one.server) for one in every} == {
        (edge, server) for edge in ("lowest", "newest") for server in ("Redis", "Valkey")
    }
    assert all(one.server != other.server for one, other in zip(every[::2], every[1::2]))


def test_page_names_the_cpythons_that_follow_the_table():
    """They are those of the next Debian, and follow the last of the table without a gap."""
    every = [int(row.python.partition(".")[2]) for row in ROWS]
    following = [int(cell.row.python.partition(".")[2]) for cell in following_cells(PAGE.read_text())]
    assert following == [max(every) + 1, max(every) + 2]


@pytest.mark.parametrize("test", TESTS)
def test_smoke_run_names_tests_that_are_there(test):
    """The CI would find it an hour later."""
    path, _, name = test.partition("::")
    assert f"def {name.partition('[')[0] or 'test_'}" in (PAGE.parents[1] / path).read_text()


@pytest.mark.parametrize(
    ("edge", "redis", "differs"),
    [
        ("lowest", "5.0.1", True),
        ("lowest", "4.6.0", True),
        ("newest", "8.0.1", True),
        ("newest", "9.0.0", True),
        ("newest", "8.2.0", False),
    ],
)
def test_environment_differs_unless_the_newest_has_grown(edge, redis, differs):
    """The lowest is exact; the newest may be a later release of the same major version, which is told."""
    found = dict(cell(edge).versions)
    assert cell(edge).differences(found) == cell(edge).news(found) == []
    found["redis"] = Version(redis)
    assert bool(cell(edge).differences(found)) is differs
    assert bool(cell(edge).news(found)) is not differs


@pytest.mark.parametrize("line", ["| 5.8 | 5.8.0 |", "| 5.8.0 - 5.8.1 | 5.8.0 | 9.0.0 |"])
def test_line_that_is_no_row_is_refused(line):
    """No row is left out in silence."""
    page = PAGE.read_text()
    last = next(text for text in page.splitlines() if text.startswith(f"| {ROWS[-1].lowest['celery']} "))
    with pytest.raises(ValueError, match="not a row"):
        rows(page.replace(last, f"{last}\n{line}"))
