"""`celery setnx` in a real terminal: what a person sees, types, and ends with Ctrl-C. Needs tmux."""

import json
import re
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from celery_setnx import SetnxLock
from examples.embedded import EmbeddedServer
from tests import forks
from tests.harness import CONF, wait_until
from tests.test_cli import CELERY, cli

__all__ = ["cli"]  # a fixture
WIDTH, HEIGHT = 200, 30


class Terminal:
    """A terminal with a shell in it."""

    def __init__(self, width: int = WIDTH, height: int = HEIGHT) -> None:
        tmux = shutil.which("tmux")
        assert tmux is not None, "these tests need tmux"
        self._tmux = [tmux, "-f", "/dev/null", "-L", f"setnx-{uuid.uuid4().hex[:8]}"]
        size = ["-x", str(width), "-y", str(height)]
        shell = f"PS1='$ ' TERM=screen-256color PYTHONPATH={shlex.quote(str(Path.cwd()))} sh"
        self._do("new-session", "-d", *size, "env -u NO_COLOR -u COLUMNS -u LINES " + shell)
        wait_until(lambda: "$" in self.screen(), "a prompt")

    def _do(self, *arguments: str) -> str:
        done = subprocess.run([*self._tmux, *arguments], capture_output=True, text=True, check=True)
        return done.stdout

    def type(self, text: str) -> None:
        """Type a line."""
        self._do("send-keys", "-l", text)
        self._do("send-keys", "Enter")

    def run(self, *arguments: str, environment: str = "") -> None:
        """Type a command on a clear screen; the shell prints its exit code after it."""
        self.type("clear")
        wait_until(lambda: "code=" not in self.screen(), "a clear screen")
        command = f"{environment} {CELERY} -A tests.cliapp setnx {shlex.join(arguments)}"
        self.type(f"clear; {command}; echo code=$?")

    def interrupt(self) -> str:
        """Ctrl-C, which ends a command with 0; the screen then."""
        self._do("send-keys", "C-c")
        return self.shows("code=0")

    def screen(self, *how: str) -> str:
        """What is to be seen; with `-e`, in its colours."""
        return self._do("capture-pane", "-p", *how)

    def title(self) -> str:
        """What its title is."""
        return self._do("display-message", "-p", "#{pane_title}")

    def close(self) -> None:
        """End it, and what runs there."""
        self._do("kill-server")

    def shows(self, *parts: str) -> str:
        """The screen, once all of this is to be seen."""

        def seen() -> str:
            screen = self.screen()
            return screen if all(part in screen for part in parts) else ""

        try:
            return wait_until(seen, f"{parts} on the screen")
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.screen()}") from None


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    """A terminal of the test's own."""
    terminal = Terminal()
    yield terminal
    terminal.close()


@pytest.fixture(params=[(80, 24), (120, 30)], ids=["80x24", "120x30"])
def narrow(request) -> Iterator[tuple[Terminal, int, int]]:
    """A terminal as most are, its width and its height."""
    width, height = request.param
    terminal = Terminal(width, height)
    yield terminal, width, height
    terminal.close()


def test_list_in_a_terminal(terminal, cli):
    """A table with a heading, a line for each lock, and their number."""
    held = cli.hold()
    terminal.run("list")
    lines = terminal.shows("code=0").splitlines()
    assert lines[0].split()[:3] == ["TASK", "STATE", "AGE"]
    assert lines[1].startswith("tests.cliapp.sync  running  ")
    assert lines[1].endswith(held.key)
    assert lines[2:4] == ["1 lock under t:{...}.", "code=0"]


def test_watch_shows_locks_as_they_come_and_go(terminal, cli):
    """The table is drawn anew until Ctrl-C, which is no error."""
    terminal.run("watch", "--interval", "0.2")
    terminal.shows("TASK", "DEADLINE", "0 locks")
    held = cli.hold()
    terminal.shows("tests.cliapp.sync", held.key, "running", "1 lock,")
    held.release()
    terminal.shows("0 locks")
    assert "Traceback" not in terminal.interrupt()


WHOLE = ["STATE", "AGE", "DEADLINE", "PROCESS", "WAITING"]
ROW = r"(\S+) +running +[\w. ]+ s +(?:in )?[\w. ]+ s(?: ago)? +(?:alive|unknown) +(-|\d+)(?:  |$)"
ID = "6c33b3ee-ec29-4d6d-a778-06f166cc7d45"


def shown_rows(screen: str, width: int) -> list[tuple[str, str]]:
    """The locks on a screen, by task and by who waits; each in one line, with all that matters in full."""
    heading, *lines = screen.splitlines()
    assert heading.split()[1:6] == WHOLE
    assert max(map(len, screen.splitlines())) <= width
    return [(found[1], found[2]) for found in map(re.compile(ROW).match, lines) if found]


