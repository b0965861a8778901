"""docs/works-with.md says the versions of libraries that are tested, and nothing that is not."""

import re
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib
ROOT = Path(__file__).parents[2]
# | library | version | what to know |
ROW = re.compile(r"^\| ([\w-]+) \| (\d[\w.]*) \| [^|]+ \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs/works-with.md").read_text().partition("## Libraries")[2])
HERE = Path(__file__).parent
TESTS = [path.read_text() for path in HERE.glob("test_*.py") if path != Path(__file__)]
PINNED = dict(
    re.match(r"([\w-]+)(?:\[.*\])?==(.+)", name).groups()  # type: ignore[union-attr]
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "ecosystem"
    ]
    if "==" in name and not name.startswith("celery[")
)


def test_every_library_of_the_environment_has_a_row_and_every_row_a_library():
    """The table and the extra `ecosystem` name the same libraries and versions."""
    assert dict(ROWS) == PINNED


@pytest.mark.parametrize(("library", "said"), ROWS)
def test_row_says_what_is_tested(library: str, said: str):
    """The version is installed here, and a module of tests names the library."""
    assert version(library) == said
    assert any(library in text for text in TESTS)
