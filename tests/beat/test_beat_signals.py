"""Signals that end a beat strike anywhere: at any line of its loop, twice, and where Python swallows them."""

import contextlib
import gc
import logging
import os
import random
import shelve
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import celery.beat
import pytest
import redis
from celery import Celery
from celery.apps.beat import Beat
from celery.signals import beat_init

import celery_setnx.beat
import celery_setnx.lock.held
import celery_setnx.lock.lock
import celery_setnx.lock.verbs
from celery_setnx.beat import HotStandby
from tests import forks
from tests.beat.beats import HOT_STANDBY, LOCK, QUEUE, assert_clean
from tests.bounds import bound
from tests.harness import wait_until

OURS = (celery_setnx.beat, celery_setnx.lock.lock, celery_setnx.lock.held, celery_setnx.lock.verbs)
LOOP = {module.__file__ for module in (celery.beat, *OURS, shelve)}
SIGNALS = (signal.SIGTERM, signal.SIGINT)
STOPS, SIDE_BY_SIDE, WITHIN_S = 200, 8, 0.15

# What is raised in a `__del__` is told by pytest, too: these tests raise there on purpose.
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def strike(signum: int = signal.SIGTERM) -> None:
    """The handler raises SystemExit at the line that runs."""
    os.kill(os.getpid(), signum)


class Dying:
    """The handler raises in a `__del__`, where Python swallows it."""

    def __del__(self) -> None:
        strike()


class Named:
    """The handler raises in a `__set_name__`, where Python up to 3.11 makes a RuntimeError of it."""

    def __set_name__(self, owner: Any, name: str) -> None:
        strike()


def hooked_beat(app: Celery, file: Path, strikes: dict[int, Callable[[], Any]], *, whole: bool) -> int:
    """Run a beat in this process until it ends, as `celery beat` does, and strike at these lines of its loop.

    Args:
        app: What it ticks for.
        file: Its schedule file.
        strikes: What is done at which line, counted as they run.
        whole: Whether the count begins with the start, not once the scheduler is made.

    Returns:
        How many lines have run.
    """
    service = celery.beat.Service(app, scheduler_cls=HOT_STANDBY, schedule_filename=str(file))
    lines = 0
    vars(app).pop("now", None)
    gc.collect()  # the beats before it, whose shelves swallow whatever strikes when they end

    def trace(frame: Any, event: str, _arg: Any) -> Any:
        nonlocal lines
        if event == "line":
            lines += 1
            strikes.get(lines, int)()
        return trace if frame.f_code.co_filename in LOOP else None

    def begin(**_signal: Any) -> None:
        sys.settrace(trace)

    kept = {signum: signal.getsignal(signum) for signum in SIGNALS}
    Beat(app=app, quiet=True).install_sync_handler(service)
    beat_init.connect(begin)
    if whole:
        begin()
    try:
        with contextlib.suppress(SystemExit):
            service.start()
    finally:
        sys.settrace(None)
        beat_init.disconnect(begin)
        for signum, handler in kept.items():
            signal.signal(signum, handler)
    return lines


