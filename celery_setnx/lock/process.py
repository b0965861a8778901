"""Which process this is, and whether another one on this host is surely dead. Never a guess."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal


def identity() -> dict[str, Any]:
    """What proves later that this very process is dead: host, boot and pid namespace as one, pid, start time.

    Where there is no Linux `/proc`, only host and pid; nothing is proved by those.
    """
    return {**_identity_of(os.getpid())}


def is_surely_dead(process: Mapping[str, Any]) -> bool:
    """True only if a process, known by its `identity`, cannot run any more.

    The boot, the pid namespace and the hostname must be ours, and the pid absent, or a zombie without
    other threads, or that of a process which started at another time.
    """
    return fate_of(process) == "dead"


def fate_of(process: Mapping[str, Any]) -> Literal["alive", "dead", "unknown"]:
    """What can be known from here of a process, known by its `identity`."""
    own, pid = identity(), process.get("pid")
    if not own.get("boot") or any(process.get(name) != own.get(name) for name in ("boot", "host")):
        return "unknown"
    if not isinstance(pid, int) or pid <= 0:
        return "unknown"
    return "dead" if has_ended(pid, process.get("start")) else "alive"


def has_ended(pid: int, start: int | None = None) -> bool:
    """True only if a process of this pid namespace has ended, all its threads included."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists, and is another user's
    try:
        state, started = _state_and_start(pid)
        threads = len(os.listdir(f"/proc/{pid}/task"))
    except (OSError, ValueError, IndexError):
        return False
    if start is not None and started != start:
        return True
    return state in ("Z", "X") and threads <= 1


@lru_cache(maxsize=1)  # a forked child has another pid
def _identity_of(pid: int) -> dict[str, Any]:
    found: dict[str, Any] = {"host": socket.gethostname(), "pid": pid}
    try:
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.stat("/proc/self/ns/pid").st_ino
        # Only ever compared, and every record has it: short.
        found["boot"] = blake2b(f"{boot_id} {namespace}".encode(), digest_size=6).hexdigest()
        found["start"] = _state_and_start(pid)[1]
    except (OSError, ValueError, IndexError):
        found.pop("boot", None)
    return found


def _state_and_start(pid: int) -> tuple[str, int]:
    """State and start time (clock ticks since boot): fields 3 and 22 of /proc/<pid>/stat."""
    # The command's name, in parentheses, may itself hold spaces and parentheses.
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19])
