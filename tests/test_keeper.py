"""The keeper: what is renewed, when it stops, and how a loss is told."""

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import redis

from celery_setnx import LockLost, LockUnavailable, SetnxLock, threads
from celery_setnx.lock import keeper, verbs
from celery_setnx.lock.held import HeldLock
from celery_setnx.lock.keeper import Keeper, keeper_for_process
from tests.bounds import bound
from tests.harness import age, exit_code_of_fork, raising, wait_until

LEASE_S, THIRD_S = 30.0, 10.0


class Watch:
    """A keeper on a clock that the test moves, with locks of 30 s, and the losses that were told."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client
        self.now = 1000.0
        self.keeper = Keeper(self.clock)
        self.locks: list[HeldLock] = []
        self.losses: list[tuple[str, str]] = []

    def clock(self) -> float:
        return self.now

    def hold(self, name: str = "a", lease: float = LEASE_S, client: Any = None) -> HeldLock:
        """A held lock, not watched yet."""
        held = SetnxLock(client or self.client, name, lease=lease, clock=self.clock).acquire().lock
        assert held is not None
        self.locks.append(held)
        return held

    def tell(self, held: HeldLock, reason: str) -> None:
        self.losses.append((held.key, reason))

    def watch(self, held: HeldLock, **options: Any) -> HeldLock:
        self.keeper.watch(held, options.pop("tell", self.tell), **options)
        return held

    def wait_until_planned(self, held: HeldLock) -> None:
        """The keeper has read the clock after a renewal: else what passes then is lost to it."""
        wait_until(lambda: self.keeper._watched[held.token].due > self.now, "the next renewal is planned")

    def pass_time(self, seconds: float) -> None:
        """For the server, for the locks, and for the keeper, which looks what is due."""
        for key in {held.key for held in self.locks}:
            age(self.client, key, seconds)
        self.now += seconds
        self.keeper._wake.put(LEASE_S)

    def is_renewed(self, held: HeldLock) -> bool:
        """Also by the keeper's plan, which it makes after the reply: by its clock, which is the test's."""
        watched = self.keeper._watched.get(held.token)
        planned = watched is None or watched.due > self.now
        return held.remaining_s() > 0.98 * held.lease_s and planned

    def pass_leases(self, held: HeldLock, leases: int = 3) -> None:
        """So much time that without renewals the lock would be another's."""
        for _ in range(3 * leases):
            self.pass_time(THIRD_S)
            wait_until(lambda: self.is_renewed(held), f"{held.key} is renewed")
            assert not SetnxLock(self.client, held.key).acquire().acquired


@pytest.fixture
def watch(locks) -> Iterator[Watch]:
    """A keeper, and locks on the server of the tests."""
    watch = Watch(locks)
    yield watch
    for held in watch.locks:
        watch.keeper.forget(held)


@pytest.fixture
def renewals(monkeypatch, watch) -> list[int]:
    """How many locks this keeper has renewed each time."""
    sizes: list[int] = []
    renew_all = keeper.renew_all

    def counted(held: list[HeldLock], client: Any) -> Any:
        if held[0] in watch.locks:  # another test's keeper may be at work
            sizes.append(len(held))
        return renew_all(held, client)

    monkeypatch.setattr(keeper, "renew_all", counted)
    return sizes


def test_watched_lock_outlives_its_lease(locks, watch):
    """Many leases later it is still ours; forgotten, it ends."""
    lock = watch.watch(watch.hold())
    watch.pass_leases(lock)
    assert watch.keeper.forget(lock)
    watch.pass_time(LEASE_S)
    assert SetnxLock(locks, "a").acquire().acquired
    assert watch.losses == []


def busy_for_ms() -> None:
    """What keeps other threads from their turn: each wakes too late for a call that takes a microsecond."""
    for _ in range(20_000):
        pass
    os.path.exists("nowhere")


