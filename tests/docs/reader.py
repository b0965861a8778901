"""Who follows a page: writes its files, runs its commands, and compares what they say."""

import contextlib
import fcntl
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from examples.embedded import EmbeddedServer
from tests.docs.pages import Block, commands
from tests.harness import wait_until

# Installed as printed, from a clone of its own; else the suite's own virtual environment plays its part.
INSTALL = bool(os.environ.get("QUICKSTART_INSTALL"))
INSTALLS = ("python3 -m venv", ". .venv/bin/activate", "pip install")
COLUMNS = 80  # of a terminal
# What differs from run to run, the longest first: a list's columns are as wide as what is in them.
VARIES = (
    (r"\[\d{4}-\d\d-\d\d [\d:,]+: (\w+)/[\w-]+\]", r"[\1]"),
    (r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d( UTC)?", "TIME"),
    (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID"),
    (r"value '?\d{10}'?", "value UNIX"),
    (r"celery@[\w.-]+", "WORKER"),
    (r"by \S+ on [\w.-]+?\.? (?=It was)", "by USER. "),
    (r"more by \S+ on [\w.-]*\w", "more by USER"),
    (r"pid \d+", "pid PID"),
    (r"redis://\S+", "URL"),
    (r"(Redis|Valkey) \d[\d.]*", "SERVER"),
    (r"\d[\d.]* (ms|s|min|h)\b( \d+ (s|min)\b)?", "SPAN"),
    (r"succeeded in [\d.e-]+s", "succeeded in SPAN"),
    (r"ahead of", "behind"),
    (r"\(integer\) ", ""),
    (r"[ \t]+", " "),
)


def alike(text: str) -> list[str]:
    """Lines without what differs from run to run."""
    for pattern, word in VARIES:
        text = re.sub(pattern, word, text)
    return [line.strip() for line in text.strip().splitlines()]


class Reader:
    """Who follows a page: writes its files, runs its commands, and compares what they say."""

    def __init__(self, directory: Path, server: str) -> None:
        self.directory = directory
        self.log = directory / "worker.log"
        self.worker: subprocess.Popen[str] | None = None
        self.said = ""
        self.ran: list[str] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SETNX_TEST")},
            "REDIS_URL": server,
            "PATH": f"{_tools(directory / 'tools')}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        }

    def read(self, page: str, shown: list[Block]) -> None:
        """Do what these blocks of a page say, from top to bottom."""
        for block in shown:
            where = f"{page}, line {block.line}"
            if block.language == "python":
                self._write(block, where)
            elif block.language == "sh":
                self.said = ""
                for command in commands([block]):
                    self.run(command, where)
            elif block.language == "text" and "worker's log" in block.before:
                self._compare_log(block, where)
            elif block.language == "text":
                self._compare(block, where)

    def stop(self) -> None:
        """End what still runs."""
        if self.worker is not None and self.worker.poll() is None:
            os.killpg(self.worker.pid, signal.SIGKILL)
            self.worker.wait()

    def log_text(self) -> str:
        """All that the worker has logged since it was started last."""
        return self.log.read_text(errors="replace")

    def _write(self, block: Block, where: str) -> None:
        name = re.fullmatch(r"(Add to )?`(\w+\.py)`:", block.before)
        assert name is not None, f"{where}: a file without a name; the line before is {block.before!r}"
        path = self.directory / name[2]
        before = path.read_text() + "\n\n" if name[1] else ""
        path.write_text(before + block.text)

    def run(self, command: str, where: str = "beside the page") -> None:
        """Run one command line; a worker is left running."""
        self.ran.append(command)
        if command.startswith(INSTALLS) and not INSTALL:
            return
        if command.startswith("cd "):
            self.directory /= command.removeprefix("cd ")
            return
        if " worker " in command:
            self.start(command)
            return
        if command.startswith(". "):
            self.environment["PATH"] = f"{self.directory}/.venv/bin:{self.environment['PATH']}"
        said, code = self.ask(command)
        self.said += said
        assert code == 0, f"{where}: {command} ended with {code}:\n{said}"
        if command.startswith("kill ") and self.worker is not None:
            self.worker.wait(60)

    def _begin(self, command: str, output: Any) -> subprocess.Popen[str]:
        """A command line that has begun, in a process group of its own; both outputs go to one place."""
        pipes = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT, "text": True}
        where = {"cwd": self.directory, "env": self.environment, "start_new_session": True}
        return subprocess.Popen(["bash", "-c", command], **pipes, **where)

    def ask(self, command: str) -> tuple[str, int]:
        """What a command says, and its exit code."""
        process = self._begin(command, subprocess.PIPE)
        try:
            said, _ = process.communicate(timeout=100)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        return said, process.returncode

    def see(self, command: str) -> str:
        """What a command shows in a terminal of 80 columns, without colours and log lines."""
        screen, keyboard = pty.openpty()
        fcntl.ioctl(keyboard, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
        process = self._begin(f"NO_COLOR=1 TERM=xterm {command}", keyboard)
        os.close(keyboard)
        shown = b""
        with open(screen, "rb", buffering=0) as output, contextlib.suppress(OSError):  # as Linux ends it
            while more := output.read(4096):
                shown += more
        process.wait(100)
        lines = re.sub(r"\x1b\[[\d;]*m", "", shown.decode()).splitlines()
        return "\n".join(line for line in lines if not re.match(r"\[\d{4}-", line))

    def start(self, command: str) -> None:
        """A worker, in a terminal of its own."""
        assert self.worker is None or self.worker.poll() is not None, "one worker at a time"
        with self.log.open("wb") as log:
            self.worker = worker = self._begin(f"exec {command}", log)

        def is_ready() -> bool:
            assert worker.poll() is None, f"the worker ended with {worker.returncode}:\n{self.log_text()}"
            return " ready." in self.log_text()

        wait_until(is_ready, f"worker ready: {self.log}", 60)

    def _compare(self, block: Block, where: str) -> None:
        """What the block before has said. A command that only looks is asked again until it sees it."""
        wanted, command = alike(block.text), self.ran[-1]

        def is_said() -> bool:
            if alike(self.said) != wanted:
                self.said, _code = self.ask(command)
            return alike(self.said) == wanted

        if " setnx list" in command:
            wait_until(is_said, f"{where}: {command}: {wanted}")
        assert alike(self.said) == wanted, f"{where}: {command} said:\n{self.said}"

    def _compare_log(self, block: Block, where: str) -> None:
        """The worker has logged these lines, in any order, between others."""
        wanted = set(alike(block.text))
        wait_until(lambda: wanted <= set(alike(self.log_text())), f"{where}: {wanted} in {self.log}")


def _tools(directory: Path) -> Path:
    """A redis-cli for machines that have none: it sends its words to the server, and prints the reply."""
    directory.mkdir()
    if shutil.which("redis-cli") is None:
        tool = directory / "redis-cli"
        tool.write_text(
            f"#!{sys.executable}\n"
            "import sys, redis\n"
            "flag, url, *words = sys.argv[1:]\n"
            "assert flag == '-u'\n"
            "client = redis.Redis.from_url(url, decode_responses=True)\n"
            "client.response_callbacks.clear()\n"
            "reply = client.execute_command(*words)\n"
            "print(*reply if isinstance(reply, list) else [reply], sep='\\n')\n"
        )
        tool.chmod(0o755)
    return directory


@contextlib.contextmanager
def reading(directory: Path, kind: type[Reader] = Reader) -> Iterator[Any]:
    """A reader with an empty server and this directory. Afterwards its worker has ended."""
    with EmbeddedServer() as server:
        reader = kind(directory, server.url())
        try:
            yield reader
        finally:
            reader.stop()
