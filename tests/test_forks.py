"""A fork waits for the threads that work beside it."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import SimpleNamespace

import pytest
from celery import Celery

from celery_setnx import forks
from celery_setnx.forks import between_forks
from celery_setnx.run import sweep
from celery_setnx.run.cleanup import Cleanup
from celery_setnx.run.looks import SweepReport, TimedLooks
from tests.bounds import bound
from tests.harness import exit_code_of_fork

FORKS = bound(12, full=120)


@contextmanager
def thread_within(work: Callable[[threading.Event], object]) -> Iterator[threading.Event]:
    """Beside the block a thread is at its work, again and again until the event is set."""
    begun, go_on = threading.Event(), threading.Event()

    def run() -> None:
        while not go_on.is_set():
            with between_forks:
                begun.set()
                work(go_on)

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait(60)
    try:
        yield go_on
    finally:
        go_on.set()
        thread.join()


def test_fork_waits_until_a_thread_is_done():
    """The child is born after the work that was going on."""
    with thread_within(lambda done: (time.sleep(0.2), done.set())) as done:
        assert exit_code_of_fork(done.is_set) == 1


def test_fork_waits_for_a_bounded_time():
    """A thread that waits for a dead server keeps no pool from growing; the next one may enter."""
    with thread_within(lambda go_on: go_on.wait(100)) as go_on:
        since = time.monotonic()
        assert exit_code_of_fork(lambda: 7) == 7
        assert time.monotonic() - since >= forks.WAIT_S
        assert not go_on.is_set()
    with between_forks:
        pass


def test_fork_waits_for_no_thread_that_waits_itself(monkeypatch):
    """It is at work, and waits for something amid it."""
    monkeypatch.setattr(forks, "WAIT_S", 600.0)
    with thread_within(lambda go_on: between_forks.wait(go_on, 100)) as go_on:
        assert exit_code_of_fork(lambda: 7) == 7
        assert not go_on.is_set()


Work = Callable[[], None]


def sweeping(work: Work, patch: pytest.MonkeyPatch) -> Callable[[], object]:
    app = Celery("forks", broker="memory://", set_as_current=False)
    app.conf.setnx_url = "redis://127.0.0.1:1/0"
    step = sweep.Sweep(SimpleNamespace(app=app))
    patch.setattr(sweep, "declare_queues", lambda _app: work())
    step.start(step._worker)
    return lambda: step.stop(None)


def looking(work: Work, _patch: pytest.MonkeyPatch) -> Callable[[], object]:
    looks = TimedLooks(lambda: work() or SweepReport(0, None))  # type: ignore[func-returns-value]
    looks.soon()
    return looks.stop


def watching(work: Work, _patch: pytest.MonkeyPatch) -> Callable[[], object]:
    class Request:
        worker_pid = property(lambda _self: work())

    request = Request()
    Cleanup().watch(request)
    return lambda: request  # which is watched for as long as it lives


@pytest.mark.parametrize("start", [sweeping, looking, watching])
def test_worker_forks_while_none_of_its_threads_is_at_work(start, monkeypatch):
    """From their first line on: the child of a worker that has just started is born beside them."""
    monkeypatch.setattr(forks, "WAIT_S", 600.0)
    at_work, done = threading.Event(), threading.Event()

    def work() -> None:
        at_work.set()
        time.sleep(0.2)
        done.set()

    stop = start(work, monkeypatch)
    assert at_work.wait(60)
    assert exit_code_of_fork(done.is_set) == 1
    stop()


def test_child_may_fork_though_its_parents_thread_was_within():
    """What is within in the parent is not in the child."""

    def child() -> int:
        forks.WAIT_S = 600.0
        return exit_code_of_fork(lambda: 7)

    with thread_within(lambda go_on: go_on.wait(100)):
        assert exit_code_of_fork(child) == 7


def test_children_can_log_whatever_a_thread_of_their_parent_logs(tmp_path):
    """Without the wait nine children of ten hang on the log file's lock."""
    log = logging.Logger("forks")  # no other test silences it

    def work(_stop: threading.Event) -> None:
        for _ in range(5):
            log.warning("a long line" * 2000)

    def child() -> int:
        log.warning("born")
        return 0

    with closing(logging.FileHandler(tmp_path / "log")) as handler:
        log.addHandler(handler)
        with thread_within(work):
            for _ in range(FORKS):
                assert exit_code_of_fork(child) == 0, "a child hangs at its first line in the log"
    assert (tmp_path / "log").read_text().count("born") == FORKS