def test_list_fits_a_narrow_terminal(narrow, cli):
    """No row is broken, and state, age, deadline, process and who waits are whole."""
    terminal, width, _height = narrow
    for customer in range(5):
        cli.hold(customer=customer, task_id=ID)
    cli.hold("waiting")
    cli.park("waiting")
    terminal.run("list")
    screen = terminal.shows("6 locks under t:{...}. No room for ", "less", "code=0")
    rows = shown_rows(screen, width)
    assert sorted(rows) == [("tests.cliapp.sync", "-")] * 5 + [("tests.cliapp.waiting", "1")]
    assert len(screen.split("6 locks")[0].splitlines()) == 7
    assert screen.count(ID) == (5 if width == 120 else 0)


def test_paced_lock_fits_a_narrow_terminal(narrow, cli):
    """Its state, when the next call may start, and who waits for that are whole, in list and in watch."""
    terminal, width, _height = narrow
    cli.start("paced_several")
    cli.park("paced_several")
    for command, ends in (("list", "code=0"), ("watch", "Ctrl-C")):
        terminal.run(command)
        screen = terminal.shows("paced 0/3", "1 lock", ends)
        (line,) = [line for line in screen.splitlines() if "paced 0/3" in line]
        row = r"tests\.cliapp\.paced_several +paced 0/3 +- +in (1 min 0|[1-5]\d) s +- +1\b"
        assert re.match(row, line), line
        assert max(map(len, screen.splitlines())) <= width
    terminal.interrupt()


def test_pause_is_seen_in_a_narrow_terminal(narrow, cli):
    """In `list`, `watch`, `why` and `terms`: whose, until when, by whom and why, in whole words."""
    terminal, width, _height = narrow
    terminal.run("pause", "tests.cliapp.sync", "7", "--for", "2h", "--because", "partner down")
    terminal.shows("for 2 h 0 min.", "code=0")
    for command, ends in (("list", "code=0"), ("watch", "Ctrl-C")):
        terminal.run(command)
        screen = terminal.shows("paused", "1 lock", ends)
        (line,) = [line for line in screen.splitlines() if "paused" in line]
        assert re.match(r"tests\.cliapp\.sync +paused +- +in 1 h 59 min +- +- ", line), line
        assert max(map(len, screen.splitlines())) <= width
    terminal.interrupt()
    terminal.run("why", "tests.cliapp.sync", "7")
    screen = terminal.shows("code=1")
    assert "    celery -A APP setnx resume tests.cliapp.sync 7" in screen.splitlines()
    terminal.run("terms")
    words = " ".join(terminal.shows("code=0").split())
    told = rf"{re.escape(cli.key())}: paused for 1 h 59 min more by .*: partner down\. 1 live term under t\."
    assert re.search(told, words), words


def test_list_of_marks_fits_a_narrow_terminal(narrow, cli):
    """When each call is due, how many it has superseded and when its mark lapses are whole."""
    terminal, width, _height = narrow
    cli.queue("pending")
    cli.publish(task_id=ID)
    cli.publish(task_id=ID)
    terminal.run("list", "--queued")
    screen = terminal.shows("2 marks under t:{...}. No room for KEY", "code=0")
    heading, mark, newest, *_ = screen.splitlines()
    assert heading.split()[:4] == ["TASK", "DUE", "SUPERSEDED", "LAPSES"]
    assert re.match(r"tests\.cliapp\.pending +- +- +in (10|9) min[ \w]*  t-2", mark), mark
    assert re.match(rf"tests\.cliapp\.saved +in [45] min \d+ s +1 +in (10|9) min[ \w]*  {ID[:13]}", newest), (
        newest
    )
    assert (ID in screen) == (width == 120)
    assert max(map(len, screen.splitlines())) <= width


