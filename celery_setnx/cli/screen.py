"""How answers get to a screen: escaped, in colour if it has any, and in tables that fit its width."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import click

from celery_setnx.wording import printable

_GAP = "  "
# What a narrow screen takes from, in this order, and the least of it that is worth having; 0: all or nothing.
_GIVE_WAY = {"KEY": 0, "WORKER": 12, "TASK ID": 8, "QUEUED TASK ID": 15, "TASK": 10}
_UNDER = re.compile(r"\s*(?:\S+\s{2,})?")  # a line's indentation and its label
_KEEP_END = "TASK"  # of a dotted name the end says most; it is cut last, and never left out


class Line(NamedTuple):
    """A line with a style, as `click.style` takes it: of its first characters, or of all."""

    text: str
    style: Mapping[str, Any]
    first: int | None = None


def say(*lines: str | Line, err: bool = False) -> None:
    """Print lines to stdout or stderr: what is not printable is escaped, but for our own colours."""
    click.echo("\n".join(_said(line, err=err) for line in lines), err=err)


def whole_words(text: str, *, err: bool = False, after: str = "") -> str:
    """The text in lines that fit the terminal to which it goes, under its first column; a key stays whole.

    What it stands after there takes room in its first line.
    """
    if not (sys.stderr if err else sys.stdout).isatty() or _width(after + text) <= (room := _columns()):
        return text
    under = _UNDER.match(text)
    indent = " " * (under.end() if under else 0)
    fitting = textwrap.TextWrapper(
        room,
        initial_indent=after,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return fitting.fill(text).removeprefix(after)


def left_out(columns: Sequence[str], heading: str, instead: str = "") -> str:
    """That a table has no room for some of its columns, as its heading tells; else nothing."""
    missing = [name for name in columns if name not in heading]
    return f" No room for {', '.join(missing)}: widen the terminal{instead}." if missing else ""


def width() -> int | None:
    """How wide the terminal is to which stdout goes; None if it goes elsewhere, and there is room for all."""
    return _columns() if sys.stdout.isatty() else None


def _columns() -> int:
    return shutil.get_terminal_size().columns


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], room: int | None = None) -> Iterator[str]:
    """The lines of a table under these headings, as wide as its cells; what does not fit ends with "…"."""
    by_name = {name: _Column(cells) for name, cells in zip(columns, zip(columns, *rows))}
    widths = {name: column.width() for name, column in by_name.items()}
    if room is not None:
        widths = _fitted(widths, room)
    padded = (by_name[name].padded(width, keep_end=name == _KEEP_END) for name, width in widths.items())
    for cells in zip(*padded):
        line = _GAP.join(cells).rstrip()
        yield line if room is None else _cut(line, room)


class _Column:
    """The cells of a column, escaped. Most are of plain letters only, which is quick for 100,000 locks."""

    def __init__(self, cells: Sequence[str]) -> None:
        together = "".join(cells)
        self._is_plain = together.isascii() and together.isprintable()
        self._cells = cells if self._is_plain else list(map(printable, cells))

    def width(self) -> int:
        """That of its widest cell."""
        return max(map(len if self._is_plain else _width, self._cells))

    def padded(self, width: int, *, keep_end: bool) -> Iterator[str]:
        """Its cells, all of this width."""
        for cell in self._cells:
            if self._is_plain and len(cell) <= width:
                yield cell.ljust(width)
            else:
                cut = _cut(cell, width, keep_end=keep_end)
                yield cut + " " * (width - _width(cut))


def _fitted(widths: dict[str, int], room: int) -> dict[str, int]:
    """The widths of the columns that there is room for."""
    for name, least in _GIVE_WAY.items():
        excess = sum(widths.values()) + len(_GAP) * (len(widths) - 1) - room
        if excess <= 0:
            break
        if name == _KEEP_END or (least and widths.get(name, 0) - excess >= least):
            widths = {**widths, name: max(least, widths[name] - excess)}
        else:
            widths = {other: wide for other, wide in widths.items() if other != name}
    return widths


def _said(line: str | Line, *, err: bool) -> str:
    if isinstance(line, str):
        return whole_words(printable(line), err=err)
    text = whole_words(printable(line.text), err=err)
    if not line.style:
        return text
    first = len(text) if line.first is None else line.first
    return str(click.get_current_context().obj.style(text[:first], **line.style)) + text[first:]


def _cut(text: str, room: int, *, keep_end: bool = False) -> str:
    if _width(text) <= room:
        return text
    room = max(room, 1)
    kept = text[-room:] if keep_end else text[:room]
    while _width(kept) >= room:
        kept = kept[1:] if keep_end else kept[:-1]
    return f"…{kept}" if keep_end else f"{kept}…"


def _width(text: str) -> int:
    """The cells that a text takes on a screen: two for the wide letters of East Asia, none for accents."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )
