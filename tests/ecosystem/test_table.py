"""docs/ecosystem.md says the versions that are tested, and nothing that is not."""

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
# | what | version | what to know | tested by |
ROW = re.compile(r"^\| \[?`?([\w-]+)`?[^|]*\| ([\w.]+) \|.*\| `(test_\w+\.py)` \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "docs/ecosystem.md").read_text())
PINNED = dict(
    re.match(r"([\w-]+)(?:\[.*\])?==(.+)", name).groups()  # type: ignore[union-attr]
    for name in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][
        "ecosystem"
    ]
    if "==" in name and not name.startswith("celery[")
)


def test_every_library_of_the_environment_has_a_row_and_every_row_a_library():
    """The table and the extra `ecosystem` name the same libraries and versions."""
    assert {name: said for name, said, _test in ROWS} == PINNED


@pytest.mark.parametrize(("library", "said", "module"), ROWS)
def test_row_says_what_is_tested(library: str, said: str, module: str):
    """The version is installed here, and the module that tests it names the library."""
    assert version(library) == said
    assert library in (Path(__file__).parent / module).read_text()
