"""`python -m tests.release`: builds wheel and sdist of the newest commit, and checks all but the upload.

Built twice, from two clones: whoever builds a release gets the same bytes. pip then installs the sdist on
each CPython of docs/works-with.md, where there is nothing else. Prints a table of what was checked.
"""

import argparse
import filecmp
import re
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from email import message_from_bytes
from email.message import Message
from pathlib import Path

from readme_renderer import markdown

from celery_setnx.cli.screen import table as lines_of
from tests.release import checks
from tests.versions.pythons import Broken, call, cpython
from tests.versions.table import PAGE, ROOT, following_pythons, rows

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# What a newcomer does first. It needs no Redis, and a file of its own: `celery -A` imports it.
FIRST_LINES = """\
from celery import Celery
from celery_setnx import SingletonTask

app = Celery("first", broker="memory://")


@app.task(base=SingletonTask, singleton={"key": "account_id"})
def settle(account_id): return account_id
"""


@dataclass(frozen=True)
class Built:
    """A clone of the newest commit, and what was built of it."""

    clone: Path
    wheel: Path
    sdist: Path

    def text(self, name: str) -> str:
        """A file of the commit."""
        return (self.clone / name).read_text()

    def tracked(self) -> list[str]:
        """All files of the commit."""
        return call(["git", "ls-files"], self.clone).splitlines()

    @property
    def version(self) -> str:
        """What the package says that it is."""
        return checks.version_of(self.text("celery_setnx/__init__.py"))

    def metadata(self) -> Message:
        """What the wheel tells the index."""
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
            return message_from_bytes(archive.read(name))


def main() -> int:
    """Print the table; the status says whether all is well."""
    parser = argparse.ArgumentParser(prog="python -m tests.release", description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="where the files go (default dist/)")
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    table: list[tuple[str, str, str]] = []

    def check(what: str, look: Callable[[], list[str]]) -> None:
        note(what, *timed(look))

    def note(what: str, problems: list[str], took_s: float) -> None:
        words = "; ".join(text.partition("\n")[0] for text in problems)
        table.append((what, f"{took_s:.0f}", words or "ok"))
        print("\n".join([f"{what}: {'ok' if not problems else 'FAILED'}", *problems]), flush=True)

    with tempfile.TemporaryDirectory(prefix="celery_setnx-") as name:
        directory = Path(name)
        built = build(directory / "clone", out)
        print(f"{built.wheel.name}, {built.sdist.name}: {told(built)}", flush=True)
        check("version, change log, tags", lambda: of_version(built))
        check("built again: the same bytes", lambda: again(built, directory))
        check("twine check --strict", lambda: twine(built))
        check("files of the wheel", lambda: checks.of_wheel(built.wheel, built.tracked()))
        check("files of the sdist", lambda: checks.of_sdist(built.sdist, built.tracked(), included(built)))
        check("metadata", lambda: checks.of_metadata(built.metadata(), built.version, promised()))
        check("README, as the index shows it", lambda: readme(built))
        with ThreadPoolExecutor(2) as pool:
            wanted = pythons()

            def look(minor: str) -> tuple[list[str], float]:
                return timed(lambda: installed(built, minor, directory / minor))

            for minor, found in zip(wanted, pool.map(look, wanted)):
                note(f"sdist in a bare CPython {minor}", *found)
    print("", *lines_of(("what", "seconds", "result"), table), sep="\n")
    return 0 if all(result == "ok" for _what, _took, result in table) else 1


def timed(look: Callable[[], list[str]]) -> tuple[list[str], float]:
    """What a look finds, and how many seconds it took; a command that failed is a problem."""
    began = time.monotonic()
    try:
        problems = look()
    except (Broken, OSError) as error:
        problems = [str(error)]
    return problems, time.monotonic() - began


