"""Each CPython that is wanted, and commands that run in it, or say why they failed."""

import os
import platform
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

DEADLINE_S = 2400.0


class Broken(Exception):
    """A command failed; says which, and the end of what it printed."""


def cpython(minor: str) -> str:
    """The CPython of this minor version; this one where there is none.

    Raises:
        Broken: There is none in the CI of a machine that has pyenv.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    for python in (f"python{minor}", *sorted(map(str, pyenv.glob(f"versions/{minor}.*/bin/python")))):
        try:
            found = call([python, "-c", "import sys; print(*sys.version_info[:2], sep='.')"])
        except (Broken, OSError):  # what pyenv has on the PATH for it may lead to none
            continue
        if found.strip() == minor:
            return python
    if os.environ.get("CI") == "true" and pyenv.exists():
        raise Broken(f"no CPython {minor}: pyenv install {minor}")
    print(f"notice: no CPython {minor} here, {platform.python_version()} takes its place", flush=True)
    return sys.executable


def call(command: list[str], directory: Path | None = None) -> str:
    """What the command printed.

    Raises:
        Broken: It failed, or did not end.
    """
    ran = None
    with tempfile.TemporaryFile("w+") as printed:
        # Not a pipe: a process that outlives the command would keep it open.
        where: Any = {"cwd": directory, "stdout": printed, "stderr": subprocess.STDOUT}
        with suppress(subprocess.TimeoutExpired):
            ran = subprocess.run(command, stdin=subprocess.DEVNULL, timeout=DEADLINE_S, **where).returncode
        printed.seek(0)
        text = printed.read()
    if ran != 0:
        what = f"did not end within {DEADLINE_S:g} s" if ran is None else f"ended with {ran}"
        raise Broken(f"{' '.join(command[1:4])} {what}\n{text[-20_000:]}")
    return text
