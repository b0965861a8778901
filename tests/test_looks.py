"""Timed looks: a line with a rate goes on at its pace though no worker sweeps.

In the simulation the scripts are real, and no time passes but the test's: how long things take is said here.
"""

import heapq
import itertools
import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from celery import Celery
from celery.app.task import Context

from celery_setnx import LockUnavailable, SetnxLock, SingletonTask
from celery_setnx.call import ended, wake
from celery_setnx.call.message import Call
from celery_setnx.call.wake import give_turns, lines_of
from celery_setnx.configured import configured
from celery_setnx.connection import client_for
from celery_setnx.lock.line import SOON_S, LineEntry, note_due, park
from celery_setnx.lock.lock import AHEAD_S
from celery_setnx.lock.names import starts_name
from celery_setnx.lock.record import ORIGINAL, Terms, task_token
from celery_setnx.lock.verbs import Caller, serve
from celery_setnx.run import looks, sweep
from celery_setnx.run.attempt import Attempt
from celery_setnx.run.looks import EARLIEST_S, SweepReport, TimedLooks
from celery_setnx.run.run import run
from celery_setnx.run.sweep import Sweep
from celery_setnx.signals import lock_conflict, lock_taken_over
from tests.conftest import LOCK_DB
from tests.harness import age, end_looks, raising, wait_until
from tests.model.injected import ServerClock

# When to look


