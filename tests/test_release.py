"""The release check finds what is planted: a wrong version, a file too many, a picture without words."""

import io
import tarfile
import zipfile
from email.message import Message
from pathlib import Path

import pytest

from tests.release import checks

CHANGES = "# Changelog\n\n## 1.1.0 (2026-12-01)\n\n## 1.0.0 (2026-11-22)\n"
TRACKED = [
    "celery_setnx/__init__.py",
    "celery_setnx/lock/lua/free.lua",
    "docs/index.md",
    "README.md",
    ".ci/run",
]
INFO = "celery_setnx-1.1.0.dist-info"
DESCRIBES = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
OF_THE_WHEEL = [*TRACKED[:2], *(f"{INFO}/{name}" for name in DESCRIBES)]
OF_THE_SDIST = [*TRACKED[:4], "PKG-INFO", "pyproject.toml", ".gitignore"]
INCLUDED = ["celery_setnx", "docs", "README.md"]
PYTHONS = ["3.10", "3.11"]
SHOWN = "Time line: a worker is killed in mid-task"


def wheel(directory: Path, names: list[str]) -> Path:
    path = directory / "celery_setnx-1.1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name in names:
            archive.writestr(name, "")
    return path


def sdist(directory: Path, names: list[str]) -> Path:
    path = directory / "celery_setnx-1.1.0.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(f"celery_setnx-1.1.0/{name}"), io.BytesIO())
    return path


def metadata(**changed: str) -> Message:
    """What a good wheel says, with some fields changed; a field is repeated with `|`."""
    fields = {
        "Name": "celery_setnx",
        "Version": "1.1.0",
        "Summary": "Celery tasks",
        "Keywords": "celery",
        "Author": "The developers",
        "License-Expression": "BSD-3-Clause",
        "License-File": "LICENSE",
        "Requires-Python": ">=3.10",
        "Description-Content-Type": "text/markdown",
        "Classifier": "Typing :: Typed"
        "|Programming Language :: Python :: 3.10|Programming Language :: Python :: 3.11",
        "Requires-Dist": "celery<6,>=5.4|redis>=5|rich>=13; extra == 'cli'",
    }
    message = Message()
    for name, value in {**fields, **{key.replace("_", "-"): value for key, value in changed.items()}}.items():
        for part in value.split("|"):
            message[name] = part
    return message


def test_version_of_the_source_is_read():
    """And a module that has none has an empty one."""
    assert checks.version_of('"""Doc."""\n\n__version__ = "1.1.0"\n') == "1.1.0"
    assert checks.version_of("VERSION = 1\n") == ""


@pytest.mark.parametrize("when", ["2026-12-01", "unreleased"])
def test_version_that_the_change_log_begins_with_is_fine(when):
    """With a date or without one yet, while no tag has its name."""
    changes = CHANGES.replace("2026-12-01", when)
    assert checks.of_version("1.1.0", changes, "abc", {"v1.0.0": "def"}) == []


def test_tag_on_the_commit_itself_is_this_release():
    """The commit that is tagged is checked like any other."""
    assert checks.of_version("1.1.0", CHANGES, "abc", {"v1.1.0": "abc"}) == []


@pytest.mark.parametrize(
    ("version", "changes", "tags", "says"),
    [
        ("1.2.0", CHANGES, {}, "__version__ is 1.2.0, and CHANGELOG.md begins with 1.1.0"),
        ("1.1.0", CHANGES.replace("12-01", "13-01"), {}, "2026-13-01 is no date"),
        ("1.1.0", CHANGES.replace(" (2026-12-01)", ""), {}, "not with a version and (a date)"),
        ("1.1.0", "# Changelog\n", {}, "begins with []"),
        ("1.1.0", CHANGES, {"v1.1.0": "0123456789"}, "v1.1.0 is tagged already, at 01234567"),
        ("1.1.0", CHANGES.replace("2026-12-01", "unreleased"), {"v1.1.0": "abc"}, "give it a date"),
    ],
    ids=["another", "no date", "no title", "no section", "tagged", "tagged without a date"],
)
def test_wrong_version_is_found(version, changes, tags, says):
    """One sentence says what is wrong."""
    (problem,) = checks.of_version(version, changes, "abc", tags)
    assert says in problem


