"""The history of a soak: one line per record, each appended by one write, in one file for all processes."""

import json
import os
import time
from pathlib import Path
from typing import Any

Record = dict[str, Any]

_MAX_LINE = 4096


class History:
    """Appends records. `CLOCK_MONOTONIC` is the same for every process of one host.

    Args:
        path: The file.
        uid: Number of the writing process; never used twice, as a process id may be.
    """

    def __init__(self, path: Path, uid: int) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._uid = uid

    def note(self, kind: str, **details: Any) -> None:
        """Append one record; `t` is the monotonic time unless it is given."""
        record = {"kind": kind, "uid": self._uid, "t": time.monotonic(), **details}
        line = json.dumps(record, separators=(",", ":")).encode() + b"\n"
        assert len(line) < _MAX_LINE, line
        assert os.write(self._file, line) == len(line)


def read(path: Path) -> list[Record]:
    """All complete records so far, in the order in which they were written."""
    lines = path.read_bytes().split(b"\n")
    return [json.loads(line) for line in lines[:-1]]


def now_us() -> int:
    """The wall clock of this host, which is the embedded server's clock too."""
    return time.time_ns() // 1000