@pytest.fixture
def now(monkeypatch) -> list[float]:
    """The time, which passes when somebody waits for it."""
    now = [100.0]
    monkeypatch.setattr(looks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def stepped(look: Callable[[bool], SweepReport], now: list[float]) -> TimedLooks:
    """Looks whose thread is the test."""
    timed = TimedLooks(look)

    def wait(seconds: float | None) -> bool:
        now[0] += math.inf if seconds is None else seconds
        return False

    timed._changed = SimpleNamespace(set=lambda: None, clear=lambda: None, wait=wait)  # type: ignore[assignment]
    timed._stopped = SimpleNamespace(is_set=lambda: False, wait=wait)  # type: ignore[assignment]
    timed._thread = SimpleNamespace(runs=True)  # type: ignore[assignment]
    return timed


def looked_at(now: list[float], *said: SweepReport, within: float | None = None) -> list[float]:
    """When somebody looks until nobody does any more, and what he is told; a delivery has just ended, unless
    a sweep says when to look.
    """
    replies, at = iter(said), []
    began = now[0]

    def look() -> SweepReport:
        at.append(round(now[0] - began, 6))
        return next(replies, SweepReport(0, None))

    timed = stepped(look, now)
    if within is None:
        timed.soon()
    else:
        timed.within(within)
    while timed._left_s() < math.inf:
        timed._turn()
    return at


def test_look_follows_the_end_of_a_delivery_and_then_the_time_that_redis_says(now):
    """Nothing was due at the end; then a line was served, and is due again."""
    assert looked_at(now, SweepReport(0, 0.3), SweepReport(1, 0.5), SweepReport(1, None)) == [0, 0.3, 0.8]


def test_look_follows_when_a_sweep_says(now):
    """Where nobody comes any more, and all wait."""
    assert looked_at(now, SweepReport(1, None), within=1.5) == [1.5]


def test_sweep_that_says_a_later_time_leaves_a_look_the_sooner_one(now, monkeypatch):
    """Also if it is said while the sweep reads its clock."""
    timed = stepped(lambda: SweepReport(0, None), now)

    def read() -> float:
        monkeypatch.setattr(looks, "time", SimpleNamespace(monotonic=lambda: now[0]))
        timed.within(0.3)
        return now[0]

    monkeypatch.setattr(looks, "time", SimpleNamespace(monotonic=read))
    timed.within(1.5)
    assert timed._left_s() == pytest.approx(0.3)


def test_each_line_is_looked_at_when_it_is_due(now):
    """A look at one leaves the later ones theirs, also if it finds nothing: another worker has looked."""
    looked: list[float] = []

    def look() -> SweepReport:
        looked.append(round(now[0] - 100.0, 6))
        return SweepReport(0, None)

    timed = stepped(look, now)
    for within in (1.5, 0.3, 0.9, 0.3):
        timed.within(within)
    while timed._left_s() < math.inf:
        timed._turn()
    assert looked == [0.3, 0.9, 1.5]


def test_what_is_due_in_two_seconds_is_left_to_a_sweep(now):
    """By whichever worker: one would have the line for itself, and may not know its holder dead."""
    timed = stepped(lambda: SweepReport(1, None), now)
    timed.within(SOON_S)
    assert timed._left_s() == math.inf
    timed.within(SOON_S - 0.01)
    assert timed._left_s() == pytest.approx(SOON_S - 0.01)


def test_looks_are_no_closer_than_a_moment(now):
    """However often deliveries end, and whatever Redis says."""
    assert looked_at(now, SweepReport(1, 0.0), SweepReport(1, 0.001)) == [0, EARLIEST_S, 2 * EARLIEST_S]


def test_look_that_fails_is_left_to_the_sweep(now):
    """And for two seconds no look follows, whose deliveries end meanwhile."""
    looked: list[float] = []

    def look() -> SweepReport:
        looked.append(now[0])
        raise LockUnavailable("k", "away")

    timed = stepped(look, now)
    for _ in range(2):
        timed.soon()
        timed._turn()
        assert timed._left_s() == math.inf
    assert looked == [100.0, 102.0]


def test_thread_looks_when_it_is_told_and_ends_when_it_is_told():
    """It starts with the first that it is told."""
    looked = threading.Event()

    def look() -> SweepReport:
        looked.set()
        return SweepReport(0, None)

    timed = TimedLooks(look)
    assert not timed._thread.runs
    timed.soon()
    assert looked.wait(30)
    timed.stop()
    wait_until(lambda: not timed._thread.runs, "the thread ends")
    timed.soon()
    assert not timed._thread.runs


# What a look leaves to the sweep


class Bills:
    """A worker with a task that has a rate, whose lock others have; a look and a sweep are calls."""

    def __init__(self, server: Any, locks: Any) -> None:
        self.app = app = Celery("bills", broker="memory://", backend="cache+memory://", set_as_current=False)
        app.conf.update(setnx_url=server.url(LOCK_DB), setnx_prefix="t")
        options = {"rate": (1000, 1), "lease": 60}
        self.task = app.task(base=SingletonTask, shared=False, name="bill", singleton=options)(ahead)
        app.finalize()
        self.step = Sweep(SimpleNamespace(app=app))
        self.step._client, self.step._state = client_for(app), configured(app)
        self.step._wait_s = 0.0
        self.locks, self.key = locks, self.task.lock_key()

    def wait(self, *task_ids: str) -> None:
        """Calls wait in line."""
        for place, task_id in enumerate(task_ids, 1):
            terms = self.task._guard.options.terms
            park(
                self.locks,
                LineEntry(self.key, task_id, 0, 600, terms=terms),
                copy=ORIGINAL,
                since=place,
                call="c",
            )

    def hold(self, task_id: str) -> Any:
        """A call has the lock."""
        lock = SetnxLock(self.locks, self.key, lease=60, line=True, rate=(1000, 1.0))
        return lock.acquire(token=task_token(task_id, 0, "0a")).lock

    def due(self) -> None:
        """It is time to look at the line."""
        note_due(self.locks, lines_of(self.app), "bill", self.key, within=0.0)

    def look(self) -> SweepReport:
        """A look finds the line due."""
        self.due()
        return self.step._look(self.app)


@pytest.fixture
def bills(server, locks, clock, monkeypatch) -> Iterator[Bills]:
    """A worker whose wake-ups are noted."""
    bills = Bills(server, locks)
    bills.woken = []
    monkeypatch.setattr(wake, "wake", lambda _app, heir, _key: bills.woken.append(heir and heir.task_id))
    yield bills
    end_looks(bills.step)


def test_look_asks_no_result_backend_and_the_sweep_does(bills, monkeypatch):
    """The lock is held for a retry which may have run: the backend may be slow, and looks go on meanwhile."""
    asked: list[str] = []

    def stored_end(_app: Celery, _name: str, task_id: str) -> dict[str, Any]:
        asked.append(task_id)
        return {"status": "SUCCESS"}

    monkeypatch.setattr(ended, "stored_end", stored_end)
    bills.hold("retried").hold(3600)
    bills.wait("id-1")
    for _ in range(3):
        assert bills.look().lines == 1
    assert (asked, bills.woken) == ([], [None] * 3)
    assert not bills.step._roused.is_set()
    assert bills.step._turn(bills.app)
    assert (asked, bills.woken) == (["retried"], [None] * 3 + ["id-1"])
    bills.step._wait_s = 0.0
    assert bills.step._turn(bills.app)
    assert asked == ["retried"]


def test_call_that_another_worker_is_to_send_has_no_look_here(bills, monkeypatch):
    """This one would come first each time, and send nothing."""
    monkeypatch.setattr(sweep, "send_from_line", lambda *_told: 0.5)
    note_due(bills.locks, lines_of(bills.app), "bill", f"{bills.key}\nid-1", within=0.0)
    report = bills.step._look(bills.app)
    assert (report.lines, report.next_s) == (1, None)


def test_receivers_of_a_take_over_run_in_no_look(bills, monkeypatch):
    """Whoever hears of it may take his time: a look leaves that call to the sweep, and hands on the next."""
    monkeypatch.undo()
    told: list[Any] = []
    monkeypatch.setattr(wake, "_send", lambda _app, heir, *_call: told.append(heir.task_id))
    monkeypatch.setattr(wake, "_from_line", lambda _text, _id, _key: (Call("bill", "id-1"), ""))
    monkeypatch.setattr(wake, "_of_its_line", lambda _app, _text: ())

    def hears(task_id: str, **_told: Any) -> None:
        told.append(("taken over for", task_id))

    lock_taken_over.connect(hears)
    try:
        bills.hold("dead")
        bills.wait("id-1")
        age(bills.locks, bills.key, 61)
        bills.look()
        assert told == []
        assert bills.step._roused.is_set()  # the sweep waits no longer
        bills.step._turn(bills.app)
    finally:
        lock_taken_over.disconnect(hears)
    assert told == [("taken over for", "id-1"), "id-1"]


def test_worker_that_stops_does_what_a_look_has_left(bills):
    """Else that call would wait until its permit is passed on."""
    bills.hold("dead")
    bills.wait("id-1")
    age(bills.locks, bills.key, 61)
    bills.look()
    assert bills.woken == []
    bills.step.stop(None)
    assert bills.woken == ["id-1"]


def test_what_a_look_has_left_stops_no_sweep(bills, caplog):
    """The lock server may be away, or whatever it is."""
    caplog.set_level("INFO")
    bills.step._left_by_looks["t:{other}", ""] = raising(LockUnavailable("t:{other}", "away"))
    bills.due()
    assert bills.step._turn(bills.app)
    assert "The line of t:{other} was not served after a look" in caplog.text
    assert bills.woken == [None]


# The pace

WAKE_S = 0.006  # a wake-up is on its way, until its call asks for its lock
TOLD_S = 0.004  # a delivery has ended, until the worker's parent knows
BODY_S = 0.002


@pytest.fixture
def app(server, locks) -> Celery:
    """An app with a task whose rate a test chooses."""
    app = Celery("looked", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(1), setnx_prefix="t")
    app.finalize()
    return app


class Workers:
    """Workers of one line, which never sweep; calls are woken in turn by one after the other."""

    def __init__(self, app: Celery, locks: Any, clock: ServerClock, now: list[float], count: int) -> None:
        self.app, self.locks, self.clock, self.now = app, locks, clock, now
        self.task = app.tasks["t"]
        self.key = self.task.lock_key()
        self.starts: list[int] = []  # us
        self.count_of_looks = 0
        self._to_come: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self.steps = [self._step() for _ in range(count)]

    def _step(self) -> Sweep:
        step = Sweep(SimpleNamespace(app=self.app))
        step._client, step._state = client_for(self.app), configured(self.app)
        step._looks._thread = SimpleNamespace(runs=True)  # type: ignore[assignment]
        look = step._looks._look

        def counted() -> SweepReport:
            self.count_of_looks += 1
            return look()

        step._looks._look = counted
        return step

    def lock(self) -> SetnxLock:
        """The task's lock, as one of its calls has it."""
        options = self.task._guard.options
        about: Any = {"limit": options.limit, "rate": options.rate}
        return SetnxLock(self.locks, self.key, lease=60, line=True, **about)

    def after(self, seconds: float, what: Callable[[], None]) -> None:
        """So much later something happens."""
        heapq.heappush(self._to_come, (self.now[0] + seconds, next(self._number), what))

    def ask(self, task_id: str, worker: Sweep) -> None:
        """A call asks for its lock; ahead of its start once more, in its slot."""
        lock = self.lock()
        outcome = lock.acquire(token=task_token(task_id, 0, "0a"), caller=Caller(copy="c"))
        if outcome.lock is None:
            assert outcome.paced
            assert outcome.remaining_s is not None
            assert outcome.remaining_s <= AHEAD_S
            self.after(outcome.remaining_s, lambda: self.ask(task_id, worker))
            return
        held = outcome.lock
        self.starts.append(held.fence)

        def end() -> None:
            held.release(at_least_for=self.task._guard.options.at_least_for)
            give_turns(self.app, "t", lock)
            self.after(TOLD_S, worker._looks.soon)

        self.after(BODY_S, end)

    def woken(self, heir: Any) -> None:
        """A call is sent, to the next of the workers."""
        if heir is not None:
            worker = self.steps[len(self.starts) % len(self.steps)]
            self.after(WAKE_S, lambda: self.ask(heir.task_id, worker))

    def run(self, count: int) -> None:
        """Let time pass until so many calls have started."""
        while len(self.starts) < count:
            timed = min(self.steps, key=lambda step: step._looks._left_s())._looks
            looks_at = max(self.now[0] + timed._left_s(), timed._earliest_at)
            comes_at = self._to_come[0][0] if self._to_come else math.inf
            assert min(looks_at, comes_at) < math.inf, f"nobody looks, and {len(self.starts)} have started"
            self.now[0] = max(self.now[0], min(looks_at, comes_at))
            self.clock.set(self.now[0])
            if comes_at <= looks_at:
                heapq.heappop(self._to_come)[2]()
            else:
                timed._turn()


@pytest.mark.parametrize(
    ("count", "options", "starts", "period_s"),
    [
        pytest.param(1, {"rate": (1, 0.1)}, 1, 0.1, id="ten a second, one worker"),
        pytest.param(4, {"rate": (1, 0.05)}, 1, 0.05, id="twenty a second"),
        pytest.param(4, {"rate": (1, 1)}, 1, 1.0, id="one a second"),
        pytest.param(4, {"rate": (10, 1), "limit": 5}, 10, 1.0, id="ten in a second"),
        pytest.param(1, {"rate": (100, 10), "at_least_for": 0.5}, 1, 0.5, id="at_least_for, one worker"),
    ],
)
def test_line_goes_on_at_its_pace_without_a_sweep(
    app, locks, clock, monkeypatch, now, count, options, starts, period_s
):
    """At 95 % of it, and never above; and nobody polls."""

    @app.task(base=SingletonTask, shared=False, name="t", singleton={"lease": 60, **options})
    def t() -> None: ...

    clock.set(now[0])
    workers = Workers(app, locks, clock, now, count)
    monkeypatch.setattr(wake, "wake", lambda _app, heir, _key: workers.woken(heir))
    locks.zadd(starts_name(workers.key), {"0#0#0": 0})
    locks.expire(starts_name(workers.key), 600)  # the server's own clock goes on
    terms = Terms(options.get("limit", 1), *options["rate"])
    calls = [f"id-{number:03}" for number in range(61)]
    for place, task_id in enumerate(calls):
        park(
            locks,
            LineEntry(workers.key, task_id, 0, 600, terms=terms),
            copy=ORIGINAL,
            since=1.0 + place,
            call="c",
        )
    note_due(locks, lines_of(app), "t", workers.key, within=0.0)
    workers.steps[0]._looks.soon()  # the last that has parked
    workers.run(len(calls))
    found, period_us = workers.starts, round(period_s * 1e6)
    assert all(later - at >= period_us for at, later in zip(found, found[starts:]))
    pace = (len(calls) - 1) // starts * period_us / (found[-1] - found[0])
    looks_per_call = workers.count_of_looks / len(calls)
    print(f"{pace:.1%} of the pace, {looks_per_call:.1f} looks per call")
    assert pace >= 0.95
    assert looks_per_call <= 5


def ahead() -> None:
    """Nothing."""


def waits_first(conflict: Any) -> Any:
    """A policy of one's own, which a call that has waited must not meet again for its own permit."""
    return conflict.skip() if conflict.waits else conflict.wait()


@pytest.mark.parametrize("policy", ["auto", waits_first], ids=["auto", "callable"])
@pytest.mark.parametrize(
    "task_id", ["2c5a0a9e-8d3e-4a0c-9d0e-5a4a8f6f2b11", "nightly"], ids=["random", "own"]
)
def test_call_that_is_woken_ahead_of_its_start_waits_for_it_in_its_slot(server, locks, policy, task_id):
    """It meets no conflict, whatever its policy is, and whoever gave it its id."""
    app = Celery("ahead", broker="memory://", set_as_current=False)
    app.conf.update(setnx_url=server.url(LOCK_DB), setnx_prefix="t")
    options = {"rate": (1, 1), "on_conflict": policy, "lease": 60}
    task = app.task(base=SingletonTask, shared=False, name="ahead", singleton=options)(ahead)
    key, (seconds, us) = task.lock_key(), locks.time()
    last_us = seconds * 1_000_000 + us - 985_000  # the next start is allowed in 15 ms
    locks.zadd(starts_name(key), {f"{last_us}#0#1": last_us})
    locks.expire(starts_name(key), 60)
    call = Call("ahead", task_id, 0, key, copy="c1", waits=1, since=last_us / 1e6, has_header=True)
    place = replace(call.place(600), terms=Terms(1, 1, 1))
    park(locks, place, copy="-x", since=1.0, call="c")
    assert serve(SetnxLock(locks, key, lease=60, line=True, rate=(1, 1.0)), knows_terms=True).heir is not None
    context = Context(
        id=task_id, task="ahead", args=[], kwargs={}, called_directly=False, **call.as_headers()
    )
    met: list[Any] = []

    def meets(**told: Any) -> None:
        met.append(told)

    lock_conflict.connect(meets)
    task.request_stack.push(context)
    try:
        assert run(Attempt(task, task._guard, context, (), {}), lambda: "ran") == "ran"
    finally:
        task.request_stack.pop()
        lock_conflict.disconnect(meets)
    assert met == []
    assert locks.zcard(starts_name(key)) == 2