@pytest.mark.clock  # the lease is one of real time
def test_body_that_asks_its_lock_lets_the_keeper_have_its_turn(locks):
    """Without that a body lost its lock that never waits, and computes between brief system calls."""
    held = SetnxLock(locks, "a", lease=1.0).acquire().lock
    assert held is not None
    keeper_for_process(time.monotonic).watch(held, lambda *_lost: None)
    give_up = time.monotonic() + 3.0
    while time.monotonic() < give_up:
        busy_for_ms()
        held.ensure()
    assert keeper_for_process(time.monotonic).forget(held)
    assert held.release() == "released"


def test_many_locks_are_renewed_in_few_round_trips(watch, renewals):
    """All that are due go in one pipeline: connections and packets do not grow with the locks."""
    many = [watch.watch(watch.hold(f"lock-{n}")) for n in range(200)]
    watch.pass_time(THIRD_S)
    wait_until(lambda: all(watch.is_renewed(lock) for lock in many), "all are renewed")
    assert renewals == [200]


def test_short_locks_cost_no_renewal(watch, renewals):
    """A lock that is released before a third of its lease is never renewed."""
    for _ in range(20):
        lock = watch.watch(watch.hold("short"))
        watch.pass_time(THIRD_S - 0.1)
        watch.keeper.forget(lock)
        lock.release()
        watch.locks.clear()
    watch.pass_leases(watch.watch(watch.hold()), leases=1)
    assert renewals == [1, 1, 1]


def test_vanished_lock_is_told_once(locks, watch):
    """The loss is told once, and the lock is watched no more."""
    lock = watch.watch(watch.hold())
    locks.delete("a")
    watch.pass_time(THIRD_S)
    wait_until(lambda: watch.losses, "told")
    assert not watch.keeper.forget(lock)
    assert watch.losses == [("a", "its key has vanished from Redis (deleted, evicted, or the data was lost)")]
    assert lock.lost == watch.losses[0][1]


@pytest.mark.parametrize("trouble", ["refused", "silent"])
def test_dead_server_is_a_loss_at_the_deadline(proxy, watch, far, trouble, caplog):
    """Without an answer for a whole lease the lock is lost, and told so once; the trouble is logged once."""
    client = far(socket_timeout=1 if trouble == "silent" else 20)
    lock = watch.watch(watch.hold(client=client))
    with proxy.black_hole() if trouble == "silent" else nullcontext(proxy.close()):
        watch.pass_time(THIRD_S)
        wait_until(lambda: "renewal is tried again" in caplog.text, "a renewal fails")
        assert watch.losses == []
        lock.ensure()
        watch.pass_time(2 * THIRD_S)
        wait_until(lambda: watch.losses, "the lease ends")
    assert watch.losses == [("a", "Redis could not be reached for a whole lease of 30 s")]
    assert caplog.text.count("renewal is tried again") == 1
    assert not watch.keeper.forget(lock)
    with pytest.raises(LockLost):
        lock.ensure()


@pytest.mark.parametrize("trouble", ["cut", "bug", "forbidden"])
def test_failed_renewal_is_tried_again_while_the_lease_lasts(proxy, watch, far, trouble, monkeypatch, caplog):
    """It is no loss: where the server answers again in time, what nobody foresaw, what is refused."""
    lock = watch.watch(watch.hold(client=far()))
    with monkeypatch.context() as faulty:
        if trouble == "bug":
            faulty.setattr(keeper, "renew_all", lambda *_: 1 / 0)
        renewal = verbs.RENEW.sha.encode()
        faults = {
            "cut": lambda: proxy.fault("cut_before", containing=renewal),
            "bug": nullcontext,
            "forbidden": lambda: proxy.fault("answer", containing=renewal, reply=b"-NOPERM not allowed\r\n"),
        }
        with faults[trouble]():
            watch.pass_time(THIRD_S)
            said = "Renewing 1 leases failed" if trouble == "bug" else "renewal is tried again"
            wait_until(lambda: said in caplog.text, "a renewal fails")
            watch.wait_until_planned(lock)
    assert 0 < lock.remaining_s() < 20
    watch.pass_time(LEASE_S / 20)
    wait_until(lambda: watch.is_renewed(lock), "a renewal succeeds")
    watch.pass_leases(lock, leases=1)
    assert watch.losses == []


