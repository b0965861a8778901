"""The pictures: they say what their pages say, and can be read."""

import re
from itertools import combinations, pairwise
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

from examples.picture import LEASE, NEXT, PICTURES, RUNS
from tests.docs.pages import text_of

FIRST = "in-five-seconds"
"""The picture that the README begins with: drawn by hand, once."""
SVGS = {name: text_of(f"docs/{name}.svg") for name in (FIRST, *PICTURES)}
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


def words(svg: str) -> list[Box]:
    """Every label, as wide and high as its letters."""
    size = float(re.search(r'font-size="(\d+)"', svg)[1])  # type: ignore[index]
    found = []
    for x, y, anchor, text in re.findall(
        r'<text x="([\d.]+)" y="(\d+)" .*?text-anchor="(\w+)">(.*?)</text>', svg
    ):
        width = len(text) * CHARACTER_EM * size
        left = float(x) - {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        found.append(Box(left, float(y) - 0.75 * size, left + width, float(y) + 0.25 * size, text))
    return found


def lines(svg: str) -> list[Box]:
    """Every upright line."""
    shapes = re.findall(r'<path d="M([\d.]+) (\d+)V(\d+)"', svg)
    return [Box(float(x) - 1, float(top), float(x) + 1, float(bottom), "line") for x, top, bottom in shapes]


def bars(svg: str) -> dict[float, list[Box]]:
    """Every bar by its colour, from left to right, by the height at which it stands."""
    shapes = re.findall(
        r'<rect x="([\d.]+)" y="(\d+)" width="([\d.]+)" height="(\d+)" rx="3" fill="(.*?)"', svg
    )
    found: dict[float, list[Box]] = {}
    for x, y, width, height, colour in shapes:
        bar = Box(float(x), float(y), float(x) + float(width), float(y) + float(height), colour)
        found.setdefault(bar.top, []).append(bar)
    return {top: sorted(row) for top, row in sorted(found.items())}


@pytest.mark.parametrize("name", SVGS)
def test_labels_of_a_picture_cross_nothing(name):
    """Neither one another, nor a line, nor the border."""
    svg = SVGS[name]
    width, height = map(float, re.search(r'viewBox="0 0 (\d+) (\d+)"', svg).groups())  # type: ignore[union-attr]
    assert len(words(svg)) > 8
    assert [(a.what, b.what) for a, b in combinations(words(svg), 2) if a.crosses(b)] == []
    assert [word.what for word in words(svg) for line in lines(svg) if word.crosses(line)] == []
    assert [word.what for word in words(svg) if not (word.left > 0 and word.right < width)] == []
    assert [word.what for word in words(svg) if not (word.top > 0 and word.bottom < height)] == []


def test_first_picture_can_be_read_on_a_phone():
    """In a column of 360 pixels its letters have 11 or more; and words say what it shows."""
    picture = ElementTree.fromstring(SVGS[FIRST])
    sizes = [float(part.attrib["font-size"]) for part in picture.iter() if "font-size" in part.attrib]
    assert sizes
    assert min(sizes) * 360 / float(picture.attrib["viewBox"].split()[2]) >= 11
    said = {part.tag.rpartition("}")[2]: part.text for part in picture}
    assert said["title"]
    assert said["desc"]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_first_picture_stands_at_the_top(page):
    """Within the first fifteen lines of the page, with its words beside it."""
    top = "\n".join(text_of(page).splitlines()[:15])
    (alt,) = re.findall(rf"!\[(.*?)\]\((?:docs/)?{FIRST}\.svg\)", top)
    assert all(word in alt for word in ("report(5)", "sent twice", "skipped", "killed", "takes"))


def test_picture_of_the_take_over_says_why_it_takes_that_long():
    """A lease has to end, because nobody on another host can see that the worker is dead."""
    said = " ".join(word.what for word in words(SVGS["take-over"]))
    assert "lease (3 s)" in said
    assert "another host" in said


def test_picture_of_the_saves_shows_four_that_are_skipped_and_one_that_runs():
    """All were sent before the first has ended; the last one runs, when its wait is over."""
    svg = SVGS["save-as-one-types"]
    *older, newest = bars(svg).values()
    assert [[bar.what for bar in row] for row in older] == [[LEASE]] * 4
    assert [bar.what for bar in newest] == [LEASE, RUNS]
    waits = [row[0] for row in (*older, newest)]
    assert all(before.left < after.left < waits[0].right for before, after in pairwise(waits))
    assert max(bar.right for bar in waits) == waits[-1].right == pytest.approx(newest[1].left, abs=0.11)
    assert len(re.findall(r">skipped<", svg)) == 4


def test_picture_of_the_permits_shows_five_at_a_time_and_never_two_under_one():
    """A row for each permit, in which no body begins before the one before it has ended."""
    lanes = bars(SVGS["five-at-a-time"])
    assert len(lanes) == len(re.findall(r">permit \d<", SVGS["five-at-a-time"])) == 5
    for row in lanes.values():
        assert all(before.right <= after.left + 0.11 for before, after in pairwise(row))
        assert sum(bar.what in (RUNS, NEXT) for bar in row) > 2
    bodies = [bar for row in lanes.values() for bar in row if bar.what != LEASE]
    at_once = [sum(other.left <= bar.left < other.right - 0.11 for other in bodies) for bar in bodies]
    assert max(at_once) == 5


def test_picture_of_the_permits_shows_that_a_death_costs_one():
    """While the lease of the dead one runs down, bodies begin under all the others; then under it again."""
    lanes = bars(SVGS["five-at-a-time"])
    (lost,) = (top for top, row in lanes.items() if any(bar.what == LEASE for bar in row))
    (lease,) = (bar for bar in lanes[lost] if bar.what == LEASE)
    for top, row in lanes.items():
        meanwhile = [bar for bar in row if lease.left < bar.left < lease.right]
        assert (meanwhile == []) is (top == lost)
    assert [bar for bar in lanes[lost] if bar.left >= lease.right]


def test_picture_of_the_rate_shows_no_window_with_more_than_ten_starts():
    """However the window is laid; and in each that is drawn there are as many as are written in it."""
    lanes = bars(SVGS["ten-a-minute"])
    windows = [bar for row in lanes.values() for bar in row if bar.what == LEASE]
    bodies = [row for row in lanes.values() if all(bar.what in (RUNS, NEXT) for bar in row)]
    assert len(bodies) == 2
    assert all(len(row) > 2 for row in bodies)
    starts = sorted(bar.left for row in bodies for bar in row)
    period = windows[0].right - windows[0].left
    within = [sum(left <= start < left + period - 0.21 for start in starts) for left in starts]
    assert max(within) == 10 < len(starts)
    assert len(windows) == len(re.findall(r">10 starts<", SVGS["ten-a-minute"])) == 3
    assert [sum(bar.left <= start < bar.right - 0.21 for start in starts) for bar in windows] == [10] * 3