def test_watch_fits_a_narrow_terminal(narrow, cli):
    """As many locks as there are lines, all that matters of each in full; trouble, then the longest line."""
    terminal, width, height = narrow
    for customer in range(height):
        cli.hold(customer=customer, task_id=ID)
    cli.hold("waiting")
    cli.park("waiting")
    cli.stale("retrying")
    terminal.run("watch")
    screen = terminal.shows("TASK", f"{height + 2} locks, 5 of them not shown", "widen the terminal.")
    rows = shown_rows(screen, width)
    assert rows[:2] == [("tests.cliapp.retrying", "-"), ("tests.cliapp.waiting", "1")]
    assert len(rows) == height - 3

    def red() -> list[int]:
        return [n for n, line in enumerate(terminal.screen("-e").splitlines()) if "\x1b[31m" in line]

    wait_until(lambda: red() == [1], "the stale lock, and no other, is red")
    terminal.interrupt()


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("release --starts tests.cliapp.paced 7", 1, "Nothing to forget: no start of {key} is noted."),
        ("release tests.cliapp.paced 7", 1, "Nothing to release: {key} is free."),
        (
            "list --stale --queued",
            2,
            "--queued marks, or --done calls that have succeeded",
        ),
    ],
)
def test_answer_that_is_no_fits_a_narrow_terminal(narrow, cli, line, code, says):
    """In whole words; what stands after "Error:" has less room in its first line."""
    terminal, _width, _height = narrow
    terminal.run(*line.split())
    screen = terminal.shows(f"code={code}")
    assert says.format(key=cli.key("paced")) in " ".join(screen.split())


def test_terminal_gets_nothing_but_text_of_what_others_wrote(terminal, cli, locks):
    """Neither its title nor its screen is another's to set, who can write to Redis or send a task."""
    evil = "\x1b]2;OWNED\x07\x1b[2J\x1b[31m\x9b31mall fine\x1b[0m\u202e"
    lock = SetnxLock(locks, cli.key(), info={"task": evil, "worker": evil, "pid": 1}, line=True, lease=600)
    assert lock.acquire(token=f"{evil}|0|ab").acquired
    for command in (["list"], ["show", cli.key()], ["why", "tests.cliapp.sync", "7"], ["watch"]):
        terminal.run(*command)
        if command == ["watch"]:
            terminal.shows("1 lock,")
            terminal.interrupt()
        screen = terminal.shows(r"\x1b]2;OWNED\x07\x1b[2J", "code=")
        assert "\u202e" not in screen
        assert "\x1b[31m" not in terminal.screen("-e")
        assert "OWNED" not in terminal.title()


def test_list_has_its_colours_in_a_terminal(terminal, cli):
    """What nobody will release is red, what nobody runs under is dim; NO_COLOR has neither."""
    cli.stale("retrying")
    cli.hold("sync").release(at_least_for=600)
    terminal.run("list")
    terminal.shows("2 locks under", "code=0")
    _heading, dead, resting, *_ = terminal.screen("-e").splitlines()
    assert re.match(r"(\x1b\[\d*m)*\x1b\[31mtests\.cliapp\.retrying", dead)
    assert re.match(r"(\x1b\[\d*m)*\x1b\[2m(\x1b\[39m)?tests\.cliapp\.sync", resting)
    terminal.run("list", environment="NO_COLOR=1")
    terminal.shows("2 locks under", "code=0")
    assert "\x1b[" not in terminal.screen("-e").replace("\x1b[39m", "")


def test_watch_says_when_redis_does_not_answer_and_goes_on(terminal, cli):
    """An operator who watches an outage sees it begin and end."""
    with EmbeddedServer() as server:
        conf = shlex.quote(json.dumps({"setnx_url": server.url()}))
        terminal.run("watch", "--interval", "0.1", environment=f"{CONF}={conf}")
        terminal.shows("0 locks")
        server.stop()
        terminal.shows(f"{server.url()} (setnx_url): ConnectionError:", "Trying again; Ctrl-C ends.")
        server.restart()
        terminal.shows("0 locks")
        terminal.interrupt()


def test_watch_shows_what_fits_the_screen(terminal, cli):
    """The rest is counted."""
    for customer in range(HEIGHT + 10):
        cli.hold(customer=customer)
    terminal.run("watch", "--task", "tests.cliapp.sync")
    terminal.shows("TASK", f"{HEIGHT + 10} locks, 13 of them not shown")
    terminal.interrupt()


def test_watch_without_rich_names_the_extra(server, tmp_path):
    """What to install."""
    (tmp_path / "rich.py").write_text("raise ImportError('no rich here')")
    code, said = forks.ended(tmp_path, forks.celery, "-A", "tests.cliapp", "setnx", "watch")
    assert said == "Error: watch needs rich, which is not installed: pip install 'celery_setnx[cli]'\n"
    assert code == 1


def test_release_asks_in_a_terminal(terminal, cli, locks):
    """A typed n changes nothing; a typed y releases."""
    held = cli.stale()
    terminal.run("release", held.key)
    terminal.shows("is held by tests.cliapp.sync[t-1]", "Release it? [y/N]:")
    terminal.type("n")
    terminal.shows("Not released.", "code=1")
    assert locks.exists(held.key)
    terminal.run("release", held.key)
    terminal.shows("Release it? [y/N]:")
    terminal.type("y")
    terminal.shows(f"Released {held.key}.", "was released by hand", "code=0")
    assert not locks.exists(held.key)
