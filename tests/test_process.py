"""Proof of death: given only for what is surely dead, never on a guess."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from celery_setnx.lock import process
from celery_setnx.lock.process import has_ended, identity, is_surely_dead
from tests.harness import exit_code_of_fork, raising, wait_until

TELL = (
    "import json,sys; from celery_setnx.lock.process import identity; "
    "print(json.dumps(identity()), flush=True)"
)
HALF_DEAD = (
    "import threading,ctypes; threading.Thread(target=sys.stdin.read).start(); "
    "ctypes.CDLL(None).pthread_exit(None)"
)


class Child:
    """A process, and what it says of itself."""

    def __init__(self, code: str = "sys.stdin.read()") -> None:
        command = [sys.executable, "-c", f"{TELL}; {code}"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.pid = self._process.pid
        said = self._process.stdout and self._process.stdout.readline()
        self.identity: dict[str, Any] = json.loads(str(said))

    def end(self) -> None:
        """Kill it, and have nothing left of it."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture
def living() -> Iterator[Child]:
    """A process that lives."""
    child = Child()
    yield child
    child.end()


@pytest.fixture(scope="module")
def dead() -> dict[str, Any]:
    """What a process that is gone said of itself."""
    child = Child()
    child.end()
    return child.identity


def test_living_process_is_not_dead(living):
    """Neither another process, which may stand still and go on, nor this one."""
    assert not is_surely_dead(living.identity)
    assert not is_surely_dead(identity())
    os.kill(living.pid, signal.SIGSTOP)
    assert not is_surely_dead(living.identity)
    os.kill(living.pid, signal.SIGCONT)


def test_zombie_is_dead(living):
    """A process that ended, though its parent has not looked yet."""
    os.kill(living.pid, signal.SIGKILL)
    wait_until(lambda: is_surely_dead(living.identity), "a zombie")
    assert Path(f"/proc/{living.pid}/stat").exists()


def test_zombie_with_a_living_thread_is_not_dead():
    """The main thread has ended, another computes on: not dead."""
    child = Child(HALF_DEAD)
    stat = Path(f"/proc/{child.pid}/stat")
    wait_until(lambda: stat.read_text().rpartition(")")[2].split()[0] == "Z", "the main thread ended")
    assert not is_surely_dead(child.identity)
    os.kill(child.pid, signal.SIGKILL)
    wait_until(lambda: is_surely_dead(child.identity), "all of it")
    child.end()


def test_reused_pid_proves_the_first_ones_end(living):
    """Another start time: another process."""
    assert is_surely_dead({**living.identity, "start": living.identity["start"] - 1})


OTHERS = [{"boot": "x"}, {"host": "elsewhere"}, {"pid": None}, {"pid": -1}, {"pid": "1"}]


@pytest.mark.parametrize("other", OTHERS)
def test_process_of_another_world_proves_nothing(dead, other):
    """A pid that nobody has is dead; of another boot, pid namespace or host, or without a pid: no verdict."""
    assert is_surely_dead(dead)
    assert not is_surely_dead({**dead, **other})


def test_record_without_an_identity_proves_nothing():
    """Locks of other programs and of older versions."""
    assert not is_surely_dead({})
    assert not is_surely_dead({"pid": 2**22 + 1, "host": identity()["host"]})


def test_machine_without_proc_proves_nothing(dead, monkeypatch):
    """Where there is no Linux /proc, nobody is declared dead."""
    process._identity_of.cache_clear()
    monkeypatch.setattr(process, "_state_and_start", raising(FileNotFoundError))
    assert "boot" not in identity()
    assert not is_surely_dead(dead)
    process._identity_of.cache_clear()


@pytest.mark.parametrize(("module", "name"), [(os, "kill"), (process, "_state_and_start")])
def test_process_that_is_out_of_reach_is_not_dead(monkeypatch, module, name):
    """EPERM means alive, as pid 1 is to an ordinary user; and what cannot be read gives no verdict."""
    monkeypatch.setattr(module, name, raising(PermissionError))
    assert not has_ended(os.getpid())


def test_forked_child_has_an_identity_of_its_own():
    """What was computed before a fork is the parent's."""
    own = identity()
    assert exit_code_of_fork(lambda: identity()["pid"] != os.getpid()) == 0
    assert exit_code_of_fork(lambda: identity()["start"] < own["start"]) == 0
