"""Every example, run as its reader runs it, and what it prints beside what it should.

`expected/NAME.txt` is the output of `python -m examples.NAME`, in which `VARIES` has replaced what no two
runs have in common.
"""

import os
import re
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, blocks, pages, text_of
from tests.harness import wait_until

EXAMPLES = ROOT / "examples"
EXPECTED = Path(__file__).parent / "expected"
DEADLINE_S = 240
ELSEWHERE = {
    "demo": "make demo, in .ci/run",
    "picture": "draws a file from what the demo has seen",
    "compose.demo": "tests/deploy, with Docker",
}

# What differs from run to run, in this order, and what stands for it in the expected texts.
VARIES = {
    r"\nworker: Warm shutdown \(MainProcess\)\n": "",  # Celery says so, before or after other lines
    r"\b[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\b": "<id>",  # of a task
    r"\b\d{16}\b": "<fence>",  # a fence begins as the server's microseconds
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC": "<time>",
    r" *\b\d+(\.\d+)? s\b": " <seconds>",
    r"\b\d+:\d\d:\d\d\b": "<elapsed>",
    r"\bpid \d+": "pid <pid>",
    rf"\b{re.escape(socket.gethostname())}\b": "<host>",
}
# How many of its calls are duplicates depends on how fast the worker is; that they add up, it checks itself.
VARIES_IN = {
    "fan_out": {r"(?<![\d,])\d{1,3}(,\d{3})*(?![\d,])(?! calls| in all)": "<number>", r" +(?=<elapsed>)": " "}
}


def runnable() -> list[str]:
    """The examples that are programs: modules with a `__main__` part, and packages with a `__main__`."""
    found = []
    for path in EXAMPLES.rglob("*.py"):
        name = ".".join(path.relative_to(EXAMPLES).with_suffix("").parts)
        if path.name == "__main__.py":
            found.append(name.removesuffix(".__main__"))
        elif path.name != "manage.py" and 'if __name__ == "__main__":\n' in path.read_text():
            found.append(name)
    return sorted(found)


def shown(name: str, output: str) -> str:
    """The output of an example, with names for what varies."""
    for pattern, stands_for in {**VARIES, **VARIES_IN.get(name, {})}.items():
        output = re.sub(pattern, stands_for, output)
    return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run() -> Iterator[Run]:
    """Runs a command in a process group of its own, of which nothing is left afterwards."""
    groups: list[int] = []

    def run(*command: str, directory: Path = ROOT) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if name != "REDIS_URL"}
        environment.update(COLUMNS="110", SHOP_DATABASE=":memory:", PYTHONDONTWRITEBYTECODE="1")
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=directory,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        groups.append(process.pid)
        output, errors = process.communicate(timeout=DEADLINE_S)
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    yield run
    for group in groups:
        try:
            wait_until(lambda group=group: not is_alive(group), "every process of the example has ended")
        finally:
            with suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def is_alive(group: int) -> bool:
    """Whether a process group has a process that is not a zombie."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended meanwhile
            state, _parent, its_group = stat.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state not in ("Z", "X"):
                return True
    return False


def test_every_example_is_run():
    """Every example that is a program has an expected text or is run elsewhere; no text is left over."""
    assert {*runnable()} - {*ELSEWHERE} == {path.stem for path in EXPECTED.glob("*.txt")}
    assert {*ELSEWHERE} <= {*runnable()}


@pytest.mark.clock  # many have leases of seconds, as a reader has no more patience
@pytest.mark.parametrize("name", [name for name in runnable() if name not in ELSEWHERE])
def test_example_succeeds_and_prints_what_is_expected(name, run):
    """It ends with status 0, leaves no process behind, and its output is the expected text."""
    ended = run("-m", f"examples.{name}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    assert shown(name, ended.stdout) == EXPECTED.joinpath(f"{name}.txt").read_text()


@pytest.mark.parametrize(
    ("command", "says"), [("test", "Ran 2 tests"), ("makemigrations --check --dry-run", "")]
)
def test_django_project_is_whole(run, command, says):
    """Its tests pass, and need neither Redis nor a worker; its models ask for no further migration."""
    ended = run("manage.py", *command.split(), directory=EXAMPLES / "django_app")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert says in ended.stderr


def test_examples_that_pages_name_exist():
    """`python -m examples.NAME` runs wherever a page says it."""
    named = {
        name for page in pages() for name in re.findall(r"python -m examples\.([a-z][\w.]*\w)", text_of(page))
    }
    assert {"fan_out", "per_customer", "five_at_a_time", "ten_a_minute", "long_task"} <= named
    assert named <= {*runnable()}


def test_django_page_shows_the_code_of_its_example():
    """A block that begins with `# examples/...` is there word for word, its paragraphs in this order."""
    found = 0
    for block in blocks(text_of("docs/django.md")):
        first, _, excerpt = block.text.partition("\n")
        if not (block.is_run and first.startswith("# examples/")):
            continue
        file, place = first.removeprefix("# "), 0
        for paragraph in re.split(r"\n\n+", textwrap.dedent(excerpt).strip("\n")):
            at = text_of(file).find(paragraph + "\n", place)
            assert at >= 0, f"{file} does not have, from place {place} on:\n{paragraph}"
            place = at + len(paragraph)
        found += 1
    assert found >= 4