def errors_in(caplog: Any) -> list[str]:
    """What was logged as an error."""
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.fixture
def app(server) -> Celery:
    """An app with one entry, which is always due."""
    app = Celery("beats", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t", setnx_beat_lease=600, result_expires=None)
    app.conf.beat_schedule = {"every": {"task": "unknown", "schedule": 0.0}}
    app.finalize()
    return app


@pytest.fixture
def struck(app, locks, tmp_path, capfd, caplog) -> Callable[..., int]:
    """Runs a beat that is struck at these lines; it must end, say nothing, and lead no more."""
    runs = iter(range(10_000))

    def struck(strikes: dict[int, Callable[[], Any]], *, whole: bool = False) -> int:
        lines = hooked_beat(app, tmp_path / f"schedule{next(runs)}", strikes, whole=whole)
        assert (locks.get(LOCK), capfd.readouterr().err) == (None, ""), strikes
        assert errors_in(caplog) == [], strikes
        return lines

    return struck


# In these lines it is made, leads, and sends; then everything comes again. Every 15th, others in each run;
# BOUNDS=deep strikes at each.
LINES, EACH = 900, bound(15, deep=1)


@pytest.mark.parametrize(("how", "whole"), [(strike, True), (Dying, False)], ids=["raised", "swallowed"])
def test_signal_may_strike_at_any_line(struck, how, whole):
    """The beat ends without an error, and gives its lead back."""
    for line in range(1 + random.randrange(EACH), LINES, EACH):
        struck({line: how}, whole=whole)


def test_signal_may_strike_where_sending_makes_a_class(struck, monkeypatch):
    """As the first message that an app sends does."""
    sent = []

    def send_task(_app: Celery, name: str, *_args: Any, **_options: Any) -> None:
        sent.append(name)
        type("Made", (), {"named": Named()})

    monkeypatch.setattr(Celery, "send_task", send_task)
    struck({})
    assert sent == ["unknown"]


def test_entry_that_cannot_be_sent_is_told_though_the_beat_is_to_end(app, tmp_path, monkeypatch, caplog):
    """Only what an exit has caused is taken for one."""

    def send_task(*_arguments: Any, **_options: Any) -> None:
        Dying()
        raise OSError("the broker refuses it")

    monkeypatch.setattr(Celery, "send_task", send_task)
    hooked_beat(app, tmp_path / "schedule", {}, whole=False)
    (told,) = errors_in(caplog)
    assert "the broker refuses it" in told


def test_second_signal_may_strike_at_any_line_after_the_first(struck):
    """Also in the midst of closing, and of giving the lead back."""
    for first in random.sample(range(150, LINES), 6):
        last = struck({first: Dying})
        for second in random.sample(range(first + 1, last + 1), min(10, last - first)):
            struck({first: Dying, second: strike})


def pack_under_signals() -> None:
    """A signal in each of 300 ticks that have hiredis pack commands: an exit, or a note of it."""
    pack, beat = redis.Connection().pack_command, object.__new__(HotStandby)

    def tick() -> None:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(20e-6, 200e-6))
        while not beat._is_to_end:
            pack("LRANGE", "queue", 1_234_567, 1_234_567, 1_234_567)

    sys.settrace(None)  # what measures coverage does not give its own lock back when it is struck
    celery_setnx.beat._ENDING = (signal.SIGALRM,)
    signal.signal(signal.SIGALRM, lambda *_: sys.exit())
    noted = 0
    for _ in range(300):
        beat._is_to_end = False
        with contextlib.suppress(SystemExit):
            beat._undisturbed(tick)
            noted += 1
    assert 0 < noted < 300


def test_signal_may_strike_while_a_command_is_packed(tmp_path):
    """hiredis would crash: the tick goes on, and the loop ends after it."""
    code, said = forks.ended(tmp_path, pack_under_signals)
    assert code == 0, said


def beat(conf: dict[str, Any]) -> None:
    """What `celery beat` does, with its schedule file in this directory."""
    app = Celery("beats", set_as_current=False)
    app.conf.update(conf)
    Beat(app=app, scheduler=HOT_STANDBY, schedule="schedule", loglevel="INFO", quiet=True).run()


def test_two_hundred_stops_at_random_moments_end_with_code_0(server, locks, tmp_path):
    """A tick every 20 ms; SIGTERM or SIGINT: no error in any log, and no lock is left behind."""
    chance = random.Random()
    for batch in range(STOPS // SIDE_BY_SIDE):
        beats = {}
        for number in range(SIDE_BY_SIDE):
            directory = tmp_path / f"{batch}-{number}"
            directory.mkdir()
            conf = {
                "broker_url": server.url(0),
                "setnx_url": server.url(1),
                "setnx_prefix": f"t{number}",
                "setnx_beat_lease": 600,
                "task_default_queue": QUEUE,
                "beat_schedule": {"every": {"task": "unknown", "schedule": 0.02}},
            }
            beats[number] = forks.start(directory, beat, conf), directory
        for number, (process, directory) in beats.items():
            log = directory / forks.SAID
            wait_until(
                lambda log=log: log.exists() and "beat: Starting" in log.read_text(), f"start in {log}"
            )
            time.sleep(chance.uniform(0, WITHIN_S))
            os.kill(process.pid, SIGNALS[batch % 2])
            code, said = forks.end(process, directory)
            assert code == 0, said
            assert_clean(said)
            assert "Exception ignored" not in said
            assert locks.get(LOCK.replace("t:", f"t{number}:")) is None
