"""A fork waits for the threads that work beside it."""

import logging
import os
import signal
import threading
import time

import pytest

from celery_setnx.forks import WAIT_S, between_forks

FORKS = 120


def exit_code_of_fork(child: object) -> int:
    """What a forked child ends with: what the function in it returns."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(10)  # a child that hangs ends with -SIGALRM
        os._exit(int(child()))  # type: ignore[operator]
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_fork_waits_until_a_thread_is_done():
    """The child is born after the work that was going on."""
    begun, done = threading.Event(), threading.Event()

    def work() -> None:
        with between_forks:
            begun.set()
            time.sleep(0.2)  # the work
            done.set()

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(5)
    assert exit_code_of_fork(done.is_set) == 1
    thread.join()


def test_fork_waits_for_a_bounded_time():
    """A thread that waits for a dead server keeps no pool from growing; the next one may enter."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with between_forks:
            begun.set()
            go_on.wait(20)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(5)
    since = time.monotonic()
    assert exit_code_of_fork(lambda: 7) == 7
    assert WAIT_S <= time.monotonic() - since < WAIT_S + 5
    go_on.set()
    thread.join()
    with between_forks:
        pass


def test_child_may_fork_though_its_parents_thread_was_within():
    """What is within in the parent is not in the child."""
    begun, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with between_forks:
            begun.set()
            go_on.wait(20)

    def child() -> int:
        since = time.monotonic()
        exit_code_of_fork(lambda: 0)
        return int(time.monotonic() - since < WAIT_S)

    thread = threading.Thread(target=work)
    thread.start()
    begun.wait(5)
    assert exit_code_of_fork(child) == 1
    go_on.set()
    thread.join()


def test_children_can_log_whatever_a_thread_of_their_parent_logs(tmp_path):
    """Without the wait about every thirtieth child hangs on the log file's lock."""
    log = logging.Logger("forks")  # no other test silences it
    handler = logging.FileHandler(tmp_path / "log")
    log.addHandler(handler)
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            with between_forks:
                for _ in range(20):
                    log.warning("a line")

    def child() -> int:
        log.warning("born")
        return 0

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(FORKS):
            if exit_code_of_fork(child) != 0:
                pytest.fail("a child hangs at its first line in the log")
    finally:
        stop.set()
        thread.join()
        handler.close()
    assert (tmp_path / "log").read_text().count("born") == FORKS
