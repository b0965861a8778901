"""What is wrong with a release: each check returns sentences, and none if all is well."""

import re
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from datetime import date
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path

from packaging.requirements import Requirement

NEEDED = {"celery", "redis"}
# What the build backend puts beside the files that it is told to take.
OF_AN_SDIST = {"PKG-INFO", "pyproject.toml", ".gitignore"}
OF_A_WHEEL = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
WORDS_OF_A_PICTURE = 5
_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_TITLE = re.compile(r"(\d+\.\d+\.\d+) \((\d{4}-\d\d-\d\d|unreleased)\)")
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_STAND_IN = re.compile(r"example\.(com|org|net)|your|todo|localhost|\.invalid", re.IGNORECASE)


def version_of(module: str) -> str:
    """What `__version__` is in the source of the package's `__init__`; empty if it is nowhere."""
    found = _VERSION.search(module)
    return found[1] if found else ""


def of_version(version: str, changelog: str, head: str, tags: Mapping[str, str]) -> list[str]:
    """The version beside the change log's top section, and the tags with the commits that they name."""
    titles = _SECTION.findall(changelog)
    top = _TITLE.fullmatch(titles[0]) if titles else None
    if top is None:
        return [f"CHANGELOG.md begins with {titles[:1]}, not with a version and (a date) or (unreleased)"]
    problems = []
    said, when = top.groups()
    if said != version:
        problems.append(f"__version__ is {version}, and CHANGELOG.md begins with {said}")
    if when != "unreleased" and not _is_a_date(when):
        problems.append(f"CHANGELOG.md: {when} is no date")
    tagged = tags.get(f"v{version}")
    if tagged not in (None, head):
        problems.append(f"v{version} is tagged already, at {tagged[:8]}: raise __version__")
    elif tagged and when == "unreleased":
        problems.append(f"v{version} is tagged, and CHANGELOG.md says (unreleased): give it a date")
    return problems


def of_wheel(wheel: Path, tracked: Iterable[str]) -> list[str]:
    """The files of a wheel beside those of the package that git knows."""
    with zipfile.ZipFile(wheel) as archive:
        found = {name for name in archive.namelist() if not name.endswith("/")}
    name, version = wheel.name.split("-")[:2]
    package = {path for path in tracked if path.startswith("celery_setnx/")}
    return _differences(found, package | {f"{name}-{version}.dist-info/{path}" for path in OF_A_WHEEL})


def of_sdist(sdist: Path, tracked: Iterable[str], included: Iterable[str]) -> list[str]:
    """The files of an sdist beside those that git knows below what pyproject.toml includes."""
    top = sdist.name.removesuffix(".tar.gz") + "/"
    with tarfile.open(sdist) as archive:
        found = {member.name.removeprefix(top) for member in archive if not member.isdir()}
    roots, tracked = set(included), set(tracked)
    wanted = {path for path in tracked if path.partition("/")[0] in roots}
    missing = roots - {path.partition("/")[0] for path in wanted}
    return [f"{root} is included, and nobody has it" for root in sorted(missing)] + _differences(
        found, wanted | OF_AN_SDIST
    )


def of_metadata(metadata: Message, version: str, pythons: Iterable[str]) -> list[str]:
    """What the index is told, beside the version and the CPythons that are tested."""
    problems = []
    first, *_ = pythons = list(pythons)
    told = {
        "Name": "celery_setnx",
        "Version": version,
        "License-Expression": "BSD-3-Clause",
        "License-File": "LICENSE",
        "Requires-Python": f">={first}",
        "Description-Content-Type": "text/markdown",
    }
    for field, value in told.items():
        if metadata[field] != value:
            problems.append(f"{field} is {metadata[field]}, not {value}")
    problems += [f"{field} is missing" for field in ("Summary", "Keywords", "Author") if not metadata[field]]
    classifiers = metadata.get_all("Classifier", [])
    minors = [found[1] for each in classifiers if (found := re.search(r":: Python :: (3\.\d+)$", each))]
    if minors != pythons:
        problems.append(f"the classifiers say CPython {minors}, and {pythons} are tested")
    if "Typing :: Typed" not in classifiers:
        problems.append("no classifier says that the package is typed")
    needs = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    names = {need.name for need in needs if "extra" not in str(need.marker)}
    if names != NEEDED:
        problems.append(f"it depends on {sorted(names)}, not on {sorted(NEEDED)} alone")
    for link in metadata.get_all("Project-URL", []):
        address = link.rpartition(", ")[2]
        if not address.startswith("https://") or _STAND_IN.search(address):
            problems.append(f"{link} is no address")
    return problems


def of_readme(html: str | None) -> list[str]:
    """The README as the index renders it: each link leads somewhere there, and its pictures have words."""
    if not html:
        return ["the index cannot render it, and would show its source"]
    seen = _Seen()
    seen.feed(html)
    problems = [f"leads nowhere on the index: {link}" for link in seen.links]
    for picture, words in seen.pictures.items():
        if len(words.split()) < WORDS_OF_A_PICTURE:
            problems.append(f"{picture} does not say what it shows: {words!r}")
    if seen.is_escaped:
        problems.append("the index escapes a tag that is written in it")
    return problems


class _Seen(HTMLParser):
    """Pictures with their words, relative links without their anchors, and whether a tag is shown as text."""

    def __init__(self) -> None:
        super().__init__()
        self.pictures: dict[str, str] = {}
        self.links: list[str] = []
        self.is_escaped = False
        self._codes = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._codes += tag in ("code", "pre")
        for name in ("href", "src"):
            address = given.get(name, "").partition("#")[0]
            if address and not re.match(r"https?://|mailto:", address):
                self.links.append(address)
        if tag == "img":
            self.pictures[given.get("src", "")] = given.get("alt", "")

    def handle_endtag(self, tag: str) -> None:
        self._codes -= tag in ("code", "pre")

    def handle_data(self, data: str) -> None:
        self.is_escaped |= not self._codes and bool(re.search(r"</?[a-z]+[ />]", data))


def _differences(found: set[str], wanted: set[str]) -> list[str]:
    extra = [f"has {name}" for name in sorted(found - wanted)]
    return extra + [f"lacks {name}" for name in sorted(wanted - found)]


def _is_a_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True
