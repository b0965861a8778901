"""The versions in docs/works-with.md as data: rows, their cells, and whether an environment is one."""

import re
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import takewhile
from pathlib import Path
from typing import Literal

from packaging.version import Version

Edge = Literal["lowest", "newest"]

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "works-with.md"
PACKAGES = ("celery", "kombu", "redis")
_HEAD = "| Celery | kombu | redis-py | CPython |\n|---|---|---|---|\n"
_SPAN = r"([\d.]+)(?: to ([\d.]+))?"
_ROW = re.compile(rf"\| {_SPAN} \| {_SPAN} \| {_SPAN} \| (3\.\d+) \|")


@dataclass(frozen=True)
class Row:
    """A minor version of Celery: its lowest and newest resolution, and the CPython that tests both."""

    lowest: dict[str, Version]
    newest: dict[str, Version]
    python: str

    @property
    def celery(self) -> str:
        """The minor version, such as "5.4"."""
        return minor(self.lowest["celery"])


@dataclass(frozen=True)
class Cell:
    """One end of a row, on one of the two servers."""

    row: Row
    edge: Edge
    server: Literal["Redis", "Valkey"]

    @property
    def versions(self) -> dict[str, Version]:
        """What the table says is installed."""
        return self.row.lowest if self.edge == "lowest" else self.row.newest

    def __str__(self) -> str:
        return f"{self.row.celery}-{self.edge}"

    def differences(self, found: dict[str, Version]) -> list[str]:
        """Where an environment is not what the table says; the newest may have become newer since."""
        return [
            f"{name} is {found[name]}, and the table says {said}"
            for name, said in self.versions.items()
            if found[name] != said
            and (self.edge == "lowest" or found[name] < said or found[name].major != said.major)
        ]

    def news(self, found: dict[str, Version]) -> list[str]:
        """Releases that the table does not know yet."""
        return [
            f"{name} {found[name]} is out; the table's newest is {said}"
            for name, said in self.versions.items()
            if self.edge == "newest" and said < found[name] and said.major == found[name].major
        ]


def rows(page: str) -> list[Row]:
    """The rows of the table.

    Raises:
        ValueError: There is no table, or a line of it is not a row of three spans.
    """
    _before, head, table = page.partition(_HEAD)
    if not head:
        raise ValueError(f"no table with the head {_HEAD.strip()}")
    return [_row(line) for line in takewhile(lambda line: line.startswith("|"), table.splitlines())]


def cells(rows: list[Row]) -> list[Cell]:
    """Two for each row; the servers take turns, so that each of them meets lowest and newest ones."""
    return [
        Cell(row, edge, "Redis" if number % 2 == turn else "Valkey")
        for number, row in enumerate(rows)
        for turn, edge in enumerate(("lowest", "newest"))
    ]


def following_cells(page: str) -> list[Cell]:
    """The newest versions on each CPython that the page names below its table, beside Redis."""
    newest = rows(page)[-1]
    return [Cell(replace(newest, python=python), "newest", "Redis") for python in following_pythons(page)]


def following_pythons(page: str) -> list[str]:
    """The CPythons that follow those of the table."""
    found = re.search(r"on CPython (3\.\d+) and (3\.\d+), with Redis", page)
    return list(found.groups()) if found else []


def minor(version: Version) -> str:
    """Such as "5.4"."""
    return f"{version.major}.{version.minor}"


def installed(package: str) -> Version:
    """The version that runs here."""
    return Version(metadata.version(package))


def _row(line: str) -> Row:
    found = _ROW.fullmatch(line)
    if found is None:
        raise ValueError(f"not a row of the table of versions: {line}")
    *spans, python = found.groups()
    lowest, newest = spans[::2], spans[1::2]
    return Row(
        {name: Version(low) for name, low in zip(PACKAGES, lowest)},
        {name: Version(new or low) for name, low, new in zip(PACKAGES, lowest, newest)},
        python,
    )