@pytest.mark.parametrize("verb", ["acquire", "renew"])
def test_keeper_after_a_slow_reply_renews_before_the_deadline(proxy, watch, far, verb):
    """A reply that took three quarters of the lease costs one renewal's time, not the lock."""
    client = far()
    watch.hold(client=client).renew()  # from now on the server knows both scripts
    watch.client.delete("a", "{a}:holder")
    script = {"acquire": verbs.ACQUIRE, "renew": verbs.RENEW}[verb].sha.encode()
    slow = {"containing": script, "meanwhile": lambda: watch.pass_time(22.5)}
    if verb == "acquire":
        with proxy.fault("delay_reply", **slow):
            lock = watch.watch(watch.hold(client=client))
    else:
        lock = watch.watch(watch.hold(client=client))
        with proxy.fault("delay_reply", **slow):
            watch.pass_time(THIRD_S)
            wait_until(lambda: 7 < lock.remaining_s() < 8, "the reply")
            watch.wait_until_planned(lock)
    assert 7 < lock.remaining_s() < 8
    watch.pass_time(4)
    wait_until(lambda: watch.is_renewed(lock), "the next renewal")
    watch.pass_leases(lock, leases=1)
    assert watch.losses == []
    assert watch.keeper.forget(lock)
    assert lock.release() == "released"


def test_at_most_for_lets_the_lease_run_out(watch):
    """Renewal stops after at_most_for, and the end of the lease is told."""
    lock = watch.watch(watch.hold(), at_most_for=15)
    watch.pass_time(THIRD_S)
    wait_until(lambda: watch.is_renewed(lock), "it is renewed")
    watch.pass_time(THIRD_S)
    assert watch.losses == []
    watch.pass_time(2 * THIRD_S)
    wait_until(lambda: watch.losses, "told")
    assert watch.losses == [("a", "its at_most_for is over, and its lease has ended")]


def test_failing_listener_does_not_stop_the_keeper(locks, watch, caplog):
    """An error in on_lost is logged; other locks are renewed all the same, and no more is told."""
    told = []

    def failing(held: Any, _reason: str) -> None:
        told.append(held.key)
        raise ZeroDivisionError

    watch.watch(watch.hold("doomed"), tell=failing)
    kept = watch.watch(watch.hold("kept"), tell=failing)
    locks.delete("doomed")
    watch.pass_leases(kept)
    wait_until(lambda: "The loss of doomed could not be reported" in caplog.text, "it is logged")
    assert told == ["doomed"]


def test_listener_that_exits_ends_no_thread(locks, watch, caplog):
    """`sys.exit()` in a receiver: whoever is told after it is told."""
    told = []

    def exiting(held: Any, _reason: str) -> None:
        told.append(held.key)
        raise SystemExit

    for name in ("a", "b"):
        watch.watch(watch.hold(name), tell=exiting)
        locks.delete(name)
        watch.pass_time(THIRD_S)
        wait_until(lambda name=name: told[-1:] == [name], "told")
    assert "A late release, or a report of a lost lock, failed." in caplog.text


def raising_filter(_record: logging.LogRecord) -> bool:
    """As one that needs a task, where none runs in this thread."""
    raise AttributeError("no current task")


def test_filter_that_raises_ends_no_renewal(proxy, watch, far, capfd):
    """The keeper tells of its trouble, and cannot: it renews all the same."""
    logger = logging.getLogger("celery_setnx")
    lock = watch.watch(watch.hold(client=far()))
    logger.addFilter(raising_filter)
    try:
        with proxy.fault("cut_before", containing=verbs.RENEW.sha.encode()):
            watch.pass_time(THIRD_S)
            wait_until(lambda: watch.keeper._watched[lock.token].failing, "a renewal fails")
            watch.wait_until_planned(lock)
        watch.pass_time(LEASE_S / 20)
        wait_until(lambda: watch.is_renewed(lock), "a renewal succeeds")
        watch.pass_leases(lock)
    finally:
        logger.removeFilter(raising_filter)
    assert watch.losses == []
    wait_until(lambda: "renewal is tried again" in capfd.readouterr().err, "it is printed")


