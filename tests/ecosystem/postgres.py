"""A PostgreSQL of a test's own: on a socket in a directory of its own, never the system's cluster."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.harness import wait_until

USER = "postgres"
"""Who runs the server where the tests are root, and the name of its superuser."""


def program(name: str) -> str:
    """Where a program of the server is; Debian keeps it out of the PATH."""
    debian = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    found = shutil.which(name) or (str(debian[-1]) if debian else None)
    assert found, f"{name} is missing: install Debian's package postgresql"
    return found


class Postgres:
    """A server that listens on a socket only: `with Postgres() as postgres`."""

    def __init__(self) -> None:
        self.directory = tempfile.mkdtemp(prefix="pg-", dir="/tmp")  # the path of a socket is short
        self._process: Any = None
        self._as: dict[str, Any] = {"user": USER, "cwd": self.directory} if os.geteuid() == 0 else {}
        if self._as:
            shutil.chown(self.directory, USER)

    def __enter__(self) -> "Postgres":
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        data = f"{self.directory}/data"
        made = [program("initdb"), "-D", data, "-U", USER, "-A", "trust", "--no-sync", "--no-locale"]
        subprocess.run([*made, "-E", "UTF8"], check=True, stdout=subprocess.DEVNULL, **self._as)
        with open(f"{self.directory}/log", "wb") as log:
            self._process = subprocess.Popen(
                [program("postgres"), "-D", data, "-k", self.directory, "-h", "", "-F"],
                stdout=log,
                stderr=subprocess.STDOUT,
                **self._as,
            )
        wait_until(self._answers, f"a PostgreSQL that answers; its log: {self.directory}/log")

    def __exit__(self, *_error: object) -> None:
        if self._process is not None:
            self._process.send_signal(2)  # SIGINT: it ends without waiting for its clients
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.directory)

    def _answers(self) -> bool:
        assert self._process.poll() is None, Path(self.directory, "log").read_text()
        asked = [program("pg_isready"), "-q", "-h", self.directory]
        return subprocess.run(asked).returncode == 0

    def url(self, database: str = USER) -> str:
        """As SQLAlchemy reads it, with psycopg."""
        return f"postgresql+psycopg://{USER}@/{database}?host={self.directory}"
