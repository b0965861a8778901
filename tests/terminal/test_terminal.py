"""`celery setnx` in a real terminal: what a person sees, types, and ends with Ctrl-C. Needs tmux."""

import json
import shlex
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.embedded import EmbeddedServer
from tests import forks
from tests.harness import CONF, wait_until
from tests.test_cli import CELERY, cli

__all__ = ["cli"]  # a fixture
WIDTH, HEIGHT = 200, 30


class Terminal:
    """A terminal with a shell in it."""

    def __init__(self) -> None:
        tmux = shutil.which("tmux")
        assert tmux is not None, "these tests need tmux"
        self._tmux = [tmux, "-f", "/dev/null", "-L", f"setnx-{uuid.uuid4().hex[:8]}"]
        size = ["-x", str(WIDTH), "-y", str(HEIGHT)]
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
        """Type a command; the shell prints its exit code after it."""
        command = f"{environment} {CELERY} -A tests.cliapp setnx {shlex.join(arguments)}"
        self.type(f"clear; {command}; echo code=$?")

    def interrupt(self) -> str:
        """Ctrl-C, which ends a command with 0; the screen then."""
        self._do("send-keys", "C-c")
        return self.shows("code=0")

    def screen(self) -> str:
        """What is to be seen."""
        return self._do("capture-pane", "-p")

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
    terminal._do("kill-server")


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


def test_watch_says_when_redis_does_not_answer_and_goes_on(terminal, cli):
    """An operator who watches an outage sees it begin and end."""
    with EmbeddedServer() as server:
        conf = shlex.quote(json.dumps({"setnx_url": server.url()}))
        terminal.run("watch", "--interval", "0.1", environment=f"{CONF}={conf}")
        terminal.shows("0 locks")
        server.stop()
        terminal.shows(f"{server.url()} (setnx_url): ConnectionError:", "Asked again; Ctrl-C ends.")
        server.restart()
        terminal.shows("0 locks")
        terminal.interrupt()


def test_watch_shows_what_fits_the_screen(terminal, cli):
    """The rest is counted."""
    for customer in range(HEIGHT + 10):
        cli.hold(customer=customer)
    terminal.run("watch", "--task", "tests.cliapp.sync")
    terminal.shows("TASK", f"{HEIGHT + 10} locks, 16 of them not shown")
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