def test_handler_that_hangs_holds_up_no_renewal(proxy, watch, far):
    """As one that sends to a log server which stands still: the keeper leaves its lines to another thread."""
    hangs, go_on = threading.Event(), threading.Event()

    class Hanging(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            hangs.set()
            go_on.wait(60)

    logger, handler = logging.getLogger("celery_setnx"), Hanging()
    lock = watch.watch(watch.hold(client=far()))
    logger.addHandler(handler)
    try:
        with proxy.fault("cut_before", containing=verbs.RENEW.sha.encode()):
            watch.pass_time(THIRD_S)
            assert hangs.wait(60)
            watch.wait_until_planned(lock)
        watch.pass_time(LEASE_S / 20)
        wait_until(lambda: watch.is_renewed(lock), "a renewal succeeds")
        watch.pass_leases(lock)
    finally:
        go_on.set()
        logger.removeHandler(handler)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_keeper_that_has_died_is_started_anew(watch, monkeypatch, caplog):
    """With the next lock; and those that it had are renewed again."""
    first = watch.watch(watch.hold("first"))
    wait_until(lambda: watch.keeper._wakes_at > watch.now, "it sleeps")
    with monkeypatch.context() as deadly:
        deadly.setattr(threads, "is_killed", lambda error: True)
        deadly.setattr(watch.keeper, "_sleep", raising(ZeroDivisionError))
        watch.keeper._wake.put(LEASE_S)
        wait_until(lambda: not watch.keeper._thread.runs, "it has died")
    second = watch.watch(watch.hold("second"))
    wait_until(lambda: "celery_setnx-keeper had died and is restarted" in caplog.text, "it is said")
    for _ in range(3):
        watch.pass_time(THIRD_S)
        wait_until(lambda: watch.is_renewed(first) and watch.is_renewed(second), "both are renewed")


def test_slow_listener_holds_up_no_renewal(locks, watch):
    """Whoever is told of a loss, and pages somebody: other locks are renewed meanwhile."""
    told, go_on = threading.Event(), threading.Event()

    def slow(_held: Any, _reason: str) -> None:
        told.set()
        go_on.wait(60)

    watch.watch(watch.hold("doomed"), tell=slow)
    kept = watch.watch(watch.hold("kept"))
    locks.delete("doomed")
    watch.pass_time(THIRD_S)
    assert told.wait(60)
    wait_until(lambda: watch.is_renewed(kept), "the other is renewed")
    watch.pass_leases(kept)
    go_on.set()
    assert watch.losses == []


def test_lock_is_renewed_no_more_when_its_owner_is_gone(locks, watch, caplog):
    """Nobody is left who would forget it: an exception may strike anywhere on the way out."""

    class Owner:
        def told(self, held: HeldLock, reason: str) -> None:
            raise AssertionError(reason)

    owner = Owner()
    lock = watch.watch(watch.hold(), tell=owner.told)
    watch.pass_leases(lock, leases=1)
    del owner
    watch.pass_time(THIRD_S)
    said = f"Token {lock.token} has ended without releasing a."
    wait_until(lambda: said in caplog.text, "it is given up")
    assert not watch.keeper._watched
    watch.pass_time(LEASE_S)
    assert SetnxLock(locks, "a").acquire().acquired


def errand(runs: list[str], name: str, fails: int, error: Exception) -> Callable[[], None]:
    """What notes its runs, and raises so often."""

    def run() -> None:
        runs.append(name)
        if runs.count(name) <= fails:
            raise error

    return run


def test_errand_that_is_alone_is_run_again_until_it_succeeds(watch):
    """A release that failed, while the process has nothing else to do that would wake the thread."""
    runs: list[str] = []
    watch.keeper.try_again(errand(runs, "a", 2, LockUnavailable("a", "gone away")), until=watch.now + 30)
    wait_until(lambda: runs == ["a"] * 2, "it is run again")
    watch.now += keeper._AGAIN_S
    wait_until(lambda: runs == ["a"] * 3, "it succeeds")


def test_errand_is_run_again_once_a_second_however_many_there_are(watch):
    """What fails is not run again with each of the others: a server that is away takes a timeout for each."""
    runs: list[str] = []
    away = LockUnavailable("a", "gone away")
    many = [f"{n}" for n in range(20)]
    for name in many:
        watch.keeper.try_again(errand(runs, name, 99, away), until=watch.now + 30)
    wait_until(lambda: set(runs) == set(many), "each has been run")
    assert len(runs) <= 2 * len(many)


def test_errand_that_is_too_late_or_broken_is_not_run_again(watch, caplog):
    """A lease that has ended has done it; whatever else than Redis raised is logged."""
    caplog.set_level("INFO")
    runs: list[str] = []
    away = LockUnavailable("a", "gone away")
    watch.keeper.try_again(errand(runs, "late", 99, away), until=watch.now)
    watch.keeper.try_again(errand(runs, "broken", 99, ZeroDivisionError()), until=watch.now + 30)
    watch.keeper.try_again(errand(runs, "again", 1, away), until=watch.now + 30)
    wait_until(lambda: runs.count("again") == 2, "what failed is run again")
    assert "It is not tried again, because the lease has ended: Redis does not serve the lock" in caplog.text
    assert "A late release, or a report of a lost lock, failed." in caplog.text
    assert (runs.count("late"), runs.count("broken")) == (1, 1)


@pytest.mark.clock  # the keeper sleeps for a second of the three that the near lock has
def test_idle_keeper_wakes_for_a_new_lock(watch):
    """A keeper that waits for a far renewal wakes earlier for a short lease."""
    watch.watch(watch.hold("far", lease=6000))
    wait_until(lambda: watch.keeper._wakes_at > watch.now + 1000, "it sleeps")
    near = watch.watch(watch.hold("near", lease=3))
    watch.now += 1.5  # of which nobody tells the keeper
    wait_until(lambda: watch.is_renewed(near), "it is renewed")
    assert watch.losses == []


def test_stream_of_short_tasks_does_not_wake_an_idle_keeper_for_each(locks, monkeypatch):
    """Locks that are forgotten before the thread looks: a wake-up each would cost as much as they do."""
    sleeps: list[float] = []
    sleep = Keeper._sleep

    def counted(one: Keeper, seconds: float) -> float | None:
        if one is keeper:  # another test's may be at work
            sleeps.append(seconds)
        return sleep(one, seconds)

    keeper = Keeper(time.monotonic)
    monkeypatch.setattr(Keeper, "_sleep", counted)

    def run(lease: float) -> None:
        lock = SetnxLock(locks, "short", lease=lease).acquire().lock
        keeper.watch(lock, lambda *_: None)
        keeper.forget(lock)
        lock.release()

    run(lease=1)
    wait_until(lambda: sleeps[-1:] == [float("inf")], "asleep until it is woken")
    known = len(sleeps)
    runs = bound(300, full=1_000)
    for _ in range(runs):
        run(lease=60)
    assert len(sleeps) - known < runs / 2  # one, but for what comes before the thread gets a processor


def test_process_has_one_keeper_and_a_fork_its_own():
    """Threads do not survive a fork, so a child must not inherit the keeper."""
    keeper = keeper_for_process(time.monotonic)
    assert keeper_for_process(time.monotonic) is keeper
    assert exit_code_of_fork(lambda: keeper_for_process(time.monotonic) is keeper) == 0


def test_keeper_runs_in_one_daemon_thread(watch):
    """One thread however many locks, and it does not keep the process alive."""
    before = set(threading.enumerate())
    for number in range(5):
        watch.watch(watch.hold(f"n{number}"))
    (thread,) = [t for t in threading.enumerate() if t not in before and t.name == "celery_setnx-keeper"]
    assert thread.daemon
