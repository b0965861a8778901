"""Proof of death: given only for what is surely dead, never on a guess."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_setnx import process
from celery_setnx.process import has_ended, identity, is_surely_dead
from tests.harness import wait_until

TELL = (
    "import json,sys; from celery_setnx.process import identity; print(json.dumps(identity()), flush=True); "
)


def start(code: str = "sys.stdin.read()") -> Any:
    return subprocess.Popen(
        [sys.executable, "-c", TELL + code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def living() -> Iterator[Any]:
    """A process, and what it says of itself."""
    child = start()
    yield child
    child.kill()
    child.communicate()


def identity_of(child: Any) -> dict[str, Any]:
    import json

    return dict(json.loads(child.stdout.readline()))


def test_living_process_is_not_dead(living):
    """Neither another process nor this one."""
    assert not is_surely_dead(identity_of(living))
    assert not is_surely_dead(identity())


def test_stopped_process_is_not_dead(living):
    """A process that stands still may go on."""
    found = identity_of(living)
    os.kill(living.pid, signal.SIGSTOP)
    assert not is_surely_dead(found)
    os.kill(living.pid, signal.SIGCONT)


def test_reaped_process_is_dead():
    """A pid that nobody has."""
    child = start("")
    found = identity_of(child)
    child.communicate()
    assert is_surely_dead(found)


def test_zombie_is_dead(living):
    """A process that ended, though its parent has not looked yet."""
    found = identity_of(living)
    os.kill(living.pid, signal.SIGKILL)
    wait_until(lambda: is_surely_dead(found), "a zombie")
    assert Path(f"/proc/{living.pid}/stat").exists()


def test_zombie_with_a_living_thread_is_not_dead():
    """The main thread has ended, another computes on: not dead."""
    code = (
        "import threading,ctypes; threading.Thread(target=sys.stdin.read).start(); "
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    child = start(code)
    found = identity_of(child)
    stat = Path(f"/proc/{child.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the main thread ended")
    assert not is_surely_dead(found)
    child.kill()
    wait_until(lambda: is_surely_dead(found), "all of it")
    child.communicate()


def test_reused_pid_proves_the_first_ones_end(living):
    """Another start time: another process."""
    found = identity_of(living)
    assert is_surely_dead({**found, "start": found["start"] - 1})


@pytest.mark.parametrize(
    "other", [{"boot": "x"}, {"host": "elsewhere"}, {"pid": None}, {"pid": -1}, {"pid": "1"}]
)
def test_process_of_another_world_proves_nothing(other):
    """Another boot, pid namespace or host, or no pid at all: no verdict."""
    child = start("")
    found = identity_of(child)
    child.communicate()
    assert not is_surely_dead({**found, **other})


def test_record_without_an_identity_proves_nothing():
    """Locks of other programs and of older versions."""
    assert not is_surely_dead({})
    assert not is_surely_dead({"pid": 2**22 + 1, "host": identity()["host"]})


def test_machine_without_proc_proves_nothing(monkeypatch):
    """Where there is no Linux /proc, nobody is declared dead."""
    child = start("")
    found = identity_of(child)
    child.communicate()
    process._identity_of.cache_clear()
    monkeypatch.setattr(process, "_state_and_start", lambda pid: (_ for _ in ()).throw(FileNotFoundError()))
    assert "boot" not in identity()
    assert not is_surely_dead(found)
    process._identity_of.cache_clear()


def test_process_of_another_user_exists(monkeypatch):
    """EPERM means alive: pid 1 as an ordinary user sees it."""

    def forbidden(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "kill", forbidden)
    assert not has_ended(os.getpid())


def test_unreadable_process_is_not_dead(monkeypatch):
    """It exists, and nothing can be read of it: no verdict."""
    monkeypatch.setattr(process, "_state_and_start", lambda pid: (_ for _ in ()).throw(PermissionError()))
    assert not has_ended(os.getpid())


def test_forked_child_has_an_identity_of_its_own():
    """What was computed before a fork is the parent's."""
    own = identity()
    child = os.fork()
    if child == 0:
        os._exit(0 if identity()["pid"] == os.getpid() and identity()["start"] >= own["start"] else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