def test_files_as_they_should_be_are_fine(tmp_path):
    """The wheel has the package and what describes it, the sdist what is included."""
    assert checks.of_wheel(wheel(tmp_path, OF_THE_WHEEL), TRACKED) == []
    assert checks.of_sdist(sdist(tmp_path, OF_THE_SDIST), TRACKED, INCLUDED) == []


@pytest.mark.parametrize("planted", ["tests/app.py", "celery_setnx/__pycache__/task.cpython-311.pyc"])
def test_extra_file_is_found(tmp_path, planted):
    """In the wheel, and in the sdist."""
    assert checks.of_wheel(wheel(tmp_path, [*OF_THE_WHEEL, planted]), TRACKED) == [f"has {planted}"]
    assert checks.of_sdist(sdist(tmp_path, [*OF_THE_SDIST, planted]), TRACKED, INCLUDED) == [f"has {planted}"]


def test_missing_file_is_found(tmp_path):
    """A script that the wheel has not, a page that the sdist has not, an include that leads nowhere."""
    lua, page = TRACKED[1:3]
    wheel_without = wheel(tmp_path, [name for name in OF_THE_WHEEL if name != lua])
    assert checks.of_wheel(wheel_without, TRACKED) == [f"lacks {lua}"]
    sdist_without = sdist(tmp_path, [name for name in OF_THE_SDIST if name != page])
    assert checks.of_sdist(sdist_without, TRACKED, INCLUDED) == [f"lacks {page}"]
    whole = sdist(tmp_path, OF_THE_SDIST)
    assert checks.of_sdist(whole, TRACKED, [*INCLUDED, "SECURITY.md"]) == [
        "SECURITY.md is included, and nobody has it"
    ]


def test_good_metadata_is_fine():
    """Links are not needed, and an address is one."""
    assert checks.of_metadata(metadata(), "1.1.0", PYTHONS) == []
    linked = metadata(Project_URL="Documentation, https://celery-setnx.readthedocs.io")
    assert checks.of_metadata(linked, "1.1.0", PYTHONS) == []


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"Version": "1.0.0"}, "Version is 1.0.0, not 1.1.0"),
        ({"Requires_Python": ">=3.9"}, "Requires-Python is >=3.9"),
        ({"Summary": ""}, "Summary is missing"),
        ({"License_Expression": "MIT"}, "License-Expression is MIT"),
        ({"Requires_Dist": "celery>=5.4|redis>=5|rich>=13"}, "depends on ['celery', 'redis', 'rich']"),
        ({"Requires_Dist": "celery>=5.4"}, "depends on ['celery']"),
        (
            {"Classifier": "Typing :: Typed|Programming Language :: Python :: 3.10"},
            "and ['3.10', '3.11'] are",
        ),
        ({"Project_URL": "Homepage, https://example.com/celery_setnx"}, "is no address"),
        ({"Project_URL": "Issues, docs/index.md"}, "is no address"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_metadata_is_found(changed, says):
    """One sentence names the field and what it should be."""
    (problem,) = checks.of_metadata(metadata(**changed), "1.1.0", PYTHONS)
    assert says in problem


def test_good_readme_is_fine():
    """A link to the web, one within the page; a picture with words."""
    html = (
        '<h1>celery_setnx</h1><a href="https://docs.celeryq.dev">b</a><a href="#three">c</a>'
        f'<img src="https://pictures.org/a.svg" alt="{SHOWN}"><code>&lt;b&gt;</code>'
    )
    assert checks.of_readme(html) == []


@pytest.mark.parametrize(
    ("html", "says"),
    [
        (None, "cannot render it"),
        ('<a href="docs/index.md">x</a>', "leads nowhere on the index: docs/index.md"),
        (f'<img src="docs/a.svg" alt="{SHOWN}">', "leads nowhere on the index: docs/a.svg"),
        ('<img src="https://pictures.org/a.svg">', "does not say what it shows: ''"),
        ('<img src="https://pictures.org/a.svg" alt="picture">', "does not say what it shows: 'picture'"),
        ("<p>&lt;details open&gt;</p>", "escapes a tag"),
    ],
    ids=["not rendered", "relative link", "relative picture", "no words", "one word", "shown tag"],
)
def test_wrong_readme_is_found(html, says):
    """One sentence says what a reader of the index would see."""
    (problem,) = checks.of_readme(html)
    assert says in problem