def build(clone: Path, out: Path) -> Built:
    """Clone the newest commit, build it, and leave the files in `out`."""
    call(["git", "clone", "--quiet", str(ROOT), str(clone)])
    call([sys.executable, "-m", "build", "--outdir", str(out), str(clone)])
    version = checks.version_of((clone / "celery_setnx/__init__.py").read_text())
    names = (f"celery_setnx-{version}-py3-none-any.whl", f"celery_setnx-{version}.tar.gz")
    return Built(clone, *(out / name for name in names))


def told(built: Built) -> str:
    """Which commit was built, and whether that is all that there is here."""
    head = call(["git", "rev-parse", "--short", "HEAD"], built.clone).strip()
    changed = call(["git", "status", "--porcelain", "--untracked-files=no"], ROOT).splitlines()
    return f"commit {head}" + (f"; {len(changed)} changed files are not in it" if changed else "")


def of_version(built: Built) -> list[str]:
    """The version beside the change log and the tags."""
    head = call(["git", "rev-parse", "HEAD"], built.clone).strip()
    tags = {
        tag: call(["git", "rev-parse", f"{tag}^{{commit}}"], built.clone).strip()
        for tag in call(["git", "tag"], built.clone).splitlines()
    }
    if not tags:
        print("notice: there are no tags here, so whether this version is out already is not known")
    return checks.of_version(built.version, built.text("CHANGELOG.md"), head, tags)


def again(built: Built, directory: Path) -> list[str]:
    """Files of a second build, in another directory, that have other bytes."""
    other = build(directory / "again-of", directory / "again")
    pairs = zip((built.wheel, built.sdist), (other.wheel, other.sdist))
    return [f"{one.name} has other bytes" for one, two in pairs if not filecmp.cmp(one, two, shallow=False)]


def twine(built: Built) -> list[str]:
    """What twine finds; warnings count."""
    call([sys.executable, "-m", "twine", "check", "--strict", str(built.wheel), str(built.sdist)])
    return []


def included(built: Built) -> list[str]:
    """What pyproject.toml says that an sdist has."""
    project = tomllib.loads(built.text("pyproject.toml"))
    return list(project["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])


def pythons() -> list[str]:
    """The CPythons of the table in docs/works-with.md."""
    return sorted(
        {row.python for row in rows(PAGE.read_text())}, key=lambda minor: [*map(int, minor.split("."))]
    )


def promised() -> list[str]:
    """The same, and those that follow: tests/versions runs them, which only a container has."""
    return pythons() + following_pythons(PAGE.read_text())


def readme(built: Built) -> list[str]:
    """The description that the index gets, rendered as the index does."""
    payload = built.metadata().get_payload(decode=True)
    assert isinstance(payload, bytes)
    text = payload.decode()
    headings = re.findall("^#+ .*", built.text("README.md"), re.MULTILINE)
    if re.findall("^#+ .*", text, re.MULTILINE) != headings:
        return ["the wheel's description has other headings than README.md"]
    return checks.of_readme(markdown.render(text))


def installed(built: Built, minor: str, directory: Path) -> list[str]:
    """pip installs the sdist where there is nothing else, and its first lines and its commands work there."""
    interpreter = cpython(minor)
    python = directory / "venv" / "bin" / "python"
    call([interpreter, "-m", "venv", str(directory / "venv")])
    call([str(python), "-m", "pip", "install", "--quiet", str(built.sdist)], directory)
    call([str(python), "-m", "pip", "check"], directory)
    (directory / "first.py").write_text(FIRST_LINES)
    probe = "import first, platform; print(platform.python_version(), first.settle(7))"
    found = call([str(python), "-c", probe], directory).split()
    help_text = call([str(python), "-m", "celery", "-A", "first", "setnx", "--help"], directory)
    problems = [] if found[1:] == ["7"] else [f"settle(7) is {found[1:]}"]
    if not found[0].startswith(f"{minor}."):
        print(f"notice: CPython {minor} is not here; tested on {found[0]}")
    return problems + [
        f"setnx --help does not name {word}" for word in ("doctor", "list") if word not in help_text
    ]


if __name__ == "__main__":
    sys.exit(main())
