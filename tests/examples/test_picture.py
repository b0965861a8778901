"""The picture of the README: it says what the README says, and can be read."""

import re
from itertools import combinations
from typing import NamedTuple

from tests.docs.pages import text_of

SVG = text_of("docs/take-over.svg")
CHARACTER_EM = 0.61
"""The width of a character of any of its fonts, which are monospaced; DejaVu Sans Mono has 0.602."""


class Box(NamedTuple):
    """Where something is drawn."""

    left: float
    top: float
    right: float
    bottom: float
    what: str

    def crosses(self, other: "Box") -> bool:
        """Whether the two have a point in common."""
        across = self.left < other.right and other.left < self.right
        return across and self.top < other.bottom and other.top < self.bottom


def words() -> list[Box]:
    """Every label, as wide and high as its letters."""
    size = float(re.search(r'font-size="(\d+)"', SVG)[1])  # type: ignore[index]
    found = []
    for x, y, anchor, text in re.findall(
        r'<text x="([\d.]+)" y="(\d+)" .*?text-anchor="(\w+)">(.*?)</text>', SVG
    ):
        width = len(text) * CHARACTER_EM * size
        left = float(x) - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        found.append(Box(left, float(y) - 0.75 * size, left + width, float(y) + 0.25 * size, text))
    return found


def lines() -> list[Box]:
    """Every upright line."""
    shapes = re.findall(r'<path d="M([\d.]+) (\d+)V(\d+)"', SVG)
    return [Box(float(x) - 1, float(top), float(x) + 1, float(bottom), "line") for x, top, bottom in shapes]


def test_labels_of_the_picture_cross_nothing():
    """Neither one another, nor a line, nor the border."""
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', SVG).groups())  # type: ignore[union-attr]
    assert len(words()) > 8
    assert [(a.what, b.what) for a, b in combinations(words(), 2) if a.crosses(b)] == []
    assert [word.what for word in words() for line in lines() if word.crosses(line)] == []
    assert [word.what for word in words() if not (word.left > 0 and word.right < width)] == []
    assert [word.what for word in words() if not (word.top > 0 and word.bottom < height)] == []


def test_picture_says_why_it_takes_that_long():
    """A lease has to end, because nobody on another host can see that the worker is dead."""
    said = " ".join(word.what for word in words())
    assert "lease (3 s)" in said
    assert "another host" in said
